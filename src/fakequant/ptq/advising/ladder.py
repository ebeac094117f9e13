"""The order in which `advise` tries ways to quantize a model: by size, and by cost, until a floor is met."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fakequant.calibration import DEFAULT_METHOD
from fakequant.model.calibration.choice import CLEARLY, METHODS
from fakequant.model.run.outputs import decibels
from fakequant.ptq.formats.comparison import Compared, Way

SAME_SIZE = 1.15
"""Up to this multiple of the bytes models count as of one size: weights of 4 bits take 4.0 to 4.5 with their scales."""
_NO_HOPE = 25.0
"""Decibels below the floor from which only presets are tried, except in the best size: the most that methods and
`improve` gained in any model of the benchmarks is 18, a CNN with gates and weights of 4 bits."""
_LITTLE = 3.0
"""Decibels below the floor up to which `improve` by "best" is tried: it takes 7 times "fast" for at most 1.5 more."""
_TWO = 2
"""How many presets of a size are tried by more than the default."""
TIERS = ("presets", "calibration methods", 'improve "fast"', 'improve "best"')
"""In the order of their cost."""


class SizeClass(NamedTuple):
    """Presets of one kind that give models of one size.

    Attributes:
        bytes: of all parameters, of the smallest.
        presets: their names.
    """

    bytes: int
    presets: tuple[str, ...]


def sizes_of(bytes_of: Mapping[str, int], kinds: Iterable[Collection[str]]) -> list[SizeClass]:
    """Presets by size, the smallest first, and of one size by kind.

    Args:
        bytes_of: the bytes of all parameters, by preset.
        kinds: the presets of each kind, the one first that engines run faster.

    >>> [size.presets for size in sizes_of({"a": 100, "b": 112, "c": 200, "d": 201}, ["d", "abc"])]
    [('a', 'b'), ('d',), ('c',)]
    """
    found: list[list[str]] = []
    for name in sorted(bytes_of, key=bytes_of.__getitem__):
        if not found or bytes_of[name] > SAME_SIZE * bytes_of[found[-1][0]]:
            found.append([])
        found[-1].append(name)
    kinds = [*kinds]
    parts = [tuple(name for name in names if name in kind) for names in found for kind in kinds]
    return [SizeClass(bytes_of[part[0]], part) for part in parts if part]


@dataclass
class Ladder:
    """The search for the smallest model that meets a floor.

    Args:
        sizes: the smallest first.
        static: presets whose inputs get ranges by calibration.
        floor: of the score, larger is better.
        has_metric: whether the score is a metric of the user's, in which decibels mean nothing.

    Attributes:
        rows: what was measured, by way.
        met: the number of the smallest size that meets the floor; that of all sizes if none does.
    """

    sizes: Sequence[SizeClass]
    static: Sequence[str]
    floor: float
    has_metric: bool = False
    rows: dict[Way, Compared] = field(default_factory=dict)
    met: int = field(init=False)

    def __post_init__(self) -> None:
        self.met = len(self.sizes)

    def ways(self) -> Iterator[tuple[Way, str]]:
        """What to try next, and what may follow; the caller puts each result into `rows` before it asks again.

        All presets come first, from the smallest size up to the first that meets the floor. Then what costs more is
        tried in the sizes below it, from the smallest one up.
        """
        for tier in range(len(TIERS)):
            for number, size in enumerate(self.sizes[: self.met]):
                tried = self._of(tier, size)
                for place, way in enumerate(tried):
                    yield way, self._follows(tier, number, len(tried) - place - 1)
                if self.meets(self.best_of(size.presets)):
                    self.met = number
                    break

    def score(self, row: Compared) -> float:
        """The metric of a way, without one the signal over the error in dB; larger is better."""
        if self.has_metric:
            return -math.inf if row.metric is None else row.metric
        return -math.inf if math.isnan(row.error) else decibels(row.error)

    def meets(self, row: Compared | None) -> bool:
        """Whether a way meets the floor."""
        return row is not None and self.score(row) >= self.floor

    def best_of(self, presets: Collection[str]) -> Compared | None:
        """The best way of some presets: what costs more must be clearly better than what costs less."""
        best: Compared | None = None
        for row in self.rows.values():
            if row.preset in presets and not row.failed and (best is None or self._is_better(row, best)):
                best = row
        return best

    @property
    def answer(self) -> Compared | None:
        """The best way of the smallest size that meets the floor; the best of all if none does, None before any."""
        if self.met < len(self.sizes):
            return self.best_of(self.sizes[self.met].presets)
        best = [row for size in self.sizes if (row := self.best_of(size.presets)) is not None]
        return max(best, key=self.score, default=None)

    def _is_better(self, row: Compared, best: Compared) -> bool:
        if self.has_metric and self.score(row) != self.score(best):
            return self.score(row) > self.score(best)
        if self.score(best) == -math.inf:
            return self.score(row) > -math.inf
        costs_more = (row.steps, row.method != DEFAULT_METHOD) != (best.steps, best.method != DEFAULT_METHOD)
        return row.error < (CLEARLY if costs_more else 1.0) * best.error

    def _of(self, tier: int, size: SizeClass) -> list[Way]:
        """The ways of a tier for a size; those of later tiers start from what is best so far."""
        if tier == 0:
            return [Way(preset) for preset in size.presets]
        best = self.best_of(size.presets)
        if best is None:
            return []
        if not self.has_metric and self.score(best) < self.floor - _NO_HOPE and best is not self.answer:
            return []
        if tier == 1:
            static = [preset for preset in size.presets if preset in self.static]
            return [Way(row.preset, method) for row in self._leading(static) for method in METHODS[1:]]
        if tier == 2:
            return [row.way._replace(steps="fast") for row in self._leading(size.presets)]
        if not self.has_metric and self.score(best) < self.floor - _LITTLE:
            return []
        return [best.way._replace(steps="best")]

    def _leading(self, presets: Sequence[str]) -> list[Compared]:
        """The best way so far of each preset, the best presets first; of those that give the same model the first."""
        best = [row for preset in presets if (row := self.best_of([preset])) is not None]
        unlike = {(row.error, row.bytes, row.metric): row for row in best[::-1]}
        return sorted(unlike.values(), key=lambda row: (-self.score(row), row.error))[:_TWO]

    def _follows(self, tier: int, number: int, left: int) -> str:
        """What may follow a way."""
        sizes = len(self.sizes[: self.met]) - number - 1
        parts = [f"{left} more of this size"] if left else []
        parts += [f"{sizes} larger size{'s' * (sizes > 1)}"] if sizes else []
        parts += TIERS[tier + 1 :]
        return f"then at most: {', '.join(parts)}" if parts else "the last"
