"""Every preset on every kind of layer; block presets against the formulas of their standards."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import QuantSpec, fake_quantize
from fakequant.errors import ConfigError, ExportError
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.model.weights import quantized_weights, spec_bits, weight_bits
from fakequant.nn import QuantizedLayer, quantizers, quantizes
from tests.support.bits import assert_same_bits
from tests.support.layer_cases import CASES
from tests.support.models import images, small_net

ALL = presets.presets()
MX = {
    "MXFP8": ("float8_e4m3fn", 8),
    "MXFP8_E5M2": ("float8_e5m2", 15),
    "MXFP6_E2M3": ("float6_e2m3fn", 2),
    "MXFP6_E3M2": ("float6_e3m2fn", 4),
    "MXFP4": ("float4_e2m1fn", 2),
}
"""Element format and emax: OCP Microscaling Formats 1.0, table 1 and section 5.3."""
BLOCKS = [*MX, "MXINT8", "NVFP4", "FP8_BLOCK"]
GGUF = [name for name in ALL if name.startswith("GGUF_")]
WEIGHT_ONLY = [
    "NVFP4_WEIGHT_ONLY",
    "NVFP4_FOUR_OVER_SIX",
    *GGUF,
    "INT4_GROUP32",
    "INT4_GROUP64",
    "INT4_GROUP128",
    "NF4_WEIGHT_ONLY",
]


def test_the_names() -> None:
    assert {*BLOCKS, *WEIGHT_ONLY, "MXFP6", "INT8", "FP8"} <= set(ALL)
    assert presets.MXFP6 is presets.MXFP6_E2M3
    assert all(config.name == name for name, config in ALL.items() if name != "MXFP6")


@pytest.mark.parametrize("name", BLOCKS + WEIGHT_ONLY)
def test_activations_are_dynamic_or_float_and_weights_static(name: str) -> None:
    rule = ALL[name].rules[0]
    assert rule.weight is not None
    assert not rule.weight.dynamic
    assert rule.input is None if name in WEIGHT_ONLY else rule.input is not None and rule.input.dynamic


FOUR_BITS = [*WEIGHT_ONLY, "INT4_WEIGHT_ONLY"]
ROWS = "int8 per_channel(0)"


class Language(nn.Module):
    """A table of embeddings and one in bags, a layer, and a head that may have the weight of the table."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.bags = nn.Embedding(48, 16), nn.EmbeddingBag(8, 16)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 48, bias=False)
        if tied:
            self.head.weight = self.table.weight


def specs(model: nn.Module) -> dict[str, str]:
    return {name.split(".")[0]: str(quantizer.spec) for name, quantizer in quantizers(model).items()}


@pytest.mark.parametrize("name", ALL)
def test_embeddings_have_8_bits_where_4_bit_weights_are_all_that_is_quantized(name: str) -> None:
    weight = str(ALL[name].rules[0].weight)
    table = str(presets.GGUF_Q8_0.rules[0].weight) if name in GGUF else ROWS if name in FOUR_BITS else weight
    found = {name: spec for name, spec in specs(prepare(Language(tied=False), ALL[name])).items() if name != "body"}
    wanted = {"table": table, "bags": table, "head": weight}
    assert {name: spec.split(" dynamic")[0] for name, spec in found.items() if name in wanted} == wanted


def test_a_head_follows_the_table_whose_weight_it_has() -> None:
    assert specs(prepare(Language(tied=True), "INT4_GROUP32"))["head"] == ROWS
    own = specs(prepare(Language(tied=True), "INT4_GROUP32", rules={"head": "INT8"}))
    assert own["head"] == "int8 per_channel(0)"
    fewer = ALL["INT4_GROUP32"].with_rule(Rule(layers="Embedding", weight="int4 per_block(-1:32,pad)", tied=True))
    assert set(specs(prepare(Language(tied=True), fewer)).values()) == {"int4 per_block(-1:32,pad)", ROWS}
    assert specs(prepare(Language(tied=True), fewer))["head"] == "int4 per_block(-1:32,pad)"
    floats = prepare(Language(tied=True), ALL["INT4_GROUP32"].with_rule(Rule(layers="Embedding"), Rule("head")))
    assert set(specs(floats)) == {"bags", "body"}
    assert Config.from_dict(ALL["INT4_GROUP32"].to_dict()) == ALL["INT4_GROUP32"]


def test_a_preset_for_some_layers_keeps_their_embeddings_at_8_bits() -> None:
    model = nn.Sequential(Language(tied=False), Language(tied=False))
    found = {
        name: str(q.spec) for name, q in quantizers(prepare(model, "INT8_WEIGHT_ONLY", rules={"1*": "w4a16"})).items()
    }
    assert found["1.table._weight_quantizer"] == ROWS
    assert found["1.body._weight_quantizer"] == "int4 per_block(-1:128,pad)"
    assert found["0.body._weight_quantizer"] == ROWS


def test_sizes_count_embeddings_at_8_bits() -> None:
    model = prepare(Language(tied=False), "INT4_GROUP32")
    found = {path.split(".")[0]: weight_bits(weight) for path, weight in quantized_weights(model).items()}
    assert found["table"] == (48 * 16, 48 * 16 * 8, 48 * 32)
    assert found["head"] == (48 * 16, 48 * 16 * 4, 48 * 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_runs_and_trains_with_batches_of_any_size(name: str, dtype: torch.dtype) -> None:
    model = prepare(small_net(), ALL[name]).to(dtype)
    calibrate(model, [images().to(dtype)])
    assert all(q.calibrated != q.dynamic for q in quantizers(model).values())
    for count in (4, 7, 1):
        y = model(images(count).to(dtype))
        assert y.shape == (count, 10)
        assert y.isfinite().all()
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layer", CASES)
def test_runs_on_every_layer_of_the_table(layer: str, name: str) -> None:
    module, inputs = CASES[layer]
    rule = ALL[name].rules[0]
    quantized = prepare(nn.Sequential(copy.deepcopy(module)), Config(name, (rule,)))[0]
    if not quantizers(quantized):
        assert not hasattr(module, "weight")
        assert type(quantized) is type(module)
        return
    calibrate(quantized, [inputs], inputs=slice(len(inputs)))
    expected, found = module(*inputs), quantized(*inputs)
    if isinstance(found, tuple):
        expected, found = expected[0], found[0]
    assert found.shape == expected.shape
    most = 0.5 if rule.weight is None or rule.weight.spec.format.quant_max > 1 else 0.8  # of 3 values, untrained
    assert (found - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("name", BLOCKS)
def test_pictures_of_any_size_with_or_without_a_batch(name: str) -> None:
    layer = prepare(nn.Sequential(nn.Conv2d(40, 8, 3), nn.ConvTranspose2d(8, 40, 3)), ALL[name])
    calibrate(layer)
    for shape in ((2, 40, 5, 5), (1, 40, 9, 3), (40, 6, 7)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        assert layer(x).shape == shape
    assert_same_bits(layer(x[None])[0], layer(x))


AXES = {
    "Linear": ((0, -1), (-1,)),
    "Conv1d": ((0, 1), (-2,)),
    "Conv2d": ((0, 1), (-3,)),
    "Conv3d": ((0, 1), (-4,)),
    "ConvTranspose1d": ((1, 0), (-2,)),
    "ConvTranspose2d": ((1, 0), (-3,)),
    "ConvTranspose3d": ((1, 0), (-4,)),
    "Embedding": ((0, -1), ()),
    "AvgPool2d": (None, (-3,)),
    "AdaptiveAvgPool1d": (None, (-2,)),
    "MatMul": (None, (-1, -2)),
    "Add": (None, (-1, -1)),
}
"""The axes of a weight's output channels and reduction, and the reduction axes of the inputs."""


@pytest.mark.parametrize("layer", AXES)
@pytest.mark.parametrize("text", ["per_block({}:5,{}:3,pad)", "per_channel({},{})"])
def test_axes_are_resolved_per_layer(layer: str, text: str) -> None:
    weight, inputs = AXES[layer]
    config = TensorConfig(f"int8 {text.format(0, -1)}")
    model = prepare(
        nn.Sequential(copy.deepcopy(CASES[layer][0])), Config("all", (Rule("*", input=config, weight=config),))
    )
    found = {name.removeprefix("0."): str(q.spec.granularity) for name, q in quantizers(model).items()}
    names = ("_input_quantizer", "_other_quantizer")
    wanted = {name: text.format(0, axis) for name, axis in zip(names, inputs, strict=False)}
    if weight is not None:
        wanted["_weight_quantizer"] = text.format(*weight)
    assert found == wanted


@pytest.mark.parametrize("text", ["int8 per_block(3:3)", "int8 per_block(1:2)", "int8 per_block(1:4,0:2)"])
def test_other_axes_are_literal(text: str) -> None:
    model = prepare(nn.Sequential(nn.Conv2d(4, 6, 3)), Config("x", (Rule(weight=TensorConfig(text)),)))
    assert str(model[0]._weight_quantizer.spec) == text


def test_a_layer_must_name_the_axes_of_all_its_inputs() -> None:
    class Product(nn.Module):
        """One that derives from no layer with axes."""

    class QuantProduct(QuantizedLayer, Product):
        inputs = ("_input_quantizer", "_other_quantizer")
        output_channels = None

    with pytest.raises(ConfigError, match="QuantProduct has 2 inputs, but input_reductions names the axes of 1"):
        quantizes(Product)(QuantProduct)


def blocks_of(x: Tensor, axis: int, size: int, kernels: bool = False) -> Tensor:
    """x [..., n, ...] as rows of `size` neighbours along an axis, zeros at the end [m, size].

    If `kernels`, weights of convolutions [..., n, ..., 3, 3] are cut into whole kernels, as many blocks of equal
    length as have at least `size` elements.
    """
    rows = x.movedim(axis, -1)
    if kernels and x.dim() == 4:
        channels = x.shape[axis]
        rows, size = x.movedim(axis, 1).flatten(1), -(-channels // (9 * channels // size)) * 9
    return nn.functional.pad(rows, (0, -rows.shape[-1] % size)).reshape(-1, size)


def tensors(name: str) -> list[tuple[str, Tensor, Tensor, int]]:
    """What the quantizers of a convolution, a transposed one and a linear layer saw and gave, and their axis."""
    torch.manual_seed(5)
    float_layers = (
        (nn.Conv2d(40, 8, 3), torch.randn(2, 40, 5, 5), 1, 1),
        (nn.ConvTranspose2d(40, 8, 3), torch.randn(2, 40, 5, 5), 0, 1),
        (nn.Linear(70, 3), torch.randn(2, 5, 70), 1, 2),
    )
    found = []
    for layer, x, weight_axis, input_axis in float_layers:
        x = x * torch.exp2(torch.randint(-20, 20, x.shape).float())
        quantized = prepare(nn.Sequential(layer), ALL[name])[0]
        calibrate(quantized, [x])
        label = type(layer).__name__
        found.append((f"{label} weight", layer.weight.detach(), quantized.quantized_weight().detach(), weight_axis))
        if quantized._input_quantizer is not None:
            found.append((f"{label} input", x, quantized.quantized_input(x), input_axis))
    return found


@pytest.mark.parametrize("name", MX)
def test_mx_is_the_standards(name: str) -> None:
    """Shared scale 2**(floor(log2(amax)) - emax), elements rounded to the format: OCP MX 1.0, section 6.3."""
    element, emax = MX[name]
    for label, x, y, axis in tensors(name):
        rows = blocks_of(x, axis, 32)
        shared = torch.frexp(rows.abs().amax(1, keepdim=True))[1] - 1 - emax
        wanted = fake_quantize((rows.double() * 2.0 ** -shared.double()), element, scale=1.0) * 2.0 ** shared.double()
        assert_same_bits(blocks_of(y, axis, 32), wanted.float(), f"{name} {label}")


def test_mxint8_is_the_standards() -> None:
    """Elements k * 2**-6 with k from -127 to 127 under a shared scale 2**floor(log2(amax))."""
    for label, x, y, axis in tensors("MXINT8"):
        rows = blocks_of(x, axis, 32).double()
        shared = 2.0 ** (torch.frexp(rows.abs().amax(1, keepdim=True))[1] - 1).double()
        elements = (rows / shared * 64).round().clamp(-127, 127) / 64
        assert_same_bits(blocks_of(y, axis, 32), (elements * shared + 0.0).float(), label)


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4_WEIGHT_ONLY"])
def test_nvfp4_is_nvidias(name: str) -> None:
    """E4M3 scales amax / 6 of 16 under a scale of the tensor amax / (6 * 448)."""
    for label, x, y, axis in tensors(name):
        kernels = name == "NVFP4_WEIGHT_ONLY"
        rows = blocks_of(x, axis, 16, kernels)
        amax = rows.abs().amax(1, keepdim=True)
        whole = amax.max() / (6.0 * 448.0)
        code = fake_quantize(amax / (6.0 * whole), "float8_e4m3fn", scale=1.0).clamp(min=2.0**-9)
        wanted = fake_quantize(rows, QuantSpec.parse("float4_e2m1fn per_channel(0)"), scale=code * whole)
        assert_same_bits(blocks_of(y, axis, 16, kernels), wanted, f"{name} {label}")


@pytest.mark.parametrize(
    ("name", "size", "element"),
    [
        ("INT4_GROUP32", 32, "int4"),
        ("INT4_GROUP64", 64, "int4"),
        ("INT4_GROUP128", 128, "int4"),
        ("NF4_WEIGHT_ONLY", 64, "nf4"),
    ],
)
def test_groups_have_float_scales(name: str, size: int, element: str) -> None:
    for label, x, y, axis in tensors(name):
        rows = blocks_of(x, axis, size, kernels=True)
        wanted = fake_quantize(rows, f"{element} per_channel(0)")
        assert_same_bits(blocks_of(y, axis, size, kernels=True), wanted, label)


def test_fp8_blocks_are_tiles_of_weights_and_rows_of_activations() -> None:
    layer = prepare(nn.Sequential(nn.Linear(200, 150)), presets.FP8_BLOCK)[0]
    calibrate(layer)
    weight, quantized = layer.weight.detach(), layer.quantized_weight().detach()
    for i in (0, 128):
        for j in (0, 128):
            tile = weight[i : i + 128, j : j + 128]
            assert_same_bits(quantized[i : i + 128, j : j + 128], fake_quantize(tile, "float8_e4m3fn"))
    x = torch.randn(3, 2, 200)
    found = layer.quantized_input(x)
    for j in (0, 128):
        wanted = fake_quantize(x[..., j : j + 128], "float8_e4m3fn per_token")
        assert_same_bits(found[..., j : j + 128], wanted)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_zeros_are_zeros(name: str) -> None:
    layer = prepare(nn.Sequential(nn.Linear(64, 4)), ALL[name])[0]
    with torch.no_grad():
        layer.weight[:, :32] = 0.0
        layer.bias.zero_()
    calibrate(layer)
    x = torch.zeros(2, 64)
    assert_same_bits(layer(x), torch.zeros(2, 4))
    x[0, 40] = 1.0
    assert layer(x)[0].abs().max() > 0
    assert math.isclose(layer(x)[1].abs().max().item(), 0.0)


BITS = {
    **{"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25},
    **{"Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "TQ1_0": 2.0625, "TQ2_0": 2.0625},
}
"""Bits per weight of GGUF's types; TQ1_0 packs five of three values into a byte there, which our files do not."""


@pytest.mark.parametrize("method", ["max", None])
@pytest.mark.parametrize("name", BITS)
def test_types_of_gguf_take_their_bits_and_stay_on_their_lattice(name: str, method: str, tmp_path: Path) -> None:
    model = prepare(nn.Sequential(nn.Linear(512, 64, bias=False), nn.Linear(64, 64)), f"gguf_{name}")
    with torch.no_grad():
        model[0].weight[3] = 0.0
        model[0].weight[4, :256] = 0.0
    spec = model[0]._weight_quantizer.spec
    assert spec_bits(spec, (64, 512)).per_weight == BITS[name]
    x = torch.randn(8, 512)
    following = model(x)
    calibrate(model, weight_method=method)
    assert torch.equal(model(x), following) == (method == "max" or name == "MXFP4")
    following = model(x)
    for _, codes in fq.snapshot(model).weights.items():
        for rule, values in ((spec.scale, codes.scale), (spec.offset, codes.zero_point)):
            if rule is not None:
                assert values is not None
                assert torch.equal(rule.join(rule.split(values)), values)
    fq.save(model, tmp_path, packed=True)
    again = fq.load(nn.Sequential(nn.Linear(512, 64, bias=False), nn.Linear(64, 64)), tmp_path)
    assert torch.equal(again(x), following)
    (file,) = tmp_path.glob("*.safetensors")
    padded = 64 * 256 if spec.scale.granularity is not None or "TQ" in name else 64 * 64
    assert file.stat().st_size <= BITS[name] / 8 * (64 * 512 + padded) + 1500
    assert torch.equal(again[0].quantized_weight()[3], torch.zeros(512))


def test_what_onnx_cannot_say_is_refused_by_name() -> None:
    for name, text in (("gguf_q4_k", "no offsets in units of x"), ("gguf_q6_k", "scales of ONNX are positive")):
        model = prepare(nn.Sequential(nn.Linear(256, 8)), name)
        with pytest.raises(ExportError, match=f"0._weight_quantizer.*{text}"):
            fq.export_onnx(model, torch.randn(2, 256), "never.onnx")


@pytest.mark.parametrize("name", ["NVFP4_FOUR_OVER_SIX", "BITNET"])
def test_scales_by_all_values_are_calibrated_as_they_follow(name: str) -> None:
    model = prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), name)
    x = torch.randn(4, 64)
    following = model(x)
    calibrate(model, [x])
    assert torch.equal(model(x), following)
    assert model[0]._weight_quantizer.calibrated
