"""From one opaque node per quantizer to QuantizeLinear and DequantizeLinear.

Exact, because with the scale s, the zero point z and the codes lo to hi:

* QuantizeLinear is saturate(rint(x / s) + z) and DequantizeLinear (q - z) * s, both in float32: `Arithmetic.DIVIDE`.
* Where a format has fewer codes than its element type, or ONNX Runtime would overflow, x is first clipped to
  (lo - z) * s and (hi - z) * s. Both are within one part in 2**23 of a multiple of s below 2**17, so that they round
  to lo and hi, and rounding is monotonic.
* `Arithmetic.RECIPROCAL` is a product with 1 / s, a QuantizeLinear of scale 1 and a DequantizeLinear of scale s.
* float16 and bfloat16 are cast to float32 before and back after.
* Float8 stands between two Sums of one tensor in the portable style, which change nothing: see `Encoding.guarded`.

* Scales that do not broadcast with x, because blocks divide an axis, are repeated by Gather where a product or a bound
  needs them.
* Formats that ONNX Runtime cannot store have the form of `portable`, scales in a format of their own that of `scales`,
  and of `ranges` where they follow from the tensor. What only TensorRT's parser reads is in `trt`.

One exception: NaN has no code in integers, nor in floats of 4 and 6 bits. ONNX Runtime gives it the lowest integer,
where torch keeps NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ExportError
from fakequant.export import portable, trt
from fakequant.export.capability import Layout, block_sizes, check_scale, check_spec, layout, overflows
from fakequant.export.graph import GraphEditor, stored, stored_codes
from fakequant.export.ranges import lower_scale
from fakequant.export.record import Parameters, SiteRecord, digest
from fakequant.export.scales import ScaleNames, computed_scale, constant_scale
from fakequant.export.site import Site
from fakequant.export.style import Style
from fakequant.export.trace import DOMAIN, SCALE_OPERATOR, path_of
from fakequant.numerics.format import Format
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops import library

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_LARGEST = float(np.finfo(np.float32).max)


class _Stored(NamedTuple):
    """What a verifier looks for in the file, by name."""

    codes: str | None
    scale: ScaleNames
    zero_point: str | None


def lower(model: ModelProto, dynamic: frozenset[str] = frozenset(), style: Style = Style.PORTABLE) -> list[SiteRecord]:
    """Replace every node of our own in place, fold constant weights, and drop what is not used any more.

    Args:
        dynamic: paths of quantizers that take the range from every tensor anew.
        style: what the file may be said with.

    Raises:
        ExportError: a quantizer that ONNX cannot express; names it.
    """
    editor = GraphEditor(model.graph)
    nodes: list[NodeProto] = []
    records: list[SiteRecord] = []
    computed: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.domain != DOMAIN:
            nodes.append(node)
            continue
        path = path_of({entry.key: entry.value for entry in node.metadata_props})
        try:
            if node.op_type == SCALE_OPERATOR:
                # TensorRT's operators find the scales themselves.
                found = None if style is Style.TRT else lower_scale(editor, node, path, style)
                computed[node.output[0]] = found.added if found else []
                nodes += found.nodes if found else []
                continue
            site = _site(editor, node, path, style)
            site.added += computed.get(site.scale, [])
            if site.constant is not None and editor.is_constant(site.x):
                records.append(_fold(site, site.constant))
            else:
                records.append(_express(site, path in dynamic or site.scale in computed))
        except ExportError as error:
            raise ExportError(f"{path or 'the model'}: {error}") from error
        nodes += site.nodes
    editor.finish(nodes)
    _import_domains(model)
    return records


def _import_domains(model: ModelProto) -> None:
    """Say which operator sets the file needs, now that the nodes of our own are gone."""
    from onnx import helper

    kept = [entry for entry in model.opset_import if entry.domain != DOMAIN]
    if any(node.domain == trt.DOMAIN for node in model.graph.node):
        kept.append(helper.make_opsetid(trt.DOMAIN, 1))
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _site(editor: GraphEditor, node: NodeProto, path: str, style: Style) -> Site:
    x, scale, zero_point = (*node.input, "")[:3]
    spec = QuantSpec.parse(next(a.s.decode() for a in node.attribute if a.name == "spec"))
    constant = None
    if editor.is_constant(scale) and (not zero_point or editor.is_constant(zero_point)):
        constant = QParams(editor.tensor(scale), editor.tensor(zero_point) if zero_point else None)
        check_scale(constant.scale, spec, style)
    encoding = check_spec(spec, style)
    blocks = block_sizes(spec.granularity, editor.shape(x))
    where = trt.place(spec, len(blocks)) if style is Style.TRT else None
    if where is None:
        where = Layout() if encoding.portable else layout(editor.shape(x), editor.shape(scale), blocks)
    return Site(
        editor=editor,
        label=editor.label(path or "fake_quantize"),
        path=path,
        spec=spec,
        style=style,
        encoding=encoding,
        layout=where,
        blocks=blocks,
        x=x,
        y=node.output[0],
        scale=scale,
        zero_point=zero_point or None,
        constant=constant,
    )


def _fold(site: Site, params: QParams) -> SiteRecord:
    """A constant weight as codes and one DequantizeLinear."""

    weight = site.editor.tensor(site.x)
    if bool(weight.isnan().any()) and not _has_nan(site.spec.format):
        raise ExportError(f"the weight holds NaN, which has no code in {site.spec.format}; repair the weight")
    if site.encoding.portable:
        codes, scale, words = portable.fold(site)
        return _record(site, Parameters.CONSTANT, _Stored(codes, ScaleNames(scale, scale), None), words)
    codes = site.add("codes", stored_codes(library.quantize(weight, params, site.spec), site.encoding.element))
    if trt.needed(site):
        scale, words = trt.dequantize(site, codes, params)
        return _record(site, Parameters.CONSTANT, _Stored(codes, ScaleNames(scale, scale), None), words)
    scale, zero_point = _constant_parameters(site, params)
    _dequantize(site, codes, scale.scale, zero_point)
    nodes = "codes, DequantizeLinear and Sum" if site.encoding.guarded else "codes and DequantizeLinear"
    words = f"{site.encoding.element.name} {nodes}, {site.layout}{_of_scales(site, scale)}"
    return _record(site, Parameters.CONSTANT, _Stored(codes, scale, zero_point), words)


def _dequantize(site: Site, codes: str, scale: str, zero_point: str | None) -> None:
    from onnx import TensorProto

    kind = site.editor.type(site.x)
    names = (codes, scale, zero_point) if zero_point else (codes, scale)
    # A scale of another type than float32 would decide the result's.
    typed = TensorProto.FLOAT if site.encoding.powers else None
    guarded, cast = site.encoding.guarded, kind != TensorProto.FLOAT
    result = None if guarded or cast else site.y
    value = site.emit("DequantizeLinear", *names, result=result, **site.place(), output_dtype=typed)
    if guarded:
        value = site.emit("Sum", value, result=None if cast else site.y)
    if cast:
        site.emit("Cast", value, result=site.y, to=kind)


def _of_scales(site: Site, scale: ScaleNames) -> str:
    """How the scales are stored, in words."""
    element = site.encoding.scale
    if element is None:
        return ""
    if site.encoding.powers:
        return f", {element.name} scales"
    if site.constant is not None and scale.shared is None:
        return ", FLOAT scales, which are no products of codes and shared scales"
    return f", {element.name} codes of scales with a DequantizeLinear of their own"


def _has_nan(fmt: Format) -> bool:
    """Whether the codes of a format can say NaN."""
    stored = fmt.to_storage(torch.full((1,), torch.nan, dtype=torch.float32, device="cpu"))
    return bool(fmt.from_storage(stored, torch.float32).isnan().all())


def _express(site: Site, is_dynamic: bool) -> SiteRecord:
    """An activation."""
    computed = Parameters.DYNAMIC if is_dynamic else Parameters.COMPUTED
    parameters = computed if site.constant is None else Parameters.CONSTANT
    if site.encoding.portable:
        scale, words = portable.express(site)
        return _record(site, parameters, _Stored(None, ScaleNames(scale, scale), None), words)
    if trt.needed(site):
        words = trt.quantize(site)
        return _record(site, parameters, _Stored(None, ScaleNames(site.scale, site.scale), None), words)
    scale, zero_point, words = _quantize_dequantize(site)
    if site.constant is not None:
        return _record(site, parameters, _Stored(None, scale, zero_point), words)
    return _record(site, parameters, _Stored(None, ScaleNames(site.scale, site.scale), site.zero_point), words)


def _quantize_dequantize(site: Site) -> tuple[ScaleNames, str | None, str]:
    """An activation as QuantizeLinear and DequantizeLinear: their scale and zero point, and the form in words."""
    from onnx import TensorProto

    reciprocal = site.spec.arithmetic is Arithmetic.RECIPROCAL
    overflow = overflows(site.encoding.element, site.layout, len(site.editor.shape(site.x)))
    value = site.as_float32(site.x)
    between = " between Sums" if site.encoding.guarded else ""
    words = [f"QuantizeLinear and DequantizeLinear{between}, {site.encoding.element.name}, {site.layout}"]
    if reciprocal:
        value = site.emit("Mul", value, _reciprocal(site))
        words.append("after a product with the reciprocal scale")
    if site.encoding.clips or overflow:
        value = _clip(site, value)
        words.append(f"clipped before to {site.spec.format.quant_min} to {site.spec.format.quant_max}")
    scale, zero_point = (
        _computed_parameters(site) if site.constant is None else _constant_parameters(site, site.constant)
    )
    rest = (zero_point,) if zero_point else ()
    typed = None if zero_point else TensorProto.DataType.Value(site.encoding.element.name)
    # The quotient would be computed in the type of the scale.
    precision = TensorProto.FLOAT if site.encoding.powers and not reciprocal else None
    if site.encoding.guarded:
        value = site.emit("Sum", value)
    unit = _ones(site) if reciprocal else scale.scale
    codes = site.emit("QuantizeLinear", value, unit, *rest, **site.place(), output_dtype=typed, precision=precision)
    _dequantize(site, codes, scale.scale, zero_point)
    return scale, zero_point, f"{', '.join(words)}{_of_scales(site, scale)}"


def _constant_parameters(site: Site, params: QParams) -> tuple[ScaleNames, str | None]:
    scale = constant_scale(site, params)
    if params.zero_point is None and not site.encoding.has_zero_point:
        return scale, None
    zero_point = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
    return scale, site.add("zero_point", stored(site.arrange(zero_point).numpy(), site.encoding.element))


def _computed_parameters(site: Site) -> tuple[ScaleNames, str | None]:
    """Scale and zero point in ONNX's shape; no zero point if that would be zeros of a length known only at run time."""
    from onnx import TensorProto

    element = TensorProto.DataType.Value(site.encoding.element.name)
    scale = ScaleNames(computed_scale(site), site.scale)
    if site.zero_point is not None:
        return scale, site.emit("Cast", site.arranged(site.zero_point), to=element)
    if site.layout.symbolic or not site.encoding.has_zero_point:
        return scale, None
    return scale, site.add("zero_point", stored(_ones_array(site) * 0, site.encoding.element))


def _ones_array(site: Site) -> np.ndarray:
    shape = [int(n) for n in site.editor.shape(site.scale)]
    return site.arrange(torch.ones(shape, dtype=torch.float32, device="cpu")).numpy()


def _ones(site: Site) -> str:
    """Ones in the shape of the scale; a number divided by itself is exactly 1."""
    if not site.layout.symbolic:
        return site.add("one", _ones_array(site))
    return site.arranged(site.emit("Div", site.scale, site.scale))


def _reciprocal(site: Site) -> str:
    if site.constant is not None:
        return site.add("reciprocal", site.spread(site.constant.scale.reciprocal()))
    return site.spread_computed(site.emit("Div", site.number("unit", 1.0), site.scale))


def _clip(site: Site, value: str) -> str:
    """Nodes that bring a value, in the units that QuantizeLinear gets, to between the lowest and the highest code."""
    bounds = (site.spec.format.quant_min, site.spec.format.quant_max)
    if site.constant is None:
        low, high = (_computed_bound(site, name, code) for name, code in zip(("low", "high"), bounds, strict=True))
        return site.emit("Min", site.emit("Max", value, low), high)
    low, high = (site.spread(_constant_bound(site.constant, code, site.spec.arithmetic)) for code in bounds)
    # ONNX Runtime 1.31 fuses Clip with QuantizeLinear, and cannot load the file if that has 4 bits.
    if site.layout.axis is None and site.encoding.element.bits != 4:
        return site.emit("Clip", value, site.add("low", low.reshape(())), site.add("high", high.reshape(())))
    return site.emit("Min", site.emit("Max", value, site.add("low", low)), site.add("high", high))


def _constant_bound(params: QParams, code: float, arithmetic: Arithmetic) -> Tensor:
    scale = params.scale
    zero_point = torch.zeros_like(scale) if params.zero_point is None else params.zero_point.float()
    if arithmetic is Arithmetic.RECIPROCAL:
        return code - zero_point
    bound = ((code - zero_point) * scale).clamp(-_LARGEST, _LARGEST)
    if not bool(((bound / scale).round() + zero_point == code).all()):
        raise ExportError(
            f"the code {code:g} stands for a value beyond float32, to which nothing can be clipped; "
            "use a smaller scale or a full range such as int8"
        )
    return bound


def _computed_bound(site: Site, name: str, code: float) -> str:
    from onnx import TensorProto

    bound = site.add(name, np.array(code, np.float32))
    if site.zero_point is not None:
        bound = site.emit("Sub", bound, site.emit("Cast", site.zero_point, to=TensorProto.FLOAT))
    if site.spec.arithmetic is not Arithmetic.RECIPROCAL:
        bound = site.emit("Mul", bound, site.scale)
    elif site.zero_point is None:
        return bound
    return site.spread_computed(bound)


def _record(site: Site, parameters: Parameters, names: _Stored, words: str) -> SiteRecord:
    constants = list(dict.fromkeys(site.added))
    return SiteRecord(
        quantizer=site.path,
        spec=str(site.spec),
        expressed=words,
        x=site.x,
        y=site.y,
        parameters=parameters,
        codes=names.codes,
        scale=names.scale.constant,
        scale_of_scales=names.scale.shared,
        zero_point=names.zero_point,
        groups=[] if site.constant is None else list(site.constant.scale.shape),
        repeats=[] if names.scale.shared else list(site.layout.repeats),
        constants=constants,
        digest=digest(site.editor.constant(name) for name in constants),
    )
