"""The measurements themselves: small runs of each, and that a missed bar is seen."""

import json

import pytest
import torch

from benchmarks import bars, exactness, kernels

COMPARISONS = [
    exactness.divide_against_onnxruntime,
    exactness.reciprocal_against_aten_per_tensor,
    exactness.reciprocal_against_aten_per_channel,
    exactness.multiplier_against_its_formula,
]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: c.__name__)
def test_nothing_differs_from_the_libraries(comparison, monkeypatch):
    monkeypatch.setattr(exactness, "_CHUNK", 5_000)
    assert comparison(80_000) == 0


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: c.__name__)
def test_the_comparisons_can_fail(comparison, monkeypatch):
    """One representable value beside the right one, in one element of each call, is counted."""
    monkeypatch.setattr(exactness, "_CHUNK", 5_000)
    right = exactness.fq.fake_quantize

    def wrong(x, *arguments, **options):
        nudge = torch.zeros(x.shape)
        nudge.view(-1)[17] = 1.0
        return right(x, *arguments, **options) + nudge

    monkeypatch.setattr(exactness.fq, "fake_quantize", wrong)
    assert comparison(80_000) >= 2


def test_half_of_the_numbers_are_ties_or_beside_them():
    for x, step in exactness.chunks(20_000, -128, 127, 0):
        fraction = (x / step - (x / step).floor() - 0.5).abs()
        assert 0.45 < (fraction < 1e-4).float().mean() < 0.6


def test_saved_bytes():
    assert bars.saved_bytes_per_element(1 << 12) == 1 / 8


def test_a_case_that_differs_is_counted_and_one_that_does_not_is_not():
    case = kernels.Case("small", kernels.INT8_CASE.spec, shape=(64, 32))
    assert case.differing() == 0
    found = kernels.ratio(case.run(), case.copy(), case.inputs(4), rounds=8)
    assert found.low <= found.median <= found.high
    assert found.seconds > 0


def test_missed_bars_are_seen():
    assert bars.at_most("x", 1.5, 1.5).ok
    assert not bars.at_most("x", 1.51, 1.5).ok
    assert bars.nothing_differs("x", 0).ok
    assert not bars.nothing_differs("x", 1).ok
    table = bars.as_table([bars.nothing_differs("x", 1234)])
    assert table.splitlines()[-1] == "| x | 0 differing elements | 1,234 | MISSED |"


def test_readme_gets_the_table_between_its_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{bars.BEGIN}\nold\n{bars.END}\nafter\n")
    for _ in range(2):
        bars.update_readme([bars.nothing_differs("what", 0)], readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{bars.BEGIN}\n| what | bar |")
    assert text.endswith(f"\n{bars.END}\nafter\n")
    assert "old" not in text
    assert text.count("| what | 0 differing elements | 0 | ok |") == 1
    assert list(tmp_path.iterdir()) == [readme]


def test_readme_without_markers_is_an_error(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="lacks the markers"):
        bars.update_readme([], readme)
    assert readme.read_text() == "nothing"


def test_rows_of_the_demo(tmp_path):
    assert bars.demo_bars(tmp_path / "missing.json") == []
    percent = {"float32": 98.5, "int8_best": 98.2, "int4_finetuned": 97.4}
    models = {"int8": {"elements": 1000, "differing": 0, "exact": True}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"percent": percent, "models": models}))
    rows = bars.demo_bars(path)
    assert [row.ok for row in rows] == [True, True, False, True]
