"""Backends in order of preference, the reasons why they cannot serve a call, and a cache of their plans.

Set the environment variable FAKEQUANT_LOG=backend to log which backend serves, and why earlier backends do not. No
setting changes a result: every backend returns the same bits.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from fakequant.errors import ConfigError
from fakequant.numerics import division, reference
from fakequant.numerics.formats.floats import FloatFormat
from fakequant.numerics.qparams import FLOATING, PLAIN, QParams, is_plain_eager
from fakequant.numerics.spec import QuantSpec, Rounding

from .backend import CODES, RELU, VALUES, Backend, CallKind, KernelPlan, Kernels, ParameterKind
from .cpu.backend import CpuBackend
from .triton.backend import TritonBackend

log = logging.getLogger("fakequant.backend")
if "backend" in os.environ.get("FAKEQUANT_LOG", "").split(","):
    logging.basicConfig()
    log.setLevel(logging.DEBUG)


class ReferenceKernels(Kernels):
    """The definition of the operator, in plain torch operations."""

    def quantize(self, x: Tensor, params: QParams, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        y = reference.fake_quantize(x, params, self.spec)
        return y, pack_bits(reference.passes(x, params, self.spec)) if mask else None

    def mask_gradient(self, dy: Tensor, mask: Tensor) -> Tensor:
        # Laid out as dy, so that the result is.
        return reference.grad_input(dy, torch.empty_like(dy, dtype=torch.bool).copy_(unpack_bits(mask, dy.shape)))

    def encode(self, x: Tensor, params: QParams) -> tuple[Tensor, bool | Tensor]:
        # A sum is finite only where all values are: it takes a tenth of the time, and is no answer where it overflows.
        has_nan = False if x.is_cpu and bool(x.sum().isfinite()) else x.isnan().any()
        return encode_in_parts(x, params, self.spec), has_nan

    def decode(self, codes: Tensor, params: QParams) -> Tensor:
        return reference.dequantize(codes, params, self.spec, self.kind.dtype)


def encode_in_parts(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """`reference.quantize` in parts of the tensor: the whole needs 30 bytes more per element, and 5 times the time."""
    if spec.rounding is Rounding.STOCHASTIC or not x.is_cpu:
        return reference.quantize(x, params, spec)
    if x.numel() <= reference.PART:
        return _encoded(x, params, spec)
    codes, given = (
        torch.empty(x.shape, dtype=spec.format.storage, device="cpu"),
        [one for one in params[:2] if one is not None],
    )
    for (part, own), some in reference.divided(spec, [x, codes], given, with_shared=True):
        own.copy_(_encoded(part, QParams(some[0], some[1] if some[1:] else None), spec))
    return codes


def _encoded(x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
    """`reference.quantize`, in a third to a fifth of its time for floats of up to 8 bits.

    A kernel rounds x over its scale, to numbers that are exact in bfloat16; a table has the stored bits of each.
    """
    fmt = spec.format
    if not isinstance(fmt, FloatFormat) or fmt.bits > 8 or x.dtype == torch.float64:
        return reference.quantize(x, params, spec)
    numbers, (of_codes, patterns) = reference.scaled(x, params, spec), _table_of(fmt)
    plan = plan_of(numbers, of_codes, _ONE)
    assert plan is not None, "every backend has a plan for values"
    rounded = plan.values(numbers, _ONE, None, plan.descriptor)
    assert rounded is not None, "a scale of 1 is valid"
    places = rounded.to(torch.bfloat16).view(torch.uint16).to(torch.int32)
    return patterns.index_select(0, places.flatten()).view(x.shape).view(fmt.storage)


@lru_cache(maxsize=64)
def _table_of(fmt: FloatFormat) -> tuple[QuantSpec, Tensor]:
    """A specification by which values under `_ONE` are codes, and the codes of all bfloat16 numbers [65536], uint8."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16).float()
    return QuantSpec(fmt), fmt.to_storage(fmt.clamp(fmt.round(numbers))).view(torch.uint8)


_ONE = torch.ones((), device="cpu")


class ReferenceBackend(Backend):
    """The definition of the operator in plain torch, for any tensor on any device."""

    name = "reference"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        return None

    def plan(self, kind: CallKind) -> KernelPlan | None:
        return None if kind.variant == RELU else ReferenceKernels(kind, self.name).plan()


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor as bits [ceil(numel / 8)]: bit i % 8 of byte i // 8 is element i in row-major order.

    >>> pack_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = mask.reshape(-1).to(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (flat * weights).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """The bool tensor [shape] that `pack_bits` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flags = torch.bitwise_right_shift(bits[:, None], shifts) & 1
    return flags.view(-1)[: shape.numel()].view(shape).bool()


REFERENCE = ReferenceBackend()
_backends: tuple[Backend, ...] = (CpuBackend(), TritonBackend(), REFERENCE)
_Made = TypeVar("_Made", Backend, KernelPlan, KernelPlan | None)
# Plans by their kind of call, and backends by the kind of tensor: what one call found serves all that follow.
_known: dict[Hashable, Any] = {}
_MOST = 4096  # kinds that are remembered


def backends() -> list[Backend]:
    """All backends, in the order in which they are tried."""
    return list(_backends)


def register_backend(backend: Backend, *, before: str = "reference") -> None:
    """Add a backend, which computes the calls that it supports, and is tried before the backend named `before`.

    Args:
        backend: an object of a subclass of `Backend` with a new name.
        before: the name of a backend; no backend can come after the reference, which serves everything.

    Raises:
        ConfigError: a backend of this name is registered already, or no backend is named `before`.
    """
    global _backends
    names = [known.name for known in _backends]
    if backend.name in names:
        raise ConfigError(f"a backend named {backend.name!r} is already registered; choose another name")
    if before not in names:
        raise ConfigError(f"there is no backend {before!r} to come before; the backends are {', '.join(names)}")
    at = names.index(before)
    _backends = (*_backends[:at], backend, *_backends[at:])
    _note_devices()


def _note_devices() -> None:
    division.approximate_devices = frozenset(one.device_type for one in _backends if one.compiles_as_node)


_note_devices()


def choose(x: Tensor, spec: QuantSpec, *, codes: bool = False) -> Backend:
    """The first backend that can compute calls for `spec` and tensors like x; cached."""
    key = _backends, type(x), x.dtype, x.device, spec, codes
    return _known.get(key) or _first_with(key, spec, x, lambda backend: backend.unsupported(x, spec, codes=codes))


def choose_for(x: Tensor) -> Backend:
    """The first backend that can compute calls without a specification, such as `measure`, for tensors like x."""
    key = _backends, type(x), x.dtype, x.device
    return _known.get(key) or _first_with(key, "any call", x, lambda backend: backend.unfit(x))


def find_plan(
    x: Tensor,
    spec: QuantSpec,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    variant: str = VALUES,
    dtype: torch.dtype | None = None,
) -> KernelPlan | None:
    """The plan for a call in plain eager execution, see `CallKind`; None in four cases.

    The four cases: a tracer, transform or tensor class must see torch's operations (`library.needs_tracing`); x holds
    no floats, or is on the device meta; a parameter does not fit x; or no kernel computes the ReLU in the same pass.
    """
    if not is_plain_eager():
        return None
    for given in (x, scale, zero_point):
        if given is not None and (
            type(given) not in PLAIN
            or given.layout is not torch.strided
            or given.is_nested
            or given._is_zerotensor()
            or is_legacy_batchedtensor(given)
        ):
            return None
    if forward_ad._current_level >= 0 and have_tangents(x, scale, zero_point):
        return None
    return plan_of(x, spec, scale, zero_point, variant, dtype)


def plan_of(
    x: Tensor,
    spec: QuantSpec,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    variant: str = VALUES,
    dtype: torch.dtype | None = None,
) -> KernelPlan | None:
    """`find_plan` for operators in graphs, without the check for tracers and transforms."""
    of_scale = of_zero_point = None
    if scale is not None:
        of_scale = scale.dtype, scale.device, scale.shape, scale.is_contiguous()
    if zero_point is not None:
        of_zero_point = zero_point.dtype, zero_point.device, zero_point.shape, zero_point.is_contiguous()
    kind = spec, variant, dtype or x.dtype, x.device, x.shape, x.stride(), of_scale, of_zero_point
    key = _backends, type(x) in PLAIN, kind
    try:
        return _known[key]
    except KeyError:
        return _made_plan(key, x)


def plan_by(backend: Backend, kind: CallKind) -> KernelPlan:
    """The plan of `backend` for a kind of call; the backward pass needs the backend that packed its mask."""
    key = backend, kind
    plan = _known.get(key) or _remember(key, backend.plan(kind))
    assert plan is not None, "backends have plans for all but ReLUs"
    return plan


def have_tangents(*tensors: object) -> bool:
    """Whether any of the objects is a tensor with a tangent of forward-mode AD."""
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _made_plan(key: tuple[Any, ...], x: Tensor) -> KernelPlan | None:
    kind = CallKind(*key[-1])
    kind = kind._replace(
        scale=kind.scale and ParameterKind(*kind.scale), zero_point=kind.zero_point and ParameterKind(*kind.zero_point)
    )
    if kind.dtype not in FLOATING or kind.device.type == "meta":
        return _remember(key, None)
    shapes = kind.spec.granularity.scale_shapes(kind.shape)
    given = [one for one in (kind.scale, kind.zero_point) if one is not None]
    if math.prod(shapes[0]) == 1:  # one number fits in any shape
        shapes += [one.shape for one in given if math.prod(one.shape) == 1]
    fit = all(one.device == kind.device and one.shape in shapes for one in given)
    return _remember(key, choose(x, kind.spec, codes=kind.variant == CODES).plan(kind) if fit else None)


def _remember(key: Hashable, made: _Made) -> _Made:
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = made
    return made


def _first_with(key: Hashable, what: object, x: Tensor, cannot: Callable[[Backend], str | None]) -> Backend:
    kind = f"{x.dtype} on {x.device}"
    for backend in _backends:
        reason = backend.unavailable() or cannot(backend)
        if reason is None:
            log.debug("%s serves %s of %s", backend.name, what, kind)
            return _remember(key, backend)
        log.debug("%s cannot serve %s of %s: %s", backend.name, what, kind, reason)
    raise AssertionError("the reference serves every call")
