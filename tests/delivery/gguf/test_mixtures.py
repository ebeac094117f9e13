"""Mixtures of types: each weight has the type that llama-quantize gives it."""

import pytest

import fakequant as fq
from fakequant.delivery import deliver
from fakequant.delivery.gguf.file import GgufFile
from fakequant.delivery.gguf.mixtures import mixture
from fakequant.errors import ConfigError
from tests.support import llama_cpp
from tests.support.language_models import language_model

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the file has no tokenizer")


def kinds(path):
    return {name: one.kind for name, one in GgufFile(path).tensors.items() if len(one.shape) == 2}


@pytest.mark.parametrize("name", ["Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M"])
@pytest.mark.parametrize(
    ("kind", "values"), [("llama", {"num_hidden_layers": 9}), ("qwen2", {"tie_word_embeddings": True}), ("phi3", {})]
)
def test_the_types_are_those_of_llama_quantize(kind, values, name, tmp_path):
    llama_cpp.bindings()
    model = fq.prepare(language_model(kind, **values), fq.Config("head", [fq.Rule("*", weight="int8")]), skip=[])
    for quantizer in fq.nn.quantizers(model).values():
        quantizer.mode = fq.nn.Mode.OFF
    llama_cpp.quantize(deliver(model, tmp_path / "float.gguf", "gguf"), tmp_path / "theirs.gguf", name)
    model = language_model(kind, **values)
    ours = deliver(fq.prepare(model, mixture(model, f"GGUF_{name}"), skip=[]), tmp_path / "ours.gguf", "gguf")
    assert kinds(ours) == kinds(tmp_path / "theirs.gguf")


def test_an_unknown_mixture_is_refused():
    with pytest.raises(ConfigError, match="unknown mixture 'Q4_K_X'; did you mean"):
        mixture(language_model("llama"), "Q4_K_X")


def test_types_of_q4_k_m(tmp_path):
    model = language_model("llama")
    found = kinds(deliver(fq.prepare(model, mixture(model, "Q4_K_M"), skip=[]), tmp_path, "gguf"))
    assert found["output.weight"] == "Q6_K"
    assert found["token_embd.weight"] == found["blk.0.attn_q.weight"] == found["blk.0.ffn_down.weight"] == "Q4_K"
    assert found["blk.1.ffn_down.weight"] == found["blk.1.attn_v.weight"] == "Q6_K"
