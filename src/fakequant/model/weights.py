"""The weights of quantized layers as their next call computes them, and scales that no longer fit them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fakequant.calibration.calibrator import find_method
from fakequant.calibration.lattice import search_params, searches
from fakequant.distributed import is_sharded, whole
from fakequant.errors import CalibrationError, CalibrationWarning, StaleScaleWarning, warn_user
from fakequant.model.modes import in_eval_mode
from fakequant.nn.paths import join, layer_of
from fakequant.nn.products.product import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.nn.ranges.fitted import is_stale, magnitudes, mark
from fakequant.nn.sites.products import site_products
from fakequant.numerics.qparams import QParams, Range, lend
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.text import listed, module_name

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_WEIGHT_HOOKS = (BasePruningMethod, SpectralNorm, WeightNorm)
_NAMED = 8
_FEW_BITS = 4
"""Below as many bits the largest magnitude says little of a scale. Of the energy of a trained CNN's weights its scale
loses 0.9 to 7.3 (1 bit: more than zeros would), 0.21 to 0.70 (2 bits) and 0.02 to 0.11 (3 bits), the nearest one
0.25 to 0.37, 0.08 to 0.16 and 0.01 to 0.05."""


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module itself that could be quantized: with two axes longer than 1, not those of norms."""
    if isinstance(module, (*_NORMS, Quantizer)):
        return []
    return [p for p in module.parameters(recurse=False) if _is_weight(p)]


def _is_weight(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, UninitializedParameter) or not parameter.is_floating_point():
        return False
    return sum(size > 1 for size in parameter.shape) >= 2


def quantized_weights(model: nn.Module) -> dict[str, Product]:
    """The weights of layers and of functions that have a quantizer, by the path of the quantizer."""
    modules = [*model.named_modules()]
    of_layers = {
        join(path, product.attribute): product
        for path, layer in modules
        if isinstance(layer, QuantizedLayer)
        for product in layer.products()
        if product.quantizer is not None
    }
    return of_layers | {
        join(path, place): product for path, owner in modules for place, product in site_products(owner).items()
    }


def fresh_weight(weight: Product, name: str) -> Tensor:
    """The weight that the layer's next call uses.

    `weight_norm`, `spectral_norm` and `prune` of torch.nn.utils compute it by a hook when the layer is called. What the
    layer holds before that is the weight of its last call, or after `load_state_dict` that of no call.

    Args:
        weight: a weight of a quantized layer.
        name: the path of its quantizer, for the message.

    Raises:
        CalibrationError: something else computes it in the layer's call.
    """
    hooks = _weight_hooks(weight)
    if weight.computed_by_hook and not hooks:
        path = layer_of(name)
        raise CalibrationError(
            f"the weight of {module_name(path)} is computed when the layer is called, and no call has shown it; give "
            "batches that reach the layer"
        )
    with in_eval_mode(weight.owner), torch.no_grad():  # spectral_norm changes its vectors in training mode
        for hook in hooks:
            hook(weight.owner, None)
        return weight.tensor


def _weight_hooks(weight: Product) -> list[Any]:
    return [hook for hook in weight.owner._forward_pre_hooks.values() if isinstance(hook, _WEIGHT_HOOKS)]


def scaled_weights(model: nn.Module) -> dict[str, Product]:
    """The weights of layers and of functions whose quantizer has parameters, by the path of the quantizer."""
    return {name: weight for name, weight in quantized_weights(model).items() if weight.quantizer.calibrated}


def note_weight(weight: Product) -> None:
    """Record that the parameters of a weight's quantizer fit the weight as it is now; codes of other values go."""
    quantizer = weight.quantizer
    if quantizer is None or not quantizer.calibrated:
        return
    with in_eval_mode(weight.owner), torch.no_grad():
        tensor = weight.tensor
    if not is_sharded(tensor):
        if weight.parameter is not None:
            quantizer.give_values(weight.parameter)
        quantizer.fitted_to, quantizer.seen = magnitudes(quantizer.spec, tensor), None
        if quantizer.fixed_codes is not None and not quantizer.holds(tensor):
            quantizer.release_codes()


def note_weights(model: nn.Module, stale: Iterable[str] = ()) -> None:
    """`note_weight` for all weights whose quantizer has parameters, as after loading a checkpoint or training.

    Args:
        model: a prepared model.
        stale: the paths of quantizers whose parameters do not fit, as a file says.
    """
    weights = scaled_weights(model)
    for weight in weights.values():
        note_weight(weight)
    for name in weights.keys() & set(stale):
        quantizer = weights[name].quantizer
        quantizer.fitted_to = None if quantizer.fitted_to is None else torch.zeros_like(quantizer.fitted_to)


def give_values(model: nn.Module) -> None:
    """Set weights whose codes stay in training to the values of these, before what writes a model reads them."""
    for weight in quantized_weights(model).values():
        if weight.quantizer.keeps_codes:
            note_weight(weight)


@torch.no_grad()
def warn_vanished(model: nn.Module) -> None:
    """Say which learned scales training drove to zero or below: nothing but the largest codes is left there."""
    found = {path: own.learned.vanished() for path, own in quantizers(model).items() if own.learned is not None}
    found = {path: (count, total) for path, (count, total) in found.items() if count}
    if found:
        counts = ", ".join(f"{count} of {total} in {path}" for path, (count, total) in [*found.items()][:3])
        more = f" and {len(found) - 3} more quantizers" if len(found) > 3 else ""
        warn_user(
            f"training drove learned scales to zero: {counts}{more}; what they quantize is lost. Train with a lower "
            "learning rate, or give the scales a lower one: Options(scale_lr=0.1), or in your own loop a group of the "
            "optimizer with fakequant.qat.learned_scales(model)",
            StaleScaleWarning,
        )


def warn_stale_scales(model: nn.Module) -> list[str]:
    """Warn of learned scales at zero, and in one line of weights that no longer have the range of their scales.

    A layer is named where the largest magnitude of one of its groups is now smaller or larger by more than 10 %, or the
    groups are others. Weights sharded over processes are not looked at, because that takes all processes, nor are those
    that have no values here.

    Returns:
        The paths of the quantizers, for `note_weights` of what loads the model.
    """
    warn_vanished(model)
    found = []
    for name, weight in scaled_weights(model).items():
        quantizer = weight.quantizer
        if quantizer.fitted_to is None or (weight.computed_by_hook and not _weight_hooks(weight)):
            continue
        tensor = fresh_weight(weight, name)
        if not is_sharded(tensor) and not tensor.is_meta and is_stale(quantizer, tensor):
            quantizer.seen = mark(tensor)  # the next call need not say it again
            found.append(name)
    stale = list(dict.fromkeys(module_name(layer_of(name)) for name in found))
    if stale:
        weights = "the weight of 1 layer" if len(stale) == 1 else f"the weights of {len(stale)} layers"
        all_in_layers = all(name.endswith("_weight_quantizer") for name in found)
        cure = (
            "model, batches)" if not all_in_layers else 'model, pattern="*_weight_quantizer"), which needs no batches'
        )
        warn_user(
            f"{weights} changed by more than 10 % or in shape since the scales were set: {listed(stale, _NAMED)}. Set "
            f"them anew by fakequant.calibrate({cure}",
            StaleScaleWarning,
        )
    return found


def give_range(weight: Product, range: Range, method: str | None = None) -> None:
    """Set the range of a weight's quantizer. A weight that is zero as a whole gets none: its scale follows it.

    By a fixed scale training cannot move what is zero. Channels and groups of zeros have the range of the others, see
    `lend`: the row of a table for padding, pruned channels, a part that starts at zero.

    Args:
        weight: with a quantizer.
        range: of the groups.
        method: by which the range was found, see `is_searched`.
    """
    quantizer = weight.quantizer
    if quantizer.learned is None and range.amax.numel() and not bool(range.amax.any()):
        quantizer.reset()
        quantizer.follows = True
    elif is_searched(quantizer.spec, method):
        quantizer.set_qparams(nearest_params(whole(weight.tensor), quantizer.spec))
    elif quantizer.spec.needs_values:
        quantizer.reset()
        quantizer.freeze(weight.tensor)
    else:
        quantizer.set_range(range)


def is_searched(spec: QuantSpec, method: str | None) -> bool:
    """Whether a weight calibrated by a method, None for the default, gets `nearest_params` in place of a range's.

    >>> is_searched(QuantSpec.parse("int2"), None), is_searched(QuantSpec.parse("int4"), None)
    (True, False)
    """
    divides = spec.arithmetic is not Arithmetic.MULTIPLIER
    few = spec.is_plain and spec.symmetric and divides and spec.format.bits < _FEW_BITS
    return (searches(spec) or few) and (method is None or find_method(method) == "mse")


def nearest_params(weight: Tensor, spec: QuantSpec) -> QParams:
    """The parameters by `search_params`; groups whose scale is 0 have that of others, see `lend`.

    >>> spec = QuantSpec.parse("int8 per_block(-1:2) scale=float16")
    >>> nearest_params(torch.tensor([[127.0, 1.0, 0.0, 0.0]]), spec).scale
    tensor([[1., 1.]])
    """
    scale, offset = search_params(weight, spec)[:2]
    lo, hi = lend(Range(scale.clamp(max=0.0), scale.clamp(min=0.0)), spec)
    return QParams(torch.where(-lo > hi, lo, hi), offset)


def warn_of_zeros(model: nn.Module, names: Container[str]) -> None:
    """Say, in one line, which weights are zero, so that their scales follow them.

    Args:
        model: with ranges.
        names: the paths of the quantizers to look at.
    """
    weights = {name: weight.quantizer for name, weight in quantized_weights(model).items() if name in names}
    waiting = {n: q for n, q in weights.items() if not q.dynamic and not q.calibrated}
    if zeros := list(dict.fromkeys(module_name(layer_of(name)) for name in waiting)):
        warn_user(
            "weights that are zero get no range; their scales follow them at each call: "
            f"{listed(zeros, _NAMED)}. Once training has moved them, "
            'fakequant.calibrate(model, pattern="*_weight_quantizer") fixes their scales',
            CalibrationWarning,
        )
