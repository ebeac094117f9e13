"""Stochastic rounding: its definition against the oracle, its expectation, its seeds and its gradients."""

import math

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import QParamsError
from fakequant.nn import Quantizer
from fakequant.numerics import reference
from fakequant.numerics.philox import random_words
from tests.support import cases, oracle
from tests.support.bits import assert_same_bits
from tests.support.by_oracle import decoded, to_dtype, to_numpy, wanted_codes
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS
from tests.support.matrix import each_format_once

STOCHASTIC = fq.Rounding.STOCHASTIC
INT8 = "int8 per_tensor stochastic"
FIRST, LAST = torch.tensor(0), torch.tensor(2**32 - 1)  # the words that move most and least


@each_format_once
def test_values_codes_and_range_are_the_oracles(name, dtype):
    case = FORMATS[name]
    for seed, (where_name, where) in enumerate(GRANULARITIES.items()):
        arithmetic = case.arithmetics()[seed % len(case.arithmetics())]
        label = f"{where_name} {arithmetic.value}"
        numbers = cases.hostile(case, where, arithmetic, dtype, seed)
        spec = case.spec(where.granularity, arithmetic, rounding=STOCHASTIC)
        params = numbers.params._replace(seed=torch.tensor(seed * 2**33 - 7))
        scale, zero_point = (None if p is None else oracle.spread(p.numpy(), where.blocks) for p in params[:2])
        words = oracle.random_words(seed * 2**33 - 7, where.shape)
        x = to_numpy(numbers.x)
        right = oracle.fake_quantize(x, scale, zero_point, case.oracle, arithmetic.value, words)
        assert_same_bits(reference.fake_quantize(numbers.x, params, spec), to_dtype(right.value, dtype), label)
        inside = torch.from_numpy(np.asarray(right.inside))
        assert_same_bits(reference.passes(numbers.x, params, spec), inside, f"{label} mask")
        codes = decoded(reference.quantize(numbers.x, params, spec), case.oracle)
        assert_same_bits(codes, wanted_codes(right, case.oracle), f"{label} codes")


def values_of(fmt):
    """The finite values of a format, rising; of a large one, its ends and some between."""
    if isinstance(fmt, fq.IntegerFormat):
        codes = np.unique(np.linspace(fmt.low, fmt.high, min(fmt.high - fmt.low + 1, 300)).round())
        return torch.from_numpy(codes).float()
    patterns = torch.arange(len(fmt.values) if isinstance(fmt, fq.TableFormat) else 2**fmt.bits)
    stored = patterns.to(torch.uint8 if fmt.bits <= 8 else torch.int16)
    values = fmt.from_storage(stored.view(fmt.storage), torch.float32)
    # 2**-127, a scale of E8M0, is subnormal in float32, in which codes are computed.
    return values[values.isfinite() & ((values == 0) | (values.abs() >= 2.0**-126))].unique()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", fq.formats())
def test_values_never_move(name, dtype):
    fmt = fq.parse_format(name)
    values = values_of(fmt).to(dtype)
    for word in (FIRST, LAST):
        assert_same_bits(fmt.round_stochastically(values, word), fmt.round(values), str(word))


@pytest.mark.parametrize("name", fq.formats())
def test_only_the_two_neighbours_appear_and_either_does(name):
    fmt = fq.parse_format(name)
    values = values_of(fmt).double()
    low, high = values[:-1], values[1:]
    if isinstance(fmt, fq.IntegerFormat):
        high = low + 1
    elif name == "bfloat16":  # its neighbours of 0 are subnormal
        low, high = (side[(low != 0) & (high != 0)] for side in (low, high))
    for share in (2.0**-20, 0.25, 0.5, 0.9, 1 - 2.0**-20):
        between = low + share * (high - low)
        down, up = (fmt.round_stochastically(between, word) for word in (FIRST, LAST))
        assert torch.equal(torch.minimum(down, up), low)
        assert torch.equal(torch.maximum(down, up), high)
        drawn = fmt.round_stochastically(between, random_words(torch.tensor(1), between))
        assert ((drawn == low) | (drawn == high)).all()


@pytest.mark.parametrize("name", fq.formats())
def test_the_mean_is_the_number(name):
    """20,000 draws for each of 30 numbers: within 6 sigma of the binomial distribution; the outcome is fixed."""
    fmt, draws = fq.parse_format(name), 20_000
    values = values_of(fmt).double()
    random = np.random.default_rng(0)
    at = torch.from_numpy(random.integers(0, len(values) - 1, 30))
    low, high = values[at], values[at + 1]
    if isinstance(fmt, fq.IntegerFormat):
        high = low + 1
    share = torch.from_numpy(random.random(30))
    numbers = low + share * (high - low)
    many = numbers.expand(draws, 30)
    drawn = fmt.round_stochastically(many, random_words(torch.tensor(11), many))
    # The steps are so different in size that each number is judged by its own.
    mean, sigma = ((drawn - low) / (high - low)).mean(0), (share * (1 - share) / draws).sqrt()
    assert ((mean - share).abs() <= 6 * sigma).all(), (mean - share) / sigma


def test_probabilities_are_multiples_of_two_to_the_minus_31():
    """Half of a multiple is rounded to even, less than half of the smallest never moves; the last bit is not used."""
    fmt = fq.parse_format("int8")
    smallest = 2.0**-31
    for share, moves in ((0.5, 0), (0.51, 1), (1.0, 1), (1.5, 2), (2.5, 2), (2.0**31 - 128, 2**31 - 128)):
        v = torch.tensor(share * smallest, dtype=torch.float64)
        words = torch.tensor([0, 1, 2 * moves - 1, 2 * moves, 2 * moves + 1, 2**32 - 1]).clamp(min=0)
        assert fmt.round_stochastically(v, words).tolist() == [float(w // 2 < moves) for w in words.tolist()], share


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_special_numbers_are_rounded_as_to_nearest(name, dtype):
    fmt = FORMATS[name].spec(fq.PerTensor(), fq.Arithmetic.DIVIDE).format
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-45], dtype=dtype)
    for word in (torch.tensor(2), LAST):
        assert_same_bits(fmt.round_stochastically(special, word), fmt.round(special), str(word))


def test_beyond_the_range_codes_saturate():
    x = torch.tensor([1e9, -1e9, 127.0, -128.0, math.inf, -math.inf, math.nan])
    expected = torch.tensor([127.0, -128.0, 127.0, -128.0, 127.0, -128.0, math.nan])
    for seed in range(20):
        assert_same_bits(fq.fake_quantize(x, INT8, scale=1.0, seed=seed), expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(layout, dtype):
    x = LAYOUTS[layout](torch.randn(4, 6, 8).to(dtype))
    for text in ("int4 per_channel(1)", "nf4 per_block(0:3,-1:4,pad)", "float8_e4m3fn per_tensor", "uint8 per_token"):
        spec = fq.QuantSpec.parse(text).replace(rounding=STOCHASTIC)
        right = fq.fake_quantize(x.contiguous(), spec, seed=3)
        assert_same_bits(fq.fake_quantize(x, spec, seed=3), right, text)
        assert_same_bits(fq.quantize(x, spec, seed=3)[0], fq.quantize(x.contiguous(), spec, seed=3)[0], text)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    x = torch.randn(1000).to(dtype)
    y = fq.fake_quantize(x.float(), INT8, scale=0.0123, seed=3)
    assert_same_bits(fq.fake_quantize(x, INT8, scale=0.0123, seed=3), y.to(dtype))


def test_scales_are_rounded_to_nearest():
    x = torch.randn(8, 64)
    for text in (
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
        "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:even",
        "nf4 per_block(-1:16) scale=uint8@per_block(-1:2)",
    ):
        stochastic = fq.QuantSpec.parse(text).replace(rounding=STOCHASTIC)
        assert_same_bits(fq.choose_qparams(x, stochastic).scale, fq.choose_qparams(x, text).scale)


def test_torchs_generator_decides_seeds_that_are_not_given():
    x = torch.randn(100)
    calls = [
        lambda: fq.fake_quantize(x, INT8),
        lambda: fq.fake_quantize(x, INT8, scale=0.3),
        lambda: fq.fake_quantize(x.requires_grad_(), INT8).detach(),
        lambda: fq.dequantize(*fq.quantize(x, INT8), INT8),
        Quantizer(INT8, dynamic=True),
    ]
    for call in calls:
        run = call if not isinstance(call, Quantizer) else lambda call=call: call(x.detach())
        torch.manual_seed(3)
        first, second = run(), run()
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        assert_same_bits(run(), first)
        assert_same_bits(run(), second)


def test_a_seed_is_a_number_or_a_tensor():
    x = torch.randn(100)
    y = fq.fake_quantize(x, INT8, seed=-5)
    assert_same_bits(fq.fake_quantize(x, INT8, seed=torch.tensor(-5)), y)
    assert not torch.equal(fq.fake_quantize(x, INT8, seed=5), y)
    state = torch.get_rng_state()
    fq.fake_quantize(x, INT8, seed=5)
    assert torch.equal(torch.get_rng_state(), state)


def test_codes_keep_their_seed():
    x = torch.randn(100)
    codes, params = fq.quantize(x, INT8)
    assert_same_bits(
        fq.fake_quantize(x, INT8, scale=params.scale, seed=params.seed), fq.dequantize(codes, params, INT8)
    )
    assert fq.quantize(x, "int8")[1].seed is None


def test_the_reference_does_not_draw():
    with pytest.raises(
        QParamsError, match=r"int8 per_tensor stochastic rounds by random numbers.*give QParams\(.*seed"
    ):
        reference.fake_quantize(torch.ones(1), fq.QParams(torch.ones(1)), fq.QuantSpec.parse(INT8))


@pytest.mark.parametrize("gradient", fq.Gradient, ids=lambda g: g.value)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_the_input_is_that_of_the_drawn_codes(layout, gradient):
    for dynamic in (False, True):
        spec = fq.QuantSpec("int2", fq.PerChannel(1), gradient=gradient, rounding=STOCHASTIC)
        x = LAYOUTS[layout](torch.randn(6, 5, 4)).detach().requires_grad_()
        scale = None if dynamic else torch.full((1, 5, 1), 0.7)
        params = fq.choose_qparams(x.detach(), spec) if dynamic else fq.QParams(scale)
        inside = reference.passes(x.detach(), params._replace(seed=torch.tensor(4)), spec)
        assert gradient is fq.Gradient.IDENTITY or dynamic or not inside.all()
        dy = torch.randn(6, 5, 4)
        (dx,) = torch.autograd.grad(fq.fake_quantize(x, spec, scale=scale, seed=4), x, dy)
        assert_same_bits(dx, reference.grad_input(dy, inside))


@pytest.mark.parametrize("name", ["int4", "float4_e2m1fn", "nf4"])
def test_gradient_of_the_scale_is_that_of_the_drawn_codes(name):
    """LSQ, equation 3: the code less the number where it is in range, else the bound."""
    x, dy = torch.randn(500).double(), torch.randn(500).double()
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    spec = fq.QuantSpec(name, rounding=STOCHASTIC)
    y = fq.fake_quantize(x, spec, scale=scale, seed=8)
    code = spec.format.round_stochastically(x / 0.3, random_words(torch.tensor(8), x))
    clamped = spec.format.clamp(code)
    right = (dy * torch.where(clamped == code, code - x / 0.3, clamped)).sum()
    torch.testing.assert_close(torch.autograd.grad(y, scale, dy)[0], right, rtol=1e-12, atol=0)
    _, tangent = torch.func.jvp(
        lambda s: (fq.fake_quantize(x, spec, scale=s, seed=8) * dy).sum(), (scale.detach(),), (torch.ones_like(scale),)
    )
    torch.testing.assert_close(tangent, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", [*fq.nn.learned_ranges()])
def test_learned_ranges_draw_once_for_forward_and_backward(method):
    symmetric = Quantizer(INT8)
    symmetric.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([0.8])))
    symmetric.learn(method)
    x = torch.randn(300, requires_grad=True)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        y = symmetric(x)
        torch.randn(10)  # what is drawn in between does not reach the backward
        results.append([y, *torch.autograd.grad(y.pow(2).sum(), [x, *symmetric.parameters()])])
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)
    assert results[0][2].item() != 0


def test_unbiased_gradients_in_a_training_study():
    """Gradients quantized to 4 bits average to themselves; to nearest, small ones vanish."""
    gradient = torch.linspace(-0.02, 1.0, 40)
    mean = torch.stack([fq.fake_quantize(gradient, "int4 per_tensor stochastic", seed=s) for s in range(4000)]).mean(0)
    step = 1 / 7
    assert (mean - gradient).abs().max() <= 6 * step * 0.5 / 4000**0.5
    assert (fq.fake_quantize(gradient, "int4") - gradient).abs().max() > 0.3 * step


def test_vmap_takes_a_seed_per_sample_or_torchs_flag():
    x = torch.randn(3, 50)
    spec = fq.QuantSpec.parse(INT8)
    seeds = torch.tensor([4, 5, 6])
    batched = torch.vmap(lambda t, s: fq.fake_quantize(t, spec, scale=0.5, seed=s))(x, seeds)
    single = [fq.fake_quantize(x[i], spec, scale=0.5, seed=seeds[i]) for i in range(3)]
    assert_same_bits(batched, torch.stack(single))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda t: fq.fake_quantize(t, spec, scale=0.5))(x)
    drawn = torch.vmap(lambda t: fq.fake_quantize(t, spec, scale=0.5), randomness="different")(x[:1].expand(3, 50))
    assert not torch.equal(drawn[0], drawn[1])


def test_the_exported_operator_takes_the_seed():
    x, scale, seed = torch.randn(6, 5).requires_grad_(), torch.full((1, 1), 0.5), torch.tensor(3)
    y = torch.ops.fakequant.fake_quantize(x, scale, None, INT8, seed)
    right = fq.fake_quantize(x, INT8, scale=0.5, seed=3)
    assert_same_bits(y, right)
    assert_same_bits(*(torch.autograd.grad(values.sum(), x)[0] for values in (y, right)))
    torch.library.opcheck(torch.ops.fakequant.fake_quantize, (x, scale, None, INT8, seed))


def test_meta_tensors():
    y = fq.fake_quantize(torch.empty(3, 4, device="meta"), INT8)
    assert (y.device.type, tuple(y.shape)) == ("meta", (3, 4))
