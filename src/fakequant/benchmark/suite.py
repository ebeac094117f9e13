"""The few cases that `fakequant bench` times: the speed of this machine in some seconds."""

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
    """What was measured, and on which machine.

    Attributes:
        machine: see `benchmark.machine`.
        results: of every case two, beside the cheapest call of that direction and beside ATen.
    """

    machine: dict[str, str]
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        """The machine in one line."""
        where = self.machine
        return (
            f"{where['processor']}, {where['threads']} threads, torch {where['torch']}, backend {where['backend']}: "
            "float32, times over those of others"
        )

    @property
    def differing(self) -> int:
        """Elements that differ from the reference, of all cases."""
        return sum(result.differing for result in self.results)

    def rows(self) -> list[tuple[str, ...]]:
        """A row for every case, see `HEADER`; ratios are medians over pairs of calls."""
        pairs = zip(self.results[::2], self.results[1::2], strict=True)
        return [
            (copy.case, copy.direction, f"{copy.elements:,}", _milliseconds(copy), _ratio(copy), _ratio(aten))
            for copy, aten in pairs
        ]

    @property
    def notes(self) -> list[str]:
        """What is behind the table: why a cell is empty, and which results are wrong."""
        found = [f"Over a copy: over that of {COPY}; with a gradient, of {DOUBLED} with its gradient."]
        reasons = [f"{r.against} {r.outcome}." for r in self.results if r.ratio is None and not r.differing]
        wrong = [f"{r.case}, {r.direction}, {r.elements:,}: {r.outcome}." for r in self.results if r.differing]
        return list(dict.fromkeys([*found, *reasons, *wrong]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: {"machine": ..., "results": [...]}, percentiles of the ratios in place of single times."""
        lines = []
        for result in self.results:
            values = asdict(result)
            del values["pairs"], values["facts"]
            lines.append(values | {"ratio": result.ratio and asdict(result.ratio)})
        return {"machine": self.machine, "results": lines}

    def write(self, path: Path) -> None:
        """Write it as a file of JSON, whole or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        write_whole(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode())


def run(sizes: Sequence[int] = SIZES, *, seconds: float = 0.2) -> Report:
    """Compare int8, FP8 and NVFP4 with the reference, then time them beside a copy and ATen.

    Args:
        sizes: elements of the tensors, powers of two from 64 to 2147483648.
        seconds: how long each pair of calls is timed, about.

    Raises:
        ConfigError: a size that is none of these.

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
    found = result.ratio
    return "" if found is None else f"{1e3 * found.seconds:.3g}"


def _ratio(result: Result) -> str:
    found = result.ratio
    return "" if found is None else f"{found.p50:.{2 if found.p50 >= 0.1 else 3}f}"
