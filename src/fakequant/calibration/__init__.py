"""Calibration: from a stream of tensors to the range to quantize.

An `Observer` collects, a `Calibrator` is an observer that answers with a range. A method is a file with a class that
registers itself; it is imported here.
"""

from fakequant.calibration.calibrator import Histogram, Observer
from fakequant.calibration.extrema import MovingAverageCalibrator
from fakequant.calibration.histogram import MseCalibrator, PercentileCalibrator

from .calibrator import (
    DEFAULT_METHOD,
    Calibrator,
    calibrators,
    check_mergeable,
    find_method,
    make_calibrator,
    register_calibrator,
)
from .entropy import EntropyCalibrator
from .extrema import MaxCalibrator
from .histogram import HistogramCalibrator

__all__ = [
    "DEFAULT_METHOD",
    "Calibrator",
    "EntropyCalibrator",
    "Histogram",
    "HistogramCalibrator",
    "MaxCalibrator",
    "MovingAverageCalibrator",
    "MseCalibrator",
    "Observer",
    "PercentileCalibrator",
    "calibrators",
    "check_mergeable",
    "find_method",
    "make_calibrator",
    "register_calibrator",
]
