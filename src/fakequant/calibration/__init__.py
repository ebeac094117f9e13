"""Calibration: from a stream of tensors to the range to quantize.

An `Observer` collects, a `Calibrator` is an observer that answers with a range. A method is a file with a class that
registers itself; it is imported here.
"""

from .calibrator import (
    DEFAULT_METHOD,
    Calibrator,
    calibrators,
    check_mergeable,
    find_method,
    make_calibrator,
    register_calibrator,
)
from .counts import Histogram
from .entropy import EntropyCalibrator
from .extrema import MaxCalibrator
from .histogram import HistogramCalibrator
from .moving_average import MovingAverageCalibrator
from .mse import MseCalibrator
from .observer import Observer
from .percentile import PercentileCalibrator

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
