"""Replace each opaque quantizer node by QuantizeLinear and DequantizeLinear.

The replacement is exact. With the scale s, the zero point z and the codes lo to hi:

* QuantizeLinear is saturate(rint(x / s) + z) and DequantizeLinear (q - z) * s, both in float32: `Arithmetic.DIVIDE`.
* If a format has fewer codes than its element type, or ONNX Runtime would overflow, x is first clipped to
  (lo - z) * s and (hi - z) * s. Both are within one part in 2**23 of a multiple of s below 2**17, so they round to lo
  and hi, and rounding is monotonic.
* `Arithmetic.RECIPROCAL` is a product with 1 / s, a QuantizeLinear of scale 1 and a DequantizeLinear of scale s.
* float16 and bfloat16 are cast to float32 before and back afterwards.
* In the portable style float8 is enclosed by two Sums of one tensor, which change nothing: see `Encoding.guarded`.

* Quantizers of one tensor share their nodes if their scales and zero points are equal.
* If blocks divide an axis, Gather repeats the scales so that they broadcast with x in a product or a bound.
* `export.loops` has the formats that ONNX Runtime cannot store and computes scales from the tensor. `export.trt` has
  scales with their own format and the operators that only TensorRT's parser reads.

There is one exception: integers and floats of 4 and 6 bits have no code for NaN. ONNX Runtime returns the lowest
integer, while torch keeps NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ExportError
from fakequant.export import loops, trt
from fakequant.export.capability import Parameters, SiteRecord, Style, check_scale, digest, overflows
from fakequant.export.inputs import GraphEditor, inner_graphs, names_read, stored, stored_codes
from fakequant.export.loops import lower_scale
from fakequant.export.trace import DOMAIN, SCALE_OPERATOR, path_of, place
from fakequant.export.trt import EmittedSite, ScaleNames, computed_scale, constant_scale
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops import library
from fakequant.text import module_name

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_CLIPS = ("Clip", "Relu")
_BEFORE_CLIPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
"""Operators whose results need no Clip in front of a quantizer whose codes end at the same bounds.

QNN starts no file with a Clip other than ReLU6 between a product and its quantizer; also not with ReLU6 if the product
has a bias and three or more axes, because ONNX Runtime puts a Reshape between them. A Clip behind a quantizer stays,
because QNN starts no file where two quantizers follow each other.
"""
_MOVES = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "MaxPool")
_LARGEST = float(np.finfo(np.float32).max)


def lower(
    model: ModelProto,
    dynamic: frozenset[str] = frozenset(),
    style: Style = Style.PORTABLE,
    codes: Mapping[str, Tensor] | None = None,
) -> list[SiteRecord]:
    """Replace all fakequant nodes of a model in place, store constant weights as codes, and drop unused constants.

    Args:
        model: the model, which is changed.
        dynamic: paths of quantizers that compute the range from every tensor.
        style: the dialect of the file.
        codes: fixed codes of weights, by the path of the quantizer; other weights are quantized here.

    Returns:
        One record per quantizer.

    Raises:
        ExportError: ONNX cannot express a quantizer; the message names it.
    """
    from onnx import helper

    editor = GraphEditor(model.graph)
    nodes: list[NodeProto] = []
    records: list[SiteRecord] = []
    computed: dict[str, list[str]] = {}
    equal: dict[tuple[Any, ...], SiteRecord] = {}
    renamed: dict[str, str] = {}
    outputs = {output.name for output in model.graph.output}
    idle: dict[str, list[float]] = {}
    if style is Style.PORTABLE:  # files of the standard style become float files beside encodings: they need all Clips
        _write_clips(editor)
        idle = _idle_clips(editor, outputs)

    def in_loop(node: NodeProto, path: str) -> tuple[list[NodeProto], SiteRecord]:
        site = _site(editor, node, path, style)
        record = _express(site, is_dynamic=site.constant is None)
        return site.nodes, record

    for node in model.graph.node:
        if node.op_type in _CLIPS and node.output[0] in idle:
            renamed[node.output[0]] = node.input[0]
            continue
        if node.domain != DOMAIN:
            nodes.append(node)
            continue
        path = path_of({entry.key: entry.value for entry in node.metadata_props})
        try:
            if node.op_type == loops.OPERATOR:
                own, record = loops.write_loop(editor, node, path, style, in_loop)
                nodes += own
                records += [record] if record is not None else []
                continue
            if node.op_type == SCALE_OPERATOR:
                # TensorRT's operators compute the scales themselves.
                scale = None if style is Style.TRT else lower_scale(editor, node, path, style)
                computed[node.output[0]] = scale.added if scale else []
                nodes += scale.nodes if scale else []
                continue
            site = _site(editor, node, path, style)
            site.fixed_codes = (codes or {}).get(path)
            site.x = renamed.get(site.x, site.x)
            site.added += computed.get(site.scale, [])
            if site.constant is not None and editor.is_constant(site.x):
                records.append(_fold(site, site.constant))
            else:
                # An activation that equals an earlier one has its nodes, and none of its own.
                same = equal.get(_identity(site))
                if same is not None and site.y not in outputs:
                    record = replace(same, quantizer=site.path)
                else:
                    identity = _identity(site)
                    record = _express(site, path in dynamic or site.scale in computed)
                    record = replace(record, clip=idle.get(node.input[0], []))
                    equal |= {} if site.constant is None else {identity: record}
                records.append(record)
                renamed[site.y] = record.y
        except ExportError as error:
            raise ExportError(f"{module_name(path)}: {error}") from error
        nodes += site.nodes
    rename_inputs(nodes, renamed)
    editor.finish(nodes)
    domains = [entry for entry in model.opset_import if entry.domain != DOMAIN]
    if any(node.domain == trt.DOMAIN for node in model.graph.node):
        domains.append(helper.make_opsetid(trt.DOMAIN, 1))
    del model.opset_import[:]
    model.opset_import.extend(domains)
    return records


def _identity(site: EmittedSite) -> tuple[Any, ...]:
    """A key that is equal for quantizers that give the same result: these share one pair of nodes.

    Engines compute on integers only if all readers of a tensor read the same codes.
    """
    if site.constant is None:
        return (site.y,)
    values = [None if x is None else x.numpy().tobytes() for x in (site.constant.scale, site.constant.zero_point)]
    return (site.x, str(site.spec), *values)


def _write_clips(editor: GraphEditor) -> None:
    """Write Max and Min of a quantized tensor, or of a product, and a constant number as Clip, in place.

    torch writes a clamp with one integer bound as Max or Min, and QNN starts no file with them. Max and Min of other
    tensors stay, because these may hold inf, which Clip makes finite.
    """
    makers = {name: node for node in editor.graph.node for name in node.output}
    for node in editor.graph.node:
        if node.op_type not in ("Max", "Min") or len(node.input) != 2 or not editor.is_constant(node.input[1]):
            continue
        (x, bound), maker = node.input, makers.get(node.input[0])
        is_finite = maker is not None and (maker.domain == DOMAIN or maker.op_type in _BEFORE_CLIPS)
        if is_finite and editor.tensor(bound).dim() == 0:
            node.input[:] = [x, bound] if node.op_type == "Max" else [x, "", bound]
            node.op_type = "Clip"


def _idle_clips(editor: GraphEditor, outputs: set[str]) -> dict[str, list[float]]:
    """The bounds of each Clip that can be left out, by the names of its result and of results with moved elements.

    A Clip can be left out if it reads a product or a sum, and its quantizers are equal and their codes end at its
    bounds.
    """
    makers = {name: node.op_type for node in editor.graph.node for name in node.output}
    readers: dict[str, list[NodeProto]] = {}
    for node in editor.graph.node:
        for name in names_read([node]):
            readers.setdefault(name, []).append(node)
    idle: dict[str, list[float]] = {}
    for clip in editor.graph.node:
        if clip.op_type not in _CLIPS or makers.get(clip.input[0]) not in _BEFORE_CLIPS:
            continue
        names, quantizers = [clip.output[0]], []
        for name in names:
            for reader in readers.get(name, ()):
                if reader.op_type in _MOVES and reader.input[0] == name:
                    names += reader.output
                else:
                    quantizers.append(reader)
        if quantizers and outputs.isdisjoint(names) and all(_is_equal(editor, quantizers[0], q) for q in quantizers):
            bounds = _idle_bounds(editor, clip, quantizers[0])
            idle |= dict.fromkeys(names, bounds) if bounds else {}
    return idle


def _idle_bounds(editor: GraphEditor, clip: NodeProto, quantizer: NodeProto) -> list[float]:
    """The bounds of a Clip if the codes of a quantizer end at the same bounds; else empty."""
    names = (*clip.input[1:], "", "")[:2]
    if quantizer.domain != DOMAIN or not all(map(editor.is_constant, filter(None, names))):
        return []
    params, spec = _constants(editor, quantizer), _spec(quantizer)
    bounds = [editor.tensor(name).reshape(-1).tolist() if name else [] for name in names]
    bounds[0] = [0.0] if clip.op_type == "Relu" else bounds[0]
    if params is None or any(len(bound) > 1 for bound in bounds):
        return []
    if not (isinstance(spec.format, IntegerFormat) and isinstance(spec.granularity, PerTensor)):
        return []
    ends = torch.tensor([*(bounds[0] or [-math.inf]), *(bounds[1] or [math.inf])], dtype=torch.float32, device="cpu")
    codes = library.encode(ends, params, spec)
    whole = [spec.format.quant_min, spec.format.quant_max]
    return ends.tolist() if codes is not None and codes.tolist() == whole else []


def _is_equal(editor: GraphEditor, one: NodeProto, other: NodeProto) -> bool:
    """Whether two nodes are quantizers of one specification with the same constants."""
    kinds = [(x.domain, x.op_type, len(x.input), [a.s for a in x.attribute if a.name == "spec"]) for x in (one, other)]
    return kinds[0] == kinds[1] and all(
        a == b or (editor.is_constant(a) and editor.is_constant(b) and torch.equal(editor.tensor(a), editor.tensor(b)))
        for a, b in zip(one.input[1:], other.input[1:], strict=True)
    )


def rename_inputs(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> None:
    """Rename the values that nodes read, also in the graphs inside the nodes."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        for graph in inner_graphs(node):
            rename_inputs(graph.node, names)


def _spec(node: NodeProto) -> QuantSpec:
    return QuantSpec.parse(next(a.s.decode() for a in node.attribute if a.name == "spec"))


def _constants(editor: GraphEditor, node: NodeProto) -> QParams | None:
    """Scale and zero point of a quantizer; None if the file computes them."""
    scale, zero_point = (*node.input[1:], "")[:2]
    if not editor.is_constant(scale) or (zero_point and not editor.is_constant(zero_point)):
        return None
    return QParams(editor.tensor(scale), editor.tensor(zero_point) if zero_point else None)


def _site(editor: GraphEditor, node: NodeProto, path: str, style: Style) -> EmittedSite:
    x, scale, zero_point = (*node.input, "")[:3]
    spec, constant = _spec(node), _constants(editor, node)
    if constant is not None:
        check_scale(constant.scale, spec, style)
    placement = place(spec, style, editor.shape(x), editor.shape(scale))
    return EmittedSite(
        editor=editor,
        label=editor.label(path or "fake_quantize"),
        path=path,
        spec=spec,
        style=style,
        encoding=placement.encoding,
        layout=placement.layout,
        blocks=placement.blocks,
        x=x,
        y=node.output[0],
        scale=scale,
        zero_point=zero_point or None,
        constant=constant,
    )


def _fold(site: EmittedSite, params: QParams) -> SiteRecord:
    """Store a constant weight as codes with one DequantizeLinear."""
    fmt = site.spec.format
    if bool(site.editor.tensor(site.x).isnan().any()):
        code = fmt.to_storage(torch.full((1,), torch.nan, dtype=torch.float32, device="cpu"))
        if not bool(fmt.from_storage(code, torch.float32).isnan().all()):
            raise ExportError(f"the weight holds NaN, which has no code in {fmt}; repair the weight")
    if site.encoding.portable:
        codes, scale, words = loops.fold(site)
        return _record(site, Parameters.CONSTANT, words, ScaleNames(scale, scale), codes)
    codes = site.add("codes", stored_codes(site.weight_codes(params), site.encoding.element))
    if trt.needed(site):
        scale, words = trt.dequantize(site, codes, params)
        return _record(site, Parameters.CONSTANT, words, ScaleNames(scale, scale), codes)
    scale, zero_point = _constant_parameters(site, params)
    _dequantize(site, codes, scale.scale, zero_point)
    nodes = "codes, DequantizeLinear and Sum" if site.encoding.guarded else "codes and DequantizeLinear"
    words = f"{site.encoding.element.name} {nodes}, {site.layout}{_of_scales(site, scale)}"
    return _record(site, Parameters.CONSTANT, words, scale, codes, zero_point)


def _dequantize(site: EmittedSite, codes: str, scale: str, zero_point: str | None) -> None:
    from onnx import TensorProto

    kind = site.editor.type(site.x)
    names = (codes, scale, zero_point) if zero_point else (codes, scale)
    # Without `output_dtype` the type of the scale determines the type of the result.
    typed = TensorProto.FLOAT if site.encoding.powers else None
    guarded, cast = site.encoding.guarded, kind != TensorProto.FLOAT
    result = None if guarded or cast else site.y
    value = site.emit("DequantizeLinear", *names, result=result, **site.place(), output_dtype=typed)
    if guarded:
        value = site.emit("Sum", value, result=None if cast else site.y)
    if cast:
        site.emit("Cast", value, result=site.y, to=kind)


def _of_scales(site: EmittedSite, scale: ScaleNames) -> str:
    """How scales are stored, as a part of a node's description; "" for float32."""
    element = site.encoding.scale
    if element is None:
        return ""
    if site.encoding.powers:
        return f", {element.name} scales"
    if site.constant is not None and scale.shared is None:
        return ", FLOAT scales, because they are not products of codes and shared scales"
    return f", {element.name} codes of scales with their own DequantizeLinear"


def _express(site: EmittedSite, is_dynamic: bool) -> SiteRecord:
    """Lower an activation to QuantizeLinear and DequantizeLinear, to basic operators, or to TensorRT's operators."""
    from onnx import TensorProto

    computed = Parameters.DYNAMIC if is_dynamic else Parameters.COMPUTED
    parameters = computed if site.constant is None else Parameters.CONSTANT
    if site.encoding.portable:
        scale, words = loops.express(site)
        return _record(site, parameters, words, ScaleNames(scale, scale))
    own = ScaleNames(site.scale, site.scale)
    if trt.needed(site):
        return _record(site, parameters, trt.quantize(site), own)
    reciprocal = site.spec.arithmetic is Arithmetic.RECIPROCAL
    overflow = overflows(site.encoding.element, site.layout, len(site.editor.shape(site.x)))
    value = site.as_float32(site.x)
    between = " between Sums" if site.encoding.guarded else ""
    words = [f"QuantizeLinear and DequantizeLinear{between}, {site.encoding.element.name}, {site.layout}"]
    if reciprocal:
        if site.constant is not None:
            factor = site.add("reciprocal", site.spread(site.constant.scale.reciprocal()))
        else:
            factor = site.spread_computed(site.emit("Div", site.number("unit", 1.0), site.scale))
        value = site.emit("Mul", value, factor)
        words.append("after a product with the reciprocal scale")
    if site.encoding.clips or overflow:  # in the units of QuantizeLinear's input
        bounds = (site.spec.format.quant_min, site.spec.format.quant_max)
        if site.constant is None:
            ends = [_computed_bound(site, name, code) for name, code in zip(("low", "high"), bounds, strict=True)]
            value = site.emit("Min", site.emit("Max", value, ends[0]), ends[1])
        else:
            low, high = (site.spread(_constant_bound(site.constant, code, site.spec.arithmetic)) for code in bounds)
            # ONNX Runtime 1.31 fuses Clip with QuantizeLinear, and then cannot load a file with 4-bit codes.
            if site.layout.axis is None and site.encoding.element.bits != 4:
                ends = [site.add("low", low.reshape(())), site.add("high", high.reshape(()))]
                value = site.emit("Clip", value, *ends)
            else:
                value = site.emit("Max", value, site.add("low", low))
                value = site.emit("Min", value, site.add("high", high))
        words.append(f"clipped before to {site.spec.format.quant_min} to {site.spec.format.quant_max}")
    scale, zero_point = (
        _computed_parameters(site) if site.constant is None else _constant_parameters(site, site.constant)
    )
    rest = (zero_point,) if zero_point else ()
    typed = None if zero_point else TensorProto.DataType.Value(site.encoding.element.name)
    # Without `precision` the quotient would be computed in the type of the scale.
    precision = TensorProto.FLOAT if site.encoding.powers and not reciprocal else None
    if site.encoding.guarded:
        value = site.emit("Sum", value)
    unit = scale.scale
    if reciprocal and site.layout.symbolic:  # ones in the shape of the scale: scale / scale is exactly 1
        unit = site.arranged(site.emit("Div", site.scale, site.scale))
    elif reciprocal:
        unit = site.add("one", _ones_array(site))
    codes = site.emit("QuantizeLinear", value, unit, *rest, **site.place(), output_dtype=typed, precision=precision)
    _dequantize(site, codes, scale.scale, zero_point)
    text = f"{', '.join(words)}{_of_scales(site, scale)}"
    if site.constant is None:
        return _record(site, parameters, text, own, zero_point=site.zero_point)
    return _record(site, parameters, text, scale, zero_point=zero_point)


def _constant_parameters(site: EmittedSite, params: QParams) -> tuple[ScaleNames, str | None]:
    scale = constant_scale(site, params)
    if params.zero_point is None and not site.encoding.has_zero_point:
        return scale, None
    zero_point = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
    return scale, site.add("zero_point", stored(site.arrange(zero_point).numpy(), site.encoding.element))


def _computed_parameters(site: EmittedSite) -> tuple[ScaleNames, str | None]:
    """Return the names of scale and zero point; no zero point for zeros whose length is known only at run time."""
    from onnx import TensorProto

    element = TensorProto.DataType.Value(site.encoding.element.name)
    scale = ScaleNames(computed_scale(site), site.scale)
    if site.zero_point is not None:
        return scale, site.emit("Cast", site.arranged(site.zero_point), to=element)
    if site.layout.symbolic or not site.encoding.has_zero_point:
        return scale, None
    return scale, site.add("zero_point", stored(_ones_array(site) * 0, site.encoding.element))


def _ones_array(site: EmittedSite) -> np.ndarray:
    shape = [int(n) for n in site.editor.shape(site.scale)]
    return site.arrange(torch.ones(shape, dtype=torch.float32, device="cpu")).numpy()


def _constant_bound(params: QParams, code: float, arithmetic: Arithmetic) -> Tensor:
    scale = params.scale
    zero_point = torch.zeros_like(scale) if params.zero_point is None else params.zero_point.float()
    if arithmetic is Arithmetic.RECIPROCAL:
        return code - zero_point
    bound = ((code - zero_point) * scale).clamp(-_LARGEST, _LARGEST)
    if not bool(((bound / scale).round() + zero_point == code).all()):
        raise ExportError(
            f"the value of the code {code:g} exceeds float32, so values cannot be clipped to it; "
            "use a smaller scale or a full range such as int8"
        )
    return bound


def _computed_bound(site: EmittedSite, name: str, code: float) -> str:
    from onnx import TensorProto

    bound = site.add(name, np.array(code, np.float32))
    if site.zero_point is not None:
        bound = site.emit("Sub", bound, site.emit("Cast", site.zero_point, to=TensorProto.FLOAT))
    if site.spec.arithmetic is not Arithmetic.RECIPROCAL:
        bound = site.emit("Mul", bound, site.scale)
    elif site.zero_point is None:
        return bound
    return site.spread_computed(bound)


def _record(
    site: EmittedSite,
    parameters: Parameters,
    words: str,
    scale: ScaleNames,
    codes: str | None = None,
    zero_point: str | None = None,
) -> SiteRecord:
    constants = list(dict.fromkeys(site.added))
    return SiteRecord(
        quantizer=site.path,
        spec=str(site.spec),
        expressed=words,
        x=site.x,
        y=site.y,
        parameters=parameters,
        codes=codes,
        scale=scale.constant,
        scale_of_scales=scale.shared,
        zero_point=zero_point,
        groups=[] if site.constant is None else list(site.constant.scale.shape),
        repeats=[] if scale.shared else list(site.layout.repeats),
        constants=constants,
        digest=digest(site.editor.constant(name) for name in constants),
    )
