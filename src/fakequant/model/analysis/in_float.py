"""What a prepared model leaves in float, and why: parameters, operations, modules without a quantized form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import CoverageWarning, warn_user
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import QUANTIZED, Recording, has
from fakequant.model.weights import (
    quantized_weights,
    weights_of,
)
from fakequant.nn.functions import SITE_FUNCTIONS, Trait
from fakequant.nn.quantized.forms import own_class, product_function, quantized_class, why_changed
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.sites.sites import TRAINED, Site
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.text import listed, module_name


@dataclass(frozen=True)
class Operation:
    """One operation of a model that computes on float tensors.

    Attributes:
        module: path of the module that calls it, "" for the model itself.
        name: the operation, as torch names it.
        is_product: whether quantized hardware would compute it (convolutions, matrix products, attention, recurrence).
        float_inputs: how many of its float tensor inputs reach it unquantized.
        inputs: how many float tensor inputs it has.
        multiplications: the multiply-accumulates of a product; 0 where its sizes depend on data, and for tables, which
            are only read.
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
    """What stays in float."""

    modules: dict[type[nn.Module], int]
    """How many of each class, those with most parameters first."""
    parameters: float
    """Their share of the model's parameters."""
    products: dict[str, float]
    """The share of operations outside of quantized layers in the model's multiply-accumulates, the largest first."""

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
            advice += f"; fakequant.nn.quantizes registers a quantized form, and {rule} says that float is meant"
        return f"{'; '.join(parts)} ({advice})"


def left_in_float(
    model: nn.Module,
    purposely: set[nn.Module],
    products: Sequence[Operation] = (),
    computed: Collection[nn.Parameter] = (),
) -> Left | None:
    """What of a prepared model could be quantized and is not; None if nothing.

    Layers with a quantized form that no rule takes are in float on purpose, too.

    Args:
        purposely: modules that a rule leaves in float.
        computed: parameters from which quantized weights are computed.
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
    """A line on modules of torch.jit, whose products no run shows; None if there are none.

    Args:
        purposely: modules that a rule leaves in float.
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
        f"modules of torch.jit compute in float what no run shows, and are in no count of products: {named}. Prepare "
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
        inputs: which part of the example these are, as for `calibrate`; None for all of it.

    Raises:
        ConfigError: the model fails on the example.
    """
    return operations_of(record_example(model, example, inputs))


def record_example(model: nn.Module, example: Any, inputs: Inputs | None = None) -> Recording:
    """The recording of a run of a model; arguments and errors are those of `operations`."""
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
    """The operations that see at least one unquantized float input: what `prepare` left in float.

    The model runs once with the example. Modules of torch.jit, into which no run can look, are told in a warning.

    Args:
        model: a prepared model.
        example: an input, a tuple of inputs, or a dict of keyword arguments; with `inputs`, a batch of a data loader.
        products_only: whether to list only what an integer or low-precision unit would compute.
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
    """What `unquantized` returns, for a recorded run."""
    if (hidden := scripted(model, set())) is not None:
        warn_user(hidden, CoverageWarning)
    return [operation for operation in operations_of(recording) if not operation.quantized]


def quantized_parameters(model: nn.Module, recording: Recording) -> set[nn.Parameter]:
    """The parameters that quantizers get, or from which such a weight is computed: `self.base + self.a @ self.b`."""
    reached: set[int] = set()  # values
    for call in reversed(recording.calls):
        if call.function in QUANTIZED or not reached.isdisjoint(call.outputs):
            reached.update(value for value in call.inputs if recording.values[value].constant)
    return {parameter for parameter, number in recording.numbers(model).items() if number in reached}
