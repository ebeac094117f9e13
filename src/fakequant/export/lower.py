"""From one opaque node per quantizer to QuantizeLinear and DequantizeLinear.

Exact, because with the scale s, the zero point z and the codes lo to hi:

* QuantizeLinear is saturate(rint(x / s) + z) and DequantizeLinear (q - z) * s, both in float32: `Arithmetic.DIVIDE`.
* Where a format has fewer codes than its element type, or ONNX Runtime would overflow, x is first clipped to
  (lo - z) * s and (hi - z) * s. Both are within one part in 2**23 of a multiple of s below 2**17, so that they round
  to lo and hi, and rounding is monotonic.
* `Arithmetic.RECIPROCAL` is a product with 1 / s, a QuantizeLinear of scale 1 and a DequantizeLinear of scale s.
* float16 and bfloat16 are cast to float32 before and back after.

Two exceptions. NaN has no integer code: ONNX Runtime gives it the lowest one, where torch keeps NaN. And what
`capability.overflows` says of inf stays where scales are computed at run time for blocks smaller than their axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ExportError
from fakequant.export.capability import Encoding, Layout, check_scale, check_spec, layout, overflows
from fakequant.export.graph import GraphEditor, stored, stored_codes
from fakequant.export.record import Parameters, SiteRecord, digest
from fakequant.export.trace import DOMAIN, path_of
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops import library

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_LARGEST = float(np.finfo(np.float32).max)


def lower(model: ModelProto, dynamic: frozenset[str] = frozenset()) -> list[SiteRecord]:
    """Replace every FakeQuantize node in place, fold constant weights, and drop what is not used any more.

    Args:
        dynamic: paths of quantizers that take the range from every tensor anew.

    Raises:
        ExportError: a quantizer that ONNX cannot express; names it.
    """
    editor = GraphEditor(model.graph)
    nodes: list[NodeProto] = []
    records: list[SiteRecord] = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            nodes.append(node)
            continue
        path = path_of({entry.key: entry.value for entry in node.metadata_props})
        try:
            site = _site(editor, node, path)
            if site.constant is not None and editor.is_constant(site.x):
                records.append(_fold(site, site.constant))
            else:
                records.append(_express(site, path in dynamic))
        except ExportError as error:
            raise ExportError(f"{path or 'the model'}: {error}") from error
        nodes += site.nodes
    editor.finish(nodes)
    for index in reversed(range(len(model.opset_import))):
        if model.opset_import[index].domain == DOMAIN:
            del model.opset_import[index]
    return records


@dataclass
class _Site:
    """A FakeQuantize node, what is known of its parameters, and the nodes that replace it."""

    editor: GraphEditor
    path: str
    label: str
    spec: QuantSpec
    encoding: Encoding
    layout: Layout
    x: str
    y: str
    scale: str
    zero_point: str | None
    constant: QParams | None
    """The parameters [groups, axes kept], if they are in the file."""
    nodes: list[NodeProto] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def emit(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """Add a node; its name and that of its result begin with the quantizer's."""
        from onnx import helper

        same = sum(node.op_type == operator for node in self.nodes)
        name = f"{self.label}/{operator}{f'_{same}' if same else ''}"
        given = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, inputs, [result or name], name, **given))
        return result or name

    def add(self, name: str, values: Tensor | np.ndarray) -> str:
        """Add a constant whose name begins with the quantizer's."""
        array = values.numpy() if isinstance(values, Tensor) else values
        self.added.append(self.editor.add(f"{self.label}/{name}", array, shared=name == "codes"))
        return self.added[-1]

    def place(self) -> dict[str, Any]:
        """The attributes that say where the scales lie."""
        return {"axis": self.layout.axis, "block_size": self.layout.block_size or None}

    def arrange(self, values: Tensor) -> Tensor:
        """Values [groups, axes kept] in ONNX's shape."""
        if self.layout.axis is None:
            return values.reshape(())
        if not self.layout.block_size:
            return values.reshape(-1)
        for axis, count in enumerate(self.layout.repeats):
            values = values.repeat_interleave(count, axis)
        return values

    def spread(self, values: Tensor) -> Tensor:
        """Constant values [groups, axes kept] repeated where they do not broadcast with x: along divided axes."""
        for axis, n in enumerate(self.editor.shape(self.x)):
            groups = values.shape[axis]
            if isinstance(n, int) and groups not in (1, n):
                values = values.repeat_interleave(n // groups, axis)
        return values


def _site(editor: GraphEditor, node: NodeProto, path: str) -> _Site:
    x, scale, zero_point = (*node.input, "")[:3]
    spec = QuantSpec.parse(next(a.s.decode() for a in node.attribute if a.name == "spec"))
    constant = None
    if editor.is_constant(scale) and (not zero_point or editor.is_constant(zero_point)):
        constant = QParams(editor.tensor(scale), editor.tensor(zero_point) if zero_point else None)
        check_scale(constant.scale)
    return _Site(
        editor=editor,
        label=editor.label(path or "fake_quantize"),
        path=path,
        spec=spec,
        encoding=check_spec(spec),
        layout=layout(editor.shape(x), editor.shape(scale), constant=constant is not None),
        x=x,
        y=node.output[0],
        scale=scale,
        zero_point=zero_point or None,
        constant=constant,
    )


def _fold(site: _Site, params: QParams) -> SiteRecord:
    """A constant weight as codes and one DequantizeLinear."""
    from onnx import TensorProto

    weight = site.editor.tensor(site.x)
    if site.spec.format.has_zero_point and bool(weight.isnan().any()):
        raise ExportError("the weight holds NaN, which has no integer code; repair the weight")
    codes = stored_codes(library.quantize(weight, params, site.spec), site.encoding.element)
    names = (site.add("codes", codes), *_constant_parameters(site, params))
    kind = site.editor.type(site.x)
    if kind == TensorProto.FLOAT:
        site.emit("DequantizeLinear", *names, result=site.y, **site.place())
    else:
        site.emit("Cast", site.emit("DequantizeLinear", *names, **site.place()), result=site.y, to=kind)
    words = f"{site.encoding.element.name} codes and DequantizeLinear, {site.layout}"
    return _record(site, Parameters.CONSTANT, names, words)


def _express(site: _Site, is_dynamic: bool) -> SiteRecord:
    """An activation as QuantizeLinear and DequantizeLinear."""
    from onnx import TensorProto

    kind = site.editor.type(site.x)
    reciprocal = site.spec.arithmetic is Arithmetic.RECIPROCAL
    reachable = site.layout.broadcasts or site.constant is not None
    if (reciprocal or site.encoding.clips) and not reachable:
        raise ExportError(
            f"{site.spec}: scales computed at run time for blocks smaller than their axis cannot multiply or clip; "
            "use Arithmetic.DIVIDE and a full range such as int8 or uint4, or one block per axis"
        )
    overflow = overflows(site.encoding.element, site.layout, len(site.editor.shape(site.x)))
    value = site.x if kind == TensorProto.FLOAT else site.emit("Cast", site.x, to=TensorProto.FLOAT)
    words = [f"QuantizeLinear and DequantizeLinear, {site.encoding.element.name}, {site.layout}"]
    if reciprocal:
        value = site.emit("Mul", value, _reciprocal(site))
        words.append("after a product with the reciprocal scale")
    if site.encoding.clips or (overflow and reachable):
        value = _clip(site, value)
        words.append(f"clipped before to {site.spec.format.quant_min} to {site.spec.format.quant_max}")
    scale, zero_point = (
        _computed_parameters(site) if site.constant is None else _constant_parameters(site, site.constant)
    )
    rest = (zero_point,) if zero_point else ()
    typed = None if zero_point else TensorProto.DataType.Value(site.encoding.element.name)
    unit = _ones(site) if reciprocal else scale
    codes = site.emit("QuantizeLinear", value, unit, *rest, **site.place(), output_dtype=typed)
    if kind == TensorProto.FLOAT:
        site.emit("DequantizeLinear", codes, scale, *rest, result=site.y, **site.place())
    else:
        site.emit("Cast", site.emit("DequantizeLinear", codes, scale, *rest, **site.place()), result=site.y, to=kind)
    computed = (None, site.scale, site.zero_point)
    if site.constant is not None:
        return _record(site, Parameters.CONSTANT, (None, scale, zero_point), ", ".join(words))
    return _record(site, Parameters.DYNAMIC if is_dynamic else Parameters.COMPUTED, computed, ", ".join(words))


def _constant_parameters(site: _Site, params: QParams) -> tuple[str, str]:
    zero_point = torch.zeros_like(params.scale) if params.zero_point is None else params.zero_point
    zeros = stored(site.arrange(zero_point).numpy(), site.encoding.element)
    return site.add("scale", site.arrange(params.scale)), site.add("zero_point", zeros)


def _computed_parameters(site: _Site) -> tuple[str, str | None]:
    """Scale and zero point in ONNX's shape; no zero point if that would be zeros of a length known only at run time."""
    from onnx import TensorProto

    element = TensorProto.DataType.Value(site.encoding.element.name)
    if site.zero_point is not None:
        return _reshape(site, site.scale), site.emit("Cast", _reshape(site, site.zero_point), to=element)
    if site.layout.symbolic:
        return _reshape(site, site.scale), None
    return _reshape(site, site.scale), site.add("zero_point", stored(_ones_array(site) * 0, site.encoding.element))


def _reshape(site: _Site, name: str) -> str:
    if site.layout.block_size:
        return name
    shape = np.array([] if site.layout.axis is None else [-1], np.int64)
    return site.emit("Reshape", name, site.add("shape", shape))


def _ones_array(site: _Site) -> np.ndarray:
    if site.layout.symbolic:
        raise ExportError(
            f"{site.spec} with scales computed at run time, whose number is not known; use Arithmetic.DIVIDE"
        )
    return site.arrange(torch.ones([int(n) for n in site.editor.shape(site.scale)])).numpy()


def _ones(site: _Site) -> str:
    return site.add("one", _ones_array(site))


def _reciprocal(site: _Site) -> str:
    if site.constant is not None:
        return site.add("reciprocal", site.spread(site.constant.scale.reciprocal()))
    return site.emit("Div", site.add("unit", np.array(1, np.float32)), site.scale)


def _clip(site: _Site, value: str) -> str:
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


def _computed_bound(site: _Site, name: str, code: float) -> str:
    from onnx import TensorProto

    bound = site.add(name, np.array(code, np.float32))
    if site.zero_point is not None:
        bound = site.emit("Sub", bound, site.emit("Cast", site.zero_point, to=TensorProto.FLOAT))
    return bound if site.spec.arithmetic is Arithmetic.RECIPROCAL else site.emit("Mul", bound, site.scale)


def _record(site: _Site, parameters: Parameters, names: tuple[str | None, str, str | None], words: str) -> SiteRecord:
    codes, scale, zero_point = names
    constants = list(dict.fromkeys(site.added))
    return SiteRecord(
        quantizer=site.path,
        spec=str(site.spec),
        expressed=words,
        x=site.x,
        y=site.y,
        parameters=parameters,
        codes=codes,
        scale=scale,
        zero_point=zero_point,
        groups=[] if site.constant is None else list(site.constant.scale.shape),
        repeats=list(site.layout.repeats),
        constants=constants,
        digest=digest(site.editor.constant(name) for name in constants),
    )
