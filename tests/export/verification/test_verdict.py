"""Counting: which bits differ, and by how much outputs do."""

from __future__ import annotations

import math

import pytest
import torch

from fakequant.export.verification.verdict import OutputRow, Row, VerifyReport, differing_bits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits(dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([1.0, 0.0, nan, inf, -inf, nan, 1.0], dtype=dtype)
    b = torch.tensor([1.0, -0.0, -nan, inf, inf, 1.0, 1.0], dtype=dtype)
    assert differing_bits(a, b) == 3
    assert differing_bits(a[::2], a[::2]) == 0
    assert differing_bits(a[:0], a[:0]) == 0


def test_output_counts_over_batches() -> None:
    row = OutputRow("y", step=0.5)
    row.add(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
    row.add(torch.tensor([[-0.0, 5.0]]), torch.tensor([[0.0, 6.5]]))
    assert (row.elements, row.differing, row.max_abs, row.steps) == (6, 3, 2.0, 4.0)
    assert (row.rows, row.same_argmax) == (3, 2)
    assert row.share == 0.5
    assert row.argmax_agreement == pytest.approx(2 / 3)
    assert str(row) == "y: 3 of 6 differ, at most by 2, 4 steps, 7.5 dB, arg-max equal in 66.67%"


def test_signal_to_noise_ratio() -> None:
    row = OutputRow("y")
    assert row.sqnr == math.inf
    row.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    assert row.sqnr == math.inf
    row.add(torch.tensor([10.0, math.inf]), torch.tensor([9.5, math.inf]))
    assert row.sqnr == pytest.approx(10 * math.log10((9 + 16 + 9.5**2) / 0.25))
    assert f"{row.sqnr:.1f} dB" in str(row)
    row.add(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert row.sqnr == -math.inf
    empty = OutputRow("y")
    empty.add(torch.tensor([1]), torch.tensor([0]))
    assert empty.sqnr == -math.inf


def test_output_of_another_rank_has_no_argmax_and_nan_equals_nan() -> None:
    row = OutputRow("y")
    row.add(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert (row.differing, row.max_abs, row.steps, row.argmax_agreement) == (0, 0.0, None, None)
    row.add(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert (row.differing, row.max_abs) == (1, math.inf)


def test_empty_output() -> None:
    row = OutputRow("y")
    row.add(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (row.elements, row.share, row.argmax_agreement) == (0, 0.0, None)


def test_report_is_exact_only_if_every_row_is() -> None:
    good, bad, changed = Row("a", "int8", "weight", 4), Row("b", "int8", "weight", 4, 1), Row("c", "int8", "weight")
    changed.intact = False
    assert VerifyReport("f", "given", [good]).exact
    assert not VerifyReport("f", "given", [good, bad]).exact
    assert not VerifyReport("f", "given", [good, changed]).exact
    assert VerifyReport("f", "given", [good, bad]).differing == 1


def test_nothing_compared_is_not_exact() -> None:
    report = VerifyReport("f", "given", [])
    assert not report.exact
    assert "The file names no quantizer" in str(report)


def test_nodes_that_nothing_compares_are_said() -> None:
    report = VerifyReport("f", "given", [Row("a", "int8", "weight", 4)], uncovered=[f"n{i}" for i in range(7)])
    assert not report.exact
    assert "7 nodes quantize but belong to no quantizer of the file" in str(report)
    assert "n0, n1, n2, n3, n4, ..." in str(report)
