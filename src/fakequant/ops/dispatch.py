"""Backends in order of preference, each with the reason why it cannot serve a call.

Set the environment variable FAKEQUANT_LOG=backend to see which backend serves and why the ones before it do not.
No setting changes a result: every backend returns the same bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from fakequant.numerics import reference
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec

from .backend import Backend, Encoded
from .cpu.backend import CpuBackend
from .triton.backend import TritonBackend

log = logging.getLogger("fakequant.backend")
if "backend" in os.environ.get("FAKEQUANT_LOG", "").split(","):
    logging.basicConfig()
    log.setLevel(logging.DEBUG)


class ReferenceBackend(Backend):
    """The definition itself, on any device, for any tensor."""

    name = "reference"

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        return None

    def fake_quantize(self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool) -> tuple[Tensor, Tensor | None]:
        y = reference.fake_quantize(x, params, spec)
        return y, pack_bits(reference.passes(x, params, spec)) if mask else None

    def grad_input(self, dy: Tensor, mask: Tensor, spec: QuantSpec, x_stride: tuple[int, ...]) -> Tensor:
        return reference.grad_input(dy, unpack_bits(mask, dy.shape))

    def quantize(self, x: Tensor, params: QParams, spec: QuantSpec) -> Tensor:
        return reference.quantize(x, params, spec)

    def encode(self, x: Tensor, params: QParams, spec: QuantSpec, *, mask: bool) -> Encoded:
        bits = pack_bits(reference.passes(x, params, spec)) if mask else None
        return Encoded(reference.quantize(x, params, spec), bits, bool(x.isnan().any()))

    def dequantize(self, codes: Tensor, params: QParams, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
        return reference.dequantize(codes, params, spec, dtype)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor as bits, bit i % 8 of byte i / 8 in row-major order [ceil(numel / 8)].

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
# Read while compilers trace, which know sets of strings and no backends.
node_devices = frozenset(backend.device_type for backend in _backends if backend.compiles_as_node)
_chosen: dict[Hashable, Backend] = {}
_MOST = 4096  # kinds of calls that are remembered


def backends() -> list[Backend]:
    """All backends in the order in which they are asked."""
    return list(_backends)


def choose(x: Tensor, spec: QuantSpec, *, codes: bool = False) -> Backend:
    """The first backend that can serve the call: asked once for every kind of tensor and specification."""
    key = _backends, type(x), x.dtype, x.device, spec, codes
    backend = _chosen.get(key)
    if backend is None:
        backend = _remember(key, _first_with(spec, x, lambda backend: backend.unsupported(x, spec, codes=codes)))
    return backend


def choose_for(x: Tensor) -> Backend:
    """The first backend that can serve calls without a specification for a tensor."""
    key = _backends, type(x), x.dtype, x.device
    backend = _chosen.get(key)
    if backend is None:
        backend = _remember(key, _first_with("any call", x, lambda backend: backend.unfit(x)))
    return backend


def _remember(key: Hashable, backend: Backend) -> Backend:
    if len(_chosen) >= _MOST:
        _chosen.clear()
    _chosen[key] = backend
    return backend


def _first_with(what: object, x: Tensor, cannot: Callable[[Backend], str | None]) -> Backend:
    kind = f"{x.dtype} on {x.device}"
    for backend in _backends:
        reason = backend.unavailable() or cannot(backend)
        if reason is None:
            log.debug("%s serves %s of %s", backend.name, what, kind)
            return backend
        log.debug("%s cannot serve %s of %s: %s", backend.name, what, kind, reason)
    raise AssertionError("the reference serves every call")
