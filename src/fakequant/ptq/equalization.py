"""Cross-layer equalization: channels between two layers get like ranges on both sides (arXiv 1906.04721)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_float_model
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.errors import ConfigError
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import Neighbors, Unreached, find_neighbors
from fakequant.model.weights import exact_products
from fakequant.nn.quantized.forms import has_matrix
from fakequant.nn.quantizer import has_no_hooks, quantizers
from fakequant.ptq.scale_folding import OutputCheck
from fakequant.ptq.weights import shared_parameters
from fakequant.restore import restore_on_error, state_of
from fakequant.text import table


def input_channels(layer: nn.Module) -> int:
    """The channels that a layer with a matrix reads."""
    weight = cast("Tensor", layer._parameters["weight"])
    return weight.shape[1] * _groups(layer)


def along_inputs(weight: Tensor, layer: nn.Module) -> Tensor:
    """A view [groups, out / groups, in / groups, ...] of a weight; the input channels are axes 0 and 2."""
    return weight.unflatten(0, (_groups(layer), -1))


def of_inputs(factor: Tensor, layer: nn.Module) -> Tensor:
    """A factor for each input channel, in the shape that multiplies `along_inputs`."""
    weight = cast("Tensor", layer._parameters["weight"])
    return factor.view(_groups(layer), 1, -1, *(1 for _ in weight.shape[2:]))


def _groups(layer: nn.Module) -> int:
    return cast("int", getattr(layer, "groups", 1))


_ROUNDS, _SETTLED = 20, 0.05
"""A scale changes the ranges of the next pair, so pairs take turns until no factor is further than 5 % from 1."""
_BOUND = 2.0**8
"""The largest factor: more would make the activations of nearly dead channels huge."""


@dataclass(frozen=True)
class EqualizedPair:
    """A layer and those that read its output.

    Attributes:
        layer: the path of the layer that makes the channels.
        readers: the paths of the layers that read them.
        factor: the largest one by which a channel is multiplied or divided.
        note: why the pair stays; "" where it has new scales.
    """

    layer: str
    readers: tuple[str, ...]
    factor: float = 1.0
    note: str = ""


@dataclass
class Equalization:
    """The result of `equalize`; prints as a table.

    Attributes:
        before: the error of the quantized model's output, as a share of the output's energy, without new scales; of
            several outputs the mean share.
        after: the same with them.
        pairs: what happened to each pair.
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
    """Scale the channels between layers so that their weights have like ranges on both sides, in place.

    The layer before divides a channel by a factor, and the layers after it multiply the channel by the same factor. So
    the output stays the same up to rounding, which a run with the batch checks. Layers are linear layers and
    convolutions, depthwise ones too, but no transposed ones. Between them are functions that keep scales, such as ReLU
    and pools. One run finds the pairs, by the identity of tensors.

    A copy of the model is quantized before and after. If its output does not come closer to that of the float model,
    nothing is changed. It helps where one scale serves a whole weight, or a whole activation.

    Args:
        model: a float model; call this after `fuse_batch_norm` and before `prepare`.
        batch: what a data loader gives.
        config: the preset or the rules with which the model will be prepared.
        inputs, forward: as for `calibrate`.

    Raises:
        ConfigError: a prepared or sharded model, or one whose output is not the same in a second run, or is not finite.

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
        why = _why_not(maker, readers, found, shared) or unreached.why_not(channels)
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
                raise ConfigError("the config quantizes no layer of the model; give the one that prepare will get")
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


def _why_not(maker: nn.Module, readers: list[nn.Module], found: Neighbors, shared: set[nn.Parameter]) -> str | None:
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
    """Scale the weights of pairs, in float64 and rounded once; the largest factor of each pair."""
    layers = dict.fromkeys(layer for pair in pairs for layer in (pair.maker, *pair.readers))
    weights = {layer: cast("Tensor", layer._parameters["weight"]).detach().double() for layer in layers}
    factors: dict[str, Tensor] = {}
    for _ in range(_ROUNDS):
        furthest = 0.0
        for pair in pairs:
            made = weights[pair.maker].abs().flatten(1).amax(1)  # the largest magnitude of each channel's weights
            read = [along_inputs(weights[r], r).unsqueeze(-1).flatten(3).abs() for r in pair.readers]
            after = torch.stack([own.amax((1, 3)).flatten() for own in read]).amax(0)
            factor = torch.where((made > 0) & (after > 0), (made / after).sqrt(), 1.0).clamp(1 / _BOUND, _BOUND)
            weights[pair.maker] = weights[pair.maker] / factor.view(-1, *(1 for _ in weights[pair.maker].shape[1:]))
            for reader in pair.readers:
                weights[reader] = (along_inputs(weights[reader], reader) * of_inputs(factor, reader)).flatten(0, 1)
            factors[pair.row.layer] = factors.get(pair.row.layer, torch.ones_like(factor)) * factor
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
