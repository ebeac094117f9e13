"""What a prepared model computes and what of it stays in float, read from one run of the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import CoverageWarning, warn_user
from fakequant.model.analysis.coverage import Operation, scripted
from fakequant.model.run.recorded import QUANTIZED, FunctionCall, Recording
from fakequant.model.run.recording import record
from fakequant.model.run.traits import has
from fakequant.nn.sites.functions import SITE_FUNCTIONS
from fakequant.nn.sites.traits import Trait
from fakequant.nn.wrappers import unwraps


def operations(model: nn.Module, example: Any, inputs: Inputs | None = None) -> list[Operation]:
    """All operations of a model that compute on float tensors, in the order of one run.

    Args:
        model: a prepared (or float) model; quantizers need not be calibrated.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
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
        read = _moved(name, floats)
        if call.inputs and fixed.issuperset(call.inputs):
            fixed.update(call.outputs)
        if name in QUANTIZED or has(name, Trait.EMPTY):
            quantized.update(call.outputs)
        elif has(name, Trait.CODES):
            if read and quantized.issuperset(read):
                quantized.update(call.outputs)
        elif operands := _operands(recording, call, floats, fixed):
            # What comes of two of several tensors is multiplied with the next one, in float.
            is_list = name in SITE_FUNCTIONS and SITE_FUNCTIONS[name].list_position is not None
            between = max(len(operands) - 2, 0) if call.is_product and is_list else 0
            in_float = sum(value not in quantized for value in operands) + between
            inputs = len(operands) + between
            found.append(Operation(call.owner or "", name, call.is_product, in_float, inputs, call.multiplications))
    return found


def _moved(name: str, floats: list[int]) -> list[int]:
    """The inputs from which a function that only moves values makes its result."""
    if name == "copy":  # the first is overwritten
        return floats[1:]
    return floats if name != "setitem" or len(floats) > 1 else []  # `x[i] = 0.37` writes a number without a quantizer


@unwraps
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
    """The parameters that quantizers get, or from which such a weight is computed: `self.base + self.a @ self.b`.

    Args:
        model: a prepared model.
        recording: of its run.
    """
    reached: set[int] = set()  # values
    for call in reversed(recording.calls):
        if call.function in QUANTIZED or not reached.isdisjoint(call.outputs):
            reached.update(value for value in call.inputs if recording.values[value].constant)
    return {parameter for parameter, number in recording.numbers(model).items() if number in reached}


def _operands(recording: Recording, call: FunctionCall, floats: list[int], fixed: set[int]) -> list[int]:
    """The values that count: of a product its factors, of anything else the activations.

    A product's bias is added in higher precision, and statistics, affine parameters and constants of other operations
    are no tensors that an engine would quantize.
    """
    if recording.is_constant(call) or not any(recording.values[output].is_float for output in call.outputs):
        return []
    if call.is_product:
        return list(call.factors)
    return [value for value in floats if value not in fixed]
