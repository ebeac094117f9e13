"""The tokenizer of a model of transformers as the metadata of a GGUF file.

Source: `conversion/base.py` of llama.cpp. Two things differ from it: scores are taken from the order of the merges,
where that converter gives all tokens one score, and merges are written for all tokenizers, because transformers reads
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fakequant.delivery.gguf.file import require_gguf
from fakequant.errors import CheckpointError, warn_user
from fakequant.files import output_errors

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LOOKS_SPECIAL = re.compile(r"<([|\uff5c]).*\1>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]")
_BLANK = "▁"


class _Type(IntEnum):
    """Types of tokens, as llama.cpp numbers them."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def describe_tokenizer(writer: Any, model: Any) -> None:
    """Add the tokenizer that lies where the model was loaded from; without one, a warning and no tokenizer.

    Args:
        writer: a `gguf.GGUFWriter`.
        model: of transformers.

    Raises:
        CheckpointError: a tokenizer that llama.cpp does not know.
    """
    tokenizer = _tokenizer_of(model)
    if tokenizer is None:
        source = getattr(model, "name_or_path", "")
        why = f"there is none in {source!r}" if source else "the model was made from a configuration"
        warn_user(
            f"the file has no tokenizer, because {why}: programs that read it take token ids only; "
            "load the model by from_pretrained from a folder with its tokenizer, then deliver again"
        )
        writer.add_tokenizer_model("none")
        for name in _SPECIAL:
            if isinstance(number := getattr(model.config, f"{name}_token_id", None), int):
                getattr(writer, f"add_{name}_token_id")(number)
        return
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    kind, pre = _kind_of(data)
    tokens = list(_tokens(tokenizer, model.config.vocab_size))
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([one for _, one in tokens])
    if kind == "llama":
        writer.add_token_scores(_scores([text for text, _ in tokens], data["model"]["merges"]))
        writer.add_add_space_prefix(_puts_blank_first(data))
    with output_errors(Path("the temporary folder"), "to "), TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model.config.save_pretrained(folder)
        special = require_gguf().SpecialVocab(folder, load_merges=True, n_vocab=len(tokens))
    ids = tokenizer("a").input_ids
    for name, added in (("bos", ids[0]), ("eos", ids[-1])):
        special.add_special_token[name] = added == special.special_token_ids.get(name, -1)
    special.add_to_gguf(writer, quiet=True)


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    source = getattr(model, "name_or_path", "")
    if not source:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError):  # no files, or those of a model alone
        return None
    if not tokenizer("a").input_ids:  # transformers makes one without a vocabulary where there are no files
        return None
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"the tokenizer in {source} has no tokenizer.json; save it as a fast one, then deliver again"
        )
    return tokenizer


def _kind_of(data: Mapping[str, Any]) -> tuple[str, str]:
    """What llama.cpp calls a tokenizer, and the way in which it cuts texts before."""
    model = data["model"]
    if model["type"] != "BPE":
        raise CheckpointError(f"the tokenizer is a {model['type']!r:.80}; files are written for BPE alone")
    if model.get("byte_fallback"):
        return "llama", "default"
    splits = [part["pattern"].get("Regex") for part in _parts(data["pre_tokenizer"]) if part["type"] == "Split"]
    if not splits and any(part["type"] == "ByteLevel" for part in _parts(data["pre_tokenizer"])):
        return "gpt2", "gpt-2"
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names = [name for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items() if splits == [pattern]]
    if not names:
        raise CheckpointError(
            f"the tokenizer cuts texts by {splits!r:.200}, which llama.cpp is not known to do; deliver a model that "
            "was loaded from a folder without tokenizer, and give the programs token ids"
        )
    return "gpt2", names[0]


def _parts(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps in a sequence of steps, or the only one."""
    if step is None:
        return []
    return next((step[key] for key in ("pretokenizers", "normalizers") if key in step), [step])


def _puts_blank_first(data: Mapping[str, Any]) -> bool:
    before = any(part["type"] == "Prepend" for part in _parts(data["normalizer"]))
    kinds = [part for part in _parts(data["pre_tokenizer"]) if part["type"] == "Metaspace"]
    return before or any(part.get("prepend_scheme", "always") != "never" for part in kinds)


def _tokens(tokenizer: Any, size: int) -> Iterator[tuple[str, int]]:
    """Text and type of every token; numbers without one are unused."""
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    if texts and max(texts) >= size:
        raise CheckpointError(f"the tokenizer has token {max(texts)}, but the model's vocab_size is {size}")
    added = tokenizer.added_tokens_decoder
    for number in range(size):
        text = texts.get(number)
        if text is None:
            yield f"[PAD{number}]", _Type.UNUSED
        elif number not in added:
            yield text, _Type.BYTE if _BYTE.fullmatch(text) else _Type.NORMAL
        elif added[number].special or _LOOKS_SPECIAL.fullmatch(text):
            yield text, _Type.CONTROL
        else:
            yield text.replace(_BLANK, " "), _Type.USER_DEFINED


def _scores(texts: list[str], merges: list[Any]) -> list[float]:
    """The sooner a token is merged, the higher its score; all others are below."""
    places: dict[str, int] = {}
    for place, pair in enumerate(merges):
        places.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), place)
    return [-float(places.get(text, len(places))) for text in texts]
