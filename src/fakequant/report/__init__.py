"""Reports: one HTML file that shows the effect of quantization on a model.

The package can be called: `fakequant.report(model, batches, path)` calls `of_model.report`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from fakequant.report.data import (
    RESULTS,
    Accuracy,
    Channels,
    Clip,
    Distribution,
    Layer,
    ReportData,
    Section,
    Size,
    accuracy_cells,
    from_json,
    read_results,
    to_json,
    write_results,
)
from fakequant.report.measure import Measured, distributions, measure, with_ranges
from fakequant.report.of_model import (
    advised,
    comparison_of,
    environment,
    layers_left,
    report,
    report_pair,
    sizes,
    with_advice,
)
from fakequant.report.page import render, write_report

__all__ = [
    "RESULTS",
    "Accuracy",
    "Channels",
    "Clip",
    "Distribution",
    "Layer",
    "Measured",
    "ReportData",
    "Section",
    "Size",
    "accuracy_cells",
    "advised",
    "comparison_of",
    "distributions",
    "environment",
    "from_json",
    "layers_left",
    "measure",
    "read_results",
    "render",
    "report",
    "report_pair",
    "sizes",
    "to_json",
    "with_advice",
    "with_ranges",
    "write_report",
    "write_results",
]


class _Callable(ModuleType):
    """A module that can be called as its function `report`, because `import` binds `fakequant.report` to the module."""

    __signature__ = inspect.signature(report)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
