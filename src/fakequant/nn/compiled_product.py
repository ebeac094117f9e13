"""Products of codes as one node of a compiled graph, with one node as its gradient.

Compilers cannot look into integer products: whether there is NaN decides how they are computed, and specifications are
Python objects. The nodes get tensors and a text, and compute what an eager layer does. Between the passes they keep the
factors as they are, which compiled graphs hold anyway, and the gradient encodes them again.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fakequant.functional import choose_qparams
from fakequant.nn.integer import CodedTensor, IntegerProduct, Laid, Ready, mixes_dtypes
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.numerics.products import Places
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ops.kept import keep, keep_codes

_TENSORS = (
    "Tensor x, Tensor other, Tensor? bias, "
    "Tensor? x_scale, Tensor? x_zero_point, Tensor? other_scale, Tensor? other_zero_point"
)
# Held, because the operators vanish with it.
_LIBRARY = torch.library.Library("fakequant", "FRAGMENT")
_LIBRARY.define(f"product({_TENSORS}, str form, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"product_backward(Tensor dy, {_TENSORS}, str form, bool[] wants) -> Tensor[]")

# Called when a graph is made, instead of being traced.
torch.compiler.assume_constant_result(QuantizedLayer.product_form)

# By the names of their classes: products have no state.
_products: dict[str, IntegerProduct] = {}


def form_of(layer: Any, product: IntegerProduct) -> str:
    """A layer's product as text, for the nodes; empty where the layer is simulated."""
    ready = product.ready(layer)
    if ready.reason is not None:
        return ""
    kind = f"{type(product).__module__}.{type(product).__qualname__}"
    _products[kind] = product
    specs = [layer._modules[name].trained_spec.to_text() for name in product.quantizers]
    return json.dumps([kind, specs, list(ready.places)])


def multiply(product: IntegerProduct, layer: Any, x: Tensor, other: Tensor, bias: Tensor | None) -> Tensor | None:
    """`IntegerProduct.__call__`, where torch.compile watches; None where the layer is to be simulated."""
    quantizers = [layer._modules.get(name) for name in product.quantizers]
    if any(quantizer is None or quantizer.mode is not Mode.QUANTIZE for quantizer in quantizers):
        return None
    if mixes_dtypes(x, other) or not product.fits(x, other, None):
        return None
    # Compilers guard on arguments: the graph is made anew when one of these changes.
    if not (form := layer.product_form([str(q.spec) for q in quantizers], product.windows(layer))):
        return None
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    given = x, other, bias, *_params(quantizers[0], x), *_params(quantizers[1], other), form, dtype
    return _Compiled.apply(*given) if torch.is_grad_enabled() else torch.ops.fakequant.product(*given)


def _params(quantizer: Quantizer, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Scale and zero point; None where they follow from x."""
    if quantizer.follows_input and not quantizer.needs_calibration:
        return None, None
    return quantizer.qparams(x)[:2]


class _Form(NamedTuple):
    product: IntegerProduct
    specs: tuple[QuantSpec, QuantSpec]
    places: Places


@lru_cache(maxsize=1024)
def _read(form: str) -> _Form:
    kind, (x, other), places = json.loads(form)
    return _Form(_products[kind], (QuantSpec.parse(x), QuantSpec.parse(other)), Places(*places))


# Of each weight, by form: what its product keeps, as long as the weight lives. Its codes tell whether that is outdated.
_ready: MutableMapping[Tensor, dict[str, Ready]] = WeakTensorKeyDictionary()


class _Factor(NamedTuple):
    x: Tensor
    params: QParams
    spec: QuantSpec


def _factors(x: Tensor, other: Tensor, params: Sequence[Tensor | None], form: _Form) -> tuple[_Factor, _Factor]:
    def factor(x: Tensor, scale: Tensor | None, zero_point: Tensor | None, spec: QuantSpec) -> _Factor:
        return _Factor(x, choose_qparams(x, spec) if scale is None else QParams(scale, zero_point), spec)

    x_scale, x_zero_point, other_scale, other_zero_point = params
    return factor(x, x_scale, x_zero_point, form.specs[0]), factor(other, other_scale, other_zero_point, form.specs[1])


# What runs in a compiled graph would otherwise be looked at as if it were to be compiled too.
@torch.library.impl(_LIBRARY, "product", "CompositeExplicitAutograd")
@torch.compiler.disable
def _forward(x: Tensor, other: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *params, text, dtype = rest
    form = _read(text)
    product, specs, places = form
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        factors = _factors(x, other, params, form)
        coded = [_coded(factor) for factor in factors] if product.fits(x, other, specs) else [None, None]
        if coded[0] is None or coded[1] is None:  # NaN, which is to be seen in the output, or too large a sum
            values = [library.fake_quantize(*factor).to(dtype) for factor in factors]
            y = product.in_float(values[0], values[1], None if bias is None else bias.to(dtype), places)
        else:
            ready = _ready.setdefault(other, {}).setdefault(text, Ready((), None, places))
            y = product.multiply(ready, coded[0], coded[1], bias).to(dtype)
        return _laid(y, product.empty_result(x, y.shape, dtype))


def _coded(factor: _Factor) -> CodedTensor | None:
    kept = keep_codes(*factor, mask=False)
    return None if kept is None else CodedTensor(factor.x, kept, factor.params, factor.spec)


@torch.library.register_fake("fakequant::product", lib=_LIBRARY)
def _(x: Tensor, other: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, text, dtype = rest
    product, _, places = _read(text)
    y = product.in_float(x.to(torch.float32), other.to(torch.float32), None, places)
    return product.empty_result(x, y.shape, dtype)


@torch.library.impl(_LIBRARY, "product_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _backward(dy: Tensor, x: Tensor, other: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    *params, text, wants = rest
    form = _read(text)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        factors = _factors(x, other, params, form)
        found = _gradients(dy, factors, form, wants)
    likes = _like_gradients(x, other, bias, params, wants)
    return [like if g is None else _laid(g.to(like.dtype), like) for g, like in zip(found, likes, strict=True)]


def _gradients(dy: Tensor, factors: tuple[_Factor, _Factor], form: _Form, wants: list[bool]) -> list[Tensor | None]:
    """The wanted gradients of both factors, bias, and scale and zero point of each, as an eager layer finds them."""
    kept = [keep_codes(*factor, mask=True) for factor in factors]
    if kept[0] is None or kept[1] is None:
        kept = [keep(*factor, mask=True) for factor in factors]
        values = [one.values.to(dy.dtype) for one in kept]
    else:
        dy = dy.to(torch.float32)
        pairs = zip((kept[0], kept[1]), factors, strict=True)
        values = [library.dequantize(one.values, factor.params, factor.spec, dy.dtype) for one, factor in pairs]
    of_values, of_bias = _gradients_of_values(dy, values, form, wants)
    found: list[Tensor | None] = []
    of_params: list[Tensor | None] = []
    for d, one, factor, wanted in zip(of_values, kept, factors, (wants[3:5], wants[5:7]), strict=True):
        if d is None or one is None:
            found, of_params = [*found, None], [*of_params, None, None]
            continue
        d = d.to(factor.x.dtype)
        found.append(library.masked_gradient(d, one.mask, one.call))
        slopes = library.grad_params(d, *factor, (wanted[0], wanted[1])) if any(wanted) else (None, None)
        of_params += slopes
    found = [*found, of_bias, *of_params]
    return [gradient if wanted else None for gradient, wanted in zip(found, wants, strict=True)]


def _gradients_of_values(
    dy: Tensor, values: list[Tensor], form: _Form, wants: list[bool]
) -> tuple[tuple[Tensor | None, Tensor | None], Tensor | None]:
    """Those of both factors' values, wanted where those of their parameters are, and that of the bias."""
    product, places, (x, other) = form.product, form.places, values
    laid_x, laid_other = (Laid(one.shape, one.stride()) for one in values)
    dx = d_other = of_bias = None
    if wants[0] or any(wants[3:5]):
        dx = product.grad_input(dy, other, laid_x, places)
    if wants[1] or any(wants[5:7]):
        d_other, of_bias = product.grad_other(dy, x, laid_other, places, with_bias=wants[2])
    elif wants[2]:
        of_bias = product.grad_bias(dy, laid_x, laid_other, places)
    return (dx, d_other), of_bias


def _like_gradients(
    x: Tensor, other: Tensor, bias: Tensor | None, params: Sequence[Tensor | None], wants: list[bool]
) -> list[Tensor]:
    """Tensors like the wanted gradients, and empty ones in place of the others."""
    pairs = zip((x, other, bias, *params), wants, strict=True)
    return [torch.empty_like(t) if t is not None and wanted else x.new_empty(0) for t, wanted in pairs]


@torch.library.register_fake("fakequant::product_backward", lib=_LIBRARY)
def _(dy: Tensor, x: Tensor, other: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    *params, _, wants = rest
    return _like_gradients(x, other, bias, params, wants)


def _laid(y: Tensor, like: Tensor) -> Tensor:
    """y as its declaration lies in memory."""
    return y if y.stride() == like.stride() else like.copy_(y)


class _Compiled(torch.autograd.Function):
    """Both nodes; not registered with the operator, whose calls would cost double."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        return torch.ops.fakequant.product(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.form, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wants = list(ctx.needs_input_grad[:7])
        found = torch.ops.fakequant.product_backward(grad_outputs[0], *ctx.saved_tensors, ctx.form, wants)
        return (*(g if wanted else None for g, wanted in zip(found, wants, strict=True)), None, None)
