"""Where the processor flushes subnormal numbers to 0, a scale among them is refused: kernels would divide by it."""

import pytest
import torch

import fakequant as fq
from fakequant.errors import QParamsError
from fakequant.ops.cpu.backend import load_kernels
from tests.support.bits import assert_same_bits

SUBNORMAL = 1e-38
# On more than one thread, of which only the calling one flushes.
LARGE = 200_000


@pytest.fixture
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def scales(dtype):
    tiny = torch.finfo(dtype).tiny / 2
    return {
        "per_tensor": torch.tensor(tiny, dtype=dtype),
        "per_channel(0)": torch.tensor([1.0, tiny, 2.0, tiny], dtype=dtype),
        "per_channel(1)": torch.full((LARGE // 4,), tiny, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("granularity", scales(torch.float32))
@pytest.mark.parametrize("arithmetic", ["divide", "reciprocal", "multiplier"])
@pytest.mark.parametrize("function", [fq.fake_quantize, fq.fake_quantize_, fq.quantize], ids=lambda f: f.__name__)
def test_a_scale_that_is_flushed_is_refused(threads, function, arithmetic, granularity, dtype, request):
    scale = scales(dtype)[granularity]
    x = torch.full((4, LARGE // 4), 3e-39, dtype=dtype)
    request.getfixturevalue("flushing")
    with pytest.raises(QParamsError, match=r"positive, finite number.*set_flush_denormal.*give a larger scale"):
        function(x, f"int8 {granularity} {arithmetic}", scale=scale)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_number_that_is_flushed_is_refused(flushing, requires_grad):
    x = torch.randn(8, requires_grad=requires_grad)
    with pytest.raises(QParamsError, match=r"set_flush_denormal|is 0 in torch.float32"):
        fq.fake_quantize(x, "int8", scale=SUBNORMAL)


def test_a_subnormal_scale_is_taken_where_nothing_is_flushed(threads):
    scale = torch.tensor(SUBNORMAL)
    x = (3 * scale).expand(LARGE).contiguous()
    assert_same_bits(fq.fake_quantize(x, "int8", scale=scale), x)


def test_normal_scales_give_the_same_bits(flushing, threads):
    x = torch.randn(LARGE)
    found = fq.fake_quantize(x, "int8", scale=0.01)
    torch.set_flush_denormal(False)
    assert_same_bits(found, fq.fake_quantize(x, "int8", scale=0.01))


def test_other_wrong_scales_are_named_as_before(flushing):
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(QParamsError, match="scale must be a positive, finite number"):
            fq.fake_quantize(torch.randn(4), "int8", scale=torch.tensor(scale))


@pytest.mark.skipif(
    load_kernels() is not None, reason="torch's own operations flush, and the kernels are not built here"
)
@pytest.mark.parametrize("scale", [None, torch.finfo(torch.float32).tiny])
@pytest.mark.parametrize(
    "spec",
    [
        "int8",
        "uint8 per_token",
        "float8_e4m3fn per_channel(-1)",
        "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:even",
        "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    ],
)
def test_kernels_compute_with_subnormal_numbers(threads, spec, scale, request):
    x = torch.randn(128, 1024)
    x[::3] = 0.0  # whose scale is 2**-127 in formats of powers of two
    x[1::3] *= 2.0**-128
    given = {}
    if scale is not None:
        given = {"scale": torch.full_like(fq.choose_qparams(x, spec).scale, scale)}
    right = fq.fake_quantize(x, spec, **given)
    request.getfixturevalue("flushing")
    found = fq.fake_quantize(x, spec, **given)
    torch.set_flush_denormal(False)
    assert_same_bits(found, right)
