"""Deliver a model: write its codes, unchanged, to files that another program loads, or return them as named tensors.

Trainers send the named tensors to a running server after each step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.delivery.folder import (
    CONFIG,
    FileNames,
    Folder,
    check_shard_size,
    replaced,
    rounded_buffers,
    sharded,
    written_in,
)
from fakequant.delivery.format import (
    DeliveryFormat,
    Part,
    delivery_format,
    delivery_formats,
    float_names,
    paired,
    without_quantizers,
)
from fakequant.errors import CheckpointError, ConfigError, ExportError, OutputError, nearest, shown, warn_user
from fakequant.files import check_path, read_whole, writable_folder
from fakequant.model.config import TensorConfig
from fakequant.model.engine import Engine, find_engine, holders, known_engines
from fakequant.model.presets import presets
from fakequant.model.sites import site_path
from fakequant.model.state.plan import QuantizerEntry
from fakequant.model.state.snapshots import (
    Content,
    LazyTensor,
    LazyTensors,
    QuantizedState,
    lazy,
    snapshot,
    write_folder,
)
from fakequant.model.state.weight_codes import QuantizedWeights
from fakequant.model.weights import merged_layers, spec_bits
from fakequant.nn.paths import join, module_at
from fakequant.nn.products import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, quantizers
from fakequant.nn.ranges import GLOBAL_SCALE
from fakequant.nn.wrappers import Role, accepts_wrapped_model
from fakequant.text import listed

_IN_FLOAT = 32
"""The bits of a tensor that is not quantized, for the distance of a preset from a layer's quantization."""
_KIND = 8
"""The bits that a dynamic range instead of a fixed range adds to the distance."""
_AXES = 0.01
"""The bits that another granularity adds to the distance."""


def parts_of(model: nn.Module, state: QuantizedState) -> list[Part]:
    """The quantized parts of a model: a part for each weight of a layer, and for each call of a function."""
    found: list[Part] = []
    for path, entry in state.layers.items():
        layer, held = module_at(model, path), _quantizing(entry.quantizers)
        assert isinstance(layer, QuantizedLayer)
        operands = layer.operands(layer)
        pairs = paired(operands)
        for attribute, source in pairs.items():
            inputs = [source] if source else [name for name, one in operands.items() if one.role is Role.INPUT]
            own = {"input" if source else _shown(name): name for name in inputs}
            own |= {"weight": attribute, "output": "_output_quantizer"}
            tensors = {name: held[key] for name, key in own.items() if key in held}
            if tensors:
                places = {name: operands[key] for name, key in own.items() if key in operands}
                paths = {name: join(path, own[name]) for name in tensors}
                found.append(Part(path, entry.type, layer, tensors, paths, places))
        if not pairs and held:
            tensors = {_shown(name): one for name, one in held.items()}
            found.append(Part(path, entry.type, layer, tensors, {_shown(name): join(path, name) for name in held}))
    for path, owner in state.sites.owners.items():
        for key, site in owner.sites.items():
            if held := _quantizing(site.quantizers):
                paths = {name: f"{site_path(path, key)}.{name}" for name in held}
                found.append(Part(path, key.rpartition("_")[0], module_at(model, path), held, paths, call=key))
    return found


def _quantizing(entries: Mapping[str, QuantizerEntry | None]) -> dict[str, TensorConfig]:
    """The configurations of the quantizers that are on, by name."""
    return {name: one.tensor for name, one in entries.items() if one is not None and one.mode is Mode.QUANTIZE}


def _shown(attribute: str) -> str:
    return attribute.strip("_").removesuffix("_quantizer")


def refuse(
    format: DeliveryFormat, model: nn.Module, parts: Sequence[Part], state: QuantizedState, *, with_ranges: bool = True
) -> None:
    """Raise ExportError if a format cannot hold a part, with each reason and the nearest preset."""
    if reason := format.refuses(model):
        raise ExportError(f"{format.name} cannot hold this model, however it is quantized: {reason}")
    fixing = (path for path, one in quantizers(model).items() if one.fixes_global)
    unfixed = {path for path in fixing if f"{path}.{GLOBAL_SCALE}" not in state.tensors}
    found, matrices = dict[str, str](), {part.path: part.module for part in parts if part.is_matrix}
    others = {} if format.suffix else replaced(model, matrices)
    for part in parts:
        if part.path in others:
            found[part.name] = others[part.path]
        elif reason := _own_reason(part, state, unfixed, with_ranges=with_ranges):
            found[part.name] = reason
        elif reason := format.why_not(part):
            found[part.name] = f"{reason}{_nearest(format, part)}"
    if not found:
        found |= format.conflicts(model, parts)
    weights = {state.shared.get(part.weight, part.weight): part.name for part in parts if "weight" in part.operands}
    for weight in weights.keys() & state.in_float.keys():
        found.setdefault(weights[weight], state.in_float[weight])
    if found:
        alike: dict[str, list[str]] = {}
        for name, reason in found.items():
            alike.setdefault(reason, []).append(name)
        named = (
            (names[0] if len(names) == 1 else f"{len(names)} parts ({listed(names, 3)})", reason)
            for reason, names in alike.items()
        )
        lines = "".join(f"\n  {names}: {reason}" for names, reason in named)
        many = "1 part of the model as it is" if len(found) == 1 else f"{len(found)} parts of the model as they are"
        raise ExportError(f"{format.name} cannot hold {many} quantized:{lines}")


def _own_reason(part: Part, state: QuantizedState, unfixed: Collection[str], *, with_ranges: bool) -> str | None:
    """Why no format can hold a part, or None; the quantizers in `unfixed` have no fixed second-level scale."""
    entry = None if part.call else state.layers[part.path]
    if entry is not None and entry.transform is not None:
        kind = entry.transform.kind
        return (
            f'its input goes through a {kind} before its quantizer; leave the steps "smooth" and "rotate" out of '
            "improve. If read() made the model from a file, call read(path, dequantize=True), and quantize that model "
            "for this format"
        )
    weight = Product.of(part.module, "", part.places["weight"].weight).parameter if part.weight else None
    if part.weight and weight is None:
        return (
            "its weight is computed (weight_norm, pruning, a parametrization); make it a parameter first, for example "
            "by prune.remove or remove_parametrizations"
        )
    held = entry.quantizers if entry is not None else state.sites.owners[part.path].sites[part.call].quantizers
    if chosen := [one.by_value for one in held.values() if one.by_value is not None]:
        return f"its ranges follow {chosen[0].by}, but a file has a single range; calibrate without by="
    if any(one.learned is not None for one in held.values()):
        return "its range is learned; fakequant.qat.set_scales(model, fakequant.qat.Scales.FIXED) fixes it"
    scales = {name: state.tensors.get(f"{path}.scale") for name, path in part.paths.items()}
    # Static quantizers need data before they work; weights have scales of their own.
    weights = {name for name, place in part.places.items() if place.role is Role.WEIGHT}
    needs = (name for name, one in part.operands.items() if not one.dynamic and name not in weights)
    left = [name for name in needs if scales[name] is None]
    left += [name for name, path in part.paths.items() if path in unfixed]
    if left and with_ranges:
        return f"its {left[0]} has no range yet; call fakequant.calibrate(model, batches) before"
    dtypes = [scale.dtype for scale in scales.values() if scale is not None]
    if weight is not None:
        dtypes.append(weight.dtype)
    if torch.float64 in dtypes:
        return "it is in float64, whose scales files round to float32; convert it by model.float() before prepare"
    return None


def _nearest(format: DeliveryFormat, part: Part) -> str:
    """The end of a message: the nearest preset to a layer's quantization that a format can hold."""
    if not part.weight:
        return "; leave it in float by Rule(pattern)"
    held: dict[str, tuple[bool, float, float]] = {}
    others = {one.name for one in delivery_formats().values() if one.writes} - {format.name}
    for name, preset in presets().items():
        rule = next((rule for rule in preset.layer_rules if rule.pattern == "*" and not rule.layers), None)
        tensors: dict[str, TensorConfig] = {}
        for key, place in part.places.items():
            if rule is not None and (config := rule.tensor(place.role, place.axes(), place.kernel)) is not None:
                tensors[key] = config.for_each() if place.is_stack else config
        if "weight" in tensors and format.why_not(replace(part, operands=tensors)) is None:
            is_of_another = name.partition("_")[0].lower() in others  # as GGUF_Q4_1
            ours, theirs, total = part.operands.get("weight"), tensors["weight"].spec.format, 0.0
            codes = _IN_FLOAT
            if ours is not None:
                codes = abs(theirs.bits - ours.spec.format.bits) + (theirs != ours.spec.format)
            for role in ("weight", "input"):
                one, two = part.operands.get(role), tensors.get(role)
                shape = part.shape if role == "weight" else ()
                bits = [
                    _IN_FLOAT if x is None else spec_bits(x.spec, shape).per_weight if shape else x.spec.format.bits
                    for x in (one, two)
                ]
                total += abs(bits[0] - bits[1])
                if one is not None and two is not None:
                    total += _KIND * (one.dynamic != two.dynamic) + (one.spec.format != two.spec.format)
                    total += _AXES * (one.spec.granularity != two.spec.granularity)
            held[name] = is_of_another, codes, total
    if not held:
        return "; leave it in float by Rule(pattern), or give the model to fakequant.export_onnx"
    return f"; the nearest preset that it holds is {min(held, key=held.__getitem__)}"


_KNOWN = (
    *("tokenizer*", "*vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("generation_config.json", "*processor_config.json", "chat_template*", "LICENSE*", "NOTICE*"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
)
"""Patterns of files that are copied; other files may be private, and a delivery is made to be shared."""
_OF_MODULES = ("config.json", "*_config.json", "model.safetensors", "pytorch_model.bin")
_LARGE = 64 * 2**20
"""The most bytes of a file that is copied: tokenizers, configurations and small modules have fewer."""
_BUFFERS = ("inv_freq", "position_ids", "attn.bias", "masked_bias")
"""Ends of names of buffers in older files, which models compute by themselves."""
_MODULES, _GENERATION = "modules.json", "generation_config.json"


def beside(model: nn.Module) -> tuple[Mapping[str, Content], list[str]]:
    """The small files of the folder that a model was loaded from, which may be in the cache of Hugging Face.

    Returns:
        The files to copy, by name (a file of a module of sentence-transformers has the module's folder in its name),
        and a text for each missing file.
    """
    given = str(getattr(model, "name_or_path", "") or "")
    generation: Any = getattr(model, "generation_config", None)
    made = {} if generation is None else {_GENERATION: generation.to_json_string().encode()}
    if not given:
        return made, _without_code(model, {})
    source = folder_of(model)
    if source is None:
        return made, [
            f"the tokenizer and other files of {given}, which is not a folder here and not in the cache of Hugging Face"
        ]
    wanted = _known_in(source, _KNOWN)
    for name in _named_code(model):  # the Python files that load the model, with those that they import
        wanted.append(name)
        if (source / name).is_file():
            from transformers.dynamic_module_utils import get_relative_import_files

            wanted += [Path(one).name for one in get_relative_import_files(source / name)]
    for path in _paths_of(source):
        if (source / path).is_dir():
            wanted += [f"{path}/{name}" for name in _known_in(source / path, _OF_MODULES)]
    found = {name: source / name for name in dict.fromkeys(wanted) if (source / name).is_file()}
    large = [name for name, path in found.items() if path.stat().st_size > _LARGE]
    missing = [f"{listed(large)}, which are larger than {_LARGE >> 20} MB"] if large else []
    files = {name: path for name, path in found.items() if name not in large}
    missing += _without_code(model, files)
    if left := [path for path in _paths_of(source) if not any(name.startswith(f"{path}/") for name in files)]:
        missing.append(f"{listed(left)}, which {_MODULES} names")
    is_text = getattr(model, "main_input_name", "") == "input_ids"
    if source != Path(given) and is_text and not {*_known_in(source, _KNOWN[:8])} & {*files}:
        missing.append(f"the tokenizer of {given}, which is not in the cache of Hugging Face")
    return {**made, **files} if _GENERATION not in files else files, missing


def skipped(model: nn.Module, source: Path) -> dict[str, LazyTensor]:
    """The tensors in a folder that the model's class does not load, such as those for multi-token prediction (MTP).

    The result is empty if the folder is quantized, or holds pickles.
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
    """The names of files that may be written to a folder, and of files there that the user wrote or changed.

    `written` are the digests of the files that an earlier delivery wrote there.
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


def _known_in(folder: Path, patterns: Collection[str]) -> list[str]:
    """The names of the files in a folder that fit a pattern, without hidden files."""
    names = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def folder_of(model: Any) -> Path | None:
    """The folder from which a model was loaded, or its folder in the cache; None if unknown or of another type."""
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
    """The Python files that `auto_map` names, without files of other repositories."""
    named = getattr(getattr(model, "config", None), "auto_map", None) or {}
    texts = [text for one in named.values() for text in (one if isinstance(one, (list, tuple)) else [one])]
    texts = [text for text in texts if isinstance(text, str) and "--" not in text]
    return sorted({f"{text.partition('.')[0]}.py" for text in texts})


def _without_code(model: Any, files: Mapping[str, Content]) -> list[str]:
    left = [name for name in _named_code(model) if name not in files]
    return [f"{listed(left)}, the code of the model that config.json names in auto_map"] if left else []


def _paths_of(source: Path) -> list[str]:
    """The folders that modules.json of sentence-transformers names, apart from the model's folder."""
    values = _json(source / _MODULES)
    paths = [one.get("path") for one in values if isinstance(one, dict)] if isinstance(values, list) else []
    return [path for path in paths if isinstance(path, str) and path not in ("", ".", "..") and "/" not in path]


_CALL = "deliver(model, 'folder', 'compressed-tensors')"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


@accepts_wrapped_model
def deliver(
    model: nn.Module,
    folder: str | os.PathLike[str],
    format: str | None = None,
    *,
    target: str | Engine | None = None,
    max_shard_size: int = 5 * 10**9,
    progress: bool | None = None,
) -> Path:
    """Write a prepared model in a format that other programs load; nothing is quantized again.

    A model that the format cannot hold is refused before anything is written. Tensors are made one after the other,
    and the files appear when all of them are complete. A folder gets the configuration of the model, and the tokenizer
    and other small files from the folder that the model was loaded from, or from the cache of Hugging Face. The
    files of an earlier delivery are replaced, and no other files.

    Args:
        model: a prepared and calibrated model.
        folder: where the files are written; for a format that is a single file, the path of the file is accepted, too.
        format: "compressed-tensors", or another of `fakequant.delivery.delivery_formats()`.
        target: instead of the format, the engine that will load the files, as for `prepare`.
        max_shard_size: the largest number of bytes of a file of tensors, as far as its largest tensor allows.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The path of the folder, or of the single file, for `read` and `verify_delivery`.

    Raises:
        ExportError: the format cannot hold some layers; each is named, with the reason and the nearest possible preset.
        CheckpointError: an unknown format, or a model that is not prepared.
        ConfigError: an unknown engine, or an engine that reads other files; the message names the function for these.
        OutputError: the folder cannot be written, or holds weights of another model or weights that no delivery wrote.

    >>> from tempfile import TemporaryDirectory
    >>> net = lambda: nn.Sequential(nn.Linear(64, 64))
    >>> model, x = prepare(net(), "int4_group32"), torch.ones(64)
    >>> with TemporaryDirectory() as folder:
    ...     again = read(deliver(model, folder, "compressed-tensors"), net())
    >>> torch.equal(again(x), model(x))
    True
    """
    check_model(model, "deliver", _CALL, ExportError)
    check_path(folder, _CALL)
    check_shard_size(max_shard_size)
    chosen, state = delivery_format(format_for(format, target)), snapshot(model)
    if target is not None:
        find_engine(target).check(model)
    source = folder_of(model)
    left = {} if source is None else skipped(model, source)
    path = deliver_state(state, model, folder, chosen, max_shard_size=max_shard_size, progress=progress)
    if left:
        warn_user(
            f"{path} lacks {listed(left)} of {source}, such as layers for speculative decoding, which "
            f"{type(model).__name__} does not load; improve_folder copies these tensors"
        )
    if rounded := rounded_buffers(model):
        dtypes = {str(model.get_buffer(name).dtype).removeprefix("torch.") for name in rounded}
        warn_user(
            f"{listed(rounded, 2)}: {'/'.join(sorted(dtypes))} here, and in no file; programs compute them anew in "
            f"{str(next(iter(rounded.values()))).removeprefix('torch.')}, so that their outputs are not those of this "
            "model. Load the float model by from_pretrained(dtype=...), and not by model.to(dtype), which rounds them"
        )
    return path


def files_of(state: QuantizedState, model: nn.Module, chosen: DeliveryFormat) -> dict[str, Content]:
    """The files of a state in a format, see `deliver_state`; tensors are made when they are read."""
    parts = parts_of(model, state)
    refuse(chosen, model, parts, state)
    for engine in {one.name: one for one in known_engines().values() if one.files == chosen.name}.values():
        try:
            engine.check(model)
        except ExportError as error:
            warn_user(f"{engine.name} does not load these files: {error}")
    return dict(chosen.encode(state, model, parts))


def format_for(format: str | None, target: str | Engine | None) -> str:
    """The name of the format, or of the format that the engine `target` loads; raises ConfigError without any."""
    if (format is None) is (target is None):
        raise ConfigError(f"give a format, such as {_CALL}, or the engine in its place: target='vllm'")
    if target is None:
        return str(format)
    engine = find_engine(target)
    if engine.files not in delivery_formats():
        style = f", style={engine.files!r}" if engine.files else ""
        call = f"; call fakequant.{engine.export}(model, example, path{style})" if engine.export else ""
        raise ConfigError(f"{engine.name} reads other files than deliver writes{call}")
    return engine.files


def deliver_state(
    state: QuantizedState,
    model: nn.Module,
    folder: str | os.PathLike[str],
    chosen: DeliveryFormat,
    *,
    max_shard_size: int,
    others: Mapping[str, LazyTensor] | None = None,
    progress: bool | None = None,
) -> Path:
    """Write a state in a format, as `deliver` does, and with it the tensors `others`, which the model does not load."""
    target = Path(folder)
    name = target.name if chosen.suffix and target.suffix == chosen.suffix else ""
    files = files_of(state, model, chosen)
    if others:
        with_others = chosen.with_others(files, others)
        files = files if with_others is None else dict(with_others)
        if with_others is None:
            warn_user(f"{chosen.name} files cannot hold {listed(others)}, which {type(model).__name__} does not load")
    out = writable_folder(target.parent if name else target)
    if chosen.suffix:
        files = {name or key: content for key, content in files.items()}
        write_folder(out, files, lambda: _refuse_others(chosen, out, files), progress=progress)
        return out / next(iter(files))
    small, missing = beside(model)
    free, kept = unchanged(out, small, written_in(out) or {})
    notes = [f"the folder lacks {'; and '.join(missing)}; add these, so that programs load it"] if missing else []
    if kept:
        notes.append(f"{listed(kept)} in {out} were kept, but differ from the model's; remove them and deliver again")
    copied = {one: small[one] for one in free}
    files = {**copied, **sharded(files, max_shard_size, digests(copied))}
    write_folder(out, files, lambda: _refuse_others(chosen, out, {*files} - {*free}), progress=progress)
    if notes:
        warn_user(f"{chosen.name}: {'; '.join(notes)}")
    return out


def refuse_undeliverable(format: str, model: nn.Module) -> None:
    """Raise ExportError if a format cannot hold a prepared model; unknown names of formats are ignored."""
    chosen = delivery_formats().get(format)
    if chosen is not None:
        state = snapshot(model)
        refuse(chosen, model, parts_of(model, state), state, with_ranges=False)


holders.append(refuse_undeliverable)


def weights_in(folder: Path) -> list[str]:
    """The files of a folder that a loader may take for weights."""
    return sorted({path.name for pattern in _WEIGHTS for path in folder.glob(pattern)})


def refuse_replacing(chosen: DeliveryFormat, path: Path, names: Collection[str]) -> None:
    """Raise OutputError if a folder, or a file's folder, has files of these names that no delivery wrote."""
    folder = path.parent if chosen.suffix else path
    if (there := sorted(name for name in names if (folder / name).exists())) and not chosen.wrote(path):
        raise OutputError(
            f"cannot write to {folder}: it holds {listed(there)}, which fakequant.deliver did not write, such as the "
            "model in float; give an empty folder, or remove these files"
        )


def _refuse_others(chosen: DeliveryFormat, folder: Path, names: Collection[str]) -> None:
    """Raise OutputError if a folder has files of the user, or weights that a program may take for this model's."""
    if not chosen.suffix and (left := sorted({*weights_in(folder)} - {*names})):
        raise OutputError(
            f"cannot write to {folder}: it holds weights of another model, {listed(left)}, which programs may load "
            "instead; give an empty folder, or remove them"
        )
    refuse_replacing(chosen, folder / next(iter(names)) if chosen.suffix else folder, names)


_ENCODE = "encode(model, 'compressed-tensors')"
_PATTERN = set("*?[")


class DeliveredTensors(LazyTensors):
    """The tensors of a delivery by their names in files; each tensor is made anew at each access.

    Attributes:
        lazy: the tensors with shapes and dtypes, without making them.
        config: the quantization in `config.json`.
        metadata: the texts in the header of the file.
    """

    def __init__(self, tensors: Mapping[str, Any], config: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.config, self.metadata = dict(config), dict(metadata)

    def __repr__(self) -> str:
        return f"DeliveredTensors({len(self)} tensors, {self.config.get('quant_method', 'no configuration')})"


@accepts_wrapped_model
def encode(
    model: nn.Module, format: str, *, only: str | Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> DeliveredTensors:
    """The tensors that `deliver` would write, by the names that programs load, without files.

    The tensors have the bits of the files. Each is made at its access: beside the model, memory is needed for a single
    weight. Use the tensors before the model changes.

    Args:
        model: a prepared model; if `calibrate` did not see a weight, its scales are computed from its present values.
        format: "compressed-tensors", or another format of `fakequant.delivery.delivery_formats()` that is a folder.
        only: which tensors to return: paths of modules, names of tensors in the model or in files, or patterns of both
            (fnmatch). Weights that servers merge, such as q, k and v, are returned together. Default: all tensors.
        dtype: the dtype to which float tensors are rounded before they are quantized: torch.bfloat16 if mixed
            precision, or a server that quantizes by itself, rounds them first. Default: the dtype of the model.

    Raises:
        ExportError: the format cannot hold some layers, which are named, each with the reason; or it is not a folder.
        CheckpointError: an unknown format, or a model that is not prepared.
        ConfigError: a name in `only` that the model does not have, or a dtype that is not a float of 16 bits or more.

    >>> model = prepare(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 8)), "fp8_block", skip=["1"])
    >>> for name, tensor in encode(model, "compressed-tensors", only=["0"]).items():
    ...     print(name, tensor.dtype, list(tensor.shape))
    0.weight torch.float8_e4m3fn [128, 256]
    0.weight_scale torch.float32 [1, 2]
    0.bias torch.float32 [128]
    """
    check_model(model, "encode", _ENCODE, ExportError)
    chosen = delivery_format(format)
    if chosen.suffix:
        raise ExportError(f"{chosen.name} is a single file, not a set of named tensors; write it by fakequant.deliver")
    state = snapshot(model)
    if dtype is not None:  # tensors in float, without those of quantizers, are rounded before they are quantized
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise ConfigError(f"dtype is a float of 16 bits or more, such as torch.bfloat16, got {shown(dtype)}")
        stored, weights = state.tensors, copy(state.weights)
        assert isinstance(weights, QuantizedWeights)
        weights.dtype = dtype
        rounded = {name: lazy(stored, name) for name in stored}
        for name in without_quantizers(stored, [path for path, _, _ in state.quantizers()]):
            one = rounded[name]
            if one.dtype.is_floating_point and one.dtype is not dtype:
                rounded[name] = LazyTensor(one.shape, dtype, lambda one=one: one.make().to(dtype))
        state = replace(state, tensors=LazyTensors(rounded), weights=weights)
    files = files_of(state, model, chosen)
    tensors: dict[str, Tensor | LazyTensor] = {}
    metadata: dict[str, str] = {}
    for name, content in files.items():
        if name.endswith(".safetensors") and isinstance(content, Mapping):
            tensors |= cast("Any", content)
            metadata |= getattr(content, "metadata", {})
    if only is not None:
        given = [only] if isinstance(only, str) or not isinstance(only, Iterable) else [*only]
        wanted = _wanted(state, model, given, [*tensors])
        tensors = {name: one for name, one in tensors.items() if name in wanted}
    config = files.get(CONFIG, b"{}")
    assert isinstance(config, bytes)
    return DeliveredTensors(tensors, json.loads(config).get("quantization_config", {}), metadata)


def _wanted(state: QuantizedState, model: nn.Module, only: Collection[str], held: Collection[str]) -> set[str]:
    """The names in `held` (names in files) that match `only`, and the weights that servers merge with them."""
    if wrong := [one for one in only if not isinstance(one, str)]:
        raise ConfigError(f"only= takes names of layers or tensors, got {shown(wrong[0])}")
    exact, patterns, used = {*only}, [one for one in only if _PATTERN & {*one}], set[str]()

    def says(name: str) -> bool:
        names = _above(name)
        hits = exact.intersection(names).union(one for one in patterns if any(fnmatchcase(x, one) for x in names))
        used.update(hits)
        return bool(hits)

    parts = [part for part in parts_of(model, state) if "weight" in part.operands and part.weight]
    coded = {part.weight for part in parts}
    names, by_layer = FileNames(model), dict[str, set[str]]()
    for name in held:
        by_layer.setdefault(name.rpartition(".")[0], set()).add(name)
    places, widths = dict[str, set[str]](), dict[str, int]()
    for name in without_quantizers([*state.tensors, *state.shared], [path for path, _, _ in state.quantizers()]):
        first = state.shared.get(name, name)
        one = lazy(state.tensors, first)
        places[name] = {*names.split(first, torch.empty(one.shape, dtype=one.dtype, device="meta"))}
        if name.endswith(".weight") and one.shape:
            widths[name.removesuffix(".weight")] = one.shape[-1]
    others = {key for name, keys in places.items() if state.shared.get(name, name) not in coded for key in keys}
    for name, keys in places.items():
        layers = {key.rpartition(".")[0] for key in keys} if state.shared.get(name, name) in coded else set()
        places[name] = keys.union(*(by_layer.get(path, ()) for path in layers)).intersection(held) - (others - keys)
    found = {name for name in held if says(name)}.union(*(own for name, own in places.items() if says(name)))
    if left := [one for one in only if one not in used]:
        known = [*dict.fromkeys(path for name in places for path in _above(name)[-2:])]
        raise ConfigError(f"only= has {left[0]!r:.80}, but no layer or tensor has this name{nearest(left[0], known)}")
    # A server that merges layers takes all of them: vLLM 0.32 computes NaN where a part of such a weight was loaded.
    merged = [set[str]().union(*(places[f"{path}.weight"] for path in group)) for group in merged_layers(widths)]
    return found.union(*(own for own in merged if own & found))


def _above(name: str) -> list[str]:
    """The paths of the modules around a tensor, and its name."""
    return [*accumulate(name.split("."), "{}.{}".format)]
