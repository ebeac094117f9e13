"""A sum that comes out the same in any order, so that neither threads nor strides nor a device change a gradient.

Every number is written as digits in base 2**30, from the lowest power of the base above the largest of them down, and
cut off after DIGITS digits. Digits of one position are added as integers, which is exact, and order does not matter.

Of n numbers, the largest of magnitude M, the sum is off by less than n * 2**-90 * M for what is cut off (the power of
the base may be 2**30 * M, and 120 bits below it are kept), and by 2**-51 of itself for the rounding to float64. A plain
sum in float64 is off by up to n * 2**-53 of the sum of the magnitudes. n may be up to 2**33.

Source: Demmel and Nguyen, Fast Reproducible Floating-Point Summation, ARITH 21, 2013; here with bins at fixed powers,
as in Ahrens, Demmel and Nguyen, Algorithms for Efficient Reproducible Floating Point Summation, TOMS 46(3), 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fakequant.distributed import is_sharded

from .formats.floats import power_of_two

# 2**33 digits below 2**30 add up to less than 2**63. An even number, because the scaling is halved.
DIGIT_BITS = 30
DIGITS = 4


def order_free_sum(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The sum of float64 values over axes that hold elements; no axes: each value is a sum by itself.

    NaN where there is NaN or both infinities, the infinity where there is one, +0.0 where all are zeros: what a plain
    sum gives. Differentiable, with the gradient of a sum.

    >>> values = torch.tensor([1e17, 1.0, -1e17, 2.0**-40], dtype=torch.float64)
    >>> order_free_sum(values, (0,)) - 1.0 == order_free_sum(values.flip(0), (0,)) - 1.0 == 2.0**-40
    tensor(True)
    """
    values, axes = values.unsqueeze(-1), (*axes, values.dim())
    is_finite = values.isfinite()
    finite, others = torch.where(is_finite, values, 0.0), torch.where(is_finite, 0.0, values.detach())
    total = _sum_of_finite(finite.detach(), axes) + whole_sums(others.sum(axes))
    # Zeros, which carry the gradient: integers have none.
    return total + (finite - finite.detach()).sum(axes) if finite.requires_grad else total


def is_less(one: Tensor, other: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Whether the order-free sum of finite float64 values >= 0 is below that of others of their shape."""
    return order_free_sum(one, axes) < order_free_sum(other, axes)


def is_less_by_plain_sums(one: Tensor, other: Tensor, axes: tuple[int, ...]) -> Tensor:
    """`is_less` in a quarter of the time, for tensors with values at hand: plain sums tell it almost everywhere.

    >>> one = torch.tensor([[1e17, 1.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64)
    >>> is_less_by_plain_sums(one, one.flip(0), (1,)).tolist(), is_less(one, one.flip(0), (1,)).tolist()
    ([False, True], [False, True])
    """
    if is_sharded(one) or not axes:
        return is_less(one, other, axes)
    sums = one.sum(axes), other.sum(axes)
    found, both = sums[0] < sums[1], sums[0] + sums[1]
    count = one.numel() // max(found.numel(), 1)
    # Each plain sum is off by up to count * 2**-53 of itself, each order-free one by less than 2**-50.
    unsure = ~((sums[0] - sums[1]).abs() > both * ((count + 16) * 2.0**-52)) & (both > 0)
    if bool(unsure.any()):
        kept = [axis for axis in range(one.dim()) if axis not in axes]
        pair = [own.permute(*kept, *axes)[unsure].flatten(1) for own in (one, other)]
        found[unsure] = is_less(pair[0], pair[1], (1,))
    return found


def whole_sums(values: Tensor) -> Tensor:
    """Sums or extremes of a DTensor with the parts of all processes; plain tensors as they are."""
    if not is_sharded(values):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(values, DTensor)
    whole = [Replicate() if placement.is_partial() else placement for placement in values.placements]
    return values.redistribute(placements=whole)


def _sum_of_finite(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    # The exponent field: the largest is below 2**(field - 1022), for subnormals too.
    field = torch.bitwise_right_shift(whole_sums(values.abs().amax(axes, keepdim=True)).view(torch.int64), 52)
    power = (field - 1022 + (DIGIT_BITS - 1)) // DIGIT_BITS
    # The first digit becomes the integer part. Halved, because float64 lacks 2**1050, by which subnormals are scaled.
    half = power_of_two((1 - power) * (DIGIT_BITS // 2))
    rest = values * half * half
    digits = []
    for _ in range(DIGITS):
        digit = rest.trunc()
        digits.append(whole_sums(digit.to(torch.int64).sum(axes)))
        rest = (rest - digit) * 2.0**DIGIT_BITS
    back = power_of_two((power.squeeze(axes) - 1) * (DIGIT_BITS // 2))
    return _as_float(digits) * back * back


def _as_float(digits: list[Tensor]) -> Tensor:
    """The number that summed digits stand for, in units of the first digit."""
    number, carry = torch.zeros_like(digits[0], dtype=torch.float64), 0
    for digit in reversed(digits[1:]):
        digit = digit + carry
        carry = torch.bitwise_right_shift(digit + 2 ** (DIGIT_BITS - 1), DIGIT_BITS)
        number = (number + (digit - carry * 2**DIGIT_BITS)) * 2.0**-DIGIT_BITS
    return number + (digits[0] + carry)
