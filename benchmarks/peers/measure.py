"""One call of a peer measured: its time over ours, ours over a copy, and in how many elements the two differ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

import fakequant as fq
from benchmarks import exactness, kernels

from .call import Call

# A peer's call takes up to 600 ms.
_ROUNDS = 10
MEASURED, NOT_INSTALLED = "measured", "not installed"


@dataclass(frozen=True)
class Difference:
    """Elements in which two results differ: in any bit, and in value (0.0 and -0.0 have one value)."""

    bits: int
    values: int

    @classmethod
    def between(cls, theirs: Tensor, ours: Tensor) -> Difference:
        theirs = theirs.contiguous()
        return cls(exactness.differing(theirs, ours), exactness.unequal(theirs, ours))


@dataclass(frozen=True)
class Row:
    """What was found of one call. None: not measured; `outcome` says why."""

    case: str
    peer: str
    way: str
    spec: str
    version: str | None
    outcome: str
    over_copy: kernels.Ratio | None = None
    """Ours over `x.clone()`."""
    over_ours: kernels.Ratio | None = None
    """The peer's over ours."""
    compiled_over_ours: float | str | None = None
    """The same under torch.compile, or why that fails."""
    difference: Difference | None = None
    difference_with_its_scales: Difference | None = None
    """Where the peer's rule for scales is not ours: the same with ours given the peer's scales."""
    why: str = ""


def inputs() -> list[Tensor]:
    """The tensors that the calls are timed on."""
    return kernels.Case("", fq.QuantSpec("int8"), shape=kernels.ROWS).inputs()


def with_ties(x: Tensor) -> Tensor:
    """x with the first half of its rows rounded to bfloat16, so that under power-of-two scales ties occur."""
    half = x.shape[0] // 2
    return torch.cat([x[:half].bfloat16().float(), x[half:]])


@torch.no_grad()
def measure(call: Call, buffers: Sequence[Tensor]) -> Row:
    """Compare a call's bits with ours, then time both in turns."""
    names = (call.case, call.peer.name, call.way, call.spec)
    try:
        installed = version(call.peer.distribution)
    except PackageNotFoundError:
        return Row(*names, None, NOT_INSTALLED)
    x = with_ties(buffers[0])
    try:
        theirs = call.build(x)
        y = theirs.run(x)
    except Exception as error:  # Whatever a peer raises is what its users see: a result, which the row says.
        return Row(*names, installed, f"raises {first_line(error)}")
    spec = fq.QuantSpec.parse(call.spec)

    def ours(x: Tensor) -> Tensor:
        return fq.fake_quantize(x, spec, scale=theirs.given)

    difference = Difference.between(y, ours(x))
    with_its_scales = None
    if theirs.scale is not None:
        with_its_scales = Difference.between(y, fq.fake_quantize(x, spec, scale=theirs.scale))
    return Row(
        *names,
        installed,
        MEASURED,
        over_copy=kernels.ratio(ours, torch.clone, buffers),
        over_ours=kernels.ratio(theirs.run, ours, buffers, _ROUNDS),
        compiled_over_ours=_compiled(theirs.run, ours, buffers),
        difference=difference,
        difference_with_its_scales=with_its_scales,
        why=call.why if difference.bits else "",
    )


def _compiled(
    theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor], buffers: Sequence[Tensor]
) -> float | str:
    torch.compiler.reset()
    compiled = torch.compile(theirs)
    # The compiler writes the whole graph that it fails on to the log; the row has the error.
    logging.disable(logging.CRITICAL)
    try:
        compiled(buffers[0])
    except Exception as error:  # As above.
        return first_line(error)
    finally:
        logging.disable(logging.NOTSET)
    return kernels.ratio(compiled, ours, buffers, _ROUNDS).median


def first_line(error: BaseException) -> str:
    """An error as its type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
