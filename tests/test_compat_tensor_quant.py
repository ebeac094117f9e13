"""compat.pytorch_quantization.tensor_quant and cuda_ext, against the formulas of the original in numpy."""

import numpy as np
import pytest
import torch
from bits import assert_same_bits

from fakequant.compat.pytorch_quantization import cuda_ext, tensor_quant
from fakequant.compat.pytorch_quantization.specification import float_format

EPSILON = np.float32(2.0**-24)
SHAPE = (32, 16, 2048)
INTEGERS = {
    "int8_narrow": (8, False, True),
    "int8": (8, False, False),
    "uint8": (8, True, True),
    "int4_narrow": (4, False, True),
    "int2": (2, False, False),
    "uint16": (16, True, False),
}
AMAX_SHAPES = [(), (1, 1, 1), (32, 1, 1), (16, 1), (2048,), (32, 1, 2048), (32, 16, 1), SHAPE]


def codes_of(x, amax, num_bits, unsigned, narrow):
    """Codes and the scale to divide them by; a scale of 0 while rounding makes tiny groups 0."""
    bound = np.float32(2 ** (num_bits - 1 + unsigned) - 1)
    lowest = np.float32(0) if unsigned else -bound if narrow else -bound - 1
    tiny = amax <= EPSILON
    with np.errstate(all="ignore"):
        scale = bound / amax
        code = np.rint(x * np.where(tiny, np.float32(0), scale))
    code = np.where(code < lowest, lowest, np.where(code > bound, bound, code))
    return code, np.where(tiny, np.float32(1), scale)


def e4m3_of(x, amax):
    """In torch a number divided by a tensor is the number times the reciprocal."""
    with np.errstate(all="ignore"):
        scale = np.float32(1) if amax is None else np.float32(448) * (np.float32(1) / amax)
        scaled = x * scale
        limited = np.where(scaled > 448, np.float32(448), np.where(scaled < -448, np.float32(-448), scaled))
        code = torch.from_numpy(limited).to(torch.float8_e4m3fn).float().numpy()
        value = code / scale
    return np.where(np.abs(x) < EPSILON, np.float32(0), value)


def amaxes(shape, generator):
    """Amax of all sizes, the tiny ones among them; the first of several is the largest number there is."""
    values = generator.uniform(0.01, 4, shape).astype(np.float32)
    flat = values.reshape(-1)
    special = [3.4e38, 0.0, 2.0**-24, np.nextafter(EPSILON, np.float32(1)), 1e-30, 1e-40, 3.0, 448.0]
    if flat.size > 1:
        flat[: len(special)] = special
    return values


def hostile(shape, amax, bound, generator):
    """Ties and their neighbours, values at and beside amax, beyond it, and what is no ordinary number."""
    full = np.broadcast_to(amax, shape).astype(np.float64)
    step = np.where(full > 0, full, 1) / bound
    halves = generator.integers(-2 * bound - 6, 2 * bound + 7, shape) / 2
    with np.errstate(over="ignore"):
        x = np.where(generator.random(shape) < 0.5, halves * step, generator.normal(size=shape) * full)
        x = np.where(generator.random(shape) < 0.05, np.where(halves < 0, -full, full), x).astype(np.float32)
    direction = np.float32([-np.inf, 0, np.inf])[generator.integers(0, 3, shape)]
    x = np.where(direction == 0, x, np.nextafter(x, direction, dtype=np.float32))
    values = np.float32([0.0, -0.0, 1e-45, -1e-40, 5e-8, 7e-8, -5.9e-8, 1e30, -3.4e38, np.nan])
    special = values[generator.integers(0, len(values), shape)]
    return np.where(generator.random(shape) < 0.02, special, x).astype(np.float32)


def with_gradient(function, x, dy):
    leaf = torch.from_numpy(x).requires_grad_()
    y = function(leaf)
    y.backward(torch.from_numpy(dy))
    return y.detach(), leaf.grad


def expected(value, inside, dy):
    value, gradient = np.ascontiguousarray(value), np.where(inside, dy, np.float32(0))
    return torch.from_numpy(value), torch.from_numpy(gradient)


@pytest.fixture
def generator():
    return np.random.default_rng(7)


@pytest.mark.parametrize("amax_shape", AMAX_SHAPES, ids=str)
@pytest.mark.parametrize(("num_bits", "unsigned", "narrow"), INTEGERS.values(), ids=INTEGERS)
def test_integers_equal_the_formulas(amax_shape, num_bits, unsigned, narrow, generator):
    amax = amaxes(amax_shape, generator)
    x = hostile(SHAPE, amax, 2 ** (num_bits - 1 + unsigned) - 1, generator)
    if unsigned:
        x = np.abs(x)
    dy = generator.normal(size=SHAPE).astype(np.float32)
    code, scale = codes_of(x, amax, num_bits, unsigned, narrow)
    with np.errstate(all="ignore"):
        value, inside = code / scale, np.abs(x) <= amax
    arguments = torch.from_numpy(amax), num_bits, unsigned, narrow

    for function in (tensor_quant.fake_tensor_quant, tensor_quant.legacy_fake_tensor_quant):
        actual = with_gradient(lambda leaf, function=function: function(leaf, *arguments), x, dy)
        for got, wanted in zip(actual, expected(value, inside, dy), strict=True):
            assert_same_bits(got, wanted)
    actual = with_gradient(lambda leaf: tensor_quant.tensor_quant(leaf, *arguments)[0], x, dy)
    for got, wanted in zip(actual, expected(code, inside, dy), strict=True):
        assert_same_bits(got, wanted)
    assert_same_bits(
        tensor_quant.tensor_quant(torch.from_numpy(x), *arguments)[1], torch.from_numpy(scale.reshape(amax_shape))
    )


@pytest.mark.parametrize("amax_shape", [None, *AMAX_SHAPES], ids=str)
def test_scaled_e4m3_equals_the_formula(amax_shape, generator):
    amax = None if amax_shape is None else amaxes(amax_shape, generator)
    limit = np.float32(448) if amax is None else amax
    x = hostile(SHAPE, limit, 448 * 8, generator)
    dy = generator.normal(size=SHAPE).astype(np.float32)
    given = None if amax is None else torch.from_numpy(amax)
    actual = with_gradient(lambda leaf: tensor_quant.scaled_e4m3(leaf, given), x, dy)
    for got, wanted in zip(actual, expected(e4m3_of(x, amax), np.abs(x) <= limit, dy), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("num_bits", [8, 4, 2, 12])
@pytest.mark.parametrize(
    ("lo", "hi"), [(-1.0, 2.0), (0.0, 5.5), (-3.0, 0.0), (0.7, 1.9), (-1e-9, 1e-9), (2.0, 2.0), (-1e30, 1.0)]
)
def test_affine_equals_the_formula(num_bits, lo, hi, generator):
    lo, hi = np.float32(lo), np.float32(hi)
    steps = np.float32(2**num_bits - 1)
    x = hostile((1 << 20,), np.float32(max(-lo, hi)), 2**num_bits - 1, generator)
    dy = generator.normal(size=x.shape).astype(np.float32)
    lowest, highest = np.float32(-(2 ** (num_bits - 1))), np.float32(2 ** (num_bits - 1) - 1)
    with np.errstate(all="ignore"):
        step = (hi - lo) / steps
        zero = np.rint(lo / step) - lowest
        code = np.rint(x / step) - zero
        code = np.where(code < lowest, lowest, np.where(code > highest, highest, code))
        value = (code + zero) * step
    for ranges in ((torch.tensor(lo), torch.tensor(hi)), (float(lo), float(hi))):
        actual = with_gradient(lambda leaf, r=ranges: tensor_quant.fake_affine_tensor_quant(leaf, *r, num_bits), x, dy)
        for got, wanted in zip(actual, expected(value, (x <= hi) & (x >= lo), dy), strict=True):
            assert_same_bits(got, wanted)


def test_the_numbers_of_the_users_guide():
    torch.manual_seed(12345)
    x = torch.rand(10)
    fake = tensor_quant.fake_tensor_quant(x, x.abs().max())
    wanted = [0.9843, 0.8828, 0.9921, 0.4609, 0.0859, 0.1797, 0.3672, 0.5703, 0.3359, 0.2109]
    assert [round(value, 4) for value in fake.tolist()] == wanted
    codes, scale = tensor_quant.tensor_quant(x, x.abs().max())
    assert codes.tolist() == [126.0, 113.0, 127.0, 59.0, 11.0, 23.0, 47.0, 73.0, 43.0, 27.0]
    assert f"{scale:.4f}" == "128.0057"


@pytest.mark.parametrize("zero_amax", [0.0, 2.0**-24, 1e-45])
def test_a_group_with_a_tiny_amax_becomes_zero_whatever_is_in_it(zero_amax):
    x = torch.tensor([[1.0, -1.0, 3.4e38, -torch.inf, torch.nan], [1.0, -1.0, 3.4e38, -torch.inf, torch.nan]])
    amax = torch.tensor([[zero_amax], [1.0]])
    wanted = torch.tensor([[0.0, -0.0, 0.0, -0.0, torch.nan], [1.0, -1.0, 1.0, -1.0, torch.nan]])
    assert_same_bits(tensor_quant.fake_tensor_quant(x, amax), wanted)
    codes, scale = tensor_quant.tensor_quant(x, amax)
    assert_same_bits(codes[0], wanted[0])
    assert scale[0] == 1
    torch.set_flush_denormal(True)
    try:
        assert_same_bits(tensor_quant.fake_tensor_quant(x, amax), wanted)
    finally:
        torch.set_flush_denormal(False)


def test_nan_and_infinite_amax():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    y = tensor_quant.fake_tensor_quant(x, torch.tensor([[torch.nan], [0.0], [torch.inf]]))
    assert y[0].isnan().all()
    assert y[1].tolist() == [0, 0]
    assert y[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    x = torch.randn(64, 256).to(dtype)
    amax = x.abs().amax(1, keepdim=True)
    for function in (tensor_quant.fake_tensor_quant, tensor_quant.scaled_e4m3):
        assert_same_bits(function(x, amax), function(x.float(), amax.float()).to(dtype))
    codes, scale = tensor_quant.tensor_quant(x, amax)
    wide_codes, wide_scale = tensor_quant.tensor_quant(x.float(), amax.float())
    assert_same_bits(codes, wide_codes.to(dtype))
    assert_same_bits(scale, wide_scale.to(dtype))


def test_float64_is_computed_in_float64():
    x = torch.tensor([0.1 + 2**-40, 1e300, -1e300], dtype=torch.float64)
    y = tensor_quant.fake_tensor_quant(x, torch.tensor(1.0, dtype=torch.float64))
    assert_same_bits(y, torch.tensor([13 / 127, 1.0, -1.0], dtype=torch.float64))
    assert_same_bits(tensor_quant.fake_tensor_quant(x, torch.tensor(0.0)), torch.tensor([0.0, 0.0, -0.0]).double())


def test_memory_formats_and_empty_tensors():
    x = torch.randn(2, 6, 5, 4).to(memory_format=torch.channels_last)
    amax = torch.rand(1, 6, 1, 1)
    plain = tensor_quant.fake_tensor_quant(x.contiguous(), amax)
    assert_same_bits(tensor_quant.fake_tensor_quant(x, amax), plain)
    assert_same_bits(
        tensor_quant.fake_tensor_quant(x.permute(3, 1, 0, 2), amax), plain.permute(3, 1, 0, 2).contiguous()
    )
    assert tensor_quant.fake_tensor_quant(torch.zeros(0, 3), torch.tensor(1.0)).shape == (0, 3)
    assert tensor_quant.fake_tensor_quant(torch.zeros(0, 3), torch.rand(3), 8, True).shape == (0, 3)
    assert tensor_quant.fake_tensor_quant(torch.tensor(3.0), torch.tensor([[1.0]])).shape == ()


def test_an_amax_of_more_axes_broadcasts_the_inputs():
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    y = tensor_quant.fake_tensor_quant(x, torch.tensor([[0.7], [2.0]]), 4)
    assert_same_bits(y, tensor_quant.fake_tensor_quant(x.expand(2, 2), torch.tensor([[0.7], [2.0]]), 4))
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 1.0]


def test_a_bias_moves_the_range():
    x, bias = torch.tensor([0.5, 1.5, 2.5], requires_grad=True), torch.tensor(1.5)
    y = tensor_quant.fake_tensor_quant(x, torch.tensor(0.5), bias=bias)
    assert_same_bits(y, tensor_quant.fake_tensor_quant(x - bias, torch.tensor(0.5)) + bias)
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 0]
    assert tensor_quant.tensor_quant(x, torch.tensor(0.5), bias=bias)[0].tolist() == [-127, 0, 127]


def test_the_orders_of_arguments_of_later_releases_and_of_the_guide():
    x, amax, bias = torch.randn(9), torch.tensor(1.0), torch.tensor(0.25)
    plain = tensor_quant.fake_tensor_quant(x, amax, 4, False, False)
    assert_same_bits(tensor_quant.fake_tensor_quant(x, amax, None, 4, False, False), plain)
    moved = tensor_quant.fake_tensor_quant(x, amax, 4, bias=bias)
    assert_same_bits(tensor_quant.fake_tensor_quant(x, amax, bias, 4), moved)
    assert_same_bits(tensor_quant.scaled_e4m3(x, amax, None, 4, 3), tensor_quant.scaled_e4m3(x, amax))
    codes, _ = tensor_quant.tensor_quant(x, amax, 8, torch.int32, False)
    assert_same_bits(codes, tensor_quant.tensor_quant(x, amax)[0].int())
    assert tensor_quant.fake_tensor_quant(x, amax, 8, torch.float16, False).dtype == torch.float16
    keywords = tensor_quant.fake_tensor_quant(inputs=x, amax=amax, num_bits=4, unsigned=False, narrow_range=False)
    assert_same_bits(keywords, plain)


def test_names_with_apply():
    x, amax = torch.randn(9), torch.tensor(1.0)
    for name, function in {
        "TensorQuantFunction": tensor_quant.tensor_quant,
        "FakeTensorQuantFunction": tensor_quant.fake_tensor_quant,
        "LegacyFakeTensorQuantFunction": tensor_quant.legacy_fake_tensor_quant,
        "ScaledE4M3Function": tensor_quant.scaled_e4m3,
    }.items():
        applied, called = getattr(tensor_quant, name).apply(x, amax), function(x, amax)
        for got, wanted in zip(applied, called, strict=True):
            assert_same_bits(got, wanted)
    applied = tensor_quant.FakeAffineTensorQuantFunction.apply(x, -amax, amax)
    assert_same_bits(applied, tensor_quant.fake_affine_tensor_quant(x, -amax, amax))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x: tensor_quant.fake_tensor_quant(x, torch.tensor(1.0), 8, True),
            TypeError,
            "Negative values encountered",
        ),
        (lambda x: tensor_quant.tensor_quant(x, torch.tensor(1.0), 8, True), TypeError, "Negative values encountered"),
        (
            lambda x: tensor_quant.fake_tensor_quant(x, torch.tensor([1.0, -2.0])),
            ValueError,
            "Negative values in amax: -2",
        ),
        (lambda x: tensor_quant.scaled_e4m3(x, torch.tensor(-2.0)), ValueError, "Negative values in amax"),
        (lambda x: tensor_quant.scaled_e4m3(x, torch.tensor(1.0), 5, 2), NotImplementedError, "E=5 and M=2"),
        (lambda x: tensor_quant.tensor_quant(x.half(), torch.tensor(1e-6)), ValueError, "too large for FP16 with amax"),
        (lambda x: tensor_quant.fake_tensor_quant(x.int(), torch.tensor(1.0)), TypeError, "int32"),
        (lambda x: tensor_quant.fake_tensor_quant(x, torch.ones(3)), RuntimeError, "broadcast|shape"),
        (lambda x: tensor_quant.fake_tensor_quant(x, torch.tensor(1.0), 0), ValueError, "at least 1 bit"),
        (lambda x: cuda_ext.fake_tensor_quant(x, torch.ones(2)), ValueError, "fake_tensor_quant_with_axis"),
        (lambda x: cuda_ext.fake_tensor_quant_with_axis(x, torch.ones(3), 0), ValueError, "3 elements, but axis 0"),
        (lambda x: float_format((9, 9)), TypeError, r"\(4, 3\)"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.tensor([1.0, -1.0]))


def test_the_extension_rounds_in_place_along_an_axis_and_without_a_gradient():
    x, amax = torch.randn(4, 3, 5), torch.rand(3)
    wanted = tensor_quant.fake_tensor_quant(x, amax[None, :, None], 8, False, False)
    leaf = x.clone().requires_grad_()
    for axis in (1, -2):
        y = cuda_ext.fake_tensor_quant_with_axis(leaf, amax, axis, 8, False, False)
        assert_same_bits(y, wanted)
        assert not y.requires_grad
    inplace = x.clone()
    assert cuda_ext.fake_tensor_quant_(inplace, torch.tensor(0.5), 8, False, False) is inplace
    assert_same_bits(inplace, tensor_quant.fake_tensor_quant(x, torch.tensor(0.5), 8, False, False))
    assert_same_bits(cuda_ext.fake_tensor_quant(x, torch.tensor([0.5])), tensor_quant.fake_tensor_quant(x, 0.5))
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
    wanted = bits.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert_same_bits(cuda_ext.fake_e4m3fy(bits), torch.where(bits.abs() < 2**-24, 0.0, wanted))


FUNCTIONS = {
    "fake_tensor_quant": tensor_quant.fake_tensor_quant,
    "unsigned": lambda x, amax: tensor_quant.fake_tensor_quant(x, amax, 8, True),
    "tensor_quant": lambda x, amax: tensor_quant.tensor_quant(x, amax)[0],
    "scaled_e4m3": tensor_quant.scaled_e4m3,
    "affine": lambda x, amax: tensor_quant.fake_affine_tensor_quant(x, -amax, amax),
}


@pytest.fixture
def batch():
    x = torch.randn(8, 16)
    amax = x.abs().amax(1, keepdim=True) * 0.8
    amax[3] = 0
    return x, amax


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_exported_and_transformed_alike(name, batch):
    function, (x, amax) = FUNCTIONS[name], batch
    x = x.abs() if name == "unsigned" else x
    amax = amax + 1 if name == "affine" else amax  # a range of 0 has no step, and NaN has no derivative
    dy = torch.randn(x.shape)
    leaf = x.clone().requires_grad_()
    y = function(leaf, amax)
    y.backward(dy)

    torch._dynamo.reset()
    compiled_leaf = x.clone().requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(compiled_leaf, amax)
    compiled.backward(dy)
    assert_same_bits(compiled, y)
    assert_same_bits(compiled_leaf.grad, leaf.grad)

    class Module(torch.nn.Module):
        def forward(self, inputs, amax):
            return function(inputs, amax)

    assert_same_bits(torch.export.export(Module(), (x, amax)).module()(x, amax), y)
    assert_same_bits(torch.func.vmap(function)(x, amax[:, 0]), y)
    value, pull = torch.func.vjp(lambda inputs: function(inputs, amax), x)
    assert_same_bits(value, y)
    assert_same_bits(pull(dy)[0], leaf.grad)
    value, moved = torch.func.jvp(lambda inputs: function(inputs, amax), (x,), (dy,))
    assert_same_bits(value, y)
    assert_same_bits(moved, leaf.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_meta_tensors_have_the_shape(name):
    x = torch.empty(3, 4, device="meta")
    assert FUNCTIONS[name](x, torch.empty(3, 1, device="meta")).shape == (3, 4)
    assert tensor_quant.scaled_e4m3_abstract(x, None).is_meta
