"""Time a case against others; a case whose results differ from the reference is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fakequant.errors import FakeQuantError

from .timing import Effort, Function, Pairs, Ratio, time_pairs

MEASURED = "measured"


class CannotRunError(FakeQuantError, RuntimeError):
    """The other side of a comparison cannot run the case; the message is the reason."""


class Prepared(NamedTuple):
    """Two functions that are ready to be timed.

    Args:
        ours, theirs: functions of one input.
        inputs: the inputs of both.
        facts: facts about theirs for the line of results, such as a version.
    """

    ours: Function
    theirs: Function
    inputs: Sequence[Tensor]
    facts: dict[str, str | int] | None = None


class Timed(Protocol):
    """A case to time: its description in results, its comparison with the reference, and its competitors."""

    @property
    def name(self) -> str:
        """The name, which is the same for every size, dtype and direction."""
        ...

    @property
    def direction(self) -> str:
        """The direction, such as "forward"."""
        ...

    @property
    def elements(self) -> int:
        """The number of elements."""
        ...

    @property
    def dtype_name(self) -> str:
        """The name of the dtype."""
        ...

    @property
    def text(self) -> str:
        """The specification."""
        ...

    def differing(self) -> int:
        """Count the elements of the results that differ from the reference in any bit."""
        ...

    def prepare(self, against: str) -> Prepared:
        """Prepare both functions.

        Raises:
            CannotRunError: the other side cannot run this case.
        """
        ...


@dataclass(frozen=True)
class Result:
    """The comparison of one case with one competitor.

    Attributes:
        case, direction, spec, elements, dtype: the case, see `Timed`.
        against: the competitor.
        outcome: `MEASURED`, or the reason why there is no time.
        differing: the number of elements that differ from the reference.
        pairs: seconds of ours and of the competitor; empty if not measured.
        facts: see `Prepared`.
    """

    case: str
    direction: str
    spec: str
    elements: int
    dtype: str
    against: str
    outcome: str = MEASURED
    differing: int = 0
    pairs: Pairs = ()
    facts: dict[str, str | int] | None = None

    @property
    def ratio(self) -> Ratio | None:
        """Our time divided by the competitor's; None if not measured."""
        return Ratio.of(self.pairs) if self.pairs else None


def measure(
    case: Timed,
    against: Sequence[str],
    effort: Effort | None = None,
    compare: Callable[[Timed], int] = lambda case: case.differing(),
) -> Iterator[Result]:
    """Compare a case with the reference, then time it against each competitor.

    Args:
        case: the case to time.
        against: names of the competitors.
        effort: how long to time each.
        compare: counts the elements that differ; by default `case.differing`.
    """
    differing = compare(case)
    for name in against:
        result = Result(case.name, case.direction, case.text, case.elements, case.dtype_name, name, differing=differing)
        if differing:
            yield replace(result, outcome=f"differs from the reference in {differing:,} elements")
            continue
        try:
            prepared = case.prepare(name)
        except CannotRunError as reason:
            yield replace(result, outcome=str(reason))
            continue
        torch.manual_seed(0)
        pairs = time_pairs(prepared.ours, prepared.theirs, prepared.inputs, effort)
        yield replace(result, pairs=pairs, facts=prepared.facts)
