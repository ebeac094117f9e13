"""A call of `fake_quantize` as a case to time against a copy, ATen's operator and torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fakequant.functional import fake_quantize
from fakequant.numerics import qparams, reference
from fakequant.numerics.granularity import PerChannel, PerTensor
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.ops.graph_operators import Decomposed, tensors_of

from .pairs import CannotRunError, Prepared
from .timing import Function

COPY, DOUBLED = "x.clone()", "x * 2"
ATEN, COMPILED = "ATen", "torch.compile"

# Total size of the buffers of large tensors in bytes: larger than the caches of common machines.
_CACHES = 1 << 27
_PATTERN = 1 << 20
_SCALE = 0.02


@lru_cache(maxsize=1)
def _pattern() -> Tensor:
    """Return normal numbers that every input repeats: drawing 64 million of them takes longer than timing a call."""
    return torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))


def square(elements: int) -> tuple[int, int]:
    """The shape nearest to a square with a number of elements that is a power of two, rows of at least 64.

    >>> square(1 << 22), square(64)
    ((2048, 2048), (1, 64))
    """
    columns = max(64, 1 << (elements.bit_length() // 2))
    return elements // columns, columns


@dataclass(frozen=True)
class Case:
    """Fake quantization of a tensor, with its gradient or without.

    Args:
        name: the name in results, the same for every size and dtype.
        spec: the specification.
        shape: the shape of the inputs.
        dtype: the dtype of the inputs.
        backward: whether to compute the gradient too.
        dynamic: whether the scales are computed from the input; else they are given.
        learned: whether the scales get a gradient too.
        device: the device of the tensors.

    >>> case = Case("int8 per tensor", QuantSpec("int8"), square(4096))
    >>> case.direction, case.elements, case.dtype_name, case.differing()
    ('forward', 4096, 'float32', 0)
    """

    name: str
    spec: QuantSpec
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    backward: bool = False
    dynamic: bool = False
    learned: bool = False
    device: str = "cpu"

    @property
    def direction(self) -> str:
        return "forward and backward" if self.backward else "forward"

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def text(self) -> str:
        return str(self.spec)

    def inputs(self, buffers: int | None = None) -> list[Tensor]:
        """Return tensors of normal numbers; the default number of tensors exceeds the caches."""
        if buffers is None:
            bytes_per_tensor = self.elements * self.dtype.itemsize
            buffers = 8 if self.elements < _PATTERN else max(4, _CACHES // bytes_per_tensor)
        repeats = -(-self.elements // _PATTERN)
        x = _pattern().to(self.device, self.dtype).repeat(repeats)[: self.elements].view(self.shape)
        return [x.clone().requires_grad_(self.backward) for _ in range(buffers)]

    def scale(self) -> Tensor | None:
        """Return the scales, or None if they are computed from the input."""
        if self.dynamic:
            return None
        scale = 1 / _SCALE if self.spec.arithmetic is Arithmetic.MULTIPLIER else _SCALE
        groups = self.spec.granularity.group_shape(self.shape)
        return torch.full(groups, scale, device=self.device).requires_grad_(self.learned)

    def run(self) -> Function:
        """Return the call of this package."""
        spec, scale = self.spec, self.scale()
        return self._timed(lambda x: fake_quantize(x, spec, scale=scale), scale)

    def prepare(self, against: str) -> Prepared:
        others: dict[str, Callable[[], Function]] = {
            COPY: lambda: torch.clone,
            DOUBLED: lambda: self._timed(lambda x: x * 2),
            ATEN: self._aten,
            COMPILED: self._compiled,
        }
        if against not in others:
            raise CannotRunError(f"{against} has no call of this kind")
        theirs = others[against]()  # before the inputs, which are slow to create, because it can raise
        inputs = self.inputs()
        if against == COMPILED:
            theirs(inputs[0])  # compiles; the time of compilation does not count
        return Prepared(self.run(), theirs, inputs)

    def differing(self) -> int:
        """Count elements of the result and the gradients whose bits differ from the reference on the CPU.

        The inputs are the timed numbers, then ties (with given scales), zeros, subnormal numbers, infinities and NaN.
        """
        return sum(self._differing_of(x) for x in self._compared())

    def _differing_of(self, x: Tensor) -> int:
        scale, spec = self.scale(), self.spec
        if scale is None:
            measured = qparams.measure(x, spec.granularity)
            params = qparams.choose_qparams(measured, spec, largest=torch.finfo(x.dtype).max)
        else:
            params = qparams.QParams(scale.detach().to("cpu", qparams.compute_dtype(x.dtype)))
        leaf = x.clone().to(self.device).requires_grad_(self.backward)
        y = fake_quantize(leaf, spec, scale=scale)
        wrong = _differing(y.detach(), reference.fake_quantize(x, params, spec))
        if not self.backward:
            return wrong
        dy = torch.ones_like(x)
        learned = (scale,) if self.learned and scale is not None else ()
        gradients = torch.autograd.grad(y, (leaf, *learned), dy.to(self.device))
        wrong += _differing(gradients[0], reference.grad_input(dy, reference.passes(x, params, spec)))
        if learned:
            expected, _ = reference.grad_params(dy, x, params, spec, (True, False))
            assert expected is not None
            wrong += _differing(gradients[1], expected)
        return wrong

    def _compared(self) -> list[Tensor]:
        x = self.inputs(1)[0].detach().cpu()
        hostile = x.clone()
        flat = hostile.view(-1)
        if not self.dynamic:
            half = flat[flat.numel() // 2 :]
            half.copy_(((half / _SCALE).floor() + 0.5) * _SCALE)
        special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan], dtype=self.dtype)
        flat[-len(special) :] = special
        return [x, hostile]

    def _timed(self, function: Callable[[Tensor], Tensor], scale: Tensor | None = None) -> Function:
        if not self.backward:
            return function
        dy = torch.ones(self.shape, dtype=self.dtype, device=self.device)
        if scale is None or not scale.requires_grad:
            return lambda x: torch.autograd.grad(function(x), x, dy)
        return lambda x: torch.autograd.grad(function(x), (x, scale), dy)

    def _compiled(self) -> Function:
        """The definition, traced: what torch's compiler makes of the plain formula."""
        spec, scale = self.spec, self.scale()

        def formula(x: Tensor) -> Tensor:
            if scale is not None:
                return Decomposed.apply(x, *tensors_of(qparams.QParams(scale)), spec)
            measured = qparams.measure(x, spec.granularity)
            params = qparams.choose_qparams(measured, spec, largest=torch.finfo(x.dtype).max)
            return Decomposed.apply(x, *tensors_of(params), spec)

        torch.compiler.reset()
        compiled: Any = torch.compile(formula)
        return self._timed(compiled, scale)

    def _aten(self) -> Function:
        """Return the corresponding call of ATen.

        Raises:
            CannotRunError: ATen has no such call.
        """
        fmt, scale, granularity = self.spec.format, self.scale(), self.spec.granularity
        if not fmt.has_zero_point:
            raise CannotRunError(f"has no {fmt}")
        if scale is None:
            raise CannotRunError("takes no scales from the input")
        low, high = int(fmt.quant_min), int(fmt.quant_max)
        if isinstance(granularity, PerTensor) and self.learned:
            zero_point = torch.zeros(1, device=self.device)
            learned = scale.detach().reshape(1).requires_grad_()
            learnable: Any = torch._fake_quantize_learnable_per_tensor_affine
            return self._timed(lambda x: learnable(x, learned, zero_point, low, high, 1.0), learned)
        if isinstance(granularity, PerTensor):
            return self._timed(lambda x: torch.fake_quantize_per_tensor_affine(x, _SCALE, 0, low, high))
        if isinstance(granularity, PerChannel) and len(granularity.axes) == 1 and not self.learned:
            axis, scales = granularity.axes[0], scale.reshape(-1)
            zero_point = torch.zeros(scales.shape, dtype=torch.int32, device=self.device)
            return self._timed(lambda x: torch.fake_quantize_per_channel_affine(x, scales, zero_point, axis, low, high))
        raise CannotRunError(f"has no granularity {granularity}")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differing(actual: Tensor, expected: Tensor) -> int:
    """Count the elements whose bits differ; NaN equals NaN, and with another dtype all elements differ."""
    if actual.dtype != expected.dtype:
        return expected.numel()
    bits = _BITS[actual.element_size()]
    actual = actual.to(expected.device)
    same = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    return int((~(same | (actual.isnan() & expected.isnan()))).sum())
