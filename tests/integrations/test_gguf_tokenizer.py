"""Tokenizers in GGUF files: transformers and llama.cpp cut texts as the tokenizer of the model does."""

import json
from functools import partial

import pytest

from fakequant.errors import CheckpointError
from tests.support import llama_cpp_files
from tests.support.vision import import_torchvision

pytest.importorskip("gguf")
import_torchvision()
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS  # noqa: E402

from fakequant.delivery.gguf.architecture import architecture_of, describe  # noqa: E402
from fakequant.delivery.gguf.blocks import GgufContent, GgufFile, GgufTensor  # noqa: E402

CORPUS = [
    "Hello world, this is 12 quantized models of 3 sizes.",
    "def f(x):\n    return x + 1",
    "I'll say: don't! é",
] * 9
TEXTS = ["Hello world, these are 123 models.", "a\n\n  b é ☃ <think> x <|im_start|>user", "I'll don't WE'VE 12345 "]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def of_sentencepiece():
    """A tokenizer like that of Llama 2 and Phi 3."""
    whole = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    whole.decoder = decoders.Sequence(steps)
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    whole.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=names, show_progress=False))
    data = json.loads(whole.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    data["model"]["byte_fallback"] = True
    whole = tokenizers.Tokenizer.from_str(json.dumps(data))
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def of_bytes(pattern):
    """A tokenizer that cuts texts by a pattern, as of Llama 3, Qwen and Mistral Nemo; without one like GPT-2's."""
    whole = tokenizers.Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    cut = [pre_tokenizers.Split(Regex(pattern), "isolated"), last] if pattern else [last]
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.Sequence(cut), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    whole.train_from_iterator(CORPUS, trainer)
    whole.add_tokens([AddedToken("<think>", special=False)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template="{{ messages }}"
    )


def tiny(vocab_size, **values):
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        **values,
    )


def written(tokenizer, folder, vocab_size=340):
    """A file with the tokenizer of a model in a folder."""
    transformers.LlamaForCausalLM(tiny(vocab_size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    architecture = architecture_of(model)
    say, tensors = partial(describe, architecture=architecture, model=model), dict[str, GgufTensor]()
    path = folder / "model.gguf"
    path.write_bytes(b"".join(map(bytes, GgufContent(architecture.name, say, tensors))))
    return path


KINDS = {
    "of_sentencepiece": (of_sentencepiece, "llama", "default"),
    **{name: (partial(of_bytes, SPLITS[name]), "gpt2", name) for name in ("llama3", "qwen2", "tekken")},
    "gpt-2": (partial(of_bytes, None), "gpt2", "gpt-2"),
}
by_kind = pytest.mark.parametrize(("make", "kind", "pre"), KINDS.values(), ids=KINDS)


@by_kind
def test_transformers_cuts_texts_in_the_same_way(make, kind, pre, tmp_path):
    tokenizer = make()
    said = GgufFile(written(tokenizer, tmp_path)).metadata
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == (kind, pre)
    assert len(said["tokenizer.ggml.tokens"]) == 340
    assert said["tokenizer.ggml.tokens"][-1] == "[PAD339]"
    assert said.get("tokenizer.chat_template") == tokenizer.chat_template
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert theirs(text).input_ids == tokenizer(text).input_ids


@by_kind
def test_llama_cpp_cuts_texts_in_the_same_way(make, kind, pre, tmp_path):
    llama_cpp_files.bindings()
    tokenizer = make()
    path = written(tokenizer, tmp_path)
    for text in [*TEXTS, "  two blanks first"]:  # which transformers cuts otherwise for "llama"
        assert llama_cpp_files.tokens(path, text) == tokenizer(text).input_ids


def test_without_a_tokenizer_there_is_a_warning_and_the_ids_of_the_configuration():
    model = transformers.LlamaForCausalLM(tiny(8, pad_token_id=5))
    with pytest.warns(UserWarning, match=r"the file has no tokenizer, .* configuration: programs .* token ids only"):
        parts = list(GgufContent("llama", partial(describe, architecture=architecture_of(model), model=model), {}))
    assert b"tokenizer.ggml.padding_token_id" in bytes(parts[0])


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (
            partial(of_bytes, r"\d+|\D+"),
            {},
            r"cuts texts by \['\\\\d\+\|\\\\D\+'\], which llama.cpp is not known to do",
        ),
        (of_sentencepiece, {"vocab_size": 300}, "has token 329, but the model's vocab_size is 300"),
    ],
)
def test_what_a_file_cannot_say_of_a_tokenizer_is_refused(make, values, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        written(make(), tmp_path, **values)
