"""The dialects of ONNX for an exported file."""

from __future__ import annotations

from enum import Enum

from fakequant.errors import ExportError, nearest

_ALIASES = {"tensorrt": "trt", "onnxruntime": "portable", "ort": "portable", "onnx": "standard"}
"""What people call the engine or the form."""


class Style(str, Enum):
    """Which operators and element types a file may use."""

    PORTABLE = "portable"
    """Operators that ONNX Runtime runs; basic operators compute 4- and 6-bit floats, tables and scales in E8M0."""
    STANDARD = "standard"
    """QuantizeLinear and DequantizeLinear with all element types of the ONNX standard; few runtimes have them all."""
    TRT = "trt"
    """Operators that TensorRT's parser reads, including those of domain `trt` for dynamic MXFP8."""

    @classmethod
    def parse(cls, text: str) -> Style:
        """Return the style with a name.

        Raises:
            ExportError: an unknown name; the message offers the nearest.

        >>> Style.parse("standard")
        <Style.STANDARD: 'standard'>
        """
        names = [style.value for style in cls]
        if text not in names:
            raise ExportError(f"unknown style {text!r}{nearest(_ALIASES.get(text.lower(), text), names)}")
        return cls(text)
