"""Checkpoints whose weights are codes: the same bits, the sizes of the summary, damage refused."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError
from fakequant.model.state import checkpoint
from fakequant.model.weights import spec_bits
from fakequant.nn import Quantizer
from fakequant.numerics.formats import parse_format
from tests.support.checkpoints import assert_as_before, change_manifest, change_tensors, state_of
from tests.support.matrix import full, sweep
from tests.support.models import tied

WIDTH = 64


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 32, bias=False))


def prepared(config, dtype=torch.float32) -> nn.Module:
    model = fq.prepare(network().to(dtype), config)
    fq.calibrate(model, [torch.randn(16, WIDTH, dtype=dtype)], progress=False)
    return model


def tensors_in(folder):
    manifest = json.loads((folder / "fakequant.json").read_text())
    return load_file(folder / manifest["tensors"]["file"])


QUICK = ["INT8", "INT4_GROUP32", "MXFP4", "NVFP4", "NF4_WEIGHT_ONLY", "MXFP6"]


@sweep("name", full(sorted(fq.presets.presets())), full(QUICK))
def test_a_packed_model_computes_the_same_bits(name, tmp_path):
    model = prepared(name)
    with warnings.catch_warnings(action="error"):
        again = fq.load(network(), fq.save(model, tmp_path, packed=True))
    x = torch.randn(8, WIDTH)
    assert torch.equal(again(x), model(x))
    assert tensors_in(tmp_path)["0.weight"].dtype is torch.uint8


@pytest.mark.parametrize("calibrated", [True, False])
def test_codes_are_made_once(calibrated, monkeypatch, tmp_path):
    encoded, made = Quantizer.encoded, []
    monkeypatch.setattr(Quantizer, "encoded", lambda self, x: made.append(self) or encoded(self, x))
    model = prepared("NF4_WEIGHT_ONLY") if calibrated else fq.prepare(network(), "NF4_WEIGHT_ONLY")
    fq.save(model, tmp_path, packed=True)
    assert len(made) == 2


WITHOUT_DATA = ["INT4_GROUP32", "INT4_WEIGHT_ONLY", "INT8_WEIGHT_ONLY", "NF4_WEIGHT_ONLY", "NVFP4", "MXFP4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_weights_without_scales_get_those_of_the_next_call(name, dtype, tmp_path):
    # The weights alone, because inputs of NVFP4 need calibration.
    only = fq.Config("weights", (fq.Rule("*", weight=fq.presets.presets()[name].rules[0].weight),))
    model = fq.prepare(network().to(dtype), only)
    before, x = state_of(model), torch.randn(8, WIDTH, dtype=dtype)
    expected = model(x)
    with warnings.catch_warnings(action="error"):
        again = fq.load(network().to(dtype), fq.save(model, tmp_path, packed=True))
    assert torch.equal(again(x), expected)
    assert_as_before(model, before)
    assert not model[0].weight_quantizer.calibrated
    for layer in (0, 2):
        bits = spec_bits(model[layer].weight_quantizer.spec, tuple(model[layer].weight.shape))
        assert tensors_in(tmp_path)[f"{layer}.weight"].nbytes == bits.codes // 8


def test_a_tied_weight_without_scales_and_zero_points_come_back(tmp_path):
    rule = fq.Rule("*", layers=("Embedding", "Linear"), weight="uint4 per_channel(0) asymmetric")
    model = fq.prepare(tied(), fq.Config("asymmetric", (rule,)))
    again = fq.load(tied(), fq.save(model, tmp_path, packed=True))
    assert again[0].weight is again[1].weight
    assert torch.equal(again(torch.arange(20)), model(torch.arange(20)))
    assert tensors_in(tmp_path)["0.weight"].nbytes == 160


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_without_scales_that_is_not_finite_stays_in_float(value, tmp_path):
    model = fq.prepare(network(), "INT4_GROUP32")
    model[0].weight.data[0, 0] = value
    with pytest.warns(UserWarning, match=r"stores 1 of 2 quantized weights in float: 0\.weight: it holds NaN or inf"):
        fq.save(model, tmp_path, packed=True)
    assert tensors_in(tmp_path)["0.weight"].dtype is torch.float32


@pytest.mark.parametrize("name", ["INT8", "INT4_GROUP32", "INT4_GROUP128", "MXFP4", "MXFP6", "NF4_WEIGHT_ONLY"])
def test_sizes_are_those_of_the_summary(name, tmp_path):
    model = prepared(name)
    fq.save(model, tmp_path, packed=True)
    tensors = tensors_in(tmp_path)
    for layer in (0, 2):
        bits = spec_bits(model[layer].weight_quantizer.spec, tuple(model[layer].weight.shape))
        stored = (tensors[f"{layer}.weight"], tensors[f"{layer}._weight_quantizer.scale"])
        assert [t.nbytes for t in stored] == [bits.codes // 8, bits.scales // 8]


def test_one_warning_names_what_stays_in_float(tmp_path):
    model = prepared("INT8")
    model[0].weight_quantizer.learn("lsq")
    with pytest.warns(UserWarning, match=r"stores 1 of 2 quantized weights in float: 0\.weight: its range is learned"):
        fq.save(model, tmp_path, packed=True)
    x = torch.randn(8, WIDTH)
    assert torch.equal(fq.load(network(), tmp_path)(x), model(x))


@pytest.mark.parametrize("tie", [True, False])
def test_a_weight_that_a_float_layer_reads_stays(tie, tmp_path):
    net = nn.Sequential(nn.Embedding(20, 20), nn.Linear(20, 20, bias=False))
    if tie:
        net[1].weight = net[0].weight
    with warnings.catch_warnings(action="ignore"):
        model = fq.prepare(net, fq.presets.INT8_WEIGHT_ONLY.with_rule(fq.Rule(layers=("Embedding",))))
        fq.calibrate(model, [torch.arange(20)], progress=False)
        fq.save(model, tmp_path, packed=True)
    assert (tensors_in(tmp_path).get("1.weight", torch.zeros(1)).dtype is torch.uint8) is not tie


@pytest.mark.parametrize("name", ["int1", "int3", "uint4", "int5", "int8_narrow", "int12", "int16", "float6_e2m3fn"])
def test_codes_of_every_width_come_back(name):
    format = parse_format(name)
    codes = format.to_storage(format.round(torch.linspace(format.quant_min, format.quant_max, 1001)))
    stored = checkpoint._to_bytes(codes, format)
    assert len(stored) == -(-1001 * format.bits // 8)
    assert torch.equal(checkpoint._from_bytes(stored, format, [7, 143]).flatten(), codes)


def test_four_bits_are_two_in_a_byte():
    format = parse_format("int4")
    stored = checkpoint._to_bytes(torch.tensor([-8, 7, 0, -1, 3], dtype=torch.int8), format)
    assert stored.tolist() == [0xF0, 0x78, 0x0B]


def test_long_tensors_are_packed_in_parts(monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK", 16)
    test_codes_of_every_width_come_back("int3")


def entry(**values):
    return lambda manifest: manifest["packed"]["0.weight"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry(shape=[64, 65]), r"codes of 0\.weight are torch.uint8 of shape \[2048\], but int4 .* takes 2080 bytes"),
        (entry(shape=[2**40, 2**40]), "takes 604462909807314587353088 bytes"),
        (entry(shape=[32, 128]), "has shape"),
        (entry(shape="64"), "shape is '64', not a list"),
        (entry(shape=[-1]), r"shape\[0\] is -1, not a number of at least 0"),
        (entry(dtype="float31"), "has the dtype 'float31', which no weight can have"),
        (entry(quantizer="0._input_quantizer"), "has codes, but 0._input_quantizer has no static range"),
        (entry(quantizer="nothing"), "has codes, but nothing has no static range"),
        (entry(packed_scale=True), "have scales of torch.float32, which do not fit int4"),
        (entry(packed_scale=1), "packed_scale is 1, not true or false"),
        (lambda m: m.update(packed=[]), r"packed is \[\], not an object"),
        (lambda m: m.update(packed={}), r"on the weight of shape \[2048\] needs"),
        (lambda m: m["packed"].update({"2.bias": m["packed"]["2.weight"]}), "the codes of 2.bias are missing"),
    ],
)
def test_a_manifest_with_odd_codes_is_refused(change, message, tmp_path):
    fq.save(prepared("INT4_GROUP32"), tmp_path, packed=True)
    change_manifest(tmp_path, change)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("0._weight_quantizer.scale"), "0._weight_quantizer has no scale"),
        (lambda t: t.update({"0.weight": t["0.weight"][1:]}), "takes 2048 bytes"),
        (lambda t: t.update({"0.weight": t["0.weight"].to(torch.int32)}), "are torch.int32 of shape"),
        (lambda t: t["0._weight_quantizer.scale"].fill_(float("nan")), "positive, finite"),
        (lambda t: t.update({"0._weight_quantizer.scale": torch.ones(7, 3)}), "has shape"),
    ],
)
def test_tensors_with_odd_codes_are_refused(change, message, tmp_path):
    fq.save(prepared("INT4_GROUP32"), tmp_path, packed=True)
    change_tensors(tmp_path, change)
    assert_refused(tmp_path, message)


def test_codes_that_a_format_lacks_are_refused(tmp_path):
    fq.save(prepared(fq.Config("narrow", (fq.Rule("*", weight="int4_narrow per_channel(0)"),))), tmp_path, packed=True)
    change_tensors(tmp_path, lambda t: t["0.weight"].fill_(255))
    assert_refused(tmp_path, "hold the number 15, but int4_narrow has 15 codes")


def assert_refused(folder, message):
    fresh = network()
    before = state_of(fresh)
    with pytest.raises(CheckpointError, match=message):
        fq.load(fresh, folder)
    assert_as_before(fresh, before)
