"""Scales searched on their lattice."""

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import presets
from fakequant.calibration.lattice import search_params, searches
from fakequant.delivery.gguf.blocks import _SPECS
from fakequant.errors import ShapeError
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import Backend, library

GGUF = {name: config for name, config in vars(presets).items() if name.startswith("GGUF_")}
SPECS = {name: config.rules[0].weight.spec for name, config in GGUF.items() if isinstance(config, fq.Config)}
OTHERS = (
    "int4 per_channel(0) scale=bfloat16",
    "uint4 per_block(-1:32) scale=float16 offset=float32",
    "uint3 per_block(0:8,-1:8) scale=uint6@per_block(0:2)/float16 offset=uint4@per_tensor/bfloat16",
    "nf4 per_block(-1:64) scale=float8_e4m3fn@per_block(-1:2)/float16",
    "int8 per_tensor scale=float16",
    "float4_e2m1fn per_block(-1:16) scale=float16:signed",
    "uint4 per_block(-1:32) scale=uint6@per_block(0:2)/float16 offset=uint6@per_block(-1:2)/float16",
)
SEARCHED = [spec for spec in (*SPECS.values(), *map(QuantSpec.parse, OTHERS)) if searches(spec)]


def normal(rows=16, columns=512, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def hostile():
    whole = normal(seed=1)
    spiked = whole.clone()
    spiked[::3, 5] = 100.0
    holes = whole.clone()
    holes[:, 32:96] = 0.0
    holes[3] = 0.0
    yield "spikes", spiked
    yield "zeros", holes
    yield "all zero", torch.zeros(16, 512)
    yield "positive", whole.abs() + 0.5
    yield "negative", -whole.abs() - 0.5
    yield "constant", torch.full((16, 512), -0.3)
    yield "tiny", whole * 1e-30
    yield "huge", whole * 1e38
    yield "one element", torch.where(torch.arange(512) == 7, whole, 0.0)
    yield "codes", (whole * 200).round()
    yield "half", whole.half()
    yield "half beyond its largest value", whole.half() * 2e6
    yield "not full", whole[:, :500]
    yield "not finite", torch.where(whole > 0.06, torch.inf, whole)


def squared_error(x, params: QParams, spec, moments=None):
    exact = torch.where(x.isfinite(), x, 0.0)
    error = library.fake_quantize(exact, params, spec).double() - exact.double()
    found = (error.square() if moments is None else (error @ moments) * error).sum()
    return found.nan_to_num(torch.inf)  # a value beyond float16, times a moment of 0


def test_every_kind_is_there():
    assert len(SPECS) == 15
    assert len(SEARCHED) == 14 + len(OTHERS)


@pytest.mark.parametrize("spec", SEARCHED, ids=str)
def test_error_is_smaller_on_normal_weights_and_scales_are_on_the_lattice(spec):
    x = normal()
    params = search_params(x, spec)
    assert squared_error(x, params, spec) < squared_error(x, fq.choose_qparams(x, spec), spec)
    assert_on_lattice(params.scale, params.zero_point, spec)


@pytest.mark.parametrize("spec", SEARCHED, ids=str)
def test_error_is_never_larger(spec):
    for name, x in hostile():
        try:
            plain = fq.choose_qparams(torch.where(x.isfinite(), x, 0.0), spec)
        except ShapeError:
            continue
        params = search_params(x, spec)
        assert params.scale.isfinite().all(), name
        assert squared_error(x, params, spec) <= squared_error(x, plain, spec) * (1 + 1e-12), name
        assert_on_lattice(params.scale, params.zero_point, spec)


@pytest.mark.parametrize("spec", [spec for spec in SEARCHED if "-1:" in str(spec)], ids=str)
def test_error_by_moments_is_never_larger(spec):
    wide = spec.granularity.block_shape((16, 512))[1]
    inside = torch.block_diag(*[torch.ones(wide, wide)] * (512 // wide))
    moments = moments_of_inputs() * inside
    for name, x in hostile():
        if x.shape == (16, 512):
            exact = torch.where(x.isfinite(), x, 0.0)
            found, plain = search_params(x, spec, moments), fq.choose_qparams(exact, spec)
            assert squared_error(x, found, spec, moments) <= squared_error(x, plain, spec, moments) * (1 + 1e-9), name


def test_groups_with_crossing_scales_and_offsets_are_chosen_together():
    spec, x = QuantSpec.parse(OTHERS[-1]), normal()
    x[:, ::7] *= 40
    assert_on_lattice(*search_params(x, spec)[:2], spec)


def moments_of_inputs():
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-1, 1, 512)[torch.randperm(512, generator=generator)]
    inputs = torch.randn(2048, 512, generator=generator) * sizes
    return (inputs.T @ inputs).double()


def assert_on_lattice(scale, offset, spec):
    for own, values in ((spec.scale, scale), (spec.offset, offset)):
        if own is not None:
            assert torch.equal(own.join(own.split(values)), values)


@pytest.mark.parametrize("name", ["GGUF_Q4_K", "GGUF_Q3_K", "GGUF_IQ4_NL"])
def test_the_error_of_the_output_is_smaller_by_moments_than_without_them(name):
    spec, x = SPECS[name], normal()
    moments = moments_of_inputs()
    by_output, by_weight = search_params(x, spec, moments), search_params(x, spec)
    assert squared_error(x, by_output, spec, moments) < 0.9 * squared_error(x, by_weight, spec, moments)


def test_chunks_of_rows_change_nothing(monkeypatch):
    spec, x = SPECS["GGUF_Q4_K"], normal()
    whole = search_params(x, spec)
    monkeypatch.setattr(Backend, "at_once", 512)
    for one, other in zip(whole[:2], search_params(x, spec)[:2], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["GGUF_Q4_K", "GGUF_Q2_K", "GGUF_Q3_K", "GGUF_IQ4_XS", "GGUF_Q4_0"])
def test_improve_chooses_on_the_lattice(name):
    model = fq.prepare(nn.Sequential(nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 8)), GGUF[name])
    with torch.no_grad():
        model[0].weight[3] = 0.0  # a scale of 0 makes no NaN
    found = fq.ptq.improve(model, [torch.randn(128, 256) for _ in range(4)], "fast")
    assert all(layer.after < 0.9 * layer.before for layer in found.layers)
    weight, quantizer = model[0].weight, model[0]._weight_quantizer
    assert torch.equal(quantizer(weight), weight)
    assert weight.isfinite().all()
    assert_on_lattice(quantizer.scale, quantizer.zero_point, quantizer.spec)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q4_1"])
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_the_layout_in_memory_moves_no_scale(kind, layout):
    """Sums over strided blocks have another order: 3 of 512 scales of Q3_K were others."""
    spec = QuantSpec.parse(_SPECS[kind])
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(16, 512)
        x = [x, x * 1e-3, torch.round(x * 4) / 4, x.abs()][seed % 4]
        x = x[:1].expand(16, 512) if layout == "expanded" else x
        wide = torch.zeros(16, 1024)
        wide[:, ::2] = x
        other = {"transposed": x.t().contiguous().t(), "strided": wide[:, ::2], "expanded": x}[layout]
        ours, theirs = search_params(x.contiguous(), spec), search_params(other, spec)
        assert torch.equal(ours.scale, theirs.scale)
        assert ours.zero_point is None or torch.equal(ours.zero_point, theirs.zero_point)
