"""Mixtures of types: each weight has the type that llama-quantize gives it."""

import pytest
import torch

import fakequant as fq
from fakequant.delivery import deliver
from fakequant.delivery.format import weight_slots
from fakequant.delivery.gguf.architecture import _MIXTURES, GgufNames, architecture_of, mixture
from fakequant.delivery.gguf.blocks import GgufFile
from fakequant.delivery.gguf.lattices import kind_of
from fakequant.errors import ConfigError
from tests.support import llama_cpp_files
from tests.support.language_models import language_model

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the file has no tokenizer")


def kinds(path):
    return {name: one.kind for name, one in GgufFile(path).tensors.items() if len(one.shape) == 2}


def rules_of(model, name):
    """The types of a mixture by the names of tensors in a file."""
    names = GgufNames(architecture_of(model), model.config)
    rules = {rule.pattern: rule.weight.spec for rule in mixture(model, name).rules}
    places = weight_slots(model).items()
    return {names.of(weight)[0]: kind_of(rules[one.path], model.get_parameter(weight).shape) for weight, one in places}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {"num_hidden_layers": 17}),
        ("qwen2", {"num_hidden_layers": 9, "tie_word_embeddings": True}),
        ("phi3", {"num_hidden_layers": 3, "num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 1, "hidden_size": 288, "head_dim": 64}),  # no whole blocks of 256
        ("qwen3", {"intermediate_size": 480, "hidden_size": 160, "tie_word_embeddings": True}),
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
        assert {tensor: ours[tensor] for tensor in theirs} == theirs, name


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
    with pytest.raises(ConfigError, match=r"llama-quantize has rules of its own for experts.*GGUF_Q4_K"):
        mixture(language_model("mixtral"), "Q4_K_M")
