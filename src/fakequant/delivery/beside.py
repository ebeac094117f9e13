"""The small files of the folder that a model was loaded from: its tokenizer's and others that load and describe it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import nn

from fakequant.delivery.folder import CONFIG, Folder
from fakequant.delivery.places import float_names
from fakequant.errors import CheckpointError
from fakequant.files import read_whole
from fakequant.model.state.codecs import Content
from fakequant.model.state.snapshots import LazyTensor, lazy
from fakequant.text import listed

_KNOWN = (
    *("tokenizer*", "*vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("generation_config.json", "*processor_config.json", "chat_template*", "LICENSE*", "NOTICE*"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
)
"""Names of files that are copied; others may be the user's, and a delivery is made to be shared."""
_OF_MODULES = ("config.json", "*_config.json", "model.safetensors", "pytorch_model.bin")
_LARGE = 64 * 2**20
"""Bytes from which a file is none of a tokenizer, a configuration or a small module."""
_BUFFERS = ("inv_freq", "position_ids", "attn.bias", "masked_bias")
"""Ends of names of buffers that older files have, and that models make by themselves."""
_MODULES, _GENERATION = "modules.json", "generation_config.json"


class SmallFiles(NamedTuple):
    """The small files of a model.

    Attributes:
        files: by name, to be copied; of a module of sentence-transformers with its folder.
        missing: what the files of the model need and the folder will not have, one sentence each.
    """

    files: Mapping[str, Content]
    missing: list[str]


def beside(model: nn.Module) -> SmallFiles:
    """The small files of the folder that a model was loaded from, also of one in the cache of Hugging Face."""
    given = str(getattr(model, "name_or_path", "") or "")
    generation: Any = getattr(model, "generation_config", None)
    made = {} if generation is None else {_GENERATION: generation.to_json_string().encode()}
    if not given:
        return SmallFiles(made, _without_code(model, {}))
    source = folder_of(model)
    if source is None:
        return SmallFiles(
            made,
            [f"the tokenizer and other files of {given}, which is no folder here and not in the cache of Hugging Face"],
        )
    names = [name for name in sorted(path.name for path in source.iterdir()) if _is_known(name, _KNOWN)]
    wanted = [*names, *_code_of(model, source), *_modules_of(source)]
    found = {name: source / name for name in dict.fromkeys(wanted) if (source / name).is_file()}
    large = [name for name, path in found.items() if path.stat().st_size > _LARGE]
    missing = [f"{listed(large)}, which are larger than {_LARGE >> 20} MB"] if large else []
    files = {name: path for name, path in found.items() if name not in large}
    missing += _without_code(model, files)
    if left := [path for path in _paths_of(source) if not any(name.startswith(f"{path}/") for name in files)]:
        missing.append(f"{listed(left)}, which {_MODULES} names")
    is_text = getattr(model, "main_input_name", "") == "input_ids"
    if source != Path(given) and is_text and not any(_is_known(name, _KNOWN[:8]) for name in files):
        missing.append(f"the tokenizer of {given}, which is not in the cache of Hugging Face")
    return SmallFiles({**made, **files} if _GENERATION not in files else files, missing)


def skipped(model: nn.Module, source: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder that the class of a model of transformers does not load, such as those of MTP layers.

    Empty where the folder is quantized, or holds pickles.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        folder = Folder(source)
        tensors = {} if folder.quantization else folder.tensors()
    except (ImportError, CheckpointError):
        return {}
    own, any_model = dict.fromkeys(float_names(model), True), cast("Any", model)
    mapping = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(any_model)
    kinds = [[one for one in mapping if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)]
    prefix, found = getattr(model, "base_model_prefix", None), dict[str, LazyTensor]()
    for name in tensors:
        is_known = any(rename_source_key(name, *how, prefix, own)[0] in own for how in (kinds, ([], [])))  # type: ignore[arg-type]
        if not is_known and not name.endswith(_BUFFERS):
            found[name] = lazy(tensors, name)
    return found


def digests(files: Mapping[str, Content]) -> dict[str, str]:
    """The start of the SHA-256 of each file, by which the next delivery knows whether it was changed."""
    return {name: _digest(content) for name, content in files.items()}


def unchanged(folder: Path, files: Mapping[str, Content], written: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Which of some files may be written, and which the user has put there or changed, so that they stay.

    Args:
        folder: where they would lie.
        files: to be written.
        written: the digests of what an earlier delivery wrote there.
    """
    free, kept = list[str](), list[str]()
    for name, content in files.items():
        path = folder / name
        held = _digest(path) if path.is_file() else None
        if (held is None and not path.exists()) or (held is not None and held in (written.get(name), _digest(content))):
            free.append(name)
        else:
            kept.append(name)
    return free, kept


def _digest(content: Content) -> str:
    data = content.read_bytes() if isinstance(content, Path) else content
    assert isinstance(data, bytes)
    return hashlib.sha256(data).hexdigest()[:16]


def _is_known(name: str, patterns: Iterable[str]) -> bool:
    return not name.startswith(".") and any(fnmatchcase(name, pattern) for pattern in patterns)


def folder_of(model: Any) -> Path | None:
    """The folder that a model was loaded from: a local one with a model of its type, or that of the cache."""
    given = str(getattr(model, "name_or_path", "") or "")
    own, held = getattr(getattr(model, "config", None), "model_type", None), _json(Path(given) / CONFIG)
    if given and Path(given).is_dir() and (not isinstance(held, dict) or held.get("model_type") in (None, own)):
        return Path(given)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(given, CONFIG)
    except (ImportError, ValueError):  # a name that none of the Hub has
        return None
    return Path(found).parent if isinstance(found, str) else None


def _json(path: Path) -> Any:
    try:
        return json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return None


def _named_code(model: Any) -> list[str]:
    """The Python files that `auto_map` names; those of other repositories are loaded from there."""
    named = getattr(getattr(model, "config", None), "auto_map", None) or {}
    texts = [text for one in named.values() for text in (one if isinstance(one, (list, tuple)) else [one])]
    texts = [text for text in texts if isinstance(text, str) and "--" not in text]
    return sorted({f"{text.partition('.')[0]}.py" for text in texts})


def _code_of(model: Any, source: Path) -> Iterator[str]:
    """The Python files that load a model, with those that they import."""
    for name in _named_code(model):
        yield name
        if (source / name).is_file():
            from transformers.dynamic_module_utils import get_relative_import_files

            yield from (Path(one).name for one in get_relative_import_files(source / name))


def _without_code(model: Any, files: Mapping[str, Content]) -> list[str]:
    left = [name for name in _named_code(model) if name not in files]
    return [f"{listed(left)}, the code of the model that config.json names in auto_map"] if left else []


def _paths_of(source: Path) -> list[str]:
    """The folders that modules.json of sentence-transformers names, beside that of the model."""
    values = _json(source / _MODULES)
    paths = [one.get("path") for one in values if isinstance(one, dict)] if isinstance(values, list) else []
    return [path for path in paths if isinstance(path, str) and path not in ("", ".", "..") and "/" not in path]


def _modules_of(source: Path) -> Iterator[str]:
    for path in _paths_of(source):
        if (source / path).is_dir():
            yield from (
                f"{path}/{one.name}" for one in sorted((source / path).iterdir()) if _is_known(one.name, _OF_MODULES)
            )
