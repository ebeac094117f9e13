"""Mixtures of types are those of llama-quantize, inputs of products and logits those of llama.cpp."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.delivery import deliver
from fakequant.delivery.format import weight_slots
from fakequant.delivery.gguf.architecture import (
    _MIXTURES,
    GgufNames,
    architecture_of,
    computed_by_llama_cpp,
    llama_cpp_inputs,
    mixture,
)
from fakequant.delivery.gguf.blocks import LAYOUTS, GgufFile, kind_of, spec_of
from fakequant.delivery.gguf.llama_cpp import LlamaCpp
from fakequant.errors import ConfigError, ExportError
from tests.support import llama_cpp_files
from tests.support.language_models import language_model

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the file has no tokenizer")


def kinds(path):
    return {name: one.kind for name, one in GgufFile(path).tensors.items() if len(one.shape) == 2}


def rules_of(model, name):
    """The types of a mixture by the names of tensors in a file."""
    names = GgufNames(architecture_of(model), model)
    rules = {rule.pattern: rule.weight.spec for rule in mixture(model, name).rules}
    places = {weight: one.path for weight, one in weight_slots(model).items() if one.path in rules}
    shapes = {weight: names.shape(weight, model.get_parameter(weight).shape) for weight in places}
    return {names.of(weight)[0]: kind_of(rules[path], shapes[weight]) for weight, path in places.items()}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {"num_hidden_layers": 17}),
        ("qwen2", {"num_hidden_layers": 9, "tie_word_embeddings": True}),
        ("phi3", {"num_hidden_layers": 3, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 1, "hidden_size": 288, "head_dim": 64}),  # no whole blocks of 256
        ("qwen3", {"intermediate_size": 480, "hidden_size": 160, "tie_word_embeddings": True}),
        ("gpt2", {"num_hidden_layers": 9, "hidden_size": 288, "n_inner": 512}),
        ("llama", {"num_hidden_layers": 80, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64}),
    ],
)
def test_the_types_are_those_of_llama_quantize(kind, values, tmp_path):
    llama_cpp_files.bindings()
    model = fq.prepare(language_model(kind, **values), fq.Config("head", [fq.Rule("*", weight="int8")]), skip=[])
    for quantizer in fq.nn.quantizers(model).values():
        quantizer.mode = fq.nn.Mode.OFF
    path, net = deliver(model, tmp_path / "float.gguf", "gguf"), language_model(kind, **values)
    for name in _MIXTURES:
        llama_cpp_files.quantize(path, tmp_path / "theirs.gguf", name)
        theirs, ours = kinds(tmp_path / "theirs.gguf"), rules_of(net, name)
        assert {tensor: ours.get(tensor, "F32") for tensor in theirs} == theirs, name


def test_a_mixture_is_prepared_by_its_name(tmp_path):
    model = fq.prepare(language_model("llama"), "gguf-q4_k_m", rules={"*.up_proj": "gguf_q5_k"})
    found = kinds(deliver(model, tmp_path, "gguf"))
    assert found["output.weight"] == found["blk.1.attn_v.weight"] == "Q6_K"
    assert found["blk.1.ffn_up.weight"] == "Q5_K"
    model = fq.prepare(language_model("llama"), "GGUF_Q3_K_S_A8", skip=["lm_head"])
    assert "q8_k" in str(model.model.layers[0].mlp.up_proj.input_quantizer)
    assert not hasattr(model.lm_head, "input_quantizer")
    with pytest.raises(ConfigError, match=r"config.model_type is one of"):
        fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)), "GGUF_Q4_K_M")
    with pytest.raises(ConfigError, match=r"unknown preset 'GGUF_Q4_K_X'; did you mean GGUF_Q4_K"):
        fq.prepare(language_model("llama"), "GGUF_Q4_K_X")


def test_an_unknown_mixture_is_refused():
    with pytest.raises(ConfigError, match="unknown mixture 'Q4_K_X'; did you mean"):
        mixture(language_model("llama"), "Q4_K_X")


def test_types_of_q4_k_m(tmp_path):
    model = language_model("llama")
    found = kinds(deliver(fq.prepare(model, mixture(model, "Q4_K_M"), skip=[]), tmp_path, "gguf"))
    assert found["output.weight"] == "Q6_K"
    assert found["token_embd.weight"] == found["blk.0.attn_q.weight"] == found["blk.0.ffn_down.weight"] == "Q4_K"
    assert found["blk.1.ffn_down.weight"] == found["blk.1.attn_v.weight"] == "Q6_K"


def test_experts_have_no_mixture():
    with pytest.raises(ConfigError, match=r"llama-quantize has special rules for experts.*GGUF_Q4_K"):
        mixture(language_model("mixtral"), "Q4_K_M")


IDS = torch.arange(8).reshape(1, 8) * 29 % 320


@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_presets_and_prepared_models_have_the_inputs_of_each_type(kind):
    net = nn.Sequential(nn.Embedding(4, 512), nn.Linear(512, 8))
    model = fq.prepare(copy.deepcopy(net), f"gguf_{kind}_a8", skip=[])
    block = LAYOUTS[kind].weights
    own = "int8_narrow per_block(-1:32,pad) q8_0" if block == 32 else "int8_narrow per_block(-1:256,pad) q8_k"
    assert (str(model[1].input_quantizer.spec), model[1].input_quantizer.dynamic) == (own, True)
    plain = fq.prepare(net, f"gguf_{kind}", skip=[])
    ids = torch.arange(4)
    before = plain(ids)
    with computed_by_llama_cpp(plain):
        layer = plain[1]
        long = [layer.input_quantizer(plain[0](ids)), layer.weight_quantizer(layer.weight), layer.bias]
        exact = nn.functional.linear(*(one.double() for one in long)).float()
        rounded = kind in ("Q4_1", "Q5_1")  # of which llama.cpp rounds the sums of blocks
        assert torch.equal(plain(ids), exact) is not rounded
        assert torch.allclose(plain(ids), exact, atol=1e-3)
        assert torch.allclose(model(ids), exact)
        assert str(plain[1].input_quantizer.spec) in str(fq.summary(plain))
    assert torch.equal(plain(ids), before)
    assert plain[1].input_quantizer is None
    assert torch.equal(llama_cpp_inputs(plain)(ids), model(ids))
    assert torch.equal(llama_cpp_inputs(plain)(ids), model(ids))


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_steps_see_the_inputs_and_the_file_is_the_same(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    model = fq.prepare(language_model("llama", num_hidden_layers=1), "gguf_q4_k_a8", skip=[])
    plain = fq.prepare(language_model("llama", num_hidden_layers=1), "gguf_q4_k", skip=[])
    path = deliver(model, tmp_path / "one.gguf", "gguf")
    assert path.read_bytes() == deliver(plain, tmp_path / "two.gguf", "gguf").read_bytes()
    report = fq.verify_delivery(path, model, [IDS])
    assert report.exact, str(report)
    assert not [one for one in report.far if "llama.cpp" in one]
    values = [{one.layer: one.value for one in fq.sensitivity(each, [IDS])} for each in (model, plain)]
    assert all(values[0][layer] != values[1][layer] for layer in values[0] if "proj" in layer)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())


@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_the_cache_in_float16_is_that_of_llama_cpp(tmp_path):
    llama_cpp_files.bindings()
    config = fq.Config("float", [fq.Rule("lm_head", weight=spec_of("Q8_0"))])
    net = language_model("llama", num_hidden_layers=1)
    net.config._attn_implementation = "eager"
    model = fq.prepare(copy.deepcopy(net), config.with_rule(fq.presets.LLAMA_CPP_CACHE), {"input_ids": IDS})
    path = deliver(model, tmp_path, "gguf")
    report = fq.verify_delivery(path, model, [IDS])
    assert report.exact, str(report)
    row = report.outputs[-1]
    theirs, plain = (LlamaCpp(path, cache)(IDS)["logits"] for cache in ("f16", "f32"))
    rounding = (theirs - plain).square().mean().sqrt()
    assert (row.noise / row.elements) ** 0.5 < 0.25 * rounding
    attention = model.model.layers[0].self_attn
    fq.nn.quantizers(attention)["_sites.matmul_0.input"].spec = fq.QuantSpec.parse("int8")
    with pytest.raises(ExportError, match=r"quantizes only the cache, as in presets\.LLAMA_CPP_CACHE"):
        deliver(model, tmp_path / "other", "gguf")


def test_other_inputs_are_refused(tmp_path):
    net = language_model("llama", num_hidden_layers=1)
    rules = [fq.Rule("*", weight=spec_of("Q4_K"), input=fq.TensorConfig("int8 per_token", dynamic=True))]
    model = fq.prepare(net, fq.Config("own rules", rules), skip=[])
    message = r"its input is int8 per_token dynamic, and llama.cpp computes int8_narrow .* q8_k dynamic, as a preset"
    with pytest.raises(ExportError, match=message):
        deliver(model, tmp_path, "gguf")


def test_a_weight_that_llama_cpp_cannot_have_is_named_and_no_layer_is_changed():
    model = fq.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)), "gguf_q8_0", skip=[], rules={"1": "int8"})
    fq.calibrate(model, [torch.randn(4, 32)], progress=False)
    before = model(torch.ones(1, 32))
    message = r"llama.cpp cannot store 1\.weight: GGUF has no type for int8 per_channel"
    with pytest.raises(ExportError, match=message):
        llama_cpp_inputs(model)
    assert torch.equal(model(torch.ones(1, 32)), before)


class InHalf(nn.Module):
    """llama.cpp's GELU: a table of float16."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        return self.of(x.half().float()).half().float()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.filterwarnings("ignore:the file has no tokenizer")
def test_llama_cpp_computes_these_logits(kind, architecture, tmp_path):
    llama_cpp_files.bindings()
    rules = [fq.Rule("*", weight=fq.TensorConfig(spec_of(kind)))]
    model = fq.prepare(language_model(architecture, num_hidden_layers=1), fq.Config("own rules", rules), skip=[])
    theirs = LlamaCpp(deliver(model, tmp_path, "gguf"))(IDS)["logits"][0].numpy()
    for block in model.transformer.h if architecture == "gpt2" else []:
        block.mlp.act = InHalf(block.mlp.act)
    with torch.no_grad(), computed_by_llama_cpp(model):
        ours = model(IDS).logits[0].numpy()
    with torch.no_grad():
        weights_only = model(IDS).logits[0].numpy()
    peak = np.abs(ours).max()
    far = np.abs(ours - theirs).max(1) / peak
    assert np.abs(weights_only - theirs).max() / peak > 1e-3
    # Where the sums of both programs lie on two sides of a tie, one code differs, and what follows from it.
    assert (far <= 1e-5).sum() >= 7
    assert far.max() <= 0.02
    assert (ours.argmax(1) == theirs.argmax(1)).all()
