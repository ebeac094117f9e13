"""compat.pytorch_quantization.tensor_quant and cuda_ext, against the formulas of the original in numpy."""

import pytest
import torch

from benchmarks import compat
from fakequant.compat.pytorch_quantization import cuda_ext, tensor_quant
from fakequant.compat.pytorch_quantization.tensor_quant import codes_per_unit, float_format
from tests.support import compat_rules as rules
from tests.support.bits import assert_same_bits
from tests.support.matrix import full, in_turn, sweep

AMAX_SHAPES = {str(shape): shape for shape in rules.AMAX_SHAPES}


@sweep(
    "amax_shape, case",
    full(AMAX_SHAPES, rules.INTEGERS),
    [*in_turn(AMAX_SHAPES, list(rules.INTEGERS)), *full(AMAX_SHAPES, ["int8_narrow"])],
    amax_shape=AMAX_SHAPES,
    case=rules.INTEGERS,
)
def test_integers_equal_the_formulas(case, amax_shape):
    for got, wanted in rules.integer_pairs(*case, amax_shape):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("amax_shape", [None, *rules.AMAX_SHAPES], ids=str)
def test_scaled_e4m3_equals_the_formula(amax_shape):
    for got, wanted in rules.e4m3_pairs(amax_shape):
        assert_same_bits(got, wanted)


def test_the_multiplier_of_e4m3_is_within_a_unit_in_the_last_place_of_the_quotient():
    """For every mantissa of amax; docs/notes/pytorch-quantization.md has the share."""
    amax = torch.arange(1 << 23, 1 << 24, dtype=torch.float32)
    found = codes_per_unit(amax, float_format((4, 3)))
    assert_same_bits(found, 448.0 / amax)
    distance = (found.view(torch.int32) - (torch.tensor(448.0) / amax).view(torch.int32)).abs()
    assert distance.max() == 1
    assert round(distance.float().mean(dtype=torch.float64).item(), 3) == 0.279


@pytest.mark.parametrize("num_bits", [8, 4, 2, 12])
@pytest.mark.parametrize(
    ("lo", "hi"), [(-1.0, 2.0), (0.0, 5.5), (-3.0, 0.0), (0.7, 1.9), (-1e-9, 1e-9), (2.0, 2.0), (-1e30, 1.0)]
)
def test_affine_equals_the_formula(num_bits, lo, hi):
    for got, wanted in rules.affine_pairs(num_bits, lo, hi):
        assert_same_bits(got, wanted)


def test_the_numbers_of_the_users_guide():
    assert compat.guide() == compat.Guide(0, "128.0057")


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
        (lambda x: tensor_quant.scaled_e4m3(x, torch.tensor(1.0), 5, 2), TypeError, "E=5 and M=2"),
        (lambda x: tensor_quant.tensor_quant(x.half(), torch.tensor(1e-6)), ValueError, "too large for FP16 with amax"),
        (lambda x: tensor_quant.fake_tensor_quant(x.int(), torch.tensor(1.0)), TypeError, "int32"),
        (lambda x: tensor_quant.fake_tensor_quant(x, torch.ones(3)), RuntimeError, "broadcast|shape"),
        (lambda x: tensor_quant.fake_tensor_quant(x, torch.tensor(1.0), 0), ValueError, "at least 1 bit"),
        (lambda x: cuda_ext.fake_tensor_quant(x, torch.ones(2)), ValueError, "fake_tensor_quant_with_axis"),
        (lambda x: cuda_ext.fake_tensor_quant_with_axis(x, torch.ones(3), 0), ValueError, "3 elements, but axis 0"),
        (lambda x: tensor_quant.fake_tensor_quant(x, None), TypeError, "amax must be a number or a tensor, got None"),
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
