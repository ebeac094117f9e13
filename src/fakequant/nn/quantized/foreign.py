"""Quantized classes for layers of other libraries, registered by the layers' names without importing the libraries.

The layers are convolutions and linear layers of timm, linear layers, embeddings and experts of transformers, and linear
layers of PyTorch Geometric. The weights of experts are stacked in a parameter, and both products of each expert are
quantized. Classes of experts are recognized by the decorator of their `forward`, `use_experts_implementation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fakequant.errors import CallError, ConfigError
from fakequant.nn.backward import Factor, LinearSum, TurnedSum, WeightedSum, is_trained, multiplied
from fakequant.nn.integer import IntegerProduct
from fakequant.nn.products import ExpertProduct, TurnedProduct
from fakequant.nn.quantized.layers import (
    QuantConv2d,
    QuantEmbedding,
    QuantizedLayer,
    QuantLinear,
    quantizes,
    quantizes_made_by,
)
from fakequant.nn.quantizer import Proxy, as_leaf
from fakequant.nn.wrappers import Operand, Role

quantizes("timm.layers.linear.Linear")(QuantLinear)

_SCALED = """
    bart.Bart bigbird_pegasus.BigBirdPegasus biogpt.BioGpt blenderbot.Blenderbot m2m_100.M2M100 mbart.MBart
    nllb_moe.NllbMoe pegasus_x.PegasusX plbart.PLBart pp_formulanet.PPFormulaNet seamless_m4t.SeamlessM4T
    seamless_m4t_v2.SeamlessM4Tv2 trocr.TrOCR xglm.XGLM minicpm3.MiniCPM3 diffusion_gemma.DiffusionGemmaText
    embedding_gemma2.EmbeddingGemma2Text gemma.GemmaText gemma2.Gemma2Text gemma3.Gemma3Text gemma3n.Gemma3nText
    gemma4.Gemma4Text gemma4_unified.Gemma4UnifiedText vaultgemma.VaultGemmaText
"""
"""The models of transformers whose embedding is scaled by a factor, each with the first part of its class name."""


class _SamePadding(QuantConv2d):
    """Conv2d that pads its input [n, in, h, w] with zeros, so that output sizes are ceil(size / stride)."""

    product: ClassVar[IntegerProduct | None] = None
    same_pad = True

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.same_pad:  # after it was quantized, as in Conv2d: calibration does not see the zeros
            padding: list[int] = []  # zeros on both sides of the axes, the last axis first
            options = self.kernel_size[::-1], self.stride[::-1], self.dilation[::-1]
            for size, kernel, stride, dilation in zip(input.shape[:-3:-1], *options, strict=True):
                missing = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
                padding += [missing // 2, missing - missing // 2]
            input = F.pad(input, padding)
        return super()._conv_forward(input, weight, bias)


class _Standardized(QuantConv2d):
    """Conv2d that standardizes its weight [out, in / groups, kh, kw] per output channel, and then quantizes it."""

    eps: float
    scale: float

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The standardized weight, with which the convolution multiplies; `state_dict` holds the weight before that."""
        own = self._parameters["weight"]
        assert own is not None
        gain = self._parameters.get("gain")
        factors = None if gain is None else (gain * self.scale).view(-1)
        rows = own.reshape(1, self.out_channels, -1)
        return F.batch_norm(rows, None, None, weight=factors, training=True, momentum=0.0, eps=self.eps).reshape_as(own)


class _StandardizedSamePadding(_SamePadding, _Standardized):
    """Conv2d with a standardized weight and padding to the same output size."""


quantizes("timm.layers.conv2d_same.Conv2dSame")(_SamePadding)
quantizes("timm.layers.std_conv.StdConv2d")(_Standardized)
quantizes("timm.layers.std_conv.ScaledStdConv2d")(_Standardized)
quantizes("timm.layers.std_conv.StdConv2dSame")(_StandardizedSamePadding)
quantizes("timm.layers.std_conv.ScaledStdConv2dSame")(_StandardizedSamePadding)


@quantizes("transformers.pytorch_utils.Conv1D")
class QuantConv1D(QuantizedLayer):
    """Linear layer with quantized input [..., in] and weight [in, out]."""

    output_channels: ClassVar[int | None] = 1
    weight_reduction: ClassVar[int] = 0
    product_class = TurnedProduct
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantized_input(x)
        weight = self.quantized_weight()
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


class _Scaled(QuantEmbedding):
    """Embedding that multiplies its quantized rows by a factor; a head with the same weight uses no factor."""

    embed_scale: Tensor | float

    def forward(self, input: Tensor) -> Tensor:
        rows, factor = super().forward(input), self.embed_scale
        if isinstance(input, Proxy):
            return rows
        return rows * (factor.to(self.weight.dtype) if isinstance(factor, Tensor) else factor)


for _model, _, _prefix in (name.partition(".") for name in _SCALED.split()):
    quantizes(f"transformers.models.{_model}.modeling_{_model}.{_prefix}ScaledWordEmbedding")(_Scaled)


@quantizes("transformers.models.falcon.modeling_falcon.FalconLinear")
class _FalconLinear(QuantLinear):
    """Linear layer that rounds the product before it adds the bias."""

    product: ClassVar[IntegerProduct | None] = None

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        y = self.quantized_input(input) @ self.quantized_weight().T
        return y if self.bias is None else y + self.bias


@quantizes("torch_geometric.nn.dense.linear.Linear")
class _GeometricLinear(QuantLinear):
    """Linear layer of PyTorch Geometric, which names its sizes in_channels and out_channels."""

    in_features = property(lambda self: self.in_channels)  # type: ignore[assignment]
    out_features = property(lambda self: self.out_channels)  # type: ignore[assignment]

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        if isinstance(layer.weight, UninitializedParameter):
            raise ConfigError("its parameters have no shapes before the first call; call the model once before prepare")


@quantizes("transformers.models.jetmoe.modeling_jetmoe.JetMoeParallelExperts")
class _ParallelExperts(QuantizedLayer):
    """Experts with quantized tokens [tokens, in], sorted by expert, and weights [experts, out, in]."""

    @classmethod
    def factors(cls, layer: nn.Module) -> dict[str, Operand]:
        weight = Operand(Role.WEIGHT, -1, -2, weight="weight", is_stack=True)
        return {"_input_quantizer": Operand(Role.INPUT), "_weight_quantizer": weight}

    product_class = ExpertProduct

    def tokens(self, attribute: str, inputs: Tensor, expert_size: list[int]) -> Sequence[Tensor]:
        """The tokens of each expert before their quantizer, in a call of the layer with `inputs` and `expert_size`."""
        return inputs.split(expert_size, dim=0)

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """The results [tokens, out]; `expert_size` has the count of tokens of each expert, in order."""
        parts = self.quantized_input(inputs).split(expert_size, dim=0)
        return torch.cat([F.linear(x, weight) for x, weight in zip(parts, self.quantized_weight(), strict=True)], dim=0)


@quantizes("transformers.models.llama4.modeling_llama4.Llama4TextExperts")
class _Llama4Experts(QuantizedLayer):
    """Experts with equal numbers of tokens, quantized inputs of both products, and weights [experts, in, out]."""

    product_class = ExpertProduct
    inputs: ClassVar[tuple[str, ...]] = ("_input_quantizer", "_down_input_quantizer")
    input_reductions: ClassVar[tuple[int, ...]] = (-1, -1)
    output_channels: ClassVar[int | None] = None

    @classmethod
    def factors(cls, layer: nn.Module) -> dict[str, Operand]:
        found = {attribute: Operand(Role.INPUT) for attribute in cls.inputs}
        for name in ("gate_up_proj", "down_proj"):
            found[f"_{name}_weight_quantizer"] = Operand(Role.WEIGHT, -2, -1, weight=name, is_stack=True)
        return found

    def tokens(self, attribute: str, hidden_states: Tensor) -> Sequence[Tensor]:
        """The rows of each expert that the weight of the quantizer `attribute` multiplies, before their quantizer."""
        own: Any = self
        x = hidden_states.view(own.num_experts, -1, own.hidden_size)
        return (x if attribute == "_gate_up_proj_weight_quantizer" else self._gated(self.quantized_input(x))).unbind()

    def _gated(self, x: Tensor) -> Tensor:
        """The input [experts, tokens, hidden] of the second product; x is the quantized input of the first product."""
        own: Any = self
        gate, up = torch.bmm(x, self.quantized("_gate_up_proj_weight_quantizer", own.gate_up_proj)).chunk(2, dim=-1)
        return up * own.act_fn(gate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The results [experts * tokens, in], sorted by expert."""
        own: Any = self
        x = self._gated(self.quantized_input(hidden_states.view(own.num_experts, -1, own.hidden_size)))
        x = self.quantized("_down_input_quantizer", x)
        return torch.bmm(x, self.quantized("_down_proj_weight_quantizer", own.down_proj)).view(-1, own.hidden_size)


_ONE_BY_ONE = (None, "eager")
_VISIBLE = ("batched_mm", "grouped_mm")
"""Implementations of transformers that read weights and call the gate as attributes of the experts module."""


class _Seen:
    """Stands in for an experts module in a call of a function of transformers, which reads quantized weights from it.

    Its activation function returns quantized tensors.
    """

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

    A weight is [experts, out, in], or [experts, in, out] if the layer's `is_transposed` is set. Each expert's weight
    has separate ranges. All experts share the two quantizers of activations.
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
                    f"it has no parameter {name} with three axes, which should hold the weights of all experts; leave "
                    f"it in float by Rule('*', layers={type(layer).__name__!r})"
                )

    def tokens(self, attribute: str, hidden_states: Tensor, top_k_index: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        """The rows of each expert that the weight of the quantizer `attribute` multiplies, before their quantizer."""
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
        """For each token the weighted sum [tokens, in] of the outputs of its k experts.

        `top_k_index` and `top_k_weights` [tokens, k] are the experts' indices and weights.
        """
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
                f"the experts implementation {implementation!r} computes both products at once, so that the tensor "
                "between them cannot be quantized; call model.set_experts_implementation('grouped_mm')"
            )
        return original(_Seen(experts, _first(self)), self.quantized_input(hidden_states), top_k_index, top_k_weights)


def _first(layer: Any) -> str:
    """The attribute that holds the stacked weights of the first product."""
    return "gate_up_proj" if layer.has_gate else "up_proj"


@torch.no_grad()
def _tokens_of_experts(top_k_index: Tensor, experts: int) -> list[tuple[int, Tensor, Tensor]]:
    """For each expert with tokens: its index, and the columns and rows where `top_k_index` [tokens, k] names it."""
    # Sorted by place, then by token, as in transformers' classes. Expert parallelism gives tokens of other processes
    # the index after the last expert. Copying the counts of tokens to the host is the only wait for an accelerator.
    index = top_k_index.t().flatten()
    order, ones = index.argsort(stable=True), torch.ones_like(index)
    counts = index.new_zeros(experts + 1).scatter_add_(0, index, ones).tolist()
    found = enumerate(order[: len(index) - counts[-1]].split(counts[:-1]))
    return [(expert, own // len(top_k_index), own % len(top_k_index)) for expert, own in found if len(own)]


def _weights(experts: Any) -> dict[str, Factor]:
    """The stacked weights of both products, quantized, by the names of the attributes that hold them."""
    names = _first(experts), "down_proj"
    return {name: Factor.of(experts, f"_{name}_weight_quantizer", getattr(experts, name)) for name in names}


def _product(experts: Any, name: str, weight: Factor, expert: int, x: Factor) -> Tensor:
    product = TurnedSum() if experts.is_transposed else LinearSum()
    y = multiplied(product, experts.backward_of(), x, weight.map(lambda own: own[expert]))
    return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y
