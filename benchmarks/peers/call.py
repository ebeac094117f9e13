"""How another library is asked to fake-quantize, and the specification of this package that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """A library to compare with: its name in text and the one that it is installed by."""

    name: str
    distribution: str


@dataclass(frozen=True)
class Theirs:
    """A peer's call, prepared.

    Args:
        run: from x to the fake-quantized x.
        given: the scale that this call was given beforehand and ours then is too; None: both take it from x.
        scale: of a call that takes scales from x by a rule that ours has not: these scales, so that the bits can be
            compared in spite of it.
    """

    run: Callable[[Tensor], Tensor]
    given: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One way of one peer to fake-quantize.

    Args:
        case: the format, its granularity, and whether scales are given.
        peer: whose.
        way: what is called, in the peer's words.
        spec: ours, of the same arithmetic.
        build: from a [rows, columns] tensor with the range of those to come to the call; it imports the peer.
        why: why bits differ, where they do.
    """

    case: str
    peer: Peer
    way: str
    spec: str
    build: Callable[[Tensor], Theirs]
    why: str = ""


INT8_GIVEN, INT8_CHANNELS_GIVEN = "int8 per tensor, given scale", "int8 per channel, given scales"
INT8_CHANNELS, INT4 = "int8 per channel", "int4 in groups of 32"
FP8_GIVEN, FP8 = "FP8 E4M3 per tensor, given scale", "FP8 E4M3 per tensor"
MXFP4, MXFP8, MXINT8, NVFP4 = "MXFP4", "MXFP8", "MXINT8", "NVFP4"

SPEC_NVFP4 = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"
UNSIGNED = "it gives 0.0 for small negative numbers, ours -0.0"
SIGNED = "it gives -0.0 for small negative numbers, ours 0.0"


def mx(format: str, rounding: str) -> str:
    """The specification of an MX format."""
    return f"{format} per_block(-1:32) scale=float8_e8m0fnu:{rounding}"


def block_amax(x: Tensor, block_size: int = 32) -> Tensor:
    """[rows, blocks of a row]."""
    return x.abs().view(x.shape[0], -1, block_size).amax(2)
