"""Buffers that a model writes, as those of streaming models: inputs and outputs of the file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fakequant.errors import ExportError
from fakequant.restore import forwards_of, restore_after

if TYPE_CHECKING:
    from onnx import ModelProto

_NEXT = "next_"
"""How the name of the output begins that has the new value of an input."""


def states(program: ExportedProgram) -> dict[str, str]:
    """The buffers that a model writes and on whose values its outputs depend, by the names of inputs for them.

    Raises:
        ExportError: the model writes a tensor in place that is no buffer.
    """
    written = _written(program.graph)
    if not written:
        return {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.arg.name in written:
            raise ExportError(
                f"forward writes the tensor {spec.target}, which is no buffer; register it by register_buffer, and it "
                "becomes an input and an output of the file"
            )
    program = program.run_decompositions({})
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    held = {str(spec.target): nodes[spec.arg.name] for spec in signature.input_specs if spec.kind is InputKind.BUFFER}
    mutations = [spec for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION]
    changed = {str(spec.target): spec.arg.name for spec in mutations}
    wanted = {spec.arg.name for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT}
    found: list[str] = []
    while new := [path for path in changed if path not in found and wanted & _reached(held[path])]:
        found += new
        wanted |= {changed[path] for path in new}
    return {f"state_{path.replace('.', '_')}": path for path in changed if path in found}


def _written(graph: fx.Graph) -> set[str]:
    """The placeholders of a graph whose memory its nodes write."""
    base = {node: node.name for node in graph.nodes if node.op == "placeholder"}
    written: set[str] = set()
    for node in graph.nodes:
        for argument, value in zip(
            getattr(getattr(node.target, "_schema", None), "arguments", ()), node.args, strict=False
        ):
            if argument.alias_info is not None and isinstance(value, fx.Node) and value in base:
                base[node] = base[value]
                written |= {base[value]} if argument.alias_info.is_write else set()
    return written


def _reached(node: fx.Node) -> set[str]:
    """The names of a node and of all that depend on it."""
    waiting, seen = [node], {node.name}
    while waiting:
        new = [user for user in waiting.pop().users if user.name not in seen]
        seen.update(user.name for user in new)
        waiting += new
    return seen


@contextmanager
def as_arguments(model: nn.Module, found: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    """A context in which a model takes buffers as arguments and also returns their new values; gives those of now.

    Args:
        model: what is traced.
        found: see `states`.
    """
    if not found:
        yield {}
        return
    forward = model.forward
    # A buffer may be that of several modules.
    places = [
        (module._buffers, attribute, name)
        for name, path in found.items()
        for module in model.modules()
        for attribute, buffer in module._buffers.items()
        if buffer is model.get_buffer(path)
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name).clone() for name in found}
        before = [buffers[attribute] for buffers, attribute, _ in places]
        try:
            for buffers, attribute, name in places:
                buffers[attribute] = given[name]
            result = forward(*args, **kwargs)
            after = {name: buffers[attribute] for buffers, attribute, name in places}
        finally:
            for (buffers, attribute, _), buffer in zip(places, before, strict=True):
                buffers[attribute] = buffer
        return result, [after[name] for name in found]

    signature = inspect.signature(forward)
    parameters = [*signature.parameters.values()]
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[at:at] = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in found]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  torch reads the names

    with restore_after(forwards_of([model])):
        vars(model)["forward"] = run
        yield {name: model.get_buffer(path).detach().clone() for name, path in found.items()}


def with_state(model: nn.Module, found: Mapping[str, str], dynamic_shapes: Any) -> Any:
    """Dynamic shapes by name, with those of the buffers, which follow from the others."""
    if dynamic_shapes is None or not found:
        return dynamic_shapes
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(inspect.signature(model.forward).parameters, dynamic_shapes, strict=False))
    free = {name: dict.fromkeys(range(model.get_buffer(path).dim()), Dim.AUTO) for name, path in found.items()}
    return {**dynamic_shapes, **free}


def name_outputs(model: ModelProto, found: Mapping[str, str]) -> None:
    """Name the last outputs of a graph, the new values of the buffers."""
    from onnx import helper

    for name, output in zip(reversed([*found]), reversed(model.graph.output), strict=False):
        model.graph.node.append(helper.make_node("Identity", [output.name], [f"{_NEXT}{name}"]))
        output.name = f"{_NEXT}{name}"
