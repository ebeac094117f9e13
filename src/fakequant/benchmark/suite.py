"""The cases of `fakequant bench`, which measure the speed of this machine in a few seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fakequant.benchmark.case import ATEN, COPY, DOUBLED, Case, square
from fakequant.benchmark.machine import machine
from fakequant.benchmark.pairs import Result, measure
from fakequant.benchmark.timing import Effort
from fakequant.errors import ConfigError
from fakequant.files import write_whole
from fakequant.numerics.spec import QuantSpec

SIZES = (1 << 12, 1 << 18, 1 << 22)
_FEWEST, _MOST = 1 << 6, 1 << 31
HEADER = ("case", "direction", "elements", "ms", "over a copy", "over ATen")
# Name, specification, and whether the scales are taken from the input.
_KINDS = (
    ("int8 per tensor", "int8", False),
    ("float8_e4m3fn per tensor", "float8_e4m3fn", False),
    ("NVFP4", "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor", True),
)


@dataclass(frozen=True)
class Report:
    """The results of a run and the machine.

    Attributes:
        machine: see `benchmark.machine`.
        results: two results per case: against a copy (`COPY` or `DOUBLED`) and against ATen.
    """

    machine: dict[str, str]
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        """The machine in one line."""
        where = self.machine
        return (
            f"{where['processor']}, {where['threads']} threads, torch {where['torch']}, backend {where['backend']}: "
            "float32, ratios of times"
        )

    @property
    def differing(self) -> int:
        """The number of elements of all cases that differ from the reference."""
        return sum(result.differing for result in self.results)

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for every case, see `HEADER`; ratios are medians over pairs of calls."""
        pairs = zip(self.results[::2], self.results[1::2], strict=True)
        return [
            (copy.case, copy.direction, f"{copy.elements:,}", _milliseconds(copy), _ratio(copy), _ratio(aten))
            for copy, aten in pairs
        ]

    @property
    def notes(self) -> list[str]:
        """The notes below the table: the meaning of a copy, why a cell is empty, and which results are wrong."""
        unit = [f"A copy is {COPY}; with a gradient it is {DOUBLED} with its gradient."]
        reasons = [f"{r.against} {r.outcome}." for r in self.results if r.ratio is None and not r.differing]
        wrong = [f"{r.case}, {r.direction}, {r.elements:,}: {r.outcome}." for r in self.results if r.differing]
        return list(dict.fromkeys([*unit, *reasons, *wrong]))

    def to_dict(self) -> dict[str, Any]:
        """Return {"machine": ..., "results": [...]} for JSON, with percentiles of the ratios but no single times."""
        lines = []
        for result in self.results:
            values = asdict(result)
            del values["pairs"], values["facts"]
            lines.append(values | {"ratio": result.ratio and asdict(result.ratio)})
        return {"machine": self.machine, "results": lines}

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        write_whole(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode())


def run(sizes: Sequence[int] = SIZES, *, seconds: float = 0.2) -> Report:
    """Compare int8, FP8 and NVFP4 with the reference, then time them against a copy and ATen.

    Args:
        sizes: numbers of elements, powers of two from 64 to 2147483648.
        seconds: approximate time per pair of calls.

    Raises:
        ConfigError: a size is not such a power of two.

    >>> report = run([64], seconds=0.0)
    >>> [row[:3] for row in report.rows()][:2]
    [('int8 per tensor', 'forward', '64'), ('int8 per tensor', 'forward and backward', '64')]
    """
    for elements in sizes:
        if not _FEWEST <= elements <= _MOST or elements & (elements - 1):
            raise ConfigError(
                f"a size of {elements} elements; give a power of two from {_FEWEST} to {_MOST}, such as 4096"
            )
    where, results = machine(), []
    for name, spec, dynamic in _KINDS:
        for backward in (False, True):
            for elements in sizes:
                case = Case(name, QuantSpec.parse(spec), square(elements), backward=backward, dynamic=dynamic)
                results += measure(case, (DOUBLED if backward else COPY, ATEN), Effort(seconds))
    return Report(where, tuple(results))


def _milliseconds(result: Result) -> str:
    ratio = result.ratio
    return "" if ratio is None else f"{1e3 * ratio.seconds:.3g}"


def _ratio(result: Result) -> str:
    ratio = result.ratio
    return "" if ratio is None else f"{ratio.p50:.{2 if ratio.p50 >= 0.1 else 3}f}"
