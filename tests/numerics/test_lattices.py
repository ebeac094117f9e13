"""Scales, offsets and tables as engines store them: against numpy and gguf, split and joined, with hostile input."""

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.delivery.gguf import blocks as gguf_blocks
from fakequant.errors import ConfigError, QParamsError, ShapeError, SpecError
from fakequant.numerics import reference
from fakequant.numerics.reference import is_less, is_less_by_plain_sums
from fakequant.numerics.scales import OffsetSpec, ScaleSpec, StoredScales
from fakequant.ops.dispatch import backends
from tests.support.bits import assert_same_bits
from tests.support.lattices import ALL, LATTICES, hostile, weights

T = torch.tensor


@pytest.mark.parametrize("name", ALL)
def test_texts_and_dicts_come_back(name):
    spec = fq.QuantSpec.parse(ALL[name])
    assert str(spec) == ALL[name]
    assert fq.QuantSpec.from_dict(spec.to_dict()) == spec == fq.QuantSpec.parse(str(spec))
    assert hash(spec) == hash(fq.QuantSpec.from_dict(spec.to_dict()))
    assert eval(repr(spec.scale), {"ScaleSpec": ScaleSpec, "OffsetSpec": OffsetSpec}) == spec.scale


def numbers_of(name, codes, params):
    spec = fq.QuantSpec.parse(LATTICES[name])
    layout = gguf_blocks.LAYOUTS[name]
    scales = spec.scale.split(params.scale)
    found = {"codes": codes.numpy().reshape(-1, layout.weights)}
    halfs = [("d", scales)]
    if "scales" in layout.integers:
        found["scales"] = scales.codes.numpy().reshape(len(found["codes"]), -1)
    if spec.offset is not None:
        offsets = spec.offset.split(params.zero_point)
        if "minima" in layout.integers:
            found["minima"] = offsets.codes.numpy().reshape(len(found["codes"]), -1)
        halfs.append(("m", offsets if "minima" in layout.integers else StoredScales(-offsets.codes)))
    for key, stored in halfs:
        whole = stored.codes if stored.shared is None else stored.shared
        found[key] = whole.to(torch.float16).numpy().reshape(-1)
        assert np.array_equal(found[key].astype(np.float32), whole.float().numpy().reshape(-1))
    return found


@pytest.mark.parametrize("name", LATTICES)
def test_the_package_gguf_reads_the_simulated_values(name):
    gguf = pytest.importorskip("gguf")
    x = hostile()
    x[10:] = weights(6, 512, seed=1)
    codes, params = fq.quantize(x, LATTICES[name])
    raw = gguf_blocks.pack(name, numbers_of(name, codes, params))
    read = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(x.shape)
    # Under d = 0 the sign of 0 is that of the code.
    assert_same_bits(fq.fake_quantize(x, LATTICES[name]) + 0.0, torch.from_numpy(read) + 0.0)


def chosen(name, x):
    """d, sc, dmin, m and values of a K-quant by their definition, in numpy: float16 above integers, min-max."""
    fmt, block, bits = {"Q4_K": (15, 32, 63), "Q2_K": (3, 16, 15), "Q5_K": (31, 32, 63)}[name]
    f32, f16 = np.float32, np.float16
    x = x.numpy().reshape(-1, 256 // block, block)
    lo, hi = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    dmin = ((-lo).max(-1, keepdims=True) / f32(bits)).astype(f16).astype(f32)
    m = np.rint(-lo / dmin) * dmin
    d = ((hi + m).max(-1, keepdims=True) / f32(fmt * bits)).astype(f16).astype(f32)
    sc = np.clip(np.rint((hi + m) / (f32(fmt) * d)), 1, bits)
    s = (d * sc)[..., None]
    q = np.clip(np.rint((x + m[..., None]) / s), 0, fmt)
    return (q * s - m[..., None]).astype(f32)


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "Q5_K"])
def test_k_quants_are_chosen_as_numpy_chooses(name):
    x = weights(8, 512)
    assert_same_bits(fq.fake_quantize(x, LATTICES[name]), torch.from_numpy(chosen(name, x)).reshape(x.shape))


@pytest.mark.parametrize(("name", "far"), [("Q4_0", -8), ("Q5_0", -16), ("IQ4_NL", -127)])
def test_signed_scales_give_the_extreme_the_farthest_code(name, far):
    x = weights(16, 256)
    view = x.numpy().reshape(16, -1, 32)
    extreme = np.take_along_axis(view, np.abs(view).argmax(-1)[..., None], -1)[..., 0]
    d = (extreme / np.float32(far)).astype(np.float16).astype(np.float32)
    params = fq.choose_qparams(x, LATTICES[name])
    assert_same_bits(params.scale, torch.from_numpy(d))
    assert (params.scale < 0).any()
    assert (params.scale > 0).any()


@pytest.mark.parametrize(("name", "far"), [("Q6_K", -128), ("Q3_K", -32), ("IQ4_XS", -32)])
def test_the_farthest_signed_scale_gets_the_farthest_scale_code(name, far):
    x = weights(8, 512)
    spec = fq.QuantSpec.parse(LATTICES[name])
    codes = spec.scale.split(fq.choose_qparams(x, spec).scale).codes
    assert (codes.reshape(8, 2, -1).amin(-1) == far).all()


@pytest.mark.parametrize("name", ALL)
def test_hostile_values(name):
    x, spec = hostile(), fq.QuantSpec.parse(ALL[name])
    codes, params = fq.quantize(x, spec)
    y = fq.fake_quantize(x, spec)
    assert y.isnan().nonzero().tolist() == [[13, 300]] if name != "plain_offset" else True
    finite = ~x.isnan()
    assert_same_bits(fq.dequantize(codes, params, spec)[finite], y[finite])
    assert y[finite].isfinite().all()
    assert not y[0].any(), "zeros stay zeros"
    assert not y[1, :256].any() or name in ("per_channel", "plain_offset")
    assert_same_bits(y, fq.fake_quantize(x, spec, scale=params.scale, zero_point=params.zero_point))
    again = fq.fake_quantize(y, spec, scale=params.scale, zero_point=params.zero_point)
    assert torch.equal(again[finite], y[finite]), "quantized values stay"
    wide = torch.stack([x, x], -1)[..., 0]
    assert not wide.is_contiguous()
    assert_same_bits(fq.fake_quantize(wide, spec), y)


@pytest.mark.parametrize("bits", [2, 4])
def test_signed_offsets_are_the_lowest_values(bits):
    """KIVI's formula: the lowest value and (highest - lowest) / (2**bits - 1) of each group, in float16."""
    x = weights(64, 8) + 20 * weights(1, 8, seed=1)
    groups, last = x.numpy().reshape(2, 32, 8), 2**bits - 1
    low = groups.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((groups.max(1, keepdims=True) - low) / np.float32(last)).astype(np.float16).astype(np.float32)
    expected = np.clip(np.rint((groups - low) / step), 0, last).astype(np.float32) * step + low
    spec = f"uint{bits} per_block(0:32) scale=float16 offset=float16:signed"
    found = fq.fake_quantize(x, spec)
    assert_same_bits(found, torch.from_numpy(expected.reshape(64, 8)))
    plain = fq.fake_quantize(x, spec.replace(":signed", ""))
    assert (found - x).square().sum() < (plain - x).square().sum() / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_other_dtypes(name, dtype):
    x = hostile().to(dtype)
    y = fq.fake_quantize(x, ALL[name])
    assert y.dtype is dtype
    assert y[~x.isnan()].isfinite().all()
    if dtype is not torch.float64:
        expected = fq.fake_quantize(x.float(), ALL[name]).to(dtype)
        assert_same_bits(y[:10], expected[:10])


def test_no_value_of_float16_becomes_infinite():
    x = torch.full((1, 256), 65504.0, dtype=torch.float16)
    x[0, ::3] = -65504.0
    for text in ALL.values():
        params = fq.choose_qparams(x, text)
        assert fq.fake_quantize(x, text).isfinite().all(), text
        spec = fq.QuantSpec.parse(text)
        spec.scale.split(params.scale)  # on the lattice


@pytest.mark.parametrize("name", ALL)
def test_scales_are_split_and_joined(name):
    spec, x = fq.QuantSpec.parse(ALL[name]), hostile()
    params = fq.choose_qparams(x, spec)
    for stored, values in ((spec.scale, params.scale), (spec.offset, params.zero_point)):
        if stored is not None:
            parts = stored.split(values)
            assert_same_bits(stored.join(parts) + 0.0, values + 0.0)
            assert parts.codes.shape == values.shape
            again = stored.split(stored.join(parts))
            assert torch.equal(again.codes, parts.codes)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_codes_of_any_scales_are_found(name):
    """Not only those with the farthest code: zeros, few codes, and shared scales that are 0, subnormal or negative."""
    scale = fq.QuantSpec.parse(LATTICES[name]).scale
    rng, fmt, size = np.random.default_rng(0), scale.format, dict(scale.granularity.sizes)[-1]
    codes = torch.from_numpy(rng.integers(int(fmt.quant_min), int(fmt.quant_max) + 1, (200, size)))
    codes[:20] = codes[:20] // 8 * 2
    shared = torch.from_numpy(rng.normal(size=(200, 1)).astype(np.float16)).float().abs()
    shared[:4, 0] = T([0, 2.0**-24, 65504, 2.0**-15])
    if fmt.signed:
        shared[30:60] *= -1
    values = scale.join(StoredScales(codes.to(fmt.storage), shared))
    parts = scale.split(values)
    assert torch.equal(parts.codes.float() * parts.shared, values)
    full = (codes == fmt.farthest).any(1)  # of such there is one way, if all codes of a block fit
    assert full.any()
    assert_same_bits(parts.shared[full & (shared[:, 0] > 0)], shared[full & (shared[:, 0] > 0)])


def test_shared_float32_scales_are_found():
    spec = fq.QuantSpec.parse("float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor")
    for seed in range(20):
        x = weights(64, 256, seed=seed) * 0.02
        scale = fq.choose_qparams(x, spec).scale
        parts = spec.scale.split(scale)
        assert_same_bits(spec.scale.join(parts), scale)
        assert_same_bits(parts.shared.reshape(()), x.abs().max() / (6.0 * 448.0))


def test_other_scales_have_no_codes():
    for text in (LATTICES["Q4_K"], LATTICES["Q4_0"]):
        with pytest.raises(QParamsError, match=r"scales of shape \[1, 8\] are not in the form scale="):
            fq.QuantSpec.parse(text).scale.split(torch.linspace(0.1, 0.7, 8)[None])


@pytest.mark.parametrize("name", LATTICES)
def test_rows_that_blocks_do_not_divide_are_refused(name):
    for columns in (16, 100, 0):
        if name in ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "IQ4_NL") and columns == 0:
            continue
        if columns:
            with pytest.raises(ShapeError, match=r"no multiple of"):
                fq.fake_quantize(weights(2, columns), LATTICES[name])
    assert fq.fake_quantize(weights(0, 256), LATTICES[name]).shape == (0, 256)
    padded = LATTICES[name].replace(")", ",pad)")
    y = fq.fake_quantize(weights(2, 100), padded)
    longer = torch.zeros(2, 256)
    longer[:, :100] = weights(2, 100)
    assert_same_bits(y, fq.fake_quantize(longer, LATTICES[name])[:, :100])


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("ue4m3",)])
def test_gradients_of_x_scale_and_offset(name):
    x, spec = weights(4, 512), fq.QuantSpec.parse(ALL[name])
    params = fq.choose_qparams(x, spec)
    scale = (params.scale * 0.8).requires_grad_()
    given = None if params.zero_point is None else params.zero_point.float().requires_grad_()
    x.requires_grad_()
    y = fq.fake_quantize(x, spec, scale=scale, zero_point=given)
    dy = weights(4, 512, seed=3)
    found = torch.autograd.grad(y, [x, scale, *([] if given is None else [given])], dy)
    # By autograd, of the definition with a rounding whose gradient is 1.
    groups, block = params.scale.shape, 512 // params.scale.shape[1]

    def wide(value):
        return value.repeat_interleave(block, 1)

    s, m = wide(scale.double()), 0.0 if given is None else wide(given.double())
    v = x.double()
    u = (v + m) / s if spec.offset is not None else v / s
    q = u + (spec.format.round(u.float().detach()).double() - u).detach()
    q = q + m if given is not None and spec.offset is None else q
    inside = (q >= spec.format.quant_min) & (q <= spec.format.quant_max)
    q = torch.where(inside, q, q.detach().clamp(spec.format.quant_min, spec.format.quant_max))
    out = q * s - m if spec.offset is not None else (q - m) * s
    expected = torch.autograd.grad(out, [x, scale, *([] if given is None else [given])], dy.double())
    assert groups == tuple(found[1].shape)
    assert torch.equal(found[0], expected[0])  # by zeros of either sign
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ4_NL", "Q4_1"])
def test_traced_calls_have_the_same_bits(name):
    x, spec = hostile(), fq.QuantSpec.parse(LATTICES[name])
    expected = fq.fake_quantize(x, spec)
    compiled = torch.compile(lambda v: fq.fake_quantize(v, spec), backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x), expected)
    exported = torch.export.export(_Of(spec), (x,), strict=True)
    assert_same_bits(exported.module()(x), expected)


@pytest.mark.parametrize(
    ("rule", "backend"), [("four_over_six", "aot_eager"), ("four_over_six", "inductor"), ("searched", "aot_eager")]
)
def test_compiled_choices_by_the_error_of_a_block(rule, backend):
    spec = fq.QuantSpec.parse(f"float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn:{rule}@per_tensor")
    x = weights(32, 64)
    compiled = torch.compile(lambda v: fq.fake_quantize(v, spec), backend=backend, fullgraph=True)
    assert_same_bits(compiled(x), fq.fake_quantize(x, spec))


class _Of(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.spec = spec

    def forward(self, x):
        return fq.fake_quantize(x, self.spec)


def test_four_over_six_is_the_better_of_both():
    text = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn{}@per_tensor"
    x = weights(64, 256)
    found = fq.choose_qparams(x, text.format(":four_over_six")).scale
    shared = x.abs().max() / (6.0 * 256.0)
    amax = x.abs().reshape(64, -1, 16).amax(-1)
    tries = [(amax / (bound * shared)).to(torch.float8_e4m3fn).float() * shared for bound in (6.0, 4.0)]
    plain = text.format("")
    errors = [
        (fq.fake_quantize(x, plain, scale=scale) - x).double().square().reshape(64, -1, 16).sum(-1) for scale in tries
    ]
    assert_same_bits(found, torch.where(errors[1] < errors[0], tries[1], tries[0]))
    assert 0.1 < (errors[1] < errors[0]).double().mean() < 0.9
    square = [(fq.fake_quantize(x, text.format(r)) - x).square().mean() for r in ("", ":four_over_six")]
    assert square[1] < 0.95 * square[0]


def test_searched_scales_are_the_best_of_eleven():
    text = "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn{}@per_tensor"
    x = weights(64, 256)
    x[0, :16], x[1, :16] = 0.0, 1e-9 * x[1, :16]  # a block of zeros, and one whose scale is the smallest
    found = fq.choose_qparams(x, text.format(":searched")).scale
    shared = x.abs().max() / (6.0 * 448.0)
    blocks = x.reshape(64, -1, 16)
    nearest = (blocks.abs().amax(-1) / (6.0 * shared)).to(torch.float8_e4m3fn).view(torch.uint8).int().clamp(1)
    codes = [
        (nearest + step).clamp(1, 126).byte().view(torch.float8_e4m3fn) for step in (0, *range(-4, 0), *range(1, 7))
    ]
    tries = torch.stack([code.float() * shared for code in codes])
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = blocks / tries[..., None]
    distances = (scaled.abs().clamp_max(6)[..., None].double() - grid).abs()
    # Of two numbers as near, that with an even mantissa: 0, 1, 2, 4 before 0.5, 1.5, 3, 6.
    even = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    values = grid[even][distances[..., even].argmin(-1)].copysign(scaled) * tries[..., None]
    errors = (values - blocks).double().square().sum(-1)
    assert_same_bits(found, tries.gather(0, errors.argmin(0)[None])[0])
    assert {*(found.double() / tries[0].double() != 1).flatten().tolist()} == {True, False}
    square = [(fq.fake_quantize(x, text.format(r)) - x).square().mean() for r in (":four_over_six", ":searched")]
    assert square[1] < 0.92 * square[0]


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel(0)", "per_block(-1:16,pad)", "per_block(0:4,1:4)"])
@pytest.mark.parametrize("rule", ["four_over_six", "searched"])
def test_scales_by_plain_sums_are_those_by_order_free_ones(rule, granularity):
    spec = fq.QuantSpec.parse(f"float4_e2m1fn {granularity} scale=float8_e4m3fn:{rule}@per_tensor")
    ties = torch.randint(-3, 4, (16, 40), generator=torch.Generator().manual_seed(0)).float()
    infinite = weights(16, 40)
    infinite[0, 0], infinite[3, 3] = torch.inf, torch.nan
    for x in (
        weights(16, 40),
        weights(16, 40).double(),
        weights(16, 40).half(),
        ties,
        1e-30 * ties,
        0 * ties,
        infinite,
    ):
        expected = reference.choose(x, spec).scale
        assert_same_bits(reference.choose_from(x, None, spec, is_less_by_plain_sums).scale, expected)


def test_sums_that_plain_ones_round_away_are_compared():
    large = 2.0**53
    one = torch.tensor([[large, 1.0, 1.0], [large, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    other = torch.tensor([[1.0, 1.0, large], [large, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert (one.sum(1) < other.sum(1)).tolist() == [True, False, False]
    found = is_less_by_plain_sums(one, other, (1,))
    assert found.tolist() == is_less(one, other, (1,)).tolist() == [False, True, False]


def test_half_range_is_what_servers_compute():
    x = weights(32, 64)
    scale = x.abs().amax(1, keepdim=True) / 127.5
    expected = (x / scale).round().clamp(-128, 127) * scale
    assert_same_bits(fq.fake_quantize(x, "int8 per_token scale=float32:half_range"), expected + 0.0)
    assert str(fq.QuantSpec.parse("int8 per_token scale=float32:half_range")).endswith("scale=float32:half_range")
    assert str(fq.QuantSpec.parse("int8 scale=float32")) == "int8 per_tensor"


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel(0)", "per_block(-1:100,pad)"])
def test_mean_is_the_ternary_of_bitnet(granularity):
    x = weights(8, 256)
    x[3, 7], x[4, 4] = torch.inf, torch.nan
    scale = fq.choose_qparams(x, f"int2_narrow {granularity} scale=float32:mean").scale
    finite = torch.where(x.isfinite(), x.abs(), 0.0).double()
    parts = {"per_tensor": [finite.reshape(1, -1)], "per_channel(0)": [finite]}.get(granularity, finite.split(100, 1))
    means = torch.stack([part.mean(1) for part in parts], 1).float()
    torch.testing.assert_close(scale, means.reshape(scale.shape), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_given_scales_and_offsets_must_be_finite(bad):
    x, spec = weights(2, 256), LATTICES["Q4_1"]
    scale, offset = torch.ones(2, 8), torch.zeros(2, 8)
    with pytest.raises(QParamsError, match="scale must be a finite number"):
        fq.fake_quantize(x, spec, scale=scale * bad, zero_point=offset)
    with pytest.raises(QParamsError, match="zero_point must be a finite number"):
        fq.fake_quantize(x, spec, scale=scale, zero_point=offset + bad)


def test_clip_gradient_under_negative_scales():
    x = T([[-9.0, -8.0, 0.3, 7.0, 8.0, 9.0]], requires_grad=True)
    scale = T([[-1.0]], requires_grad=True)
    y = fq.fake_quantize(x, "int4 per_channel(0) clip scale=float16:signed", scale=scale)
    y.sum().backward()
    assert y.tolist() == [[-7.0, -7.0, 0.0, 7.0, 8.0, 8.0]]
    assert x.grad.tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]]
    assert scale.grad.tolist() == [[7.0 + 7.0 - 8.0 - 8.0]]


def test_offsets_and_zero_points_exclude_each_other():
    with pytest.raises(SpecError, match="offset was said before"):
        fq.QuantSpec.parse("uint4 offset=float16 offset=float16")
    with pytest.raises(SpecError, match="such as OffsetSpec"):
        fq.QuantSpec("uint4", offset=ScaleSpec("float16"))
    spec = fq.QuantSpec.parse("uint4 offset=float16")
    assert not spec.symmetric
    assert spec.replace(offset=None) == fq.QuantSpec("uint4")


TWO_SCALES = {32: "int8_narrow per_block(-1:32) q8_0", 256: "int8_narrow per_block(-1:256) q8_k"}


def by_numpy(x, block):
    """`quantize_row_q8_0` for AVX and `quantize_row_q8_K_ref`, as their sources have them."""
    values = x.numpy().reshape(-1, block)
    found = np.zeros_like(values)
    for row, out in zip(values, found, strict=True):
        place = np.abs(row).argmax()
        if row[place] == 0:
            continue
        if block == 32:
            amax = np.abs(row[place])
            out[:] = np.rint(row * (np.float32(127) / amax)) * np.float32(np.float16(amax / np.float32(127)))
        else:
            scale = np.float32(-127) / row[place]
            out[:] = np.minimum(127, np.rint(row * scale)) * (np.float32(1) / scale)
    return torch.from_numpy(found).reshape(x.shape) + 0.0


def hostile_rows():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 4, 64)[:, None]
    x[3], x[4, :256], x[5] = 0, 0, 1.5  # all zero, half of a row, all of one size
    x[6] = torch.randint(-4, 5, (512,)) / 8.0  # ties
    x[7] = 2.0**-40  # float16 has no such scale
    return x


@pytest.mark.parametrize("block", TWO_SCALES)
def test_the_rules_are_those_of_the_sources(block):
    x, spec = hostile_rows(), fq.QuantSpec.parse(TWO_SCALES[block])
    y = fq.fake_quantize(x, spec)
    assert_same_bits(y + 0.0, by_numpy(x, block))
    assert_same_bits(fq.fake_quantize(x, spec, scale=fq.choose_qparams(x, spec).scale), y)
    codes, params = fq.quantize(x, spec)
    assert_same_bits(fq.dequantize(codes, params, spec), y)
    assert codes.abs().max() == 127
    watched = torch.compile(lambda x: fq.fake_quantize(x, spec), backend="aot_eager", fullgraph=True)
    assert_same_bits(watched(x), y)


@pytest.mark.parametrize("text", TWO_SCALES.values())
def test_gradients_pass_within_the_range_and_kernels_say_why_not(text):
    x = hostile_rows().requires_grad_()
    assert torch.autograd.grad(fq.fake_quantize(x, text).sum(), x)[0].eq(1).all()
    scale = torch.full_like(fq.choose_qparams(x.detach(), text).scale, 1e-3)
    clipped = fq.fake_quantize(x, text, scale=scale)
    passes = torch.autograd.grad(clipped.sum(), x)[0]
    assert_same_bits(passes, (x.detach().abs() * (127 / 0.128)).round().le(127).float())
    cpu = next(one for one in backends() if one.name == "cpu")
    reason = cpu.unsupported(x.detach(), fq.QuantSpec.parse(text), codes=False)
    assert reason == f"the kernels encode and decode by one scale, and {text} by two"


def test_the_largest_numbers_have_finite_values():
    x = torch.tensor([3e38, -1e30, 1.0])
    assert fq.fake_quantize(x, "int8_narrow q8_k").isfinite().all()
    assert fq.fake_quantize(x, "int8_narrow q8_0").tolist() == [127 * 65504.0, -127 * 65504.0, 0.0]


@pytest.mark.parametrize("arithmetic", ["q8_0", "q8_k"])
def test_no_scale_is_learned(arithmetic):
    quantizer = fq.nn.Quantizer(f"int8 {arithmetic}")
    quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    for method in fq.nn.learned_ranges():
        with pytest.raises(ConfigError, match="encodes with another scale than it decodes with"):
            quantizer.learn(method)
