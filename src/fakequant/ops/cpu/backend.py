"""The CPU backend: hands tensors to the C++ kernels in memory order."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fakequant.numerics.granularity import Granularity
from fakequant.numerics.histogram import Bins, Observed
from fakequant.numerics.qparams import PLAIN, QParams, Range, compute_dtype
from fakequant.numerics.reference import clip_range, input_range, seed_of
from fakequant.numerics.spec import Arithmetic, Gradient, QuantSpec, Rounding
from fakequant.ops.backend import Backend, Direct, Encoded
from fakequant.ops.layout import Layout, layout_of
from fakequant.ops.rules import cannot_choose, cannot_draw, cannot_round, grid_fields, scale_rule, table_fields

# The numbers by which call.h knows these values.
_ARITHMETIC = {Arithmetic.DIVIDE: 0, Arithmetic.RECIPROCAL: 1, Arithmetic.MULTIPLIER: 2}
_NO_MASK = 0
_MASK = {Gradient.IDENTITY: _NO_MASK, Gradient.CODE_RANGE: 1, Gradient.INPUT_RANGE: 2, Gradient.CLIP: 3}
_EVERYWHERE = 4  # of a ReLU that is quantized with IDENTITY, whose mask is its own alone
_BY_RANGE = (Gradient.INPUT_RANGE, Gradient.CLIP)
log = logging.getLogger("fakequant.backend")


@cache
def load_kernels() -> str | None:
    """Load the compiled kernels once; None if they are loaded, else why they are not."""
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
    rectifies = True

    def unavailable(self) -> str | None:
        return load_kernels()

    def unfit(self, x: Tensor) -> str | None:
        if x.device.type != "cpu":
            return f"the tensor is on {x.device}"
        return None if type(x) in PLAIN else f"{type(x).__name__} is no plain tensor"

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        if reason := self.unfit(x):
            return reason
        if codes and not spec.format.has_zero_point:
            return f"the kernels read and write integer codes only, not those of {spec.format}"
        if reason := cannot_round(spec.format, x.dtype):
            return reason
        return cannot_draw(spec.format, x.dtype) if spec.rounding is Rounding.STOCHASTIC else None

    def fake_quantize(
        self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool, rectified: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        plan = _plan(spec, x.dtype, x.shape, x.stride(), rectified)
        packed = x if plan.as_it_is else plan.layout.pack(x)
        kind = plan.mask if mask else _NO_MASK
        tensors = plan.params(params, spec, with_range=mask and spec.gradient in _BY_RANGE)
        random = plan.random(params.seed, spec) if spec.rounding is Rounding.STOCHASTIC else None
        # The overload itself: finding it anew costs a Python function.
        y, bits = torch.ops.fakequant_cpu.fake_quantize.default(packed, *tensors, plan.form, kind, random)
        return y if plan.as_it_is else plan.layout.unpack(y), bits

    def fake_quantize_relu(
        self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool
    ) -> tuple[Tensor, Tensor | None]:
        # By a flag of `fake_quantize`, whose calls a function that both of these call would cost one frame more.
        return self.fake_quantize(x, params, spec, mask=mask, rectified=True)

    def direct(self, x: Tensor, spec: QuantSpec, scale: Tensor, *, relu: bool = False) -> Direct | None:
        shapes = spec.granularity.scale_shapes(x.shape)
        plan = _plan(spec, x.dtype, x.shape, x.stride(), relu)
        groups = [axis for axis in plan.layout.group_order if plan.layout.group_shape[axis] > 1]
        takes = plan.as_it_is and groups == sorted(groups)
        if not takes or scale.dtype != plan.dtype or scale.shape not in shapes or spec.rounding is Rounding.STOCHASTIC:
            return None
        ops = torch.ops.fakequant_cpu
        return Direct(
            values=ops.checked.default,
            values_over=ops.checked_over.default,
            values_and_mask=ops.checked_with_mask.default,
            grad_input=ops.mask_gradient.default,
            gradients=ops.learned_gradients.default if x.numel() else None,
            codes=ops.checked_codes.default if spec.format.has_zero_point else None,
            form=plan.form,
            dtype=x.dtype,
            call=(self, spec, x.stride()),
        )

    def fake_quantize_dynamic(
        self, x: Tensor, spec: QuantSpec, *, mask: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        plan = _plan(spec, x.dtype, x.shape, x.stride())
        if plan.cannot_choose:
            log.debug("cpu measures %s on %s apart: %s", spec, tuple(x.shape), plan.cannot_choose)
            return super().fake_quantize_dynamic(x, spec, mask=mask, seed=seed)
        packed = x if plan.as_it_is else plan.layout.pack(x)
        kind = plan.mask if mask else _NO_MASK
        random = plan.random(seed, spec) if spec.rounding is Rounding.STOCHASTIC else None
        dynamic = torch.ops.fakequant_cpu.fake_quantize_dynamic.default
        y, bits = dynamic(packed, plan.rule, plan.form, kind, random)
        return y if plan.as_it_is else plan.layout.unpack(y), bits

    def measure(self, x: Tensor, granularity: Granularity) -> Range:
        layout = layout_of(granularity, x.shape, x.stride())
        lo, hi = torch.empty(2, layout.tiles.groups, dtype=compute_dtype(x.dtype), device="cpu").unbind()
        if not x.numel():
            return Range(layout.unpack_groups(lo.zero_()), layout.unpack_groups(hi.zero_()))
        torch.ops.fakequant_cpu.measure(layout.pack(x), lo, hi, *layout.tiles)
        return Range(layout.unpack_groups(lo), layout.unpack_groups(hi))

    def observe(self, values: Tensor, bins: Bins | None) -> Observed:
        groups = values.shape[0]
        ends = torch.empty(2, groups, dtype=compute_dtype(values.dtype), device="cpu")
        counts = None if bins is None else torch.zeros(groups, 2, bins.number, dtype=torch.int64, device="cpu")
        inverse = _nowhere(groups) if bins is None else bins.inverse.to(values.device)
        torch.ops.fakequant_cpu.observe(values, inverse, ends, counts)
        # 0.0 is added because which of the two zeros comes first depends on the order of the values.
        return Observed(Range(*(ends + 0.0).unbind()), counts)

    def take_in(self, values: Tensor, range: Range, bins: Bins | None, counts: Tensor | None) -> bool:
        inverse = _nowhere(range.lo.numel()) if bins is None else bins.inverse
        return torch.ops.fakequant_cpu.take_in.default(values, inverse, range.lo, range.hi, counts)

    def grad_input(self, dy: Tensor, mask: Tensor, spec: QuantSpec, x_stride: tuple[int, ...]) -> Tensor:
        layout = layout_of(spec.granularity, dy.shape, x_stride)
        return layout.unpack(torch.ops.fakequant_cpu.mask_gradient.default(layout.pack(dy), mask))

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, spec: QuantSpec, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not x.numel() or spec.rounding is Rounding.STOCHASTIC:  # slopes of drawn codes: the reference's
            return super().grad_params(dy, x, params, spec, wants)
        plan = _plan(spec, x.dtype, x.shape, x.stride())
        packed = plan.layout.pack(dy), plan.layout.pack(x)
        parameters = params.scale if wants[0] else None, params.zero_point if wants[1] else None
        groups = plan.layout.tiles.groups
        sums = [None if p is None else torch.empty(groups, dtype=torch.float64, device="cpu") for p in parameters]
        clips = spec.gradient is Gradient.CLIP
        tensors = plan.params(params, spec, with_range=clips)
        kind = _MASK[Gradient.CLIP] if clips else _NO_MASK
        torch.ops.fakequant_cpu.grad_params(*packed, *tensors, plan.form, *sums, kind)
        by_scale, by_zero_point = (
            None if s is None or p is None else plan.layout.unpack_groups(s).to(p.dtype)
            for s, p in zip(sums, parameters, strict=True)
        )
        return by_scale, by_zero_point

    def squared_errors(
        self, centers: Tensor, sums: Tensor, middles: Tensor, params: QParams, spec: QuantSpec
    ) -> Tensor | None:
        if spec.rounding is Rounding.STOCHASTIC:  # values do not rise with x
            return None
        form = _plan(spec, centers.dtype, centers.shape, centers.stride()).form
        zero_point = None if params.zero_point is None else params.zero_point.to(centers.dtype)
        return torch.ops.fakequant_cpu.squared_errors.default(centers, sums, middles, params.scale, zero_point, form)

    def nearly_least(
        self, centers: Tensor, counts: Tensor, amax: Tensor, scale: Tensor, spec: QuantSpec
    ) -> Tensor | None:
        form = _plan(spec, centers.dtype, centers.shape, centers.stride()).form
        middles = _middles(spec.format.quant_max)
        return torch.ops.fakequant_cpu.nearly_least.default(centers, counts, middles, amax, scale, form)

    def quantize(self, x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
        return self.encode(x, params, spec, mask=False).codes

    def encode(self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool) -> Encoded:
        plan = _plan(spec, x.dtype, x.shape, x.stride())
        packed = plan.layout.pack(x)
        codes = torch.empty_like(packed, dtype=spec.format.storage)
        tensors = plan.params(params, spec, with_range=mask and spec.gradient in _BY_RANGE)
        kind, random = plan.mask if mask else _NO_MASK, plan.random(params.seed, spec)
        bits, has_nan = torch.ops.fakequant_cpu.quantize(packed, *tensors, plan.form, codes, kind, random)
        return Encoded(plan.layout.unpack(codes), bits, has_nan)

    def dequantize(self, codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
        plan = _plan(spec, dtype, codes.shape, codes.stride())
        scale, zero_point, *_ = plan.params(params, spec)
        like = torch.empty(0, dtype=dtype, device="cpu")
        packed = plan.layout.pack(codes)
        return plan.layout.unpack(
            torch.ops.fakequant_cpu.dequantize.default(packed, scale, zero_point, plan.form, like)
        )


@lru_cache(maxsize=64)
def _nowhere(groups: int) -> Tensor:
    """`Bins.inverse` for kernels that are to count nothing."""
    return torch.zeros(groups, dtype=torch.float64, device="cpu")


@lru_cache(maxsize=16)
def _middles(quant_max: float) -> Tensor:
    """What lies between neighbouring integers from 0 to the largest code."""
    return torch.arange(quant_max, dtype=torch.float64, device="cpu") + 0.5


@dataclass(frozen=True)
class _Plan:
    """What follows from a specification and the form of a tensor alone: found once for each, then looked up.

    Every Python function that a call runs costs 5 to 10 us where a large tensor has just left nothing in the caches.
    """

    layout: Layout
    as_it_is: bool  # the kernels read and write the tensor's own memory order: nothing to pack or unpack
    dtype: torch.dtype
    form: Tensor  # the tiles, the format, the arithmetic and whether there is a ReLU, as one tensor, see chunks.h
    rule: Tensor | None  # by which the kernels find scales; None where they do not
    mask: int  # the kind that the gradient needs
    cannot_choose: str | None  # why the kernels do not find the scales

    def params(self, params: QParams, spec: QuantSpec, *, with_range: bool = False) -> tuple[Tensor | None, ...]:
        """Scale, zero point and range as the kernels read them."""
        pack, dtype = self.layout.pack_groups, self.dtype
        zero_point = None if params.zero_point is None else pack(params.zero_point, dtype)
        lo = hi = None
        if with_range:
            ends = clip_range(params, spec, dtype) if spec.gradient is Gradient.CLIP else input_range(params, spec)
            lo, hi = (pack(end, dtype) for end in ends)
        return pack(params.scale, dtype), zero_point, lo, hi

    def random(self, seed: Tensor | None, spec: QuantSpec) -> Tensor | None:
        """What stochastic rounding draws from: the seed, or words in the kernel's order where that is another one."""
        seed = seed_of(seed, spec)
        if seed is None or self.layout.row_major:
            return None if seed is None else seed.cpu()
        words = torch.empty(self.layout.shape, dtype=torch.int32, device="cpu")
        torch.ops.fakequant_cpu.draw_words(seed.cpu(), words)
        return self.layout.pack(words)


@lru_cache(maxsize=4096)
def _plan(
    spec: QuantSpec, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], rectified: bool = False
) -> _Plan:
    layout, computed = layout_of(spec.granularity, shape, stride), compute_dtype(dtype)
    reason = cannot_choose(spec, dtype, layout.group_shape)
    rule = scale_rule(spec, dtype) if reason is None else None
    table = table_fields(spec.format, computed)
    fields = *layout.tiles, *grid_fields(spec.format.grid), _ARITHMETIC[spec.arithmetic], rectified, *table
    form = torch.tensor(fields, dtype=torch.float64, device="cpu")
    mask = _EVERYWHERE if rectified and spec.gradient is Gradient.IDENTITY else _MASK[spec.gradient]
    return _Plan(layout, stride == layout.packed_stride, computed, form, rule, mask, reason)
