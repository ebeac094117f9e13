"""Rotations of residual streams and heads that are learned by the error of the quantized model's output."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_float_model
from fakequant.data.batches import Batches, Forward, Inputs, example_in
from fakequant.data.progress import track
from fakequant.errors import ConfigError
from fakequant.model.config import Config
from fakequant.model.modes import in_eval_mode
from fakequant.model.prepare import prepare
from fakequant.model.run.outputs import OutputDistance
from fakequant.nn.quantizer import quantizers
from fakequant.ptq.float_model.output_check import OutputCheck
from fakequant.ptq.float_model.rotate import RotationJob, Rotations, Turned
from fakequant.ptq.improving.effect import Split
from fakequant.restore import restore_on_error, state_of_parts

_MOMENTS = 10
"""How often the batches that judge do so: the last steps of 100 differ by up to a tenth of the error."""


@dataclass
class LearnedRotations(Rotations):
    """The result of `learn_rotations`; prints as a table.

    Attributes:
        before: the error of the output of a quantized copy without rotations, on the batches that judge, as a share of
            the output's energy. Several outputs give the mean of their shares. Each tensor has its own range.
        rotated: the same with Hadamard matrices.
        learned: the same with the rotations that were learned from these; the least of ten moments.
        kept: "learned", "hadamard", or "none": the model is as it was.
        refused: why learned rotations with the least error were not kept; "" where they were, or had not the least.
    """

    before: float = 0.0
    rotated: float = 0.0
    learned: float = 0.0
    kept: str = "none"
    refused: str = ""

    def __str__(self) -> str:
        errors = f"{self.before:.2e}, with Hadamard matrices {self.rotated:.2e}, learned {self.learned:.2e}"
        kept = {
            "none": "as it was: no rotation helps",
            "hadamard": "with Hadamard matrices",
            "learned": "with the learned",
        }[self.kept]
        refused = f"; learned ones go back: {self.refused}" if self.refused else ""
        return f"{super().__str__()}\nerror of the quantized model's output: {errors}; the model is {kept}{refused}"

    __repr__ = __str__  # what notebooks and consoles show


def learn_rotations(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    config: Config | str,
    *,
    steps: int = 100,
    angle: float = 0.17,
    seed: int = 0,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> LearnedRotations:
    """Rotate a float model in place as `rotate` does, by matrices that are learned (SpinQuant, arXiv 2405.16406).

    The matrices of the residual streams (R1) and of the heads of each attention (R2) start as Hadamard matrices. Each
    step runs a quantized copy of the model with one batch, and turns them by a Cayley transform against the gradient of
    the output's error. Ranges in the copy are those of each tensor. The function of the model stays, which a run
    checks, and nothing is added at run time.

    Of two batches or more, the second of every eight judges and teaches nothing. The model gets the rotations with the
    smallest error of these: the learned ones at the best of ten moments, Hadamard matrices, or none.

    Args:
        model: a float model; call this before `prepare`, in place of `rotate`.
        batches: what a data loader gives.
        config: the preset or the rules with which the model will be prepared.
        steps: each of one batch, in turn.
        angle: by how much the first step turns a channel of the widest values, in radians: the rate of Adam times the
            root of the width. It falls to 0 linearly.
        seed: of the random signs of the Hadamard matrices.
        inputs, forward: as for `rotate`.
        progress: whether a bar is shown; None: on a terminal.

    Raises:
        ConfigError: no positive number of steps or angle, a config that quantizes no layer, and what `rotate` refuses.

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> found = learn_rotations(model, [torch.arange(9)], "int4", steps=20, progress=False)
    >>> found.learned <= found.rotated or found.kept != "learned"
    True
    """
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps must be 1 or more, got {steps!r:.40}")
    if not isinstance(angle, Real) or not 0 < float(angle) < math.inf:
        raise ConfigError(f"angle must be positive, in radians such as 0.17, got {angle!r:.40}")
    check_float_model(model, "learn_rotations", "learn_rotations(model, batches, config)", "learn_rotations")
    given = Batches(batches, "learn_rotations", inputs=inputs, forward=forward).kept()
    split = Split.of(given, None)
    check = OutputCheck(model, given.part([*given.numbered][:1]))
    job = RotationJob(model, check, "hadamard", seed)
    outputs, judge = OutputDistance(model, split.fit), OutputDistance(model, split.held or split.fit)
    first = next(iter(given))
    example = None if forward is not None else first if inputs is not None else example_in(model, first)

    def quantized() -> nn.Module:
        return _quantized(model, config, example, inputs)

    with torch.inference_mode(mode=False), restore_on_error(job.restore):
        before = judge.of(quantized()).mean
        found = LearnedRotations(job.rows(), before, before, before)
        if not job.rotated:
            return found
        student = quantized()
        found.rotated = judge.of(student).mean
        learning = _LearnedTurns(model, job.rotated, student, outputs, judge)
        found.learned = learning.run(steps, angle, progress)
        _keep_best(found, model, job, learning.best, check)
    return found


def _keep_best(
    found: LearnedRotations, model: nn.Module, job: RotationJob, matrices: list[Tensor], check: OutputCheck
) -> None:
    """Leave the model, which has Hadamard matrices, with the rotations of the least error."""
    if found.learned < min(found.rotated, found.before):
        back = state_of_parts(model, [parameter for one in job.rotated for parameter, _ in one.parameters])
        for one, matrix in zip(job.rotated, matrices, strict=True):
            one.turn(matrix)
        if (why := check.why_not()) is None:
            found.kept = "learned"
            return
        back()
        found.refused = why
    if found.rotated < found.before:
        found.kept = "hadamard"
    else:
        job.restore()
        found.rows = [replace(row, note=row.note or "no rotation helps") for row in found.rows]


def _quantized(model: nn.Module, config: Config | str, example: Any, inputs: Inputs | None) -> nn.Module:
    """A copy of a float model whose quantizers take the range of every tensor anew."""
    quantized = copy.deepcopy(model).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `prepare` says it of the model itself
        prepare(quantized, config, example, inputs=inputs)
    if not (found := quantizers(quantized)):
        raise ConfigError("the config quantizes no layer of the model; give the one that prepare will get")
    for quantizer in found.values():
        quantizer.dynamic = True
    return quantized


class _LearnedTurns:
    """Turns what a rotated model is made of for the smallest error of a quantized copy's output.

    Args:
        model: rotated, in float; it stays as it is.
        rotated: its parameters.
        student: the quantized copy.
        outputs: by which it learns.
        judge: by which the best of ten moments is chosen.

    Attributes:
        best: the matrices of this moment, orthogonal, float64.
    """

    def __init__(
        self,
        model: nn.Module,
        rotated: list[Turned],
        student: nn.Module,
        outputs: OutputDistance,
        judge: OutputDistance,
    ) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._twins = {
            p: student.get_parameter(names[p]).requires_grad_() for one in rotated for p, _ in one.parameters
        }
        self._own = [one._replace(parameters=[(self._twins[p], axis) for p, axis in one.parameters]) for one in rotated]
        self._student, self._outputs, self._judge = student, outputs, judge
        self.best = self._matrices = [torch.eye(one.width, dtype=torch.float64) for one in rotated]

    def run(self, steps: int, angle: float, progress: bool | None) -> float:
        """Learn, and return the error of the best moment."""
        # What Adam adds to zeros is the step: the tangent of each rotation is taken where the rotation is now.
        tangents = [nn.Parameter(torch.zeros_like(matrix)) for matrix in self._matrices]
        optimizer = torch.optim.Adam(tangents, angle / max(one.width for one in self._own) ** 0.5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        least, each = math.inf, -(-steps // _MOMENTS)
        for step in track(range(1, steps + 1), "learning rotations", steps, progress):
            self._student.zero_grad()
            with in_eval_mode(self._student), torch.enable_grad():
                self._outputs.loss(self._student, (step - 1) % len(self._outputs.batches)).backward()
            for one, tangent in zip(self._own, tangents, strict=True):
                tangent.grad = one.gradient()
            optimizer.step()
            schedule.step()
            turns = [_cayley(tangent.detach()) for tangent in tangents]
            self._turn([matrix @ turn for matrix, turn in zip(self._matrices, turns, strict=True)])
            for tangent in tangents:
                tangent.data.zero_()
            if (step == steps or step % each == 0) and (error := self._judge.of(self._student).mean) < least:
                least, self.best = error, self._matrices
        return least

    def _turn(self, matrices: list[Tensor]) -> None:
        self._matrices = matrices
        for parameter, twin in self._twins.items():  # else every step would round what the last one rounded
            twin.data.copy_(parameter)
        for one, matrix in zip(self._own, matrices, strict=True):
            one.turn(matrix)


def _cayley(x: Tensor) -> Tensor:
    """The rotation of a skew-symmetric matrix: that of its exponential, up to the third power."""
    half, eye = x / 2, torch.eye(len(x), dtype=x.dtype)
    return torch.linalg.solve(eye - half, eye + half)
