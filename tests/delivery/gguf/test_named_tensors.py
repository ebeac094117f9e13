"""A GGUF file is read into the model that it is of; files of other models are refused by what differs."""

from __future__ import annotations

import numpy as np
import pytest

import fakequant as fq
from fakequant.delivery import deliver, read
from fakequant.delivery.gguf.blocks import GgufFile, spec_of
from fakequant.errors import CheckpointError
from tests.support.language_models import language_model, prepared

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the file has no tokenizer")
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.fixture(scope="module")
def delivered(tmp_path_factory):
    model = prepared("llama", str(spec_of("Q4_0")))
    return deliver(model, tmp_path_factory.mktemp("delivered") / "one.gguf", "gguf").read_bytes()


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
TABLE = r"token_embd.weight has the shape \[320, 256\], but model.embed_tokens.weight needs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 256}, TABLE),
        ({"num_hidden_layers": 1}, "tensors for which the model has no place: blk.1.attn_k.weight,"),
        ({"num_hidden_layers": 3}, "lacks blk.2.attn_q.weight, which is model.layers.2.self_attn.q_proj"),
        ({"tie_word_embeddings": True}, "the model has no place: output.weight"),
        ({"rope_parameters": DEFAULT}, "llama.rope.freq_base is 10000.0, but"),
        ({"rope_parameters": LINEAR}, "llama.rope.scaling.factor is None, but the model has 2.0"),
        ({"rms_norm_eps": 1e-3}, "llama.attention.layer_norm_rms_epsilon is .*, but the model has 0.001"),
    ],
)
def test_a_file_of_another_model_is_refused(delivered, values, message, tmp_path):
    path = tmp_path / "one.gguf"
    path.write_bytes(delivered)
    with pytest.raises(CheckpointError, match=message):
        read(path, language_model("llama", **values))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.1.attn_k.weight", b"blk.1.attn_x.weight", "lacks blk.1.attn_k.weight"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen2", "architecture 'qwen2', but the model has 'llama'"),
    ],
)
def test_a_file_of_other_names_is_refused(delivered, old, new, message, tmp_path):
    path = tmp_path / "one.gguf"
    path.write_bytes(delivered.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        read(path, language_model("llama"))


def test_a_scale_that_is_not_finite_is_refused_by_name(delivered, tmp_path):
    path = tmp_path / "one.gguf"
    path.write_bytes(delivered)
    start = GgufFile(path)._starts["blk.1.ffn_up.weight"]
    path.write_bytes(delivered[:start] + np.float16(np.inf).tobytes() + delivered[start + 2 :])
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight: has scales that are inf or NaN"):
        read(path, language_model("llama"))


def test_a_type_that_is_no_lattice_is_read_as_floats(delivered, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "one.gguf"
    path.write_bytes(delivered)
    kind = gguf.GGMLQuantizationType.NVFP4  # of 36 bytes for 64 weights, as two blocks of Q4_0
    name = b"blk.1.ffn_up.weight"
    place = delivered.index(name) + len(name) + 4 + 16
    path.write_bytes(delivered[:place] + int(kind).to_bytes(4, "little") + delivered[place + 4 :])
    model = read(path, language_model("llama"))
    expected = gguf.quants.dequantize(GgufFile(path).tensors[name.decode()].make(), kind)
    found = model.model.layers[1].mlp.up_proj
    assert not isinstance(found, fq.nn.QuantizedLayer)
    assert np.array_equal(found.weight.detach().numpy(), expected)
