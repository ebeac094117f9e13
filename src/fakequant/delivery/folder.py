"""Folders with the layout of Hugging Face: shards of tensors, the configuration, and small files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.errors import CheckpointError, ExportError, not_imported, shown
from fakequant.model.state.snapshots import Content, Files, StoredTensors, TensorFile, read_folder, size_of
from fakequant.nn.paths import join
from fakequant.nn.quantized.forms import computed_class, own_class

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_INDEX = f"{WEIGHTS}.index.json"
_NOT_TAKEN = (
    *("quantization_config", "compression_config", "auto_map", "attn_implementation", "_attn_implementation"),
    *("experts_implementation", "_experts_implementation", "quantization"),
)
"""Keys that are removed from a configuration before a model is built: they name other files, or code."""
_COUNTED, _COUNTS, _EXPERTS, _FEW = re.compile(r"layer|depth|^num_|^n_|_num_"), 1 << 22, 1 << 14, 256
"""A pattern of keys with counts; the largest count of anything; that of experts; the layers that any file may have."""
_CODES, _BUFFERS = 8, 1 << 30
"""The most weights that a byte of a file holds, and the most bytes of buffers that files lack, such as masks."""
_MARK = "fakequant"
"""The key in a file's header that says that `deliver` wrote the file, so that a later delivery may replace it."""


def config_file(model: nn.Module, quantization: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    """The bytes of `config.json`: the model's configuration, if it has one, with a dtype and the quantization."""
    config: Any = getattr(model, "config", None)
    values = json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else {}
    if values:
        values |= {"architectures": [own_class(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    return json.dumps({**values, "quantization_config": quantization}, indent=2).encode()


def check_shard_size(limit: int) -> None:
    """Raise ExportError if the largest size of a file is not a positive number of bytes."""
    if not isinstance(limit, int) or limit < 1:
        raise ExportError(f"max_shard_size is a number of bytes, such as 5 * 10**9, got {shown(limit)}")


def sharded(files: Files, limit: int, beside: Mapping[str, str]) -> dict[str, Content]:
    """The files with their tensors in shards of at most `limit` bytes, and an index; headers store `beside`."""
    found: dict[str, Content] = {}
    for file, content in files.items():
        if not (file.endswith(".safetensors") and isinstance(content, Mapping)):
            found[file] = content
            continue
        tensors: Any = content
        shards, held = list[dict[str, Any]]([{}]), 0
        for name, tensor in tensors.items():
            if shards[-1] and held + size_of(tensor) > limit:
                shards.append({})
                held = 0
            shards[-1][name] = tensor
            held += size_of(tensor)
        metadata = {**getattr(tensors, "metadata", {}), _MARK: json.dumps(beside)}
        if len(shards) == 1:
            found[file] = TensorFile(tensors, metadata)
            continue
        stem = file.removesuffix(".safetensors")
        names = [f"{stem}-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
        place = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(map(size_of, tensors.values()))}, "weight_map": place}
        found |= {name: TensorFile(shard, metadata) for name, shard in zip(names, shards, strict=True)}
        found[f"{file}.index.json"] = json.dumps(index, indent=2).encode()
    return found


def written_in(folder: Path) -> dict[str, str] | None:
    """The digests of the files beside the tensors of a folder, see `sharded`; None if other programs wrote them."""
    found: dict[str, str] | None = None
    for path in sorted(folder.glob("*.safetensors")):
        try:
            values = json.loads(StoredTensors(path).metadata[_MARK])
        except (CheckpointError, OSError, KeyError, ValueError, RecursionError):
            return None
        found = {**(found or {}), **(values if isinstance(values, dict) else {})}
    return found


def _infinite(values: dict[str, Any]) -> Any:
    """The float that transformers writes as an object, because JSON has no infinity: Mamba 2 has one."""
    text = values.get("__float__")
    return float(text) if len(values) == 1 and text in ("Infinity", "-Infinity", "NaN") else values


class Folder:
    """A folder with `config.json` and tensors, which are read at their access; nothing is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = self.json(CONFIG)
        inner = self.config.get("text_config")  # of models of several modalities; the third name is of older files
        places = [self.config, inner if isinstance(inner, dict) else {}]
        said = [one.get(key) for key in ("quantization_config", "compression_config") for one in places]
        # AutoGPTQ and AutoAWQ wrote a file of its own in 2023.
        for file, method, key in (("quantize_config.json", "gptq", "bits"), ("quant_config.json", "awq", "w_bit")):
            if not any(said) and (path / file).is_file() and key in (values := self.json(file)):
                said.append({"quant_method": method, **values})
        self.quantization: Any = next((one for one in said if one), {})

    def json(self, name: str) -> dict[str, Any]:
        content = read_folder(self.path)[name]
        assert isinstance(content, bytes)
        try:
            values = json.loads(content, object_hook=_infinite)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.path / name} holds a {type(values).__name__}, not an object of JSON")
        return values

    def tensors(self) -> ShardedTensors:
        """All tensors by name, from one file or the shards of the index; raises CheckpointError without any."""
        if (self.path / WEIGHTS).is_file():
            held: Any = read_folder(self.path)[WEIGHTS]
            return ShardedTensors(self.path, dict.fromkeys(held, WEIGHTS))
        if not (self.path / _INDEX).is_file():
            if len(files := [*self.path.glob("*.safetensors")]) == 1:  # AutoGPTQ named it by bits and groups
                held = read_folder(self.path)[files[0].name]
                return ShardedTensors(self.path, dict.fromkeys(held, files[0].name))
            raise CheckpointError(
                f"{self.path} has neither {WEIGHTS} nor {_INDEX}; pickles (.bin, .pt) are not read, because they can "
                "execute code: convert them to safetensors"
            )
        places = self.json(_INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
            raise CheckpointError(f"{self.path / _INDEX} is damaged: its weight_map names no files")
        return ShardedTensors(self.path, places)


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, read at each access; `places` has the file of each."""

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self._places = places
        self._files: dict[str, Any] = {name: read_folder(folder)[name] for name in dict.fromkeys(places.values())}
        for name, file in places.items():
            if name not in self._files[file]:
                raise CheckpointError(f"{folder} is damaged: {name} is not in {file}, where its index says")
        self.metadata: dict[str, str] = {}
        for file in self._files.values():
            self.metadata |= file.metadata

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._places[name]][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def class_of(path: Path, cure: str) -> Any:
    """The class of transformers that the `config.json` of a folder names; code in the folder is not run."""
    names = Folder(path).config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} holds a model of transformers, but transformers is not installed; install it, or {cure}"
        ) from error
    try:  # transformers imports the module of the class now
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
    except ImportError as error:
        raise CheckpointError(f"transformers cannot import {name}: {not_imported(error)}") from error
    if cls is None or not hasattr(cls, "config_class"):
        raise CheckpointError(
            f"{path / CONFIG} names the architecture {name!r:.80}, which transformers {transformers.__version__} does "
            f"not have; {cure}"
        )
    return cls


def build(path: Path) -> nn.Module:
    """A model of transformers by the `config.json` of a folder, in eval mode; code in the folder is not run."""
    cls, config = class_of(path, "give the float model: fakequant.read(path, model)"), Folder(path).config
    from transformers.initialization import no_init_weights

    files = [one for one in path.glob("*.safetensors") if one.is_file()]
    tensors = sum(len(StoredTensors(one)) for one in files)
    check_counts(config, tensors, path / CONFIG)
    own = cls.config_class.from_dict(_plain_config(config))

    def make() -> nn.Module:
        with no_init_weights():
            return cls._from_config(own, dtype=config.get("dtype", config.get("torch_dtype")))

    model = built(make, sum(one.stat().st_size for one in files), path)
    model.tie_weights()  # type: ignore[operator]
    return model.eval()


def _plain_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that name other packages or code."""
    parts = {key: value for key, value in values.items() if key not in _NOT_TAKEN}
    return {key: _plain_config(one) if isinstance(one, dict) else one for key, one in parts.items()}


def check_counts(values: Any, tensors: int, path: Path) -> None:
    """Raise CheckpointError if a configuration has more layers than files have tensors, or another impossible count."""
    named = {str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {}
    for key, value in named.items():
        check_counts(value, tensors, path)
        limit = max(tensors, _FEW) if "layer" in key else _EXPERTS if "expert" in key else _COUNTS
        if isinstance(value, (int, float)) and _COUNTED.search(key) and not abs(value) <= limit:
            raise CheckpointError(f"{path} is damaged: {key} is {value!r:.40}, and its files hold {tensors} tensors")


def built(make: Callable[[], nn.Module], size: int, path: Path) -> nn.Module:
    """The model that a function makes; first it is made on the meta device, to check that the files can hold it.

    Raises CheckpointError if the configuration is of a larger model, or damaged.
    """
    with torch.device("meta"):
        outline = make()
    weights = sum(one.numel() for one in outline.parameters())
    others = sum(one.numel() * one.element_size() for one in outline.buffers())
    if weights > _CODES * size or others > _BUFFERS + _CODES * size:
        raise CheckpointError(
            f"{path} is damaged: its configuration is of a model with {weights:,} weights and {others:,} bytes of "
            f"buffers, and the files have {size:,} bytes"
        )
    return make()


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is of transformers, by its attribute `config_class`."""
    return hasattr(model, "config_class")


def _outline_of(model: nn.Module) -> nn.Module | None:
    """The model that transformers makes by the configuration of a model, on the meta device; None for other models."""
    if not type(model).__module__.startswith("transformers."):
        return None
    from transformers.initialization import no_init_weights

    of: Any = model
    with torch.device("meta"), no_init_weights():
        return type(of)._from_config(deepcopy(of.config), dtype=of.dtype)  # which sets the dtype of the configuration


def rounded_buffers(model: nn.Module) -> dict[str, torch.dtype]:
    """The buffers that are in no file and have another dtype than transformers gives them, which is returned.

    `model.half()` rounds the frequencies of rotary embeddings, and `from_pretrained(dtype=torch.float16)` does not.
    """
    made, found = _outline_of(model), dict[str, torch.dtype]()
    held = dict(model.named_modules())
    for path, module in () if made is None else made.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            here, there = getattr(held.get(path), name, None), module._buffers[name]
            if (
                isinstance(here, Tensor)
                and there is not None
                and there.is_floating_point()
                and here.dtype != there.dtype
            ):
                found[join(path, name)] = there.dtype
    return found


def replaced(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """For each layer that a folder cannot hold, its path and the reason: transformers makes another layer there.

    Args:
        layers: for each path, the quantized layer.
    """
    made = _outline_of(model)
    if made is None:
        return {}
    cls, outline = type(model), dict(made.named_modules())

    def shape_of(layer: nn.Module | None) -> list[int]:
        weight = getattr(layer, "weight", None)
        return [*weight.shape] if isinstance(weight, Tensor) else []

    def described(layer: nn.Module | None) -> str:
        """The description of a layer for a message."""
        name, shape = type(layer).__name__.removeprefix("Quant"), shape_of(layer)
        return "nothing" if layer is None else f"a {name}{f' with a weight {shape}' if shape else ''}"

    found = dict[str, str]()
    for path, layer in layers.items():
        own = outline.get(path)
        if own is None or not isinstance(layer, computed_class(own)) or shape_of(own) != shape_of(layer):
            found[path] = (
                f"{cls.__name__} makes {described(own)} there by its configuration, and a loader of the folder does, "
                f"too, but the model has {described(layer)}; quantize the model as its class makes it"
            )
    return found


def initializes(model: nn.Module, packed: Iterable[str]) -> bool:
    """Whether transformers initializes a model while the layers at the paths `packed` have no weight.

    To load a file, it calls the initialization of the class, which keeps loaded weights. T5, DINOv2, Mamba and others
    read `layer.weight` there, and layers with packed codes have none.
    """
    made = _outline_of(model)
    layers = {} if made is None else dict(made.named_modules())
    for path in packed:
        if hasattr(layers.get(path), "weight"):
            del layers[path].weight
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            if made is not None:
                made.initialize_weights()  # type: ignore[operator]
    except AttributeError:
        return False
    return True


def by_transformers(path: Path, dtype: torch.dtype, **options: Any) -> nn.Module:
    """The model that transformers loads from a folder, in eval mode."""
    import transformers

    architecture = getattr(transformers, Folder(path).config["architectures"][0])
    return architecture.from_pretrained(path, dtype=dtype, **options).eval()


class FileNames:
    """Converts tensors of a model to tensors of files and back; files have a tensor for each expert of a stack.

    Args:
        held: the names in a file that is read, from which the prefix follows; empty for a file that is written.

    Attributes:
        prefix: the text before the model's names in the file.
        merged: patterns of the first of the weights that transformers merges in a tensor of a file. It loads codes only
            if these weights have codes, and not with `dequantize=True`.
    """

    def __init__(self, model: nn.Module, held: Iterable[str] = ()) -> None:
        self._model: Any = None
        self.merged: list[str] = []
        if is_of_transformers(model):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import PrefixChange

            # transformers looks for its models in a walk of all modules, for each tensor: 3 s for 128 layers.
            self._model = copy(model)
            parts = [(path, part) for path, part in model.named_modules() if is_of_transformers(part)]
            vars(self._model)["named_modules"] = lambda *_, **__: iter(parts)
            # Codes are not merged, as of a query, a key and a value; transformers also loads the names of the model.
            found = getattr(model, "_weight_conversions", None)
            if found is None:  # transformers reverts these as it saves a model that it did not load
                mapping = get_model_conversion_mapping(self._model, add_legacy=False)
                found = [one for one in mapping if not isinstance(one, PrefixChange)]
            vars(self._model)["_weight_conversions"] = [one for one in found if len(one.target_patterns) == 1]
            several = (one for one in found if len(one.target_patterns) > 1)
            self.merged += [
                one._original_target_patterns[0]
                for one in several
                if all(source.endswith(".weight") for source in one.source_patterns)
            ]
        base, own = f"{getattr(model, 'base_model_prefix', '')}.", {*model.state_dict()} if held else set[str]()
        is_below = any(name.startswith(base) and name.removeprefix(base) in own for name in held)
        self.prefix = base if self._model is not None and len(base) > 1 and is_below else ""

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The pieces of a model's tensor by their names in files; codes and scales are split along a weight's axes."""
        found = {name: tensor}
        if self._model is not None:
            from transformers.core_model_loading import revert_weight_conversion

            found = revert_weight_conversion(self._model, found)  # type: ignore[arg-type]
        return {f"{self.prefix}{key}": piece for key, piece in found.items()}

    def joined(self, name: str, pieces: Mapping[str, Tensor], shape: Sequence[int], channels: int | None) -> Tensor:
        """A model's tensor, joined from its pieces in files; `channels` is the axis of rows in a stack."""
        (first, *others) = pieces.values()
        if not others:
            return first
        ones = list(shape) if channels is None else [shape[0], 1, 1]
        if channels is not None:
            ones[channels] = shape[channels]
        place = self.split(name, torch.arange(prod(ones), device="cpu").reshape(ones))
        whole = torch.empty((prod(ones), 1 if channels is None else first.shape[-1]), dtype=first.dtype, device="cpu")
        for key, piece in pieces.items():
            whole[place[key].flatten()] = piece.reshape(place[key].numel(), -1)
        stack = whole if channels is None else whole.unflatten(0, (shape[0], -1))
        return stack.mT.contiguous() if channels == -1 else stack.reshape(tuple(shape))
