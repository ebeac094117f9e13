"""A key/value cache of transformers that quantizes keys and values, and named attention functions.

Attention of Hugging Face's transformers that runs in a kernel can get quantizers of query, key and value.

`sdpa` and `eager` attention call functions of torch, which `Rule(ops=("sdpa", "matmul"))` names. `flex_attention` and
`flash_attention` call kernels that cannot be traced. Importing this module registers an attention function for each of
them with transformers, which calls it as one function that rules name: `attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fakequant.errors import CalibrationError, ConfigError
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.sites import attention_function, sites_of
from fakequant.nn.transforms import walsh_hadamard
from fakequant.numerics.spec import QuantSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PREFIX = "fakequant_"
"""The prefix of the names of the registered functions."""
Model = TypeVar("Model", bound="PreTrainedModel")


def name_attention(model: Model) -> Model:
    """Make the attention of a model one function `attention` for rules, in place.

    Call it before `prepare`, and before `fakequant.load`. Query, key and value get quantizers as the attention function
    takes them: after the rotary embedding, keys and values with their own number of heads.

    Args:
        model: a float model of transformers, with any attention of transformers except "eager".

    Raises:
        ConfigError: the model's attention is not a registered function.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    ... )
    >>> model = name_attention(LlamaForCausalLM(config).eval())
    >>> rules = Config("attention", (Rule("*", input="int8", ops=("attention",)),))
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> site_plan(prepare(model, rules, example={"input_ids": ids, "use_cache": False})).sites[0].path
    'model.layers.0.self_attn._sites.attention_function_0'
    """
    name = str(model.config._attn_implementation)
    if name.startswith(PREFIX):
        return model
    if PREFIX + name not in ALL_ATTENTION_FUNCTIONS:
        raise ConfigError(
            f"the attention {name!r} of the model is not a registered function of transformers; "
            "\"eager\" attention needs no name, because rules name its products: ops=('matmul',)"
        )
    copies: dict[int, Any] = {}  # because models may share one configuration
    deepcopy(model.config, copies)
    for module in model.modules():
        if (config := vars(module).get("config")) is not None:
            module.config = copies.get(id(config), config)
    model.set_attn_implementation(PREFIX + name)
    return model


class Run(NamedTuple):
    """Consecutive queries of a call that read the same keys and values."""

    first: int
    stop: int
    quantized: list[int]
    """The number of quantized tokens in each sequence of the batch."""


@dataclass(frozen=True, eq=False)
class ByQuery:
    """Keys or values that differ between queries of a call: later queries read more of them quantized.

    Only the attention functions of this module take such keys or values; every function of torch raises ConfigError.
    """

    floats: Tensor
    """All keys or values in float [n, heads, length, features]."""
    settled: Tensor
    runs: list[Run]
    padding: list[int]
    """The number of padding tokens before each sequence, by the mask of the cache."""

    def seen_by(self, run: Run) -> Tensor:
        """The keys or values that the queries of a run read, up to the position of its last query."""
        length = self.floats.shape[2] - self.runs[-1].stop + run.stop
        ends = torch.tensor(run.quantized, device=self.floats.device).view(-1, 1, 1, 1)
        is_quantized = torch.arange(length, device=ends.device).view(-1, 1) < ends
        return torch.where(is_quantized, self.settled[:, :, :length], self.floats[:, :, :length])

    @property
    def shape(self) -> torch.Size:
        """The shape of all keys or values."""
        return self.floats.shape

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(_BY_QUERY)

    def __getitem__(self, index: Any) -> Any:
        raise ConfigError(_BY_QUERY)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is attention_function:
            *factors, run = args
            return run(*factors)
        raise ConfigError(_BY_QUERY)


_BY_QUERY = (
    "the queries of this call see different keys and values, because the cache has groups of tokens or its newest "
    "tokens in float: call name_attention(model) first, of a model with attn_implementation='sdpa' and without "
    "quantizers of keys and values, or write one token at a call"
)


def _attend_by_query(
    name: str, module: nn.Module, query: Tensor, key: ByQuery, value: ByQuery, mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention run by run: each query reads the cache as if its token had been written alone."""
    is_causal = options.get("is_causal")
    if name != "sdpa" or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ConfigError(_BY_QUERY)
    length, queries = key.floats.shape[2], query.shape[2]
    if mask is None:
        mask = query.new_ones(queries, length, dtype=torch.bool).tril(length - queries)[None, None]
    seen = mask[..., :length]
    hidden = ~seen if mask.dtype is torch.bool else seen < torch.finfo(mask.dtype).min / 2
    before = hidden.all(2)[:, 0].int().cumprod(-1).sum(-1).expand(len(key.padding)).tolist()
    for row, (known, masked) in enumerate(zip(key.padding, before, strict=True)):
        # Groups must begin at the right tokens, so the mask hides the padding that the cache knows. A window hides what
        # is far behind; the query of the first token that is none but padding sees that token.
        if masked < known or (masked > known >= length - queries):
            raise ConfigError(
                f"sequence {row} begins with {masked} tokens of padding in the mask of the model, but {known} in "
                "the mask of the cache: give the model's mask to FakeQuantCache(attention_mask=), or to cache.reset() "
                "before another prompt"
            )
    of_places = [mask] if (bias := options.get("position_bias")) is None else [mask, bias]
    found = []
    for run in key.runs:
        keys, values, part = key.seen_by(run), value.seen_by(run), slice(run.first, run.stop)
        own, *biases = (x.expand(-1, -1, queries, -1)[:, :, part, : keys.shape[2]] for x in of_places)
        more = {**options, "position_bias": biases[0]} if biases else options
        found.append(ALL_ATTENTION_FUNCTIONS[name](module, query[:, :, part], keys, values, own, *args, **more)[0])
    return torch.cat(found, 1), None


def _register(name: str) -> None:
    def attend(
        module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        if isinstance(key, ByQuery) and (own := sites_of(module)) is not None and "attention_function" in own.counted:
            raise ConfigError(_BY_QUERY)

        def run(query: Tensor, key: Any, value: Any) -> Any:
            if isinstance(key, ByQuery):
                return _attend_by_query(name, module, query, key, value, attention_mask, *args, **options)
            return ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, attention_mask, *args, **options)

        factors: tuple[Any, Any, Any] = (query, key, value)
        return attention_function(*factors, run)

    AttentionInterface.register(PREFIX + name, attend)
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


for _name in list(ALL_ATTENTION_FUNCTIONS):
    if "|" not in _name and not _name.startswith(PREFIX):
        _register(_name)


Quantizers = QuantSpec | str | Iterable[Quantizer]
_BATCH, _TOKENS = 0, 2
"""The axes of sequences and of tokens in keys and values."""


class FakeQuantCache(DynamicCache):
    """A `DynamicCache` of fake-quantized keys and values [n, heads, length, features].

    Every call of an attention module writes the keys and values of its new positions. They are quantized after the
    rotary embedding, once. The result depends only on the tokens and their places, not on padding, on other sequences
    or on the number of positions in a call. The states of linear attention and of indexers stay in float.

    Per token, or in blocks of features, a position is quantized when it is written. In blocks of tokens
    ("per_block(-2:32)": per channel, in groups of 32 tokens) a group is quantized when its last token is written, and
    `residual_length` newest tokens or more stay in float: the layout of KIVI (arXiv 2402.02750). A token's query sees
    the cache as it is after that token. A call of several tokens may then need `name_attention(model)` before it.

    Args:
        keys: how to quantize keys: a specification for all layers, or a list of one quantizer with a range per layer.
        values: how to quantize values; by default as keys.
        residual_length: the least number of newest tokens in float.
        rotate: whether keys are quantized after a Hadamard rotation of every head, which spreads outliers. They are
            rotated back, so that queries stay as they are: q (Q(k H) H) is (q H) Q(k H).
        attention_mask: which tokens of the prompt [n, length] are not padding; batches need it where tokens are
            quantized in groups or stay in float.
        config: the model's configuration, as for `DynamicCache`: layers with a sliding window keep only its positions.

    Raises:
        CalibrationError: a quantizer has no range.
        ConfigError: something that is neither a specification nor quantizers; a specification whose ranges span all
            tokens or sequences of a call; blocks of tokens or a residual length for sliding windows.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    ... )
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[3, 1, 4]])
    >>> cache = FakeQuantCache("int8 per_token", config=config)
    >>> length = dict(min_new_tokens=2, max_new_tokens=2)
    >>> model.generate(ids, **length, do_sample=False, past_key_values=cache, pad_token_id=0).shape
    torch.Size([1, 5])
    >>> list(cache.layers[0].keys.shape)
    [1, 2, 4, 4]
    >>> FakeQuantCache("uint4 per_block(-2:32)", "int4 per_token", residual_length=64)
    FakeQuantCache(keys uint4 per_block(-2:32), values int4 per_token, the newest 64 to 95 tokens in float)
    """

    def __init__(
        self,
        keys: Quantizers,
        values: Quantizers | None = None,
        *,
        residual_length: int = 0,
        rotate: bool = False,
        attention_mask: Tensor | None = None,
        config: PreTrainedConfig | None = None,
    ) -> None:
        own_keys = _quantizers(keys, "keys")
        own_values = own_keys if values is None else _quantizers(values, "values")
        if type(residual_length) is not int or residual_length < 0:
            raise ConfigError(f"residual_length is a number of tokens from 0 on, got {residual_length!r}")
        if type(rotate) is not bool:
            raise ConfigError(f"rotate is True or False, got {rotate!r}")
        super().__init__(config=config)
        self._key_quantizers, self._value_quantizers = own_keys, own_values
        self._rotate, self._residual = rotate, residual_length
        self._group = lcm(*(_tokens_in_group(one, "keys") for one in _each(own_keys)))
        self._group = lcm(self._group, *(_tokens_in_group(one, "values") for one in _each(own_values)))
        self._padding = [0] if attention_mask is None else _padding(attention_mask)
        self._knows_padding = attention_mask is not None
        self._past: dict[int, _Past] | None = None
        if self._waits and any(self.is_sliding):
            raise ConfigError(_SLIDING)

    @property
    def _waits(self) -> bool:
        """Whether tokens stay in float for a while before they are quantized."""
        return self._group > 1 or self._residual > 0

    def __repr__(self) -> str:
        words = [f"keys {_named(self._key_quantizers)}{' rotated' * self._rotate}"]
        words.append(f"values {_named(self._value_quantizers)}")
        if self._waits:
            most = self._residual + self._group - 1
            words.append(f"the newest {f'{self._residual} to ' * (self._group > 1)}{most} tokens in float")
        return f"FakeQuantCache({', '.join(words)})"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write new positions of a layer; returns its keys and values, or a `ByQuery` of each if queries differ."""
        if not self._waits:
            keys, values = self._quantized(layer_idx, key_states, value_states)
            return super().update(keys, values, layer_idx, *args, **kwargs)
        start, past = self.get_seq_length(layer_idx), self._past_of(layer_idx)
        keys, values = floats = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        padding = self._padding_of(len(keys))
        # The new queries that see the same, with how many tokens of each sequence are quantized for them.
        after, span = keys.shape[_TOKENS] + 1, self._residual + self._group
        due = {n for pad in {*padding} for n in range(pad + span + self._count(start - pad), after, self._group)}
        firsts = sorted({start + 1, *due})
        runs = [
            Run(first - 1 - start, next_first - 1 - start, [pad + self._count(first - pad) for pad in padding])
            for first, next_first in zip(firsts, [*firsts[1:], after], strict=True)
        ]
        if len(runs) > 1 or self._past is not None:
            keys, values = keys.clone(), values.clone()
        self._settle(layer_idx, keys, values, start)
        layer: Any = self.layers[layer_idx]
        layer.keys, layer.values = keys, values
        if self._past is not None and past is None:
            self._past[layer_idx] = _Past(start, *floats, keys)
        elif self._past is not None and past is not None:
            grown = torch.cat([past.keys, key_states], _TOKENS), torch.cat([past.values, value_states], _TOKENS)
            self._past[layer_idx] = _Past(past.start, *grown, keys)
        if len(runs) == 1:
            return keys, values
        return ByQuery(floats[0], keys, runs, padding), ByQuery(floats[1], values, runs, padding)

    def _quantized(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values after their quantizers [n, heads, length, features]."""
        quantizer = _of_layer(self._key_quantizers, layer, "keys")
        keys = walsh_hadamard(quantizer(walsh_hadamard(keys))) if self._rotate else quantizer(keys)
        return keys, _of_layer(self._value_quantizers, layer, "values")(values)

    def _count(self, tokens: int) -> int:
        """How many of the oldest tokens are quantized in a sequence of `tokens` tokens."""
        return self._group * (max(tokens - self._residual, 0) // self._group)

    def _settle(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Quantize, in place, the groups that were completed since keys and values had the length `start`."""
        padding, length = self._padding_of(len(keys)), keys.shape[_TOKENS]
        for pad in sorted({*padding}):
            first, stop = pad + self._count(start - pad), pad + self._count(length - pad)
            if stop > first:
                rows = torch.tensor([row for row, own in enumerate(padding) if own == pad], device=keys.device)
                part = rows, slice(None), slice(first, stop)
                keys[part], values[part] = self._quantized(layer, keys[part], values[part])

    def _padding_of(self, sequences: int) -> list[int]:
        """The number of padding tokens before each sequence; each prompt may have several beams."""
        if sequences > 1 and not self._knows_padding:
            raise ConfigError(
                f"the {sequences} sequences may begin with padding, which must not count as tokens: give "
                "FakeQuantCache(..., attention_mask=) the mask of the prompt, all ones if it has no padding"
            )
        if sequences % len(self._padding):
            raise ConfigError(
                f"the attention_mask of the cache has {len(self._padding)} sequences, and the model writes {sequences}"
                "; give cache.reset() the mask of all sequences"
            )
        return [pad for pad in self._padding for _ in range(sequences // len(self._padding))]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences with these indices."""
        if self._knows_padding:
            for _, layer in list(self._written())[:1]:
                self._padding = torch.tensor(self._padding_of(len(layer.keys)), device="cpu")[indices.cpu()].tolist()
        super().batch_select_indices(indices)

    def reset(self, attention_mask: Tensor | None = None) -> None:
        """Forget all positions; the next prompt has the padding of the mask, by default that of the first prompt."""
        if attention_mask is not None:
            self._padding, self._knows_padding = _padding(attention_mask), True
        super().reset()

    def activate_past_recording(self) -> None:
        """Keep new positions also in float, for the next `crop` to restore."""
        self._past = {}
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest positions; `tokens_to_remove` is minus their number.

        Raises:
            ConfigError: quantized positions would have to be in float again, and `activate_past_recording` was not
                called before they were written.
        """
        found = {}
        for index, layer in self._written() if self._waits and tokens_to_remove < 0 else ():
            length = layer.keys.shape[_TOKENS]
            wanted, past = length + tokens_to_remove, self._past_of(index)
            if past is not None and past.start <= wanted:
                keys, values = (x[:, :, :wanted].clone() for x in (past.keys, past.values))
                self._settle(index, keys, values, past.start)
                found[index] = keys, values
            elif any(self._count(wanted - pad) < self._count(length - pad) for pad in self._padding):
                raise ConfigError(
                    f"to remove {-tokens_to_remove} positions, it needs quantized positions in float again; call "
                    "cache.activate_past_recording() before positions are written, as assisted generation does"
                )
        super().crop(tokens_to_remove)
        for index, layer in self._written():
            if index in found:  # else the keys and values are those of now, cut
                layer.keys, layer.values = found[index]
        if self._past is not None:
            self._past = {}

    def _written(self) -> Iterator[tuple[int, Any]]:
        """Yield the layers that have keys, with their indices."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                yield index, layer

    def _past_of(self, index: int) -> _Past | None:
        """The recorded floats of a layer; None if none are recorded, or other code has changed the layer."""
        past = None if self._past is None else self._past.get(index)
        layer: Any = self.layers[index] if past is not None else None
        return past if past is not None and layer.keys is past.seen else None


class _Past(NamedTuple):
    """The keys and values of a layer, in which the positions since the last `crop` are in float."""

    start: int
    """The length of the layer at that `crop`."""
    keys: Tensor
    values: Tensor
    seen: Tensor
    """The keys of the layer after the last update, to notice changes."""


_SLIDING = (
    "a sliding window drops positions of a group before the group is quantized; give keys and values specifications "
    "that quantize each token by itself, such as 'int8 per_token', without a residual_length"
)


def _each(quantizers: Quantizer | list[Quantizer]) -> list[Quantizer]:
    return [quantizers] if isinstance(quantizers, Quantizer) else quantizers


def _named(quantizers: Quantizer | list[Quantizer]) -> str:
    return ", ".join(dict.fromkeys(str(one.spec) for one in _each(quantizers)))


def _tokens_in_group(quantizer: Quantizer, what: str) -> int:
    """How many consecutive tokens share a scale.

    Raises:
        ConfigError: all tokens of a call, or several sequences, would share a scale.
    """
    if not quantizer.scales_each_call:
        return 1
    shape, group = (0, 0, 0, 0), 1
    for granularity in (quantizer.spec.granularity, *quantizer.spec.shared_granularities):
        blocks = granularity.block_shape(shape)
        shape, group = granularity.group_shape(shape), group * blocks[_TOKENS]
        if group == 0 or blocks[_BATCH] != 1:
            raise ConfigError(
                f"with {quantizer.spec} the range of {what} depends on other sequences, or on the number of tokens in "
                "a call. Give each token a range (per_token), or each block of tokens (per_block(-2:32)); where scales "
                "have a shared scale, give each token one (@per_token). Or give one calibrated quantizer for each layer"
            )
    return group


def _padding(attention_mask: Tensor) -> list[int]:
    """The number of padding tokens before each sequence."""
    mask = torch.as_tensor(attention_mask).bool()
    if mask.dim() != 2 or bool(((mask[:, 1:] > mask[:, :-1]).sum(-1) + mask[:, 0] > 1).any()):
        raise ConfigError(
            "the attention_mask of a cache must be [sequences, tokens], with padding only before and after the tokens; "
            f"got one of shape {list(mask.shape)}"
        )
    return (mask.cumsum(-1) == 0).sum(-1).tolist()


def _quantizers(given: Quantizers, what: str) -> Quantizer | list[Quantizer]:
    if isinstance(given, (QuantSpec, str)):
        return Quantizer(given, dynamic=True)
    quantizers: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for layer, quantizer in enumerate(quantizers):
        if not isinstance(quantizer, Quantizer):
            raise ConfigError(
                f"{what} of a cache must be a QuantSpec, its text, or a quantizer for each layer, got {quantizer!r:.80}"
            )
        if quantizer.needs_calibration:
            raise CalibrationError(
                f"the quantizer of the {what} of layer {layer} has no range; calibrate it first, or make it dynamic"
            )
    return quantizers


def _of_layer(quantizers: Quantizer | list[Quantizer], layer: int, what: str) -> Quantizer:
    if isinstance(quantizers, Quantizer):
        return quantizers
    if layer >= len(quantizers):
        raise ConfigError(
            f"the model writes {what} of layer {layer} to a cache with quantizers for {len(quantizers)} layers; give "
            "one for each layer of the model"
        )
    return quantizers[layer]
