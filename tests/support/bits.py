"""The checker that every comparison of results uses: equal means equal in every bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of x as integers of the same size; all NaN share one pattern."""
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    patterns = x.contiguous().view(_SAME_SIZE_INTEGER[x.element_size()])
    if x.is_floating_point():
        nan = torch.full((), float("nan"), device=x.device).to(x.dtype).view(patterns.dtype)
        # torch has no isnan for 8-bit floats.
        patterns = torch.where((x if x.element_size() > 1 else x.float()).isnan(), nan, patterns)
    return patterns


def assert_same_bits(actual: Tensor, expected: Tensor, label: object = "") -> None:
    """Fail unless dtype, shape and all bits are equal. NaN equals NaN; -0.0 differs from +0.0."""
    __tracebackhide__ = True
    start = f"{label}: " if label != "" else ""
    assert actual.dtype == expected.dtype, f"{start}dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{start}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    got, wanted = bits_of(actual.detach()), bits_of(expected.detach())
    if torch.equal(got, wanted):
        return
    differing = (got != wanted).nonzero()
    first = tuple(differing[0].tolist())
    width = 2 * actual.element_size()
    raise AssertionError(
        f"{start}{len(differing)} of {actual.numel()} elements differ, first at {first}: "
        f"got {actual[first].item()!r} (0x{_unsigned(got[first], width):0{width}x}), "
        f"expected {expected[first].item()!r} (0x{_unsigned(wanted[first], width):0{width}x})"
    )


def assert_same_state(actual: nn.Module, expected: nn.Module | Mapping[str, Tensor]) -> None:
    """Fail unless a model holds the tensors of another one, or of a state, to the bit."""
    __tracebackhide__ = True
    own, wanted = actual.state_dict(), expected.state_dict() if isinstance(expected, nn.Module) else expected
    assert own.keys() == wanted.keys()
    for name, value in own.items():
        assert_same_bits(value, wanted[name], name)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fail if a block changes a tensor of a model."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    assert_same_state(model, before)


def _unsigned(value: Tensor, hex_digits: int) -> int:
    return int(value.item()) & ((1 << 4 * hex_digits) - 1)
