"""Which layers of a prepared model are quantized, which stay in float, and why; and modules in plain containers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import CoverageWarning, renamed, warn_user
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import QUANTIZED, Recording, has, modules_called, weight_readers
from fakequant.model.weights import (
    bits_of_all,
    is_searched,
    quantized_weights,
    warn_stale_scales,
    weight_bits,
    weights_of,
)
from fakequant.nn.functions import SITE_FUNCTIONS, Trait
from fakequant.nn.integer import Execution
from fakequant.nn.merged_adapters import adapter_layers
from fakequant.nn.paths import join
from fakequant.nn.quantized.forms import own_class, product_function, quantized_class, why_changed
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Kind, Mode, Quantizer
from fakequant.nn.sites import TRAINED, Site
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.text import html_result, listed, module_name, table


@dataclass(frozen=True)
class Operation:
    """One operation of a model that computes on float tensors.

    Attributes:
        module: the path of the module that calls it, "" for the model itself.
        name: torch's name of the operation.
        is_product: whether quantized hardware would compute it (convolutions, matrix products, attention, recurrence).
        float_inputs: the number of its float tensor inputs that are not quantized.
        inputs: the number of its float tensor inputs.
        multiplications: the multiply-accumulates of a product; 0 for embeddings, and for sizes that depend on data.
    """

    module: str
    name: str
    is_product: bool
    float_inputs: int
    inputs: int
    multiplications: int = 0

    @property
    def quantized(self) -> bool:
        """Whether every input is quantized."""
        return self.float_inputs == 0

    def __str__(self) -> str:
        where = self.module or "(model)"
        return f"{where}: {self.name}, {self.float_inputs} of {self.inputs} inputs in float"


class Left(NamedTuple):
    """The modules and products of a prepared model that stay in float."""

    modules: dict[type[nn.Module], int]
    """The number of modules of each class, the classes with most parameters first."""
    parameters: float
    """The share of the model's parameters that is in these modules."""
    products: dict[str, float]
    """By operation outside of quantized layers, its share of the model's multiply-accumulates, the largest first."""

    def __str__(self) -> str:
        parts = []
        if self.modules:
            count = sum(self.modules.values())
            named = [
                f"{cls.__name__} ({n}: {why_changed(cls) or 'no quantized form'})" for cls, n in self.modules.items()
            ]
            share = f"{_percent(self.parameters)} of the parameters"
            subject = f"1 module with {share} stays" if count == 1 else f"{count} modules with {share} stay"
            parts.append(f"{subject} in float: {listed(named, 6)}")
        if self.products:
            named = [f"{name} {_percent(share)}" for name, share in self.products.items()]
            share = _percent(sum(self.products.values()))
            parts.append(f"products with {share} of the multiply-accumulates have inputs in float: {listed(named, 6)}")
        advice = "fakequant.summary(model, example) lists all"
        if self.modules:
            names = tuple(dict.fromkeys(cls.__name__ for cls in self.modules))
            rule = f"Rule('*', layers={(names[0] if len(names) == 1 else names)!r})"
            ops = sorted({*filter(None, map(product_function, self.modules))})
            if ops:
                advice += f"; Rule('*', preset, ops={tuple(ops)!r}) quantizes such products in their own forwards"
            advice += f"; fakequant.nn.quantizes registers a quantized form, and {rule} ends this warning"
        return f"{'; '.join(parts)} ({advice})"


def left_in_float(
    model: nn.Module,
    purposely: set[nn.Module],
    products: Sequence[Operation] = (),
    computed: Collection[nn.Parameter] = (),
) -> Left | None:
    """The modules and products of a prepared model that could be quantized but are not; None if there are none.

    Layers that have a quantized form, but match no rule, are not included: they stay in float on purpose.

    Args:
        purposely: the modules that a rule leaves in float.
        computed: the parameters from which quantized weights are computed.
    """
    decided = {m for m in model.modules() if isinstance(m, QuantizedLayer) or quantized_class(m) is not None}
    meant = purposely | {part for module in decided for part in module.modules()}
    quantized = {p for module in decided if isinstance(module, QuantizedLayer) for p in module.parameters()}
    quantized |= {weight.parameter for weight in quantized_weights(model).values() if weight.parameter is not None}
    quantized.update(computed)
    sizes: Counter[type[nn.Module]] = Counter()
    counts: Counter[type[nn.Module]] = Counter()
    left: set[nn.Parameter] = set()
    for module in model.modules():
        weights = set(weights_of(module)) - quantized
        if weights and module not in meant:
            cls = own_class(module)
            counts[cls] += 1
            sizes[cls] += sum(p.numel() for p in weights)
            left |= weights
    paths = dict(model.named_modules(remove_duplicate=False))
    multiplied = [operation for operation in products if operation.is_product]
    in_float: Counter[str] = Counter()
    for operation in multiplied:
        parts = operation.module.split(".")
        around = (".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
        owner = next(paths[path] for path in around if path in paths)
        if owner not in meant and not operation.quantized and operation.multiplications:
            in_float[operation.name] += operation.multiplications
    if not left and not in_float:
        return None
    total = sum(p.numel() for p in model.parameters() if not isinstance(p, UninitializedParameter))
    modules = {cls: counts[cls] for cls, _ in sizes.most_common()}
    computes = sum(operation.multiplications for operation in multiplied)
    shares = {name: count / computes for name, count in in_float.most_common()}
    return Left(modules, sum(p.numel() for p in left) / max(total, 1), shares)


def scripted(model: nn.Module, purposely: set[nn.Module]) -> str | None:
    """A line on modules of torch.jit, whose products no run shows; None if the model has none.

    Args:
        purposely: the modules that a rule leaves in float.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, torch.jit.ScriptModule) and module not in purposely and not inside:
            found.append(path)
    if not found:
        return None
    named = listed([module_name(path) for path in found], 6)
    return (
        f"modules of torch.jit compute in float, and their products are in no list and no count: {named}. Prepare "
        "the modules as they were written, and script them afterwards"
    )


def gradients_in_float(model: nn.Module) -> str | None:
    """A line on the quantized products of a prepared model whose gradients stay in float; None if there are none."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, Site):
            name, multiplies = module.function, has(module.function, Trait.PRODUCT)
            in_float = module.gradient is None or name not in TRAINED
        elif isinstance(module, QuantizedLayer):  # of two tensors, of which one or both are quantized
            multiplies = bool(module.inputs) and (bool(module.products()) or module.product is not None)
            name = module.float_class.__name__
            in_float = module.gradient is None or type(module).weighted_sum(module) is None
        else:
            continue
        if multiplies and in_float:
            found.append(f"{module_name(path)} ({name})")
    if not found:
        return None
    return (
        f"gradients of these products stay in float: {listed(found, 6)}. Those of linear layers, convolutions, "
        "attention, recurrent layers and experts are quantized where their rule has gradient="
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def operations(model: nn.Module, example: Any, inputs: Inputs | None = None) -> list[Operation]:
    """All operations of a model that compute on float tensors, in the order of one run.

    Args:
        model: a prepared (or float) model; quantizers need not be calibrated.
        inputs: which part of the example the model gets, as for `calibrate`; None for all of it.

    Raises:
        ConfigError: the model fails on the example.
    """
    return operations_of(record_example(model, example, inputs))


def record_example(model: nn.Module, example: Any, inputs: Inputs | None = None) -> Recording:
    """The recording of a run of a model; arguments and errors are as for `operations`."""
    refuse_sharded(model, "look into", offloading=False)
    arguments = example_arguments(example, inputs)
    return record(model, lambda: arguments.run(model))


def operations_of(recording: Recording) -> list[Operation]:
    """The operations of a recorded run of a prepared model."""
    quantized: set[int] = set()  # values
    fixed = set(recording.buffers)  # what depends on parameters and buffers alone
    fixed.update(number for number, value in enumerate(recording.values) if value.constant)
    found = []
    for call in recording.calls:
        name = call.function.partition(" ")[0]
        floats = list(dict.fromkeys(value for value in call.inputs if recording.values[value].is_float))
        # A copy overwrites its first tensor; `x[i] = 0.37` writes a number without a quantizer.
        read = floats[1:] if name == "copy" else floats if name != "setitem" or len(floats) > 1 else []
        if call.inputs and fixed.issuperset(call.inputs):
            fixed.update(call.outputs)
        if name in QUANTIZED or has(name, Trait.EMPTY):
            quantized.update(call.outputs)
        elif has(name, Trait.CODES):
            if read and quantized.issuperset(read):
                quantized.update(call.outputs)
        elif not recording.is_constant(call) and any(recording.values[output].is_float for output in call.outputs):
            # A product's bias is added in higher precision, and statistics, affine parameters and constants of other
            # operations are no tensors that an engine would quantize.
            operands = call.factors if call.is_product else [value for value in floats if value not in fixed]
            if not operands:
                continue
            # What comes of two of several tensors is multiplied with the next one, in float.
            is_list = name in SITE_FUNCTIONS and SITE_FUNCTIONS[name].list_position is not None
            between = max(len(operands) - 2, 0) if call.is_product and is_list else 0
            in_float = sum(value not in quantized for value in operands) + between
            inputs = len(operands) + between
            found.append(Operation(call.owner or "", name, call.is_product, in_float, inputs, call.multiplications))
    return found


@accepts_wrapped_model
def unquantized(
    model: nn.Module, example: Any, *, products_only: bool = False, inputs: Inputs | None = None
) -> list[Operation]:
    """The operations with at least one float input that is not quantized: `prepare` left them in float.

    The model runs once with the example. A warning names modules of torch.jit, whose operations no run shows.

    Args:
        model: a prepared model.
        example: an input, a tuple of inputs, or a dict of keyword arguments; with `inputs`, a batch of a data loader.
        products_only: whether to list only operations that an integer or low-precision unit would compute.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ConfigError: the model fails on the example.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), presets.INT8)
    >>> print(*unquantized(model, torch.ones(2, 4)))
    1: softmax, 1 of 1 inputs in float
    """
    left = left_of(model, record_example(model, example, inputs))
    return [operation for operation in left if operation.is_product] if products_only else left


def left_of(model: nn.Module, recording: Recording) -> list[Operation]:
    """The operations that `unquantized` returns, for a recorded run."""
    if (hidden := scripted(model, set())) is not None:
        warn_user(hidden, CoverageWarning)
    return [operation for operation in operations_of(recording) if not operation.quantized]


def quantized_parameters(model: nn.Module, recording: Recording) -> set[nn.Parameter]:
    """The parameters that are quantized, or from which a quantized weight is computed, as in `self.a @ self.b`."""
    reached: set[int] = set()  # values
    for call in reversed(recording.calls):
        if call.function in QUANTIZED or not reached.isdisjoint(call.outputs):
            reached.update(value for value in call.inputs if recording.values[value].constant)
    return {parameter for parameter, number in recording.numbers(model).items() if number in reached}


_NAMED = 4


_SEEN = "_seen_by_prepare"
"""The attribute that marks a prepared model, and its layers that are in float on purpose."""


def note_floats(model: nn.Module) -> None:
    """Mark the float layers that could be quantized, so that `warn_of_new_layers` finds layers that are added later."""
    for module in (model, *filter(_is_float, model.modules())):
        if not isinstance(module, torch.jit.ScriptModule):
            vars(module)[_SEEN] = True


def warn_of_new_layers(model: nn.Module) -> None:
    """Warn in one line of float layers that were added to a model after `prepare`, except layers of adapters."""
    skip = [*adapter_layers(model), "*.modules_to_save.*"]
    new = {
        join(path, name): module
        for path, owner in model.named_modules()
        if vars(owner).get(_SEEN)
        for name, module in owner.named_modules()
        if _is_float(module) and _SEEN not in vars(module) and not any(fnmatchcase(f".{name}.", own) for own in skip)
    }
    if new:
        named = listed([f"{module_name(path)} ({type(module).__name__})" for path, module in new.items()], _NAMED)
        first = next(iter(new))
        warn_user(
            f"layers that were added after fakequant.prepare are in float: {named}. To quantize them, call "
            f"fakequant.prepare(model.get_submodule({first!r}), preset) and calibrate the model",
            CoverageWarning,
        )


def _is_float(module: nn.Module) -> bool:
    own = not isinstance(module, QuantizedLayer) and quantized_class(module) is not None
    return own and next(module.parameters(), None) is not None


def warn_unregistered(model: nn.Module) -> None:
    """Warn in one line of modules with parameters that a model holds in plain lists, tuples, dicts or dataclasses.

    >>> class Held(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = [nn.Linear(2, 2)]
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_unregistered(Held())
    >>> str(caught[0].message)[:52]
    'modules in plain containers are not part of a model:'
    """
    known, found = {id(module) for module in model.modules()}, dict[str, nn.Module]()
    for path, module in model.named_modules():
        registered = {id(module._parameters), id(module._buffers), id(module._modules)}
        for name, value in vars(module).items():
            if id(value) not in registered:
                found |= _held(value, f"{path}.{name}".lstrip("."), known)
    # A module that holds the model, as an adapter its parent, is no part of it.
    lost = {path: held for path, held in found.items() if [*held.parameters()] and model not in set(held.modules())}
    if lost:
        named = listed([f"{path} ({type(held).__name__})" for path, held in lost.items()], _NAMED)
        warn_user(
            f"modules in plain containers are not part of a model: {named}. prepare, save, load and state_dict do "
            "not see them; use torch.nn.ModuleList or torch.nn.ModuleDict, or attributes",
            CoverageWarning,
        )


def _held(value: Any, path: str, known: set[int]) -> dict[str, nn.Module]:
    """For each path in a value, the module there, except modules with ids in `known`; adds the found ids to `known`."""
    if isinstance(value, nn.Module):
        new = {} if id(value) in known else {path: value}
        known |= {id(part) for part in value.modules()}
        return new
    is_container = isinstance(value, (Mapping, list, tuple, set, frozenset, deque)) or is_dataclass(value)
    if not is_container or isinstance(value, type) or id(value) in known:
        return {}
    known.add(id(value))
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, Iterable):
        items = [(f"[{place}]", item) for place, item in enumerate(value)]
    else:
        items = [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    return {name: module for key, item in items for name, module in _held(item, f"{path}{key}", known).items()}


@dataclass(frozen=True)
class LayerSummary:
    """A layer, or a function with quantizers: its path, type and quantizers, and whether it has a weight."""

    name: str
    type: str
    quantizers: dict[str, str]
    calibrated: bool
    has_weight: bool
    execution: str = "simulate"
    why_simulated: str | None = None
    """The reason why a layer with integer execution is simulated."""
    why_never_called: str | None = None
    """The reason why the model does not call the layer with the example; None if it does, or without an example."""
    gradient: str = ""
    """How the gradients of the layer are quantized; empty if they are in float."""

    @property
    def state(self) -> str:
        """The state of the layer in one word or two, for the table."""
        if self.why_never_called is not None:
            return "never called"
        return "ready" if self.calibrated else "not calibrated"


@dataclass(frozen=True)
class Summary:
    """The result of `summary`; prints as a table."""

    layers: list[LayerSummary]
    unquantized: list[Operation] | None = None
    parameters: int = 0
    bytes_float: int = 0
    bytes_quantized: int = 0
    """The bytes of all parameters if quantized weights are stored as codes and scales."""
    bits_per_weight: float = 0.0
    """The bits of codes and scales for each quantized weight; 0.0 if there are none."""
    unsearched: int = 0
    """The number of weights whose scales follow from the largest values; `calibrate` would search better scales."""

    left = renamed("left", "unquantized")

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns; "output" is there only if an output is quantized."""
        outputs = ("output",) if any(_is_of_output(name) for layer in self.layers for name in layer.quantizers) else ()
        return ("layer", "type", "input", "weight", *outputs, "execution", "state")

    @property
    def size(self) -> str:
        """A line with the size of the weights."""
        per_weight = f" ({self.bits_per_weight:.4g} bits per weight)" if self.bits_per_weight else ""
        return f"weights: {self.bytes_float:,} bytes in float, {self.bytes_quantized:,} quantized{per_weight}"

    def rows(self) -> list[tuple[str, ...]]:
        """The rows of the table, one per layer, as text."""
        rows = []
        for layer in self.layers:
            texts: dict[str, list[str]] = {"input": [], "weight": [], "output": []}
            for name, text in layer.quantizers.items():
                is_weight = name.endswith("_weight_quantizer")
                texts["output" if _is_of_output(name) else "weight" if is_weight else "input"].append(text)
            cells = {
                "layer": layer.name or "(model)",
                "type": layer.type,
                "input": _joined(texts["input"]) or "float",
                "weight": _joined(texts["weight"]) or ("float" if layer.has_weight else ""),
                "output": _joined(texts["output"]),
                "execution": layer.execution,
                "state": layer.state,
            }
            rows.append(tuple(cells[column] for column in self.header))
        return rows

    def __str__(self) -> str:
        return table([self.header, *self.rows()], self._lines(), line=True)

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        return html_result(self.header, self.rows(), self._lines())

    def _lines(self) -> list[str]:
        """The lines below the table."""
        lines = [
            f"{module_name(layer.name)} is simulated: {layer.why_simulated}"
            for layer in self.layers
            if layer.why_simulated
        ]
        lines += [
            f"{module_name(layer.name)} is never called with this example: {layer.why_never_called}"
            for layer in self.layers
            if layer.why_never_called is not None
        ]
        gradients = Counter(layer.gradient for layer in self.layers if layer.gradient)
        lines += [f"gradients of layers and functions, in {count} of them: {text}" for text, count in gradients.items()]
        if self.unsearched:
            weights = "1 weight has" if self.unsearched == 1 else f"{self.unsearched} weights have"
            cure = "fakequant.calibrate(model) searches scales with smaller errors"
            lines.append(f"{weights} the scales of the largest values; {cure}")
        lines.append(self.size)
        if self.unquantized is not None:
            products = [operation for operation in self.unquantized if operation.is_product]
            lines.append(
                f"left in float: {len(products)} products, {len(self.unquantized) - len(products)} other operations"
            )
            others = [operation for operation in self.unquantized if not operation.is_product]
            shown = Counter(map(str, (*products, *others)))  # a recurrent layer has those of all steps
            lines += [f"  {text}{f', {count} times' if count > 1 else ''}" for text, count in shown.items()]
        return lines


@accepts_wrapped_model
def summary(model: nn.Module, example: Any = None, *, inputs: Inputs | None = None) -> Summary:
    """List the quantized layers of a model with their formats and states; with an example also operations in float.

    Args:
        model: a prepared model.
        example: an input, a tuple or a dict of inputs. With an example the model runs, and the table also lists
            operations that are not quantized, and marks layers that are not called: their weights count as float.
        inputs: which part of the example the model gets, as for `calibrate`, if the example is a batch of a loader.

    >>> print(summary(prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), presets.INT8)))
    layer  type    input            weight               execution  state
    -----  ------  ---------------  -------------------  ---------  --------------
    0      Linear  int8 per_tensor  int8 per_channel(0)  simulate   not calibrated
    weights: 80 bytes in float, 48 quantized (16 bits per weight)
    """
    warn_stale_scales(model)
    warn_of_new_layers(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    recording = None if example is None else record_example(model, example, inputs)
    left = None if recording is None else left_of(model, recording)
    idle: dict[nn.Module, str] = {}
    if recording is not None:
        readers = weight_readers(model, recording)
        for layer in {*layers.values()} - modules_called(model, recording):
            read = layer in readers
            idle[layer] = f"{module_name(readers[layer])} uses its weight in float" if read else _UNREAD
    rows = []
    for name, layer in layers.items():
        own = {attribute: getattr(layer, attribute) for attribute in layer.operands(layer)}
        held = {attribute: quantizer for attribute, quantizer in own.items() if quantizer is not None}
        told = layer.execution is not Execution.SIMULATE
        why = layer.why_simulated() if told else None
        rows.append(
            LayerSummary(
                name,
                type(layer).float_class.__name__,
                {attribute: _shown(quantizer) for attribute, quantizer in held.items()},
                _is_calibrated(held),
                bool(layer.products()),
                "integer" if told and why is None else _execution(held),
                why,
                idle.get(layer),
                "" if layer.gradient is None else str(layer.gradient),
            )
        )
    for name, site in model.named_modules():
        if isinstance(site, Site):
            held = {operand: q for operand, q in site._modules.items() if isinstance(q, Quantizer)}
            weights = ", ".join(_shown(q) for q in held.values() if q.kind is Kind.WEIGHT)
            texts = {operand: _shown(q) for operand, q in held.items() if q.kind is Kind.INPUT}
            texts |= {"_weight_quantizer": weights} if weights else {}
            gradient = str(site.gradient) if site.gradient is not None and site.function in TRAINED else ""
            calibrated = _is_calibrated(held)
            how = _execution(held)
            rows.append(LayerSummary(name, site.function, texts, calibrated, bool(weights), how, gradient=gradient))
    follow = [w.quantizer for w in quantized_weights(model).values() if w.quantizer.scales_each_call]
    unsearched = sum(is_searched(one.spec, None) and not one.dynamic for one in follow)
    return Summary(rows, left, sum(p.numel() for p in model.parameters()), *parameter_bytes(model, idle), unsearched)


_UNREAD = "no function of this run reads its weight either"


def _execution(quantizers: Mapping[str, Quantizer]) -> str:
    """The name of the device whose codes all quantizers store, else "simulate"."""
    names = {q.device.name if q.device and q.why_simulated(q.device) is None else "" for q in quantizers.values()}
    return names.pop() or "simulate" if len(names) == 1 else "simulate"


def _is_of_output(quantizer: str) -> bool:
    return quantizer in ("output", "_output_quantizer")


def _joined(texts: list[str]) -> str:
    """Texts joined in one cell; if there are more than two, equal texts are written once, with their number."""
    if len(texts) <= 2:
        return ", ".join(texts)
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in Counter(texts).items())


def parameter_bytes(model: nn.Module, unused: Collection[nn.Module] = ()) -> tuple[int, int, float]:
    """The bytes of all parameters now, the bytes with quantized weights as codes and scales, and bits per such weight.

    Tied weights count once.

    Args:
        unused: layers whose quantizers are not used, so that their weights stay in float.
    """
    bits = {
        parameter: found
        for weight in quantized_weights(model).values()
        if weight.layer not in unused
        and weight.quantizer.mode is Mode.QUANTIZE
        # Not its value: a computed one is no parameter, and may change when it is read.
        and (parameter := weight.parameter) is not None
        and (found := weight_bits(weight)) is not None
    }
    now = sum(p.numel() * p.element_size() for p in model.parameters())
    left = sum(p.numel() * p.element_size() for p in model.parameters() if p not in bits)
    together = bits_of_all(bits.values())
    return now, left + -(-(together.codes + together.scales) // 8), together.per_weight


def _is_calibrated(held: Mapping[str, Quantizer]) -> bool:
    """Whether all quantizers that are on are calibrated, or need no calibration."""
    return not any(quantizer.needs_calibration and quantizer.mode is not Mode.OFF for quantizer in held.values())


def _shown(quantizer: Quantizer) -> str:
    if quantizer.needs_calibration and quantizer.mode is Mode.OFF:  # by `calibrate(unseen="float")`
        return "float"
    words = [str(quantizer.spec), *quantizer.by_value_text()]
    words += (["dynamic"] if quantizer.dynamic else []) + (["off"] if quantizer.mode is Mode.OFF else [])
    return " ".join(words)
