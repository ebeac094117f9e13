"""Time two functions alternately and compute the ratio of their times; no other module reads a clock."""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Tensor], object]
Pairs = tuple[tuple[float, float], ...]
"""Seconds of one function and of the other, taken one right after the other."""

# A pair of calls that takes longer, in seconds, is timed once, without warm-up. It also limits the minimal turns.
_LONG = 2.0


@dataclass(frozen=True)
class Effort:
    """How long one pair of functions is timed.

    Args:
        seconds: approximate time of all turns together.
        least: minimal turns of each function; fewer if they would take 2 seconds.
        most: maximal turns of each function.
        turn: minimal seconds of a turn; shorter calls are repeated, because reading the clock takes 0.1 us. Use 2e-3 on
            a GPU, which starts a kernel some microseconds after its launch.
    """

    seconds: float = 0.5
    least: int = 5
    most: int = 400
    turn: float = 2e-4


@dataclass(frozen=True)
class Ratio:
    """The time of one function over that of another.

    Attributes:
        p20, p50, p80: percentiles of the ratios of all pairs.
        seconds, other_seconds: median seconds of one call of each.
        pairs: how many there were.

    >>> Ratio.of([(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)])
    Ratio(p20=0.7, p50=1.0, p80=1.3, seconds=2.0, other_seconds=2.0, pairs=3)
    """

    p20: float
    p50: float
    p80: float
    seconds: float
    other_seconds: float
    pairs: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        """Compute the ratio from pairs of times."""
        ratios = [own / other for own, other in pairs]
        p20, p50, p80 = (percentile(ratios, share) for share in (0.2, 0.5, 0.8))
        own, others = (percentile(column, 0.5) for column in zip(*pairs, strict=True))
        return cls(p20, p50, p80, own, others, len(pairs))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile with linear interpolation, rounded to 10 digits.

    >>> percentile([1.0, 4.0, 2.0], 0.75)
    3.0
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return float(f"{ordered[below] + (place - below) * (ordered[above] - ordered[below]):.10g}")


def keep_memory() -> bool:
    """Make glibc keep freed memory; returns whether this system has glibc.

    By default glibc returns large blocks to the system or not, depending on the heap. A result in new memory then costs
    a page fault of 1 us per 4 KiB: 4 ms for 16 MiB, ten times the call. 7 of 16 processes measured page faults.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(option, 1 << 30) for option in (trim_threshold, mmap_threshold))


def seconds(function: Callable[[], object], device_type: str = "cpu") -> float:
    """Return the time of one call, measured with the clock of its kind of device."""
    return _CLOCKS[device_type](function)


def _by_the_processor(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _by_cuda_events(function: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


_CLOCKS = {"cpu": _by_the_processor, "cuda": _by_cuda_events}


def time_pairs(function: Function, other: Function, inputs: Sequence[Tensor], effort: Effort | None = None) -> Pairs:
    """Time two functions alternately on rotating inputs; the order within a pair alternates too.

    Consecutive calls read different inputs. If the inputs together exceed the caches, they come from memory, as between
    the layers of a model. Results are written to memory that the process already has (`keep_memory`).

    Args:
        function, other: functions of one input.
        inputs: the inputs in reading order, repeated from the first.
        effort: how long to time; by default `Effort()`.
    """
    effort = effort or Effort()
    keep_memory()
    turns = _Turns(inputs)
    turns.seconds(function, 1)
    first = turns.seconds(function, 1), turns.seconds(other, 1)
    if sum(first) > _LONG:
        return (first,)
    turns.seconds(other, 1)
    once = turns.seconds(function, 1), turns.seconds(other, 1)
    calls = max(1, min(math.ceil(effort.turn / max(min(once), 1e-7)), 200))
    turn = calls * sum(once)
    least = max(1, min(effort.least, int(_LONG / turn)))
    rounds = max(least, min(effort.most, int(effort.seconds / turn)))
    pairs = []
    for number in range(rounds):
        if number % 2:
            pairs.append((turns.seconds(function, calls), turns.seconds(other, calls)))
        else:
            others = turns.seconds(other, calls)
            pairs.append((turns.seconds(function, calls), others))
    return tuple(pairs)


def ratio(function: Function, other: Function, inputs: Sequence[Tensor], effort: Effort | None = None) -> Ratio:
    """Return the ratio of the times of two functions, see `time_pairs`."""
    return Ratio.of(time_pairs(function, other, inputs, effort))


class _Turns:
    """Calls a function with the next inputs in rotation."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs, self.next = inputs, 0

    def seconds(self, function: Function, calls: int) -> float:
        """Return the mean seconds of several calls in a row."""
        inputs = [self.inputs[(self.next + i) % len(self.inputs)] for i in range(calls)]
        self.next += calls

        def run() -> None:
            for x in inputs:
                function(x)

        return seconds(run, inputs[0].device.type) / calls
