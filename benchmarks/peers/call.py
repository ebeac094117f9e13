"""How another library is asked to fake-quantize, and the specification of this package that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.kinds import Kind

NOT_TIMED = "not timed"


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Args:
        name: in text.
        distribution: what it is installed by.
        lacks: kinds that none of its calls is of, each with the reason.
    """

    name: str
    distribution: str
    lacks: tuple[tuple[Kind, str], ...] = ()

    def why_not(self, kind: str) -> str:
        """Why there is no call of a kind; `NOT_TIMED` if there is one."""
        return next((reason for lacked, reason in self.lacks if lacked.name == kind), NOT_TIMED)


@dataclass(frozen=True)
class Theirs:
    """A peer's call, prepared.

    Args:
        run: from x to the fake-quantized x.
        given: the scale that this call was given beforehand and ours then is too; None: both take it from x.
        scale: of a call that takes scales from x by a rule that ours has not: these scales, so that the bits can be
            compared in spite of it.
        learned: of a kind whose scale is learned, the parameter that gets a gradient as x does.
    """

    run: Callable[[Tensor], Tensor]
    given: Tensor | None = None
    scale: Tensor | None = None
    learned: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One way of one peer to fake-quantize.

    Args:
        kind: the kind of case that it is, of `benchmarks.kinds`.
        peer: whose.
        way: what is called, in the peer's words.
        spec: ours, of the same arithmetic.
        build: from a [rows, columns] tensor with the range of those to come to the call; it imports the peer.
        why: why bits differ, where they do.
    """

    kind: Kind
    peer: Peer
    way: str
    spec: str
    build: Callable[[Tensor], Theirs]
    why: str = ""


TAKES_SCALES = "takes its scales from the input"
NO_FORMAT = "has no such format"
UNSIGNED = "it gives 0.0 for small negative numbers, ours -0.0"
SIGNED = "it gives -0.0 for small negative numbers, ours 0.0"


def block_amax(x: Tensor, block_size: int = 32) -> Tensor:
    """[rows, blocks of a row]."""
    return x.abs().view(x.shape[0], -1, block_size).amax(2)
