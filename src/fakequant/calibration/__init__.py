"""Calibration: from a stream of tensors to the range to quantize.

A method is a file with a class that registers itself; it is imported here.
"""

from .calibrator import Calibrator, calibrators, make_calibrator, register_calibrator
from .counts import Histogram
from .entropy import EntropyCalibrator
from .extrema import MaxCalibrator
from .histogram import HistogramCalibrator
from .mse import MseCalibrator
from .percentile import PercentileCalibrator

__all__ = [
    "Calibrator",
    "EntropyCalibrator",
    "Histogram",
    "HistogramCalibrator",
    "MaxCalibrator",
    "MseCalibrator",
    "PercentileCalibrator",
    "calibrators",
    "make_calibrator",
    "register_calibrator",
]
