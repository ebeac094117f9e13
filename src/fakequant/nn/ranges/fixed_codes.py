"""What tells whether a weight is still the one for which a quantizer's codes or scales were set."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

KEY = "fixed_codes"
"""The name of the buffer of codes, and the last part of its key in a state dict."""


def magnitudes(spec: QuantSpec, weight: Tensor) -> Tensor:
    """The largest magnitude of every group, in the dtype of the weight, whose values they are: no more memory."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return library.measure(weight.detach(), spec.granularity).amax.to(weight.dtype)


def mark(weight: Tensor) -> Any:
    """A value that differs after nearly every change of a parameter: torch counts those that do not go through `data`.

    peft merges adapters through `data`, so that the first element is looked at, too, where that waits for no device.
    """
    if type(weight) is not nn.Parameter or weight.is_inference():
        return type(weight)
    place = weight.data_ptr()  # 0 of an empty or a meta tensor
    first = ctypes.string_at(place, weight.element_size()) if place and weight.is_cpu else b""
    return weight._version, place, first


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two parameters of quantizers are equal in all values, or one object."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def are_equal(one: Tensor, other: Tensor) -> bool:
    """`torch.equal` for one shape and dtype, on bits as int64: in float16 it takes 8 times as long."""
    plain = one.is_contiguous() and other.is_contiguous() and one.numel() * one.element_size() % 8 == 0
    same_bits = plain and torch.equal(*(own.detach().view(-1).view(torch.int64) for own in (one, other)))
    return same_bits or torch.equal(one, other)  # -0.0 is 0.0, which a step of 0 may make of it


def version_of(tensor: Tensor) -> tuple[int, int | None]:
    """Which tensor it is, and how often it was written to; tensors made in inference mode count no changes."""
    return id(tensor), None if tensor.is_inference() else tensor._version
