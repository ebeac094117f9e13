"""Each published bar is computed from its measurements as it says, and a missed one is seen."""

import json

import pytest

from benchmarks import bars, kinds, records
from benchmarks.harness import COPY, MEASURED, Result
from benchmarks.limits import FUSED, LIMITS, Limit


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


def test_missed_bars_are_seen():
    assert bars.at_most("x", 1.5, 1.5).ok
    assert not bars.at_most("x", 1.51, 1.5).ok
    assert bars.nothing_differs("x", 0).ok
    assert not bars.nothing_differs("x", 1).ok
    table = bars.as_table([bars.nothing_differs("x", 1234)])
    assert table.splitlines()[-1] == "| x | 0 differing elements | 1,234 | MISSED |"


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
