"""Attention of transformers: quantizers of functions that its modules call, against attention quantized by hand."""

from __future__ import annotations

import pickle
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import Config, Rule, TensorConfig
from fakequant.errors import ConfigError, SiteError
from fakequant.functional import fake_quantize
from fakequant.model.run.outputs import record
from fakequant.model.sites import apply_sites, plan_sites, site_plan
from fakequant.nn.sites import sites_of
from tests.support.transformers_models import ARCHITECTURES, own_attention, tokens, uncached
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from fakequant.integrations.transformers_cache import name_attention  # noqa: E402

DECODER = ARCHITECTURES["llama"]
ATTENTION = Config("attention", (Rule("*", input=TensorConfig("int8"), ops=("sdpa", "matmul"), optional=True),))
FUNCTIONS = [name for name in ARCHITECTURES if name != "gpt_oss"]  # its attention has sinks, and is always eager


def prepared(name: str, **further: Any) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """A float model, and one whose attention has calibrated quantizers; no trace is made, which takes a second."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(**further), architecture.inputs()
    float_model = deepcopy(model)
    apply_sites(model, plan_sites(model, ATTENTION, record(model, lambda: model(**inputs))))
    fq.calibrate(model, [inputs])
    return float_model, model, inputs


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def attend_by_hand(ranges: dict[nn.Module, dict[str, Any]], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a user would write: query, key and value quantized as the attention function gets them."""
    *factors, mask = args
    scales = [ranges[module][name] for name in ("query", "key", "value")]
    factors = [fake_quantize(x, "int8", scale=scale) for scale, x in zip(scales, factors, strict=True)]
    return sdpa_attention_forward(module, *factors, mask, **kwargs)


@pytest.fixture
def by_hand() -> Any:
    """Gives attention of a model quantized by hand, with the ranges of a prepared one."""

    def give(float_model: nn.Module, model: nn.Module) -> None:
        ranges: dict[nn.Module, dict[str, Any]] = {}
        for path, module in model.named_modules():
            if (sites := sites_of(module)) is not None:
                held = sites.scaled_dot_product_attention_0.named_children()  # type: ignore[operator]
                ranges[float_model.get_submodule(path)] = {key: float(quantizer.scale) for key, quantizer in held}
        register(float_model, partial(attend_by_hand, ranges))

    with own_attention() as register:
        yield give


@pytest.mark.parametrize("name", FUNCTIONS)
def test_quantizers_of_sdpa_are_those_of_attention_by_hand(name: str, by_hand: Any) -> None:
    float_model, model, inputs = prepared(name)
    plan = site_plan(model)
    assert [site.function for site in plan.sites] == ["scaled_dot_product_attention"] * ARCHITECTURES[name].attentions
    assert all(list(site.quantizers) == ["query", "key", "value"] for site in plan.sites)
    before = output(float_model, inputs)
    with fq.disabled(model):
        assert torch.equal(output(model, inputs), before)
    by_hand(float_model, model)
    y = output(model, inputs)
    assert torch.equal(y, output(float_model, inputs))
    assert not torch.equal(y, before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_eager_attention_has_its_probabilities_quantized(name: str) -> None:
    float_model, model, inputs = prepared(name, attn_implementation="eager")
    sites = site_plan(model).sites
    owners = {site.owner for site in sites if "att" in site.owner.lower()}
    assert len(owners) == ARCHITECTURES[name].attentions
    for owner in owners:
        own = model.get_submodule(owner)._sites
        assert list(own._modules) == ["matmul_0", "matmul_1"]
        # The largest probability is that of the only token that a first query sees, where a model is causal.
        assert 0 < float(own.matmul_1.input.scale) <= 1 / 127
    with fq.disabled(model):
        assert torch.equal(output(model, inputs), output(float_model, inputs))
    assert not torch.equal(output(model, inputs), output(float_model, inputs))


def test_attention_of_a_decoder_trains_copies_and_exports(tmp_path: Path) -> None:
    float_model, model, inputs = prepared("llama")
    y = output(model, inputs)
    assert torch.equal(output(deepcopy(model), inputs), y)
    assert torch.equal(output(pickle.loads(pickle.dumps(model)), inputs), y)
    fq.save(model, tmp_path / "saved")
    again = fq.load(DECODER.make(), tmp_path / "saved")
    assert torch.equal(output(again, inputs), y)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(output(compiled, inputs), y)
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, strict=False)
        assert torch.equal(program.module()(**inputs)[0], y)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    model(**inputs)[0].square().mean().backward()
    site: Any = model.get_submodule("model.layers.0.self_attn._sites.scaled_dot_product_attention_0")
    gradients = [parameter.grad for parameter in site.parameters()]
    assert len(gradients) == 3
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith("proj.weight"))
    assert [name for name in float_model.state_dict() if "_sites" in name] == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generation_with_and_without_a_cache_is_the_same(implementation: str) -> None:
    _, model, _ = prepared("llama", attn_implementation=implementation)
    generate: Any = model.generate
    for options in ({}, {"num_beams": 2}):
        cached = generate(**tokens(), max_new_tokens=4, do_sample=False, **options)
        assert torch.equal(cached, generate(**tokens(), max_new_tokens=4, do_sample=False, use_cache=False, **options))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_product_of_a_decoder_is_left_in_float(implementation: str) -> None:
    model = DECODER.make(attn_implementation=implementation)
    rules = Rule("*", input="int8", ops=("sdpa", "matmul"))
    fq.prepare(model, fq.presets.INT8.with_rule(rules), example=uncached())
    fq.calibrate(model, [uncached()])
    assert fq.unquantized(model, uncached(), products_only=True) == []
    found = {layer.name: layer.state for layer in fq.summary(model).layers}
    function = "scaled_dot_product_attention_0" if implementation == "sdpa" else "matmul_0"
    assert found[f"model.layers.0.self_attn._sites.{function}"] == "ready"


def named(implementation: str, rule: Rule) -> tuple[nn.Module, nn.Module]:
    """A float model, and one whose attention is called as one function with calibrated quantizers."""
    float_model, inputs = DECODER.make(attn_implementation=implementation), uncached()
    model: Any = name_attention(deepcopy(float_model))  # type: ignore[type-var]
    apply_sites(model, plan_sites(model, Config("named", (rule,)), record(model, lambda: model(**inputs))))
    fq.calibrate(model, [inputs])
    return float_model, model


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_attention_counts_as_many_multiplications_by_any_name(implementation: str) -> None:
    def count(model: nn.Module) -> int:
        return sum(call.multiplications for call in record(model, lambda: model(**uncached())).calls)

    with torch.compiler.set_stance("force_eager"):
        own = DECODER.make(attn_implementation=implementation)
        wanted = count(DECODER.make(attn_implementation="sdpa"))
        assert count(own) == count(name_attention(deepcopy(own))) == wanted  # type: ignore[type-var]


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_attention_is_named_as_one_function(implementation: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # transformers compiles flex attention, which takes seconds
        float_model, model = named(implementation, Rule("*", input=TensorConfig("int8 per_tensor"), ops=("attention",)))
        (site,) = site_plan(model).sites
        assert site.path == "model.layers.0.self_attn._sites.attention_function_0"
        y, before = output(model, uncached()), output(float_model, uncached())
        with fq.disabled(model):
            assert torch.equal(output(model, uncached()), before)
        held = dict(model.get_submodule(site.path).named_children())
        original = ALL_ATTENTION_FUNCTIONS[implementation]

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
            return original(module, held["query"](query), held["key"](key), held["value"](value), *args, **options)

        # What the float model calls now is the function quantized by hand.
        ALL_ATTENTION_FUNCTIONS[implementation] = attend
        try:
            assert torch.equal(output(float_model, uncached()), y)
        finally:
            del ALL_ATTENTION_FUNCTIONS[implementation]
    assert not torch.equal(y, before)
    assert ALL_ATTENTION_FUNCTIONS[implementation] is original


def test_named_attention_has_one_number_of_heads(tmp_path: Path) -> None:
    _, model = named("sdpa", Rule("*", input=TensorConfig("int8 per_channel(1)"), ops=("attention",)))
    site: Any = model.get_submodule("model.layers.0.self_attn._sites.attention_function_0")
    assert [list(quantizer.scale.shape) for quantizer in site.children()] == [[1, 2, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    generate: Any = model.generate
    cached = generate(**tokens(), max_new_tokens=4, do_sample=False)
    assert torch.equal(cached, generate(**tokens(), max_new_tokens=4, do_sample=False, use_cache=False))
    generate(tokens()["input_ids"][:1], max_new_tokens=2, do_sample=False)  # no mask, so that sdpa gets other heads
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = output(model, uncached())
    assert torch.equal(output(compiled, uncached()), y)
    fq.save(model, tmp_path / "saved")
    again: Any = fq.load(name_attention(DECODER.make()), tmp_path / "saved")  # type: ignore[type-var]
    assert torch.equal(output(again, uncached()), y)
    with pytest.raises(SiteError, match="planned: attention_function\n  called:  none"):
        output(fq.load(DECODER.make(), tmp_path / "saved"), uncached())


def test_another_model_of_the_same_configuration_is_as_before() -> None:
    model: Any = DECODER.make()
    other: Any = type(model)(model.config).eval()
    name_attention(model)
    assert model.config._attn_implementation == "fakequant_sdpa"
    assert model.model.layers[0].self_attn.config is model.config is model.model.config
    assert other.config._attn_implementation == other.model.layers[0].self_attn.config._attn_implementation == "sdpa"


def test_eager_attention_needs_no_name() -> None:
    with pytest.raises(ConfigError, match=r"'eager' of the model is not a registered function .* ops=\('matmul',\)"):
        name_attention(DECODER.make(attn_implementation="eager"))  # type: ignore[type-var]
