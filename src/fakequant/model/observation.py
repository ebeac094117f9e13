"""One call of `calibrate`: batches go through the model, and calibrators see the inputs of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves

from fakequant.calibration import Calibrator, check_mergeable, make_calibrator
from fakequant.data.batches import Batches
from fakequant.distributed import Ranks, first_sharded, is_data_parallel
from fakequant.errors import (
    CalibrationError,
    CalibrationWarning,
    ConfigError,
    CoverageWarning,
    FakeQuantError,
    nearest,
    warn_user,
)
from fakequant.model.run.outputs import watching
from fakequant.model.run.recorded import weight_readers
from fakequant.model.weights import evaluating, fresh_weight, modes, quantized_weights
from fakequant.nn.integer import Execution
from fakequant.nn.paths import layer_of, matches
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer, copies_called, quantizers
from fakequant.nn.sites import Site
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.qparams import Range
from fakequant.ops.waiting import one_wait
from fakequant.restore import restore_after
from fakequant.text import listed, module_name

UNSEEN = ("error", "float", "siblings")


def check_unseen(unseen: str) -> None:
    """Raise ConfigError unless `unseen` is one of "error", "float" and "siblings"."""
    if unseen not in UNSEEN:
        raise ConfigError(f"unseen cannot be {unseen!r}{nearest(str(unseen), UNSEEN)}")


class Unseen:
    """The layers of a model that no batch called, or that batches called only with empty tensors.

    Args:
        job: the calibration, after its last batch.
        idle: the layers that need no data and were not called by any batch.
    """

    def __init__(self, job: Observation, idle: list[str]) -> None:
        self.job, self.idle = job, idle
        self.model, self.inputs = job.model, job.inputs

    def settle(self, unseen: str) -> list[str]:
        """Warn of the unseen layers, or raise an error, as `unseen` says; returns paths of layers that stay in float.

        Raises:
            CalibrationError: some layers need data and saw none, and `unseen` is "error".
        """
        # A quantizer that saw nothing gets the data of the trained copy that peft calls: its inputs are the same.
        for name, quantizer in self.inputs.items():
            copies = [] if observed(quantizer) else copies_called(self.model, name)
            seen = [self.inputs[copy] for copy in copies if copy in self.inputs and observed(self.inputs[copy])]
            if seen and seen[0].spec == quantizer.spec:
                quantizer.calibrator = seen[0].calibrator
        served: dict[str, int] = {}
        if unseen == "siblings":
            silent = [name for name, quantizer in self.inputs.items() if not observed(quantizer)]
            donors = {name: found for name in silent if (found := self._siblings(name))}
            for name, found in donors.items():
                self._merge(name, found)
                served[name] = len(found)
        starved = [name for name, quantizer in self.inputs.items() if not observed(quantizer)]
        if starved and not self.job.batches:
            raise CalibrationError(
                f"{len(starved)} of {len(self.inputs)} input quantizers saw no data, because there were no batches; "
                f"the first is {starved[0]}. Pass batches; a generator can be read only once"
            )
        idle = [name for name in self.idle if not copies_called(self.model, name)]
        layers = list(dict.fromkeys([*map(layer_of, starved), *idle]))
        read = {name: self.job.read[name] for name in layers if name in self.job.read}
        if unseen == "float" and layers:
            warn_user(f"{_count(layers)} left in float: {self._reasons(layers, read)}", CalibrationWarning)
            return layers
        expected = {layer_of(name) for name in starved if self.inputs[name].is_unreached}
        if expected:
            names = sorted(expected)
            text = f"{_count(names)} left in float: {self._reasons(names, read)}, nor did the example of prepare"
            warn_user(f"{text}. To leave them in float without this warning, use {self._rules(names)}", CoverageWarning)
            starved = [name for name in starved if layer_of(name) not in expected]
            layers = [name for name in layers if name not in expected]
            read = {name: path for name, path in read.items() if name not in expected}
        if starved:
            what = f"{len(starved)} of {len(self.inputs)} input quantizers saw no data: {', '.join(starved)}"
            cure = 'call fakequant.calibrate(model, batches, unseen="float") to leave the layers in float'
            ways = [f"{cure}, such as layers that only training calls"]
            if donors := [donor for name in starved for donor in self._siblings(name)]:
                ways.append(f'pass unseen="siblings" for the ranges of the layers beside them, such as {donors[0]}')
            raise CalibrationError(
                f"{what}. Reason: {self._reasons(layers, read)}. Pass batches that reach the layers, and let the model "
                f"call a layer where the layer's weight is used. Or {', or '.join(ways)}, or prepare the model with "
                f"the rules {self._rules(layers)}"
            )
        if served:
            shown = ", ".join(f"{name} (from {count})" for name, count in served.items())
            text = f"no batch reached {len(served)} input quantizers, which get the ranges of their siblings: {shown}"
            warn_user(text, CalibrationWarning)
        if missed := [name for name in layers if name not in read]:
            text = f"{_count(missed)} never called, and got only the range of the weight: {self._reasons(missed, {})}"
            warn_user(text, CalibrationWarning)
        if read:
            text = f"{_count([*read])} left in float: {self._reasons([*read], read)}"
            warn_user(
                f"{text}. To leave them in float without this warning, use {self._rules([*read])}", CoverageWarning
            )
        return [*read, *sorted(expected)]

    def say_read(self, left: list[str]) -> None:
        """Warn of layers whose weight another module also uses in float; layers in `left` are not named."""
        read: dict[str, str] = {}
        for name, path in self.job.read.items():
            layer, held = self.model.get_submodule(name), self.model.get_submodule(path)._parameters.values()
            own = {weight.parameter for weight in layer.products()} if isinstance(layer, QuantizedLayer) else set()
            # `prepare` speaks of a layer in float that shares the weight.
            if name not in left and not any(parameter is not None and parameter in own for parameter in held):
                read[name] = path
        if read:
            text = f"{self._reasons([*read], read)}; this use is in float, and calls of the layer are quantized"
            cure = f"Call the layer there, too, or leave it in float everywhere by the rules {self._rules([*read])}"
            warn_user(f"{text}. {cure}", CoverageWarning)

    def settle_zeros(self, unseen: str, ranges: dict[str, Range]) -> list[str]:
        """Warn of inputs that were zero in every batch; delete their items of `ranges`, or put siblings' ranges there.

        Returns:
            The paths of the layers that stay in float.
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
        ends = [f"{', '.join(left)}, which are left in float until a calibration finds a range"] if left else []
        ends += [f"{name}, which gets the range of {count} siblings" for name, count in served.items()]
        cure = 'Give batches in which they are not zero, or pass unseen="siblings" for the ranges of layers beside them'
        warn_user(f"{what}: {'; '.join(ends)}. {cure}", CalibrationWarning)
        return list(dict.fromkeys(map(layer_of, left))) if unseen == "float" else []

    def _merge(self, name: str, donors: list[str]) -> Range:
        """Give the quantizer `name` a new calibrator with the merged data of siblings, `donors`; return the range."""
        merged = self.job.make(name)
        check_mergeable(merged, 'unseen="siblings" merges the data of several layers')
        for calibrator in (self.inputs[donor].calibrator for donor in donors):
            if calibrator is not None:
                merged.merge(calibrator)
        self.inputs[name].calibrator = merged
        return merged.compute_range()

    def _reasons(self, layers: list[str], read: dict[str, str]) -> str:
        empty = [name for name in layers if name not in read and name in self.job.called]
        missed = [name for name in layers if name not in read and name not in self.job.called]
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

    def _rules(self, layers: list[str]) -> str:
        """Python code of rules that leave `layers` in float; three or more that are all of a module share a rule."""
        total, under = _counts(map(layer_of, quantizers(self.model))), _counts(layers)
        whole = {path for path, count in under.items() if count >= 3 and count == total[path]}
        parts = {name: (path for path in _around(name) if path in whole) for name in layers}
        written = dict.fromkeys(f"{path}.*" if (path := next(found, "")) else name for name, found in parts.items())
        return ", ".join(f'Rule("{pattern}")' for pattern in written)

    def share(self) -> None:
        """Merge the calibrators of quantizers that must share a range, because an engine merges their layers."""
        groups: dict[str, list[str]] = {}
        for name, quantizer in self.job.found.items():
            if quantizer.range_group and observed(quantizer):
                groups.setdefault(quantizer.range_group, []).append(name)
        for group, names in groups.items():
            merged, held = self.job.make(names[0]), [self.job.found[name] for name in names]
            if len(held) > 1:
                check_mergeable(merged, f"{len(held)} quantizers of {group} share a range")
                for quantizer in held:
                    if quantizer.calibrator is not None:
                        merged.merge(quantizer.calibrator)
                for quantizer in held:
                    quantizer.calibrator = merged

    def _siblings(self, name: str) -> list[str]:
        """The paths that differ from `name` in the index of its innermost ModuleList, if their quantizers saw data."""
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
    """Remove the quantizers of layers in `modules`; of calls of functions, turn off those that still need a range."""
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
    """The paths of all modules that contain the module at `path`, the outermost first, except the model itself."""
    parts = path.split(".")
    return [".".join(parts[:place]) for place in range(1, len(parts))]


def _counts(layers: Iterable[str]) -> Counter[str]:
    """For the path of each module: how many of `layers` are inside of the module."""
    return Counter(path for name in dict.fromkeys(layers) for path in _around(name))


def _count(layers: list[str]) -> str:
    return "1 layer is" if len(layers) == 1 else f"{len(layers)} layers are"


_JOINS = ("cat", "stack", "add")
"""Functions whose arguments share the scale of the result."""


class _Vanishing(NamedTuple):
    quantizers: tuple[Quantizer, ...]
    largest: Tensor


class Vanishing:
    """Finds channels, and arguments of functions, that the scale rounds to 0 because larger values share the scale.

    It stores the largest value in all batches of each argument of a function, and of each channel of model inputs.

    Args:
        inputs: for each path, the input quantizer that gets a range.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Quantizer]) -> None:
        self._sites = {path: site for path, site in model.named_modules() if isinstance(site, Site)}
        self._layers: list[tuple[str, Quantizer, int]] = []
        for name, quantizer in inputs.items():
            layer, attribute = model.get_submodule(layer_of(name)), name.rpartition(".")[2]
            operand = layer.operands(layer).get(attribute) if isinstance(layer, QuantizedLayer) else None
            if operand is not None:
                self._layers.append((name, quantizer, operand.reduction))
        self._given, self._found = set[int](), dict[str, _Vanishing]()

    def enter(self, batch: Any) -> None:
        """Store which tensors a batch contains, before the model gets the batch."""
        given = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        self._given = {leaf.data_ptr() for leaf in given if _is_plain(leaf)}

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """A context in which the calls of the model are watched."""
        handles: list[Any] = []
        with restore_after(lambda: [handle.remove() for handle in handles]):
            for path, site in self._sites.items():
                handles.append(site.watch(lambda values, *_, p=path, s=site: self._see_site(p, s, values)))
            for name, own, axis in self._layers:
                handles.append(own.register_forward_pre_hook(self._hook(name, own, axis)))
            yield

    def _see_site(self, path: str, site: Any, values: Mapping[str, Tensor]) -> None:
        names = ("output",) if site.function in _JOINS else ()
        for name, x in values.items():
            own = tuple(q for key in (name, *names) if isinstance(q := site._modules.get(key), Quantizer))
            if own and isinstance(x, Tensor) and _is_plain(x) and not isinstance(x, nn.Parameter):
                self._add(f"{name} of {path}", own, x.detach().abs().amax().reshape(1))

    def _hook(self, name: str, own: Quantizer, axis: int) -> Any:
        def see(_: nn.Module, args: Any) -> None:
            x = args[0]
            if x.dim() > 1 and _is_plain(x) and x.data_ptr() in self._given:
                self._add(layer_of(name), (own,), x.detach().abs().movedim(axis, -1).flatten(0, -2).amax(0))

        return see

    def _add(self, what: str, quantizers: tuple[Quantizer, ...], largest: Tensor) -> None:
        before = self._found.get(what)
        if before is not None and before.largest.shape == largest.shape:
            largest = torch.maximum(before.largest, largest)
        self._found[what] = _Vanishing(quantizers, largest.float())

    def warn(self) -> None:
        """Warn of arguments and channels that the chosen scales round to 0."""
        lost = []
        for what, (readers, largest) in self._found.items():
            fixed = [own.scale for own in readers if isinstance(own.spec.format, IntegerFormat)]
            # Of one scale of integers; the smallest values of others are finer.
            steps = [float(scale.abs()) for scale in fixed if scale is not None and scale.numel() == 1]
            step = max(steps, default=0.0)
            small = (largest > 0) & (largest <= step / 2)  # half a step is rounded to the even code, 0
            if not bool(small.any()):
                continue
            most = float(largest[small].max())
            numbers = small.nonzero().flatten().tolist()
            where = (
                what if len(largest) == 1 else f"channel {listed([str(n) for n in numbers], 4)} of the input of {what}"
            )
            lost.append(f"{where} (largest {most:.3g}, step {step:.3g})")
        if lost:
            warn_user(
                f"all values become 0, because none is above half a step of their scale: {listed(lost, 4)}. Scale them "
                "in the model, quantize them separately from large values, or leave the function or layer in float by "
                "a rule",
                CalibrationWarning,
            )


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor's values can be read: it is not empty, meta, nested, sharded or in a torch.func transform."""
    is_wrapped = torch._C._are_functorch_transforms_active() or is_traceable_wrapper_subclass(x)
    return not (is_wrapped or x.is_meta or x.is_nested) and x.numel() > 0


def is_chosen(name: str, pattern: str) -> bool:
    """Whether `pattern` matches a quantizer's path, or its layer's path if no "_quantizer" is at the pattern's end."""
    return matches(name if str(pattern).endswith("_quantizer") else layer_of(name), pattern)


class ProcessPart(NamedTuple):
    """The result of one process of a calibration."""

    task: list[str]
    """Lines that name the quantizers and methods of the process, which must be equal in all processes."""
    states: dict[str, dict[str, Tensor]]
    """The states of the input calibrators by name; empty if one process calibrates alone."""
    called: set[str]
    """The layers whose weight was seen in a call."""
    batches: int
    read: dict[str, str]
    """For each layer whose weight a module used without calling the layer: the path of that module."""


@dataclass
class Observation:
    """A call of `calibrate`: the model, the batches, and what they showed so far."""

    model: nn.Module
    found: dict[str, Quantizer]
    """The quantizers that get a range."""
    pattern: str
    data: Batches
    make: Callable[[str], Calibrator]
    """A function that returns a new calibrator for the quantizer with a name."""
    processes: Ranks = field(default_factory=lambda: Ranks(None))
    """The processes that calibrate together."""
    called: set[str] = field(default_factory=set)
    """The layers that a batch called, even if only with empty tensors."""
    batches: int = 0
    read: dict[str, str] = field(default_factory=dict)
    """For each layer whose weight a module used in a batch without calling the layer: the path of that module."""

    def __post_init__(self) -> None:
        self.vanishing: Vanishing | None = None
        self.inputs = {name: quantizer for name, quantizer in self.found.items() if quantizer.kind is Kind.INPUT}
        # Dynamic quantizers, too: a call of a weight's quantizer shows that its layer is called.
        weights = quantized_weights(self.model).items()
        self.weights = {name: weight for name, weight in weights if is_chosen(name, self.pattern)}

    def observe(self, *, shared: bool) -> ProcessPart:
        """Run this process's batches with new calibrators, also for weights; `shared`: other processes run theirs."""
        for name, quantizer in self.found.items():
            quantizer.calibrator = self.make(name)
            if shared and name in self.inputs:
                check_mergeable(quantizer.calibrator, "several processes calibrate together")
        for weight in self.weights.values():
            if weight.quantizer.dynamic:
                weight.quantizer.calibrator = make_calibrator("max", weight.quantizer.spec)
        observing = {*self.found.values(), *(weight.quantizer for weight in self.weights.values())}

        def mode(_: str, quantizer: Quantizer) -> Mode:
            if quantizer in observing:
                return Mode.OBSERVE
            # With a pattern, other quantizers quantize if they have what they need.
            ready = self.pattern != "*" and (quantizer.dynamic or quantizer.calibrated)
            return quantizer.mode if ready else Mode.OFF

        # From batch to batch the model goes on, as when it is used: what it keeps then has a range, too.
        with self.data.one_pass(self._inner()), modes(self.model, mode), evaluating(self.model), torch.no_grad():
            model, mask = self._inner(), self.data.mask
            forms: set[str] = set()
            is_sharded = shared and bool(first_sharded(self.model))
            batches, failed = self.data.tracked("calibrating"), self._deferred() if is_sharded else list[Exception]()
            restore = mask.observe_through(self.model, self.inputs)
            self.vanishing = vanishing = Vanishing(self.model, self.inputs)
            for batch in self.processes.in_step(batches) if is_sharded else batches:
                mask.enter(batch)
                vanishing.enter(batch)
                # One of those with the same shapes, dtypes, keys and flags, which take the same way through a model:
                # with all watched, 24 batches of eight small blocks took 2.5 times as long.
                leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
                kinds = [
                    (leaf.shape, leaf.dtype)
                    if isinstance(leaf, Tensor)
                    else leaf
                    if isinstance(leaf, int | str)
                    else type(leaf)
                    for leaf in leaves
                ]
                form = f"{structure} {kinds}"
                watch = nullcontext() if form in forms else self._watch()
                forms.add(form)
                with watch, vanishing.seeing(), self.processes.unheard() if is_sharded else nullcontext():
                    with one_wait() as checks:
                        self.data.run(model, batch)
                    if checks.failed:  # which, and why, says the run in which each check waits
                        self.data.run(model, batch)
                        raise CalibrationError(
                            "a batch gave NaN or inf in a first run, but not in a second; let the model compute the "
                            "same in each run"
                        )
                mask.leave()
                if failed:
                    raise failed[0]
                self.batches += 1
                # One process of several may not stop alone: a sharded model is called by all of them.
                if not (self.inputs or shared) and all(observed(weight.quantizer) for weight in self.weights.values()):
                    break
            restore()  # after an error `calibrate` does it
            mask.warn_unmasked()
            called = {layer_of(name) for name, weight in self.weights.items() if observed(weight.quantizer)}
            for name, weight in self.weights.items():
                if not weight.quantizer.dynamic and not observed(weight.quantizer):
                    weight.quantizer.observe(fresh_weight(weight, name))
        task = [f"{name}: {q.calibrator!r}" for name, q in self.found.items()]
        task += [f"{name}: {q.spec}, {q.dynamic}" for name, q in quantizers(self.model).items()]
        return ProcessPart(
            task,
            {
                name: {key: value.cpu() for key, value in quantizer.calibrator.state_dict().items()}
                for name, quantizer in self.inputs.items()
                if quantizer.calibrator is not None
            }
            if shared
            else {},
            called,
            self.batches,
            self.read,
        )

    def _deferred(self) -> list[Exception]:
        """Collect errors of calibrators in the returned list from now on, because other processes wait for this run."""
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
        """A context that records which weights the model reads without calling their layers."""
        with watching(self.model) as recording:
            yield
        found = weight_readers(self.model, recording)
        read = {layer_of(name): found.get(weight.layer) for name, weight in self.weights.items()}
        self.read = {name: path for name, path in read.items() if path is not None} | self.read

    def _inner(self) -> nn.Module:
        """The model without DistributedDataParallel, whose calls would wait for processes that have fewer batches."""
        return cast("nn.Module", self.model.module) if is_data_parallel(self.model) else self.model

    def take(self, parts: list[ProcessPart]) -> None:
        """Merge the results of all processes in the order of their ranks, and continue from the merged result."""
        for rank, part in enumerate(parts):
            if part.task != parts[0].task:
                raise ConfigError(
                    f"the processes of ranks 0 and {rank} calibrate different quantizers, or by different methods; "
                    "pass the same model and the same arguments in all processes"
                )
        self.called = set().union(*(part.called for part in parts))
        self.batches = sum(part.batches for part in parts)
        self.read = {name: path for part in reversed(parts) for name, path in part.read.items()}
        if not any(part.states for part in parts):
            return
        for name, quantizer in self.inputs.items():
            merged = self.make(name)
            own = next(self.model.get_submodule(layer_of(name)).parameters(), None)
            own = next(self.model.parameters(), None) if own is None else own
            device = torch.device("cpu") if own is None else own.device
            for part in parts:
                one = self.make(name)
                one.load_state_dict({key: value.to(device) for key, value in part.states[name].items()})
                merged.merge(one)
            quantizer.calibrator = merged

    def leave_out_unused(self) -> list[str]:
        """Drop from the calibration the optional quantizers that no call of their layer used; return their paths."""
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
        return Unseen(self, idle)
