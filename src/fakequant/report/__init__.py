"""Reports: one HTML file that shows the effect of quantization on a model."""

from fakequant.report.collect import distributions, environment, layers_left, pictures, sizes, verification
from fakequant.report.data import (
    Accuracy,
    Distribution,
    NodeCheck,
    ReportData,
    Section,
    Size,
    Verification,
    accuracy_cells,
)
from fakequant.report.page import render, write_report

__all__ = [
    "Accuracy",
    "Distribution",
    "NodeCheck",
    "ReportData",
    "Section",
    "Size",
    "Verification",
    "accuracy_cells",
    "distributions",
    "environment",
    "layers_left",
    "pictures",
    "render",
    "sizes",
    "verification",
    "write_report",
]
