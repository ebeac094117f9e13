"""Calibrators: from batches of tensors to an amax."""

from .calibrator import _Calibrator
from .histogram import HistogramCalibrator
from .max import MaxCalibrator
from .weights import calibrate_weights

__all__ = ["HistogramCalibrator", "MaxCalibrator", "_Calibrator", "calibrate_weights"]
