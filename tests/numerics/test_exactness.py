"""The arithmetic of the libraries that the package names, bit by bit; `make bars` compares 10,000,000 numbers each."""

import pytest
import torch

from fakequant.ops import library
from fakequant.ops.graph_operators import apply_plan
from tests.support import compat_exactness, exactness

COMPARISONS = [
    exactness.divide_against_onnxruntime,
    exactness.reciprocal_against_aten_per_tensor,
    exactness.reciprocal_against_aten_per_channel,
    exactness.multiplier_against_its_formula,
    compat_exactness.against_aten,
    compat_exactness.learnable_against_aten,
    compat_exactness.against_onnxruntime,
]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: c.__name__)
def test_nothing_differs_from_the_libraries(comparison, monkeypatch):
    monkeypatch.setattr(exactness, "_CHUNK", 5_000)
    assert comparison(80_000) == 0


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: c.__name__)
def test_the_comparisons_can_fail(comparison, monkeypatch):
    monkeypatch.setattr(exactness, "_CHUNK", 5_000)
    plain, masked = library.fake_quantize, library.fake_quantize_with_mask
    monkeypatch.setattr("fakequant.functional.apply_plan", lambda *call: nudged(apply_plan(*call)))
    monkeypatch.setattr(library, "fake_quantize", lambda *call, **named: nudged(plain(*call, **named)))
    monkeypatch.setattr(
        library,
        "fake_quantize_with_mask",
        lambda *call, **named: (nudged(masked(*call, **named)[0]), masked(*call, **named)[1]),
    )
    assert comparison(80_000) >= 2


def nudged(y):
    nudge = torch.zeros_like(y, memory_format=torch.contiguous_format)
    nudge.view(-1)[17] = 1.0
    return y + nudge


def test_nothing_differs_from_the_recorded_kernels_and_one_element_would_be_counted(monkeypatch):
    assert compat_exactness.against_recorded_kernels() == 0
    masked = library.fake_quantize_with_mask
    monkeypatch.setattr(
        library,
        "fake_quantize_with_mask",
        lambda *call, **named: (nudged(masked(*call, **named)[0]), masked(*call, **named)[1]),
    )
    assert compat_exactness.against_recorded_kernels() == len(compat_exactness.recorded_kernels()[1]) - 1
    monkeypatch.setattr(
        library,
        "fake_quantize_with_mask",
        lambda *call, **named: (masked(*call, **named)[0], ~masked(*call, **named)[1]),
    )
    assert compat_exactness.against_recorded_kernels() > 256


def test_float8_equals_decoded_codes_and_other_scales_would_be_counted(monkeypatch):
    assert exactness.float8_against_decoded_codes() == 0
    right = exactness.fq.fake_quantize
    monkeypatch.setattr(exactness.fq, "fake_quantize", lambda x, name, scale: right(x, name, scale=scale * 1.5))
    assert exactness.float8_against_decoded_codes() > 10_000


def test_half_of_the_numbers_are_ties_or_beside_them():
    for x, step in exactness.chunks(20_000, -128, 127, 0):
        fraction = (x / step - (x / step).floor() - 0.5).abs()
        assert 0.45 < (fraction < 1e-4).float().mean() < 0.6


def test_the_sign_of_a_zero_and_every_dtype_are_compared():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        zeros = torch.zeros(3, dtype=dtype)
        assert exactness.differing(zeros, zeros) == 0
        assert exactness.differing(torch.tensor([0.0, -0.0, 1.0], dtype=dtype), zeros) == 2
