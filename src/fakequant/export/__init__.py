"""Export to ONNX with QuantizeLinear and DequantizeLinear, and verify that ONNX Runtime computes the same numbers."""

from fakequant.export.exporter import Exported, ExportReport, export_onnx
from fakequant.export.verification.verdict import OutputRow, Row, VerifyReport
from fakequant.export.verification.verify import verify_onnx

__all__ = ["ExportReport", "Exported", "OutputRow", "Row", "VerifyReport", "export_onnx", "verify_onnx"]
