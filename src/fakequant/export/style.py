"""The dialects of ONNX that a file can be written in."""

from __future__ import annotations

from enum import Enum

from fakequant.errors import ExportError, nearest


class Style(str, Enum):
    """Which operators and element types a file may use."""

    PORTABLE = "portable"
    """Those that ONNX Runtime runs: what it lacks (4- and 6-bit floats, tables, scales in E8M0) is said by others."""
    STANDARD = "standard"
    """QuantizeLinear and DequantizeLinear of the ONNX standard, with all its element types, whoever runs them."""
    TRT = "trt"
    """Those that TensorRT's parser reads; in domain `trt` where the standard has no dynamic MXFP8."""

    @classmethod
    def parse(cls, text: str) -> Style:
        """The style of a name.

        Raises:
            ExportError: there is none; the nearest is offered.

        >>> Style.parse("standard")
        <Style.STANDARD: 'standard'>
        """
        names = [style.value for style in cls]
        if text not in names:
            raise ExportError(f"unknown style {text!r}: expected {', '.join(names)}{nearest(text, names)}")
        return cls(text)
