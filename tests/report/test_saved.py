"""The figures of a report, read back from a file that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakequant.errors import OutputError
from fakequant.report import read_results, to_json
from tests.support.report_data import full


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("layers", 0, "elements"), "many"),
        (("layers", 0, "elements"), 10**400),
        (("layers", 0, "name"), None),
        (("layers", 0, "unknown"), 1),
        (("distributions", 0, "edges"), [0.0]),
        (("distributions", 0, "ranges"), {"max": [1.0]}),
        (("distributions", 0, "counts"), [-5]),
        (("channels", 0, "lowest"), []),
        (("accuracy", 0), {"format": "INT8"}),
        (("verifications", 0, "rows"), 3),
        (("missing",), {"NOTHING": "x"}),
        (("reported",), 70),
        (("title",), []),
        ((), [1]),
        ((), "[" * 100_000),
        ((), b"\xff"),
    ],
)
def test_damaged_figures_are_refused(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    """In one line that says what is wrong, at which place."""
    values = json.loads(to_json(full()))
    if place:
        *path, last = place
        within = values
        for key in path:
            within = within[key]
        within[last] = value
        value = json.dumps(values)
    content = value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else b"[1]"
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(OutputError, match=r"results\.json holds no results of a report: .*; write it again by"):
        read_results(tmp_path)
