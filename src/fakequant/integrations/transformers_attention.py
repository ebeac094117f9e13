"""Attention of Hugging Face's transformers that runs in a kernel: its query, key and value can get quantizers.

`sdpa` and `eager` attention call functions of torch, which `Rule(ops=("sdpa", "matmul"))` names. `flex_attention` and
`flash_attention` call none that can be looked into. Importing this module registers an attention function for each of
them with transformers, which calls it as one function that rules name: `attention`.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fakequant.errors import ConfigError
from fakequant.nn.sites.sites import attention_function, sites_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "fakequant_"
"""What the names of the registered functions begin with."""
Model = TypeVar("Model", bound="PreTrainedModel")


def name_attention(model: Model) -> Model:
    """Have rules see the attention of a model as one function `attention`, in place.

    Call it before `prepare`, and before `fakequant.load`. Query, key and value get quantizers as the attention function
    takes them: after the rotary embedding, keys and values with their own number of heads.

    Args:
        model: a model of transformers in float, whose attention is any of transformers but "eager".

    Raises:
        ConfigError: its attention is no registered function.

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
            f"the attention {name!r} of the model is no registered function of transformers; attention that is "
            "\"eager\" needs none, because rules name its products: ops=('matmul',)"
        )
    _own_config(model)
    model.set_attn_implementation(PREFIX + name)
    return model


class Run(NamedTuple):
    """Queries of a call, one behind the other, that see the same keys and values."""

    first: int
    stop: int
    quantized: list[int]
    """The length of what is quantized of each sequence of the batch."""


@dataclass(frozen=True, eq=False)
class ByQuery:
    """Keys, or values, that are not the same for all queries of a call: each sees more of them quantized.

    Every function of torch refuses it; the attention functions of this module take it.
    """

    floats: Tensor
    """[n, heads, length, features]"""
    settled: Tensor
    runs: list[Run]
    padding: list[int]
    """The number of tokens, of each sequence, that the cache takes for padding before it."""

    def seen_by(self, run: Run) -> Tensor:
        """The keys of some queries, to the last of these."""
        length = self.floats.shape[2] - self.runs[-1].stop + run.stop
        ends = torch.tensor(run.quantized, device=self.floats.device).view(-1, 1, 1, 1)
        is_quantized = torch.arange(length, device=ends.device).view(-1, 1) < ends
        return torch.where(is_quantized, self.settled[:, :, :length], self.floats[:, :, :length])

    @property
    def shape(self) -> torch.Size:
        """That of all keys."""
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
    """Attention of each query to the keys and values that it sees, as if its token had been written alone."""
    is_causal = options.get("is_causal")
    if name != "sdpa" or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ConfigError(_BY_QUERY)
    length, queries = key.floats.shape[2], query.shape[2]
    if mask is None:
        mask = query.new_ones(queries, length, dtype=torch.bool).tril(length - queries)[None, None]
    _check_padding(mask[..., :length], key.padding, length - queries)
    of_places = [mask] if (bias := options.get("position_bias")) is None else [mask, bias]
    found = []
    for run in key.runs:
        keys, values, part = key.seen_by(run), value.seen_by(run), slice(run.first, run.stop)
        own, *biases = (x.expand(-1, -1, queries, -1)[:, :, part, : keys.shape[2]] for x in of_places)
        more = {**options, "position_bias": biases[0]} if biases else options
        found.append(ALL_ATTENTION_FUNCTIONS[name](module, query[:, :, part], keys, values, own, *args, **more)[0])
    return torch.cat(found, 1), None


def _check_padding(mask: Tensor, padding: list[int], start: int) -> None:
    """Check that a mask [n, heads, queries, length] hides the padding that the cache knows, before other tokens none.

    Raises:
        ConfigError: it does not, so that groups would begin at the wrong tokens.
    """
    hidden = ~mask if mask.dtype is torch.bool else mask < torch.finfo(mask.dtype).min / 2
    before = hidden.all(2)[:, 0].int().cumprod(-1).sum(-1).expand(len(padding)).tolist()
    for row, (known, found) in enumerate(zip(padding, before, strict=True)):
        # A window hides what is far behind; the query of the first token that is none but padding sees that token.
        if found < known or (found > known >= start):
            raise ConfigError(
                f"sequence {row} of this call has {found} tokens of padding before it, and {known} by the mask of the "
                "cache: give FakeQuantCache(attention_mask=), or cache.reset() before another prompt, the mask that "
                "the model gets"
            )


def _own_config(model: nn.Module) -> None:
    """Copy the configuration of a model, because models may share one."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    for module in model.modules():
        if (config := vars(module).get("config")) is not None:
            module.config = copies.get(id(config), config)


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
