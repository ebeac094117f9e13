"""Scales and zero points of a checkpoint: checked as those of a call are, before a model takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from fakequant.errors import CheckpointError, QParamsError, ShapeError
from fakequant.model.modes import in_eval_mode
from fakequant.model.sites.planned import site_path
from fakequant.model.state.placing import own_part
from fakequant.model.state.plan import Plan, QuantizerEntry, SiteQuantizerEntry
from fakequant.nn.paths import join
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.ranges.fixed_codes import KEY
from fakequant.nn.ranges.global_scale import KEY as GLOBAL_SCALE
from fakequant.nn.ranges.global_scale import check_global_scale
from fakequant.nn.ranges.learned import LearnedRange
from fakequant.numerics.arguments import check_scale
from fakequant.numerics.formats.codes import check_codes, integers_of, of_integers
from fakequant.numerics.spec import QuantSpec


def weight_places(modules: Mapping[str, nn.Module], plan: Plan) -> dict[str, str]:
    """Where a model holds the weights of a plan's quantizers, by the paths of these.

    Args:
        modules: of the float model, or of the quantized one, by path.
        plan: whose layers and sites the model has.
    """
    found: dict[str, str] = {}
    for path, layer in plan.layers.items():
        module = modules[path]
        form = type(module) if isinstance(module, QuantizedLayer) else quantized_class(module)
        operands = {} if form is None else form.operands(module)
        found |= {join(path, name): join(path, operands[name].weight) for name in layer.quantizers if name in operands}
    for path, owner in plan.sites.owners.items():
        for key, site in owner.sites.items():
            found |= {f"{site_path(path, key)}.{name}": join(path, place) for name, place in site.weights.items()}
    return {quantizer: place for quantizer, place in found.items() if not place.endswith(".") and place}


def check_ranges(modules: Mapping[str, nn.Module], plan: Plan, tensors: Mapping[str, Tensor], wide: bool) -> None:
    """Check what a state holds for quantizers.

    Args:
        modules: of the model by path.
        plan: of the state.
        tensors: of the state; a weight that it has as codes may be any tensor of its shape.
        wide: whether the model computes in float64.

    Raises:
        CheckpointError: a tensor that no call would take, that does not fit the layer's weight, or that belongs to
            nothing.
    """
    by_quantizer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        for prefix in _prefixes(key):
            by_quantizer.setdefault(prefix, {})[key[len(prefix) + 1 :]] = tensor
    places = weight_places(modules, plan)
    for path, _, entry in plan.quantizers():
        weight = None
        if (place := places.get(path)) is not None:
            # Its own weight, because a model of other shapes is another architecture, which torch says better.
            weight = tensors.get(place)
            if weight is None:
                weight = _computed(modules, place)
        # A function may compute in float64 whatever the parameters are.
        held = {key: one if key == KEY else own_part(one) for key, one in by_quantizer.get(path, {}).items()}
        _check_named(path, entry, held, weight, wide or isinstance(entry, SiteQuantizerEntry))


def _computed(modules: Mapping[str, nn.Module], place: str) -> object:
    """A weight that a parametrization computes; a spectral norm makes a step when it is read in training."""
    path, _, name = place.rpartition(".")
    if (owner := modules.get(path)) is None:
        return None
    with in_eval_mode(owner):
        return getattr(owner, name, None)


def _check_named(path: str, entry: QuantizerEntry, held: Mapping[str, Tensor], weight: object, wide: bool) -> None:
    try:
        _check_quantizer(entry, held, weight, wide)
    except (QParamsError, ShapeError) as error:
        raise CheckpointError(
            f"the checkpoint's quantizer {path} cannot be used: {error}. The state is damaged, or no snapshot of a "
            "model"
        ) from error


def is_wide(model: nn.Module) -> bool:
    """Whether a model computes in float64, as far as its tensors tell."""
    dtypes = {t.dtype for t in chain(model.parameters(), model.buffers()) if t.is_floating_point()}
    return not dtypes or torch.float64 in dtypes


def _prefixes(key: str) -> list[str]:
    """The paths of the modules that hold a tensor of a state dict, from the outermost."""
    words = key.split(".")
    return [".".join(words[:end]) for end in range(1, len(words))]


def _check_quantizer(entry: QuantizerEntry, held: Mapping[str, Tensor], weight: object, wide: bool) -> None:
    spec, learned = entry.tensor.spec, entry.make_learned()
    if (codes := held.get(KEY)) is not None:
        _check_codes(spec, codes, weight)
        held = {key: value for key, value in held.items() if key != KEY}
    if learned is not None:
        _check_learned(spec, learned, held, weight, wide)
        return
    if (global_scale := held.get(GLOBAL_SCALE)) is not None and entry.tensor.dynamic:
        check_global_scale(global_scale, spec)
        held = {key: value for key, value in held.items() if key != GLOBAL_SCALE}
    if unknown := sorted(set(held) - {"scale", "zero_point"}):
        raise QParamsError(f"it holds {', '.join(unknown)}, but learns no range")
    if "scale" in held:
        _check_values(spec, held["scale"], held.get("zero_point"), wide)
        _check_shape(spec, "scale", _of_a_bin(entry, held["scale"]), weight)
    elif "zero_point" in held:
        raise QParamsError("it has a zero point, but no scale")


def _of_a_bin(entry: QuantizerEntry, scale: Tensor) -> Tensor:
    """The scales of a bin, where there are several ranges by a value; else the scales."""
    if entry.by_value is None:
        return scale
    count = len(entry.by_value.boundaries) + 1
    if scale.dim() < 2 or len(scale) != count:
        raise ShapeError(f"scale has shape {list(scale.shape)}, but there are {count} bins of {entry.by_value.by}")
    return scale[0]


def _check_codes(spec: QuantSpec, codes: Tensor, weight: object) -> None:
    expected = integers_of(spec.format)
    if codes.dtype is not expected:
        raise QParamsError(f"{KEY} are {codes.dtype}, but codes of {spec.format} are stored as {expected}")
    try:
        if isinstance(weight, Tensor) and weight.shape != codes.shape:
            raise ShapeError(f"are of shape {list(codes.shape)}, but the weight of shape {list(weight.shape)}")
        part = own_part(codes)
        check_codes(of_integers(part, spec.format), tuple(part.shape), spec.format)
    except (QParamsError, ShapeError) as error:
        raise type(error)(f"{KEY} {error}") from error


def _check_learned(
    spec: QuantSpec, learned: LearnedRange, held: Mapping[str, Tensor], weight: object, wide: bool
) -> None:
    prefix = f"{learned.method}."
    if unknown := sorted(key for key in held if not key.startswith(prefix)):
        raise QParamsError(f"it holds {', '.join(unknown)}, but learns its range by {learned.method!r}")
    # A symmetric specification has no offset: the first name alone is needed.
    for key in learned.names[:1] if spec.symmetric else learned.names:
        if prefix + key not in held:
            raise QParamsError(f"it lacks {key}, which {learned.method!r} learns")
    for key in learned.names:
        if (parameter := held.get(prefix + key)) is not None:
            _check_dtype(key, parameter, wide)
            if not bool(parameter.isfinite().all()):
                raise QParamsError(f"{key} must be finite in every group")
            if learned.by_group:
                _check_shape(spec, key, parameter, weight)
    if (zero_point := held.get(prefix + "zero_point")) is not None:
        _check_zero_point(spec, zero_point)


def _check_values(spec: QuantSpec, scale: Tensor, zero_point: Tensor | None, wide: bool) -> None:
    _check_dtype("scale", scale, wide)
    check_scale(scale, spec.arithmetic, exact=spec.scale.is_exact)
    if zero_point is None:
        if not spec.symmetric:
            raise QParamsError(f"it lacks zero_point, which {spec} needs")
        return
    if zero_point.shape != scale.shape:
        raise ShapeError(f"zero_point has shape {list(zero_point.shape)}, but scale {list(scale.shape)}")
    _check_zero_point(spec, zero_point)


def _check_dtype(name: str, value: Tensor, wide: bool) -> None:
    if value.dtype is torch.float64 and not wide:
        raise QParamsError(
            f"{name} is float64, as of a model that computes in float64; call model.double() before load"
        )
    if value.dtype not in (torch.float32, torch.float64):
        raise QParamsError(f"{name} must be float32, got a tensor of {value.dtype}")


def _check_zero_point(spec: QuantSpec, zero_point: Tensor) -> None:
    if spec.symmetric:
        raise QParamsError(f"it has a zero point, but {spec} is symmetric")
    if zero_point.dtype is torch.bool or zero_point.is_complex():
        raise QParamsError(f"zero_point must be int32, got a tensor of {zero_point.dtype}")
    exact, fmt = zero_point.double(), spec.format
    if spec.offset is not None:
        if not bool(exact.isfinite().all()):
            raise QParamsError(f"zero_point, the offset of {spec}, must be finite in every group")
        return
    good = (exact >= fmt.quant_min) & (exact <= fmt.quant_max) & (exact == exact.round())
    if not bool(good.all()):
        raise QParamsError(
            f"zero_point must be a code of {fmt}, {fmt.quant_min:g} to {fmt.quant_max:g}, in every group, "
            f"got {exact[~good][0].item()}"
        )


def _check_shape(spec: QuantSpec, name: str, value: Tensor, weight: object) -> None:
    """Check a shape where the tensor that it belongs to is known, or cannot exist."""
    if isinstance(weight, Tensor):
        expected = spec.granularity.group_shape(weight.shape)
        if tuple(value.shape) != expected and not value.numel() == 1 == math.prod(expected):
            raise ShapeError(
                f"{name} has shape {list(value.shape)}, but {spec.granularity} on the weight of shape "
                f"{list(weight.shape)} needs {list(expected)}"
            )
    elif spec.granularity.keeps_whole_axes and spec.granularity.group_shape(value.shape) != tuple(value.shape):
        raise ShapeError(f"{name} has shape {list(value.shape)}, which {spec.granularity} gives for no tensor")
