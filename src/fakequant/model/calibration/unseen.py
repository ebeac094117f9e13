"""Layers that no calibration batch reached: the reasons, and what becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from fakequant.calibration import Calibrator, check_mergeable
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, CoverageWarning, nearest, warn_user
from fakequant.nn.adapters import copies_called
from fakequant.nn.integer import Execution
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode, Quantizer, quantizers
from fakequant.numerics.qparams import Range
from fakequant.text import module_name

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
    """Layers that a batch called, if only with empty tensors."""
    batches: int
    read: dict[str, str]
    """Layers whose weight a module used in a batch without calling the layer, and the path of that module."""
    make: Callable[[str], Calibrator]
    """A fresh calibrator for the quantizer of a path."""

    def settle(self, unseen: str) -> list[str]:
        """Decide what becomes of the layers; returns the paths of those that calibration leaves in float.

        Raises:
            CalibrationError: layers that need data and saw none, unless `unseen` says what becomes of them.
        """
        self._ask_copies()
        served = self._ask_siblings() if unseen == "siblings" else {}
        starved = [name for name, quantizer in self.inputs.items() if not observed(quantizer)]
        if starved and not self.batches:
            raise CalibrationError(
                f"{len(starved)} of {len(self.inputs)} input quantizers saw no data, because there were no batches; "
                f"the first is {starved[0]}. Give batches; a generator that was read before has none left"
            )
        idle = [name for name in self.idle if not copies_called(self.model, name)]
        layers = list(dict.fromkeys([*map(layer_of, starved), *idle]))
        read = {name: self.read[name] for name in layers if name in self.read}
        if unseen == "float" and layers:
            warn_user(f"{_count(layers)} left in float: {self._reasons(layers, read)}", CalibrationWarning)
            return layers
        expected = {layer_of(name) for name in starved if self.inputs[name].is_unreached}
        if expected:
            names = sorted(expected)
            text = f"{_count(names)} left in float: {self._reasons(names, read)}, nor did the example of prepare"
            warn_user(f"{text}. Rules say that it is meant: {self._rules(names)}", CoverageWarning)
            starved = [name for name in starved if layer_of(name) not in expected]
            layers = [name for name in layers if name not in expected]
            read = {name: path for name, path in read.items() if name not in expected}
        if starved:
            what = f"{len(starved)} of {len(self.inputs)} input quantizers saw no data: {', '.join(starved)}"
            raise CalibrationError(f"{what}. Reason: {self._reasons(layers, read)}. {self._advice(layers, starved)}")
        if served:
            shown = ", ".join(f"{name} (from {count})" for name, count in served.items())
            text = f"no batch reached {len(served)} input quantizers, which get the ranges of their siblings: {shown}"
            warn_user(text, CalibrationWarning)
        if missed := [name for name in layers if name not in read]:
            text = f"{_count(missed)} never called, and got only the range of the weight: {self._reasons(missed, {})}"
            warn_user(text, CalibrationWarning)
        if read:
            text = f"{_count([*read])} left in float: {self._reasons([*read], read)}"
            warn_user(f"{text}. Rules say that it is meant: {self._rules([*read])}", CoverageWarning)
        return [*read, *sorted(expected)]

    def say_read(self, left: list[str]) -> None:
        """Warn of layers that are called, and whose weight another module uses in float, too; not of those `left`."""
        holds = {name: self.model.get_submodule(path)._parameters.values() for name, path in self.read.items()}
        read = {
            name: path
            for name, path in self.read.items()
            # `prepare` speaks of a layer in float that shares the weight.
            if name not in left and not _has_one_of(self.model.get_submodule(name), holds[name])
        }
        if read:
            text = f"{self._reasons([*read], read)}; this use is in float, and calls of the layer are quantized"
            cure = f"Call the layer there, too, or leave it in float everywhere by the rules {self._rules([*read])}"
            warn_user(f"{text}. {cure}", CoverageWarning)

    def settle_zeros(self, unseen: str, ranges: dict[str, Range]) -> list[str]:
        """Decide what becomes of inputs that were zero in every batch, and take those without a range out of `ranges`.

        Returns:
            The paths of the layers that are left in float.
        """
        zeros = [name for name in self.inputs if name in ranges and not bool(ranges[name].amax.any())]
        if not zeros:
            return []
        served: dict[str, int] = {}
        for name in zeros:
            donors = [donor for donor in self._siblings(name) if donor not in zeros] if unseen == "siblings" else []
            del ranges[name]
            if donors:
                ranges[name] = self._merge(name, donors)
                served[name] = len(donors)
        left = [name for name in zeros if name not in served]
        what = "the inputs of these quantizers were zero in every batch, so that they have no range"
        ends = [f"{', '.join(left)}, which are left in float until a calibration finds one"] if left else []
        ends += [f"{name}, which gets the range of {count} siblings" for name, count in served.items()]
        cure = 'Give batches in which they are not zero, or pass unseen="siblings" for the ranges of layers beside them'
        warn_user(f"{what}: {'; '.join(ends)}. {cure}", CalibrationWarning)
        return list(dict.fromkeys(map(layer_of, left))) if unseen == "float" else []

    def _merge(self, name: str, donors: list[str]) -> Range:
        """The range of a quantizer by the calibrators of its siblings, which are merged into one of its own."""
        merged = self.make(name)
        check_mergeable(merged, 'unseen="siblings" joins what several layers saw')
        for calibrator in (self.inputs[donor].calibrator for donor in donors):
            if calibrator is not None:
                merged.merge(calibrator)
        self.inputs[name].calibrator = merged
        return merged.compute_range()

    def _reasons(self, layers: list[str], read: dict[str, str]) -> str:
        empty = [name for name in layers if name not in read and name in self.called]
        missed = [name for name in layers if name not in read and name not in self.called]
        reasons = []
        for path in dict.fromkeys(read.values()):
            used = [module_name(name) for name in layers if read.get(name) == path]
            what = "the weight of {} is" if len(used) == 1 else "the weights of {} are"
            reasons.append(f"{what.format(', '.join(used))} used by {module_name(path)} without calling the layer")
        if empty:
            reasons.append(f"only empty tensors reach {', '.join(map(module_name, empty))}")
        if missed:
            reasons.append(f"no batch reaches {', '.join(map(module_name, missed))}")
        return "; ".join(reasons)

    def _advice(self, layers: list[str], starved: list[str]) -> str:
        cure = 'call fakequant.calibrate(model, batches, unseen="float") to leave the layers in float'
        ways = [f"{cure}, as those that training alone calls"]
        donors = [donor for name in starved for donor in self._siblings(name)]
        if donors:
            ways.append(f'pass unseen="siblings" for the ranges of the layers beside them, such as {donors[0]}')
        return (
            "Give batches that reach the layers, and let the model call a layer where it uses its weight. Or "
            f"{', or '.join(ways)}, or prepare the model with the rules {self._rules(layers)}"
        )

    def _rules(self, layers: list[str]) -> str:
        """Rules that leave layers in float, as they are written; one for a module with three of them and no other."""
        total, under = _counts(map(layer_of, quantizers(self.model))), _counts(layers)
        whole = {path for path, count in under.items() if count >= 3 and count == total[path]}
        parts = {name: (path for path in _around(name) if path in whole) for name in layers}
        written = dict.fromkeys(f"{path}.*" if (path := next(found, "")) else name for name, found in parts.items())
        return ", ".join(f'Rule("{pattern}")' for pattern in written)

    def _ask_copies(self) -> None:
        """Give quantizers that saw nothing the data of the trained copy that peft calls: its inputs are the same."""
        for name, quantizer in self.inputs.items():
            copies = [] if observed(quantizer) else copies_called(self.model, name)
            seen = [self.inputs[copy] for copy in copies if copy in self.inputs and observed(self.inputs[copy])]
            if seen and seen[0].spec == quantizer.spec:
                quantizer.calibrator = seen[0].calibrator

    def _ask_siblings(self) -> dict[str, int]:
        """Give quantizers that saw nothing what their siblings saw; from how many siblings is returned by path."""
        donors = {n: self._siblings(n) for n, quantizer in self.inputs.items() if not observed(quantizer)}
        served = {name: found for name, found in donors.items() if found}
        for name, found in served.items():
            self._merge(name, found)
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
                    p for p in paths if p in self.inputs and observed(self.inputs[p]) and self.inputs[p].spec == spec
                ]
        return []


def leave_in_float(modules: list[nn.Module]) -> None:
    """Take the quantizers of layers away. A module of another kind needs its own; those without a range turn off."""
    for module in modules:
        if isinstance(module, QuantizedLayer):
            module.execution = Execution.SIMULATE
            for attribute in module.operands(module):
                setattr(module, attribute, None)
        else:
            for quantizer in module.children():
                if isinstance(quantizer, Quantizer) and quantizer.needs_calibration:
                    quantizer.mode = Mode.OFF


def observed(quantizer: Quantizer) -> bool:
    """Whether the calibrator of a quantizer has seen any element."""
    return quantizer.calibrator is not None and quantizer.calibrator.observed


def _around(path: str) -> list[str]:
    """The modules around one, the outermost first, without the model."""
    parts = path.split(".")
    return [".".join(parts[:place]) for place in range(1, len(parts))]


def _counts(layers: Iterable[str]) -> Counter[str]:
    """How many layers each module holds."""
    return Counter(path for name in dict.fromkeys(layers) for path in _around(name))


def _has_one_of(layer: nn.Module, parameters: Iterable[nn.Parameter | None]) -> bool:
    held = {weight.parameter for weight in layer.products()} if isinstance(layer, QuantizedLayer) else set()
    return any(parameter is not None and parameter in held for parameter in parameters)


def _count(layers: list[str]) -> str:
    return "1 layer is" if len(layers) == 1 else f"{len(layers)} layers are"
