"""Export to ONNX, verified in ONNX Runtime; to graphs of torch; and to files of mobile engines, run where possible."""

from fakequant.export.coreai import export_coreai
from fakequant.export.coreml import export_coreml
from fakequant.export.encodings import Encodings, export_encodings, read_encodings
from fakequant.export.engine_file import EngineFile
from fakequant.export.executorch import export_executorch
from fakequant.export.exporter import Exported, ExportReport, export_onnx
from fakequant.export.litert import export_litert
from fakequant.export.pt2e import export_pt2e
from fakequant.export.verdict import OutputRow, Row, VerifyReport
from fakequant.export.verify import verify_onnx

__all__ = [
    "Encodings",
    "EngineFile",
    "ExportReport",
    "Exported",
    "OutputRow",
    "Row",
    "VerifyReport",
    "export_coreai",
    "export_coreml",
    "export_encodings",
    "export_executorch",
    "export_litert",
    "export_onnx",
    "export_pt2e",
    "read_encodings",
    "verify_onnx",
]
