"""Reports: one HTML file that shows the effect of quantization on a model.

The package can be called: `fakequant.report(model, batches, path)` is `of_model.report`, whose name it shares.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from fakequant.report.advice import advised, with_advice
from fakequant.report.data import (
    RESULTS,
    Accuracy,
    Channels,
    Clip,
    Distribution,
    Improved,
    Layer,
    NodeCheck,
    Point,
    ReportData,
    Section,
    Size,
    Verification,
    accuracy_cells,
    from_json,
    read_results,
    to_json,
    write_results,
)
from fakequant.report.html.page import render, write_report
from fakequant.report.measure import Measured, distributions, measure, with_ranges
from fakequant.report.of_model import (
    curve_of,
    environment,
    improved,
    layers_left,
    report,
    report_pair,
    sizes,
    verification,
)

__all__ = [
    "RESULTS",
    "Accuracy",
    "Channels",
    "Clip",
    "Distribution",
    "Improved",
    "Layer",
    "Measured",
    "NodeCheck",
    "Point",
    "ReportData",
    "Section",
    "Size",
    "Verification",
    "accuracy_cells",
    "advised",
    "curve_of",
    "distributions",
    "environment",
    "from_json",
    "improved",
    "layers_left",
    "measure",
    "read_results",
    "render",
    "report",
    "report_pair",
    "sizes",
    "to_json",
    "verification",
    "with_advice",
    "with_ranges",
    "write_report",
    "write_results",
]


class _Callable(ModuleType):
    """A module that is called as its function `report`: import binds `fakequant.report` to the module."""

    __signature__ = inspect.signature(report)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
