"""The content of a report as JSON, for other programs and for a comparison of two runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fakequant.errors import OutputError
from fakequant.files import writable_file, write_whole
from fakequant.model.state.json_values import UnexpectedValue, mapping_of, value_of
from fakequant.report.data import ReportData

RESULTS = "results.json"
"""The name of the file in the folder of a job."""
_FORM = 1


def to_json(data: ReportData) -> str:
    """The content as JSON; infinite numbers are the texts "inf" and "-inf", because JSON has none.

    >>> from_json(to_json(ReportData("A model", environment={"torch": "2.13"}))).environment
    {'torch': '2.13'}
    """
    values = {**asdict(data), "missing": {section.name: why for section, why in data.missing.items()}}
    return json.dumps({"fakequant_report": _FORM, **_plain(values)}, indent=1)


def from_json(text: str) -> ReportData:
    """The content that `to_json` wrote.

    Raises:
        ValueError, RecursionError: another text.
    """
    values = mapping_of(json.loads(text), "the file", lambda item, place: item)
    if values.pop("fakequant_report", None) != _FORM:
        raise UnexpectedValue("fakequant_report is another one")
    found: ReportData = value_of(values, "the file", ReportData)
    if found.accuracy and not -len(found.accuracy) <= found.reported < len(found.accuracy):
        raise UnexpectedValue(f"reported is {found.reported}, and accuracy has {len(found.accuracy)} rows")
    for row in found.distributions:
        rises = all(map(math.isfinite, row.edges)) and len(row.edges) > 1 and row.edges[0] < row.edges[-1]
        if len(row.edges) != len(row.counts) + 1 or not rises or min(row.counts, default=-1) < 0:
            raise UnexpectedValue(f"{row.name!r:.80} has edges and counts of no histogram")
    for row in found.channels:
        if len(row.lowest) != len(row.highest) or not all(map(math.isfinite, (*row.lowest, *row.highest))):
            raise UnexpectedValue(f"{row.name!r:.80} has ends of channels that are no pairs of numbers")
    return found


def write_results(path: Path, data: ReportData) -> None:
    """Write the content as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(writable_file(path), to_json(data).encode("utf-8", "backslashreplace"))


def read_results(path: Path) -> ReportData:
    """Read the content of a report from its JSON file, from a page beside such a file, or from the folder of a job.

    Raises:
        OutputError: there is none; says what to do.
    """
    file = path / RESULTS if path.is_dir() else path.with_suffix(".json")
    if not file.is_file():
        raise OutputError(
            f"there is no {file}; give the folder of `fakequant quantize`, or the page that fakequant.report wrote"
        )
    try:
        return from_json(file.read_text())
    except OSError as error:
        raise OutputError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise OutputError(
            f"{file} holds no results of a report: {error}; write it again by `fakequant quantize`"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
