"""Time of the kernels over that of a plain copy and of ATen, measured in turns within one run.

Every case is first compared with the reference, bit for bit; a case that differs has no time. Inputs rotate through
buffers that together exceed the caches, so that each call reads from memory, as between the layers of a model. Results
land in memory that the process has already (`keep_memory`). A ratio is the median over rounds of the two times of the
same round.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fakequant as fq
from fakequant.numerics import qparams, reference

from .exactness import differing

Function = Callable[[Tensor], object]

# 16 MiB of float32; eight of them are 128 MiB, more than the caches of the machines that this runs on.
ELEMENTS = 1 << 22
BUFFERS = 8
ROUNDS = 80


@dataclass(frozen=True)
class Ratio:
    """The time of one function over that of another: median and quartiles over the rounds, and the median times."""

    median: float
    low: float
    high: float
    seconds: float
    other_seconds: float


def keep_memory() -> bool:
    """Have glibc keep what is freed, for both functions of every ratio; whether this system has glibc.

    By default it gives large blocks back or not as the heap happens to lie, and a result then costs a page fault of
    1 us for every 4 KiB: 4 ms for 16 MiB, ten times what is measured. Of 16 processes 7 measured page faults.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(option, 1 << 30) for option in (trim_threshold, mmap_threshold))


def ratio(function: Function, other: Function, inputs: Sequence[Tensor], rounds: int = ROUNDS) -> Ratio:
    """Time two functions in turns on rotating inputs; which of them goes first alternates."""
    keep_memory()
    for x in inputs[:2]:
        function(x)
        other(x)
    pairs = []
    for number in range(rounds):
        first, second = (function, other) if number % 2 else (other, function)
        x, y = inputs[2 * number % len(inputs)], inputs[(2 * number + 1) % len(inputs)]
        times = _seconds(first, x), _seconds(second, y)
        pairs.append(times if number % 2 else times[::-1])
    ratios = sorted(mine / others for mine, others in pairs)
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high, *(statistics.median(column) for column in zip(*pairs, strict=True)))


def _seconds(function: Function, x: Tensor) -> float:
    start = time.perf_counter()
    function(x)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Case:
    """A call to time: the package's and, where there is one, ATen's of the same arithmetic.

    Args:
        name: of the row.
        spec: how to quantize.
        dtype: of the inputs.
        shape: of the inputs.
        backward: whether the gradient is computed too.
        dynamic: whether the scales are taken from the input; else they are given.
        limit: the most that it may take, in times of a copy; None: no promise is made.
    """

    name: str
    spec: fq.QuantSpec
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (ELEMENTS,)
    backward: bool = False
    dynamic: bool = False
    limit: float | None = None

    def inputs(self, buffers: int = BUFFERS) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(buffers)]
        return [x.requires_grad_(self.backward) for x in made]

    def scale(self) -> Tensor | None:
        return None if self.dynamic else torch.full(self.spec.granularity.group_shape(self.shape), 0.02)

    def run(self) -> Function:
        """The call of this package."""
        spec, scale = self.spec, self.scale()
        return self._timed(lambda x: fq.fake_quantize(x, spec, scale=scale))

    def copy(self) -> Function:
        """A plain copy of the same tensor, and with a backward one of its gradient too."""
        if not self.backward:
            return lambda x: x.clone()
        dy = torch.ones(self.shape, dtype=self.dtype)
        return lambda x: (x.detach().clone(), dy.clone())

    def aten(self) -> Function | None:
        """ATen's call, or None where it has none."""
        low, high = int(self.spec.format.quant_min), int(self.spec.format.quant_max)
        scale = self.scale()
        if scale is None or not self.spec.format.has_zero_point or self.dtype != torch.float32:
            return None
        if isinstance(self.spec.granularity, fq.PerTensor):
            return self._timed(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, 0, low, high))
        if isinstance(self.spec.granularity, fq.PerChannel) and len(self.spec.granularity.axes) == 1:
            axis = self.spec.granularity.axes[0]
            scale = scale.reshape(-1)
            zero_point = torch.zeros(scale.shape, dtype=torch.int32)
            return self._timed(lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, low, high))
        return None

    def _timed(self, function: Callable[[Tensor], Tensor]) -> Function:
        if not self.backward:
            return function
        dy = torch.ones(self.shape, dtype=self.dtype)
        return lambda x: torch.autograd.grad(function(x), x, dy)

    def differing(self) -> int:
        """Elements whose bits differ from the reference's."""
        x, scale = self.inputs(1)[0].detach(), self.scale()
        y = fq.fake_quantize(x, self.spec, scale=scale)
        if scale is None:
            measured = qparams.measure(x, self.spec.granularity)
            params = qparams.choose_qparams(measured, self.spec, largest=torch.finfo(x.dtype).max)
        else:
            params = fq.QParams(scale)
        return differing(y, reference.fake_quantize(x, params, self.spec))


ROWS = (1024, ELEMENTS // 1024)
INT8_CASE = Case("int8 per tensor", fq.QuantSpec("int8"))
CASES = (
    INT8_CASE,
    Case("int8 per tensor, with backward", fq.QuantSpec("int8"), backward=True),
    Case("int8 per channel 0", fq.QuantSpec("int8", fq.PerChannel(0)), shape=ROWS),
    Case("int8 per channel 1", fq.QuantSpec("int8", fq.PerChannel(1)), shape=ROWS),
    Case("int8 blocks of 32", fq.QuantSpec("int8", fq.PerBlock({-1: 32})), shape=ROWS),
    Case("int8 tiles of 128x128", fq.QuantSpec("int8", fq.PerBlock({0: 128, 1: 128})), shape=ROWS),
    Case("float8_e4m3fn per tensor", fq.QuantSpec("float8_e4m3fn")),
    Case("float8_e4m3fn per token", fq.QuantSpec("float8_e4m3fn", fq.PerToken()), shape=ROWS),
    Case("int8 per tensor, bfloat16", fq.QuantSpec("int8"), dtype=torch.bfloat16),
    Case("int8 per tensor, float16", fq.QuantSpec("int8"), dtype=torch.float16),
    Case("int8 per tensor, float64", fq.QuantSpec("int8"), dtype=torch.float64),
)


def report(cases: Sequence[Case]) -> int:
    """Measure and print a table; 1 if a case differs from the reference or misses its limit."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {ELEMENTS:,} elements, {BUFFERS} buffers")
    print(f"{'case':34} {'ms':>7} {'over copy':>10} {'quartiles':>13} {'over ATen':>10}")
    failed = 0
    for case in cases:
        if wrong := case.differing():
            print(f"{case.name:34} differs from the reference in {wrong:,} elements")
            failed = 1
            continue
        over_copy = ratio(case.run(), case.copy(), case.inputs())
        missed = case.limit is not None and over_copy.median > case.limit
        failed |= missed
        aten = case.aten()
        over_aten = f"{ratio(case.run(), aten, case.inputs(2), rounds=20).median:.3f}" if aten else ""
        quartiles = f"{over_copy.low:.2f} - {over_copy.high:.2f}"
        times = f"{1e3 * over_copy.seconds:7.2f} {over_copy.median:10.2f} {quartiles:>13} {over_aten:>10}"
        print(f"{case.name:34} {times}{f' MISSED: > {case.limit:g}' if missed else ''}".rstrip())
    return failed


if __name__ == "__main__":
    raise SystemExit(report(CASES))
