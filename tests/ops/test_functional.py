"""Zeros without memory, which autograd passes on for gradients that are zero everywhere, as of `torch.sgn`."""

import numpy
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import DTypeError, QParamsError, ShapeError, SpecError
from fakequant.numerics import reference
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, GRANULARITIES
from tests.support.integer_models import prepared

X = torch.tensor([[0.1, -0.52, 1.27], [5.0, 2.4, -0.26]])
CHANNELS = fq.QuantSpec("int8", fq.PerChannel(0))
UINT8 = fq.QuantSpec("uint8")
STOCHASTIC = fq.QuantSpec("int8", rounding=fq.Rounding.STOCHASTIC)
NAN = float("nan")


def with_arithmetics(*names):
    integers = {name for name in names if fq.parse_format(name).has_zero_point}
    return [(name, one) for name in names for one in fq.Arithmetic if name in integers or not one.has_two_scales]


@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_every_accepted_shape_of_a_scale_means_the_same(where):
    x, scale = torch.randn(where.shape), torch.rand(where.groups) + 0.01
    spec = fq.QuantSpec("uint8", where.granularity)
    zero_point = torch.randint(0, 256, where.groups)
    expected = reference.fake_quantize(x, fq.QParams(scale, zero_point), spec)
    for shape in where.granularity.scale_shapes(where.shape):
        y = fq.fake_quantize(x, spec, scale=scale.reshape(shape), zero_point=zero_point.reshape(shape))
        assert_same_bits(y, expected, str(shape))


def test_numbers_and_tensors_of_any_dtype_mean_the_same():
    expected = fq.fake_quantize(X, UINT8, scale=0.5, zero_point=3)
    for scale in (torch.tensor(0.5), torch.tensor([0.5]).double(), torch.tensor([[0.5]]).half()):
        for zero_point in (torch.tensor(3), torch.tensor([3.0]), torch.tensor([[3]], dtype=torch.uint8)):
            assert_same_bits(fq.fake_quantize(X, UINT8, scale=scale, zero_point=zero_point), expected)


def test_of_two_errors_the_first_is_said():
    for function in (fq.fake_quantize, fq.fake_quantize_):
        for error, x, spec, given in (
            (DTypeError, [1.0], "int8", {"scale": 1e-60}),
            (DTypeError, X.int(), "int8", {"scale": 10**400}),
            (SpecError, X, "int8", {"scale": 1e-60, "zero_point": 1}),
            (ShapeError, X, CHANNELS, {"scale": 0.1}),
        ):
            with pytest.raises(error):
                function(x, spec, **given)
        with pytest.raises(QParamsError, match="scale must be a positive"):
            function(X, UINT8, scale=-1.0, zero_point="3")
        for name, given in (("scale", {"scale": 1e-60}), ("zero_point", {"scale": 1.0, "zero_point": 1e-60})):
            with pytest.raises(QParamsError, match=f"{name}=1e-60 is 0 in torch.float32"):
                function(X, UINT8, **given)
            given = {**given, name: -(10**400)}
            with pytest.raises(QParamsError, match=f"{name}=-10+ is beyond all numbers in torch.float32"):
                function(X, UINT8, **given)


@pytest.mark.parametrize("given", [{"scale": -1.0}, {"scale": torch.tensor(-1.0)}, {"scale": 1.0, "zero_point": 300}])
def test_values_are_not_read_where_something_watches(given):
    def function(x):
        return fq.fake_quantize(x, UINT8, **given)

    torch._dynamo.reset()
    for watched in (torch.func.vmap(function), torch.compile(function, backend="aot_eager", fullgraph=True)):
        assert watched(X).shape == X.shape
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert function(X).shape == X.shape
    with pytest.raises(QParamsError, match=next(reversed(given))):
        function(X)


def test_the_range_is_taken_from_x():
    params = fq.choose_qparams(X, CHANNELS)
    assert_same_bits(params.scale, torch.tensor([[1.27], [5.0]]) / 127)
    assert_same_bits(fq.fake_quantize(X, CHANNELS), fq.fake_quantize(X, CHANNELS, scale=params.scale))
    assert_same_bits(fq.fake_quantize(X, CHANNELS), fq.fake_quantize(X, CHANNELS, amax=torch.tensor([1.27, 5.0])))


def test_amax_is_what_becomes_the_largest_code():
    codes, params = fq.quantize(torch.tensor([2.0, -2.0, 9.0]), "int8", amax=2.0)
    assert codes.tolist() == [127, -127, 127]
    assert_same_bits(params.scale, torch.tensor([2.0]) / 127)
    # An amax of 0 gives the smallest scale there is, and so no code is further from 0.0 than this.
    assert fq.fake_quantize(X, "int8", amax=0.0).abs().max() <= 128 * torch.finfo(torch.float32).tiny


@pytest.mark.parametrize(
    ("name", "arithmetic"), with_arithmetics("int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2", "uint16")
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dequantized_codes_are_the_fake_quantized_values(name, dtype, arithmetic):
    x = torch.randn(5, 64).to(dtype)
    x[0, :3] = torch.tensor([float("inf"), float("-inf"), -0.0])
    spec = fq.QuantSpec(name, fq.PerBlock({-1: 32}), arithmetic=arithmetic)
    codes, params = fq.quantize(x, spec)
    assert codes.dtype == spec.format.storage
    values = fq.fake_quantize(x, spec)
    if spec.format.has_zero_point:
        values = values + 0.0  # integer codes have no negative zero
    assert_same_bits(fq.dequantize(codes, params, spec, dtype=dtype), values)
    assert fq.dequantize(codes, params, spec).dtype == params.scale.dtype


def test_special_numbers():
    x = torch.tensor([NAN, float("inf"), float("-inf"), -0.0, 1.0])
    assert_same_bits(fq.fake_quantize(x, "int8", scale=1.0), torch.tensor([NAN, 127.0, -128.0, 0.0, 1.0]))
    assert_same_bits(fq.fake_quantize(x, "float8_e5m2", scale=1.0), torch.tensor([NAN, 57344.0, -57344.0, -0.0, 1.0]))
    assert fq.quantize(x, "int8", scale=1.0)[0].tolist() == [-128, 127, -128, 0, 1]
    assert_same_bits(
        fq.quantize(x, "float8_e4m3fn", scale=1.0)[0].float(), torch.tensor([NAN, 448.0, -448.0, -0.0, 1.0])
    )


@pytest.mark.parametrize(("name", "arithmetic"), with_arithmetics("int8", "uint8", "int1", "float8_e4m3fn"))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_zeros_stay_zeros(name, dtype, arithmetic):
    for x in (
        torch.zeros(2, 3, dtype=dtype),
        -torch.zeros(2, 3, dtype=dtype),
        torch.tensor([[0.0, -0.0]], dtype=dtype),
    ):
        y = fq.fake_quantize(x, fq.QuantSpec(name, fq.PerChannel(0), arithmetic=arithmetic))
        assert (y == 0).all(), y


def test_a_zero_point_alone_with_amax_is_not_ignored():
    with pytest.raises(QParamsError, match=r"zero_point"):
        fq.fake_quantize(X, UINT8, amax=1.0, zero_point=3)


def test_codes_have_no_gradient():
    x = torch.randn(4, requires_grad=True)
    codes, params = fq.quantize(x, "float8_e4m3fn")
    assert not codes.requires_grad
    assert not fq.dequantize(codes, params, "float8_e4m3fn").requires_grad


def fake(**given):
    return lambda: fq.fake_quantize(X, given.pop("spec", "int8"), **given)


BAD_CALLS = {
    "integer input": (
        lambda: fq.fake_quantize(torch.arange(3), "int8"),
        DTypeError,
        r"cannot quantize a tensor of dtype torch.int64: expected float32, float64, float16 or bfloat16; convert it",
    ),
    "nested input": (
        lambda: fq.fake_quantize(torch.nested.nested_tensor([X[0], X[1]]), "int8"),
        DTypeError,
        r"x must be a dense torch.Tensor, got a nested tensor; convert it first, as by torch.nested.to_padded",
    ),
    "sparse input": (lambda: fq.fake_quantize(X.to_sparse(), "int8"), DTypeError, r"convert it .* by x\.to_dense\(\)"),
    "float8 input": (lambda: fq.fake_quantize(X.to(torch.float8_e5m2), "int8"), DTypeError, r"float8_e5m2: expected"),
    "zero scale": (fake(scale=0.0), QParamsError, r"scale must be a positive, finite number in every group, got 0.0"),
    "negative scale": (fake(scale=-0.5), QParamsError, r"scale must be a positive, finite number.*got -0.5"),
    "NaN scale": (fake(scale=NAN), QParamsError, r"scale must be a positive, finite number.*got nan"),
    "infinite scale": (fake(scale=float("inf")), QParamsError, r"scale must be a positive.*got inf"),
    "one bad scale": (fake(spec=CHANNELS, scale=torch.tensor([0.1, NAN])), QParamsError, r"in every group, got nan"),
    "negative amax": (fake(amax=-1.0), QParamsError, r"amax must be a number >= 0 in every group, got -1.0"),
    "NaN amax": (fake(amax=NAN), QParamsError, r"amax must be a number >= 0.*got nan"),
    "complex scale": (fake(scale=torch.tensor(0.5 + 9j)), QParamsError, r"scale must be real, got .* torch.complex64"),
    "complex number": (fake(scale=2 + 1j), QParamsError, r"or a tensor of real numbers, got \(2\+1j\)"),
    "scale of numpy": (
        fake(scale="0.5"),
        QParamsError,
        r"scale must be an int, a float or a tensor of real numbers, got '0.5'; convert it, .* float\(\)",
    ),
    "wrong scale shape": (
        fake(spec=CHANNELS, scale=torch.ones(3)),
        ShapeError,
        r"scale has shape \[3\], but per_channel\(0\) on a tensor of shape \[2, 3\] needs \[2, 1\] or \[2\]; resh",
    ),
    "scale per tensor for channels": (fake(spec=CHANNELS, scale=1.0), ShapeError, r"scale has shape \[\].*\[2, 1\]"),
    "wrong zero point shape": (
        fake(spec=UINT8, scale=1.0, zero_point=torch.zeros(2)),
        ShapeError,
        r"zero_point has shape \[2\], but per_tensor .* needs \[1, 1\] or \[\] or \[1\]",
    ),
    "zero point too large": (
        fake(spec=UINT8, scale=1.0, zero_point=256),
        QParamsError,
        r"zero_point must be a code of uint8, 0 to 255 in every group, got 256",
    ),
    "zero point too small": (fake(spec=UINT8, scale=1.0, zero_point=-1), QParamsError, r"0 to 255.*got -1"),
    "NaN zero point": (fake(spec=UINT8, scale=1.0, zero_point=NAN), QParamsError, r"zero_point must be a code.*nan"),
    "fractional zero point": (fake(spec=UINT8, scale=1.0, zero_point=2.5), QParamsError, r"zero_point must be.*2.5"),
    "zero point of a symmetric spec": (
        fake(scale=1.0, zero_point=0),
        SpecError,
        r"a zero_point was given, but int8 per_tensor is symmetric; use symmetric=False",
    ),
    "zero point without scale": (fake(spec=UINT8, zero_point=0), QParamsError, r"zero_point was given without a scale"),
    "scale and amax": (
        fake(scale=1.0, amax=1.0),
        QParamsError,
        r"scale and amax were both given, .*pass only one of them",
    ),
    "seed of a specification that rounds to nearest": (
        fake(seed=3),
        SpecError,
        r"a seed was given, but int8 per_tensor rounds to nearest; use rounding=Rounding.STOCHASTIC",
    ),
    "seed that is no integer": (fake(spec=STOCHASTIC, seed=1.0), QParamsError, r"seed must be an integer .* got 1.0"),
    "seed of more than 64 bits": (
        fake(spec=STOCHASTIC, seed=2**63),
        QParamsError,
        r"seed must be .* got 9223372036854",
    ),
    "seed of another dtype": (
        fake(spec=STOCHASTIC, seed=torch.tensor(1.0)),
        QParamsError,
        r"or a 0-d int64 tensor, got a tensor of torch.float32 and shape \[\]",
    ),
    "several seeds": (
        lambda: fq.quantize(X, STOCHASTIC, seed=torch.tensor([1, 2])),
        QParamsError,
        r"got a tensor of torch.int64 and shape \[2\]",
    ),
    "unknown format": (fake(spec="int9q"), SpecError, r"unknown format 'int9q'; did you mean int9"),
    "axis": (fake(spec="int8 per_channel(2)"), ShapeError, r"axis 2 is out of range, a tensor of 2 axes"),
    "block": (fake(spec="int8 per_block(-1:2)"), ShapeError, r"axis -1 has 3 elements, no multiple of 2; choose a"),
    "format instead of spec": (fake(spec=fq.parse_format("int8")), SpecError, r"QuantSpec"),
    "float codes": (
        lambda: fq.dequantize(X, fq.QParams(torch.ones(1, 1)), "int8"),
        DTypeError,
        r"torch.float32.*torch.int8",
    ),
    "codes of another width": (
        lambda: fq.dequantize(torch.ones(2, 3, dtype=torch.int64), fq.QParams(torch.ones(1, 1)), "int8"),
        DTypeError,
        r"torch.int64.*torch.int8",
    ),
    "integer values": (
        lambda: fq.dequantize(X.to(torch.int8), fq.QParams(torch.ones(1, 1)), "int8", dtype=torch.int32),
        DTypeError,
        r"torch.int32",
    ),
    "parameters of another shape": (
        lambda: fq.dequantize(X.to(torch.int8), fq.QParams(torch.ones(3)), CHANNELS),
        ShapeError,
        r"scale has shape \[3\]",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_say_what_came_what_was_expected_and_what_to_do(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, fq.FakeQuantError)


def test_parameters_elsewhere_than_on_the_cpu_are_not_read_and_others_are_checked_wherever_x_is():
    x = torch.ones(4, device="meta")
    for wrong in ({"scale": -1.0}, {"scale": torch.tensor(float("nan"))}, {"amax": -1.0}):
        with pytest.raises(fq.errors.QParamsError):
            fq.fake_quantize(x, "int8", **wrong)
    spec = fq.QuantSpec("int8", symmetric=False)
    with pytest.raises(fq.errors.QParamsError, match="zero_point"):
        fq.fake_quantize(x, spec, scale=1.0, zero_point=0.5)
    for right in (1.0, torch.ones(1), torch.ones(1, device="meta")):
        assert fq.fake_quantize(x, spec, scale=right, zero_point=right).is_meta


def test_sizes_that_depend_on_values_are_exported():
    class Positive(torch.nn.Module):
        def forward(self, x):
            return fq.fake_quantize(x[x > 0], "int8", scale=torch.tensor(0.5))

    exported = torch.export.export(Positive(), (torch.randn(8),)).module()
    for x in (X, -X):
        assert_same_bits(exported(x.view(-1)[:1].expand(8).contiguous()), Positive()(x.view(-1)[:1].expand(8)))


@pytest.mark.parametrize("make", [numpy.float32, numpy.float64, numpy.array], ids=["float32", "float64", "array"])
def test_numbers_of_numpy_are_numbers(make):
    x = torch.randn(5)
    for given in ({"scale": 0.25}, {"amax": 3.0}, {"scale": 0.25, "zero_point": 3}):
        spec = fq.QuantSpec("int8", symmetric="zero_point" not in given)
        numbers = {name: numpy.int64(value) if name == "zero_point" else make(value) for name, value in given.items()}
        right = fq.fake_quantize(x, spec, **given)
        assert_same_bits(fq.fake_quantize(x, spec, **numbers), right)
        assert_same_bits(fq.fake_quantize_(x.clone(), spec, **numbers), right)
    with pytest.raises(QParamsError, match="scale must be a positive, finite number"):
        fq.fake_quantize(x, "int8", scale=make(0.0))
    with pytest.raises(QParamsError, match="scale must be an int, a float or a tensor of real numbers, got array"):
        fq.fake_quantize(x, "int8", scale=numpy.ones(5))


def zeros(*shape):
    x = torch.ones(shape, requires_grad=True)
    torch.sgn(x).sum().backward()
    assert x.grad._is_zerotensor()
    return x.grad


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(0) clip", "int8 per_tensor stochastic", "float4_e2m1fn"])
def test_as_a_gradient(spec, learned):
    spec = fq.QuantSpec.parse(spec)
    x = torch.randn(256, 256, requires_grad=True)
    scale = torch.full(spec.granularity.scale_shapes(x.shape)[0], 0.01).requires_grad_(learned)
    torch.sgn(fq.fake_quantize(x, spec, scale=scale)).sum().backward()
    assert_same_bits(x.grad.clone(), torch.zeros(256, 256))
    if learned:
        assert not scale.grad.any()


@pytest.mark.parametrize(
    ("spec", "scale"),
    [
        ("int8", None),
        ("int8", 0.5),
        ("float8_e4m3fn", None),
        ("float8_e4m3fn", 0.5),
        ("int8 per_token", None),
        ("int8 per_block(-1:32) stochastic", None),
    ],
)
def test_as_an_input(spec, scale):
    assert_same_bits(fq.fake_quantize(zeros(256, 256), spec, scale=scale), torch.zeros(256, 256))
    codes, _ = fq.quantize(zeros(256, 256), spec, scale=scale)
    assert not codes.float().any()


@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(64, 64), lambda: nn.Conv2d(64, 64, 1)])
def test_as_the_gradient_of_a_layer(layer, execution):
    model, _ = prepared(layer())
    fq.set_execution(model.requires_grad_(), execution)
    shape = (64, 64) if isinstance(model[0], nn.Linear) else (2, 64, 16, 16)
    x = torch.randn(shape, requires_grad=True)
    torch.sgn(model(x)).sum().backward()
    for gradient in (x.grad, model[0].weight.grad, model[0].bias.grad):
        assert_same_bits(gradient.clone(), torch.zeros(gradient.shape))
    given = zeros(*shape)
    with torch.no_grad():
        assert_same_bits(model(given), model(torch.zeros(shape)))


def test_as_parameters():
    x, scale = torch.ones(4096, 8), torch.full((4096,), 0.02)
    zero_point, spec = torch._efficientzerotensor((4096,)), fq.QuantSpec.parse("uint8 per_channel(0) asymmetric")
    assert_same_bits(fq.fake_quantize(x, spec, scale=scale, zero_point=zero_point), torch.ones(4096, 8))
    codes, params = fq.quantize(x, spec, scale=scale, zero_point=zero_point)
    assert (codes == 50).all()
    given = fq.QParams(params.scale, torch._efficientzerotensor((4096, 1)))
    assert_same_bits(fq.dequantize(codes, given, spec), torch.ones(4096, 8))
    fq.fake_quantize_(x, spec, scale=scale, zero_point=zero_point)
    assert_same_bits(x, torch.ones(4096, 8))
    for call in (fq.fake_quantize, fq.fake_quantize_, fq.quantize):
        with pytest.raises(QParamsError, match="scale must be a positive, finite number in every group, got 0"):
            call(x, "int8", scale=torch._efficientzerotensor(()))
