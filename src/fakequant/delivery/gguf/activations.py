"""llama.cpp's quantization of inputs, which it chooses by the type of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fakequant.delivery.gguf.blocks import LAYOUTS
from fakequant.delivery.gguf.lattices import kind_of
from fakequant.delivery.places import Place, places_of
from fakequant.errors import ExportError, ShapeError
from fakequant.model.prepare import quantizers_of
from fakequant.model.presets import LLAMA_CPP_CACHE, LLAMA_CPP_INPUTS
from fakequant.model.state.stored_sites import sites_entry
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.quantized.layers import QuantLinear
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.wrappers import unwraps
from fakequant.numerics.spec import QuantSpec
from fakequant.restore import restore_after, restore_on_error, structure_of

Model = TypeVar("Model", bound=nn.Module)
_BLOCK, _BOUND = 32, 127


def inputs_for(weight: QuantSpec, shape: tuple[int, ...]) -> TensorConfig:
    """How llama.cpp quantizes the inputs of a product with a weight.

    Raises:
        ShapeError: no type of GGUF holds the weight.
    """
    return LLAMA_CPP_INPUTS[LAYOUTS[kind_of(weight, shape)].weights]


@unwraps
def llama_cpp_inputs(model: Model) -> Model:
    """Quantize the inputs of products as llama.cpp does, in a prepared model, in place; the model is returned.

    Measure or train the model then as llama.cpp will compute it from a GGUF file. Results agree up to the order of
    sums, except with Q4_1 and Q5_1: for these llama.cpp also rounds the sum of every block of inputs, which
    `verify_delivery` alone computes. The presets `GGUF_Q8_0_A8` to `GGUF_MXFP4_A8` do the same from the start.

    Raises:
        ExportError: a weight that no type of GGUF holds, by name, with the reason; the model is unchanged then.

    >>> model = llama_cpp_inputs(prepare(nn.Sequential(nn.Linear(32, 1, bias=False)), "gguf_q8_0", skip=[]))
    >>> model[0].input_quantizer
    Quantizer(int8_narrow per_block(-1:32,pad) q8_0, input, dynamic)
    """
    found: list[tuple[Place, Any, TensorConfig]] = []
    for name, place in places_of(model).items():
        layer: Any = model.get_submodule(place.path)
        quantizer = getattr(layer, place.attribute, None)
        if not place.input or not isinstance(quantizer, Quantizer) or not quantizer.quantizes:
            continue
        try:
            shape = tuple(getattr(layer, place.operand.weight).shape)
            found.append((place, layer, inputs_for(quantizer.spec, shape)))
        except ShapeError as error:
            raise ExportError(f"llama.cpp cannot have {name}: {error}") from error
    with restore_on_error(structure_of([model])):
        for place, layer, config in found:
            own = getattr(layer, place.input)
            if own is None or not own.quantizes or own.spec != config.spec:
                made = quantizers_of(type(layer), layer, {place.input: config}, place.path)
                setattr(layer, place.input, made[place.input])
    return model


def has_cache(model: nn.Module) -> bool:
    """Whether functions of a model have the quantizers of llama.cpp's cache, and no others."""
    owners = sites_entry(model).owners.values()
    held = [one.tensor for owner in owners for site in owner.sites.values() for one in site.quantizers.values()]
    return bool(held) and all(one == LLAMA_CPP_CACHE.input for one in held)


@contextmanager
def computed_by_llama_cpp(model: nn.Module) -> Iterator[None]:
    """A context of `llama_cpp_inputs` with llama.cpp's sums, after which the model is as it was."""
    with restore_after(structure_of([model])):
        llama_cpp_inputs(model)
        for layer in model.modules():
            if isinstance(layer, QuantLinear) and _has_rounded_sums(layer.weight_quantizer):
                layer.register_forward_hook(_with_rounded_sums)
        with _LongSums():
            yield


def _has_rounded_sums(weight: Quantizer | None) -> bool:
    """Whether llama.cpp rounds the sum of each block of inputs: for the offsets of Q4_1 and Q5_1."""
    return (
        weight is not None and weight.quantizes and weight.spec.offset is not None and weight.spec.scale.shared is None
    )


def _with_rounded_sums(layer: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """Add what the rounding of sums to float16 changes: `quantize_row_q8_1` of ggml."""
    codes, params = layer.input_quantizer.encoded(args[0])
    sums = codes.float().unflatten(-1, (-1, _BLOCK)).sum(-1)
    step = params.scale * (_BOUND + 1) / _BOUND
    gap = (step * sums).half().double() - step.half().double() * sums
    offsets = layer.weight_quantizer.qparams(layer.weight).zero_point
    return (y.double() - gap @ offsets.double().mT).to(y.dtype)


class _LongSums(TorchFunctionMode):
    """Sums of float32 numbers are taken in float64 and rounded once.

    llama.cpp adds codes within a block exactly, and squares of norms in float64. Beside a tie, a sum with another last
    bit gives another code: of a Llama in Q4_0 16 % of the tokens agree to 1e-5 with float32 sums, 88 % with these.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _SUMS:
            return func(*args, **(kwargs or {}))
        long = pytree.tree_map(lambda x: x.double() if _is_float32(x) else x, (args, kwargs or {}))
        found = func(*long[0], **long[1])
        return found.float() if any(map(_is_float32, pytree.tree_leaves(args))) else found


_SUMS = (functional.linear, functional.scaled_dot_product_attention, torch.matmul, torch.mean, Tensor.mean)


def _is_float32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32
