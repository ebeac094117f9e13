"""llama.cpp's quantization of inputs, which it chooses by the type of the weights.

Source: `quantize_row_q8_0` and `quantize_row_q8_K` of ggml. Both encode and decode with different scales, so that no
specification describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.delivery.gguf.blocks import LAYOUTS
from fakequant.delivery.gguf.lattices import kind_of
from fakequant.delivery.places import places_of
from fakequant.errors import ExportError, ShapeError
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics.division import divide

_BOUND = 127.0


def as_llama_cpp_has(x: Tensor, block: int) -> Tensor:
    """A product's inputs as llama.cpp quantizes them; gradients pass.

    Codes are rint(x * (127 / amax)) in blocks along the last axis. In blocks of 32 a code q has the value
    q * float16(amax / 127), in blocks of 256 it is q * (1 / (127 / amax)).

    >>> as_llama_cpp_has(torch.tensor([1.0, 0.5]).repeat(16), 32)[:2]
    tensor([0.9999, 0.5039])
    """
    values = x.detach().float().unflatten(-1, (-1, block))
    amax = values.abs().amax(-1, keepdim=True)
    bound, some = torch.full_like(amax, _BOUND), torch.where(amax == 0, 1.0, amax)
    multiplier = divide(bound, some)
    halfs = divide(some, bound).half().float()
    scale = halfs if block == 32 else divide(torch.ones_like(some), multiplier)
    found = (values * multiplier).round().mul(scale).flatten(-2).to(x.dtype)
    return x + (found - x).detach() if x.requires_grad else found


@contextmanager
def llama_cpp_inputs(model: nn.Module) -> Iterator[None]:
    """A context in which a prepared model quantizes the inputs of its products as llama.cpp does.

    In this context, measure or train a model as llama.cpp will compute it from a GGUF file. Results agree up to the
    order of sums, except with Q4_1 and Q5_1: for these llama.cpp also rounds the sum of every block of inputs.

    Raises:
        ExportError: a weight that no type of GGUF holds, by name, with the reason.

    >>> layer = prepare(nn.Sequential(nn.Linear(32, 1, bias=False)), "gguf_q8_0", skip=[])
    >>> with llama_cpp_inputs(layer):
    ...     y = layer(torch.ones(32))
    """
    with ExitStack() as stack:
        for name, place in places_of(model).items():
            layer: Any = model.get_submodule(place.path)
            quantizer = getattr(layer, place.attribute, None)
            if not isinstance(layer, nn.Linear) or not isinstance(quantizer, Quantizer) or not quantizer.quantizes:
                continue
            try:
                block = LAYOUTS[kind_of(quantizer.spec, tuple(layer.weight.shape))].weights
            except ShapeError as error:
                raise ExportError(f"llama.cpp cannot have {name}: {error}") from error
            stack.callback(layer.register_forward_pre_hook(partial(_quantize_first, block)).remove)
        yield


def _quantize_first(block: int, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return as_llama_cpp_has(args[0], block), *args[1:]
