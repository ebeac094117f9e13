"""The ranges of a prepared model's static quantizers, from batches and from the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fakequant.calibration import Calibrator, check_mergeable, make_calibrator
from fakequant.distributed import is_data_parallel, processes_of, work_together
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.modes import disabled, evaluating, modes
from fakequant.model.paths import layer_of
from fakequant.model.positions import Mask, Positions
from fakequant.model.progress import track
from fakequant.model.unseen import Unseen, check_unseen, leave_in_float, observed
from fakequant.model.weights import fresh_weight, holds_codes, note_weight, quantized_weights
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, observed_ranges, quantizers
from fakequant.numerics.qparams import Range
from fakequant.restore import Restore, attributes_of, restore_after, restore_on_error, state_of

_NOT_PREPARED = "the model has no quantizers; call fakequant.prepare(model, config) first"


def calibrate(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any] = (),
    method: str = "max",
    *,
    weight_method: str = "max",
    weight_options: dict[str, Any] | None = None,
    pattern: str = "*",
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
    unseen: str = "error",
    group: Any = None,
    **options: Any,
) -> dict[str, Calibrator]:
    """Find the ranges of all static quantizers: of inputs by running batches, of weights as the layers' calls use them.

    The model runs in float and in eval mode; nothing is changed if anything fails. With a pattern, layers that do not
    match run quantized where they have ranges, and in integers where `set_execution` says so. Later layers are
    calibrated on what they get from earlier ones. A weight that its quantizer leaves as it is, as after
    `fakequant.ptq.improve`, keeps its range, because no other range is nearer and each would change its codes.

    Args:
        model: a prepared model.
        batches: what a data loader gives, or tensors, tuples of arguments, or dicts of keyword arguments. Without
            `inputs`, a tuple's items beyond the parameters of the model's `forward` are left out, such as labels; a
            tuple whose last item would be passed to an optional parameter is refused, because it may be labels. May be
            empty if no input needs calibration; if given then, they are run until every layer with a weight was called.
        method: "max", "percentile", "entropy", "mse" or "moving_average", for inputs.
        weight_method: the same, for weights.
        weight_options: for the calibrators of the weights, for example {"percentile": 99.9}.
        pattern: of the paths of the layers to calibrate; `*` matches any characters (fnmatch). One that ends with
            "_quantizer" is of the paths of quantizers: "*_weight_quantizer" calibrates the weights alone.
        inputs: which part of a batch the model gets: the index of one item, such as 0 for a loader of (x, y); a slice
            of items, such as slice(2), as positional arguments; or a function of the batch, which returns a tuple of
            arguments, a dict of keyword arguments, or one argument.
        forward: called as forward(model, batch) instead of the model.
        mask: which tokens count, where batches have padding: a function from a batch to a bool tensor [batch, tokens],
            or the key of a dict batch, such as "attention_mask". A `CalibrationWarning` names inputs of other shapes.
        progress: whether to show a progress bar; by default on a terminal.
        unseen: what becomes of layers that need data, and that no batch reached: "error"; "float" leaves them in float,
            which one `CalibrationWarning` says; "siblings" gives their inputs the merged ranges of the layers at the
            same place in other members of their `nn.ModuleList`, as for the experts of a mixture, with a warning too.
            Layers that need no data, and whose weight another module uses without calling them, stay in float: a
            `CoverageWarning` names them.
        group: the processes of torch.distributed that calibrate together, each with its own batches: what they see is
            merged, and all get the scales that one process would find for all batches. By default that of a model
            wrapped in DistributedDataParallel or sharded by fully_shard; False for none. `forward` gets the model that
            DistributedDataParallel wraps.
        options: for the calibrators of the inputs, for example percentile=99.9.

    Returns:
        The calibrators of all static quantizers by name, with the histograms they collected.

    Raises:
        CalibrationError: a batch with NaN or inf (names the quantizer), layers that saw no data (names them all, says
            why, and what to do), another process that failed, or a model without quantizers.
        ConfigError: an unknown method or option, a pattern that matches no layer with a static quantizer, a mask of
            another kind, processes that calibrate different models or by a method that does not merge
            ("moving_average"), or a tuple whose last item may be labels or an optional argument.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> loader = [(torch.ones(2, 4), "label"), (torch.full((2, 4), 2.54), "label")]
    >>> used = calibrate(model, loader, method="max", inputs=0)
    >>> model[0].input_quantizer
    Quantizer(int8 per_tensor, input, scale 0.02)
    """
    refuse_tensor(batches, "calibrate")
    check_unseen(unseen)
    found = _chosen(model, pattern)

    def make(name: str) -> Calibrator:
        if found[name].kind is Kind.INPUT:
            return make_calibrator(method, found[name].spec, **options)
        return make_calibrator(weight_method, found[name].spec, **(weight_options or {}))

    job = _Job(model, found, pattern, runner(inputs, forward), make, Positions(mask))
    processes = processes_of(model, group)
    with restore_after(attributes_of(quantizers(model).values(), "calibrator")):
        shared = processes is not None and processes.size() > 1
        parts = work_together(lambda: job.observe(batches, progress, shared=shared), processes)
        job.take(parts)
        idle = job.leave_out_unused()
        left = job.unseen().settle(unseen)
        # A function's weight that no call has shown goes on to have the range of every call.
        ranges = observed_ranges(
            {
                name: quantizer
                for name, quantizer in found.items()
                if layer_of(name) not in left and (quantizer.kind is Kind.INPUT or observed(quantizer))
            }
        )
        calibrators = {name: quantizer.calibrator for name, quantizer in found.items() if quantizer.calibrator}
    modules = [model.get_submodule(name) for name in left]
    owners = {name: model.get_submodule(layer_of(name)) for name in idle}
    with restore_on_error(ranges_of(quantizers(model).values(), [*modules, *owners.values()])):
        leave_in_float(modules)
        for name, layer in owners.items():
            setattr(layer, name.rpartition(".")[2], None)
        weights = quantized_weights(model)
        for name, range in ranges.items():
            if name not in weights or not holds_codes(weights[name]):
                found[name].set_range(range)
            found[name].collected = calibrators[name] if found[name].kind is Kind.INPUT else None
        for name, weight in weights.items():
            if name in ranges:
                note_weight(weight)
    return {name: calibrator for name, calibrator in calibrators.items() if name in ranges}


def recalibrate(
    model: nn.Module, calibrators: Mapping[str, Calibrator] | None = None, method: str = "max", **options: Any
) -> dict[str, Calibrator]:
    """Find the ranges of inputs by another method, from what `calibrate` collected: the batches need not run again.

    Percentile, entropy and mse collect the same counts, and max needs less: one pass over the batches by one of the
    three serves all four. The model keeps what its last `calibrate` collected, also in copies of it, but not in
    checkpoints. That takes 64 KiB per input quantizer with one scale (16 bytes by max), and ends by
    `quantizer.collected = None`.

    Args:
        model: a calibrated model; its weights keep their ranges.
        calibrators: as `calibrate` returned them, which stay as they are; by default what the model keeps.
        method: as for `calibrate`.
        options: options of that method.

    Returns:
        The calibrators of the input quantizers by name.

    Raises:
        ConfigError: the calibrators collected less than the method needs, are not those of the model, or are missing;
            nothing is changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.full((2, 4), 2.54)], "entropy")
    >>> used = recalibrate(model, method="max")
    >>> model[0].input_quantizer
    Quantizer(int8 per_tensor, input, scale 0.02)
    """
    found = quantizers(model)
    if not found:
        raise CalibrationError(_NOT_PREPARED)
    if isinstance(calibrators, str):
        raise ConfigError(f"calibrators cannot be {calibrators!r}; write recalibrate(model, method={calibrators!r})")
    calibrators = _collected(found) if calibrators is None else calibrators
    if unknown := sorted(set(calibrators) - set(found)):
        raise ConfigError(f"the model has no quantizers {', '.join(unknown)}; give what calibrate returned for it")
    adopted: dict[str, Calibrator] = {}
    for name, used in calibrators.items():
        if found[name].kind is Kind.INPUT:
            adopted[name] = make_calibrator(method, found[name].spec, **options)
            try:
                adopted[name].load_from(used)
            except ConfigError as error:
                raise ConfigError(
                    f"{name}: {error}. Run fakequant.calibrate(model, batches, {method!r}) to collect what it needs"
                ) from error
    ranges = {name: _range_for(found[name], calibrator) for name, calibrator in adopted.items()}
    with restore_on_error(ranges_of(found[name] for name in ranges)):
        for name, range in ranges.items():
            found[name].set_range(range)
    return adopted


def _collected(found: Mapping[str, Quantizer]) -> dict[str, Calibrator]:
    """What the last `calibrate` collected for the static input quantizers of a model."""
    inputs = {name: quantizer for name, quantizer in found.items() if quantizer.kind is Kind.INPUT}
    # A quantizer without a range that is off was left in float.
    static = {n: q for n, q in inputs.items() if not q.dynamic and (q.calibrated or q.mode is not Mode.OFF)}
    if missing := [name for name, quantizer in static.items() if quantizer.collected is None]:
        raise ConfigError(
            f"{len(missing)} of {len(static)} input quantizers keep nothing that calibrate collected, the first is "
            f"{missing[0]} (a checkpoint does not hold it); run fakequant.calibrate(model, batches, method), or give "
            "what an earlier call returned as calibrators="
        )
    return {name: quantizer.collected for name, quantizer in static.items() if quantizer.collected is not None}


def _range_for(quantizer: Quantizer, calibrator: Calibrator) -> Range:
    """The range that a calibrator finds, on the device of the quantizer: the model may have moved since."""
    range = calibrator.compute_range()
    own = next(chain(quantizer.parameters(), quantizer.buffers()), range.lo)
    return Range(range.lo.to(own.device), range.hi.to(own.device))


def ranges_of(quantizers: Iterable[Quantizer], layers: Iterable[nn.Module] = ()) -> Restore:
    """A function that gives quantizers back the ranges, and layers the quantizers, that they have now."""
    held = list(quantizers)
    learned = [parameter for quantizer in held for parameter in quantizer.parameters()]
    values = [parameter.detach().clone() for parameter in learned]
    states = state_of([*layers, *(module for quantizer in held for module in quantizer.modules())])

    def restore() -> None:
        states()
        for parameter, value in zip(learned, values, strict=True):
            parameter.data.copy_(value)  # a learned range starts again in place, so that optimizers keep it

    return restore


def _chosen(model: nn.Module, pattern: str) -> dict[str, Quantizer]:
    """The static quantizers of the layers that match a pattern."""
    if not quantizers(model):
        raise CalibrationError(_NOT_PREPARED)
    found = {
        name: q for name, q in quantizers(model).items() if not (q.dynamic or q.pinned) and _matches(name, pattern)
    }
    if not found and pattern != "*":
        raise ConfigError(f"no layer with a static quantizer matches {pattern!r}; correct the pattern")
    return found


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name if pattern.endswith("_quantizer") else layer_of(name), pattern)


class _Part(NamedTuple):
    """What one process saw."""

    task: list[str]
    """What the process calibrates and how; the same on all processes."""
    states: dict[str, dict[str, Tensor]]
    """The states of the input calibrators by name; empty if one process calibrates alone."""
    called: set[str]
    """The layers whose weight a call has shown."""
    batches: int


@dataclass
class _Job:
    """One call of `calibrate`."""

    model: nn.Module
    found: dict[str, Quantizer]
    """The quantizers that get a range."""
    pattern: str
    run: Forward
    make: Callable[[str], Calibrator]
    """A fresh calibrator for the quantizer of a name."""
    positions: Positions
    last: list[Any] = field(default_factory=list)
    """The last batch of this process, if it had one."""
    called: set[str] = field(default_factory=set)
    batches: int = 0

    def __post_init__(self) -> None:
        self.inputs = {name: quantizer for name, quantizer in self.found.items() if quantizer.kind is Kind.INPUT}
        # Dynamic ones too: that the quantizer of a weight is called tells that the layer is.
        weights = quantized_weights(self.model).items()
        self.weights = {name: weight for name, weight in weights if _matches(name, self.pattern)}

    def observe(self, batches: Iterable[Any], progress: bool | None, *, shared: bool) -> _Part:
        """Show the batches of this process, and the weights, to fresh calibrators."""
        for name, quantizer in self.found.items():
            quantizer.calibrator = self.make(name)
            if shared and name in self.inputs:
                check_mergeable(quantizer.calibrator, "several processes calibrate together")
        for weight in self.weights.values():
            if weight.quantizer.dynamic:
                weight.quantizer.calibrator = make_calibrator("max", weight.quantizer.spec)
        with self._observing(), evaluating(self.model), torch.no_grad():
            self._show(batches, progress, shared=shared)
            called = {layer_of(name) for name, weight in self.weights.items() if observed(weight.quantizer)}
            for name, weight in self.weights.items():
                if not weight.quantizer.dynamic and not observed(weight.quantizer):
                    weight.quantizer.observe(fresh_weight(weight, name))
        task = [f"{name}: {type(q.calibrator).__name__}({q.spec})" for name, q in self.found.items()]
        return _Part(task, self._states() if shared else {}, called, self.batches)

    def _show(self, batches: Iterable[Any], progress: bool | None, *, shared: bool) -> None:
        model = self._inner()
        total = len(batches) if isinstance(batches, Sized) else None
        restore = self.positions.observe_through(self.model, self.inputs)
        for batch in track(batches, "calibrating", total, progress):
            self.positions.enter(batch)
            self.run(model, batch)
            self.last, self.batches = [batch], self.batches + 1
            # One process of several may not stop alone: a sharded model is called by all of them.
            if not (self.inputs or shared) and all(observed(weight.quantizer) for weight in self.weights.values()):
                break
        restore()  # after an error `calibrate` does it
        self.positions.say_whole()

    def _inner(self) -> nn.Module:
        """The model without a wrapper whose call waits for all processes: their numbers of batches may differ."""
        return cast("nn.Module", self.model.module) if is_data_parallel(self.model) else self.model

    def _observing(self) -> Any:
        """A context in which quantizers that get a range observe; others quantize if a pattern chose and they can."""
        observing = {*self.found.values(), *(weight.quantizer for weight in self.weights.values())}

        def mode(_: str, quantizer: Quantizer) -> Mode:
            if quantizer in observing:
                return Mode.OBSERVE
            ready = self.pattern != "*" and (quantizer.dynamic or quantizer.calibrated)
            return quantizer.mode if ready else Mode.OFF

        return modes(self.model, mode)

    def _states(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: value.cpu() for key, value in quantizer.calibrator.state_dict().items()}
            for name, quantizer in self.inputs.items()
            if quantizer.calibrator is not None
        }

    def take(self, parts: list[_Part]) -> None:
        """Go on from what all processes saw, merged in the order of their ranks."""
        for rank, part in enumerate(parts):
            if part.task != parts[0].task:
                raise ConfigError(
                    f"the processes of ranks 0 and {rank} calibrate different quantizers, or by other methods; give "
                    "all of them one model and the same arguments"
                )
        self.called = set().union(*(part.called for part in parts))
        self.batches = sum(part.batches for part in parts)
        if not any(part.states for part in parts):
            return
        for name, quantizer in self.inputs.items():
            merged = self.make(name)
            device = self._device(layer_of(name))
            for part in parts:
                one = self.make(name)
                one.load_state_dict({key: value.to(device) for key, value in part.states[name].items()})
                merged.merge(one)
            quantizer.calibrator = merged

    def _device(self, layer: str) -> torch.device:
        own = next(self.model.get_submodule(layer).parameters(), None)
        own = next(self.model.parameters(), None) if own is None else own
        return torch.device("cpu") if own is None else own.device

    def leave_out_unused(self) -> list[str]:
        """Take optional quantizers that their layers did without out of the job; their paths are returned."""
        seen = {layer_of(name) for name, quantizer in self.inputs.items() if observed(quantizer)}
        unused = []
        for name, quantizer in self.inputs.items():
            layer = self.model.get_submodule(layer_of(name))
            operands = layer.operands(layer) if isinstance(layer, QuantizedLayer) else {}
            operand = operands.get(name.rpartition(".")[2])
            if operand is not None and operand.optional and layer_of(name) in seen and not observed(quantizer):
                unused.append(name)
        for name in unused:
            del self.inputs[name], self.found[name]
        return unused

    def unseen(self) -> Unseen:
        """The layers that no batch reached."""
        layers = dict.fromkeys(layer_of(name) for name in self.weights)
        starved = {layer_of(name) for name, quantizer in self.inputs.items() if not observed(quantizer)}
        idle = [name for name in layers if name not in self.called | starved] if self.batches else []
        return Unseen(self.model, self.inputs, idle, self.called, self._run_last if self.batches else None, self.make)

    def _run_last(self) -> None:
        """Run the last batch in float, if this process had one."""
        with disabled(self.model), evaluating(self.model), torch.no_grad():
            for batch in self.last:
                self.run(self._inner(), batch)
