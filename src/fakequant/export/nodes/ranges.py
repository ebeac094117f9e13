"""Scales that the graph computes from the range of a tensor, for symmetric specifications.

torch computes scales in their own format with frexp and the bits of numbers, which ONNX lacks. The exported graph has
one opaque node for them, `fakequant::ChooseScale`, which is replaced here. The replacement has the same operations as
torch, except for powers of two: these are found by a binary search over thresholds (`steps`), or with Cast in the
styles that have the type E8M0 (`scales`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fakequant.export.capability import Dimension, Encoding, block_sizes, check_choice, check_spec
from fakequant.export.graph import GraphEditor
from fakequant.export.nodes.portable import round_to
from fakequant.export.nodes.scales import multiply, powers_of_two, scale_codes
from fakequant.export.nodes.site import Emitter
from fakequant.export.nodes.steps import look_up, thresholds
from fakequant.export.style import Style
from fakequant.numerics.formats.floats import ExponentFormat
from fakequant.numerics.spec import QuantSpec

if TYPE_CHECKING:
    from onnx import NodeProto

_INFO = torch.finfo(torch.float32)


def lower_scale(editor: GraphEditor, node: NodeProto, path: str, style: Style) -> Emitter:
    """Return the nodes that replace a `ChooseScale` node.

    Raises:
        ExportError: blocks divide an axis of unknown length, or ONNX cannot express the specification.
    """
    from onnx import TensorProto

    spec = QuantSpec.parse(next(a.s.decode() for a in node.attribute if a.name == "spec"))
    to = Emitter(editor, editor.label(f"{path or 'fake_quantize'}/range"))
    encoding = check_spec(spec, style)
    check_choice(spec)
    (x,), (scale,) = node.input, node.output
    shape = editor.shape(x)
    halves = (
        (TensorProto.FLOAT16, torch.finfo(torch.float16).max),
        (TensorProto.BFLOAT16, torch.finfo(torch.bfloat16).max),
    )
    largest = next((most for kind, most in halves if kind == editor.type(x)), _INFO.max)
    # As in `numerics.qparams.choose_qparams`.
    limit = largest * (1.0 - _INFO.eps) / max(-spec.format.quant_min, spec.format.quant_max)
    amax = _group_max(to, _finite_magnitude(to, to.as_float32(x)), shape, block_sizes(spec.granularity, shape))
    if isinstance(spec.scale.format, ExponentFormat):
        (powers_of_two if encoding.powers else _search_power_of_two)(to, amax, spec, limit, scale)
        return to
    tiny = to.number("tiny", _INFO.tiny)
    if spec.scale.format is None or spec.scale.granularity is None:
        chosen = to.emit("Div", amax, to.number("bound", spec.scale.bound(spec.format)))
    else:
        chosen = _two_level_scale(to, amax, editor.shape(scale), spec, encoding)
    to.emit("Min", to.emit("Max", chosen, tiny), to.number("limit", limit), result=scale)
    return to


def _finite_magnitude(to: Emitter, value: str) -> str:
    """Add nodes for |x| with 0 in place of inf and NaN; a comparison with NaN is false."""
    magnitude = to.emit("Abs", value)
    finite = to.emit("Less", magnitude, to.number("inf", math.inf))
    return to.emit("Where", finite, magnitude, to.number("zero", 0.0))


def _group_max(to: Emitter, value: str, shape: Sequence[Dimension], blocks: Sequence[Dimension]) -> str:
    """Add nodes for the maximum of every group [groups, axes kept]; values are >= 0, so zeros pad incomplete blocks."""
    whole = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b == n and n != 1]
    for axis, (n, block) in enumerate(zip(shape, blocks, strict=True)):
        if block in (1, n):
            continue
        assert isinstance(n, int)
        assert isinstance(block, int)
        value = _block_max(to, value, axis, (n, block, len(shape)))
    if whole:
        value = to.emit("ReduceMax", value, to.add("axes", np.array(whole, np.int64)), keepdims=1)
    return value


def _block_max(to: Emitter, value: str, axis: int, sizes: tuple[int, int, int]) -> str:
    """Add nodes for the maximum of every block along one axis, which is moved to the end for the Reshape.

    Args:
        to: receives the nodes.
        value: name of the input.
        axis: the axis that blocks divide.
        sizes: the length of the axis, the length of a block, and the number of axes.
    """
    n, block, rank = sizes
    order = [i for i in range(rank) if i != axis] + [axis]
    moved = axis != rank - 1
    if moved:
        value = to.emit("Transpose", value, perm=order)
    groups = -(-n // block)
    if missing := groups * block - n:
        pads = to.add(f"pads_{axis}", np.array([0] * rank + [0] * (rank - 1) + [missing], np.int64))
        value = to.emit("Pad", value, pads)
    shape = to.add(f"blocks_{axis}", np.array([0] * (rank - 1) + [groups, block], np.int64))
    value = to.emit("ReduceMax", to.emit("Reshape", value, shape), to.add("last", np.array([-1], np.int64)), keepdims=0)
    return to.emit("Transpose", value, perm=[order.index(i) for i in range(rank)]) if moved else value


def _search_power_of_two(to: Emitter, amax: str, spec: QuantSpec, limit: float, result: str) -> None:
    assert isinstance(spec.scale.format, ExponentFormat)
    largest = spec.scale.format.exponent_bias

    def exponent(values: Tensor) -> Tensor:
        return torch.frexp(spec.scale.choose(values, spec.format, limit).double())[1] - 1 + largest

    count = 2 * largest + 1
    exponents = torch.arange(count, device="cpu") - largest
    powers = torch.ldexp(torch.ones(count, dtype=torch.float64, device="cpu"), exponents).float()
    power = look_up(to, "scale", amax, thresholds(exponent, count, lowest=0.0), powers)
    to.emit("Identity", power, result=result)


def _two_level_scale(
    to: Emitter,
    amax: str,
    shape: Sequence[Dimension],
    spec: QuantSpec,
    encoding: Encoding,
) -> str:
    """Add nodes for scales with a second level, operation by operation as in `numerics.scales`.

    Args:
        to: receives the nodes.
        amax: name of the largest magnitudes.
        shape: the shape of `amax`.
        spec: the specification.
        encoding: the encoding of the specification.
    """
    fmt, granularity, bound = spec.scale.format, spec.scale.granularity, spec.scale.bound(spec.format)
    assert fmt is not None
    assert granularity is not None
    blocks = block_sizes(granularity, shape)
    whole = _group_max(to, amax, shape, blocks)
    shared = to.emit("Div", whole, to.number("largest", fmt.quant_max * bound))
    shared = to.emit("Max", shared, to.number("tiny", _INFO.tiny))
    divided = [axis for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)) if b not in (1, n)]
    spread = to.repeat(shared, [b if isinstance(b, int) else 0 for b in blocks], shape, divided)
    quotient = to.emit("Div", amax, to.emit("Mul", to.number("bound", bound), spread))
    smallest = to.number("smallest", fmt.smallest)
    if encoding.scale is not None:
        return multiply(to, scale_codes(to, quotient, smallest, encoding.scale), shared, shape, blocks)
    code = round_to(to, quotient, fmt)
    positive = to.emit("Greater", code, to.number("none", 0.0))
    return to.emit("Mul", to.emit("Where", positive, code, smallest), spread)
