"""The points of a curve from what `fakequant.compare` found or wrote."""

from __future__ import annotations

import math
import os
from pathlib import Path

from fakequant.errors import ConfigError
from fakequant.files import read_whole
from fakequant.ptq.formats.comparison import Compared, Comparison, read_rows
from fakequant.report.data import Point

DECIBELS = "signal over noise of the output, dB"


def curve_of(comparison: Comparison | str | os.PathLike[str]) -> tuple[list[Point], str]:
    """The points of a comparison and what they measure: "" for the metric of the report, else a name.

    Where a row has no metric, all rows show the error of the output in dB, which is larger for better ones. A row that
    failed becomes a point without a place, with its reason.

    Args:
        comparison: what `fakequant.compare` returned, or the path of the rows that it wrote.

    Raises:
        ConfigError: the file cannot be read or holds no rows.
    """
    found = comparison if isinstance(comparison, Comparison) else _read(Path(comparison))
    rows = found.rows
    with_metric = all(row.metric is not None for row in rows if not row.failed)
    return [_point(row, with_metric, found.negated) for row in rows], "" if with_metric else DECIBELS


def _point(row: Compared, with_metric: bool, negated: bool) -> Point:
    label = " ".join(filter(None, row.way))
    if row.failed:
        return Point(label, 0.0, -math.inf, row.failed)
    if with_metric and row.metric is not None:
        return Point(label, row.bits, row.metric, negated=negated)
    return Point(label, row.bits, -10 * math.log10(row.error) if row.error > 0 else math.inf)


def _read(path: Path) -> Comparison:
    wanted = "give the path= of fakequant.compare, or what it returned"
    try:
        lines = read_whole(path).decode("utf-8", "replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {wanted}") from error
    result = Comparison()
    if lines and lines[0].startswith('{"fingerprint"'):
        whole = (line for line in lines[1:] if line.endswith("\n"))  # a kill may cut off the last line
        result = Comparison(read_rows(path, whole), negated='"negated": true' in lines[0])
    if not result.rows:
        raise ConfigError(f"{path} holds no rows of a comparison; {wanted}")
    return result
