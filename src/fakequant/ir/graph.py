"""A graph: its data, and the methods that check, run, compile and print it.

The text has every attribute, the digest of each constant, and the numbers of those with few elements, so that two
graphs with the same text compute the same.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx.experimental.proxy_tensor import make_fx

from fakequant.data.arguments import refuse_stored
from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import GraphError
from fakequant.export import ExportReport
from fakequant.export import export_onnx as export_model
from fakequant.ir.fake_quantization import set_opaque
from fakequant.ir.fx.convert import Converter, needed, type_of
from fakequant.ir.fx.functional import remove_changes_in_place, unite_types
from fakequant.ir.op import DYNAMIC, TensorType
from fakequant.ir.op import to_text as value_to_text
from fakequant.ir.ops import RECURRENT
from fakequant.ir.run.execute import CompiledGraph, compile, run, to_torch
from fakequant.ir.structure import Constant, GraphStructure, GraphType, Input, Validity, check, faults_of, validate
from fakequant.model.run.regions import inline_regions
from fakequant.model.run.tracing import quiet, traced_program
from fakequant.nn.wrappers import fixed_ranges

_SUFFIX = " backward"
"""The end of the names of graphs of gradients. torch's trace detaches what they keep of the forward."""


def backward(graph: GraphType) -> GraphType:
    """The graph that computes the gradients of a graph, by torch's own formulas.

    Its inputs are those of the graph and the gradient of every output. Its outputs are the gradients of the
    floating-point inputs and then of the trainable constants, in their order; one that depends on nothing is zeros.
    The forward is computed again. Every quantizer passes gradients as its specification says.

    Raises:
        GraphError: the graph is not valid, has dynamic dimensions, an output without a gradient or a whole recurrent
            layer, or is a graph of gradients itself.

    >>> from fakequant.ir import Graph, IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2,))
    >>> graph.outputs = [graph.add("FakeQuantize", x, graph.add_constant("s", torch.ones(1)), spec="int4")]
    >>> backward(graph).run(torch.tensor([0.7, -9.0]), torch.tensor([1.0, 1.0]))
    tensor([1., 0.])
    """
    check(graph)
    types = graph.types()
    if dynamic := [id for id, type in types.items() if type.shape.dynamic]:
        raise GraphError(f"t{dynamic[0]} has a dynamic dimension {types[dynamic[0]]}; capture it with static shapes")
    if whole := [id for id in graph.outputs if not types[id].type.floating]:
        raise GraphError(f"the output t{whole[0]} is {types[whole[0]]}, which has no gradient")
    if graph.name.endswith(_SUFFIX) and any(value.name == _gradient(0) for value in graph.inputs.values()):
        raise GraphError(f"{graph.name!r} is a graph of gradients, and gradients of gradients are not recorded")
    if recurrent := [op for op in graph.ops if op.op_type.startswith(RECURRENT)]:
        raise GraphError(
            f"{recurrent[0]}: the gradient of a whole recurrent layer cannot be in a graph; run it by graph.run or "
            "graph.to_torch and call backward of torch, or write the layer as a loop of nn.LSTMCell or nn.GRUCell"
        )
    wanted = [id for id, value in graph.inputs.items() if value.type.type.floating]
    wanted += [id for id, constant in graph.constants.items() if constant.trainable]
    if not wanted:
        raise GraphError("no input is a floating-point tensor and no constant is trainable: there is no gradient")
    given = [*graph.inputs, *graph.constants]
    traced = _traced(graph, [given.index(id) for id in wanted])
    nodes = list(traced.graph.nodes)
    results = list(nodes[-1].args[0])
    result = type(graph)(f"{graph.name}{_SUFFIX}")
    result.inputs = dict(graph.inputs)
    for place, id in enumerate(graph.outputs):
        name = _free(_gradient(place), [value.name for value in result.inputs.values()])
        result.add_input(name, *types[id], id=max([*given, *result.inputs]) + 1)
    places = [*graph.inputs, *graph.constants, *list(result.inputs)[len(graph.inputs) :]]
    live = needed(nodes, results)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    ids = dict(zip(placeholders, places, strict=True))
    used = {ids[node] for node in placeholders if node in live}
    result.constants = {id: constant for id, constant in graph.constants.items() if id in used}
    converter = Converter(result, ids)
    for node in nodes:
        if node in live and node.op == "call_function":
            converter.add(node)
    converter.finish(results)
    return result


def _traced(graph: GraphStructure, wanted: list[int]) -> torch.fx.GraphModule:
    """Forward and backward as one fx graph of inputs, constants and gradients of the outputs."""
    module = to_torch(graph, lifted=True)
    set_opaque(module, True)
    types = graph.types()
    count = len(graph.inputs) + len(graph.constants)
    frozen = [len(graph.inputs) + i for i, constant in enumerate(graph.constants.values()) if constant.frozen]

    def gradients(*tensors: Tensor) -> list[Tensor]:
        leaves = [
            t.detach().requires_grad_() if i in wanted or i in frozen else t for i, t in enumerate(tensors[:count])
        ]
        with torch.enable_grad():
            results = module(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        moved = [i for i, result in enumerate(results) if result.requires_grad]
        sources = [leaves[i] for i in wanted]
        if not moved:
            return [torch.zeros_like(source) for source in sources]
        given = [tensors[count + i] for i in moved]
        found = torch.autograd.grad([results[i] for i in moved], sources, given, allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [_like(value.type) for value in graph.inputs.values()]
        constants = [torch.empty_like(constant.tensor.detach()) for constant in graph.constants.values()]
        outputs = [_like(types[id]) for id in graph.outputs]
        given = (*inputs, *constants, *outputs)
        traced = make_fx(gradients)(*given)
        # Gradients of parts are added to views of zeros; torch's functionalization writes that without views.
        if not remove_changes_in_place(traced.graph):
            traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*given)
        return traced


def _gradient(place: int) -> str:
    return f"gradient_{place}"


def _free(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _like(type: TensorType) -> Tensor:
    return torch.empty(type.shape, dtype=type.type.dtype)


_INLINE = 4
"""The text holds the numbers of constants with at most this many elements."""


def to_text(graph: GraphStructure) -> str:
    """The text of a graph."""
    lines = [f"IR Graph: {_one_line(graph.name)}", "  Inputs:"]
    lines += [f"    t{id} = {json.dumps(value.name)} : {value.type}" for id, value in graph.inputs.items()]
    lines.append(f"  Constants ({len(graph.constants)}):")
    lines += [f"    {_constant_text(id, constant)}" for id, constant in graph.constants.items()]
    lines.append(f"  Operations ({len(graph.ops)}):")
    lines += [f"    {op.detailed()}{f'  # {_one_line(op.origin)}' if op.origin else ''}" for op in graph.ops]
    lines.append(f"  Outputs: {', '.join(f't{id}' for id in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    # What UTF-8 cannot write is written as its number.
    return " ".join(str(text).split()).encode("utf-8", "backslashreplace").decode()


def _constant_text(id: int, constant: Constant) -> str:
    values = _inline(constant.tensor)
    held = f"sha256:{constant.digest()[:32]}" if values is None else value_to_text(values)
    return f"t{id} = {constant.kind} {json.dumps(constant.name)} : {constant.type} = {held}"


def _inline(tensor: Tensor) -> list[Any] | None:
    """The numbers of a small tensor, row by row; None if it is large or its numbers do not determine every bit."""
    if tensor.numel() > _INLINE or tensor.is_complex():
        return None
    values = tensor.detach().cpu().reshape(-1).tolist()
    # A NaN has bits that its text does not tell.
    return None if any(value != value for value in values) else values


class Graph(GraphStructure):
    """Operations between values t0, t1, ..., each made once.

    Attributes:
        name: of the whole.
        inputs: by id, in the order in which `run` takes them.
        constants: by id.
        ops: in the order in which they run.
        outputs: ids of what `run` returns.

    Source: AiDotNet's IRGraph.

    >>> from fakequant.ir import IRType
    >>> graph = Graph("example")
    >>> x = graph.add_input("x", IRType.Float32, (2, 3))
    >>> y = graph.add("ReLU", x)
    >>> graph.outputs = [graph.add("FakeQuantization", y, num_bits=4)]
    >>> print(graph)
    IR Graph: example
      Inputs:
        t0 = "x" : Float32 [2, 3]
      Constants (0):
      Operations (2):
        t1 = ReLU(t0) : Float32 [2, 3]
        t2 = FakeQuantization(t1) {num_bits=4} : Float32 [2, 3]
      Outputs: t2
    >>> graph.run(torch.tensor([[-1.0, 0.1, 0.2], [0.3, 0.5, 0.7]]))
    tensor([[0.0000, 0.1000, 0.2000],
            [0.3000, 0.5000, 0.7000]])
    """

    def faults(self) -> list[str]:
        """The faults of the graph, each with its place; empty if the graph is valid."""
        return list(faults_of(self))

    def validate(self) -> Validity:
        """Whether the graph is valid, and if not, what is wrong with it and where.

        >>> from fakequant.ir import IROp, IRType, TensorShape, TensorType
        >>> graph = Graph("example")
        >>> x = graph.add_input("x", IRType.Float32, (2, 3))
        >>> graph.ops = [IROp("Add", [1], [x, 7], [TensorType(IRType.Float32, TensorShape((2, 3)))])]
        >>> found = graph.validate()
        >>> bool(found)
        False
        >>> print(found)
        t1 = Add(t0, t7) : Float32 [2, 3]: reads t7, which nothing makes
        the graph has no outputs
        """
        return validate(self)

    def check(self) -> Graph:
        """The graph itself, if it is valid.

        Raises:
            GraphError: it is not; names every fault.
        """
        check(self)
        return self

    def run(self, *inputs: Tensor) -> Any:
        """The outputs for some inputs: a tensor, or a tuple if there are several.

        For many calls take `to_torch` or `compile` once: this checks the graph every time, and each result.

        Args:
            inputs: in the order of the graph's inputs.

        Raises:
            GraphError: the graph is not valid, an input is not of the declared type, or an operation fails or makes
                another type than it declares; names it.
        """
        return run(self, inputs)

    def to_torch(self) -> fx.GraphModule:
        """The graph as a module of torch, with the constants as its parameters and buffers (the same tensors).

        Raises:
            GraphError: the graph is not valid.
        """
        return to_torch(self)

    def compile(self, *, exact: bool = True) -> CompiledGraph:
        """The graph as one compiled function, see `fakequant.ir.run.execute.compile`."""
        return compile(self, exact=exact)

    def backward(self) -> Graph:
        """The graph of the gradients, see `fakequant.ir.graph.backward`."""
        return backward(self)

    def __str__(self) -> str:
        return to_text(self).rstrip("\n")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]  graphs can be changed; `hash` is that of the present one


# The length that a dynamic dimension has in an example: torch.export takes 1 for a constant.
_LENGTH = 2


def export_onnx(
    graph: Graph, path: str | os.PathLike[str], example: tuple[Tensor, ...] | None = None, **options: Any
) -> ExportReport:
    """Write a graph as ONNX, every quantizer as QuantizeLinear and DequantizeLinear with the same results.

    Inputs have the names that they have in the graph. Folded weights are float constants in the file.

    Args:
        graph: what to write; it is checked.
        path: the file to write.
        example: its inputs, whose ranges `fakequant.verify_onnx` draws its own from; by default numbers from -1 to 1
            and zeros for integers, with 2 for dynamic dimensions.
        options: further ones of `fakequant.export_onnx`: opset, style, output_names.

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
    given = tuple(_example(value.type) for value in inputs) if example is None else example
    shapes = tuple({axis: Dim.AUTO for axis, n in enumerate(i.type.shape) if n == DYNAMIC} for i in inputs)
    names = [value.name for value in inputs]
    dynamic = shapes if any(shapes) else None
    return export_model(graph.to_torch(), given, path, dynamic_shapes=dynamic, input_names=names, **options)


def _example(type: TensorType) -> Tensor:
    shape = [_LENGTH if n == DYNAMIC else n for n in type.shape]
    x = torch.zeros(shape, dtype=type.type.dtype)
    if not type.type.floating:
        return x
    return torch.linspace(-1.0, 1.0, x.numel()).reshape(shape).to(x.dtype)


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
