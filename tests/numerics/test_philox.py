"""The random numbers of stochastic rounding."""

import pytest
import torch

from fakequant.numerics.philox import draw_seed, philox, random_words, words_of
from tests.support import oracle
from tests.support.bits import assert_same_bits
from tests.support.cases import LAYOUTS

# Random123, tests/kat_vectors, the lines of philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    found = philox([torch.tensor(w) for w in words(counter)], [torch.tensor(w) for w in words(key)])
    assert [w.item() for w in found] == words(answer)
    assert oracle.philox(words(counter), words(key)) == words(answer)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0x299F31D0A4093822])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4,), (5,), (3, 5, 7), (2, 0, 3), (1, 1030)], ids=str)
def test_words_are_counted_in_row_major_order(seed, shape):
    found = random_words(torch.tensor(seed), torch.empty(shape))
    assert_same_bits(found, torch.from_numpy(oracle.random_words(seed, shape)))


def test_counters_of_more_than_32_bits():
    counters = [2**32 - 1, 2**32, 2**61 - 1]
    expected = [oracle.philox((c % 2**32, c >> 32, 0, 0), (7, 1)) for c in counters]
    assert words_of(torch.tensor(2**32 + 7), torch.tensor(counters)).tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout):
    x = torch.zeros(3, 4, 5)
    assert_same_bits(random_words(torch.tensor(9), LAYOUTS[layout](x)), random_words(torch.tensor(9), x))


def test_words_are_spread_evenly():
    """Each of the 32 bits is set in half of 100,000 words, within 6 sigma; the outcome is fixed."""
    found = random_words(torch.tensor(2024), torch.empty(100_000))
    for bit in range(32):
        assert abs(((found >> bit) & 1).sum().item() - 50_000) <= 6 * (100_000 * 0.25) ** 0.5, bit


def test_seeds_follow_from_torchs_generator_alone():
    torch.manual_seed(5)
    first, second = draw_seed(), draw_seed()
    assert (first.dtype, first.shape) == (torch.int64, ())
    assert first != second
    torch.manual_seed(5)
    with torch.device("meta"):
        assert draw_seed() == first
    assert draw_seed() == second
