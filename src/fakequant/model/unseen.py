"""Layers that no calibration batch reached: why not, and what becomes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fakequant.calibration import Calibrator, check_mergeable
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, nearest
from fakequant.model.calls import weight_readers
from fakequant.nn.integer import Execution
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer

UNSEEN = ("error", "float", "siblings")


def check_unseen(unseen: str) -> None:
    """Raise a ConfigError unless it is one of "error", "float" and "siblings"."""
    if unseen not in UNSEEN:
        raise ConfigError(f"unseen cannot be {unseen!r}{nearest(str(unseen), UNSEEN)}")


@dataclass
class Unseen:
    """The layers of a model that no batch called, or only with empty tensors."""

    model: nn.Module
    inputs: dict[str, Quantizer]
    """All quantizers that need data, by path, with their calibrators."""
    idle: list[str]
    """Layers that need no data, and that no batch called."""
    called: set[str]
    """Layers that a batch called, be it with empty tensors."""
    run: Callable[[], object] | None
    """Runs one of the batches again; None if there was none."""
    make: Callable[[str], Calibrator]
    """A fresh calibrator for the quantizer of a path."""

    def settle(self, unseen: str) -> list[str]:
        """Do as `calibrate` was told; the paths of the layers that are to be left in float are returned.

        Raises:
            CalibrationError: layers that need data, or whose weight is used without calling them, if that is to be one.
        """
        served = self._ask_siblings() if unseen == "siblings" else {}
        starved = [name for name, quantizer in self.inputs.items() if not _observed(quantizer)]
        if starved and self.run is None:
            raise CalibrationError(
                f"{len(starved)} of {len(self.inputs)} input quantizers saw no data, because there were no batches; "
                f"the first is {starved[0]}. Give batches; a generator that was read before has none left"
            )
        layers = list(dict.fromkeys([*(name.rpartition(".")[0] for name in starved), *self.idle]))
        readers = {} if self.run is None or not layers else weight_readers(self.model, self.run)
        read = {name: readers[m] for name in layers if (m := self.model.get_submodule(name)) in readers}
        if unseen == "float" and layers:
            _warn(f"{_count(layers)} left in float: {self._reasons(layers, read)}")
            return layers
        if starved or read:
            what = f"{len(starved)} of {len(self.inputs)} input quantizers saw no data: {', '.join(starved)}"
            if not starved:
                layers = list(read)
                what = f"{_count(layers)} never called, and would stay in float"
            raise CalibrationError(f"{what}. Reason: {self._reasons(layers, read)}. {self._advice(layers, starved)}")
        if served:
            shown = ", ".join(f"{name} (from {count})" for name, count in served.items())
            _warn(f"no batch reached {len(served)} input quantizers, which get the ranges of their siblings: {shown}")
        if layers:
            _warn(f"{_count(layers)} never called, and got only the range of the weight: {self._reasons(layers, read)}")
        return []

    def _reasons(self, layers: list[str], read: dict[str, str]) -> str:
        empty = [name for name in layers if name not in read and name in self.called]
        missed = [name for name in layers if name not in read and name not in self.called]
        reasons = []
        for path in dict.fromkeys(read.values()):
            used = [_shown(name) for name in layers if read.get(name) == path]
            what = "the weight of {} is" if len(used) == 1 else "the weights of {} are"
            reasons.append(f"{what.format(', '.join(used))} used by {_shown(path)} without calling the layer")
        if empty:
            reasons.append(f"only empty tensors reach {', '.join(map(_shown, empty))}")
        if missed:
            reasons.append(f"no batch reaches {', '.join(map(_shown, missed))}")
        return "; ".join(reasons)

    def _advice(self, layers: list[str], starved: list[str]) -> str:
        ways = ['pass unseen="float" to leave the layers in float']
        donors = [donor for name in starved for donor in self._siblings(name)]
        if donors:
            ways.append(f'pass unseen="siblings" for the ranges of the layers beside them, such as {donors[0]}')
        rules = ", ".join(f'Rule("{name}")' for name in layers)
        return (
            "Give batches that reach the layers, and let the model call a layer where it uses its weight. Or "
            f"{', or '.join(ways)}, or prepare the model with the rules {rules}"
        )

    def _ask_siblings(self) -> dict[str, int]:
        """Give quantizers that saw nothing what their siblings saw; from how many siblings is returned by path."""
        donors = {n: self._siblings(n) for n, quantizer in self.inputs.items() if not _observed(quantizer)}
        served = {name: found for name, found in donors.items() if found}
        for name, found in served.items():
            merged = self.make(name)
            check_mergeable(merged, 'unseen="siblings" joins what several layers saw')
            for calibrator in (self.inputs[donor].calibrator for donor in found):
                if calibrator is not None:
                    merged.merge(calibrator)
            self.inputs[name].calibrator = merged
        return {name: len(found) for name, found in served.items()}

    def _siblings(self, name: str) -> list[str]:
        """The quantizers that saw data, at the same place in other members of the innermost ModuleList around one."""
        parts = name.split(".")
        for place in reversed(range(len(parts) - 1)):
            members = self.model.get_submodule(".".join(parts[:place]))
            if isinstance(members, nn.ModuleList):
                paths = (".".join([*parts[:place], key, *parts[place + 1 :]]) for key in members._modules)
                spec = self.inputs[name].spec
                return [
                    p for p in paths if p in self.inputs and _observed(self.inputs[p]) and self.inputs[p].spec == spec
                ]
        return []


def leave_in_float(modules: list[nn.Module]) -> None:
    """Take the quantizers of layers away. A module of another kind needs its own; those without a range turn off."""
    for module in modules:
        if isinstance(module, QuantizedLayer):
            module.execution = Execution.SIMULATE
            for attribute in type(module).quantizer_names():
                setattr(module, attribute, None)
        else:
            for quantizer in module.children():
                if isinstance(quantizer, Quantizer) and quantizer.needs_calibration:
                    quantizer.mode = Mode.OFF


def _observed(quantizer: Quantizer) -> bool:
    return quantizer.calibrator is not None and quantizer.calibrator.observed


def _count(layers: list[str]) -> str:
    return "1 layer is" if len(layers) == 1 else f"{len(layers)} layers are"


def _shown(path: str) -> str:
    return path or "the model"


def _warn(text: str) -> None:
    warnings.warn(text, CalibrationWarning, stacklevel=4)  # where `calibrate` was called
