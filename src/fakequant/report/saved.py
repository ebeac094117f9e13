"""The content of a report as JSON, for other programs and for a comparison of two runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fakequant.errors import OutputError
from fakequant.files import writable_file, write_whole
from fakequant.report.data import (
    Accuracy,
    Channels,
    Clip,
    Distribution,
    Improved,
    Layer,
    NodeCheck,
    Point,
    ReportData,
    Section,
    Size,
    Verification,
)

RESULTS = "results.json"
"""The name of the file in the folder of a job."""
_FORM = 1
_LISTS: dict[str, type] = {
    "accuracy": Accuracy,
    "layers": Layer,
    "channels": Channels,
    "improvement": Improved,
    "curve": Point,
    "sizes": Size,
}


def to_json(data: ReportData) -> str:
    """The content as JSON; infinite numbers are the texts "inf" and "-inf", because JSON has none.

    >>> from_json(to_json(ReportData("A model", layers=[Layer("0", "Linear", alone=math.inf)]))).layers[0].alone
    inf
    """
    values = {**asdict(data), "missing": {section.name: why for section, why in data.missing.items()}}
    return json.dumps({"fakequant_report": _FORM, **_plain(values)}, indent=1)


def from_json(text: str) -> ReportData:
    """The content that `to_json` wrote.

    Raises:
        ValueError, KeyError, TypeError: another text.
    """
    values = _numbers(json.loads(text))
    if values.pop("fakequant_report") != _FORM:
        raise ValueError("another form of report")
    for name, kind in _LISTS.items():
        values[name] = [kind(**entry) for entry in values[name]]
    for entry in values["distributions"]:
        entry["clips"] = {name: Clip(**clip) for name, clip in entry["clips"].items()}
        entry["ranges"] = {name: tuple(ends) for name, ends in entry["ranges"].items()}
    values["distributions"] = [Distribution(**entry) for entry in values["distributions"]]
    for entry in values["verifications"]:
        entry["nodes"] = [NodeCheck(**node) for node in entry["nodes"]]
    values["verifications"] = [Verification(**entry) for entry in values["verifications"]]
    values["missing"] = {Section[name]: why for name, why in values["missing"].items()}
    return ReportData(**values)


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
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{file} holds no results of a report; write it again by `fakequant quantize`") from error


_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value: Any) -> Any:
    """The ratios with the texts of infinite numbers read back; names are left as they are."""
    if isinstance(value, dict):
        return {
            name: _INFINITE.get(item, item)
            if name in ("alone", "input_sqnr", "weight_sqnr", "sqnr", "whole", "value", "metric")
            and isinstance(item, str)
            else _numbers(item)
            for name, item in value.items()
        }
    return [_numbers(item) for item in value] if isinstance(value, list) else value
