"""Experts of transformers whose weights are stacked in one parameter: quantized in both products of every expert.

The classes are known by the decorator that made their `forward`, `use_experts_implementation`; nothing is imported.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fakequant.errors import CallError, ConfigError
from fakequant.nn.backward import Factor, LinearSum, TurnedSum, WeightedSum, is_trained, multiplied
from fakequant.nn.products import ExpertProduct
from fakequant.nn.quantized.layers import QuantizedLayer, quantizes_made_by
from fakequant.nn.quantizer import Proxy, as_leaf
from fakequant.nn.wrappers import Operand, Role

_ONE_BY_ONE = (None, "eager")
_VISIBLE = ("batched_mm", "grouped_mm")
"""Implementations of transformers that read weights and call the gate as attributes of the experts."""


class _Seen:
    """The experts as an implementation of transformers sees them: with quantized weights and activations."""

    def __init__(self, experts: Any, first: str) -> None:
        self.config = experts.config
        self.num_experts = experts.num_experts
        self.has_gate, self.has_bias = experts.has_gate, experts.has_bias
        self.has_post_expert_norm = experts.has_post_expert_norm
        self.is_transposed, self.is_concatenated = experts.is_transposed, experts.is_concatenated
        self._is_expert_parallel = experts._is_expert_parallel
        self.experts = experts
        names = (f"{first}_bias", "down_proj_bias") if experts.has_bias else ()
        for name in (*names, *(("post_expert_norm",) if experts.has_post_expert_norm else ())):
            setattr(self, name, getattr(experts, name))
        for name in (first, "down_proj"):
            setattr(self, name, experts.quantized(f"_{name}_weight_quantizer", getattr(experts, name)))

    def _apply_gate(self, x: Tensor) -> Tensor:
        return self.experts.quantized("_down_input_quantizer", self.experts._apply_gate(x))

    def act_fn(self, x: Tensor) -> Tensor:
        return self.experts.quantized("_down_input_quantizer", self.experts.act_fn(x))


@quantizes_made_by("transformers.integrations.moe")
class QuantExperts(QuantizedLayer):
    """Experts with quantized tokens [tokens, in], inputs [..., hidden] of the second product, and stacked weights.

    A weight is [experts, out, in], or [experts, in, out] where the class says that it is transposed. Every expert has
    ranges of its own, as if it were a layer. All experts share the two quantizers of activations.
    """

    product_class = ExpertProduct
    inputs: ClassVar[tuple[str, ...]] = ("_input_quantizer", "_down_input_quantizer")
    input_reductions: ClassVar[tuple[int, ...]] = (-1, -1)
    output_channels: ClassVar[int | None] = None

    @classmethod
    def factors(cls, layer: nn.Module) -> dict[str, Operand]:
        channels, reduction = (-1, -2) if layer.is_transposed else (-2, -1)
        found = {attribute: Operand(Role.INPUT) for attribute in cls.inputs}
        for name in (_first(layer), "down_proj"):
            weight = Operand(Role.WEIGHT, reduction, channels, weight=name, is_stack=True)
            found[f"_{name}_weight_quantizer"] = weight
        return found

    @classmethod
    def weighted_sum(cls, layer: nn.Module) -> WeightedSum | None:
        return LinearSum()

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        for name in (_first(layer), "down_proj"):
            weight = getattr(layer, name, None)
            if not isinstance(weight, Tensor) or weight.dim() != 3:
                raise ConfigError(
                    f"its experts are expected in one parameter {name} with three axes, which it lacks; leave it in "
                    f"float by Rule('*', layers={type(layer).__name__!r})"
                )

    def tokens(self, attribute: str, hidden_states: Tensor, top_k_index: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        """The inputs of one of the products before its quantizer, in a call with these arguments, for each expert."""
        first: Any = _first(self)
        experts: Any = self
        hit = _tokens_of_experts(top_k_index, experts.num_experts)
        tokens = {expert: hidden_states[token] for expert, _, token in hit}
        if attribute != f"_{first}_weight_quantizer":
            weight, gate = _weights(self)[first], experts._apply_gate if experts.has_gate else experts.act_fn
            of_input = self.quantized_input(hidden_states)
            tokens = {
                expert: gate(_product(self, first, weight, expert, Factor(of_input[token], of_input[token])))
                for expert, _, token in hit
            }
        width = hidden_states.shape[-1] if not tokens else next(iter(tokens.values())).shape[-1]
        return [tokens.get(expert, hidden_states.new_zeros(0, width)) for expert in range(experts.num_experts)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [tokens, in] of the experts [tokens, k] of every token."""
        if isinstance(hidden_states, Proxy):
            return as_leaf(self, hidden_states, top_k_index, top_k_weights)
        experts: Any = self
        original = type(self).float_class.forward
        if not any(self.is_on(attribute) for attribute in self.factors(self)):
            return original(self, hidden_states, top_k_index, top_k_weights)
        implementation = experts.config._experts_implementation
        if implementation in _ONE_BY_ONE or is_trained(self.gradient):
            # As the classes are written: the tokens of one expert after those of another.
            first, gate = _first(self), experts._apply_gate if experts.has_gate else experts.act_fn
            weights, x = _weights(self), Factor(self.quantized_input(hidden_states), hidden_states)
            result = torch.zeros_like(hidden_states)
            for expert, place, token in _tokens_of_experts(top_k_index, experts.num_experts):
                y = gate(_product(self, first, weights[first], expert, x.map(lambda own, token=token: own[token])))
                y = Factor.of(self, "_down_input_quantizer", y)
                y = _product(self, "down_proj", weights["down_proj"], expert, y)
                if experts.has_post_expert_norm:
                    y = experts.post_expert_norm(y)
                y = y * top_k_weights[token, place, None]
                result.index_add_(0, token, y.to(result.dtype))
            return result
        if implementation not in _VISIBLE:
            raise CallError(
                f"the experts implementation {implementation!r} computes both products at once, so that what is "
                "between them cannot be quantized; call model.set_experts_implementation('grouped_mm')"
            )
        return original(_Seen(experts, _first(self)), self.quantized_input(hidden_states), top_k_index, top_k_weights)


def _first(layer: Any) -> str:
    """The weight of the first product."""
    return "gate_up_proj" if layer.has_gate else "up_proj"


@torch.no_grad()
def _tokens_of_experts(top_k_index: Tensor, experts: int) -> list[tuple[int, Tensor, Tensor]]:
    """The experts that get tokens, each with the places and the tokens of an index [tokens, k]."""
    # By place, then by token, as the classes are written. Expert parallelism gives tokens of other processes the index
    # after the last expert. The numbers of tokens are one copy to the host, and one wait for an accelerator.
    index = top_k_index.t().flatten()
    order, ones = index.argsort(stable=True), torch.ones_like(index)
    counts = index.new_zeros(experts + 1).scatter_add_(0, index, ones).tolist()
    found = enumerate(order[: len(index) - counts[-1]].split(counts[:-1]))
    return [(expert, own // len(top_k_index), own % len(top_k_index)) for expert, own in found if len(own)]


def _weights(experts: Any) -> dict[str, Factor]:
    """Both weights by name."""
    names = _first(experts), "down_proj"
    return {name: Factor.of(experts, f"_{name}_weight_quantizer", getattr(experts, name)) for name in names}


def _product(experts: Any, name: str, weight: Factor, expert: int, x: Factor) -> Tensor:
    product = TurnedSum() if experts.is_transposed else LinearSum()
    y = multiplied(product, experts.backward_of(), x, weight.map(lambda own: own[expert]))
    return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y
