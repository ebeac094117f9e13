"""Scales of channels, moved between layers: into the normalisations before them, or from one layer to the next.

`fold_scales` puts the scales of inputs into normalisations, where they cost no operation at run time. `equalize` gives
channels between two layers similar ranges in the weights of both (arXiv 1906.04721).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_float_model, refuse_unprepared
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.run.outputs import OutputDistance, record
from fakequant.model.run.recorded import Neighbors, Unreached, find_neighbors
from fakequant.model.weights import disabled, evaluating, exact_products
from fakequant.nn.quantized.forms import has_matrix
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import has_no_hooks, quantizers
from fakequant.nn.transforms import ChannelScale
from fakequant.ptq.stream import LayerCall
from fakequant.ptq.weights import shared_parameters
from fakequant.restore import Restore, restore_after, restore_on_error, state_of
from fakequant.text import table

T = TypeVar("T")
R = TypeVar("R")
_TOLERANCE = 1e-5
"""How much an output may change, as a share of its norm; in half precision, by one step of the dtype."""


def tolerance_of(x: Tensor) -> float:
    """The share of a tensor's norm by which rounding may change the tensor."""
    return max(_TOLERANCE, torch.finfo(x.dtype).eps)


class OutputCheck(OutputDistance):
    """The stored outputs of a model, to check that changes of the model keep its output.

    Raises ConfigError if two runs give different outputs, or if an output holds NaN, inf or no floats.
    """

    def __init__(self, model: nn.Module, batches: KeptBatches) -> None:
        with exact_products():
            super().__init__(model, batches)
        self._model = model
        if not self.wanted:
            raise ConfigError(
                "the model returns no floats, so that a change of its weights cannot be checked; return float tensors "
                "in forward="
            )
        if not all(bool(x.isfinite().all()) for x in self.wanted):
            raise ConfigError("an output of the model holds NaN or inf for this batch; pass another batch")
        self._allowed = max(map(tolerance_of, self.wanted))
        if (found := self.difference()) > self._allowed:
            raise ConfigError(
                f"two runs of the model differ by {found:.1e} of the output, so that a change of its weights cannot be "
                "checked; let forward= reset the state that the model keeps outside of its tensors and attributes"
            )

    def run(self) -> Any:
        """The model's output for the first batch."""
        with evaluating(self._model), torch.no_grad():
            return self.batches.run_first(self._model)

    def difference(self) -> float:
        """The largest error of an output: its norm as a share of the output's norm."""
        with exact_products():
            return max(self.of(self._model).shares.values(), default=0.0) ** 0.5

    def keep(
        self, changes: Sequence[T], make: Callable[[Sequence[T]], R], restore: Restore
    ) -> tuple[R, list[tuple[T, str]]]:
        """Make all changes if the output stays; otherwise add them one by one, and keep those that preserve the output.

        Args:
            changes: the changes that are tried.
            make: makes several changes of the unchanged model.
            restore: undoes all changes.

        Returns:
            The result of the last `make`, and each rejected change with the reason.
        """
        made, kept, left = make(changes), list[T](), list[tuple[T, str]]()
        if not changes or self.why_not() is None:
            return made, left
        for change in changes:
            restore()
            make([*kept, change])
            if (why := self.why_not()) is None:
                kept.append(change)
            else:
                left.append((change, why))
        restore()
        return make(kept), left

    def why_not(self) -> str | None:
        """Why the model's present state must be rejected; None if the output is preserved."""
        found = self.difference()
        if found <= self._allowed:
            return None
        half = "; half precision alone may do it: try model.float()" if self._allowed > _TOLERANCE else ""
        return f"the model's output would change by {found:.1e} of its size{half}"


@dataclass(frozen=True)
class FoldedScale:
    """A row of `FoldedScales`: whether the scale of a layer's input was folded.

    Attributes:
        layer: the path of the layer.
        into: the path of the module that got the scale; "" if the layer keeps the scale.
        note: why the layer keeps the scale; "" if the scale was folded.
    """

    layer: str
    into: str = ""
    note: str = ""


@dataclass
class FoldedScales:
    """The result of `fold_scales`; prints as a table."""

    layers: list[FoldedScale] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [["layer", "its scale"]]
        rows += [[of.layer or "(model)", f"stays: {of.note}" if of.note else f"into {of.into}"] for of in self.layers]
        return table(rows)

    __repr__ = __str__  # what notebooks and consoles show


def fold_scales(
    model: nn.Module, batch: Any, *, inputs: Inputs | None = None, forward: Forward | None = None
) -> FoldedScales:
    """Put the channel scales of inputs into the weight and bias of the normalisations before them, in place.

    One run finds which layers read the output of which normalisation, by the identity of tensors; all these layers must
    have the same scale. Another run checks that the float function of the model stays: a layer keeps its scale if
    folding would change the function; a transform that is more than a scale stays. Ranges and codes stay.

    Args:
        model: a prepared model with channel scales, as `fakequant.ptq.improve` chooses them.
        batch: one batch of a data loader.
        inputs, forward: as for `calibrate`.

    Raises:
        ConfigError: the model is in float or sharded, or its output differs in a second run or is not finite.

    The model is unchanged after any error or interrupt.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
    >>> with torch.no_grad():
    ...     model[0].weight[3] *= 100
    ...     model[1].weight[:, 3] /= 100
    >>> batches = [torch.randn(64, 16) for _ in range(4)]
    >>> model = prepare(model, "int8")
    >>> used = calibrate(model, batches, progress=False)
    >>> found = fq.ptq.improve(model, batches, ["smooth"], progress=False)
    >>> print(fold_scales(model, batches[0]))
    layer  its scale
    1      into 0
    """
    refuse_unprepared(model)
    refuse_sharded(model, "fold the scales of inputs in")
    layers, others = dict[nn.Module, str](), list[FoldedScale]()
    for name, module in model.named_modules():
        transform = module.input_transform if isinstance(module, QuantizedLayer) else None
        if isinstance(transform, ChannelScale):
            layers[module] = name
        elif transform is not None:
            others.append(FoldedScale(name, note=f"a normalisation cannot hold a {type(transform).__name__}"))
    if not layers:
        return FoldedScales(others)
    given = Batches([batch], "fold_scales", inputs=inputs, forward=forward)

    def in_float(model: nn.Module, batch: Any) -> Any:
        with disabled(model):
            return given.call(model, batch)

    outputs = OutputCheck(model, Batches([batch], "fold_scales", forward=in_float).kept())
    makers = {  # normalisations in float, of any class, by their factor per channel
        module: name
        for name, module in model.named_modules()
        if (own := module._parameters.get("weight")) is not None
        and own.dim() == 1
        and not isinstance(module, QuantizedLayer)
    }
    recording = record(model, outputs.run)
    found = find_neighbors(model, recording, makers.keys(), layers.keys())
    shared, unreached = shared_parameters(model), Unreached(model, recording)
    groups, notes = list[_Group](), dict[nn.Module, str]()
    for maker, readers in found.readers.items():
        width = cast("ChannelScale", readers[0].input_transform).scale.numel()
        why = _why_scale_stays(maker, readers, found, shared) or unreached.why_not(width)
        if why is None:
            groups.append(_Group(maker, readers))
        else:
            notes |= dict.fromkeys(readers, f"{makers[maker]}: {why}")
    with restore_on_error(state_of([*layers, *makers])):
        forms = _forms(groups, outputs)
        for group in groups:
            if group.maker not in forms:
                notes |= dict.fromkeys(
                    group.layers, f"{makers[group.maker]}: its output is not a multiple of its weight"
                )
        fitting = [group for group in groups if group.maker in forms]

        def put(folded: Sequence[_Group]) -> None:
            for group in folded:
                _put(group, forms[group.maker])

        restore = state_of([module for group in fitting for module in (group.maker, *group.layers)])
        for group, why in outputs.keep(fitting, put, restore)[1]:
            notes |= dict.fromkeys(group.layers, why)
    into = {layer: makers[group.maker] for group in groups for layer in group.layers if layer not in notes}
    for layer in layers:
        if layer not in into:
            why = "no normalisation makes its input" if found.calls[layer] else "this batch does not reach it"
            notes.setdefault(layer, why)
    return FoldedScales([FoldedScale(name, into.get(m, ""), notes.get(m, "")) for m, name in layers.items()] + others)


class _Group(NamedTuple):
    maker: nn.Module
    layers: list[Any]


def _why_scale_stays(
    maker: nn.Module, readers: Sequence[Any], found: Neighbors, shared: set[nn.Parameter]
) -> str | None:
    held = [p for p in maker._parameters.values() if p is not None]
    scales = [reader.input_transform.scale for reader in readers]
    if not shared.isdisjoint(held):
        return "modules share its weight"
    if maker in found.elsewhere:
        return "something else reads its output too"
    if any(found.calls[module] != 1 for module in (maker, *readers)):
        return "it or the layer is called several times"
    if not has_no_hooks(maker):
        return "it has hooks or a forward of its own"
    if any(p.shape != scales[0].shape for p in held):
        return "it has other channels"
    if not all(torch.equal(scale, scales[0]) for scale in scales):
        return "its readers have different scales"
    return None


_Form = Callable[[Tensor, Tensor], Tensor]
_FORMS: tuple[_Form, ...] = (lambda weight, scale: weight * scale, lambda weight, scale: (1 + weight) * scale - 1)
"""Scaled weights of a normalisation that multiplies by its weight, and of one that multiplies by 1 + weight."""


def _forms(groups: Sequence[_Group], outputs: OutputCheck) -> dict[nn.Module, _Form]:
    """For each normalisation whose output can be scaled: the item of `_FORMS` that scales it."""
    calls, hooks, found = dict[nn.Module, tuple[LayerCall, Any]](), list[Any](), dict[nn.Module, _Form]()

    def see(maker: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[maker] = LayerCall(args, kwargs).kept(), output.clone()

    with restore_after(lambda: [hook.remove() for hook in hooks]):
        for group in groups:
            hooks.append(group.maker.register_forward_hook(see, with_kwargs=True))
        outputs.run()
    for group in groups:
        call, output = calls.pop(group.maker)
        scale = group.layers[0].input_transform.scale
        for form in _FORMS:
            back = state_of([group.maker, *group.layers])
            with restore_after(back), evaluating(group.maker), torch.no_grad():
                _put(group, form)
                if _is_scaled(group.maker(*call.args, **call.kwargs), output, scale):
                    found[group.maker] = form
                    break
    return found


def _is_scaled(found: Tensor, before: Tensor, scale: Tensor) -> bool:
    """Whether `found` is `before` with its channels scaled; channels are the last or the second axis."""
    for axis in {before.dim() - 1, 1} & {*range(before.dim())}:
        if before.shape[axis] == len(scale) and found.shape == before.shape:
            wanted = before.double() * scale.double().view(-1, *(1 for _ in before.shape[axis + 1 :]))
            if float((found.double() - wanted).norm()) <= tolerance_of(before) * float(wanted.norm()):
                return True
    return False


def _put(group: _Group, form: _Form) -> None:
    """Move the scale of a group's layers into the normalisation before them, in float64, rounded once."""
    scale = group.layers[0].input_transform.scale.double()
    weight, bias = group.maker._parameters["weight"], group.maker._parameters.get("bias")
    assert weight is not None
    with torch.no_grad():
        weight.copy_(form(weight.double(), scale.to(weight.device)))
        if bias is not None:
            bias.copy_(bias.double() * scale.to(bias.device))
    for layer in group.layers:
        del layer._modules["_input_transform"]


def input_channels(layer: nn.Module) -> int:
    """The number of input channels of a linear layer or a convolution."""
    weight = cast("Tensor", layer._parameters["weight"])
    return weight.shape[1] * _groups(layer)


def along_inputs(weight: Tensor, layer: nn.Module) -> Tensor:
    """A view [groups, out / groups, in / groups, ...] of a weight; the input channels are axes 0 and 2."""
    return weight.unflatten(0, (_groups(layer), -1))


def of_inputs(factor: Tensor, layer: nn.Module) -> Tensor:
    """A factor for each input channel, in a shape that broadcasts with the result of `along_inputs`."""
    weight = cast("Tensor", layer._parameters["weight"])
    return factor.view(_groups(layer), 1, -1, *(1 for _ in weight.shape[2:]))


def _groups(layer: nn.Module) -> int:
    return cast("int", getattr(layer, "groups", 1))


_ROUNDS, _SETTLED = 20, 0.05
"""Pairs take turns, as a scale changes the next pair's ranges: up to 20 times, or until factors are within 5 % of 1."""
_BOUND = 2.0**8
"""The largest factor of all turns: a larger one would make the activations of nearly dead channels huge."""


@dataclass(frozen=True)
class EqualizedPair:
    """A row of `Equalization`: a layer and the layers that read its output.

    Attributes:
        layer: the path of the layer that makes the channels.
        readers: the paths of the layers that read the channels.
        factor: the largest factor by which a channel is multiplied or divided.
        note: why the pair keeps its weights; "" if it has new scales.
    """

    layer: str
    readers: tuple[str, ...]
    factor: float = 1.0
    note: str = ""


@dataclass
class Equalization:
    """The result of `equalize`; prints as a table.

    Attributes:
        before: the error of the quantized model's output without new scales, as a share of the output's energy; for
            several outputs the mean share.
        after: the same error with new scales.
        pairs: a row for each pair: its new scales, or the reason why it stays.
    """

    before: float
    after: float
    pairs: list[EqualizedPair] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [["layer", "read by", "factor", "what"]]
        for pair in self.pairs:
            what = [f"{pair.factor:.3g}", "equalized"] if not pair.note else ["-", f"stays: {pair.note}"]
            rows.append([pair.layer or "(model)", ", ".join(pair.readers), *what])
        return table(rows, [f"error of the quantized model's output: {self.before:.2e} -> {self.after:.2e}"])

    __repr__ = __str__  # what notebooks and consoles show


def equalize(
    model: nn.Module,
    batch: Any,
    config: Config | str,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
) -> Equalization:
    """Scale the channels between layers, in place, so that the weights of the layers before and after have like ranges.

    The layer before divides a channel by a factor, and the layers after it multiply the channel by the same factor. So
    the output stays the same up to rounding, which a run with the batch checks. Layers are linear layers and
    convolutions, also depthwise, but not transposed convolutions. Between them are functions that keep scales, such as
    ReLU and pools. One run finds the pairs, by the identity of tensors.

    Copies of the model with old and with new scales are quantized. If the new scales do not bring the output closer to
    the float model's, the model is not changed. Equalizing helps where a whole weight or activation has one scale.

    Args:
        model: a float model; call this after `fuse_batch_norm` and before `prepare`.
        batch: one batch of a data loader.
        config: the preset or the rules with which the model will be prepared.
        inputs, forward: as for `calibrate`.

    Raises:
        ConfigError: the model is prepared or sharded, or its output differs in a second run or is not finite.

    The model is unchanged after any error or interrupt.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     scaled = model[0].weight.mul_(torch.tensor([[100.0], [1.0], [1.0], [1.0]]))
    >>> x = torch.randn(8, 4)
    >>> before = model(x)
    >>> found = equalize(model, x, Config("tensors", (fq.Rule(input="int8", weight="int8"),)))
    >>> torch.allclose(model(x), before, rtol=1e-4)
    True
    """
    check_float_model(model, "equalize", "equalize(model, batch, config)", "equalize")
    given = Batches([batch], "equalize", inputs=inputs, forward=forward).kept()
    outputs = OutputCheck(model, given)
    layers = {module: name for name, module in model.named_modules() if has_matrix(module)}
    recording = record(model, outputs.run)
    found = find_neighbors(model, recording, layers.keys(), layers.keys())
    unreached, shared = Unreached(model, recording), shared_parameters(model)
    pairs, rows = list[_Pair](), list[EqualizedPair]()
    for maker, readers in found.readers.items():
        row = EqualizedPair(layers[maker], tuple(layers[reader] for reader in readers))
        channels = cast("Tensor", maker._parameters["weight"]).shape[0]
        why = _why_pair_stays(maker, readers, found, shared) or unreached.why_not(channels)
        if why is None:
            pairs.append(_Pair(maker, readers, row))
        else:
            rows.append(replace(row, note=why))
    restore = state_of(layers)

    def error() -> float:
        quantized = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `prepare` and `calibrate` say it of the model itself
            prepare(quantized, config)
            if not quantizers(quantized):
                raise ConfigError("config quantizes no layer of the model; pass the configuration for prepare")
            calibrate(quantized, given, forward=given.run, progress=False, unseen="float")
        return outputs.of(quantized).mean

    with restore_on_error(restore), exact_products():
        before = error()
        done, left = outputs.keep(pairs, _equalize, restore)
        after, notes = error(), {pair.row.layer: why for pair, why in left}
        if not after < before:
            restore()
            notes = {pair.row.layer: f"the error would become {after:.1e}" for pair in pairs} | notes
            after, done = before, {}
    rows = [replace(p.row, factor=done.get(p.row.layer, 1.0), note=notes.get(p.row.layer, "")) for p in pairs] + rows
    return Equalization(before, after, rows)


class _Pair(NamedTuple):
    maker: nn.Module
    readers: list[nn.Module]
    row: EqualizedPair


def _why_pair_stays(
    maker: nn.Module, readers: list[nn.Module], found: Neighbors, shared: set[nn.Parameter]
) -> str | None:
    held = (p for layer in (maker, *readers) for p in layer._parameters.values() if p is not None)
    if not shared.isdisjoint(held):
        return "layers share a parameter"
    if maker in found.elsewhere:
        return "something else than a layer reads the output or a parameter"
    for layer in (maker, *readers):
        if found.calls[layer] != 1 or readers.count(layer) > 1:
            return "a layer is called several times"
        if layer._parameters["weight"] is not layer.weight or not has_no_hooks(layer):
            return "a weight is computed, or a layer has hooks"
    channels = cast("Tensor", maker._parameters["weight"]).shape[0]
    if any(input_channels(reader) != channels for reader in readers):
        return "a layer after it has other channels"
    return None


def _equalize(pairs: Sequence[_Pair]) -> dict[str, float]:
    """Scale the weights of pairs, in float64 and rounded once; returns the largest factor for each pair's layer."""
    layers = dict.fromkeys(layer for pair in pairs for layer in (pair.maker, *pair.readers))
    weights = {layer: cast("Tensor", layer._parameters["weight"]).detach().double() for layer in layers}
    factors: dict[str, Tensor] = {}
    for _ in range(_ROUNDS):
        furthest = 0.0
        for pair in pairs:
            made = weights[pair.maker].abs().flatten(1).amax(1)  # the largest magnitude of each channel's weights
            read = [along_inputs(weights[r], r).unsqueeze(-1).flatten(3).abs() for r in pair.readers]
            after = torch.stack([own.amax((1, 3)).flatten() for own in read]).amax(0)
            known = factors.get(pair.row.layer, torch.ones_like(made))
            factor = torch.where((made > 0) & (after > 0), (made / after).sqrt(), 1.0)
            factor = (known * factor).clamp(1 / _BOUND, _BOUND) / known
            weights[pair.maker] = weights[pair.maker] / factor.view(-1, *(1 for _ in weights[pair.maker].shape[1:]))
            for reader in pair.readers:
                weights[reader] = (along_inputs(weights[reader], reader) * of_inputs(factor, reader)).flatten(0, 1)
            factors[pair.row.layer] = known * factor
            furthest = max(furthest, float((factor - 1).abs().max()))
        if furthest <= _SETTLED:
            break
    with torch.no_grad():
        for layer, weight in weights.items():
            cast("Tensor", layer._parameters["weight"]).copy_(weight)
        for pair in pairs:
            if (bias := pair.maker._parameters.get("bias")) is not None:
                bias.copy_(bias.double() / factors[pair.row.layer])
    return {name: float(torch.maximum(factor, 1 / factor).max()) for name, factor in factors.items()}
