"""GGUF: one file for llama.cpp and the programs that are built on it; transformers reads it, too.

Codes are written unchanged, in blocks that hold their scales: `delivery/gguf/blocks.py` has the types.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from fakequant.delivery.folder import built, check_counts
from fakequant.delivery.format import DeliveryFormat, LoadedFile, Part, float_names, turned
from fakequant.delivery.gguf import blocks, llama_cpp
from fakequant.delivery.gguf.architecture import (
    REST,
    GgufNames,
    NamedTensors,
    architecture_of,
    check_settings,
    computed_by_llama_cpp,
    describe,
    has_cache,
    inputs_for,
)
from fakequant.errors import CheckpointError, ShapeError
from fakequant.model.presets import LLAMA_CPP_CACHE
from fakequant.model.state.snapshots import Files, Made, QuantizedState, lazy, shared_names

_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPE = "fakequant.dtype"
"""The metadata key of the model's dtype, which blocks do not show."""
_LLAMA_CPP = 1e-2
"""The tolerance of outputs, as a share of the peak: single codes move them by up to 3e-3, a wrong order by 0.1."""


class Gguf(DeliveryFormat):
    """Linear layers, experts and embeddings of language models, in the types of GGUF with a code for each weight."""

    name = "gguf"
    suffix = ".gguf"
    packages = ("gguf", "transformers")

    def refuses(self, model: nn.Module) -> str | None:
        try:
            architecture = architecture_of(model)
            names = GgufNames(architecture, model)
            shared = shared_names(model)
            for name in float_names(model):
                names.of(shared.get(name, name))
            with warnings.catch_warnings():  # the warnings come when the file is written
                warnings.simplefilter("ignore")
                describe(blocks.require_gguf().GGUFWriter("", architecture.name), architecture, model)
        except CheckpointError as error:
            return str(error)
        return None

    def why_not(self, part: Part) -> str | None:
        if part.call:
            cached = all(one == LLAMA_CPP_CACHE.input for one in part.operands.values())
            return None if cached else "of functions, it quantizes only the cache, as in presets.LLAMA_CPP_CACHE"
        if not (part.is_matrix or part.is_turned or part.is_stack):
            return f"it quantizes linear layers, experts and embeddings, and {part.refused}"
        if "weight" not in part.operands or not {*part.operands} <= {"weight", "input"}:
            return "it quantizes weights, and inputs of products with them"
        try:
            own = inputs_for(*part.in_rows)
        except ShapeError as error:
            return str(error)
        if (given := part.operands.get("input", own)) != own:
            return f"its input is {given}, and llama.cpp computes {own}, as a preset GGUF_..._A8 does"
        return None

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        architecture = architecture_of(model)
        names = GgufNames(architecture, model)
        kinds = {part.weight: blocks.kind_of(*part.in_rows) for part in parts if not part.call}
        own = [name for name in float_names(model) if name not in state.shared]
        tensors = {key: one for name in own for key, one in _stored(state, names, name, kinds.get(name)).items()}
        for name, made in architecture.extra(model.config).items():
            tensors[name] = blocks.GgufTensor("F32", tuple(made.shape), made.numpy)

        def say(writer: Any) -> None:
            describe(writer, architecture, model)
            writer.add_string(_DTYPE, str(next(iter(state.tensors.values())).dtype))
            types = blocks.require_gguf().LlamaFileType.__members__  # llama.cpp's numbers for the type of most weights
            most = [f"MOSTLY_{kind}{end}" for kind, _ in Counter(kinds.values()).most_common(1) for end in ("", "_S")]
            if (file_type := next((int(types[name]) for name in most if name in types), None)) is not None:
                writer.add_file_type(file_type)
            for name in filter(names.shift, own):
                shift, values = np.float32(names.shift(name)), state.tensors[name].detach().float().cpu().numpy()
                # The rounding error of values + shift in float32: the sum and this error together are exact.
                if (rest := values - ((values + shift) - shift)).any():
                    writer.add_array(REST + names.of(name)[0], rest.tolist())

        return {f"model{self.suffix}": blocks.GgufContent(architecture.name, say, tensors)}

    def recognizes(self, path: Path) -> bool:
        return blocks.is_gguf(path)

    def wrote(self, path: Path) -> bool:
        try:
            return blocks.is_gguf(path) and _DTYPE in blocks.GgufFile(path).metadata
        except CheckpointError:
            return False

    def build(self, path: Path) -> nn.Module:
        transformers: Any = import_module("transformers")
        file = blocks.GgufFile(path)  # this reader checks damaged files
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        check_counts(config.to_dict(), len(file.tensors), path)
        if file.count > 1:  # transformers has read only the first file
            config.tie_word_embeddings = "output.weight" not in file.tensors
        try:
            architecture = architecture_of(SimpleNamespace(config=config))
            check_settings(file, architecture, config)
            dtype = {str(one): one for one in _KINDS}.get(str(file.metadata.get(_DTYPE)), torch.float32)
            size = sum(one.size for one in file.tensors.values())
            make = partial(transformers.AutoModelForCausalLM.from_config, config, dtype=dtype)
            model = built(make, size, path).eval()
            NamedTensors(path, model)
        except CheckpointError as error:
            raise CheckpointError(
                f"transformers {transformers.__version__} takes {path} for another model: {error}; give the right "
                "model: fakequant.read(path, model)"
            ) from error
        return model

    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        return NamedTensors(path, model).state()

    def engines(self, path: Path, model: nn.Module) -> Iterable[LoadedFile]:
        reader = NamedTensors(path, model)
        values = Made({name: partial(reader.theirs, name) for name in reader.coded})
        yield LoadedFile(f"gguf {metadata.version('gguf')}", values)
        dtype = next(iter(reader.like.values())).dtype
        why_not = architecture_of(model).unread(model.config, reader.file.metadata)
        why_not = "reads the first of several files alone" if reader.file.count > 1 else why_not
        transformers: Any = import_module("transformers")
        name, notes = f"transformers {transformers.__version__}", [] if llama_cpp.is_there() else [llama_cpp.ABSENT]
        if why_not:
            yield LoadedFile(name, notes=[f"Not loaded by {name}: it {why_not}.", *notes])
        else:
            file = str(path.resolve())  # by a bare name, transformers takes a file in the working folder
            loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=file, dtype=dtype).eval()
            if dtype is torch.float32:
                yield LoadedFile(name, loaded.state_dict(), loaded, notes=notes)
            else:
                note = f"it multiplies the weights of GGUF in float32, and others in {dtype}"
                note = f"Outputs are not compared in {name}: {note}."
                yield LoadedFile(name, loaded.state_dict(), notes=[note, *notes])
        if llama_cpp.is_there() and dtype is torch.float32:
            theirs = llama_cpp.LlamaCpp(path, "f16" if has_cache(model) else "f32")
            yield LoadedFile(
                "llama.cpp", model=theirs, as_it=computed_by_llama_cpp, tolerance=_LLAMA_CPP, on_average=True
            )
        elif llama_cpp.is_there():
            note = f"Outputs are not compared in llama.cpp: it computes in float32; convert the model from {dtype}."
            yield LoadedFile("llama.cpp", notes=[note])


def _stored(state: QuantizedState, names: GgufNames, name: str, kind: str | None) -> dict[str, blocks.GgufTensor]:
    """A tensor of a model as the file stores it: as blocks or unchanged; vectors in float32, as llama.cpp requires."""
    tensor = lazy(state.tensors, name)
    shape = tuple(tensor.shape)
    kind = kind or ("F32" if len(tensor.shape) < 2 else _KINDS.get(tensor.dtype))
    if kind is None:
        raise CheckpointError(f"{name} is {tensor.dtype}, which GGUF does not have; convert the model to float32 first")
    rows, shift = names.rows(name, *shape[:1]), names.shift(name)

    is_turned = name in names.turned

    def make() -> blocks.Array:
        if kind in blocks.LAYOUTS:
            raw = blocks.to_blocks(kind, turned(state.weights[name]) if is_turned else state.weights[name])
        else:
            values = state.tensors[name].detach().cpu()
            values = (values.mT if is_turned else values).contiguous()
            raw = (values.view(torch.int16) if kind == "BF16" else values.float() if kind == "F32" else values).numpy()
        raw = raw + np.float32(shift) if shift else raw
        return raw if rows is None else raw[rows]

    stored = names.shape(name, shape)
    if len(places := names.of(name)) == 1:
        return {places[0]: blocks.GgufTensor(kind, stored, lambda: make().reshape(*stored[:-1], -1))}
    share = (*shape[:-2], shape[-2] // len(places), shape[-1])
    left = dict[int, blocks.Array]()

    def make_share(number: int) -> blocks.Array:
        # The tensor is made once for all shares, which are kept until they are asked for.
        if number not in left:
            left.update(enumerate(np.split(make(), len(places), axis=-2)))
        return left.pop(number)

    return {key: blocks.GgufTensor(kind, share, partial(make_share, number)) for number, key in enumerate(places)}
