"""Each published bar is computed from its measurements as it says, and a missed one is seen."""

import json

import pytest
import torch

from benchmarks import bars, compat, kinds, records
from benchmarks.harness import COPY, MEASURED, Result
from benchmarks.limits import FUSED, LIMITS, Limit
from benchmarks.record import write_lines
from tests.support import compat_rules as rules


def test_saved_bytes():
    assert bars.saved_bytes_per_element(1 << 12) == 1 / 8


def results_of(limit, *medians):
    """A result of every case of a limit, its pairs around a median; None: differs from the reference."""
    found = []
    for case, median in zip(limit.cases, medians, strict=True):
        pairs = () if median is None else tuple((median * share, 1.0) for share in (0.5, 1.0, 3.0))
        what = (case.name, case.direction, case.text, case.elements, case.dtype_name, limit.against)
        found.append(Result(*what, *(("differs", 3) if median is None else (MEASURED, 0)), pairs))
    return found


NEAR, FAR = kinds.INT8_TENSOR.case(64), kinds.INT8_CHANNEL.case(4096)
ONE, TWO = Limit("one", (NEAR,), COPY, 2.0), Limit("two", (NEAR, FAR), COPY, 2.0)


@pytest.mark.parametrize(("median", "ok"), [(2.0, True), (2.01, False)])
def test_a_limit_is_a_bar_with_its_percentiles(median, ok, monkeypatch):
    monkeypatch.setattr(bars, "LIMITS", (ONE,))
    (bar,) = bars.limit_bars(results_of(ONE, median))
    assert bar == bars.Bar("one", "<= 2", f"{median:.2f} ({0.7 * median:.2f} to {2.2 * median:.2f})", ok)


def test_the_slowest_case_is_named_by_what_sets_it_apart(monkeypatch):
    monkeypatch.setattr(bars, "LIMITS", (TWO,))
    (bar,) = bars.limit_bars(results_of(TWO, 1.0, 2.5))
    assert (bar.what, bar.ok) == ("two, slowest (int8 per channel, 4,096)", False)
    (bar,) = bars.limit_bars(results_of(TWO, 1.5, 0.5))
    assert (bar.what, bar.ok) == ("two, slowest (int8 per tensor, 64)", True)


def test_what_differs_or_was_not_measured_misses_its_limit(monkeypatch):
    monkeypatch.setattr(bars, "LIMITS", (TWO,))
    (bar,) = bars.limit_bars(results_of(TWO, 0.5, None))
    assert (bar.measured, bar.ok) == ("int8 per channel: differs", False)
    (bar,) = bars.limit_bars(results_of(TWO, 0.5, 0.5)[:1])
    assert (bar.measured, bar.ok) == ("1 not measured", False)


def test_every_limit_has_cases_of_its_own_key():
    for limit in LIMITS:
        assert (
            len({(c.name, c.direction, c.elements, c.dtype_name, c.text) for c in limit.cases}) == len(limit.cases) > 0
        )
        assert limit.most > 0
    assert [limit.most for limit in LIMITS if limit.against == FUSED] == [1]


def line_of(against, median, elements=4096, **more):
    outcome = MEASURED if median else "not installed"
    common = {"case": "int8", "direction": "forward", "spec": "int8", "dtype": "float32", "elements": elements}
    return common | {"against": against, "outcome": outcome, "p50": median} | more


def test_the_bar_of_others_at_every_size_is_the_nearest(tmp_path):
    path = tmp_path / "bench.jsonl"
    assert bars.peer_bars(path) == []
    lines = [
        line_of("ModelOpt TensorQuantizer", 0.25),
        line_of("torchao MXTensor", 0.8),
        line_of("torchao MXTensor, compiled", 1.5),
        line_of("Brevitas Int8", None),
        line_of("ATen", 0.5, case="int8 per tensor"),
        line_of("ATen", 2.0, case="a plain copy"),
        line_of("torch.compile", 2.0, 1 << 24, case="MXFP4"),
        line_of("torchao MXTensor", 0.5, 1 << 24),
    ]
    write_lines(path, lines)
    small, *between, large = bars.peer_bars(path)
    assert small.what == (
        "3 calls of ATen, ModelOpt, torchao, 4,096 float32: time over ours, nearest (torchao MXTensor, int8, forward)"
    )
    assert (small.bar, small.measured, small.ok) == ("> 1", "1.25", True)
    assert [(bar.measured, bar.ok) for bar in between] == [("none is timed", False)] * 3
    assert large.what.endswith("16,777,216 float32: time over ours, nearest (torch.compile, MXFP4, forward)")
    assert (large.measured, large.ok) == ("0.50", False)


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


WHERE = {"processor": "CPU", "threads": "2", "torch": "2"}


def test_the_page_and_the_readme_get_their_tables_between_the_markers(tmp_path):
    readme, page = tmp_path / "README.md", tmp_path / "bars.md"
    readme.write_text(f"before\n{bars.FIGURES_BEGIN}\nold\n{bars.FIGURES_END}\nafter\n")
    page.write_text(f"before\n{bars.BEGIN}\nold\n{bars.END}\nafter\n")
    measured = [bars.Bar(f"{start}, more words", "<= 1", f"figure {n}", True) for n, start in enumerate(bars.FIGURES)]
    for _ in range(2):
        bars.write_pages([bars.nothing_differs("what", 0), *measured], WHERE, readme, page)
    assert page.read_text().startswith(f"before\n{bars.BEGIN}\n| what | bar |")
    assert page.read_text().endswith(f"\n{bars.END}\nafter\n")
    assert page.read_text().count("| what | 0 differing elements | 0 | ok |") == 1
    assert "old" not in page.read_text() + readme.read_text()
    for n, words in enumerate(bars.FIGURES.values()):
        assert readme.read_text().count(f"| {words} | figure {n} |") == 1
    assert sorted(tmp_path.iterdir()) == [readme, page]


def test_the_pages_of_bars_have_their_markers_and_what_was_measured():
    measured = [bars.Bar(**bar) for bar in json.loads(bars.RESULTS.read_text())["bars"]]
    assert bars.as_table([*measured, *records.record_bars()]) in bars.PAGE.read_text(), "--pages writes it"
    assert bars.figures_table(measured) in bars.README.read_text()


def test_rows_of_the_demo(tmp_path):
    assert bars.demo_bars(tmp_path / "missing.json") == []
    percent = {"float32": 98.5, "int8_best": 98.2, "int4_finetuned": 97.4}
    models = {"int8": {"elements": 1000, "differing": 0, "exact": True}}
    path = tmp_path / "results.json"
    codes = {"images": 599, "differing": 3, "ties": 2}
    path.write_text(json.dumps({"percent": percent, "models": models, "by_codes": codes}))
    rows = bars.demo_bars(path)
    assert [row.ok for row in rows] == [True, True, False, False, True]
    assert rows[3].measured == "1 of 599; 2 ties"


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


@pytest.mark.parametrize("reader", [bars.study_bars, bars.study_table])
def test_a_study_of_the_development_files_is_not_published(reader, tmp_path):
    with pytest.raises(ValueError, match="was measured on the development files"):
        reader(study_file(tmp_path, split="development"))
