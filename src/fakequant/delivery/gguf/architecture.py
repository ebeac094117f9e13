"""The description of a language model in a GGUF file: names of tensors, order of rows, metadata.

A mixture such as Q4_K_M has a type for each weight of a language model, as llama-quantize chooses it.

Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` in llama-quant.cpp of llama.cpp, without an importance
matrix, and without the cases for experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fakequant.delivery.format import WeightSlot, float_names, in_rows, is_turned, turned, weight_slots
from fakequant.delivery.gguf import blocks
from fakequant.errors import CheckpointError, ConfigError, ExportError, ShapeError, nearest
from fakequant.model.config import Config, ModelConfig, Rule, TensorConfig, register_preset
from fakequant.model.prepare import quantizers_of
from fakequant.model.presets import LLAMA_CPP_CACHE, LLAMA_CPP_INPUTS, with_llama_cpp_inputs
from fakequant.model.state.plan import LayerEntry, QuantizerEntry, SitesEntry, sites_entry
from fakequant.model.state.snapshots import Made, QuantizedState, shared_names
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.nn.paths import join
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.spec import QuantSpec
from fakequant.restore import restore_after, restore_on_error, structure_of
from fakequant.text import listed

_TABLE = "fakequant.integrations.gguf_tokenizer"
"""The module that registers the architectures; no other module names models."""

MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a file that a model does not have: they are computed from the configuration of the model."""


@dataclass(frozen=True)
class Architecture:
    """The form in which llama.cpp stores models of one architecture.

    Args:
        interleaved: for the layers of queries and keys, by the last part of the path, the attribute of the
            configuration that counts the heads. In the file, the rows of a head's two halves alternate.
        norms_from_one: whether norms multiply by 1 + weight; the file then holds 1 + weight.
        activation: the function that llama.cpp computes between the matrices.
        pattern: n, if one of every n layers attends to all tokens, and the others to a window; 1 if all layers attend
            to all tokens.
        extra: more tensors by name, made from the configuration.
        rotaries: types of rotary positions that llama.cpp's graph computes; () for learned positions and centred norms,
            whose sizes `describe` adds.
        rotary_keys: further keys of rotary positions that the file holds.
        parts: for tensors that the file has in several parts: by the end of the name, the ends of the parts' names.
        vectors: the ends of the names of matrices with one row, which are vectors in the file.
        unread: returns for a configuration and metadata why transformers does not build the model of a file, or "".
    """

    name: str
    interleaved: Mapping[str, str] = field(default_factory=dict)
    norms_from_one: bool = False
    activation: str = "silu"
    pattern: int = 1
    describe: Callable[[Any, Any], None] = lambda writer, config: None
    extra: Callable[[Any], Mapping[str, Tensor]] = lambda config: {}
    rotaries: Sequence[str] = ("default", "linear", "yarn")
    rotary_keys: Sequence[str] = ()
    refuse: Callable[[Any], str] = lambda config: ""
    tokenizer: Callable[[Any, nn.Module], None] = lambda writer, model: None
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    vectors: Sequence[str] = ()
    unread: Callable[[Any, Mapping[str, Any]], str] = lambda config, metadata: ""


_known: dict[str, Architecture] = {}


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Add models for `deliver` and `read`, by the `model_type` of their configuration."""
    _known[model_type] = architecture


def architecture_of(model: Any) -> Architecture:
    """The architecture of a model; raises CheckpointError if it is unknown, or a file cannot describe the model."""
    import_module(_TABLE)
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type not in _known:
        raise CheckpointError(
            f"GGUF files are written for models of transformers whose config.model_type is one of "
            f"{', '.join(sorted(_known))}; got {model_type or type(model).__name__!r:.80}"
        )
    architecture = _known[model_type]
    if reason := _refused(architecture, config) or architecture.refuse(config):
        raise CheckpointError(f"llama.cpp would compute something else than this model: {reason}")
    return architecture


def _refused(architecture: Architecture, config: Any) -> str:
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", architecture.activation)
    if activation != architecture.activation:
        return f"its activation is {activation}, not {architecture.activation}"
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    every = architecture.pattern
    wanted = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(len(kinds))]
    if list(kinds) != wanted:
        return f"its layer_types are {kinds!r:.200}, but llama.cpp expects {wanted!r:.200}"
    if not architecture.rotaries:
        return ""
    rotary, around = rotary_of(config), rotary_of(config, "sliding_attention")
    known = {kind: keys for kind, keys in _ROTARIES.items() if kind in architecture.rotaries}
    if rotary["rope_type"] not in known:
        return f"its rope_type is {rotary['rope_type']!r:.80}, not one of {', '.join(known)}"
    if every > 1 and around["rope_type"] != "default" and around != rotary:
        return f"the rope_type of its layers with a window is {around['rope_type']!r:.80}, not default"
    said = {"rope_type", "rope_theta", *known[rotary["rope_type"]], *architecture.rotary_keys}
    if left := sorted(key for key, one in rotary.items() if key not in said and one not in (None, 1.0)):
        return f"the file cannot say {', '.join(left)} of its rope_parameters"
    both = getattr(config, "use_bidirectional_attention", None)
    return "it attends in both directions" if both else ""


_LONGER = ("factor", "original_max_position_embeddings")
_ROTARIES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_LONGER, "low_freq_factor", "high_freq_factor"),
    "yarn": _LONGER,
    "longrope": ("long_factor", "short_factor", *_LONGER),
}
"""By type of rotary positions, the parameters that a file can state besides the base."""


def rotary_of(config: Any, kind: str = "full_attention") -> dict[str, Any]:
    """The rotary parameters of a configuration, for a kind of layers if kinds differ."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    found = dict(found.get(kind) or {}) if any(isinstance(one, dict) for one in found.values()) else found
    return {"rope_type": "default", **found}


def head_size(config: Any) -> int:
    """The number of rows of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def describe(writer: Any, architecture: Architecture, model: nn.Module) -> None:
    """Add the metadata of a model of transformers, with its tokenizer, to a `gguf.GGUFWriter`."""
    gguf, name = blocks.require_gguf(), Path(getattr(model, "name_or_path", "")).name or architecture.name
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _describe_settings(writer, architecture, cast(Any, model.config))
    architecture.tokenizer(writer, model)


def _describe_settings(writer: Any, architecture: Architecture, config: Any) -> None:
    """Add the metadata of settings that change the computation."""
    heads = config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture.rotaries:
        _describe_rotary(writer, config)
    architecture.describe(writer, config)


def _describe_rotary(writer: Any, config: Any) -> None:
    """Add the sizes and positions of a model with rotary positions and RMS norms."""
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    gguf, rotary = blocks.require_gguf(), rotary_of(config)
    writer.add_rope_dimension_count(int(head_size(config) * rotary.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rotary["rope_theta"])
    if rotary["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rotary["rope_type"]))
        writer.add_rope_scaling_factor(rotary["factor"])
    if rotary["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])


def check_settings(file: blocks.GgufFile, architecture: Architecture, config: Any) -> None:
    """Raise CheckpointError if a file's metadata differ from the metadata that are written for a configuration."""
    writer, begin = blocks.require_gguf().GGUFWriter(None, architecture.name), f"{architecture.name}."
    _describe_settings(writer, architecture, config)
    built = {key.removeprefix(begin): one.value for key, one in writer.kv_data[0].items() if key.startswith(begin)}
    said = {key.removeprefix(begin): one for key, one in file.metadata.items() if key.startswith(begin)}
    heads, width = said.get("attention.head_count"), said.get("embedding_length")
    size = said.get("attention.key_length") or (width // heads if heads and width else None)
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None
    defaults = {"attention.head_count_kv": heads, "rope.freq_base": 10000.0, "vocab_size": rows}  # of llama.cpp
    defaults |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
    defaults = {key: one for key, one in defaults.items() if key in built}
    said = defaults | said
    for key in sorted({*built, *said} - {"rope.scaling.finetuned"}):
        ours, theirs = built.get(key), said.get(key)
        if not _same(ours, theirs):
            raise CheckpointError(
                f"{file.path} says that {begin}{key} is {theirs!r:.80}, but the model has {ours!r:.80}"
            )
    extra = architecture.extra(config)
    for name in MADE:
        values = (
            extra[name].numpy() if name in extra else None,
            file.tensors[name].make() if name in file.tensors else None,
        )
        if not _same(*values):
            raise CheckpointError(f"{file.path} has other rotary positions, {name}, than the model")


def _same(one: Any, other: Any) -> bool:
    """Whether two values of metadata are equal in float32, the precision of files."""
    if one is None or other is None:
        return one is other
    if isinstance(one, (float, np.ndarray)):
        return np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    return bool(np.array_equal(one, other))


class GgufNames:
    """The names of a model's tensors in a file, and the order of their rows there.

    Attributes:
        turned: the matrices that are [in, out] in the model and [out, in] in the file.
    """

    def __init__(self, architecture: Architecture, model: Any) -> None:
        gguf, config = blocks.require_gguf(), model.config
        (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        self._names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        self._architecture, self._config = architecture, config
        self.turned = {
            name
            for name, slot in weight_slots(model).items()
            if is_turned(slot.operand, model.get_parameter(name).shape)
        }

    def of(self, name: str) -> list[str]:
        """The names in the file of a tensor's parts, in the order of rows; raises CheckpointError without any."""
        parts = self._architecture.parts
        names = [name.removesuffix(end) + own for end, all in parts.items() if name.endswith(end) for own in all]
        found = [self._names.get_name(one, try_suffixes=(".weight", ".bias")) for one in names or [name]]
        if None in found:
            raise CheckpointError(f"{name} has no place in a file of {self._architecture.name} for llama.cpp")
        return [one if one.endswith((".weight", ".bias")) else f"{one}.weight" for one in found if one is not None]

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor in the file, from its shape in the model."""
        if name in self.turned:
            return tuple(shape[::-1])
        return tuple(shape[1:]) if name.endswith(tuple(self._architecture.vectors)) else tuple(shape)

    def rows(self, name: str, count: int) -> Sequence[int] | None:
        """The model's row numbers in the order of the file; None if both orders are the same."""
        owner = name.rpartition(".")[0]
        for end, heads in self._architecture.interleaved.items():
            if owner.endswith(end):
                order = np.arange(count).reshape(
                    getattr(self._config, heads) or self._config.num_attention_heads, 2, -1
                )
                return order.swapaxes(1, 2).reshape(-1)
        return None

    def shift(self, name: str) -> float:
        """The number to add to a tensor's values in the file."""
        return float(self._architecture.norms_from_one and name.endswith("norm.weight"))


def llama3_frequencies(config: Any) -> dict[str, Tensor]:
    """The divisors of Llama 3.1's rotary frequencies, which llama.cpp reads as a tensor; {} for other types."""
    rotary = rotary_of(config)
    if rotary["rope_type"] != "llama3":
        return {}
    base, size, factor = rotary["rope_theta"], head_size(config), rotary["factor"]
    length, low, high = (
        rotary[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    waves = 2 * torch.pi * base ** (torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).float()}


class _Layer(NamedTuple):
    """A layer of a model: its number, the number of layers, and how many query heads share a key head."""

    number: int
    layers: int
    shares: int


def _some(at: _Layer) -> bool:
    eighth = at.layers // 8
    return at.number < eighth or at.number >= 7 * at.layers // 8 or (at.number - eighth) % 3 == 2


_Choice = tuple[Callable[[_Layer], bool], str]
_ALL: Callable[[_Layer], bool] = lambda at: True  # noqa: E731
_FIRST_EIGHTH: Callable[[_Layer], bool] = lambda at: at.number < at.layers // 8  # noqa: E731
_SHARED: Callable[[_Layer], bool] = lambda at: at.shares >= 4  # noqa: E731
_MORE: dict[str, list[_Choice]] = {"attn_v": [(_some, "Q6_K")], "ffn_down": [(_some, "Q6_K")]}
_IQ4: dict[str, list[_Choice]] = {"attn_v": [(_SHARED, "Q5_K")], "ffn_down": [(_FIRST_EIGHTH, "Q5_K")]}
_MIXTURES: dict[str, tuple[str, dict[str, list[_Choice]]]] = {
    **{kind: (kind, {}) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")},
    "IQ4_NL": ("IQ4_NL", _IQ4),
    "IQ4_XS": ("IQ4_XS", _IQ4),
    "Q2_K": (
        "Q2_K",
        {"attn_v": [(_SHARED, "Q4_K"), (_ALL, "Q3_K")], "ffn_down": [(_ALL, "Q3_K")], "attn_output": [(_ALL, "Q3_K")]},
    ),
    "Q3_K_S": ("Q3_K", {}),
    "Q3_K_M": (
        "Q3_K",
        {
            "attn_v": [(lambda at: at.number < 2, "Q5_K"), (_ALL, "Q4_K")],
            "ffn_down": [(lambda at: at.number < at.layers // 16, "Q5_K"), (_ALL, "Q4_K")],
            "attn_output": [(_ALL, "Q4_K")],
        },
    ),
    "Q3_K_L": ("Q3_K", {name: [(_ALL, "Q5_K")] for name in ("attn_v", "ffn_down", "attn_output")}),
    "Q4_K_S": ("Q4_K", {"attn_v": [(lambda at: at.number < 4, "Q5_K")], "ffn_down": [(_FIRST_EIGHTH, "Q5_K")]}),
    "Q4_K_M": ("Q4_K", _MORE),
    "Q5_K_S": ("Q5_K", {}),
    "Q5_K_M": ("Q5_K", _MORE),
}
"""By mixture, the type of most weights, and exceptions by weight: the first whose condition on the layer holds."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYERS_OF_70B = 80


def mixture(model: nn.Module, name: str) -> Config:
    """The configuration of a mixture for a language model: each weight gets the type that llama-quantize gives it.

    Args:
        model: a float model of transformers, of an architecture that GGUF files are written for.
        name: llama-quantize's name: "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M",
            "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL" or "IQ4_XS". "GGUF_" may stand before it; with
            "_A8" behind it, inputs of products are quantized as llama.cpp does.

    Raises:
        ConfigError: an unknown name, or a model with experts.
        CheckpointError: an unknown architecture.

    `fakequant.prepare(model, "GGUF_Q4_K_M")` does this for names that end in "_S", "_M" or "_L". The other names are
    also presets with one type; for their mixtures write `fakequant.prepare(model, mixture(model, "Q6_K"))`.
    """
    key = name.upper().removeprefix("GGUF_")
    if key.endswith("_A8"):
        return with_llama_cpp_inputs(mixture(model, key.removesuffix("_A8")))
    if key not in _MIXTURES:
        raise ConfigError(f"unknown mixture {name!r:.80}{nearest(key, list(_MIXTURES))}")
    architecture, shared = architecture_of(model), shared_names(model)
    if architecture.parts:
        raise ConfigError(
            "llama-quantize has special rules for experts, which fakequant does not know; give all weights one type, "
            "such as GGUF_Q4_K"
        )
    config: Any = model.config
    names, heads = GgufNames(architecture, model), config.num_attention_heads
    shares = heads // (getattr(config, "num_key_value_heads", None) or heads)
    rules = []
    for weight, slot in weight_slots(model).items():
        # A head that is tied to the embedding is one weight with it, of the type of heads.
        if names.of(weight) == ["position_embd.weight"]:  # llama-quantize leaves this table in float
            continue
        is_head = weight in shared or weight in shared.values() or names.of(weight) == ["output.weight"]
        columns = names.shape(weight, model.get_parameter(weight).shape)[-1]
        kind = _MIXTURES[key][0]
        if is_head:
            kind = "Q6_K" if kind != "Q8_0" and columns % blocks.LAYOUTS[kind].weights == 0 else "Q8_0"
        elif found := _LAYER.fullmatch(names.of(weight)[-1]):
            own = found[2].replace("attn_qkv", "attn_v")  # a joint weight of Q, K and V counts as V
            at = _Layer(int(found[1]), config.num_hidden_layers, shares)
            kind = next((other for holds, other in _MIXTURES[key][1].get(own, ()) if holds(at)), kind)
            is_70b = architecture.name == "llama" and at.layers == _LAYERS_OF_70B and shares > 1
            kind = "Q5_K" if is_70b and own == "attn_v" and kind in ("Q3_K", "Q4_K") else kind
        rules.append(Rule(slot.path, weight=TensorConfig(blocks.spec_of(blocks.for_rows(kind, columns)))))
    return Config(f"GGUF_{key}", tuple(rules))


def _preset(name: str) -> ModelConfig:
    def make(model: nn.Module) -> Config:
        try:
            return mixture(model, name)
        except CheckpointError as error:
            raise ConfigError(
                f"{name} is a mixture for models that llama.cpp knows: {error}; GGUF_Q4_K and the other "
                "single types serve every model"
            ) from error

    return ModelConfig(name, make=make)


for _name in ("Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M"):
    register_preset(_preset(f"GGUF_{_name}"))
    register_preset(_preset(f"GGUF_{_name}_A8"))

Model = TypeVar("Model", bound=nn.Module)
_BLOCK, _BOUND = 32, 127


def inputs_for(weight: QuantSpec, shape: tuple[int, ...]) -> TensorConfig:
    """The quantization by llama.cpp of the inputs that a weight multiplies."""
    return LLAMA_CPP_INPUTS[blocks.LAYOUTS[blocks.kind_of(weight, shape)].weights]


@accepts_wrapped_model
def llama_cpp_inputs(model: Model) -> Model:
    """Quantize the inputs of products as llama.cpp does, in a prepared model, in place; the model is returned.

    The model then computes as llama.cpp does from a GGUF file, when you measure or train it. Results agree up to the
    order of sums, except with Q4_1 and Q5_1: with these types llama.cpp also rounds the sum of every block of inputs,
    which only `verify_delivery` computes. The presets `GGUF_Q8_0_A8` to `GGUF_MXFP4_A8` do the same from the start.

    Raises:
        ExportError: no type of GGUF holds some weight, which is named with the reason; the model is then unchanged.

    >>> model = llama_cpp_inputs(prepare(nn.Sequential(nn.Linear(32, 1, bias=False)), "gguf_q8_0", skip=[]))
    >>> model[0].input_quantizer
    Quantizer(int8_narrow per_block(-1:32,pad) q8_0, input, dynamic)
    """
    found: list[tuple[WeightSlot, Any, TensorConfig]] = []
    for name, slot in weight_slots(model).items():
        layer: Any = model.get_submodule(slot.path)
        quantizer = getattr(layer, slot.attribute, None)
        if not slot.input or not isinstance(quantizer, Quantizer) or not quantizer.quantizes:
            continue
        try:
            shape = tuple(getattr(layer, slot.operand.weight).shape)
            found.append((slot, layer, inputs_for(*in_rows(quantizer.spec, shape, slot.operand))))
        except ShapeError as error:
            raise ExportError(f"llama.cpp cannot store {name}: {error}") from error
    with restore_on_error(structure_of([model])):
        for slot, layer, config in found:
            own = getattr(layer, slot.input)
            if own is None or not own.quantizes or own.spec != config.spec:
                made = quantizers_of(type(layer), layer, {slot.input: config}, slot.path)
                setattr(layer, slot.input, made[slot.input])
    return model


def has_cache(model: nn.Module) -> bool:
    """Whether functions of a model are quantized, and all of them as llama.cpp's cache quantizes them."""
    owners = sites_entry(model).owners.values()
    held = [one.tensor for owner in owners for site in owner.sites.values() for one in site.quantizers.values()]
    return bool(held) and all(one == LLAMA_CPP_CACHE.input for one in held)


@contextmanager
def computed_by_llama_cpp(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes as llama.cpp; the model is restored afterwards.

    `llama_cpp_inputs` quantizes its inputs, and sums are rounded as in llama.cpp.
    """
    with restore_after(structure_of([model])):
        llama_cpp_inputs(model)
        for slot in weight_slots(model).values():
            layer: Any = model.get_submodule(slot.path)
            weight = getattr(layer, slot.attribute, None)
            if not slot.input or slot.operand.is_stack or not isinstance(weight, Quantizer) or not weight.quantizes:
                continue
            if weight.spec.offset is not None and weight.spec.scale.shared is None:  # Q4_1 and Q5_1
                by_input = is_turned(slot.operand, layer.weight.shape)
                layer.register_forward_hook(partial(_with_rounded_sums, by_input=by_input))
        with _LongSums():
            yield


def _with_rounded_sums(layer: Any, args: tuple[Tensor, ...], y: Tensor, *, by_input: bool) -> Tensor:
    """Add the error of ggml's `quantize_row_q8_1`, which rounds block sums to float16; `by_input` if the weight is
    [in, out]."""
    codes, params = layer.input_quantizer.encoded(args[0])
    sums = codes.float().unflatten(-1, (-1, _BLOCK)).sum(-1)
    step = params.scale * (_BOUND + 1) / _BOUND
    gap = (step * sums).half().double() - step.half().double() * sums
    offsets = layer.weight_quantizer.qparams(layer.weight).zero_point
    return (y.double() - gap @ (offsets if by_input else offsets.mT).double()).to(y.dtype)


class _LongSums(TorchFunctionMode):
    """Takes sums of float32 numbers in float64 and rounds them once.

    llama.cpp adds codes within a block exactly, and squares of norms in float64. Near a tie, a sum with another last
    bit gives another code: in a Llama in Q4_0, 16 % of the tokens agree to 1e-5 with sums in float32, 88 % in float64.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _SUMS:
            return func(*args, **(kwargs or {}))
        long = pytree.tree_map(lambda x: x.double() if _is_float32(x) else x, (args, kwargs or {}))
        found = func(*long[0], **long[1])
        return found.float() if any(map(_is_float32, pytree.tree_leaves(args))) else found


_PRODUCTS = (functional.linear, torch.addmm, functional.scaled_dot_product_attention, torch.matmul)
_SUMS = (*_PRODUCTS, functional.layer_norm, torch.mean, Tensor.mean)


def _is_float32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32


REST = "fakequant.rest."
"""The prefix of a metadata key: it holds the rounding error of a tensor that the file stores with 1 added."""


class NamedTensors:
    """Reads the tensors of a file by their names in a model; raises CheckpointError if they do not fit it."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.file, self.model, architecture = blocks.GgufFile(path), model, architecture_of(model)
        self.names, self.shared = GgufNames(architecture, model), shared_names(model)
        self.slots = weight_slots(model)
        if (said := self.file.metadata.get("general.architecture")) != architecture.name:
            raise CheckpointError(f"{path} has the architecture {said!r:.80}, but the model has {architecture.name!r}")
        state = model.state_dict()
        self.like = {name: state[name] for name in float_names(model) if name not in self.shared}
        self.stored = {name: self._find(name, tuple(one.shape)) for name, one in self.like.items()}
        named = {one for name in self.stored for one in self.names.of(name)}
        if left := sorted(self.file.tensors.keys() - named - {*MADE}):
            raise CheckpointError(f"{path} has tensors for which the model has no place: {listed(left)}")
        self.coded = [name for name, one in self.stored.items() if one.kind in blocks.LAYOUTS and name in self.slots]
        check_settings(self.file, architecture, model.config)

    def _find(self, name: str, shape: tuple[int, ...]) -> blocks.GgufTensor:
        places = self.names.of(name)
        stored = self.names.shape(name, shape)
        if len(places) > 1:
            stored = (*shape[:-2], shape[-2] // len(places), shape[-1])
        for place in places:
            if place not in self.file.tensors:
                raise CheckpointError(f"{self.file.path} lacks {place}, which is {name} in the model")
            if (found := self.file.tensors[place]).shape != stored:
                raise CheckpointError(
                    f"{self.file.path}: {place} has the shape {list(found.shape)}, but {name} needs {list(stored)}"
                )
        first, *others = (self.file.tensors[place] for place in places)
        if any(one.kind != first.kind for one in others):
            raise CheckpointError(f"{self.file.path}: {listed(places)} are of several types, but {name} needs one type")
        if name in self.names.turned:
            return first
        if not others:
            return blocks.GgufTensor(first.kind, shape, lambda: first.make().reshape(*shape[:-1], -1))
        return blocks.GgufTensor(
            first.kind, shape, lambda: np.concatenate([one.make() for one in (first, *others)], axis=-2)
        )

    def state(self) -> QuantizedState:
        """The quantized state that the file holds."""
        layers: dict[str, LayerEntry] = {}
        for name in self.coded:
            spec = blocks.spec_of(self.stored[name].kind)
            inputs = inputs_for(spec, self.stored[name].shape)
            for slot in self._readers(name):
                held = layers.setdefault(slot.path, LayerEntry(slot.kind, quantizers={})).quantizers
                axes = slot.operand.axes() if name in self.names.turned else {}
                held[slot.attribute] = QuantizerEntry(TensorConfig(spec).placed(axes))
                # The type of the weight in the file implies llama.cpp's inputs: the model says whether it has them.
                own = getattr(self.model.get_submodule(slot.path), slot.input, None) if slot.input else None
                if isinstance(own, Quantizer) and own.quantizes and TensorConfig(own.spec, own.dynamic) == inputs:
                    held[slot.input] = QuantizerEntry(inputs)
        weights = Made({name: partial(self._weight, name) for name in self.coded})
        tensors = Made({name: partial(self._tensor, name) for name in self.stored if name not in weights})
        sites = sites_entry(self.model) if has_cache(self.model) else SitesEntry()  # an option of llama.cpp's
        return QuantizedState(layers=layers, shared=self.shared, tensors=tensors, weights=weights, sites=sites)

    def _readers(self, name: str) -> list[Any]:
        """The weight slots of all layers that hold a weight; a tied weight has several."""
        names = [name, *(tied for tied, first in self.shared.items() if first == name)]
        return [self.slots[one] for one in names if one in self.slots]

    def _rows(self, name: str) -> blocks.Array:
        """The content of a tensor, with its rows in the model's order."""
        raw = self.stored[name].make()
        if (order := self.names.rows(name, *raw.shape[:1])) is None:
            return raw
        back = np.empty_like(raw)
        back[order] = raw
        return back

    def _weight(self, name: str) -> WeightCodes:
        try:
            found = blocks.from_blocks(self.stored[name].kind, self._rows(name), self.like[name].dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self.file.path}: {listed(self.names.of(name))}: {error}") from error
        found = turned(found) if name in self.names.turned else found
        return replace(found, quantizers=tuple(join(one.path, one.attribute) for one in self._readers(name)))

    def _tensor(self, name: str) -> Tensor:
        """A tensor without codes; the package gguf dequantizes types that have no code for each weight."""
        kind = self.stored[name].kind
        if kind not in ("F32", "F16", "BF16"):
            return self.theirs(name)
        raw = self._rows(name)
        if shift := self.names.shift(name):
            rest = self.file.metadata.get(REST + self.names.of(name)[0], np.float32(0))
            raw = raw - np.float32(shift) + rest
        values = self._as_in_model(name, torch.from_numpy(np.array(raw.view(np.int16) if kind == "BF16" else raw)))
        return (values.view(torch.bfloat16) if kind == "BF16" else values).to(self.like[name].dtype)

    def theirs(self, name: str) -> Tensor:
        """The values of a tensor as the package gguf dequantizes them, rounded once to the dtype of the model."""
        gguf = blocks.require_gguf()
        values = gguf.quants.dequantize(self._rows(name), gguf.GGMLQuantizationType[self.stored[name].kind])
        values = torch.from_numpy(values).reshape(self.stored[name].shape)
        return self._as_in_model(name, values).to(self.like[name].dtype)

    def _as_in_model(self, name: str, values: Tensor) -> Tensor:
        return values.mT.contiguous() if name in self.names.turned else values
