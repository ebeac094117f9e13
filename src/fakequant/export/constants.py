"""Fold quantized tensors that do not depend on any input into constants, computed by torch with the model's bits.

Examples are weights from a hook or a parametrization, learned queries and position tables. torch's exporter folds some
of them too, but with numpy's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

_UNKNOWN = object()


def fold_constants(program: ExportedProgram, targets: Container[Any]) -> None:
    """Replace the first argument of nodes with these targets by a constant, in place, if it depends on no input.

    Parameters, buffers and random values are not replaced.
    """
    readers = {node: _source(node) for node in program.graph.nodes if node.target in targets}
    if all(source.op == "placeholder" for source in readers.values()):
        return
    values: dict[tuple[fx.Node, int], Tensor] = {}
    read: dict[fx.Node, tuple[fx.Node, int]] = {}
    for reader, value in _Known(program).values(readers):
        if readers[reader].op != "placeholder":
            # The model may write to the tensor between two readers.
            read[reader] = key = readers[reader], 0 if value.is_inference() else value._version
            values.setdefault(key, value.clone())
    constants = {key: _add(program, f"fakequant_constant_{i}", values[key], key[0]) for i, key in enumerate(values)}
    for reader, key in read.items():
        reader.update_arg(0, constants[key])
    program.graph.eliminate_dead_code(lambda node: node.is_impure() or _is_of_transform(node))
    program.graph_module.recompile()


def _source(node: fx.Node) -> fx.Node:
    """Return the first argument of a node, before any detach."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return _source(source) if source.target is torch.ops.aten.detach.default else source


class _Known:
    """The values of a graph that depend only on parameters, buffers and numbers."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._values: dict[fx.Node, Any] = {}
        named = {**dict(program.named_parameters()), **dict(program.named_buffers()), **program.constants}
        for node, spec in zip(_placeholders(program), program.graph_signature.input_specs, strict=True):
            if spec.kind is not InputKind.USER_INPUT and spec.target in named:
                value = named[spec.target]
                self._values[node] = value.detach() if isinstance(value, Tensor) else value
        self._owned = {value.untyped_storage().data_ptr() for value in _tensors(self._values)}

    def values(self, readers: Mapping[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, Tensor]]:
        """Yield each reader with a known source, and the value of the source at that point of the graph."""
        for node in self._program.graph.nodes:
            value = self._values.get(readers[node]) if node in readers else None
            if isinstance(value, Tensor):
                yield node, value
            if node.op == "get_attr":
                self._values[node] = getattr(self._program.graph_module, str(node.target))
            elif node.op == "call_function" and not self._compute(node):
                break

    def _compute(self, node: fx.Node) -> bool:
        """Compute a node if its inputs are known; returns False if no later value can be known."""
        if _is_of_transform(node):
            return True
        known = all(source in self._values for source in node.all_input_nodes)
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            changed = self._changed(node, schema)
            if changed is None:
                return False
            # A write to the model's own tensors is not executed here, and a write of an unknown value is not known.
            if not known or changed & self._owned:
                self._forget(changed)
                return True
        if known and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._values[source])
            with torch.no_grad():
                self._values[node] = cast("Callable[..., Any]", node.target)(*args, **kwargs)
        return True

    def _changed(self, node: fx.Node, schema: Any) -> set[int] | None:
        """Return the addresses of the memory that a node writes to, or None if they are not known."""
        arguments = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
        writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = [arguments.get(name) for name in writes]
        sources = [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node)]
        if any(source not in self._values for source in sources):
            return None
        return {value.untyped_storage().data_ptr() for value in _tensors({s: self._values[s] for s in sources})}

    def _forget(self, memory: set[int]) -> None:
        for node in list(self._values):
            if any(value.untyped_storage().data_ptr() in memory for value in _tensors({node: self._values[node]})):
                del self._values[node]


def _is_of_transform(node: fx.Node) -> bool:
    """Whether a node begins or ends a `torch.vmap`, or wraps a tensor for it."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _tensors(values: dict[fx.Node, Any]) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(list(values.values())) if isinstance(leaf, Tensor))


def _placeholders(program: ExportedProgram) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def _add(program: ExportedProgram, name: str, value: Tensor, like: fx.Node) -> fx.Node:
    """Add a constant to the program and return its placeholder, which comes before those of the inputs."""
    first = next(node for node in program.graph.nodes if node.op == "placeholder")
    with program.graph.inserting_before(first):
        node = program.graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
    program.graph_signature.input_specs.insert(0, spec)
    program.constants[name] = value
    return node
