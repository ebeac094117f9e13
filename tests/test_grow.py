"""No function does more work for each layer of a larger model: calls are counted, nothing is timed."""

from __future__ import annotations

from benchmarks import grow


def test_an_exponent_is_that_between_the_two_largest_sizes() -> None:
    row: dict[str, float | str] = {"8": 9.0, "32": 5.0, "128": 1.0, "512": 16.0}
    assert grow.exponent(row) == 2
    assert grow.exponent({**row, "512": "ConfigError: no"}) is None


def test_what_grows_too_fast_or_fails_is_named() -> None:
    rows: dict[str, dict[str, float | str]] = {
        "linear": {"128": 1.0, "512": 4.9},
        "square": {"128": 1.0, "512": 16.0},
        "fails": {"128": 1.0, "512": "ConfigError: no"},
    }
    assert grow.too_fast(rows) == ["square", "fails"]
    text = grow.table(rows, {"processor": "CPU", "torch": "2", "commit": "abc"})
    assert "| square |  |  | 1 | 16 | 2.00 |  |" in text
    assert "| fails |  |  | 1 | ConfigError | - |  |" in text
