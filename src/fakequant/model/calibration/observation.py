"""One call of `calibrate`: batches go through the model, and its calibrators see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fakequant.calibration import Calibrator, check_mergeable, make_calibrator
from fakequant.data.batches import Batches
from fakequant.distributed import Together, first_sharded, is_data_parallel
from fakequant.errors import ConfigError, FakeQuantError
from fakequant.model.calibration.unseen import Unseen, observed
from fakequant.model.calibration.vanishing import Vanishing
from fakequant.model.modes import evaluating, modes
from fakequant.model.run.queries import weight_readers
from fakequant.model.run.recording import watching
from fakequant.model.weights import fresh_weight, quantized_weights
from fakequant.nn.paths import layer_of, matches
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers


def is_chosen(name: str, pattern: str) -> bool:
    """Whether a pattern matches a quantizer: its path if the pattern ends with "_quantizer", else its layer's."""
    return matches(name if str(pattern).endswith("_quantizer") else layer_of(name), pattern)


def _form(batch: Any) -> str:
    """What two batches have in common that take the same way through a model: shapes, dtypes, keys and flags."""
    leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    kinds = [
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, int | str) else type(leaf)
        for leaf in leaves
    ]
    return f"{structure} {kinds}"


class ProcessPart(NamedTuple):
    """What one process saw."""

    task: list[str]
    """What the process calibrates and how; the same on all processes."""
    states: dict[str, dict[str, Tensor]]
    """The states of the input calibrators by name; empty if one process calibrates alone."""
    called: set[str]
    """The layers whose weight a call has shown."""
    batches: int
    read: dict[str, str]
    """The layers whose weight a module used without calling the layer, and the path of that module."""


@dataclass
class Observation:
    """One call of `calibrate`."""

    model: nn.Module
    found: dict[str, Quantizer]
    """The quantizers that get a range."""
    pattern: str
    data: Batches
    make: Callable[[str], Calibrator]
    """A fresh calibrator for the quantizer of a name."""
    processes: Together = field(default_factory=lambda: Together(None))
    """Those that calibrate together."""
    called: set[str] = field(default_factory=set)
    batches: int = 0
    read: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.vanishing: Vanishing | None = None
        self.inputs = {name: quantizer for name, quantizer in self.found.items() if quantizer.kind is Kind.INPUT}
        # Dynamic ones too: that the quantizer of a weight is called tells that the layer is.
        weights = quantized_weights(self.model).items()
        self.weights = {name: weight for name, weight in weights if is_chosen(name, self.pattern)}

    def observe(self, *, shared: bool) -> ProcessPart:
        """Show the batches of this process, and the weights, to fresh calibrators."""
        for name, quantizer in self.found.items():
            quantizer.calibrator = self.make(name)
            if shared and name in self.inputs:
                check_mergeable(quantizer.calibrator, "several processes calibrate together")
        for weight in self.weights.values():
            if weight.quantizer.dynamic:
                weight.quantizer.calibrator = make_calibrator("max", weight.quantizer.spec)
        # From batch to batch the model goes on, as when it is used: what it keeps then has a range, too.
        with self.data.one_pass(self._inner()), self._observing(), evaluating(self.model), torch.no_grad():
            self._show(shared=shared)
            called = {layer_of(name) for name, weight in self.weights.items() if observed(weight.quantizer)}
            for name, weight in self.weights.items():
                if not weight.quantizer.dynamic and not observed(weight.quantizer):
                    weight.quantizer.observe(fresh_weight(weight, name))
        task = [f"{name}: {q.calibrator!r}" for name, q in self.found.items()]
        task += [f"{name}: {q.spec}, {q.dynamic}" for name, q in quantizers(self.model).items()]
        return ProcessPart(task, self._states() if shared else {}, called, self.batches, self.read)

    def _show(self, *, shared: bool) -> None:
        model, mask = self._inner(), self.data.mask
        forms: set[str] = set()
        is_sharded = shared and bool(first_sharded(self.model))
        batches, failed = self.data.tracked("calibrating"), self._deferred() if is_sharded else list[Exception]()
        restore = mask.observe_through(self.model, self.inputs)
        self.vanishing = vanishing = Vanishing(self.model, self.inputs)
        for batch in self.processes.in_step(batches) if is_sharded else batches:
            mask.enter(batch)
            vanishing.enter(batch)
            # Not all: 24 batches of eight small blocks took 2.5 times as long.
            watch = self._watch() if (form := _form(batch)) not in forms else nullcontext()
            forms.add(form)
            with watch, vanishing.seeing(), self.processes.unheard() if is_sharded else nullcontext():
                self.data.run(model, batch)
            mask.leave()
            if failed:
                raise failed[0]
            self.batches += 1
            # One process of several may not stop alone: a sharded model is called by all of them.
            if not (self.inputs or shared) and all(observed(weight.quantizer) for weight in self.weights.values()):
                break
        restore()  # after an error `calibrate` does it
        mask.warn_unmasked()

    def _deferred(self) -> list[Exception]:
        """What calibrators refuse from now on; the call goes on, because the other processes wait for its weights."""
        failed: list[Exception] = []

        def defer(quantizer: Quantizer, observe: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
            def observed(x: Tensor) -> None:
                try:
                    observe(x)
                except FakeQuantError as error:
                    failed.append(quantizer.named(error))

            return observed

        for quantizer in self.inputs.values():
            if quantizer.calibrator is not None:
                vars(quantizer.calibrator)["observe"] = defer(quantizer, quantizer.calibrator.observe)
        return failed

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """A context that notes which weights the model reads without calling their layers."""
        with watching(self.model) as recording:
            yield
        found = weight_readers(self.model, recording)
        read = {layer_of(name): found.get(weight.layer) for name, weight in self.weights.items()}
        self.read = {name: path for name, path in read.items() if path is not None} | self.read

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

    def take(self, parts: list[ProcessPart]) -> None:
        """Go on from what all processes saw, merged in the order of their ranks."""
        for rank, part in enumerate(parts):
            if part.task != parts[0].task:
                raise ConfigError(
                    f"the processes of ranks 0 and {rank} calibrate different quantizers, or by other methods; give "
                    "all of them one model and the same arguments"
                )
        self.called = set().union(*(part.called for part in parts))
        self.batches = sum(part.batches for part in parts)
        self.read = {name: path for part in reversed(parts) for name, path in part.read.items()}
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
        return Unseen(self.model, self.inputs, idle, self.called, self.batches, self.read, self.make)
