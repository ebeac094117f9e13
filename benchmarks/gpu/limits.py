"""What is promised on a GPU: shares of the card's own bandwidth, and not to be slower than others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import kinds
from benchmarks.harness import ATEN, COMPILED, COPY, Case, Timed
from benchmarks.peers import PEERS
from benchmarks.record import Line
from fakequant.numerics.granularity import PerTensor

from .cases import LARGEST

_PROMISED = {kind.name for kind in (kinds.INT8_TENSOR, kinds.INT8_CHANNEL, kinds.FP8_TENSOR, kinds.NVFP4)}
_LEAST_SHARE = {"forward": 0.90, "forward and backward": 0.85}
_OTHERS = {ATEN, COMPILED, *(peer.name for peer in PEERS)}


def fewest_bytes(case: Case) -> float:
    """The bytes that must move between a GPU and its memory.

    Forward: x is read, y written; x is read twice where a scale follows from the whole of a tensor, which fits no
    cache. With a gradient: one bit per element is written and read again, dy is read, dx written; where scales get a
    gradient too, x is read once more instead.
    """
    n, size, spec = case.elements, case.dtype.itemsize, case.spec
    whole = isinstance(spec.granularity, PerTensor) or isinstance(spec.scale.granularity, PerTensor)
    forward = (3 if case.dynamic and whole else 2) * n * size
    if not case.backward:
        return forward
    return forward + 2 * n * size + (n * size if case.learned else n / 4)


def share(case: Timed, ratio: float) -> float | None:
    """How much of the bandwidth of a copy a call has that takes so many times as long; None for models.

    >>> int8 = Case("int8 per tensor", QuantSpec("int8"), (4, 64), backward=True)
    >>> share(int8, 2.5)
    0.8125
    """
    if not isinstance(case, Case):
        return None
    return fewest_bytes(case) / (2 * case.elements * case.dtype.itemsize) / ratio


@dataclass(frozen=True)
class Bar:
    """What one figure of a line of results must be.

    Args:
        text: in tables.
        keeps: whether a line keeps it.
    """

    text: str
    keeps: Callable[[Line], bool]


def bar_of(line: Line) -> Bar | None:
    """What is promised of a line, or None."""
    least = _LEAST_SHARE.get(line["direction"])
    if line["against"] == COPY and line["elements"] == LARGEST and line["case"] in _PROMISED and least is not None:
        return Bar(f"share >= {least:.0%}", lambda line: line["share"] >= least)
    if line["against"] in _OTHERS or line["against"].split(" ")[0] in _OTHERS:
        return Bar("time <= 1", lambda line: line["p50"] <= 1.0)
    return None


def verdict(line: Line) -> str:
    """ok, MISSED, or nothing where nothing is promised or measured."""
    bar = bar_of(line)
    if bar is None or line["p50"] is None:
        return ""
    return "ok" if bar.keeps(line) else "MISSED"
