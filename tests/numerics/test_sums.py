"""Order-free sums against exact fractions, and that order, threads and strides change no bit of them."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.numerics.reference import order_free_sum
from tests.support.bits import assert_same_bits
from tests.support.cases import ON_CPU

INF, NAN = float("inf"), float("nan")
SMALLEST = 2.0**-1074


def exact_sum(values):
    return sum(map(Fraction, values.tolist()), Fraction(0))


def products_of_float32(size, random):
    """Exact products of float32 numbers whose magnitudes span all of theirs."""
    wide = random.normal(size=(2, size)) * 2.0 ** random.integers(-60, 60, (2, size))
    return wide[0].astype(np.float32).astype(np.float64) * wide[1].astype(np.float32)


def cancelling(size, random):
    large = random.normal(size=size // 2) * 1e100
    return random.permutation(np.concatenate([large, -large, random.normal(size=size - 2 * (size // 2))]))


NUMBERS = {
    "normal": lambda n, random: random.normal(size=n),
    "products": products_of_float32,
    "powers": lambda n, random: 2.0 ** random.integers(-130, 130, n) * random.choice([-1, 1], n),
    "at powers of the base": lambda n, random: np.nextafter(2.0 ** (30 * random.integers(-3, 4, n)), random.normal(n)),
    "cancelling": cancelling,
    "subnormal": lambda n, random: SMALLEST * random.integers(-9, 10, n),
    "smallest normal": lambda n, random: random.normal(size=n) * 2.0**-1022,
    "huge": lambda n, random: random.uniform(-1, 1, n) * 2.0**1023,
    "one among many": lambda n, random: np.where(np.arange(n) == n // 2, 1.0, 2.0**-60 * random.random(n)),
    "same sign": lambda n, random: -random.random(n),
}


def make(name, size, seed=0):
    return torch.from_numpy(NUMBERS[name](size, np.random.default_rng(seed)).astype(np.float64))


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000, 100_003])
@pytest.mark.parametrize("name", NUMBERS)
def test_error_is_below_the_bound(name, size):
    for seed in range(3 if size < 100_000 else 1):
        values = make(name, size, seed)
        exact = exact_sum(values)
        actual = order_free_sum(values, (0,)).item()
        if abs(exact) >= 2**1024:
            assert actual == (INF if exact > 0 else -INF)
            continue
        largest = Fraction(values.abs().max().item())
        # Half of the smallest subnormal: what the result itself cannot say.
        bound = size * largest / 2**90 + abs(exact) / 2**51 + Fraction(SMALLEST) / 2
        assert abs(Fraction(actual) - exact) <= bound


@pytest.mark.parametrize("exponent", [-1074, -500, -31, -30, -29, 0, 17, 900])
def test_sums_that_float64_can_say_are_exact(exponent):
    integers = torch.randint(-(2**36), 2**36, (60_000,)).double()
    assert order_free_sum(integers * 2.0**exponent, (0,)).item() == integers.long().sum().item() * 2.0**exponent


@pytest.mark.parametrize("name", NUMBERS)
def test_order_changes_nothing(name):
    values = make(name, 5040)
    right = order_free_sum(values, (0,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        shuffled = values[torch.randperm(len(values), generator=generator)]
        assert_same_bits(order_free_sum(shuffled, (0,)), right, name)
        for shape in ((70, 72), (2, 3, 840), (7, 8, 9, 10)):
            for order in itertools.permutations(range(len(shape))):
                laid = shuffled.view(shape).permute(order)
                assert_same_bits(order_free_sum(laid, tuple(range(len(shape)))), right, f"{name} {order}")


def test_threads_change_nothing():
    values = make("products", 200_001)
    sums = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        sums.append(order_free_sum(values, (0,)))
        sums.append(order_free_sum(values.view(3, -1), (1,)).sort().values)
    for first, second in zip(sums[::2], sums[2::2], strict=False):
        assert_same_bits(second, first)
    for first, second in zip(sums[1::2], sums[3::2], strict=False):
        assert_same_bits(second, first)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([INF, 1.0, -5.0], INF),
        ([-INF, 1e300], -INF),
        ([INF, -INF], NAN),
        ([INF, INF], INF),
        ([NAN, INF, 1.0], NAN),
        ([NAN], NAN),
        ([0.0, -0.0], 0.0),
        ([-0.0, -0.0], 0.0),
        ([1.5e308, 1.5e308], INF),
        ([-1.5e308, -1.5e308], -INF),
        ([1.5e308, 1.5e308, -1.5e308], 1.5e308),
        ([SMALLEST, SMALLEST], 2 * SMALLEST),
        ([-SMALLEST], -SMALLEST),
        ([SMALLEST, 1.0, -1.0], 0.0),
        ([2.0**-80, 1.0, -1.0], 2.0**-80),
        ([1.75 * 2.0**-90, 1.0, -1.0], 2.0**-90),
    ],
)
def test_edges(values, wanted):
    for order in itertools.permutations(values):
        actual = order_free_sum(torch.tensor(order, dtype=torch.float64), (0,))
        assert_same_bits(actual, torch.tensor(wanted, dtype=torch.float64), str(order))


def test_axes():
    values = make("products", 2 * 3 * 4).view(2, 3, 4)
    rows = torch.stack([order_free_sum(row, (0,)) for row in values.view(6, 4)]).view(2, 3)
    assert_same_bits(order_free_sum(values, (2,)), rows)
    assert_same_bits(order_free_sum(values, ()), values)
    assert_same_bits(order_free_sum(values[0, 0, 0], ()), values[0, 0, 0])


def test_gradient_is_that_of_a_sum():
    values = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: order_free_sum(v, (1,)), (values,))
    (grad,) = torch.autograd.grad(order_free_sum(values, (0, 1)), values)
    assert_same_bits(grad, torch.ones_like(values))


@pytest.mark.parametrize("backend", ON_CPU, ids=lambda b: b.name)
@pytest.mark.parametrize(
    "granularity", [fq.PerTensor(), fq.PerChannel(0), fq.PerChannel(1), fq.PerBlock({1: 16, 2: 45, 3: 27})], ids=str
)
def test_gradients_do_not_depend_on_threads_or_layout(backend, granularity):
    """1, 2 and 4 threads, channels-last and transposed memory, and elements in another order.

    Every large product has its negative, so that what is left are products 2**80 times smaller.
    """
    if reason := backend.unavailable():
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(8, 32, 45, 9, generator=generator) * 3
    large, small = (torch.randn(half.shape, generator=generator) * power for power in (1.0, 2.0**-80))
    x, dy = torch.cat([half, half, half], -1), torch.cat([large, -large, small], -1)
    spec = fq.QuantSpec("uint4", granularity)
    groups = granularity.group_shape(x.shape)
    params = fq.QParams(torch.full(groups, 0.1).double(), torch.full(groups, 7.0).double())
    right = reference.grad_params(dy, x, params, spec, (True, True))
    assert all(0 < gradient.abs().min() <= gradient.abs().max() < 2.0**-40 for gradient in right)
    last = [t.to(memory_format=torch.channels_last) for t in (dy, x)]
    transposed = [t.transpose(0, 3).contiguous().transpose(0, 3) for t in (dy, x)]
    flipped = [t.flip(2, 3) for t in (dy, x)]  # within every group
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for tensors in ((dy, x), last, transposed, flipped, (last[0], x)):
            for actual, wanted in zip(backend.grad_params(*tensors, params, spec, (True, True)), right, strict=True):
                assert_same_bits(actual, wanted, f"{threads} threads")
