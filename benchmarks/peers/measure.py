"""One call of another library as a case to time: ours runs in that library's arithmetic, and the bits are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor

import fakequant as fq
from benchmarks.harness import CannotRunError, Case, Function, Prepared, square
from tests.support import exactness

from .call import Call, Theirs

NOT_INSTALLED = "not installed"
COMPILED = "compiled"
Quantize = Callable[[Tensor], Tensor]


class Difference(NamedTuple):
    """Elements in which two results differ: in any bit, and in value (0.0 and -0.0 have one value)."""

    bits: int
    values: int

    @classmethod
    def between(cls, theirs: Tensor, ours: Tensor) -> Difference:
        theirs = theirs.contiguous()
        return cls(exactness.differing(theirs, ours), exactness.unequal(theirs, ours))


@dataclass(frozen=True)
class PeerCase:
    """A call of a peer, of one size.

    Args:
        call: which.
        elements: of the tensors.
        backward: whether the gradient is computed too.
        dtype_name: of them.
        device: where they are.
    """

    call: Call
    elements: int
    backward: bool = False
    dtype_name: str = "float32"
    device: str = "cpu"

    @property
    def name(self) -> str:
        return self.call.kind.name

    @property
    def text(self) -> str:
        return self.call.spec

    @property
    def case(self) -> Case:
        """Ours."""
        spec, kind = fq.QuantSpec.parse(self.call.spec), self.call.kind
        case = Case(kind.name, spec, square(self.elements), backward=self.backward, dynamic=kind.dynamic)
        return replace(case, learned=kind.learned, device=self.device)

    @property
    def direction(self) -> str:
        return self.case.direction

    @property
    def against(self) -> str:
        """What the peer's call is called in results."""
        return f"{self.call.peer.name} {self.call.way}"

    @property
    def compiled(self) -> str:
        """The same under torch.compile."""
        return f"{self.against}, {COMPILED}"

    def differing(self) -> int:
        return self.case.differing()

    def prepare(self, against: str) -> Prepared:
        assert against in (self.against, self.compiled)
        try:
            installed = version(self.call.peer.distribution)
        except PackageNotFoundError:
            raise CannotRunError(NOT_INSTALLED) from None
        inputs = self.case.inputs()
        x = with_ties(inputs[0].detach())
        try:
            theirs = self._built(x)
            y = self._result(theirs.run, x.requires_grad_(self.backward))
        except Exception as error:  # Whatever a peer raises is what its users see: a result, which the line says.
            raise CannotRunError(f"raises {first_line(error)}") from error
        if self.backward and not y.requires_grad:
            raise CannotRunError("has no gradient")
        x, y = x.detach(), y.detach()
        facts = {"version": installed, **_facts("", Difference.between(y, self._ours(theirs.given)(x)))}
        if theirs.scale is not None:
            facts |= _facts("_with_its_scales", Difference.between(y, self._ours(theirs.scale)(x)))
        facts["why"] = self.call.why if facts["bits"] else ""
        run = theirs.run if against == self.against else _compiled(theirs.run, inputs[0])
        scale = theirs.given
        if self.call.kind.learned and scale is not None:
            scale = scale.detach().clone().requires_grad_()
        return Prepared(self._timed(self._ours(scale), scale), self._timed(run, theirs.learned), inputs, facts)

    def _built(self, x: Tensor) -> Theirs:
        with torch.set_grad_enabled(self.backward):
            return self.call.build(x)

    def _result(self, run: Quantize, x: Tensor) -> Tensor:
        if not self.backward:
            with torch.no_grad():
                return run(x)
        y = run(x)
        if y.requires_grad:
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        return y

    def _ours(self, scale: Tensor | None) -> Quantize:
        spec = fq.QuantSpec.parse(self.call.spec)
        if scale is not None and not self.call.kind.learned:
            scale = scale.detach()  # else it would be learned here
        return lambda x: fq.fake_quantize(x, spec, scale=scale)

    def _timed(self, run: Quantize, scale: Tensor | None = None) -> Function:
        if not self.backward:
            return torch.no_grad()(run)
        dy = torch.ones(self.case.shape, device=self.device)
        learned = (scale,) if self.call.kind.learned and scale is not None else ()
        return lambda x: torch.autograd.grad(run(x), (x, *learned), dy)


def with_ties(x: Tensor) -> Tensor:
    """x with the first half of its rows rounded to bfloat16, so that under power-of-two scales ties occur."""
    half = x.shape[0] // 2
    return torch.cat([x[:half].bfloat16().float(), x[half:]])


def _facts(which: str, difference: Difference) -> dict[str, str | int]:
    return {f"{name}{which}": count for name, count in difference._asdict().items()}


def _compiled(run: Quantize, x: Tensor) -> Quantize:
    torch.compiler.reset()
    compiled = torch.compile(run)
    # The compiler writes the whole graph that it fails on to the log; the line has the error.
    logging.disable(logging.CRITICAL)
    try:
        with torch.no_grad():
            compiled(x)  # compiles, which is not what is timed
    except Exception as error:  # As above.
        raise CannotRunError(f"fails: {first_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)
    return compiled


def first_line(error: BaseException) -> str:
    """An error as its type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
