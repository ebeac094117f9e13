"""Decide how one quantizer is written in ONNX: the one place that combines the standard's rules with TensorRT's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fakequant.export.capability import Dimension, Encoding, ScaleLayout, block_sizes, check_choice, check_spec, layout
from fakequant.export.nodes import trt
from fakequant.export.style import Style
from fakequant.numerics.spec import QuantSpec


@dataclass(frozen=True)
class QuantizerForm:
    """The encoding of a quantizer, the layout of its scales, and the block size along every axis of its tensor."""

    encoding: Encoding
    layout: ScaleLayout
    blocks: list[Dimension]

    def opset(self, *, constant: bool) -> int:
        """Return the first opset that supports the placement, for constants or activations."""
        return max(self.encoding.opset(constant=constant), 0 if self.encoding.portable else self.layout.opset)


def check(
    spec: QuantSpec, style: Style, shape: Sequence[Dimension] | None, *, constant: bool, dynamic: bool
) -> Encoding:
    """Return the encoding of a quantizer if the style supports it.

    Args:
        spec: the specification.
        style: the dialect of the file.
        shape: the shape of the tensor, or None if it is not known yet.
        constant: whether the tensor is a weight.
        dynamic: whether the range is computed from every tensor.

    Raises:
        ExportError: the style cannot express the quantizer; the message says why.
    """
    if style is Style.TRT:
        trt.check(spec, shape, constant=constant, dynamic=dynamic)
    if dynamic and not constant:
        check_choice(spec)
    return check_spec(spec, style)


def place(spec: QuantSpec, style: Style, shape: Sequence[Dimension], groups: Sequence[Dimension]) -> QuantizerForm:
    """Return the placement for a tensor [shape] with scales [groups, axes kept].

    Raises:
        ExportError: ONNX cannot express the specification, or has no layout for the scales.

    >>> place(QuantSpec.parse("int8 per_channel(0)"), Style.PORTABLE, (8, 4), (8, 1)).layout
    ScaleLayout(axis=0, block_size=0, repeats=(), symbolic=False)
    """
    encoding = check_spec(spec, style)
    blocks = block_sizes(spec.granularity, shape)
    where = trt.place(spec, len(blocks)) if style is Style.TRT else None
    if where is None:
        where = ScaleLayout() if encoding.portable else layout(shape, groups, blocks)
    return QuantizerForm(encoding, where, blocks)
