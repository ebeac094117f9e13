"""The measurements themselves: small runs of each, and that a missed bar is seen."""

import json
from dataclasses import replace

import pytest
import torch

import fakequant as fq
from benchmarks import bars, compat, compat_exactness, exactness, formats, kernels, times
from benchmarks import compat_rules as rules
from fakequant.ops import library

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
    """One representable value beside the right one, in one element of each call, is counted."""
    monkeypatch.setattr(exactness, "_CHUNK", 5_000)
    plain, masked = library.fake_quantize, library.fake_quantize_with_mask
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


@pytest.mark.parametrize("case", formats.DYNAMIC, ids=lambda c: c.name)
def test_a_format_that_takes_its_scales_from_the_input_is_compared_with_the_reference(case, monkeypatch):
    small = replace(case, shape=(16, 256))
    assert small.differing() == 0
    right = kernels.fq.fake_quantize

    def wrong(x, spec, **options):
        return right(x, spec, scale=torch.full(spec.granularity.group_shape(x.shape), 0.02))

    monkeypatch.setattr(kernels.fq, "fake_quantize", wrong)
    assert small.differing() > 1000


def test_the_sign_of_a_zero_and_every_dtype_are_compared():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        zeros = torch.zeros(3, dtype=dtype)
        assert exactness.differing(zeros, zeros) == 0
        assert exactness.differing(torch.tensor([0.0, -0.0, 1.0], dtype=dtype), zeros) == 2


def _times(monkeypatch, medians):
    found = iter(medians)
    monkeypatch.setattr(kernels, "ratio", lambda *_, **__: kernels.Ratio(next(found), 0.5, 9.0, 0.1, 0.2))


CASES = [
    replace(kernels.INT8_CASE, name="near", shape=(8, 32), limit=2.0),
    replace(kernels.INT8_CASE, name="far", shape=(8, 32), limit=9.0),
]


def test_the_slowest_is_the_one_nearest_to_its_limit():
    found = {"near": times.Spread(1.9, 1.0, 5.0), "far": times.Spread(3.0, 2.0, 4.0)}
    assert bars.slowest("what", CASES, found) == bars.Bar("what, slowest (near)", "<= 2", "1.90 (1.00 to 5.00)", True)
    found["far"] = times.Spread(9.5, 2.0, 11.0)
    assert bars.slowest("what", CASES, found) == bars.Bar("what, slowest (far)", "<= 9", "9.50 (2.00 to 11.00)", False)


def test_the_middle_of_the_processes_counts():
    found = iter([0.5, 2.0, 0.25, 9.0, 1.0])
    assert times.over_processes(lambda: {"one": next(found)}) == {"one": times.Spread(1.0, 0.25, 9.0)}


def test_no_time_is_given_to_a_case_that_differs(monkeypatch):
    monkeypatch.setattr(kernels.Case, "differing", lambda case: 3)
    with pytest.raises(AssertionError, match="int8 per tensor differs from the reference"):
        times.measured()


def test_the_report_of_times_fails_on_a_missed_limit_and_on_differing_bits(monkeypatch, capsys):
    without = [replace(case, spec=fq.QuantSpec("float8_e4m3fn")) for case in CASES]
    _times(monkeypatch, [1.9, 8.9])
    assert kernels.report(without) == 0
    assert "MISSED" not in capsys.readouterr().out
    _times(monkeypatch, [2.1, 8.9])
    assert kernels.report(without) == 1
    assert capsys.readouterr().out.count("MISSED: > 2") == 1
    _times(monkeypatch, [1.0])
    monkeypatch.setattr(kernels.Case, "differing", lambda case: 3 * (case.name == "far"))
    assert kernels.report(without) == 1
    assert "far                                differs from the reference in 3 elements" in capsys.readouterr().out


def test_missed_bars_are_seen():
    assert bars.at_most("x", 1.5, 1.5).ok
    assert not bars.at_most("x", 1.51, 1.5).ok
    assert bars.nothing_differs("x", 0).ok
    assert not bars.nothing_differs("x", 1).ok
    table = bars.as_table([bars.nothing_differs("x", 1234)])
    assert table.splitlines()[-1] == "| x | 0 differing elements | 1,234 | MISSED |"


def _compat(monkeypatch, **found):
    for name, result in found.items():
        monkeypatch.setattr(compat, name, lambda *_, result=result: result)
    return [bar.ok for bar in bars.pytorch_quantization_bars()]


def test_missed_bars_of_pytorch_quantization_are_seen(monkeypatch):
    met = {
        "guide": compat.Guide(0, "128.0057"),
        "differing_from_formulas": 0,
        "differing_amax": 0,
        "entropy": compat.Search(50.0, True),
        "script_runs": True,
    }
    assert _compat(monkeypatch, **met) == [True] * 6
    assert _compat(monkeypatch, guide=compat.Guide(1, "128.0057"))[0] is False
    assert _compat(monkeypatch, guide=compat.Guide(0, "128.0056"))[0] is False
    assert _compat(monkeypatch, differing_from_formulas=1)[1] is False
    assert _compat(monkeypatch, differing_amax=1)[2] is False
    assert _compat(monkeypatch, entropy=compat.Search(49.9, True))[3:5] == [False, False]
    assert _compat(monkeypatch, entropy=compat.Search(50.0, False))[3:5] == [False, False]
    assert _compat(monkeypatch, script_runs=False)[5] is False


def test_another_amax_is_counted(monkeypatch):
    monkeypatch.setattr(rules, "streams", lambda: {"one": [torch.rand(100)]})
    assert compat.differing_amax(200) == 0
    monkeypatch.setattr(rules, "entropy_by_loops", lambda *_: 0.5)
    monkeypatch.setattr(rules, "percentile_by_rules", lambda *_: 0.5)
    assert compat.differing_amax(200) == 5


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


def study_file(folder, recovered=0.6, of_control=0.55, split="held_out"):
    path = folder / "results.json"
    row = {"calibrated": 1.75, "finetuned": 1.6, "recovered": recovered, "recovered_of_control": of_control}
    found = {
        "nats_per_byte": {"float32": 1.5, "float32_trained_on": 1.4875, "formats": {"NVFP4": row}},
        "split": split,
        "features": 48,
        "steps": 5000,
        "tuning_steps": 500,
        "bytes": {"training": 9_000, "measured": 1_234},
        "seconds": 99.6,
        "environment": {"python": "3.11.7", "torch": "2.13.0", "threads": 1},
    }
    path.write_text(json.dumps(found))
    return path


def test_the_row_of_the_study_takes_the_stricter_of_both_shares(tmp_path):
    assert bars.study_bars(tmp_path / "missing.json") == []
    for recovered, of_control, ok in ((0.6, 0.5, True), (0.6, 0.499, False), (0.499, 0.6, False)):
        (row,) = bars.study_bars(study_file(tmp_path, recovered, of_control))
        assert row.ok is ok
        assert f"{recovered:.1%}" in row.measured
        assert f"{of_control:.1%}" in row.measured


def test_the_table_of_the_study(tmp_path):
    lines = bars.study_table(study_file(tmp_path)).splitlines()
    assert lines[2] == "| float32 | 1.5000 | | 1.4875 | -0.0125 | | |"
    assert lines[3] == "| NVFP4 | 1.7500 | +0.2500 | 1.6000 | +0.1000 | 60% | 55% |"
    assert lines[-1].startswith("1,234 held-out bytes of Python 3.11.7; 48 features, 5000 steps of training, 500 of ")


@pytest.mark.parametrize("reader", [bars.study_bars, bars.study_table])
def test_a_study_of_the_development_files_is_not_published(reader, tmp_path):
    with pytest.raises(ValueError, match="was measured on the development files"):
        reader(study_file(tmp_path, split="development"))
