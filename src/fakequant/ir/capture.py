"""From a model to a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from fakequant.data.arguments import refuse_stored
from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import GraphError
from fakequant.ir.fx.concatenation import unite_types
from fakequant.ir.fx.convert import Converter, needed, type_of
from fakequant.ir.fx.functional import remove_changes_in_place
from fakequant.ir.graph import Graph
from fakequant.ir.structure import Constant, Input
from fakequant.model.run.regions import inline_regions
from fakequant.model.run.tracing import quiet, traced_program
from fakequant.nn.contexts import fixed_ranges


def capture(
    model: nn.Module,
    example: Any,
    *,
    inputs: Inputs | None = None,
    dynamic_shapes: Any = None,
    name: str | None = None,
) -> Graph:
    """The graph of a model, which computes the same bits.

    Parameters and buffers are constants of the graph, the same tensors as the model's, so that training one trains the
    other. Learned ranges are constants as they are now. The model is captured in the mode it is in; a batch
    normalisation in training mode, which changes its statistics, is refused.

    Args:
        model: any module that torch.export can trace, prepared and calibrated or not quantized at all.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        inputs: which part of the example the model gets, as for `calibrate`: 0 for a loader's batch of (x, y).
        dynamic_shapes: as for `torch.export.export`; such dimensions are -1. A length of 1 is doubled there.
        name: of the graph; by default that of the model's class.

    Returns:
        A valid graph. Its inputs are the tensors of the example in order, its outputs the tensors that the model
        returns in order.

    Raises:
        GraphError: an operation that cannot be in a graph; names it and the module it is in.
        CalibrationError: a quantizer that is not calibrated.
        torch.export's errors: the model cannot be traced.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "INT8_WEIGHT_ONLY")
    >>> print(capture(model, torch.ones(3, 4)).ops[0])
    t5 = FakeQuantize(t0) : Float32 [2, 4]
    """
    refuse_sharded(model, "capture")
    refuse_stored(model, "capture")
    args, kwargs = example_arguments(example, inputs)
    # With gradients in any case: only so the trace says which parts of the model are without them.
    with fixed_ranges(model), quiet("torch.export"), torch.enable_grad():
        program = traced_program(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        inline_regions(program, gradients=True)
        # Where views of the same memory are about, torch's own functionalization sorts them out.
        if not remove_changes_in_place(program.graph):
            program = program.run_decompositions({})
        unite_types(program.graph)
        return _convert(program, model, name or type(model).__name__)


def _convert(program: ExportedProgram, model: nn.Module, name: str) -> Graph:
    graph = Graph(name)
    nodes = list(program.graph.nodes)
    by_name = {node.name: node for node in nodes}
    results = [by_name[name] for name in _result_names(program)]
    wanted = needed(nodes, results)
    ids: dict[fx.Node, int] = {}
    for spec in program.graph_signature.input_specs:
        node = by_name[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
            ids[node] = len(ids)
            graph.inputs[ids[node]] = Input(node.name, type_of(node.meta["val"]))
        elif node in wanted:
            ids[node] = len(ids)
            graph.constants[ids[node]] = _constant(spec, program, model)
    converter = Converter(graph, ids)
    for node in nodes:
        if node in wanted and node not in ids and node.op != "output":
            converter.add(node)
    converter.finish(results)
    return graph


def _constant(spec: Any, program: ExportedProgram, model: nn.Module) -> Constant:
    """The tensor that a placeholder stands for, the model's own where it is a parameter or buffer."""
    target = spec.target
    if spec.kind is InputKind.PARAMETER:
        path, _, own = target.rpartition(".")
        parameter = model.get_submodule(path)._parameters[own]  # the attribute may be what is computed from it
        assert parameter is not None
        return Constant(target, parameter)
    if spec.kind is InputKind.BUFFER:
        return Constant(target, model.get_buffer(target))
    value = program.constants.get(target)
    if not isinstance(value, Tensor):
        raise GraphError(f"the input {spec.arg.name} of kind {spec.kind.name} is no tensor; graphs hold tensors only")
    return Constant(target, value)


def _result_names(program: ExportedProgram) -> list[str]:
    """The nodes that the model returns.

    Raises:
        GraphError: it changes a buffer or an input, or returns something other than tensors and None.
    """
    found = []
    for spec in program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            what = spec.kind.name.lower().replace("_", " ")
            raise GraphError(
                f"the model changes {spec.target or spec.arg.name} in place ({what}), which graphs do not; "
                "call model.eval(), or return the new value"
            )
        if isinstance(spec.arg, TensorArgument):
            found.append(spec.arg.name)
        elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
            raise GraphError(f"the model returns {spec.arg}, and a graph returns tensors")
    if not found:
        raise GraphError("the model returns no tensor")
    return found
