"""Channel scales of inputs, put into the normalisations before them: then they cost no operation at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import refuse_unprepared
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError
from fakequant.model.run.outputs import OutputDistance, record
from fakequant.model.run.recorded import Neighbors, Unreached, find_neighbors
from fakequant.model.weights import disabled, evaluating, exact_products
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import has_no_hooks
from fakequant.nn.transforms import ChannelScale
from fakequant.ptq.stream import LayerCall
from fakequant.ptq.weights import shared_parameters
from fakequant.restore import Restore, restore_after, restore_on_error, state_of
from fakequant.text import table

T = TypeVar("T")
R = TypeVar("R")
_TOLERANCE = 1e-5
"""A share of the output's norm; in half precision it is one step of the dtype."""


def tolerance_of(x: Tensor) -> float:
    """How much of its norm a tensor may change by rounding."""
    return max(_TOLERANCE, torch.finfo(x.dtype).eps)


class OutputCheck(OutputDistance):
    """Compares a model's output with its output before the changes.

    Args:
        model: it runs in eval mode, without gradients.
        batches: of one batch, the model's input.

    Raises:
        ConfigError: two runs give different outputs, an output holds NaN or inf, or there are no floats in it.
    """

    def __init__(self, model: nn.Module, batches: KeptBatches) -> None:
        with exact_products():
            super().__init__(model, batches)
        self._model = model
        if not self.wanted:
            raise ConfigError(
                "the model gives no floats, so that a change of its weights cannot be checked; return some in forward="
            )
        if not all(bool(x.isfinite().all()) for x in self.wanted):
            raise ConfigError("an output of the model holds NaN or inf for this batch; give another batch")
        self._allowed = max(map(tolerance_of, self.wanted))
        if (found := self.difference()) > self._allowed:
            raise ConfigError(
                f"two runs of the model differ by {found:.1e} of the output, so that a change of its weights cannot be "
                "checked; reset in forward= what it keeps outside of its tensors and attributes"
            )

    def run(self) -> Any:
        """The model's result."""
        with evaluating(self._model), torch.no_grad():
            return self.batches.run_first(self._model)

    def difference(self) -> float:
        """The norm of the error of an output, as a share of the output's norm: the largest of all outputs."""
        with exact_products():
            return max(self.of(self._model).shares.values(), default=0.0) ** 0.5

    def keep(
        self, changes: Sequence[T], make: Callable[[Sequence[T]], R], restore: Restore
    ) -> tuple[R, list[tuple[T, str]]]:
        """Make all changes if the output stays; otherwise try them one by one, and keep those that preserve it.

        Args:
            changes: of the model.
            make: makes several of them at once.
            restore: takes all of them back.

        Returns:
            The result of `make`, and each rejected change with the reason.
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
        """The reason to reject the model's present state, or None."""
        found = self.difference()
        if found <= self._allowed:
            return None
        half = "; half precision alone may do it: try model.float()" if self._allowed > _TOLERANCE else ""
        return f"the model's output would change by {found:.1e} of its size{half}"


@dataclass(frozen=True)
class FoldedScale:
    """What happened to the transform of a layer's input.

    Attributes:
        layer: the path of the layer.
        into: the path of the module that holds the scale now; "" where the layer keeps it.
        note: why the layer keeps it; "" where it does not.
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

    One run finds which module makes the input of which layers, by the identity of tensors. All readers of its output
    must have the same scale. A run checks that the float function of the model stays; a scale whose fold changes it
    stays where it is, as do transforms that are more than a scale. Ranges and codes stay as they are.

    Args:
        model: prepared, with channel scales such as `fakequant.ptq.improve` chooses.
        batch: what a data loader gives.
        inputs, forward: as for `calibrate`.

    Raises:
        ConfigError: a float or sharded model, or one whose output is not the same in a second run, or is not finite.

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
    makers = {module: name for name, module in model.named_modules() if _weight(module) is not None}
    recording = record(model, outputs.run)
    found = find_neighbors(model, recording, makers.keys(), layers.keys())
    shared, unreached = shared_parameters(model), Unreached(model, recording)
    groups, notes = list[_Group](), dict[nn.Module, str]()
    for maker, readers in found.readers.items():
        width = cast("ChannelScale", readers[0].input_transform).scale.numel()
        why = _why_not(maker, readers, found, shared) or unreached.why_not(width)
        if why is None:
            groups.append(_Group(maker, readers))
        else:
            notes |= dict.fromkeys(readers, f"{makers[maker]}: {why}")
    with restore_on_error(state_of([*layers, *makers])):
        forms = _forms(groups, outputs)
        for group in groups:
            if group.maker not in forms:
                notes |= dict.fromkeys(group.layers, f"{makers[group.maker]}: its output is no multiple of its weight")
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


def _weight(module: nn.Module) -> Tensor | None:
    """The factor per channel of a normalisation in float, whatever its class."""
    weight = module._parameters.get("weight")
    is_vector = weight is not None and weight.dim() == 1 and not isinstance(module, QuantizedLayer)
    return weight if is_vector else None


def _why_not(maker: nn.Module, readers: Sequence[Any], found: Neighbors, shared: set[nn.Parameter]) -> str | None:
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
"""What normalisations multiply by: their weight, or 1 + weight."""


def _forms(groups: Sequence[_Group], outputs: OutputCheck) -> dict[nn.Module, _Form]:
    """How each maker multiplies by its weight, seen at its own output: that of a branch may be small in the model's."""
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
    """Whether a tensor is another one with its channels, the last axis or the second one, scaled."""
    for axis in {before.dim() - 1, 1} & {*range(before.dim())}:
        if before.shape[axis] == len(scale) and found.shape == before.shape:
            wanted = before.double() * scale.double().view(-1, *(1 for _ in before.shape[axis + 1 :]))
            if float((found.double() - wanted).norm()) <= tolerance_of(before) * float(wanted.norm()):
                return True
    return False


def _put(group: _Group, form: _Form) -> None:
    """Put the scale of a group's layers into their maker; in float64, rounded once."""
    scale = group.layers[0].input_transform.scale.double()
    weight, bias = group.maker._parameters["weight"], group.maker._parameters.get("bias")
    assert weight is not None
    with torch.no_grad():
        weight.copy_(form(weight.double(), scale.to(weight.device)))
        if bias is not None:
            bias.copy_(bias.double() * scale.to(bias.device))
    for layer in group.layers:
        del layer._modules["_input_transform"]
