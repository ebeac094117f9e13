import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import CalibrationError, DTypeError
from fakequant.numerics.qparams import choose_qparams, compute_dtype, is_concrete, is_readable_without_sync, measure
from tests.support import oracle
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES

TINY = torch.finfo(torch.float32).tiny
HUGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_range_of_every_group(where):
    x = torch.randn(where.shape)
    lo, hi = measure(x, where.granularity)
    assert lo.shape == hi.shape == where.groups
    for index in np.ndindex(*where.groups):
        block = x[tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, where.blocks, strict=True))]
        assert lo[index] == min(block.min().item(), 0.0)
        assert hi[index] == max(block.max().item(), 0.0)


def test_range_leaves_out_what_is_not_finite():
    x = torch.tensor([[1.0, float("nan"), -2.0], [float("inf"), -0.0, float("-inf")], [3.0, 4.0, HUGE]])
    lo, hi = measure(x, fq.PerChannel(0))
    assert_same_bits(lo, torch.tensor([[-2.0], [0.0], [0.0]]))
    assert_same_bits(hi, torch.tensor([[1.0], [0.0], [HUGE]]))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_range_of_nothing_is_zero(shape):
    for granularity in (fq.PerTensor(), fq.PerChannel(-1), fq.PerToken()):
        found = measure(torch.empty(shape), granularity)
        assert found.lo.shape == found.hi.shape == granularity.group_shape(shape)
        assert not found.hi.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_range_is_found_in_float32_and_needs_no_gradient(dtype):
    found = measure(torch.randn(8, dtype=dtype, requires_grad=True), fq.PerTensor())
    assert found.hi.dtype == torch.float32
    assert not found.hi.requires_grad
    assert measure(torch.randn(8).double(), fq.PerTensor()).hi.dtype == torch.float64


def ranges(lo, hi, dtype=torch.float32):
    return fq.Range(torch.tensor(lo, dtype=dtype), torch.tensor(hi, dtype=dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_symmetric_scale_maps_amax_to_the_bound(name):
    fmt = fq.QuantSpec(FORMATS[name].format).format
    amax = np.float32([1.0, 0.3, 1e-30, 1e30, 77.7])
    # amax goes to the highest code; where that is none (int1) or a table reaches farther down, to the lowest.
    is_table = isinstance(FORMATS[name].oracle, oracle.Values)
    bound = np.float32(max(fmt.quant_max, -fmt.quant_min) if is_table else fmt.quant_max or -fmt.quant_min)
    spec = fq.QuantSpec(fmt, symmetric=True)
    params = choose_qparams(fq.Range(torch.from_numpy(-amax * np.float32(0.5)), torch.from_numpy(amax)), spec)
    assert params.zero_point is None
    assert_same_bits(params.scale, torch.from_numpy(np.maximum(amax / bound, np.float32(TINY))))
    assert_same_bits(params.range.hi, torch.from_numpy(amax))
    assert_same_bits(params.range.lo, torch.from_numpy(-amax))
    multiplier = choose_qparams(params.range, spec.replace(arithmetic=fq.Arithmetic.MULTIPLIER))
    assert_same_bits(multiplier.scale, torch.from_numpy(np.minimum(bound / amax, np.float32(1 / TINY))))


@pytest.mark.parametrize("arithmetic", fq.Arithmetic, ids=lambda a: a.value)
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, TINY])
def test_no_scale_is_zero_and_no_zero_becomes_nan(arithmetic, amax):
    spec = fq.QuantSpec("int8", arithmetic=arithmetic)
    params = choose_qparams(ranges([-amax], [amax]), spec)
    assert (params.scale > 0).all()
    assert params.scale.isfinite().all()
    assert params.scale.reciprocal().isfinite().all()
    zeros = torch.tensor([0.0, -0.0])
    assert not fq.fake_quantize(zeros, spec).any()


@pytest.mark.parametrize(("lo", "hi"), [(-1.0, 3.0), (-3.0, 1.0), (0.0, 1.0), (-1.0, 0.0), (-1e-3, 255.0), (0.0, 0.0)])
@pytest.mark.parametrize("name", ["uint8", "int8", "uint4", "int[-100,37]", "uint1", "uint16"])
def test_asymmetric_range_keeps_zero_exact_and_covers_its_ends(name, lo, hi):
    spec = fq.QuantSpec(name, symmetric=False)
    params = choose_qparams(ranges([lo], [hi]), spec)
    assert params.zero_point.dtype == torch.int32
    assert spec.format.quant_min <= params.zero_point.item() <= spec.format.quant_max
    x = torch.tensor([0.0, lo, hi])
    y = fq.fake_quantize(x, spec, scale=params.scale, zero_point=params.zero_point)
    assert y[0] == 0.0
    # The ends are within half a step for the rounding of the zero point and half for that of the value.
    assert ((y - x).abs() <= params.scale * (1 + 1e-5)).all()


def test_huge_ranges_do_not_overflow():
    params = choose_qparams(ranges([-HUGE], [HUGE]), fq.QuantSpec("uint8"))
    assert params.scale.isfinite().all()
    for name in ("int8", "uint8", "int4", "uint4", "int16", "float8_e4m3fn", "float8_e5m2"):
        y = fq.fake_quantize(torch.tensor([HUGE, -HUGE, 0.0]), name)
        assert y.isfinite().all(), f"{name}: {y.tolist()}"


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "int8_narrow", "float8_e4m3fn"])
def test_float16_at_the_end_of_its_range_stays_finite(name):
    x = torch.tensor([65504.0, -65504.0, float("inf"), float("-inf"), 0.0], dtype=torch.float16)
    y = fq.fake_quantize(x, name)
    assert y.isfinite().all(), y.tolist()


def test_no_data_is_an_error():
    with pytest.raises(CalibrationError, match=r"no data was observed: the range has lo > hi \(lo=inf, hi=-inf\)"):
        choose_qparams(ranges([float("inf")], [float("-inf")]), fq.QuantSpec("int8"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_dtypes_that_cannot_be_quantized(dtype):
    with pytest.raises(DTypeError, match=f"cannot quantize a tensor of dtype {dtype}: expected float32.*x.float"):
        compute_dtype(dtype)


def test_has_values():
    assert is_concrete(torch.ones(1))
    assert is_concrete(torch.nn.Parameter(torch.ones(1)))
    assert not is_concrete(torch.ones(1, device="meta"))
    seen = []
    torch.func.vmap(lambda x: (seen.append(is_concrete(x)), x)[1])(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    doubled = 2 * x
    doubled.register_hook(lambda dy: seen.append(is_concrete(dy)))
    torch.autograd.grad(doubled, x, torch.eye(2), is_grads_batched=True)
    assert seen == [False, False]


def test_what_is_at_hand():
    assert is_readable_without_sync(torch.ones(1))
    for traced in (True, False):
        assert not is_readable_without_sync(torch.ones(1, device="meta"), traced=traced)
    seen = []
    torch.func.vmap(lambda x: (seen.append(is_readable_without_sync(x)), x)[1])(torch.ones(2))
    assert seen == [False]


def test_two_dimensional_tiles_have_their_own_ranges():
    x = torch.arange(16.0).view(4, 4)
    assert measure(x, fq.PerBlock({0: 2, 1: 2})).hi.tolist() == [[5.0, 7.0], [13.0, 15.0]]


@pytest.mark.parametrize(
    "spec",
    [
        "uint4 per_block(-1:32) scale=float16 offset=float16:signed",
        "uint4 per_block(-1:32) scale=float16 offset=float16",
        "uint8 per_channel(0)",
    ],
)
def test_an_empty_tensor_is_compiled(spec):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fq.fake_quantize(x, spec), backend="aot_eager", fullgraph=True)
    x = torch.randn(0, 256, requires_grad=True)
    assert compiled(x).shape == (0, 256)
    compiled(x).sum().backward()
    assert x.grad is not None
