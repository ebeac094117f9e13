"""The Triton backend: passes CUDA tensors to the kernels in memory order; triton is imported at the first of them."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fakequant.numerics.formats.floats import Format
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.philox import random_words
from fakequant.numerics.qparams import PLAIN, QParams, Range, compute_dtype
from fakequant.numerics.reference import Bins, Observed, input_range, seed_of
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops.backend import RELU, Backend, CallKind, ColumnGrid, Extras, KernelPlan, Kernels
from fakequant.ops.kernel_params import cannot_choose, cannot_draw, cannot_hold, cannot_round, is_lattice, table_fields
from fakequant.ops.layout import Layout, layout_of

from .call import KernelCall, TilePlace, call_of, dynamic_call_of

# Bytes of a block of elements: 16 loads of 16 bytes for each thread of 4 warps leave enough in flight to fill the bus.
_BLOCK_BYTES = 8192
# The first generation with an instruction that rounds float32 to bfloat16; triton serves none before it.
_FIRST_CAPABILITY = (8, 0)
log = logging.getLogger("fakequant.backend")
# Scales of these dtypes imply a range that the kernel finds as the definition does; torch rounds others otherwise.
_COMPUTED = (torch.float32, torch.float64)


class Exclusion(NamedTuple):
    """A kind of call that the kernels cannot serve, and the reason; the reference serves such calls."""

    what: str
    reason: str
    applies: Callable[[Tensor, QuantSpec, bool], bool]


EXCLUSIONS = (
    Exclusion(
        "offsets in units of x, and scales that may be 0 or negative: those in a float format, or under a scale in one",
        "the kernels shift codes by zero points, and know positive scales",
        lambda x, spec, codes: is_lattice(spec) or cannot_hold(spec) is not None,
    ),
    Exclusion(
        "float formats beyond 2**64, except values of float64 tensors",
        "rounding adds 2**(e + 23 - mantissa_bits), which must be a float32",
        lambda x, spec, codes: cannot_round(spec.format, torch.float32 if codes else x.dtype) is not None,
    ),
    Exclusion(
        "stochastic rounding to float formats with steps below 2**-126, except float64 tensors",
        "the kernels read the step from its exponent field, which subnormal numbers lack",
        lambda x, spec, codes: spec.rounding is Rounding.STOCHASTIC and cannot_draw(spec.format, x.dtype) is not None,
    ),
)


class TritonBackend(Backend):
    """Triton kernels for NVIDIA GPUs; in triton's interpreter they also run on a CPU.

    Args:
        device_type: the device type of served tensors; "cpu" is for the interpreter, TRITON_INTERPRET=1.
        block: elements of a program, a power of two of at least 8; None chooses by the dtype.
    """

    name = "triton"
    compiles_as_node = True
    at_once = 2**20  # a launch takes as long as reading 15 MB; some times more memory

    def __init__(self, device_type: str = "cuda", block: int | None = None) -> None:
        self.device_type = device_type
        self._block = block

    def unavailable(self) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if self.device_type != "cuda":
            return None
        if torch.version.hip is not None:
            return "the kernels are proven for GPUs of NVIDIA, and this torch is built for AMD's"
        if not torch.cuda.is_available():
            return "there is no GPU that torch can use"
        # Triton compiles the C code that starts kernels; it is looked for where triton does, without importing it.
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        if not any(shutil.which(name) for name in names):
            what = (
                f"CC is {names[0]!r}, which is not a program"
                if "CC" in os.environ
                else "there is neither gcc nor clang"
            )
            return f"triton needs a C compiler, and {what}; install one, or name it in CC"
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
        header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
        if not header.is_file():
            return f"triton compiles with Python's headers, and there is no {header}; install them (python3-dev)"
        return None

    def unfit(self, x: Tensor) -> str | None:
        if x.device.type != self.device_type:
            return f"the tensor is on {x.device}"
        if type(x) not in PLAIN:
            return f"{type(x).__name__} is not a plain tensor"
        if x.is_cuda and (capability := torch.cuda.get_device_capability(x.device)) < _FIRST_CAPABILITY:
            return f"the kernels need a GPU of compute capability 8.0, {x.device} has {capability[0]}.{capability[1]}"
        return None

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        if reason := self.unfit(x):
            return reason
        for what, reason, applies in EXCLUSIONS:
            if applies(x, spec, codes):
                return f"{what}: {reason}"
        return None

    def plan(self, kind: CallKind) -> KernelPlan | None:
        return None if kind.variant == RELU else TritonKernels(kind, self.name, self._block_of(kind.dtype)).plan()

    def measure(self, x: Tensor, granularity: Granularity) -> Range:
        return _measured(x, layout_of(granularity, x.shape, x.stride()), self._block_of(x.dtype))

    def observe(self, values: Tensor, bins: Bins | None) -> Observed:
        from . import launch

        groups, dtype = values.shape[0], compute_dtype(values.dtype)
        integer = torch.int64 if dtype == torch.float64 else torch.int32
        # Below the key of every number, see kernels/histogram.py.
        keys = torch.full((2, groups), torch.iinfo(integer).min, dtype=integer, device=values.device)
        counts = inverse = None
        if bins is not None:
            counts = torch.zeros(groups, 2, bins.number, dtype=torch.int64, device=values.device)
            inverse = bins.inverse_for(values)
        launch.observe(values, (*keys, counts), inverse, self._block_of(values.dtype))
        ends = torch.empty(2, groups, dtype=dtype, device=values.device)
        launch.ends_of_keys(keys, ends)
        return Observed(Range(*ends.unbind()), counts)

    def sweep(
        self, wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, missed: Tensor, grid: ColumnGrid
    ) -> bool:
        from . import launch

        spec, runs, scale, zero_point, offset, sign, *flags = grid
        call = call_of(spec, torch.float32, zero_point=zero_point is not None)
        bytes = [None if own is None else own.view(torch.uint8) for own in flags]
        given = runs, scale, zero_point, offset, sign, *bytes, _table_of(spec, torch.float32, wanted.device)
        launch.sweep((wanted, left, shares, errors, missed), given, call)
        return True

    def _block_of(self, dtype: torch.dtype) -> int:
        return self._block or _BLOCK_BYTES // dtype.itemsize


class TritonKernels(Kernels):
    """The Triton kernels for one kind of call, whose compile-time constants are computed once."""

    def __init__(self, kind: CallKind, backend: str, block: int) -> None:
        super().__init__(kind, backend)
        spec, self.block = kind.spec, block
        self.place = TilePlace.of(self.layout.tiles, block)
        shifted = kind.zero_point is not None or (kind.scale is None and not spec.symmetric)
        self.calls = {mask: call_of(spec, kind.dtype, zero_point=shifted, mask=mask) for mask in (False, True)}
        self.encoding = call_of(spec, kind.dtype, zero_point=shifted, emit="code")
        self.table = _table_of(spec, compute_dtype(kind.dtype), kind.device)
        self.dynamic: dict[bool, KernelCall] = {}
        if kind.scale is None:
            reason = cannot_choose(spec, kind.dtype, self.layout.group_shape) if self.place.elements else "it is empty"
            if reason is None:
                self.dynamic = {mask: dynamic_call_of(spec, kind.dtype, mask=mask) for mask in (False, True)}
            else:
                log.debug("triton measures %s on %s apart: %s", spec, tuple(kind.shape), reason)

    def plan(self) -> KernelPlan:
        plan, layout, kind = super().plan(), self.layout, self.kind
        groups = [axis for axis in layout.group_order if layout.group_shape[axis] > 1]
        as_they_are = kind.stride == layout.packed_stride and groups == sorted(groups)
        for parameter in (kind.scale, kind.zero_point):
            as_they_are = as_they_are and (parameter is None or parameter.contiguous)
        stochastic = self.spec.rounding is Rounding.STOCHASTIC
        # Ranges that the kernel does not find itself.
        ranged = self.calls[True].mask == "input" and kind.scale is not None and kind.scale.dtype not in _COMPUTED
        if kind.scale is None or not as_they_are or ranged or not self.place.elements or stochastic:
            return plan
        from . import launch

        self.plainly = tuple(launch.Quantizing(self.table, self.place, self.calls[mask]) for mask in (False, True))
        self.masking = launch.Masking(self.place.elements, self.block)
        plan = plan._replace(values=self._plain_values, values_and_mask=self._plain_values_and_mask)
        return plan._replace(grad_input=self._plain_gradient) if self.masks else plan

    def _plain_values(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, extras: Extras | None
    ) -> Tensor | None:
        if extras is not None:
            return self._values(x, scale, zero_point, extras)
        y = torch.empty_like(x)
        self.plainly[False](x, y, None, scale, zero_point)
        return y

    def _plain_values_and_mask(
        self, x: Tensor, scale: Tensor, zero_point: Tensor | None, extras: Extras | None
    ) -> tuple[Tensor, Tensor | None]:
        if extras is not None:
            return self._values_and_mask(x, scale, zero_point, extras)
        y, bits = torch.empty_like(x), _made_mask(x) if self.masks else None
        self.plainly[self.masks](x, y, bits, scale, zero_point)
        return y, bits

    def _plain_gradient(self, dy: Tensor, mask: Tensor) -> Tensor:
        if dy.dtype != self.kind.dtype:  # of another size than that for which the kernel was compiled
            return self.mask_gradient(dy, mask)
        dx = torch.empty_like(dy)
        self.masking(dy, mask, dx)
        return dx

    def quantize(self, x: Tensor, params: QParams, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        packed = self.layout.pack(x)
        y, bits = torch.empty_like(packed), _made_mask(packed) if mask else None
        self._launch(packed, (y, bits, None), params, self.calls[mask])
        return self.layout.unpack(y), bits

    def quantize_dynamic(self, x: Tensor, seed: Tensor | None, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        if not self.dynamic:
            return super().quantize_dynamic(x, seed, mask=mask)
        from . import launch

        packed, call, place = self.layout.pack(x), self.dynamic[mask], self.place
        y, bits, random = torch.empty_like(packed), _made_mask(packed) if mask else None, self._random(seed, packed)
        assert call.rule is not None
        if place.is_in_one_pass(call.rule):
            launch.quantize_runs(packed, (y, bits), (self.table, *random), place, call)
        else:
            low, high, whole = _magnitudes(packed, place, signed=not self.spec.symmetric)
            whole = whole if call.rule.kind == "under_a_scale" else None
            launch.quantize(packed, (y, bits, None), (whole, None, low, high, self.table, *random), place, call)
        return self.layout.unpack(y), bits

    def measure(self, x: Tensor) -> Range:
        return _measured(x, self.layout, self.block)

    def mask_gradient(self, dy: Tensor, mask: Tensor) -> Tensor:
        from . import launch

        packed = self.layout.pack(dy)
        dx = torch.empty_like(packed)
        launch.mask_gradient(packed, mask, dx, self.block)
        return self.layout.unpack(dx)

    def grad_params(
        self, dy: Tensor, x: Tensor, params: QParams, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not x.numel():
            return super().grad_params(dy, x, params, wants)
        from . import launch

        # Sums of four digits take the registers of four times as many elements.
        place = TilePlace.of(self.layout.tiles, max(self.block // 4, 8))
        packed, clips = self.layout.pack(x), self.spec.gradient is Gradient.CLIP
        wanted = params.scale if wants[0] else None, params.zero_point if wants[1] else None
        sums = torch.zeros(2, 6, place.groups, dtype=torch.int64, device=x.device)
        by_scale, by_zero_point = (None if p is None else s for p, s in zip(wanted, sums, strict=True))
        given = (*self._tensors(params), self.table, *self._random(params.seed, packed))
        found = by_scale, by_zero_point
        launch.sum_gradients(self.layout.pack(dy), packed, found, given, place, self.calls[clips])
        return self._total(by_scale, wanted[0]), self._total(by_zero_point, wanted[1])

    def encode(self, x: Tensor, params: QParams) -> tuple[Tensor, bool | Tensor]:
        packed = self.layout.pack(x)
        codes = torch.empty_like(packed, dtype=_stored_in(self.spec.format))
        odd = torch.zeros(1, dtype=torch.int32, device=x.device)
        self._launch(packed, (codes, None, odd), params, self.encoding)
        return self.layout.unpack(codes).view(self.spec.format.storage), odd

    def decode(self, codes: Tensor, params: QParams) -> Tensor:
        from . import launch

        packed = self.layout.pack(codes.view(_stored_in(self.spec.format)))
        y = torch.empty_like(packed, dtype=self.kind.dtype)
        launch.dequantize(packed, y, (*self._tensors(params), self.table), self.place, self.calls[False])
        return self.layout.unpack(y)

    def _launch(self, packed: Tensor, outputs: tuple[Tensor | None, ...], params: QParams, call: KernelCall) -> None:
        """Launch `quantize_kernel`; `outputs` are values or codes, the packed mask, and the flag of NaN."""
        from . import launch

        given = self._tensors(params, with_range=call.mask == "input"), self._random(params.seed, packed)
        launch.quantize(packed, outputs, (*given[0], self.table, *given[1]), self.place, call)

    def _tensors(self, params: QParams, *, with_range: bool = False) -> tuple[Tensor | None, ...]:
        """Scale, zero point and range [groups], each in its dtype; no range if the kernel computes it."""
        low = high = None
        if with_range and (params.range is not None or params.scale.dtype not in _COMPUTED):
            low, high = (self._pack(end) for end in input_range(params, self.spec))
        zero_point = None if params.zero_point is None else self._pack(params.zero_point)
        return self._pack(params.scale), zero_point, low, high

    def _pack(self, values: Tensor) -> Tensor:
        return self.layout.pack_groups(values, values.dtype)

    def _total(self, sums: Tensor | None, parameter: Tensor | None) -> Tensor | None:
        """The gradient of a parameter from its sums [6, groups], in the parameter's dtype; None without sums."""
        if sums is None or parameter is None:
            return None
        from . import launch

        dtype = parameter.dtype if parameter.dtype in _COMPUTED else torch.float64
        result = torch.empty(self.place.groups, dtype=dtype, device=sums.device)
        launch.total(sums, result)
        return self.layout.unpack_groups(result).to(parameter.dtype)

    def _random(self, seed: Tensor | None, packed: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
        """The source of random numbers: words in the kernel's order, a seed on the device, or a seed as a number."""
        seed = seed_of(seed, self.spec)
        if seed is None:
            return None, None, 0
        if not self.layout.row_major:
            words = random_words(seed, torch.empty(self.layout.shape, dtype=torch.uint8, device=packed.device))
            return self.layout.pack(words.to(torch.int32)), None, 0
        if seed.device.type == "cpu":
            return None, None, int(seed)
        return None, seed, 0


@lru_cache(maxsize=64)
def _table_of(spec: QuantSpec, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    fields = table_fields(spec.format, dtype)
    return torch.tensor(fields, dtype=dtype, device=device) if fields else None


def _measured(x: Tensor, layout: Layout, block: int) -> Range:
    low, high, _ = _magnitudes(layout.pack(x), TilePlace.of(layout.tiles, block), signed=True)
    assert low is not None
    return Range(layout.unpack_groups(0.0 - low), layout.unpack_groups(high))


def _magnitudes(packed: Tensor, place: TilePlace, *, signed: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """The largest magnitudes of negative (None unless `signed`) and other values [groups], and the largest of all."""
    from . import launch

    dtype = compute_dtype(packed.dtype)
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    # Triton compiles a kernel anew for pointers that 16 does not divide: every part begins where it does.
    room = place.groups + -place.groups % 4
    patterns = torch.zeros((1 + signed) * room + 1, dtype=integer, device=packed.device)
    high, low = patterns[: place.groups], patterns[room : room + place.groups] if signed else None
    launch.measure(packed, (low, high, patterns[-1:]), place)
    return None if low is None else low.view(dtype), high.view(dtype), patterns[-1:].view(dtype)


def _stored_in(fmt: Format) -> torch.dtype:
    """The integer dtype in which kernels store codes; torch cannot pad its 8-bit floats."""
    return torch.uint8 if fmt.storage.is_floating_point else fmt.storage


def _made_mask(packed: Tensor) -> Tensor:
    return torch.empty((packed.numel() + 7) // 8, dtype=torch.uint8, device=packed.device)
