"""The CPU backend: passes tensors to the C++ kernels in memory order."""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakequant.numerics.granularity import Granularity
from fakequant.numerics.qparams import PLAIN, QParams, Range, compute_dtype
from fakequant.numerics.reference import Bins, Observed, clip_range, dequantize, input_range, seed_of
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec, Rounding
from fakequant.ops.backend import RELU, VALUES, Backend, CallKind, ColumnGrid, KernelPlan, Kernels, ParameterKind
from fakequant.ops.kernel_params import (
    cannot_choose,
    cannot_draw,
    cannot_hold,
    cannot_round,
    grid_fields,
    in_turn,
    is_lattice,
    scale_rule,
    table_fields,
)
from fakequant.ops.layout import Layout, keeps_negative_zero, keeps_strides, layout_of

# The numbers by which call.h knows these values.
_ARITHMETIC = {Arithmetic.DIVIDE: 0, Arithmetic.RECIPROCAL: 1, Arithmetic.MULTIPLIER: 2}
_NO_MASK = 0
_MASK = {Gradient.IDENTITY: _NO_MASK, Gradient.CODE_RANGE: 1, Gradient.INPUT_RANGE: 2, Gradient.CLIP: 3}
_EVERYWHERE = 4  # for a quantized ReLU with IDENTITY: the mask is that of the ReLU alone
_BY_RANGE = (Gradient.INPUT_RANGE, Gradient.CLIP)
log = logging.getLogger("fakequant.backend")


@cache
def load_kernels() -> str | None:
    """Load the compiled kernels once; returns None if they are loaded, else the reason why not."""
    libraries = sorted(Path(__file__).parent.glob("_kernels*.so")) + sorted(Path(__file__).parent.glob("_kernels*.pyd"))
    if not libraries:
        return "the C++ kernels were not built; install a C++ compiler and reinstall the package"
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        return f"{libraries[0].name} does not load: {error}"
    return None


class CpuBackend(Backend):
    """C++ kernels on LibTorch's stable ABI."""

    name = "cpu"
    device_type = "cpu"

    def unavailable(self) -> str | None:
        return load_kernels()

    def unfit(self, x: Tensor) -> str | None:
        if x.device.type != "cpu":
            return f"the tensor is on {x.device}"
        return None if type(x) in PLAIN else f"{type(x).__name__} is not a plain tensor"

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        if reason := self.unfit(x):
            return reason
        if codes and not spec.format.has_zero_point:
            return f"the kernels read and write integer codes only, not those of {spec.format}"
        if reason := cannot_hold(spec) or cannot_round(spec.format, x.dtype):
            return reason
        return cannot_draw(spec.format, x.dtype) if spec.rounding is Rounding.STOCHASTIC else None

    def plan(self, kind: CallKind) -> KernelPlan | None:
        if kind.variant == RELU:
            like_x = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
            other = kind.spec.rounding is Rounding.STOCHASTIC or is_lattice(kind.spec) or kind.scale is None
            if other or not (keeps_strides(like_x) and keeps_negative_zero(kind.dtype)):
                return None
        return CpuKernels(kind, self.name).plan()

    def measure(self, x: Tensor, granularity: Granularity) -> Range:
        return _measured(x, layout_of(granularity, x.shape, x.stride()))

    def observe(self, values: Tensor, bins: Bins | None) -> Observed:
        groups = values.shape[0]
        ends = torch.empty(2, groups, dtype=compute_dtype(values.dtype), device="cpu")
        counts = None if bins is None else torch.zeros(groups, 2, bins.number, dtype=torch.int64, device="cpu")
        inverse = _nowhere(groups) if bins is None else bins.inverse.to(values.device)
        torch.ops.fakequant_cpu.observe(values, inverse, ends, counts)
        # 0.0 is added because which of the two zeros comes first depends on the order of the values.
        return Observed(Range(*(ends + 0.0).unbind()), counts)

    def sweep(
        self, wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, missed: Tensor, grid: ColumnGrid
    ) -> bool:
        point = None if grid.zero_point is None else grid.zero_point.float()
        torch.ops.fakequant_cpu.sweep.default(
            wanted, left, shares, errors, missed, _form_of_columns(grid.spec, wanted.shape[1]), grid.runs, grid.scale,
            point, grid.offset, grid.sign, grid.zero, grid.zeros,
        )  # fmt: skip
        return True

    def take_in(self, values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
        inverse = _nowhere(range.lo.numel()) if bins is None else bins.inverse
        return torch.ops.fakequant_cpu.take_in.default(values, inverse, range.lo, range.hi, counts)


class CpuKernels(Kernels):
    """The C++ kernels for one kind of call.

    If the kernels can read x and the parameters without copies, the plan calls the operators directly: a Python
    function in between would cost as much as quantizing thousands of elements.
    """

    def __init__(self, kind: CallKind, backend: str) -> None:
        super().__init__(kind, backend)
        self.dtype, rectified = compute_dtype(kind.dtype), kind.variant == RELU
        self.is_packed = kind.stride == self.layout.packed_stride
        # The tiles, the format, the arithmetic, whether there are a ReLU, offsets, exact scales, see chunks.h.
        fmt, lattice = self.spec.format, (self.spec.offset is not None, self.spec.scale.is_exact)
        fields = *self.layout.tiles, *grid_fields(fmt.grid), _ARITHMETIC[self.spec.arithmetic], rectified, *lattice
        fields = *fields, *table_fields(fmt, self.dtype)
        self.descriptor = torch.tensor(fields, dtype=torch.float64, device="cpu")
        identity = self.spec.gradient is Gradient.IDENTITY
        self.mask = _EVERYWHERE if rectified and identity else _MASK[self.spec.gradient]
        self.rule: Tensor | None = None
        if kind.scale is None:
            spec, groups, order = self.spec, self.layout.group_shape, self.layout.group_order
            reason = cannot_choose(spec, kind.dtype, groups, order)
            if reason is None:
                self.rule = scale_rule(
                    spec, kind.dtype, in_turn(spec.scale, groups, order), in_turn(spec.offset, groups, order)
                )
            else:
                log.debug("cpu measures %s on %s apart: %s", self.spec, tuple(kind.shape), reason)

    def plan(self) -> KernelPlan:
        plan, layout = super().plan(), self.layout
        groups = [axis for axis in layout.group_order if layout.group_shape[axis] > 1]
        in_order = self.is_packed and groups == sorted(groups)
        nearest = self.spec.rounding is Rounding.NEAREST_EVEN
        # The checked kernels ask for positive scales and zero points that are codes.
        if not (in_order and self.has_plain_params and nearest and layout.tiles.elements) or is_lattice(self.spec):
            return plan
        plan = plan._replace(
            values=self._checked, values_over=self._checked_over, codes=self._checked_codes, otherwise=plan
        )
        if not self.masks:
            return plan._replace(values_and_mask=self._checked_without_mask, checks=True)
        if self.spec.gradient is not Gradient.CODE_RANGE:
            return plan
        ops = torch.ops.fakequant_cpu
        return plan._replace(
            values=ops.checked.default,
            values_and_mask=ops.checked_with_mask.default,
            grad_input=ops.mask_gradient.default,
            gradients=ops.learned_gradients.default,
            descriptor=self.descriptor,
            values_over=ops.checked_over.default,
            checks=True,
        )

    def _checked(self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, _: Any) -> Tensor | None:
        return torch.ops.fakequant_cpu.checked.default(x, scale, zero_point, self.descriptor)

    def _checked_without_mask(
        self, x: Tensor, scale: Tensor | None, zero_point: Tensor | None, _: Any
    ) -> tuple[Tensor | None, None]:
        return torch.ops.fakequant_cpu.checked.default(x, scale, zero_point, self.descriptor), None

    def _checked_over(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, _: Any) -> bool:
        return torch.ops.fakequant_cpu.checked_over.default(x, scale, zero_point, self.descriptor)

    def _checked_codes(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, extras: Any
    ) -> tuple[Tensor, bool | Tensor]:
        codes = torch.empty_like(x, dtype=self.spec.format.storage)
        found = torch.ops.fakequant_cpu.checked_codes.default(x, scale, zero_point, self.descriptor, codes)
        # False if x has NaN or a parameter is not valid; only the general kernel tells which.
        return (codes, False) if found else self.encode(x, self._params(scale, zero_point, None))

    def quantize(self, x: Tensor, params: QParams, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        packed = x if self.is_packed else self.layout.pack(x)
        kind = self.mask if mask else _NO_MASK
        tensors = self._tensors(params, with_range=mask and self.spec.gradient in _BY_RANGE)
        given = packed, *tensors, self.descriptor, kind, self._random(params.seed)
        # The overload itself: finding it anew costs a Python function.
        y, bits = torch.ops.fakequant_cpu.fake_quantize.default(*given)
        return y if self.is_packed else self.layout.unpack(y), bits

    def quantize_dynamic(self, x: Tensor, seed: Tensor | None, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        if self.rule is None:
            return super().quantize_dynamic(x, seed, mask=mask)
        packed = x if self.is_packed else self.layout.pack(x)
        kind = self.mask if mask else _NO_MASK
        dynamic = torch.ops.fakequant_cpu.fake_quantize_dynamic.default
        y, bits = dynamic(packed, self.rule, self.descriptor, kind, self._random(seed))
        return y if self.is_packed else self.layout.unpack(y), bits

    def measure(self, x: Tensor) -> Range:
        return _measured(x, self.layout)

    def mask_gradient(self, dy: Tensor, mask: Tensor) -> Tensor:
        return self.layout.unpack(torch.ops.fakequant_cpu.mask_gradient.default(self.layout.pack(dy), mask))

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        # Slopes of drawn codes and of lattices are the reference's.
        if not x.numel() or self.spec.rounding is Rounding.STOCHASTIC or is_lattice(self.spec):
            return super().grad_params(dy, x, params, wants)
        parameters = params.scale if wants[0] else None, params.zero_point if wants[1] else None
        groups = self.layout.tiles.groups
        sums = [None if p is None else torch.empty(groups, dtype=torch.float64, device="cpu") for p in parameters]
        clips = self.spec.gradient is Gradient.CLIP
        kind = _MASK[Gradient.CLIP] if clips else _NO_MASK
        tensors = self._tensors(params, with_range=clips)
        packed = self.layout.pack(dy), self.layout.pack(x)
        torch.ops.fakequant_cpu.grad_params(*packed, *tensors, self.descriptor, *sums, kind)
        by_scale, by_zero_point = (
            None if s is None or p is None else self.layout.unpack_groups(s).to(p.dtype)
            for s, p in zip(sums, parameters, strict=True)
        )
        return by_scale, by_zero_point

    def encode(self, x: Tensor, params: QParams) -> tuple[Tensor, bool | Tensor]:
        packed = self.layout.pack(x)
        codes = torch.empty_like(packed, dtype=self.spec.format.storage)
        given = packed, *self._tensors(params), self.descriptor, codes, self._random(params.seed)
        has_nan = torch.ops.fakequant_cpu.quantize.default(*given)
        return self.layout.unpack(codes), has_nan

    def decode(self, codes: Tensor, params: QParams) -> Tensor:
        if self.spec.offset is not None:
            return dequantize(codes, params, self.spec, self.kind.dtype)
        scale, zero_point, *_ = self._tensors(params)
        like = torch.empty(0, dtype=self.kind.dtype, device="cpu")
        given = self.layout.pack(codes), scale, zero_point, self.descriptor, like
        return self.layout.unpack(torch.ops.fakequant_cpu.dequantize.default(*given))

    def _tensors(self, params: QParams, *, with_range: bool = False) -> tuple[Tensor | None, ...]:
        """Scale, zero point and range (None unless `with_range`) in the order and dtype that the kernels read."""
        pack, spec, dtype = self.layout.pack_groups, self.spec, self.dtype
        zero_point = None if params.zero_point is None else pack(params.zero_point, dtype)
        lo = hi = None
        if with_range:
            ends = clip_range(params, spec, dtype) if spec.gradient is Gradient.CLIP else input_range(params, spec)
            lo, hi = (pack(end, dtype) for end in ends)
        return pack(params.scale, dtype), zero_point, lo, hi

    def _random(self, seed: Tensor | None) -> Tensor | None:
        """The seed, or random words if the kernel's order is not row-major; None where rounding is to nearest."""
        seed = seed_of(seed, self.spec)
        if seed is None or self.layout.row_major:
            return None if seed is None else seed.cpu()
        words = torch.empty(self.layout.shape, dtype=torch.int32, device="cpu")
        torch.ops.fakequant_cpu.draw_words(seed.cpu(), words)
        return self.layout.pack(words)


@lru_cache(maxsize=64)
def _form_of_columns(spec: QuantSpec, rows: int) -> Tensor:
    """The descriptor for a column [rows, 1] with a scale for each row."""
    scale = ParameterKind(torch.float32, torch.device("cpu"), (rows, 1), True)
    kind = CallKind(spec, VALUES, torch.float32, scale.device, (rows, 1), (1, 1), scale, None)
    return CpuKernels(kind, CpuBackend.name).descriptor


def _measured(x: Tensor, layout: Layout) -> Range:
    lo, hi = torch.empty(2, layout.tiles.groups, dtype=compute_dtype(x.dtype), device="cpu").unbind()
    if not x.numel():
        return Range(layout.unpack_groups(lo.zero_()), layout.unpack_groups(hi.zero_()))
    torch.ops.fakequant_cpu.measure(layout.pack(x), lo, hi, *layout.tiles)
    return Range(layout.unpack_groups(lo), layout.unpack_groups(hi))


@lru_cache(maxsize=64)
def _nowhere(groups: int) -> Tensor:
    """The `Bins.inverse` with which kernels count nothing: zeros [groups]."""
    return torch.zeros(groups, dtype=torch.float64, device="cpu")
