"""Layers of other libraries that are quantized by their names."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.summary import operations
from fakequant.nn.quantized.layers import QuantConv3d, _named_layers, quantizes
from tests.support.vision import import_torchvision


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", autouse=True)
def _vision() -> None:
    import_torchvision()


def conv1d() -> tuple[nn.Module, Tensor]:
    module = pytest.importorskip("transformers.pytorch_utils")
    return module.Conv1D(6, 4), data(2, 3, 4)


def same(stride: int, dilation: int, size: int) -> tuple[nn.Module, Tensor]:
    module = pytest.importorskip("timm.layers")
    return module.Conv2dSame(4, 6, (3, 2), stride=stride, dilation=dilation, groups=2), data(2, 4, size, size + 1)


def linear() -> tuple[nn.Module, Tensor]:
    module = pytest.importorskip("timm.layers")
    return module.Linear(4, 6), data(2, 3, 4)


def standard(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    module = pytest.importorskip("timm.layers.std_conv")
    layer = getattr(module, name)(4, 6, 3, groups=2, bias=True, **options)
    if "Scaled" in name:
        nn.init.uniform_(layer.gain, 0.5, 2)
    return layer, data(2, 4, 6, 7)


STANDARD = ("StdConv2d", "ScaledStdConv2d", "StdConv2dSame", "ScaledStdConv2dSame")
CASES: dict[str, Any] = {
    **{
        f"timm.layers.std_conv.{name}": [
            lambda name=name: standard(name, stride=2),
            lambda name=name: standard(name, stride=3, dilation=2),
            lambda name=name: standard(name, padding="same" if name.endswith("Same") else 2),
        ]
        for name in STANDARD
    },
    "transformers.pytorch_utils.Conv1D": [conv1d],
    "timm.layers.linear.Linear": [linear],
    "timm.layers.conv2d_same.Conv2dSame": [
        lambda stride=stride, dilation=dilation, size=size: same(stride, dilation, size)
        for stride, dilation, size in ((1, 1, 5), (2, 1, 5), (2, 1, 6), (3, 1, 7), (1, 2, 5), (2, 3, 8))
    ],
}


def of_transformers(name: str, *args: Any, **values: Any) -> nn.Module:
    """A layer of transformers with random weights, with a configuration of these values for a class that takes one."""
    path, _, cls = name.rpartition(".")
    made = getattr(pytest.importorskip(path), cls)(*args or (SimpleNamespace(**values),))
    return made.requires_grad_(False).apply(lambda one: [p.normal_() for p in one.parameters(recurse=False)])


def geometric() -> tuple[nn.Module, tuple[Any, ...], dict[str, str]]:
    module = pytest.importorskip("torch_geometric.nn")
    return module.Linear(4, 6), (data(2, 3, 4),), {"weight": "int8 per_channel(0)"}


SCALED = [
    "transformers.models.bart.modeling_bart.BartScaledWordEmbedding",
    "transformers.models.bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusScaledWordEmbedding",
    "transformers.models.biogpt.modeling_biogpt.BioGptScaledWordEmbedding",
    "transformers.models.blenderbot.modeling_blenderbot.BlenderbotScaledWordEmbedding",
    "transformers.models.m2m_100.modeling_m2m_100.M2M100ScaledWordEmbedding",
    "transformers.models.mbart.modeling_mbart.MBartScaledWordEmbedding",
    "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeScaledWordEmbedding",
    "transformers.models.pegasus_x.modeling_pegasus_x.PegasusXScaledWordEmbedding",
    "transformers.models.plbart.modeling_plbart.PLBartScaledWordEmbedding",
    "transformers.models.pp_formulanet.modeling_pp_formulanet.PPFormulaNetScaledWordEmbedding",
    "transformers.models.seamless_m4t.modeling_seamless_m4t.SeamlessM4TScaledWordEmbedding",
    "transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2ScaledWordEmbedding",
    "transformers.models.trocr.modeling_trocr.TrOCRScaledWordEmbedding",
    "transformers.models.xglm.modeling_xglm.XGLMScaledWordEmbedding",
    "transformers.models.minicpm3.modeling_minicpm3.MiniCPM3ScaledWordEmbedding",
    "transformers.models.diffusion_gemma.modeling_diffusion_gemma.DiffusionGemmaTextScaledWordEmbedding",
    "transformers.models.embedding_gemma2.modeling_embedding_gemma2.EmbeddingGemma2TextScaledWordEmbedding",
    "transformers.models.gemma.modeling_gemma.GemmaTextScaledWordEmbedding",
    "transformers.models.gemma2.modeling_gemma2.Gemma2TextScaledWordEmbedding",
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding",
    "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextScaledWordEmbedding",
    "transformers.models.gemma4.modeling_gemma4.Gemma4TextScaledWordEmbedding",
    "transformers.models.gemma4_unified.modeling_gemma4_unified.Gemma4UnifiedTextScaledWordEmbedding",
    "transformers.models.vaultgemma.modeling_vaultgemma.VaultGemmaTextScaledWordEmbedding",
]
LLAMA4 = {"num_local_experts": 2, "intermediate_size": 3, "hidden_size": 4, "hidden_act": "silu"}
OTHERS: dict[str, Callable[[str], tuple[nn.Module, tuple[Any, ...], dict[str, str]]]] = {
    **{
        name: lambda name: (
            of_transformers(name, 5, 4, 0, 2.5),
            (torch.tensor([[1, 4], [0, 2]]),),
            {"weight": "int8 per_channel(0)"},
        )
        for name in SCALED
    },
    "transformers.models.falcon.modeling_falcon.FalconLinear": lambda name: (
        of_transformers(name, 4, 6),
        (data(2, 3, 4),),
        {"weight": "int8 per_channel(0)"},
    ),
    "transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts": lambda name: (
        of_transformers(name, 3, 4, 6),
        (data(7, 4), [2, 0, 5]),
        {"weight": "int8 per_channel(0,1)"},
    ),
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts": lambda name: (
        of_transformers(name, **LLAMA4),
        (data(6, 4),),
        {"gate_up_proj": "int8 per_channel(0,2)", "down_proj": "int8 per_channel(0,2)"},
    ),
    "torch_geometric.nn.dense.linear.Linear": lambda name: geometric(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_with_a_forward_of_its_own_computes_with_quantized_weights(name: str, tmp_path: Path) -> None:
    module, args, specs = OTHERS[name](name)
    expected = copy.deepcopy(module)
    for attribute, spec in specs.items():
        weight = getattr(expected, attribute)
        weight.data.copy_(fq.fake_quantize(weight, spec))
    quantized = fq.prepare(nn.Sequential(copy.deepcopy(module)), "int8_weight_only")
    assert torch.equal(quantized[0](*args), expected(*args))  # type: ignore[operator]
    assert isinstance(quantized[0], type(module))
    fq.calibrate(quantized)
    loaded = fq.load(nn.Sequential(copy.deepcopy(module)), fq.save(quantized, tmp_path))
    assert torch.equal(loaded[0](*args), expected(*args))  # type: ignore[operator]
    with fq.disabled(quantized):
        assert torch.equal(quantized[0](*args), module(*args))  # type: ignore[operator]
    static = fq.prepare(copy.deepcopy(module), "int8")
    fq.calibrate(static, [args], forward=lambda model, batch: model(*batch))
    assert all(quantizer.calibrated for quantizer in fq.nn.quantizers(static).values())


def plain(module: nn.Module) -> Any:
    """The layer with its weight as it is multiplied: a standardized one by a convolution without standardization."""
    if type(module).__name__ not in STANDARD:
        return copy.deepcopy(module)
    torch.manual_seed(0)
    seen: list[Tensor] = []
    conv2d, torch.nn.functional.conv2d = F.conv2d, lambda x, w, *others: (seen.append(w), conv2d(x, w, *others))[1]
    try:
        module(torch.zeros(1, 4, 9, 9))
    finally:
        torch.nn.functional.conv2d = conv2d
    layer: Any = module
    result = nn.Conv2d(4, 6, 3, layer.stride, layer.padding, layer.dilation, groups=2)
    result.load_state_dict({"weight": seen[0].detach(), "bias": layer.bias.detach()})
    return result


def padded(module: Any, x: Tensor) -> Tensor:
    if not getattr(module, "same_pad", False):
        return x
    return pytest.importorskip("timm.layers.padding").pad_same(x, module.kernel_size, module.stride, module.dilation)


def test_every_name_has_a_case() -> None:
    assert set(CASES) | set(OTHERS) == set(_named_layers)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_the_float_layer_on_quantized_tensors(name: str) -> None:
    for case in CASES[name]:
        torch.manual_seed(0)
        module, x = case()
        channels = 1 if name.endswith("Conv1D") else 0
        expected_module = plain(module)
        with torch.no_grad():
            weight = fq.fake_quantize(expected_module.weight, f"int8 per_channel({channels})")
            expected_module.weight.copy_(weight)
        quantized = fq.prepare(copy.deepcopy(module), "int8")
        fq.calibrate(quantized, [x], "max")
        assert torch.equal(quantized(x), expected_module(padded(module, fq.fake_quantize(x, "int8"))))
        with fq.disabled(quantized):
            assert torch.equal(quantized(x), module(x))
        assert isinstance(quantized, type(module))
        assert torch.equal(pickle.loads(pickle.dumps(quantized))(x), quantized(x))
        assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


def test_blocks_lie_along_the_axis_that_is_summed() -> None:
    layer, _ = conv1d()
    fq.prepare(layer, "int4_group32")
    assert str(layer._weight_quantizer.spec.granularity) == "per_block(0:32,pad)"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", STANDARD)
def test_a_standardized_weight_is_computed_and_cannot_be_folded(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(standard(name)[0])
    x = data(2, 4, 6, 7)
    keys = set(model.state_dict())
    fq.calibrate(fq.prepare(model, "int8"), [x], "max")
    assert keys < set(model.state_dict())
    loaded = fq.load(nn.Sequential(standard(name)[0]), fq.save(model, tmp_path))
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ConfigError, match=r"^0: the weight is computed"):
        fq.bake_weights(model)
    model(x).sum().backward()
    assert model[0]._parameters["weight"].grad.abs().sum() > 0
    if "Scaled" in name:
        assert model[0].gain.grad.abs().sum() > 0


def test_places_without_an_axis_of_examples() -> None:
    layer, x = same(2, 1, 5)
    fq.calibrate(fq.prepare(layer, "int8"), [x], "max")
    assert torch.equal(layer(x)[0], layer(x[0]))


def test_a_language_model_of_such_layers_is_quantized_and_verified(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    float_model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 64, (2, 8))
    model = fq.prepare(copy.deepcopy(float_model), "int8")
    fq.calibrate(model, [ids], "max")
    products = [operation for operation in operations(model, ids) if operation.is_product]
    total = sum(operation.multiplications for operation in products)
    assert sum(operation.multiplications for operation in products if operation.quantized) > 0.9 * total
    loaded = fq.load(copy.deepcopy(float_model), fq.save(model, tmp_path / "checkpoint"))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    fq.export_onnx(model, ids, tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model).exact


def test_a_rule_leaves_adapters_in_float() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"]))
    config = fq.presets.INT8.with_rule(fq.Rule("*lora_*"))
    fq.prepare(model, config)
    assert {name for name in fq.nn.quantizers(model) if "lora" in name} == set()
    assert sum("base_layer" in name for name in fq.nn.quantizers(model)) == 2


def test_video_networks_are_quantized() -> None:
    resnet = pytest.importorskip("torchvision.models.video.resnet")
    torch.manual_seed(0)
    block = resnet.BasicBlock(2, 2, resnet.Conv3DSimple).eval()
    fq.calibrate(fq.prepare(block, "int8"), [data(1, 2, 3, 4, 4)], "max")
    assert isinstance(block.conv1[0], QuantConv3d)
    assert isinstance(block.conv1[0], resnet.Conv3DSimple)
    assert isinstance(resnet.Conv3DNoTemporal(2, 2), nn.Conv3d)


def test_a_name_may_be_registered_before_its_module_is_there() -> None:
    @quantizes(f"{__name__}.Later")
    class QuantLater(fq.nn.QuantizedLayer):
        def forward(self, x: Tensor) -> Tensor:
            return self.quantized_input(x) @ self.quantized_weight().T

    Later = type("Later", (nn.Module,), {"__module__": __name__, "__qualname__": "Later"})
    try:
        layer: Any = Later()
        layer.weight = nn.Parameter(data(3, 4))
        fq.calibrate(fq.prepare(layer, "int8"), [data(2, 4)], "max")
        assert layer(data(2, 4)).shape == (2, 3)
        assert isinstance(layer, QuantLater)
        with pytest.raises(ConfigError, match=r"\.Later already has the quantized class QuantLater"):
            quantizes(f"{__name__}.Later")(QuantLater)
    finally:
        del _named_layers[f"{__name__}.Later"]


def test_no_library_is_imported_for_its_names() -> None:
    code = "import sys, fakequant.nn; print([m for m in ('transformers', 'timm', 'accelerate') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
