"""What is timed beside what: results are compared with the reference first, and one that differs has no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fakequant.benchmark.timing import Effort, Function, Pairs, Ratio, time_pairs
from fakequant.errors import FakeQuantError

MEASURED = "measured"


class CannotRunError(FakeQuantError, RuntimeError):
    """What a case is compared with cannot run it; the message is the reason."""


class Prepared(NamedTuple):
    """Two functions that are ready to be timed.

    Args:
        ours, theirs: from an input to anything.
        inputs: what both are called with.
        facts: what else is known of theirs, such as a version, for the line of results.
    """

    ours: Function
    theirs: Function
    inputs: Sequence[Tensor]
    facts: dict[str, str | int] | None = None


class Timed(Protocol):
    """Something to time: what it is called in results, what is compared first, and what it can be timed beside."""

    @property
    def name(self) -> str:
        """The same for every size, dtype and direction."""
        ...

    @property
    def direction(self) -> str:
        """What is computed, such as "forward"."""
        ...

    @property
    def elements(self) -> int:
        """How large it is."""
        ...

    @property
    def dtype_name(self) -> str:
        """The dtype by its name."""
        ...

    @property
    def text(self) -> str:
        """The specification."""
        ...

    def differing(self) -> int:
        """Elements of the results that differ from those of the reference in any bit."""
        ...

    def prepare(self, against: str) -> Prepared:
        """Both functions, ready.

        Raises:
            CannotRunError: the other cannot run this.
        """
        ...


@dataclass(frozen=True)
class Result:
    """What was found of one case beside one other.

    Attributes:
        case, direction, spec, elements, dtype: of the case, see `Timed`.
        against: the other.
        outcome: `MEASURED`, or why there is no time.
        differing: elements that differ from the reference.
        pairs: seconds of ours and of the other; none if not measured.
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
        """Our time over the other's; None if not measured."""
        return Ratio.of(self.pairs) if self.pairs else None


def measure(
    case: Timed,
    against: Sequence[str],
    effort: Effort | None = None,
    compare: Callable[[Timed], int] = lambda case: case.differing(),
) -> Iterator[Result]:
    """Compare a case with the reference, then time it beside each of the others.

    Args:
        case: what to time.
        against: names of the others.
        effort: for how long each.
        compare: how many elements differ; by default, the case itself is asked.
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
