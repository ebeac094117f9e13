"""Stacked experts of transformers: against every expert quantized by hand, as if it were two linear layers."""

from __future__ import annotations

import importlib
import pickle
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant import Rule
from fakequant.errors import CallError, ConfigError
from fakequant.functional import fake_quantize
from fakequant.nn.quantized.foreign import QuantExperts
from fakequant.nn.quantized.layers import quantizes_made_by
from tests.support.gradient_oracles import REFERENCES, Held, Reference, assert_same_gradients, exact_sums
from tests.support.transformers_models import ARCHITECTURES
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

__all__ = ["exact_sums"]  # a fixture
EXPERTS = {
    "mixtral": "MixtralExperts",
    "gpt_oss": "GptOssExperts",
    "nemotron_h": "NemotronHExperts",
    "muse_spark": "MuseSparkExperts",
    "aria": "AriaExperts",
}
"""Every combination of flags that transformers has: gated, transposed, with biases, with a norm."""
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def experts(name: str, implementation: str = "eager") -> Any:
    """Four experts of 16 features and 8 hidden ones, of a class of transformers."""
    config = SimpleNamespace(
        **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("hidden_size", "moe_hidden_size"), 16),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 8),
        **dict.fromkeys(("hidden_act", "mlp_hidden_act"), "silu"),
        **{"moe_latent_size": None, "swiglu_alpha": 1.7, "swiglu_limit": 7.0, "post_norm_eps": 1e-5},
        _experts_implementation=implementation,
    )
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    made = getattr(module, EXPERTS[name])(config)
    torch.manual_seed(0)
    for parameter in made.parameters():
        # Experts of different magnitudes, which one range would not serve.
        gains = torch.tensor([1.0, 0.1, 3.0, 0.01]) if parameter.shape[0] == 4 else torch.ones(parameter.shape[0])
        parameter.data = torch.randn_like(parameter) * gains.view(-1, *[1] * (parameter.dim() - 1))
    return made.eval()


def routed(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two experts for each, of which the last is never chosen, and their weights."""
    x = torch.linspace(-3, 3, tokens * 16).mul(7).sin().view(tokens, 16)
    index = torch.tensor([[0, 1], [2, 0], [1, 2]]).repeat(2, 1)[:tokens]
    return x, index, torch.tensor([0.75, 0.25]).expand(tokens, 2)


def by_hand(module: Any, data: tuple[Tensor, Tensor, Tensor], weight: str, x_spec: Any, hidden_spec: Any) -> Tensor:
    """Every expert on its own tokens, with `F.linear` of two quantized factors."""
    x, index, shares = data
    x, first = x_spec(x), "gate_up_proj" if module.has_gate else "up_proj"
    result = torch.zeros_like(x)

    def linear(name: str, expert: int, x: Tensor) -> Tensor:
        own = getattr(module, name)[expert]
        own = fake_quantize(own.T.contiguous() if module.is_transposed else own, weight)
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        y = x @ own.T.contiguous() if module.is_transposed else F.linear(x, own)
        return y if bias is None else y + bias

    for expert in index.unique().tolist():
        place, token = torch.where((index == expert).T)
        y = linear(first, expert, x[token])
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = linear("down_proj", expert, hidden_spec(y))
        y = module.post_expert_norm(y) if module.has_post_expert_norm else y
        result.index_add_(0, token, y * shares[token, place, None])
    return result


WEIGHTS = {
    "INT8": "int8 per_channel(0)",
    "INT4_GROUP32": "int4 per_block(-1:32,pad)",
    "NVFP4": "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
}


@pytest.mark.parametrize("preset", WEIGHTS)
@pytest.mark.parametrize("name", EXPERTS)
def test_every_expert_has_the_bits_of_linear_layers(name: str, preset: str) -> None:
    float_experts, data = experts(name), routed()
    model = fq.prepare(deepcopy(float_experts), preset)
    assert isinstance(model, QuantExperts)
    assert type(model).__name__ == f"Quant{EXPERTS[name]}"
    fq.calibrate(model, [data])
    with torch.no_grad():
        quantizers = [model._modules.get(key) or nn.Identity() for key in ("_input_quantizer", "_down_input_quantizer")]
        assert torch.equal(model(*data), by_hand(float_experts, data, WEIGHTS[preset], *quantizers))
        with fq.disabled(model):
            assert torch.equal(model(*data), float_experts(*data))


@pytest.mark.parametrize("name", EXPERTS)
def test_one_range_for_each_expert(name: str) -> None:
    weight = Rule("*", weight=fq.TensorConfig("int8 per_tensor"))
    model = fq.prepare(experts(name), fq.Config("one", (weight,)))
    with torch.no_grad():
        y = model(*routed())
        assert torch.equal(y, by_hand(experts(name), routed(), "int8 per_tensor", *[nn.Identity()] * 2))
    fq.calibrate(model, [routed()])
    first = "gate_up_proj" if model.has_gate else "up_proj"
    quantizer: Any = getattr(model, f"_{first}_weight_quantizer")
    assert quantizer.scale.flatten().tolist() == (getattr(model, first).abs().amax((1, 2)) / 127).tolist()


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_implementations_agree(name: str, implementation: str) -> None:
    model, data = fq.prepare(experts(name, implementation), "int8"), routed()
    fq.calibrate(model, [data])
    with torch.no_grad():
        y = model(*data)
        with fq.disabled(model):
            assert torch.equal(model(*data), experts(name, implementation)(*data))
        assert not torch.equal(y, experts(name, implementation)(*data))
        expected = by_hand(experts(name), data, WEIGHTS["INT8"], model._input_quantizer, model._down_input_quantizer)
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_train(implementation: str) -> None:
    model, data = fq.prepare(experts("mixtral", implementation), "int8"), routed()
    fq.calibrate(model, [data])
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    model(*data).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    gradient = model.gate_up_proj.grad.abs().sum((1, 2))
    assert (gradient[:3] > 0).all()
    assert gradient[3] == 0  # no token reached it


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_model_with_experts(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    float_model, inputs = architecture.make(), architecture.inputs()
    model = fq.prepare(deepcopy(float_model), "int8")
    fq.calibrate(model, [inputs])
    with torch.no_grad():
        y = model(**inputs)[0]
        with fq.disabled(model):
            assert torch.equal(model(**inputs)[0], float_model(**inputs)[0])
        assert torch.equal(deepcopy(model)(**inputs)[0], y)
        assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs)[0], y)
        fq.save(model, tmp_path / "saved")
        assert torch.equal(fq.load(architecture.make(), tmp_path / "saved")(**inputs)[0], y)
    (row,) = [layer for layer in fq.summary(model).layers if layer.name.endswith("experts")]
    assert list(row.quantizers) == [
        *("_input_quantizer", "_down_input_quantizer"),
        *("_gate_up_proj_weight_quantizer", "_down_proj_weight_quantizer"),
    ]
    assert row.state == "ready"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_compile_and_export(implementation: str) -> None:
    model, data = fq.prepare(experts("gpt_oss", implementation), "int8"), routed()
    fq.calibrate(model, [data])
    with torch.no_grad():
        y = model(*data)
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*data), y)
        assert torch.equal(torch.export.export(model, data, strict=False).module()(*data), y)
    assert fq.unquantized(model, data, products_only=True) == []


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_save_pretrained(name: str, tmp_path: Path) -> None:
    import transformers

    from fakequant.integrations.transformers import enable_saving

    architecture = ARCHITECTURES[name]
    model, inputs = fq.prepare(architecture.make(), "int8"), architecture.inputs()
    fq.calibrate(model, [inputs])
    enable_saving(model).save_pretrained(tmp_path)  # type: ignore[operator]
    again = getattr(transformers, architecture.model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], model(**inputs)[0])


def test_experts_stay_in_float_by_a_rule() -> None:
    model = fq.prepare(ARCHITECTURES["mixtral"].make(), fq.presets.INT8.with_rule(Rule("*", layers="MixtralExperts")))
    assert not any(isinstance(module, QuantExperts) for module in model.modules())


def test_refusals() -> None:
    model = fq.prepare(experts("mixtral", "sonicmoe"), "int8_per_token")
    with pytest.raises(CallError, match=r"'sonicmoe' computes both products at once, .*set_experts_implementation"):
        model(*routed())
    module = experts("mixtral")
    module.gate_up_proj = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"it has no parameter gate_up_proj with three axes"):
        fq.prepare(module, "int8")
    with pytest.raises(
        ConfigError, match=r"layers of transformers\.\S+moe already have the quantized class QuantExperts"
    ):
        quantizes_made_by("transformers.integrations.moe")(QuantExperts)


@pytest.mark.parametrize("spec", ["int4 per_channel(0)", "int4 per_block(-1:8)", "uint4 per_block(-1:4)"])
@pytest.mark.parametrize("name", EXPERTS)
def test_the_weights_of_experts_are_chosen_as_those_of_layers(name: str, spec: str) -> None:
    model: Any = nn.ModuleList([experts(name)])
    torch.manual_seed(1)
    tokens = [torch.randn(120, 16) * torch.linspace(0.1, 3, 16) for _ in range(5)]
    index = [torch.stack([torch.randperm(3)[:2] for _ in range(120)]) for _ in tokens]  # the last expert gets none
    batches = [(x, own, torch.full((120, 2), 0.5)) for x, own in zip(tokens, index, strict=True)]
    first = "gate_up_proj" if model[0].has_gate else "up_proj"
    of_floats = getattr(model[0], first).detach().clone()
    fq.prepare(model, fq.Config("own", (Rule(weight=spec),)))
    how: Any = {"judge": [], "progress": False}
    found = fq.ptq.improve(
        model, batches, ["ranges", "gptq", "descend"], forward=lambda model, batch: model[0](*batch), **how
    )
    rows = {row.layer: row for row in found.layers}
    assert all(row.after < 0.9 * row.before and "1 of its 4 experts" in row.remarks[-1] for row in rows.values())
    for expert in range(4):
        layer = nn.Linear(16, 1, bias=False)
        own = of_floats[expert].T if model[0].is_transposed else of_floats[expert]
        layer.weight = nn.Parameter(own.contiguous())
        alone = fq.prepare(nn.Sequential(layer), fq.Config("own", (Rule(weight=spec),)))
        seen = [x[(chosen == expert).any(1)] for x, chosen in zip(tokens, index, strict=True)]
        if expert < 3:
            fq.ptq.improve(alone, seen, ["ranges", "gptq", "descend"], **how)
        chosen = getattr(model[0], first)[expert]
        assert torch.equal(chosen.T if model[0].is_transposed else chosen, alone[0].quantized_weight())


def test_experts_of_llama4_and_jetmoe_are_chosen() -> None:
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    config: Any = SimpleNamespace(num_local_experts=3, intermediate_size=8, hidden_size=16, hidden_act="silu")
    torch.manual_seed(0)
    llama, jet = Llama4TextExperts(config), JetMoeParallelExperts(3, 16, 8)
    for parameter in (*llama.parameters(), *jet.parameters()):
        parameter.data = torch.randn_like(parameter)
    how: Any = {"judge": [], "progress": False}
    for model, run in ((llama, lambda own, x: own[0](x)), (jet, lambda own, x: own[0](x, [20, 8, 20]))):
        held = fq.prepare(nn.ModuleList([model]), "int4_weight_only")
        batches = [torch.randn(48, 16) * torch.linspace(0.1, 3, 16) for _ in range(4)]
        found = fq.ptq.improve(held, batches, ["ranges", "gptq"], forward=run, **how)
        assert found.layers
        assert all(row.after < 0.9 * row.before for row in found.layers)


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("reference", REFERENCES[4:8], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", EXPERTS)
def test_quantized_gradients_are_those_of_linear_layers(name: str, implementation: str, reference: Reference) -> None:
    """Each expert has the gradients of two linear layers, whose operands are quantized in numpy."""
    x, index, shares = routed()
    own, x = experts(name, implementation), x.requires_grad_()
    model = fq.prepare(deepcopy(own), fq.Config(reference.rule()))
    first, held, result = "gate_up_proj" if own.has_gate else "up_proj", Held.apply(x), torch.zeros_like(x)

    def product(name: str, expert: int, x: Tensor, held: Tensor) -> Tensor:
        weight = getattr(own, name)[expert]
        y = reference.linear(x, weight.T if own.is_transposed else weight, None, held)
        return y + getattr(own, f"{name}_bias")[expert] if own.has_bias else y

    for expert in index.unique().tolist():
        place, token = torch.where((index == expert).T)
        y = product(first, expert, x[token], held[token])
        y = own._apply_gate(y) if own.has_gate else own.act_fn(y)
        y = product("down_proj", expert, y, Held.apply(y))
        y = own.post_expert_norm(y) if own.has_post_expert_norm else y
        result.index_add_(0, token, y * shares[token, place, None])
    assert_same_gradients(model(x, index, shares), result, model, own, x)
