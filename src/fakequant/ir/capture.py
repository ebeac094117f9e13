"""Capture graphs from models, and write graphs to ONNX files."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from fakequant.data.arguments import refuse_stored
from fakequant.data.batches import Inputs, device_named, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import GraphError
from fakequant.export import ExportReport
from fakequant.export import export_onnx as export_model
from fakequant.ir.convert import needed, operations, remove_changes_in_place, unite_types
from fakequant.ir.graph import Constant, Graph, Input
from fakequant.ir.op import DYNAMIC
from fakequant.ir.table import type_of
from fakequant.model.run.tracing import inline_regions, quiet, traced_program
from fakequant.nn.wrappers import fixed_ranges


def capture(
    model: nn.Module,
    example: Any,
    *,
    inputs: Inputs | None = None,
    dynamic_shapes: Any = None,
    name: str | None = None,
) -> Graph:
    """Capture a model as a graph that computes the same bits.

    Parameters and buffers of the model are constants of the graph, the same tensors, so that training the graph also
    trains the model. Learned ranges become constants with their present values. The model is captured in its present
    mode; a batch normalisation in training mode, which changes its statistics, is refused. Gradients of the graph are
    not quantized, even if layers quantize their gradients.

    Args:
        model: any module that torch.export can trace, prepared and calibrated or not quantized at all.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        inputs: which part of the example the model gets, as for `calibrate`: 0 for a loader's batch of (x, y).
        dynamic_shapes: as for `torch.export.export`; such dimensions are -1 in the graph. Where the
            example has length 1 in such a dimension, it is repeated twice.
        name: the name of the graph; by default the name of the model's class.

    Returns:
        A valid graph. Its inputs are the tensors of the example in order, its outputs the tensors that the model
        returns in order.

    Raises:
        GraphError: an operation that cannot be in a graph; the message names it and its module.
        CalibrationError: a quantizer that is not calibrated.
        torch.export's errors: the model cannot be traced.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), "INT8_WEIGHT_ONLY")
    >>> print(capture(model, torch.ones(3, 4)).ops[0])
    t5 = FakeQuantize(t0) : Float32 [2, 4]
    """
    refuse_sharded(model, "capture")
    refuse_stored(model, "capture")
    args, kwargs = example_arguments(example, inputs)
    # Gradients are on, so that the trace marks the parts under no_grad.
    with fixed_ranges(model), quiet("torch.export"), torch.enable_grad():
        with device_named(model, (args, kwargs), "the example"):
            program = traced_program(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        inline_regions(program, gradients=True)
        # Where views of the same memory are about, torch's own functionalization sorts them out.
        if not remove_changes_in_place(program.graph):
            program = program.run_decompositions({})
        unite_types(program.graph)
        graph = Graph(name or type(model).__name__)
        nodes = list(program.graph.nodes)
        by_name = {node.name: node for node in nodes}
        results = []
        for spec in program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                what = spec.kind.name.lower().replace("_", " ")
                raise GraphError(
                    f"the model changes {spec.target or spec.arg.name} in place ({what}), which graphs do not; "
                    "call model.eval(), or return the new value"
                )
            if isinstance(spec.arg, TensorArgument):
                results.append(by_name[spec.arg.name])
            elif not (isinstance(spec.arg, ConstantArgument) and spec.arg.value is None):
                raise GraphError(f"the model returns {spec.arg}, but a graph returns tensors; return tensors only")
        if not results:
            raise GraphError("the model returns no tensor; return at least one tensor")
        live = needed(nodes, results)
        ids: dict[torch.fx.Node, int] = {}
        for spec in program.graph_signature.input_specs:
            node, target = by_name[spec.arg.name], str(spec.target)
            if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                ids[node] = len(ids)
                graph.inputs[ids[node]] = Input(node.name, type_of(node.meta["val"]))
            elif node in live:
                ids[node] = len(ids)
                value = program.constants.get(target)
                if spec.kind is InputKind.PARAMETER:  # the attribute may be what is computed from it
                    path, _, own = target.rpartition(".")
                    value = model.get_submodule(path)._parameters[own]
                elif spec.kind is InputKind.BUFFER:
                    value = model.get_buffer(target)
                if not isinstance(value, Tensor):
                    kind = spec.kind.name
                    raise GraphError(f"the input {spec.arg.name} of kind {kind} is not a tensor; graphs hold tensors")
                graph.constants[ids[node]] = Constant(target, value)
        graph.ops, graph.outputs = operations([node for node in nodes if node in live], results, ids)
    return graph.check()


# The length that a dynamic dimension has in an example: torch.export takes 1 for a constant.
_LENGTH = 2


def export_onnx(
    graph: Graph, path: str | os.PathLike[str], example: tuple[Tensor, ...] | None = None, **options: Any
) -> ExportReport:
    """Write a graph as ONNX, with every quantizer as QuantizeLinear and DequantizeLinear with the same results.

    Inputs have their names in the graph. Folded weights are float constants in the file.

    Args:
        graph: the graph, which is checked.
        path: the file to write.
        example: inputs, in whose ranges `fakequant.verify_onnx` draws random inputs; by default numbers from -1 to 1,
            zeros for integers, and 2 for dynamic dimensions.
        options: further options of `fakequant.export_onnx`: opset, style, output_names.

    Raises:
        GraphError: the graph is not valid.
        ExportError, OutputError: as `fakequant.export_onnx` raises them.

    >>> import tempfile
    >>> from fakequant.ir import IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("image", IRType.Float32, (-1, 4))
    >>> graph.outputs = [graph.add("FakeQuantization", x, num_bits=8, scale=0.5)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = export_onnx(graph, folder + "/graph.onnx")
    >>> [q.expressed for q in report.quantizers]
    ['QuantizeLinear and DequantizeLinear, INT8, per tensor']
    """
    inputs = list(graph.check().inputs.values())
    if example is None:
        tensors = []
        for type, shape in (value.type for value in inputs):
            x = torch.zeros([_LENGTH if n == DYNAMIC else n for n in shape], dtype=type.dtype, device="cpu")
            tensors.append(
                torch.linspace(-1.0, 1.0, x.numel(), device="cpu").reshape(x.shape).to(x.dtype) if type.floating else x
            )
        example = tuple(tensors)
    shapes = tuple({axis: Dim.AUTO for axis, n in enumerate(i.type.shape) if n == DYNAMIC} for i in inputs)
    names = [value.name for value in inputs]
    dynamic = shapes if any(shapes) else None
    return export_model(graph.to_torch(), example, path, dynamic_shapes=dynamic, input_names=names, **options)
