"""What is left of a case when all is left out that could be, timed beside the same: what its ratio is to be seen by."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.benchmark import CannotRunError, Case, Function
from fakequant.nn.integer import CodedTensor, IntegerProduct, Laid, Ready, encode
from fakequant.nn.layers import QuantizedLayer
from fakequant.ops.cpu.backend import CpuBackend

from .training import Step


class PlainCopy(Case):
    """A copy in place of our call."""

    def run(self) -> Function:
        return self._timed(torch.clone)

    def differing(self) -> int:
        return 0


class OperatorAlone(Case):
    """Our compiled operator, called without the Python in front of it."""

    def run(self) -> Function:
        scale, backend = self.scale(), CpuBackend()
        if reason := backend.unavailable():
            raise CannotRunError(reason)
        assert scale is not None, f"{self.name}: scales are to be given"
        direct = backend.direct(self.inputs(1)[0], self.spec, scale)
        assert direct is not None, f"{self.name} is not one operator"
        return lambda x: direct.values(x, scale, None, direct.form)


class CopiesBothWays(Case):
    """A function with a gradient, written in Python, that copies its input, and in the backward pass its gradient."""

    def run(self) -> Function:
        # Without what `Function.apply` does for function transforms, as the quantizers' own functions.
        apply: Any = super(torch.autograd.Function, _Copied).apply  # pyright: ignore[reportAttributeAccessIssue]
        return self._timed(apply)

    def differing(self) -> int:
        return 0


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0].clone()


@dataclass(frozen=True)
class ProductsAlone(Step):
    """A training step that multiplies the same codes each time, and whose backward pass has their values already.

    Nothing is encoded, masked, decoded or fitted; ReLUs, which encoding takes in, are left out. What is left are the
    integer products, those of the backward pass, which torch computes in float32, and what is no quantized layer.
    """

    @classmethod
    def of(cls, step: Step) -> ProductsAlone:
        """What is left of a step."""
        return cls(f"products alone, {step.name}", step.make, step.shape, execution=step.execution)

    @property
    def direction(self) -> str:
        return "training step, products alone"

    def differing(self) -> int:
        return 0

    def models(self) -> tuple[nn.Module, nn.Module]:
        quantized, plain = super().models()
        found = _factors_met(quantized, self.batches(1)[0])
        model = copy.deepcopy(plain)
        for name, module in plain.named_modules():
            if name in found:
                model.set_submodule(name, _GivenCodes(module, found[name]))
            elif isinstance(module, nn.ReLU):
                model.set_submodule(name, nn.Identity())
        return model, plain


class _Factors(NamedTuple):
    """Those of a layer, and how it multiplies them."""

    product: IntegerProduct
    ready: Ready
    x: CodedTensor
    weight: CodedTensor


def _factors_met(model: nn.Module, batch: Tensor) -> dict[str, _Factors]:
    """The factors of every layer that multiplies codes, by its name, of one batch."""
    found: dict[str, _Factors] = {}

    def keep(name: str, layer: Any, x: Tensor) -> None:
        coded, weight = encode(layer._input_quantizer, x), encode(layer._weight_quantizer, layer.weight)
        assert coded is not None, f"{name} got NaN"
        assert weight is not None, f"{name} has a weight with NaN"
        found[name] = _Factors(layer.product, layer.product.ready(layer), coded, weight)

    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: keep(name, layer, inputs[0]))
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLayer) and layer.product is not None and layer.why_simulated() is None
    ]
    with torch.no_grad():
        model(batch)
    for hook in hooks:
        hook.remove()
    return found


class _GivenCodes(nn.Module):
    """A layer with factors that are always the same."""

    def __init__(self, layer: nn.Module, factors: _Factors) -> None:
        super().__init__()
        self.weight, self.bias = copy.deepcopy(layer.weight), copy.deepcopy(layer.bias)
        self.factors = factors
        self.values = [fq.dequantize(one.codes, one.params, one.spec) for one in (factors.x, factors.weight)]

    def forward(self, x: Tensor) -> Tensor:
        return _OfGivenCodes.apply(x, self.weight, self.bias, self)


class _OfGivenCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _GivenCodes) -> Tensor:
        ctx.layer = layer
        product, ready, *factors = layer.factors
        y = product.multiply(ready, *factors, bias)
        return y.view_as(y) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), dy = ctx.layer.values, grad_outputs[0]
        product, places = ctx.layer.factors.product, ctx.layer.factors.ready.places
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        dx = product.grad_input(dy, weight, Laid(x.shape, x.stride()), places) if wants_x else None
        d_weight, d_bias = product.grad_other(dy, x, Laid(weight.shape, weight.stride()), places, with_bias=wants_bias)
        return dx, d_weight, d_bias, None
