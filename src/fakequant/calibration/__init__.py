"""Calibration: computes the range to quantize from a stream of tensors.

An `Observer` collects statistics; a `Calibrator` is an observer that also computes a range from them. Each calibrator
class is registered under the name of its method, for example "mse".
"""

from fakequant.calibration.calibrator import (
    DEFAULT_METHOD,
    Calibrator,
    Histogram,
    Observer,
    calibrators,
    check_mergeable,
    find_method,
    make_calibrator,
    register_calibrator,
)
from fakequant.calibration.extrema import MaxCalibrator, MovingAverageCalibrator
from fakequant.calibration.histogram import EntropyCalibrator, HistogramCalibrator, MseCalibrator, PercentileCalibrator

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
