"""The weights of quantized layers: their values in the next call, scales that no longer fit them, and their bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fakequant.calibration.calibrator import find_method
from fakequant.calibration.lattice import search_params, searches
from fakequant.data.arguments import Metric, check_model, measured
from fakequant.distributed import gathered, is_sharded
from fakequant.errors import CalibrationError, CalibrationWarning, StaleScaleWarning, warn_user
from fakequant.functional import choose_qparams
from fakequant.memory import fetched
from fakequant.nn.paths import join, layer_of
from fakequant.nn.products import Product
from fakequant.nn.quantized.layers import QuantizedLayer, has_statistics, is_norm
from fakequant.nn.quantizer import Kind, Mode, Quantizer, magnitudes, quantizers, weight_version
from fakequant.nn.sites import site_products
from fakequant.nn.wrappers import Role, cached_weights
from fakequant.numerics.granularity import PerTensor, blocked, blocked_groups, unblocked
from fakequant.numerics.qparams import QParams, Range, fill_empty_groups
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library
from fakequant.restore import attributes_of, restore_after
from fakequant.text import listed, module_name

_KEPT = "mode", "last_weight"
"""The attributes of a quantizer that contexts restore: its mode, and the version of the weight of its last call."""


@contextmanager
def modes(model: nn.Module, choose: Callable[[str, Quantizer], Mode]) -> Iterator[None]:
    """A context in which each quantizer has the mode that `choose` returns for its name and the quantizer."""
    found = quantizers(model)
    with restore_after(attributes_of(found.values(), *_KEPT)):
        for name, quantizer in found.items():
            quantizer.mode = choose(name, quantizer)
        yield


def disabled(model: nn.Module) -> Any:
    """A context in which all quantizers are off: the model computes in float.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> with disabled(model):
    ...     y = model(torch.ones(1, 4))
    """
    check_model(model, "disabled", "with disabled(model):")
    return off(quantizers(model).values())


@contextmanager
def off(found: Collection[Quantizer]) -> Iterator[None]:
    """A context in which the quantizers `found` are off; faster than `disabled`, which searches the model each time."""
    with restore_after(attributes_of(found, *_KEPT)):
        for quantizer in found:
            quantizer.mode = Mode.OFF
        yield


_EAGER: dict[object, Any] = {}
"""For each running `not_compiled`, torch's stance before the first of them began: all threads share the stance."""
_EAGER_LOCK = RLock()  # one that an interrupted thread may take again


@contextmanager
def not_compiled() -> Iterator[None]:
    """A context in which models run without torch.compile.

    A compiled graph calls no new hooks. `torch.cond`, loops, `torch.map` and `flex_attention` compile the functions
    that they get, and fail with hooks and calibrators. Torch's compiler is imported before the context starts (2 s),
    because otherwise `torch.cond` and the others would import it inside the context. Contexts of several threads may
    overlap.
    """
    from torch._dynamo import eval_frame

    def restore() -> None:
        with _EAGER_LOCK:
            before = _EAGER.get(this)
            if before is not None and len(_EAGER) == 1:
                eval_frame._set_stance(before)
            _EAGER.pop(this, None)

    this = object()
    with restore_after(restore):
        with _EAGER_LOCK:
            _EAGER[this] = next(iter(_EAGER.values()), eval_frame._stance)
            torch.compiler.set_stance("force_eager")
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context for runs of a model without torch.compile, in eval mode; each module's mode is restored."""
    with not_compiled(), in_eval_mode(model):
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """A context in which products of float32 have 24 bits, even if the user allowed TF32, which has 11 bits.

    Checks that a function stays the same need all 24 bits, and so do the sums and solutions of `improve`.
    """
    of_torch: Any = torch.backends
    kinds = (of_torch.cuda.matmul, of_torch.cudnn.conv, of_torch.cudnn.rnn)
    kinds += (of_torch.mkldnn.matmul, of_torch.mkldnn.conv, of_torch.mkldnn.rnn)
    with restore_after(attributes_of(kinds, "fp32_precision")):
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield


def score_of(metric: Metric, model: nn.Module) -> float:
    """The value of a metric for a model in eval mode, without gradients, with each weight quantized once."""
    with evaluating(model), cached_weights(model), torch.no_grad():
        return measured(metric, model)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """A context in which every module is in eval mode; each module's mode is restored."""
    with restore_after(attributes_of(model.modules(), "training")):
        model.eval()
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """A context in which modules are in training mode, except batch and instance normalisations; modes are restored.

    In training mode batch normalisations would raise an error for a single sample, which may have no variance.
    """
    with restore_after(attributes_of(model.modules(), "training")):
        model.train()
        for module in model.modules():
            if has_statistics(module):
                module.training = False
        yield


_WEIGHT_HOOKS = (BasePruningMethod, SpectralNorm, WeightNorm)
_NAMED = 8
_FEW_BITS = 4
"""Below this number of bits, scales by the largest magnitude are poor. In a trained CNN, the error by these scales is
0.9 to 7.3 of the weights' energy (1 bit; zeros have 1), 0.21 to 0.70 (2 bits) and 0.02 to 0.11 (3 bits); the error by
the best scales is 0.25 to 0.37, 0.08 to 0.16 and 0.01 to 0.05."""


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """A module's own parameters that could be quantized: floats with two axes longer than 1; [] for a normalisation."""
    if is_norm(module) or isinstance(module, Quantizer):
        return []
    made = (p for p in module.parameters(recurse=False) if not isinstance(p, UninitializedParameter))
    return [p for p in made if p.is_floating_point() and sum(size > 1 for size in p.shape) >= 2]


def quantized_weights(model: nn.Module) -> dict[str, Product]:
    """For the path of each weight's quantizer: the weight, of a layer or of a call of a function."""
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

    `weight_norm`, `spectral_norm` and `prune` of torch.nn.utils compute the weight by a hook when the layer is called.
    Before the call, the layer has the weight of its last call, or after `load_state_dict` an outdated weight.

    Raises:
        CalibrationError: code other than these hooks computes the weight in the layer's call.
    """
    hooks = _weight_hooks(weight)
    if weight.computed_by_hook and not hooks:
        path = layer_of(name)
        raise CalibrationError(
            f"the weight of {module_name(path)} is computed when the layer is called, but no batch called the layer; "
            "pass batches that reach the layer"
        )
    with in_eval_mode(weight.owner), torch.no_grad():  # spectral_norm changes its vectors in training mode
        for hook in hooks:
            hook(weight.owner, None)
        return weight.tensor


def _weight_hooks(weight: Product) -> list[Any]:
    return [hook for hook in weight.owner._forward_pre_hooks.values() if isinstance(hook, _WEIGHT_HOOKS)]


def scaled_weights(model: nn.Module) -> dict[str, Product]:
    """For the path of each weight's quantizer that has scales: the weight, of a layer or of a call of a function."""
    return {name: weight for name, weight in quantized_weights(model).items() if weight.quantizer.calibrated}


def mark_range_current(weight: Product) -> None:
    """Record that the scales of a weight's quantizer fit the present weight; remove fixed codes with other values."""
    quantizer = weight.quantizer
    if quantizer is None or not quantizer.calibrated:
        return
    with in_eval_mode(weight.owner), torch.no_grad():
        tensor = weight.tensor
    if not is_sharded(tensor):
        if weight.parameter is not None:
            quantizer.give_values(weight.parameter)
        quantizer.range_of_weight, quantizer.last_weight = magnitudes(quantizer.spec, tensor), None
        if quantizer.fixed_codes is not None and not quantizer.holds(tensor):
            quantizer.release_codes()


def mark_ranges_current(model: nn.Module, stale: Iterable[str] = ()) -> None:
    """Call `mark_range_current` for all weights whose quantizer has scales, for example after a checkpoint was loaded.

    Args:
        stale: the paths of the quantizers whose scales do not fit, according to a file.
    """
    weights = scaled_weights(model)
    for weight in weights.values():
        mark_range_current(weight)
    for name in weights.keys() & set(stale):
        quantizer = weights[name].quantizer
        quantizer.range_of_weight = (
            None if quantizer.range_of_weight is None else torch.zeros_like(quantizer.range_of_weight)
        )


def give_values(model: nn.Module) -> None:
    """Before a model is written, set weights whose codes stay fixed in training to the values of the codes."""
    for weight in quantized_weights(model).values():
        if weight.quantizer.keeps_codes:
            mark_range_current(weight)


@torch.no_grad()
def warn_vanished(model: nn.Module) -> None:
    """Warn of learned scales that training drove to zero or below: all values then have the largest codes."""
    found = {path: own.learned.vanished() for path, own in quantizers(model).items() if own.learned is not None}
    found = {path: (count, total) for path, (count, total) in found.items() if count}
    if found:
        counts = ", ".join(f"{count} of {total} in {path}" for path, (count, total) in [*found.items()][:3])
        more = f" and {len(found) - 3} more quantizers" if len(found) > 3 else ""
        warn_user(
            f"training drove learned scales to zero: {counts}{more}; the values of their tensors are lost. Train with "
            "a lower learning rate, or use a lower one for scales: Options(scale_lr=0.1), or in your own loop a group "
            "of the optimizer with fakequant.qat.learned_scales(model)",
            StaleScaleWarning,
        )


def warn_stale_scales(model: nn.Module) -> list[str]:
    """Warn of learned scales at zero, and in one line of weights that no longer fit their scales.

    A weight is named if the largest magnitude of one of its groups has changed by more than 10 %, or if it has other
    groups. Weights that are sharded over processes are not checked, because that would need all processes, and neither
    are weights without values in this process.

    Returns:
        The paths of the quantizers of the named weights, for `mark_ranges_current` when the model is loaded.
    """
    warn_vanished(model)
    found = []
    for name, weight in scaled_weights(model).items():
        quantizer = weight.quantizer
        if quantizer.range_of_weight is None or (weight.computed_by_hook and not _weight_hooks(weight)):
            continue
        tensor = fresh_weight(weight, name)
        if not is_sharded(tensor) and not tensor.is_meta and quantizer.is_stale(tensor):
            quantizer.last_weight = weight_version(tensor)  # the next call need not say it again
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
            f"the scales anew by fakequant.calibrate({cure}",
            StaleScaleWarning,
        )
    return found


def give_range(weight: Product, range: Range, method: str | None = None) -> None:
    """Set the range of a weight's quantizer.

    If all values of the weight are 0, no range is set: the scale is computed in each call, so that it fits the values
    that training will give the weight. If only some channels or groups are 0, such as the padding row of a table or
    pruned channels, these get the range of the others, see `fill_empty_groups`.

    Args:
        method: the method that computed the range, see `is_searched`.
    """
    quantizer = weight.quantizer
    if quantizer.learned is None and range.amax.numel() and not bool(range.amax.any()):
        quantizer.reset()
        quantizer.is_zero_weight = True
    elif is_searched(quantizer.spec, method):
        quantizer.set_qparams(nearest_params(gathered(weight.tensor), quantizer.spec))
    elif quantizer.spec.needs_values:
        quantizer.reset()
        quantizer.freeze(weight.tensor)
    else:
        quantizer.set_range(range)


def is_searched(spec: QuantSpec, method: str | None) -> bool:
    """Whether a calibration by `method` (None: the default) searches a weight's scales, instead of using its range.

    >>> is_searched(QuantSpec.parse("int2"), None), is_searched(QuantSpec.parse("int4"), None)
    (True, False)
    """
    divides = spec.arithmetic is not Arithmetic.MULTIPLIER
    few = spec.is_plain and spec.symmetric and divides and spec.format.bits < _FEW_BITS
    return (searches(spec) or few) and (method is None or find_method(method) == "mse")


def nearest_params(weight: Tensor, spec: QuantSpec) -> QParams:
    """The scales and offsets with the least squared error; groups of zeros get the scale of other groups.

    >>> spec = QuantSpec.parse("int8 per_block(-1:2) scale=float16")
    >>> nearest_params(torch.tensor([[127.0, 1.0, 0.0, 0.0]]), spec).scale
    tensor([[1., 1.]])
    """
    scale, offset = search_params(weight, spec)[:2]
    lo, hi = fill_empty_groups(Range(scale.clamp(max=0.0), scale.clamp(min=0.0)), spec)
    return QParams(torch.where(-lo > hi, lo, hi), offset)


def warn_of_zeros(model: nn.Module, names: Container[str]) -> None:
    """Warn, in one line, of weights of zeros, whose scales are computed in each call."""
    weights = {name: weight.quantizer for name, weight in quantized_weights(model).items() if name in names}
    waiting = {n: q for n, q in weights.items() if not q.dynamic and not q.calibrated}
    if zeros := list(dict.fromkeys(module_name(layer_of(name)) for name in waiting)):
        warn_user(
            "weights that are zero get no range; their scales are computed in each call: "
            f"{listed(zeros, _NAMED)}. Once training has moved the weights, "
            'fakequant.calibrate(model, pattern="*_weight_quantizer") fixes their scales',
            CalibrationWarning,
        )


_BIAS = 2.0**30
"""The largest bias in steps of input scale times weight scale. As much of int32 remains for the sum of products:
66,000 products of 127 * 127."""
_SPAN = 2.0**-40
"""The smallest scale of a weight as a share of the largest, so that products with input scales are normal numbers."""


@torch.no_grad()
def raise_scales(model: nn.Module) -> list[str]:
    """Enlarge weight scales so small that an engine's int32 bias, bias / (input scale * weight scale), overflows.

    The products of a channel with so small a scale are tiny beside its bias, as after a vanishing batch normalisation:
    their change is below the precision of float32 in the sum with the bias. A scale computed at each call becomes
    fixed.

    Returns:
        The paths of the quantizers that got other scales.
    """
    raised = []
    for path, weight in quantized_weights(model).items():
        layer = weight.layer
        operands = layer.operands(layer) if isinstance(layer, QuantizedLayer) else {}
        named = [(name, q) for name, q in layer.named_children() if isinstance(q, Quantizer) and q.kind is Kind.INPUT]
        used = [q for name, q in named if name not in operands or operands[name].role is Role.INPUT]
        ready = [q for q in used if q.calibrated and not q.dynamic and q.mode is Mode.QUANTIZE]
        scales = [q.scale if q.learned is None else q.learned.qparams(1).scale for q in ready]
        quantizer, inputs = weight.quantizer, [scale for scale in scales if scale is not None]
        plain = quantizer.spec.format.has_zero_point and quantizer.spec.arithmetic.is_linear
        plain = plain and not quantizer.spec.scale.is_exact
        if not inputs or not plain or quantizer.mode is not Mode.QUANTIZE:
            continue
        try:
            tensor = fresh_weight(weight, path)
        except CalibrationError:  # no call has shown it
            continue
        if is_sharded(tensor) or tensor.is_meta:
            continue
        params = quantizer.qparams(tensor)
        # What may be added to the products: smaller parameters of the owner, and a computed bias.
        owner, bias = weight.owner, getattr(weight.owner, "bias", None)
        added: dict[str, Tensor] = {
            name: p for name, p in owner.named_parameters(recurse=False) if p.dim() < tensor.dim()
        }
        if isinstance(bias, Tensor) and all(bias is not p for p in added.values()):
            added["bias"] = bias
        floor = torch.zeros_like(params.scale)
        for name, bias in added.items():
            size = fetched(owner, name, bias).detach().abs().to(floor.dtype)
            alone = size.numel() == floor.numel() == max(floor.shape, default=1)  # a bias for each group
            floor = floor + (size.reshape(floor.shape) if alone else size.max())
        smallest = min(float(scale.min()) for scale in inputs)
        floor = torch.maximum(floor / (smallest * _BIAS), params.scale.max() * _SPAN)
        zero = library.measure(tensor, quantizer.spec.granularity).amax == 0
        low = params.scale < floor
        if bool((low & ~zero if quantizer.scales_each_call else low).any()):
            # To at least the floor, those of zeros to the largest; chosen codes stay codes.
            before = quantizer.encoded(tensor) if weight.has_fixed_codes else None
            if quantizer.scales_each_call:
                quantizer.dynamic = False
                quantizer.freeze(tensor)
            params = quantizer.qparams(tensor)
            scale = torch.maximum(params.scale, floor)
            scale = torch.where(zero & (params.scale < floor), scale.max(), scale)
            quantizer.set_qparams(QParams(scale, params.zero_point))
            if before is not None:
                spec = quantizer.spec.replace(rounding=Rounding.NEAREST_EVEN)
                after = library.encode(tensor, quantizer.qparams(tensor), spec)
                assert after is not None, "values of codes are not NaN"
                blocks = quantizer.spec.granularity.block_shape(tensor.shape)
                stays = blocked_groups(scale == params.scale, tensor.shape, blocks)
                stays = stays.expand(blocked(before[0], blocks).shape)
                weight.fix_codes(torch.where(unblocked(stays, tensor.shape, blocks), before[0], after))
            mark_range_current(weight)
            raised.append(path)
    return raised


def warn_raised(paths: list[str]) -> None:
    """Warn, in one line, of weights whose scales were enlarged for an export."""
    if paths:
        warn_user(
            f"the scales of {len(paths)} weights were enlarged, in the model, too: {', '.join(paths)}. The int32 bias "
            "of an engine would overflow in channels that are nearly zero beside their bias. The results change by "
            "less than the precision of float32; if you saved the model before, save it again",
            StaleScaleWarning,
        )


MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""The names of layers of a module that vLLM 0.32 and SGLang merge into a matrix."""


def tied_weights(model: nn.Module) -> list[dict[str, Product]]:
    """For each quantized parameter that several layers share: a dict from the paths of its quantizers to its products.

    >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False), nn.Linear(4, 4))
    >>> model[1].weight = model[0].weight
    >>> [list(weights) for weights in tied_weights(prepare(model, "int8"))]
    [['0._weight_quantizer', '1._weight_quantizer']]
    """
    groups: dict[nn.Parameter, dict[str, Product]] = {}
    for path, weight in quantized_weights(model).items():
        if (parameter := weight.parameter) is not None:
            groups.setdefault(parameter, {})[path] = weight
    return [weights for weights in groups.values() if len(weights) > 1]


def merged_layers(widths: Mapping[str, int]) -> list[list[str]]:
    """The groups of layers in `widths` that engines merge into one matrix.

    Args:
        widths: for the path of each layer, the number of its inputs. Layers of different widths read different tensors,
            like the "key" and the "value" of RWKV's feed-forward, and no engine merges such layers.

    >>> merged_layers({"0.q_proj": 8, "0.k_proj": 8, "0.v_proj": 8, "0.o_proj": 8, "1.q_proj": 8})
    [['0.q_proj', '0.k_proj', '0.v_proj']]
    >>> merged_layers({"0.q_proj": 8, "0.k_proj": 16, "0.v_proj": 16})
    [['0.k_proj', '0.v_proj']]
    """
    parents = dict.fromkeys(path.rpartition(".")[0] for path in widths)
    groups = ([join(parent, name) for name in names] for parent in parents for names in MERGED)
    alike = (
        [path for path in group if widths.get(path) == width]
        for group in groups
        for width in dict.fromkeys(widths[path] for path in group if path in widths)
    )
    return [group for group in alike if len(group) > 1]


EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def group_ranges(model: nn.Module) -> None:
    """Mark the per-tensor quantizers that must share a range: weights of merged layers, and inputs of experts.

    The inputs of other merged layers need no mark: these layers read the same tensor.
    """
    groups: dict[str, list[Quantizer]] = {}
    weights = quantized_weights(model)
    for path, quantizer in quantizers(model).items():
        layer, _, attribute = path.rpartition(".")
        is_input = quantizer.kind is Kind.INPUT
        place = EXPERT.sub(r"\1experts.*.", layer) if is_input else layer
        has_one = not quantizer.dynamic and isinstance(quantizer.spec.granularity, PerTensor)
        if (has_one or quantizer.fixes_global) and (place != layer or not is_input):
            parent, _, name = place.rpartition(".")
            merged = next((names for names in MERGED if name in names), (name,))
            width = "" if is_input or path not in weights else f" of {weights[path].tensor.shape[-1]} inputs"
            group = f"{join(parent, '|'.join(merged))}.{attribute} {quantizer.spec}{width}"
            groups.setdefault(group, []).append(quantizer)
    for group, own in groups.items():
        for quantizer in own if len(own) > 1 else ():
            quantizer.range_group = group


def tie_scales(model: nn.Module, names: Container[str]) -> None:
    """Give weights that engines merge the same per-tensor scale, which multiplies their block scales as in NVFP4.

    The scale is computed from the largest magnitude of all merged weights. Weights with fixed codes are not changed.

    Args:
        names: the paths of the quantizers that get scales.
    """
    weights = {
        layer_of(path): weight
        for path, weight in quantized_weights(model).items()
        if path in names and weight.quantizer.spec.scale.is_under_a_tensor and not weight.has_fixed_codes
    }
    widths = {path: weight.tensor.shape[-1] for path, weight in weights.items()}
    for group in merged_layers(widths):
        tied = [weights[path] for path in group]
        spec, tensors = tied[0].quantizer.spec, [weight.tensor.detach() for weight in tied]
        if any(weight.quantizer.spec != spec or weight.quantizer.learned for weight in tied):
            continue
        if any(is_sharded(x) or spec.granularity.block_shape(x.shape)[0] != 1 or not bool(x.any()) for x in tensors):
            continue
        scales = choose_qparams(torch.cat(tensors), spec).scale.split([len(x) for x in tensors])
        for weight, scale in zip(tied, scales, strict=True):
            weight.quantizer.set_qparams(QParams(scale))
            mark_range_current(weight)


def share_learned(model: nn.Module, *_: object) -> None:
    """Let the quantizers of a shared weight learn a single range if their ranges, and so the codes, are equal.

    This is also a hook after `load_state_dict`, which may make a learned range for each quantizer in the state.
    """
    for weights in tied_weights(model):
        first = next(iter(weights.values())).quantizer
        for weight in weights.values():
            own = weight.quantizer
            if first.learned is None or own.learned in (None, first.learned) or own.trained_spec != first.trained_spec:
                continue
            held, others = first.learned.state_dict(), own.learned.state_dict()
            if held.keys() == others.keys() and all(torch.equal(held[name], others[name]) for name in held):
                own.add_module(first.learned.method, first.learned)


def share_after_loading(model: nn.Module) -> None:
    """Let `load_state_dict` of a prepared model end with `share_learned`."""
    if share_learned not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(share_learned)


def untied(model: nn.Module, purposely: set[nn.Module]) -> str | None:
    """A line on weights that layers share but quantize in different ways; None if there are none.

    Args:
        purposely: the modules that a rule leaves in float.
    """
    said = []
    for weights in tied_weights(model):
        specs = {(weight.quantizer.spec, weight.quantizer.dynamic) for weight in weights.values()}
        if len(specs) > 1:
            named = " and ".join(f"{layer_of(path)} as {weight.quantizer.spec}" for path, weight in weights.items())
            said.append(f"{named} (give both layers one rule)")
    quantized = {weight.parameter: layer_of(path) for path, weight in quantized_weights(model).items()}
    layers = {weight.owner for weight in quantized_weights(model).values()}
    for path, module in model.named_modules():
        if module not in layers and module not in purposely:
            said += [
                f"{quantized[parameter]}, and {module_name(path)} ({type(module).__name__}) uses it in float"
                for parameter in weights_of(module)
                if parameter in quantized
            ]
    if not said:
        return None
    return f"layers share a weight and do not have the same codes of it: {'; '.join(said)}"


_NAMED_WIDE = 3
_MORE = 1.05
"""A note is given if the bits per weight exceed the bits of the narrowest codes by more than this number: a float32
scale for 32 codes takes 1."""


class WeightBits(NamedTuple):
    """The bits of one quantized weight, or of several together."""

    elements: int
    codes: int
    scales: int
    """The bits of scales, of second-level scales, and of zero points."""

    @property
    def per_weight(self) -> float:
        """The bits per weight with scales; 0.0 without weights."""
        return (self.codes + self.scales) / self.elements if self.elements else 0.0

    def plus(self, other: WeightBits) -> WeightBits:
        """The bits of the weights of both objects together."""
        return WeightBits(self.elements + other.elements, self.codes + other.codes, self.scales + other.scales)


def bits_of_all(sizes: Iterable[WeightBits]) -> WeightBits:
    """The bits of several weights."""
    total = WeightBits(0, 0, 0)
    for own in sizes:
        total = total.plus(own)
    return total


def spec_bits(spec: QuantSpec, shape: tuple[int, ...]) -> WeightBits:
    """The bits that a specification takes for a tensor of a shape.

    >>> spec_bits(QuantSpec.parse("int4 per_block(-1:32)"), (64, 256)).per_weight  # a float32 scale for every 32 codes
    5.0
    """
    elements, groups = prod(shape), spec.granularity.group_shape(shape)
    scales = spec.scale.bits(groups)
    if spec.offset is not None:
        scales += spec.offset.bits(groups)
    elif not spec.symmetric:
        scales += prod(groups) * spec.format.bits
    return WeightBits(elements, elements * spec.format.bits, scales)


def exceeds_float(spec: QuantSpec, shape: tuple[int, ...], bits: int = 32) -> bool:
    """Whether codes and scales of a tensor take more room than its floats.

    >>> exceeds_float(QuantSpec.parse("int4 per_channel(0)"), (64, 1))
    True
    """
    found = spec_bits(spec, shape)
    return found.codes + found.scales > found.elements * bits


_ONE_SCALE = "Rule(name, weight='int8') gives a layer one scale for all of its weights"


def note_on_scales(model: nn.Module, too_small: Sequence[str], *, by_name: bool) -> list[str]:
    """Lines for a warning on weights that, with their scales, take many more bits than the preset's name says.

    Args:
        too_small: layers whose weights stay in float because of their scales.
        by_name: whether the user gave the name of a preset, and no other rules.
    """
    found: dict[nn.Parameter, tuple[str, WeightBits]] = {}
    for path, weight in quantized_weights(model).items():
        alone = all(own.kind is Kind.WEIGHT for own in weight.layer.children() if isinstance(own, Quantizer))
        if alone and weight.parameter is not None and (bits := weight_bits(weight)) is not None:
            found[weight.parameter] = layer_of(path), bits
    notes = []
    if too_small:
        shown = listed([module_name(path) for path in too_small], _NAMED_WIDE)
        notes.append(
            f"weights stay in float where their scales would take more room than floats: {shown}; {_ONE_SCALE}"
        )
    weights = dict(found.values())
    total = bits_of_all(weights.values())
    bits = f"{total.per_weight:.2f} bits per weight with scales"
    narrowest = min((own.codes / own.elements for own in weights.values()), default=0.0)
    wide = sorted(
        (path for path, own in weights.items() if own.codes > narrowest * own.elements),
        key=lambda path: -weights[path].codes,
    )
    if by_name and wide and total.per_weight > narrowest + _MORE:
        shown = listed([f"{module_name(path)} ({weights[path].per_weight:.2f} bits)" for path in wide], _NAMED_WIDE)
        notes.append(
            f"{bits}, because {shown} {'has' if len(wide) == 1 else 'have'} more than {narrowest:g}-bit codes; "
            "rules={name: preset} gives them another preset"
        )
    if total.scales > total.elements:  # more than one bit for each weight
        large = [path for path, own in weights.items() if own.scales > own.elements]
        large.sort(key=lambda path: weights[path].elements - weights[path].scales)
        shown = listed([f"{module_name(path)} ({weights[path].per_weight:.2f} bits)" for path in large], _NAMED_WIDE)
        is_coarse = any(weights[path].codes < 8 * weights[path].elements for path in large)
        cure = "rules={name: 'int8_weight_only'} gives them finer codes"
        notes.append(
            f"{bits}, where the codes have {total.codes / total.elements:.2f}; the scales of {shown} take most of "
            f"them. skip=[...] leaves such layers in float, {cure if is_coarse else _ONE_SCALE}"
        )
    return notes


def weight_bits(weight: Product) -> WeightBits | None:
    """The bits of a weight as codes and scales; None if the weight is computed, or has no quantizer."""
    if weight.quantizer is None or weight.parameter is None:
        return None
    return spec_bits(weight.quantizer.spec, tuple(weight.parameter.shape))
