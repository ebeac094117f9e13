"""Rows of docs/notes/bars.md from records of other commands: each says what the record holds, and sees a missed bar."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import misuses, records
from tests.support import jobs

WHEEL = Path(__file__).parents[1] / "native" / "wheel.py"


def rows_of(measured: list[str], ok: list[bool], bars: list[records.Bar]) -> bool:
    return [(bar.measured, bar.ok) for bar in bars] == list(zip(measured, ok, strict=True))


def test_the_limits_of_wheels_are_those_that_fail_make_wheel() -> None:
    names = runpy.run_path(str(WHEEL))
    assert (names["LARGEST"], names["LONGEST"]) == (records.LARGEST_WHEEL, records.LONGEST_INSTALL)
    good = {"wheel": "a-abi3.whl", "bytes": 3_999_999, "installed": 1.5, "first": 28.4, "served": "kernels"}
    assert names["good"](good)
    for change in ({"bytes": 4_000_000}, {"first": 28.5}, {"served": "reference"}, {"wheel": "a-none-any.whl"}):
        assert not names["good"]({**good, **change}), change
    assert not names["good"](None)


def test_mistakes_are_the_cases_with_a_name(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = '<testcase name="a[one]"/><testcase name="a[two]"><failure/></testcase><testcase name="b"/>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = misuses.counted(report)
    assert found == {"tried": 2, "clear": 1}
    assert rows_of(["1 of 2"], [False], records.misuse_bars(found))
    assert rows_of(["2 of 2"], [True], records.misuse_bars({"tried": 2, "clear": 2}))
    assert rows_of(["0 of 0"], [False], records.misuse_bars({"tried": 0, "clear": 0}))


def test_jobs_are_counted_on_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    (bar,) = records.job_bars()
    assert (bar.ok, bar.measured.count("(")) == (True, 5)
    monkeypatch.setattr(jobs, "lines", lambda job: (2, 1) if job.startswith("Export") else (1, 1))
    (bar,) = records.job_bars()
    assert (bar.measured, bar.ok) == ("1 (1), 1 (1), 1 (1), 1 (1), 2 (1)", False)


def test_a_missing_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there.json"
    there.write_text(json.dumps({"tried": 1, "clear": 1}))
    known = {tmp_path / "none.json": ("make it", records.report_bars), there: ("", records.misuse_bars)}
    monkeypatch.setattr(records, "RECORDS", known)
    assert [bar.measured for bar in records.record_bars()][:1] == ["1 of 1"]
    assert capsys.readouterr().out == f"{tmp_path / 'none.json'} is missing: run `make it` for its rows\n"
