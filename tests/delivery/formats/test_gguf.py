"""GGUF files of language models: transformers, the package gguf and llama.cpp have the model's own bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.delivery import deliver, read, verify_delivery
from fakequant.delivery.gguf.blocks import LAYOUTS, GgufFile, spec_of
from fakequant.delivery.gguf.llama_cpp import ABSENT, LlamaCpp, is_there
from fakequant.errors import CheckpointError, ExportError
from tests.support import llama_cpp_files
from tests.support.language_models import language_model, prepared

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the file has no tokenizer")
IDS = torch.arange(64).reshape(2, 32) * 5 % 320
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
LONGROPE |= {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.5 * i for i in range(32)]}


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def one_rule(weight):
    return fq.Config("own rules", [fq.Rule("*", weight=fq.TensorConfig(weight))])


def same_tensors(one, other):
    one, other = GgufFile(one).tensors, GgufFile(other).tensors
    assert list(one) == list(other)
    return all(one[name].make().tobytes() == other[name].make().tobytes() for name in one)


def check(kind, weight, tmp_path, *, mine=False, **values):
    """Deliver, verify by other programs, read, deliver again; returns the model, and the file's path.

    `mine` says that transformers does not load it.
    """
    model = prepared(kind, weight, **values)
    path = deliver(model, tmp_path / "one.gguf", "gguf")
    report = verify_delivery(path, model, [IDS])
    assert report.passed, str(report)
    assert ("Not loaded by transformers" in str(report.not_run)) is mine
    assert "gguf" in report.runtime
    assert report.runtime.endswith("llama.cpp") is is_there()
    assert (ABSENT in report.not_run) is not is_there()
    again = read(path, language_model(kind, **values))
    assert torch.equal(logits(again), logits(model))
    assert same_tensors(deliver(again, tmp_path / "two.gguf", "gguf"), path)
    return model, path


def test_a_file_of_the_same_name_in_the_working_folder_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, type_ in (("model.gguf", "Q8_0"), ("folder/model.gguf", "Q4_K")):
        model = prepared("llama", str(spec_of(type_)))
        report = verify_delivery(deliver(model, name, "gguf"), model, [IDS])
        assert report.passed, str(report)
    assert torch.equal(logits(read("folder/model.gguf")), logits(model))
    with pytest.raises(CheckpointError, match=r"^folder is a folder; give the file in it: folder.model\.gguf$"):
        read("folder")


@pytest.mark.parametrize("type_", LAYOUTS)
def test_each_type(type_, tmp_path):
    _, path = check("llama", str(spec_of(type_)), tmp_path)
    written = "TQ1_0" if type_ == "TQ2_0" else type_  # the same numbers in fewer bytes
    assert {one.kind for one in GgufFile(path).tensors.values()} == {written, "F32"}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True}),
        ("qwen3_moe", {}),
    ],
)
def test_each_architecture(kind, values, tmp_path):
    check(kind, str(spec_of("Q4_K")), tmp_path, **values)


@pytest.mark.parametrize("type_", LAYOUTS)
def test_weights_of_gpt_2_are_turned_and_those_in_float_too(type_, tmp_path):
    model, path = check("gpt2", str(spec_of(type_)), tmp_path, mine=True)
    notes = verify_delivery(path, model).not_run
    assert any("takes vocab_size for 50257, not 320" in note for note in notes)
    held = GgufFile(path).tensors
    shapes = {"attn_qkv": (768, 256), "attn_output": (256, 256), "ffn_up": (1024, 256), "ffn_down": (256, 1024)}
    assert {name: held[f"blk.1.{name}.weight"].shape for name in shapes} == shapes
    in_float = [f"transformer.h.1.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    other = fq.prepare(language_model("gpt2"), one_rule(spec_of(type_)), skip=in_float)
    path = deliver(other, tmp_path / "half.gguf", "gguf")
    held = GgufFile(path).tensors
    assert {name: (held[f"blk.1.{name}.weight"].kind, held[f"blk.1.{name}.weight"].shape) for name in shapes} == {
        name: ("F32", shape) for name, shape in shapes.items()
    }
    assert verify_delivery(path, other, [IDS]).passed
    assert torch.equal(logits(read(path, language_model("gpt2"))), logits(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_a_gpt_2_of_the_usual_sizes(dtype, tmp_path):
    model = language_model("gpt2", hidden_size=64, vocab_size=50257).to(dtype)
    path = deliver(fq.prepare(model, one_rule(spec_of("Q8_0")), skip=[]), tmp_path / "one.gguf", "gguf")
    report = verify_delivery(path, model, [IDS])
    assert report.passed, str(report)
    assert "transformers" in report.runtime
    assert torch.equal(logits(read(path)), logits(model))


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0", "IQ4_NL", "MXFP4"])
def test_experts_beside_a_shared_one(type_, tmp_path):
    _, path = check("qwen2_moe", str(spec_of(type_)), tmp_path)
    held = GgufFile(path).tensors
    assert {name: held[f"blk.1.ffn_{name}.weight"].shape for name in ("gate_exps", "up_exps", "down_exps")} == {
        "gate_exps": (4, 1408, 256),
        "up_exps": (4, 1408, 256),
        "down_exps": (4, 256, 1408),
    }
    assert held["blk.1.ffn_gate_inp_shexp.weight"].shape == (256,)


@pytest.mark.parametrize("type_", ["Q8_0", "Q3_K", "Q4_K", "Q6_K", "TQ1_0"])
def test_experts_that_transformers_does_not_load(type_, tmp_path):
    model, path = check("mixtral", str(spec_of(type_)), tmp_path, mine=True)
    notes = verify_delivery(path, model).not_run
    assert any("it takes the file for a model without experts" in note for note in notes)
    with pytest.raises(CheckpointError, match=r"llama\.expert_count is 4, but the model has None"):
        read(path)


def test_parts_of_experts_in_several_types_are_refused(tmp_path):
    path = deliver(prepared("mixtral", str(spec_of("Q8_0"))), tmp_path / "one.gguf", "gguf")
    raw, name = path.read_bytes(), b"blk.0.ffn_up_exps.weight"
    place = raw.index(name) + len(name) + 4 + 3 * 8
    assert raw[place] == 8
    half = raw[:place] + bytes([1]) + raw[place + 1 :] + bytes(2**20)
    path.write_bytes(half)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up_exps\.weight are of several types"):
        read(path, language_model("mixtral"))


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "its norm_topk_prob is False, not True"),
        ("qwen2_moe", {"norm_topk_prob": True}, "its norm_topk_prob is True, not False"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "not all of its layers have experts"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "not all of its layers have experts"),
    ],
)
def test_experts_that_llama_cpp_computes_otherwise_are_refused(kind, values, reason, tmp_path):
    with pytest.raises(ExportError, match=reason):
        deliver(prepared(kind, str(spec_of("Q8_0")), **values), tmp_path, "gguf")


def test_several_files_of_a_model(tmp_path):
    model, path = check("llama", str(spec_of("Q4_K")), tmp_path)
    first = llama_cpp_files.split(path, 5)
    path.unlink()
    report = verify_delivery(first, model, [IDS])
    assert report.passed, str(report)
    assert any("it reads the first of several files alone" in note for note in report.not_run)
    assert torch.equal(logits(read(first)), logits(model))


@pytest.mark.parametrize(
    ("kind", "values", "close"),
    [
        ("llama", {}, 1e-5),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, 1e-5),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 1e-5),
        ("llama", {"rope_parameters": LLAMA3}, 1e-5),
        ("mistral", {}, 1e-5),
        ("qwen2", {}, 1e-5),
        ("qwen3", {"head_dim": 64}, 1e-5),
        ("mixtral", {}, 1e-5),
        ("qwen2_moe", {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}, 1e-5),
        ("qwen3_moe", {"moe_intermediate_size": 256}, 1e-5),
        ("gemma2", {}, 3e-4),  # llama.cpp has a table of float16 for its activation
        ("gemma3_text", {}, 3e-4),
        ("phi3", {}, 1e-5),
        ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 256}, 1e-5),
        ("gpt2", {"n_inner": 512}, 4e-4),
    ],
)
def test_llama_cpp_computes_each_architecture(kind, values, close, tmp_path):
    llama_cpp_files.bindings()
    model = prepared(kind, "float8_e4m3fn per_channel(0)", **values)
    for quantizer in fq.nn.quantizers(model).values():
        quantizer.mode = fq.nn.Mode.OFF  # all in float: what is left is the architecture
    path = deliver(model, tmp_path / "one.gguf", "gguf")
    ours, theirs = logits(model), LlamaCpp(path)(IDS)["logits"]
    assert (ours - theirs).abs().max() <= close * ours.abs().max()
    assert not [one for one in verify_delivery(path, model, [IDS]).far if "llama.cpp" in one]


def test_outputs_of_llama_cpp_are_compared_under_its_rules(tmp_path):
    llama_cpp_files.bindings()
    model = prepared("llama", str(spec_of("Q8_0")))
    path = deliver(model, tmp_path, "gguf")
    row = verify_delivery(path, model, [IDS]).outputs[-1]
    assert row.name == "output 0 in llama.cpp"
    assert row.argmax_agreement >= 0.98
    weights_only = (logits(model) - LlamaCpp(path)(IDS)["logits"]).square().mean().sqrt()
    assert (row.noise / row.elements) ** 0.5 < 0.5 * weights_only
    model.model.rotary_emb.inv_freq *= 2
    assert "output 0 in llama.cpp" in verify_delivery(path, model, [IDS]).far
    padded = {"input_ids": IDS, "attention_mask": (IDS != 5).long()}
    assert "without padding" in str(verify_delivery(path, model, [padded]))
    note = "it computes in float32; convert the model from torch.bfloat16"
    assert note in str(verify_delivery(deliver(model.bfloat16(), tmp_path / "half", "gguf"), model, [IDS]))


def test_a_model_is_built_by_the_file_alone(tmp_path):
    model = prepared("llama", str(spec_of("Q6_K")))
    assert torch.equal(logits(read(deliver(model, tmp_path, "gguf"))), logits(model))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}, "rope.scaling."),
        ("llama", {"rope_parameters": LLAMA3}, "rope_freqs.weight"),
        ("qwen2", {"rope_parameters": YARN}, "rope.scaling."),
        ("llama", {"attention_bias": True}, "no place: blk.0.attn_k.bias"),
        ("qwen3", {"head_dim": 64}, "qwen3.attention.key_length is 64, but the model has 128"),
        ("gemma2", {"head_dim": 64, "query_pre_attn_scalar": 64}, "its query_pre_attn_scalar is 256, not 64"),
        ("gemma2", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping is 20.0, but the model has 50.0"),
        ("gemma3_text", {"final_logit_softcapping": 20.0}, "final_logit_softcapping is 20.0, but the model has None"),
    ],
)
def test_no_other_model_than_that_of_the_file_is_built(kind, values, message, tmp_path):
    model = prepared(kind, str(spec_of("Q8_0")), **values)
    path = deliver(model, tmp_path, "gguf")
    with pytest.raises(CheckpointError, match=rf"{message}.*fakequant\.read\(path, model\)"):
        read(path)
    assert torch.equal(logits(read(path, language_model(kind, **values))), logits(model))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_built_has_the_logits_and_dtype_of_the_model(kind, dtype, tmp_path):
    rules = [fq.Rule("*", weight=fq.TensorConfig(spec_of("Q8_0")))]
    net = language_model(kind)
    own = type(net)._from_config(net.config, dtype=dtype).eval()  # rotary frequencies stay in float32
    own.load_state_dict(net.state_dict())
    model = fq.prepare(own, fq.Config("own rules", rules), skip=[])
    again = read(deliver(model, tmp_path, "gguf"))
    assert torch.equal(logits(again), logits(model))
    assert logits(again).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_stays_in_float_is_exact_in_half_precision(dtype, tmp_path):
    model = language_model("llama").to(dtype)
    rules = [fq.Rule("*_proj", weight=fq.TensorConfig(spec_of("Q8_0")))]
    model = fq.prepare(model, fq.Config("own rules", rules), skip=[])
    path = deliver(model, tmp_path / "one.gguf", "gguf")
    kinds = {name: one.kind for name, one in GgufFile(path).tensors.items()}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert kinds["output_norm.weight"] == "F32"
    report = verify_delivery(path, model)
    assert report.passed, str(report)
    assert torch.equal(logits(read(path, language_model("llama").to(dtype))), logits(model))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_rows_of_halves_of_heads_alternate_in_llama_alone(kind, tmp_path):
    model = prepared(kind, str(spec_of("Q8_0")))
    file = GgufFile(deliver(model, tmp_path, "gguf"))
    codes = model.model.layers[0].self_attn.q_proj.weight.detach()
    first = file.tensors["blk.0.attn_q.weight"].make()[:4, 2:34].view(np.int8).astype(np.float32)
    order = [0, 32, 1, 33] if kind == "llama" else [0, 1, 2, 3]
    scale = codes[order, :32].abs().amax(1, keepdim=True) / 127
    assert np.abs(first * scale.numpy() - codes[order, :32].numpy()).max() < 0.02


REFUSED = [
    ("gpt_neox", {}, "config.model_type is one of gemma2, gemma3_text, gpt2, llama, .*; got 'gpt_neox'"),
    ("llama", {"hidden_act": "gelu"}, "its activation is gelu, not silu"),
    ("gemma2", {"query_pre_attn_scalar": 144}, "its query_pre_attn_scalar is 144, not 256"),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, "layer_types are .*, but llama.cpp expects .'sliding"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "layer_types are .*expects .'full"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type is 'dynamic'",
    ),
    ("mistral", {"sliding_window": 8}, "its sliding_window is 8, and llama.cpp attends to all of up to 128"),
    ("qwen2", {"rope_parameters": LLAMA3}, "rope_type is 'llama3'"),
    ("gemma2", {"attn_logit_softcapping": None}, "its attn_logit_softcapping is None"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "it attends in both directions"),
    ("gpt2", {"activation_function": "gelu"}, "its activation_function is gelu, not gelu_new"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is True, not False"),
    ("gpt2", {"scale_attn_weights": False}, "its scale_attn_weights is False, not True"),
]


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(kind, values, message, tmp_path):
    model = prepared(kind, "int8 per_block(-1:32) scale=float16", **values)
    with pytest.raises(ExportError, match=f"cannot hold this model, however it is quantized: .*{message}"):
        deliver(model, tmp_path / "new" / "one.gguf", "gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", ["gguf_q8_0", "int4_group32", "fp8"])
def test_a_model_that_is_no_language_model_is_refused_before_a_folder_is_made(preset, tmp_path):
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(256, 256)), preset, skip=[])
    fq.calibrate(model, [torch.ones(1, 256)], progress=False)
    with pytest.raises(ExportError, match=r"cannot hold this model, however .*config\.model_type is one of"):
        deliver(model, tmp_path / "new", "gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"weight": "int4 per_block(-1:32)"}, r"q_proj\): GGUF has no type for int4 per_block\(-1:32\); "),
        (
            {"weight": "int8 per_block(-1:32) scale=float16", "input": "int8"},
            r"q_proj\): its input is int8 per_tensor, and llama.cpp computes",
        ),
    ],
)
def test_layers_that_no_type_holds_are_named(rule, message, tmp_path):
    rules = [fq.Rule("*q_proj", **{name: fq.TensorConfig(text) for name, text in rule.items()})]
    model = fq.prepare(language_model("llama"), fq.Config("own rules", rules), skip=[])
    fq.calibrate(model, [IDS], progress=False)
    with pytest.raises(ExportError, match=message):
        deliver(model, tmp_path / "one.gguf", "gguf")
    assert not list(tmp_path.iterdir())
