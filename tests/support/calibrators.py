"""Calibrators that have seen batches, and their states and ranges compared bit by bit."""

from __future__ import annotations

import torch

from fakequant import QuantSpec
from fakequant.calibration import Calibrator, calibrators, make_calibrator
from tests.support.bits import assert_same_bits

MERGEABLE = [method for method in calibrators() if make_calibrator(method, "int8").mergeable]
OTHERS = [method for method in calibrators() if method not in MERGEABLE]


def state_bits(calibrator: Calibrator) -> dict:
    return {name: (value.dtype, value.tolist()) for name, value in calibrator.state_dict().items()}


def assert_same_range(actual, expected):
    assert_same_bits(actual.lo, expected.lo, "lo")
    assert_same_bits(actual.hi, expected.hi, "hi")


def watched(method: str, spec: QuantSpec | str, *batches: torch.Tensor) -> Calibrator:
    calibrator = make_calibrator(method, spec)
    for batch in batches:
        calibrator.observe(batch)
    return calibrator
