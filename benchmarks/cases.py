"""All cases that are timed, and what each is compared with. To time another, add a line here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import ATEN, COMPILED, COPY, DOUBLED, Timed

from . import kinds
from .calibration import LOOPS, Search
from .kinds import GROWTH, OTHERS, SHOWN, Kind
from .limits import LIMITS, K, M
from .peers import CALLS
from .peers.measure import PeerCase

SIZES = (64, 4 * K, 64 * K, M, 4 * M, 16 * M, 64 * M)
# Sizes at which other libraries are timed. Below them a call is what Python costs; at 64M the slowest takes a second.
COMPARED_SIZES = SIZES[1:-1]
COMPARED = 4 * M


@dataclass(frozen=True)
class Entry:
    """A case and what it is compared with.

    Args:
        case: ours.
        often: compared with it in every process.
        once: compared with it in the first process only, because it is far slower or compiles for a long time.
    """

    case: Timed
    often: tuple[str, ...] = ()
    once: tuple[str, ...] = ()

    def of_process(self, number: int) -> tuple[str, ...]:
        """What is timed in a process."""
        return self.often + self.once if number == 0 else self.often


def chosen(case: Timed, against: Iterable[str], only: Sequence[str]) -> tuple[str, ...]:
    """What a case is compared with where one of the texts is in its line. No texts choose everything."""
    line = f"{case.name}, {case.direction}, {case.dtype_name}, {case.elements}"
    return tuple(name for name in against if not only or any(text in f"{line}, {name}" for text in only))


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """Entries of the same case as one, nothing twice."""
    found: dict[Timed, Entry] = {}
    for entry in entries:
        before = found.get(entry.case, Entry(entry.case))
        often = dict.fromkeys(before.often + entry.often)
        once = dict.fromkeys(name for name in before.once + entry.once if name not in often)
        found[entry.case] = Entry(entry.case, tuple(often), tuple(once))
    return list(found.values())


def _beside_the_cheapest(kind: Kind, elements: int, dtype: torch.dtype = torch.float32) -> Iterable[Entry]:
    for backward in kind.directions:
        yield Entry(kind.case(elements, dtype, backward=backward), (DOUBLED if backward else COPY,))


def _of_tensors() -> Iterable[Entry]:
    for kind in GROWTH:
        for elements in SIZES:
            yield from _beside_the_cheapest(kind, elements)
    for kind in (*OTHERS, kinds.LSQ):
        for elements in SIZES[:-1]:
            yield from _beside_the_cheapest(kind, elements)
    for kind in kinds.INTEGER_GRANULARITIES:
        yield Entry(kind.case(COMPARED), (COPY,))
    for dtype in (torch.bfloat16, torch.float16):
        for kind in SHOWN:
            yield from _beside_the_cheapest(kind, COMPARED, dtype)
    yield Entry(kinds.INT8_TENSOR.case(COMPARED, torch.float64), (COPY,))


def _beside_torch() -> Iterable[Entry]:
    for elements in SIZES:
        yield Entry(kinds.INT8_TENSOR.case(elements), once=(ATEN,))
    yield Entry(kinds.INT8_TENSOR.case(COMPARED, torch.bfloat16), once=(ATEN,))
    for kind in SHOWN:
        for elements in COMPARED_SIZES:
            for backward in kind.directions:
                yield Entry(kind.case(elements, backward=backward), once=(ATEN, COMPILED))


def _beside_peers() -> Iterable[Entry]:
    for call in CALLS:
        for backward in call.kind.directions:
            for elements in COMPARED_SIZES:
                case = PeerCase(call, elements, backward)
                yield Entry(case, once=(case.against,))
        if False in call.kind.directions:
            case = PeerCase(call, COMPARED)
            yield Entry(case, once=(case.compiled,))


def promised() -> list[Entry]:
    """What limits are promised of."""
    return merged(
        Entry(case, once=(limit.against,)) if limit.slow else Entry(case, (limit.against,))
        for limit in LIMITS
        for case in limit.cases
    )


def everything() -> list[Entry]:
    """All cases."""
    percentile = Entry(Search("percentile"), (LOOPS,))
    return merged([*_of_tensors(), *_beside_torch(), *promised(), percentile, *_beside_peers()])


LISTS = {"everything": everything, "promised": promised}
