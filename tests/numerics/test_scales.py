"""Scales in formats of their own against formulas written here in numpy, from the sources named beside them."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fakequant as fq
from fakequant.errors import QParamsError, SpecError
from fakequant.numerics.formats import parse_format
from fakequant.numerics.granularity import rounded
from fakequant.numerics.scales import OffsetSpec, ScaleRounding, ScaleSpec
from tests.support.bits import assert_same_bits

E8M0 = "float8_e8m0fnu"
NVFP4 = fq.QuantSpec(
    "float4_e2m1fn", fq.PerBlock({-1: 16}), scale=ScaleSpec("float8_e4m3fn", granularity=fq.PerTensor())
)
# Every element format of OCP Microscaling 1.0, table 1, with its largest number and its number of mantissa bits.
ELEMENTS = {
    "float8_e4m3fn": (448.0, 3),
    "float8_e5m2": (57344.0, 2),
    "float6_e3m2fn": (28.0, 2),
    "float6_e2m3fn": (7.5, 3),
    "float4_e2m1fn": (6.0, 1),
    "int8_narrow": (127.0, 6),
}
BLOCK = 32


def mx(name, rounding, granularity=None):
    return fq.QuantSpec(name, granularity or fq.PerBlock({-1: BLOCK}), scale=ScaleSpec(E8M0, rounding))


def fp4(v):
    """Magnitudes to the nearest of {0, .5, 1, 1.5, 2, 3, 4, 6}; the comparisons are those of NVIDIA's kernel."""
    conditions = [v <= 0.25, v < 0.75, v <= 1.25, v < 1.75, v <= 2.5, v < 3.5, v <= 5.0]
    return np.select(conditions, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0], 6.0).astype(np.float32)


def element(v, name):
    """float32 in units of codes to the numbers of an element format: nearest, ties to even, saturating."""
    largest = np.float32(ELEMENTS[name][0])
    if name == "float4_e2m1fn":
        return np.copysign(fp4(np.abs(v)), v)
    if name == "int8_narrow":
        return np.clip(np.rint(v), -largest, largest) + np.float32(0)
    return np.clip(v, -largest, largest).astype(getattr(ml_dtypes, name)).astype(np.float32)


def exponent_field(x):
    """floor(log2(x)) of float32 by its bits; -127 for subnormals and zero."""
    return (x.view(np.int32) >> 23) - 127


def floor_rule(amax, name):
    """OCP Microscaling 1.0, 6.3: floor(log2(amax)) - floor(log2(largest element))."""
    return exponent_field(amax) - int(exponent_field(np.float32(ELEMENTS[name][0])))


def ceil_rule(amax, name):
    """NVIDIA: ceil(log2(amax / largest element)) of the float32 quotient."""
    quotient = amax / np.float32(ELEMENTS[name][0])
    normal = exponent_field(quotient) + (quotient.view(np.int32) & 0x7FFFFF != 0)
    return np.where(quotient < 2.0**-126, np.where(quotient > 2.0**-127, -126, -127), normal)


def even_rule(amax, name, digits=None):
    """Half a unit in the last place of the element's mantissa is added to amax's bits before the floor."""
    half = 1 << 23 - (digits or ELEMENTS[name][1]) - 1
    return floor_rule((amax.view(np.int32) + half).view(np.float32), name)


def even_fp4_rule(amax, name):
    """compressed-tensors' `round_to_power_2` with its mantissa of 1 digit for MXFP8, too."""
    return even_rule(amax, name, digits=1)


RULES = {
    ScaleRounding.FLOOR: floor_rule,
    ScaleRounding.CEIL: ceil_rule,
    ScaleRounding.EVEN: even_rule,
    ScaleRounding.EVEN_FP4: even_fp4_rule,
}


def mx_formula(x, name, rounding):
    """Blocks [n, 32] through a power-of-two scale: times 2^-e, rounded, times 2^e."""
    amax = np.abs(x).max(1, keepdims=True)
    exponent = np.where(amax > 0, np.clip(RULES[rounding](amax, name), -127, 127), -127).astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        # Both powers as float64: 2**-127 is subnormal in float32; each product is rounded to float32 once.
        scaled = (x.astype(np.float64) * 2.0**-exponent).astype(np.float32)
        return (element(scaled, name).astype(np.float64) * 2.0**exponent).astype(np.float32)


def hostile_blocks(rows, block, lowest, highest, seed=0):
    """Blocks of normal numbers at magnitudes 2**lowest to 2**highest, many with an amax at or one ulp beside a power
    of two or the power times a format's largest number; every eighth block is zeros, or subnormal, or has an outlier.
    """
    random = np.random.default_rng(seed)
    magnitude = 2.0 ** random.integers(lowest, highest, (rows, 1)).astype(np.float64)
    x = (random.normal(size=(rows, block)) * magnitude / 6).astype(np.float32)
    largest = random.choice([1.0, 1.5, 1.75, 1.875, 1.984375, 127 / 64], (rows, 1))
    top = np.float32(magnitude * largest)
    top = (top.view(np.int32) + random.integers(-1, 2, (rows, 1)).astype(np.int32)).view(np.float32)
    x[:, :1] = np.where(random.random((rows, 1)) < 0.5, top, x[:, :1])
    # Ties of the coarser formats: quarters of the block's magnitude.
    coarse = np.float32(random.integers(-16, 17, x.shape) / 8 * magnitude)
    x = np.where(random.random(x.shape) < 0.2, coarse, x)
    kind = random.integers(0, 32, rows)
    x[kind == 0] = 0.0
    x[kind == 1] = -0.0
    x[kind == 2] = random.integers(-(2**23), 2**23, x.shape)[kind == 2].astype(np.float32) * np.float32(2.0**-149)
    x[kind == 3, -1] *= np.float32(1000.0)
    return np.ascontiguousarray(x)


@pytest.mark.parametrize("rounding", RULES, ids=lambda r: r.value)
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_over_a_million_values_is_the_formulas(name, rounding):
    x = hostile_blocks(2**20 // BLOCK, BLOCK, -140, 115)
    assert x.size >= 1_000_000
    assert np.isfinite(x).all()
    y = fq.fake_quantize(torch.from_numpy(x), mx(name, rounding))
    assert_same_bits(y, torch.from_numpy(mx_formula(x, name, rounding)))


def test_rules_at_powers_of_two():
    """The exponents themselves, at 1, one ulp beside it, and where amax is the largest number of E2M1 times a power."""
    amax = np.float32([1.0, np.nextafter(np.float32(1), 0), np.nextafter(np.float32(1), 2), 6.0, 6.0000005, 7.0, 7.5])
    wanted = {
        ScaleRounding.FLOOR: [-2, -3, -2, 0, 0, 0, 0],
        ScaleRounding.CEIL: [-2, -2, -2, 0, 1, 1, 1],
        ScaleRounding.EVEN: [-2, -2, -2, 0, 0, 1, 1],
    }
    for rounding, exponents in wanted.items():
        scale = fq.choose_qparams(torch.from_numpy(amax)[:, None], mx("float4_e2m1fn", rounding, fq.PerToken())).scale
        assert_same_bits(scale[:, 0], 2.0 ** torch.tensor(exponents, dtype=torch.float32))


def test_an_amax_whose_quotient_underflows_gets_the_smallest_scale():
    x = torch.full((1, BLOCK), 1e-41)
    for name in ELEMENTS:
        scale = fq.choose_qparams(x, mx(name, ScaleRounding.CEIL)).scale
        assert scale.item() == 2.0**-127, f"{name}: {scale.item()}"


def test_nothing_saturates_under_ceil_and_something_does_under_floor():
    x = torch.from_numpy(hostile_blocks(1000, BLOCK, -3, 4))
    for name, (largest, _) in ELEMENTS.items():
        beyond = {}
        for rounding in RULES:
            scale = fq.choose_qparams(x, mx(name, rounding)).scale
            # One ulp: the quotient amax / largest is rounded before the rule sees it.
            beyond[rounding] = (x.abs().amax(1, keepdim=True) / scale > largest * (1 + 2**-23)).any()
        assert not beyond[ScaleRounding.CEIL]
        assert beyond[ScaleRounding.FLOOR] or name == "int8_narrow"


def nvfp4_formula(x, *, ours):
    """NVIDIA's NVFP4 of blocks [n, 16] and where its branch for small scales was taken.

    g = amax / (6 * 448); s = E4M3(min(amax_block / (6 g), 448)) * g; s < 1e-5 becomes 1. `ours` replaces that last
    step: a code of 0 becomes the smallest one, 2**-9.
    """
    g = np.float32(max(np.abs(x).max() / np.float32(6 * 448), np.finfo(np.float32).tiny))
    code = np.minimum(np.abs(x).max(1, keepdims=True) / (np.float32(6) * g), np.float32(448))
    code = code.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    small = code * g < np.float32(1e-5)
    s = np.maximum(code, np.float32(2.0**-9)) * g if ours else np.where(small, np.float32(1), code * g)
    s = np.maximum(s, np.finfo(np.float32).tiny)
    return np.copysign(fp4(np.abs(x) / s) * s, x), np.broadcast_to(small, x.shape)


# (lowest, highest) exponent of the blocks of one tensor.
NVFP4_RANGES = {"weights": (-6, 0), "wide": (-18, 0), "large": (20, 30), "huge": (100, 115), "tiny": (-130, -120)}


@pytest.mark.parametrize("where", NVFP4_RANGES)
def test_nvfp4_over_a_million_values_is_the_formula(where):
    taken = 0
    for seed in range(5):
        x = hostile_blocks(2**20 // 16 // 5 + 1, 16, *NVFP4_RANGES[where], seed)
        y = fq.fake_quantize(torch.from_numpy(x), NVFP4)
        assert_same_bits(y, torch.from_numpy(nvfp4_formula(x, ours=True)[0]))
        theirs, small = nvfp4_formula(x, ours=False)
        plain = torch.from_numpy(~small)
        assert_same_bits(y[plain], torch.from_numpy(theirs)[plain])
        taken += int(small.sum())
    if where == "tiny":
        assert taken == 5 * x.size  # NVIDIA's constant makes all such tensors zeros
    elif where != "weights":
        assert 0 < taken < 5 * x.size


def test_nvfp4_keeps_small_blocks_that_nvidia_drops():
    x = torch.zeros(2, 16)
    x[0, 0], x[1] = 1.0, 2.0**-19
    y = fq.fake_quantize(x, NVFP4)
    assert y[1, 0] > 0
    theirs, small = nvfp4_formula(x.numpy(), ours=False)
    assert small[1].all()
    assert not theirs[1].any()


def test_scales_of_scales_may_have_any_granularity():
    """Each row with a float32 scale of its own is each row alone under one per tensor."""
    x = torch.from_numpy(hostile_blocks(64, 64, -6, 6))
    per_row = NVFP4.replace(scale=ScaleSpec("float8_e4m3fn", granularity=fq.PerToken()))
    rows = torch.stack([fq.fake_quantize(row, NVFP4) for row in x])
    assert_same_bits(fq.fake_quantize(x, per_row), rows)


@pytest.mark.parametrize("name", ["int4", "nf4", "float4_e2m1fn"])
def test_integer_scales_per_block_of_scales(name):
    """Double quantization: 4 blocks of 16 share a float32 scale, and each has an unsigned 6-bit code under it."""
    bound = np.float32({"int4": 7, "nf4": 1, "float4_e2m1fn": 6}[name])
    x = hostile_blocks(500, 64, -6, 6)
    spec = fq.QuantSpec(name, fq.PerBlock({-1: 16}), scale=ScaleSpec("uint6", granularity=fq.PerBlock({-1: 4})))
    amax = np.abs(x).reshape(500, 4, 16).max(2)
    tiny = np.finfo(np.float32).tiny
    shared = np.maximum(amax.max(1, keepdims=True) / np.float32(63 * bound), tiny)
    codes = np.clip(np.rint(amax / (bound * shared)), 1, 63)
    scale = torch.from_numpy(np.maximum(codes * shared, tiny))
    assert_same_bits(fq.choose_qparams(torch.from_numpy(x), spec).scale, scale)
    plain = spec.replace(scale=ScaleSpec())
    y = fq.fake_quantize(torch.from_numpy(x), spec)
    assert_same_bits(y, fq.fake_quantize(torch.from_numpy(x), plain, scale=scale))


ALL_SCALES = {
    **{f"{name} {rounding.value}": mx(name, rounding) for name in ELEMENTS for rounding in RULES},
    "nvfp4": NVFP4,
    "int4 float32 scales": fq.QuantSpec("int4", fq.PerBlock({-1: 32})),
    "nf4 integer scales": fq.QuantSpec(
        "nf4", fq.PerBlock({-1: 32}), scale=ScaleSpec("uint8", granularity=fq.PerTensor())
    ),
}


@pytest.mark.parametrize("width", [1, 31, 32, 33, 50, 95])
@pytest.mark.parametrize("name", ALL_SCALES)
def test_a_padded_last_block_is_that_of_the_padded_tensor(name, width):
    spec = ALL_SCALES[name]
    size = spec.granularity.sizes[0][1]
    x = torch.from_numpy(hostile_blocks(40, width, -6, 6))
    padded = F.pad(x, (0, -width % size))
    ragged = spec.replace(granularity=fq.PerBlock({-1: size}, pad=True))
    assert_same_bits(fq.fake_quantize(x, ragged), fq.fake_quantize(padded, spec)[:, :width])
    codes, params = fq.quantize(x, ragged)
    assert_same_bits(codes, fq.quantize(padded, spec)[0][:, :width])
    assert_same_bits(fq.dequantize(codes, params, ragged), fq.fake_quantize(x, ragged))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALL_SCALES)
def test_zeros_and_extremes_never_become_nan_or_inf(name, dtype):
    spec, info = ALL_SCALES[name], torch.finfo(dtype)
    for value in (0.0, -0.0, info.tiny, info.smallest_normal * info.eps, info.max, -info.max, float("inf")):
        x = torch.zeros(4, 32, dtype=dtype)
        x[0, 0], x[1] = value, value
        y = fq.fake_quantize(x, spec)
        assert y.isfinite().all(), f"{value}: {y}"
        assert not y[2:].any()
        scale = fq.choose_qparams(x, spec).scale
        assert (scale > 0).all()
        assert scale.isfinite().all()


@pytest.mark.parametrize("name", ALL_SCALES)
def test_nan_and_inf_cost_themselves_and_not_their_block(name):
    spec = ALL_SCALES[name]
    x = torch.from_numpy(hostile_blocks(20, 64, -3, 3))
    clean = x.clone()
    clean[3, 7], clean[5, 40] = 0.0, 0.0
    x[3, 7], x[5, 40] = float("nan"), float("inf")
    y, right = fq.fake_quantize(x, spec), fq.fake_quantize(clean, spec)
    assert y[3, 7].isnan()
    assert y[5, 40] > 0
    y[3, 7], y[5, 40] = right[3, 7], right[5, 40]
    assert_same_bits(y, right)


@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0)], ids=str)
@pytest.mark.parametrize("name", ALL_SCALES)
def test_empty(name, shape):
    assert fq.fake_quantize(torch.empty(shape), ALL_SCALES[name]).shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL_SCALES)
def test_half_precision_is_float32_rounded_once(name, dtype):
    x = torch.from_numpy(hostile_blocks(100, 64, -6, 6)).to(dtype)
    assert_same_bits(fq.fake_quantize(x, ALL_SCALES[name]), fq.fake_quantize(x.float(), ALL_SCALES[name]).to(dtype))


ERRORS = [
    (lambda: ScaleSpec(E8M0, ScaleRounding.NEAREST), r"rounded by floor, ceil, even or even_fp4, not by nearest"),
    (
        lambda: ScaleSpec("float8_e4m3fn", ScaleRounding.CEIL, fq.PerTensor()),
        r"e4m3fn are .*nearest, .* not by ce",
    ),
    (lambda: ScaleSpec(None, ScaleRounding.FLOOR), r"float32 are rounded by nearest, half_range or mean, not by floor"),
    (lambda: ScaleSpec(granularity=fq.PerTensor()), r"scales in float32 need no shared scale; leave the gran"),
    (lambda: ScaleSpec(E8M0, granularity=fq.PerTensor()), r"scales in float8_e8m0fnu need no shared scale"),
    (lambda: ScaleSpec("uint8"), r"scales in uint8 reach 255 at most and need a shared scale: .*uint8@per_block"),
    (lambda: ScaleSpec("nf4", granularity=fq.PerTensor()), r"nf4"),
    (lambda: ScaleSpec("int8"), r"scales in int8 reach 127 at most and need a shared scale: .*int8@per_block"),
    (lambda: ScaleSpec.parse("scale=int8:nearest@per_tensor"), r"int8 are rounded by signed, not by nearest"),
    (lambda: ScaleSpec.parse("scale=float16/float16"), r"unknown format 'float16/float16'"),
    (lambda: ScaleSpec("float16", shared="float16"), r"expected a float format after a granularity, such as"),
    (lambda: ScaleSpec.parse("scale=uint6@per_tensor/uint8"), r"uint8 for the shared scale of scales in uint6: exp"),
    (lambda: ScaleSpec.parse("scale=float8_e4m3fn:four_over_six@per_tensor/float16"), r"leave /float16 out"),
    (lambda: ScaleSpec.parse("scale=float16:searched"), r"searched scales need a shared scale in float32: give its g"),
    (
        lambda: ScaleSpec.parse("scale=float8_e4m3fn:searched@per_tensor/float16"),
        r"searched scales need a shared scale in fl",
    ),
    (lambda: OffsetSpec.parse("offset=float16:mean"), r"in float16 are rounded by nearest or signed, not by mean"),
    (lambda: OffsetSpec.parse("offset=uint6:signed@per_tensor/float16"), r"rounded by nearest, not by signed"),
    (lambda: OffsetSpec.parse("offset=float8_e4m3fn:signed@per_tensor/float16"), r"leave @per_tensor out"),
    (lambda: OffsetSpec.parse("offset=uint6@per_tensor"), r"offsets in uint6 need a shared scale .* such as /float16"),
    (lambda: fq.QuantSpec.parse("int4 offset=float16"), r"codes that begin at 0, got int4 .*; use an unsigned"),
    (lambda: fq.QuantSpec.parse("uint4 symmetric offset=float16"), r"uint4 with symmetric=True; use an unsigned"),
    (lambda: fq.QuantSpec.parse("uint4 scale=float16:signed"), r"for symmetric specifications with DIVIDE or RECIP"),
    (
        lambda: fq.QuantSpec.parse("uint4 symmetric scale=float32:half_range"),
        r"for signed formats; leave half_ra",
    ),
    (lambda: ScaleSpec("uint8", granularity="per_tensor"), r"granularity.*'per_tensor'"),
    (lambda: ScaleSpec("float8_e8m0"), r"unknown format 'float8_e8m0'; did you mean float8_e8m0fnu"),
    (lambda: ScaleSpec.parse("scale=nothing"), r"unknown format 'nothing'"),
    (
        lambda: ScaleSpec.parse(f"scale={E8M0}:flor"),
        r"cannot read the scale format 'scale=.*:flor': 'flor'",
    ),
    (lambda: ScaleSpec.parse("scale=float8_e4m3fn@per_tenser"), r"unknown granularity 'per_tenser'; did you mean"),
    (lambda: fq.QuantSpec(E8M0), r"float8_e8m0fnu has no code for 0.0: it is a format for scales, see ScaleSpec"),
    (
        lambda: fq.QuantSpec("uint8", fq.PerBlock({-1: 32}), scale=ScaleSpec(E8M0)),
        r"scales in float8_e8m0fnu are for symmetric specifications with DIVIDE or RECIPROCAL",
    ),
    (
        lambda: fq.QuantSpec("int8", arithmetic=fq.Arithmetic.MULTIPLIER, scale=ScaleSpec(E8M0)),
        r"for symmetric specifications with DIVIDE or RECIPROCAL; leave the scale format out",
    ),
]


@pytest.mark.parametrize(("make", "message"), ERRORS)
def test_errors(make, message):
    with pytest.raises(SpecError, match=message):
        make()


GRANULARITIES = st.one_of(
    st.just(fq.PerTensor()),
    st.just(fq.PerToken()),
    st.lists(st.integers(-4, 4), min_size=1, max_size=3).map(lambda axes: fq.PerChannel(*axes)),
    st.builds(
        lambda sizes, pad: fq.PerBlock(sizes, pad=pad),
        st.dictionaries(st.integers(-4, 4), st.integers(1, 300), min_size=1, max_size=3),
        st.booleans(),
    ),
)
SCALES = st.one_of(
    st.just(ScaleSpec()),
    st.sampled_from(list(RULES)).map(lambda rounding: ScaleSpec(E8M0, rounding)),
    st.builds(
        lambda name, where: ScaleSpec(name, granularity=where),
        st.sampled_from(["float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "uint8", "uint4"]),
        GRANULARITIES,
    ),
)
SPECS = st.builds(
    lambda name, where, options, scale: fq.QuantSpec(name, where, symmetric=True, scale=scale, **options),
    st.sampled_from([name for name, fmt in fq.formats().items() if fmt.has_zero]),
    GRANULARITIES,
    st.fixed_dictionaries(
        {
            "arithmetic": st.sampled_from([fq.Arithmetic.DIVIDE, fq.Arithmetic.RECIPROCAL]),
            "gradient": st.sampled_from(list(fq.Gradient)),
        }
    ),
    SCALES,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SPECS)
def test_specifications_with_scales_go_to_text_and_dicts_and_back(spec):
    assert fq.QuantSpec.parse(str(spec)) == spec
    assert fq.QuantSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert ScaleSpec.parse(str(spec.scale)) == spec.scale
    assert fq.TensorConfig.parse(str(fq.TensorConfig(spec, dynamic=True))) == fq.TensorConfig(spec, dynamic=True)
    assert hash(fq.QuantSpec.parse(str(spec))) == hash(spec)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_torchs_conversion_rounds_as_the_format_says(name: str) -> None:
    fmt = parse_format(name)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(fmt.storage)
    codes = fmt.from_storage(patterns, torch.float32)
    assert torch.equal(codes.double().nan_to_num(), fmt.from_storage(patterns, torch.float64).nan_to_num())
    numbers = codes.isfinite()
    assert torch.equal(fmt.to_storage(codes[numbers]).view(torch.int16), patterns[numbers].view(torch.int16))
    assert (fmt.to_storage(codes[~numbers]).view(torch.int16) == fmt.nan_pattern).all()
    half = 1 + 2.0 ** -(fmt.fraction_bits + 1)  # ties, and one unit of float32 beside them
    words = torch.randint(-(2**31), 2**31 - 1, (10**5,), generator=torch.Generator().manual_seed(0)).int()
    v = torch.cat([codes * half, torch.nextafter(codes * half, codes), codes * 0.75, words.view(torch.float32)])
    expected = fmt.round(fmt.clamp(v))
    assert_same_bits(rounded(v, fmt)[~v.isnan()], expected[~v.isnan()])
    assert rounded(v, fmt)[v.isnan()].isnan().all()


def test_scales_that_are_inf_have_no_stored_form() -> None:
    for text in ("scale=float16", "scale=bfloat16", "scale=float8_e5m2"):
        with pytest.raises(QParamsError, match="not in the form"):
            ScaleSpec.parse(text).split(torch.tensor([[1.0, math.inf]]))
