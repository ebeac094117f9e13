"""Export to ONNX with QuantizeLinear and DequantizeLinear, and verify that ONNX Runtime computes the same numbers."""

from fakequant.export.exporter import Exported, ExportReport, export_onnx
from fakequant.export.verdict import OutputRow, Row, VerifyReport
from fakequant.export.verify import verify_onnx

__all__ = ["ExportReport", "Exported", "OutputRow", "Row", "VerifyReport", "export_onnx", "verify_onnx"]
