"""Attention of Hugging Face's transformers that runs in a kernel: its query, key and value can get quantizers.

`sdpa` and `eager` attention call functions of torch, which `Rule(ops=("sdpa", "matmul"))` names. `flex_attention` and
`flash_attention` call none that can be looked into. Importing this module registers an attention function for each of
them with transformers, which calls it as one function that rules name: `attention`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fakequant.errors import ConfigError
from fakequant.nn.sites.sites import attention_function

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


def _own_config(model: nn.Module) -> None:
    """Copy the configuration of a model, because models may share one."""
    copies: dict[int, Any] = {}
    deepcopy(model.config, copies)
    for module in model.modules():
        if (config := vars(module).get("config")) is not None:
            module.config = copies.get(id(config), config)


def _register(name: str) -> None:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
            return ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, attention_mask, *args, **options)

        return attention_function(query, key, value, run)

    AttentionInterface.register(PREFIX + name, attend)
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


for _name in list(ALL_ATTENTION_FUNCTIONS):
    if "|" not in _name and not _name.startswith(PREFIX):
        _register(_name)
