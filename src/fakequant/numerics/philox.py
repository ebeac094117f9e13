"""The random numbers of stochastic rounding: a hash of a seed and a position, the same on every device.

Philox-4x32-10: Salmon, Moraes, Dror, Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, section 3.3. The key
is the seed, the counter the position divided by 4; each counter gives four words. torch has no unsigned 32-bit
arithmetic, so words are held in int64; factors are halved so that nothing reaches 2**49 and no compiler meets an
overflow, which it might take as impossible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # fractions of the golden ratio and of the square root of 3
_WORD = 0xFFFFFFFF


def draw_seed() -> Tensor:
    """A seed, int64 [], from torch's default generator, which `torch.manual_seed` sets.

    The seed is drawn on the CPU, also for tensors on other devices, so that results do not depend on the device.
    """
    return torch.randint(torch.iinfo(torch.int64).max, (), dtype=torch.int64, device="cpu")


def random_words(seed: Tensor, x: Tensor) -> Tensor:
    """A uniform 32-bit word for every element of x, by its position in row-major order, whatever the strides.

    Args:
        seed: [], int64.
        x: any tensor; its values do not matter.

    Returns:
        The shape of x, int64, 0 to 2**32 - 1.

    >>> words = random_words(torch.tensor(0), torch.empty(2, 3))
    >>> [f"{word:08x}" for word in words[0].tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c']
    """
    counter = torch.arange((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    return words_of(seed.to(x.device), counter).flatten()[: x.numel()].reshape(x.shape)


def words_of(seed: Tensor, counter: Tensor) -> Tensor:
    """The words of the elements 4 * counter to 4 * counter + 3, int64 [n, 4], for counters [n] and an int64 seed."""
    zeros = torch.zeros_like(counter)
    key = seed & _WORD, torch.bitwise_right_shift(seed, 32) & _WORD
    return torch.stack(philox((counter & _WORD, torch.bitwise_right_shift(counter, 32), zeros, zeros), key), -1)


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox-4x32-10.

    Args:
        counter: four words, int64, from the lowest on.
        key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of a product."""
    high, low = word * (factor >> 16), word * (factor & 0xFFFF)
    upper = torch.bitwise_right_shift(high + torch.bitwise_right_shift(low, 16), 16)
    return upper, ((high & 0xFFFF) * 2**16 + low) & _WORD
