"""Run a file piece by piece, so that only the tensors of one piece are in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from fakequant.export.graph import names_read

if TYPE_CHECKING:
    from onnx import ModelProto

_TENSORS_PER_PIECE = 64
"""512 blocks with four quantizers become 48 pieces, and a session takes a few milliseconds."""


class Runtime(Protocol):
    """Runs a model and returns its inputs, outputs and watched tensors by name."""

    @property
    def name(self) -> str: ...

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class _Piece(NamedTuple):
    runtime: Runtime
    inputs: list[str]
    groups: list[int]


class Pieces:
    """A model that runs in pieces of consecutive nodes; every node gets and computes the same as in one run.

    Args:
        model: the model, with its nodes in the order of computation.
        groups: names of tensors that are read together.
        load: makes the runtime of a piece, from its model and the names of the tensors to return.
    """

    def __init__(
        self,
        model: ModelProto,
        groups: Sequence[Sequence[str]],
        load: Callable[[ModelProto, list[str]], Runtime],
    ) -> None:
        self.outputs = [output.name for output in model.graph.output]
        cutter = _Cutter(model, groups)
        self._pieces: list[_Piece] = []
        for first, end in pairwise(cutter.cuts):
            indices = [index for index, ready in enumerate(cutter.ready) if first <= ready < end]
            names = [name for index in indices for name in groups[index]]
            part = cutter.part(first, end, names)
            inputs = [value.name for value in part.graph.input]
            self._pieces.append(_Piece(load(part, names), inputs, indices))
        self._last = {name: at for at, piece in enumerate(self._pieces) for name in piece.inputs}
        self._last |= dict.fromkeys(self.outputs, len(self._pieces))
        self.runtime = self._pieces[0].runtime

    def run(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
        """Yield the tensors of every piece by name, and the indices of the groups that are among them.

        The tensors of the last piece include the outputs of the model.
        """
        held = dict(inputs)
        for at, piece in enumerate(self._pieces):
            given = held if len(self._pieces) == 1 else {name: held[name] for name in piece.inputs}
            held |= piece.runtime.run(given)
            yield held, piece.groups
            held = {name: x for name, x in held.items() if self._last.get(name, 0) > at}


class _Cutter:
    """Cuts a graph where all tensors that later nodes read have types that numpy has.

    Attributes:
        ready: for every group the node after which all its tensors are computed.
        cuts: the first nodes of the pieces, and the number of nodes.
    """

    def __init__(self, model: ModelProto, groups: Sequence[Sequence[str]]) -> None:
        graph = model.graph
        self._model = model
        self._given = {value.name: value for value in graph.input}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._made = {name: at for at, node in enumerate(graph.node) for name in node.output}
        self._types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
        self._end = max(len(graph.node), 1)
        known = dict.fromkeys((*self._given, *self._constants), 0) | self._made
        self.ready = [max((known.get(name, self._end - 1) for name in names), default=0) for names in groups]
        self._last = {name: at for at, node in enumerate(graph.node) for name in names_read([node])}
        for names, at in zip(groups, self.ready, strict=True):
            self._last |= {name: max(at, self._last.get(name, 0)) for name in names}
        self.cuts = [0, *self._cuts(groups), self._end]

    def _cuts(self, groups: Sequence[Sequence[str]]) -> Iterator[int]:
        read = Counter[int]()
        for names, at in zip(groups, self.ready, strict=True):
            read[at] += len(names)
        waiting, blocked = 0, 0
        for at, node in enumerate(self._model.graph.node[:-1]):
            blocked = max([blocked, *(self._last.get(name, 0) for name in node.output if not self._can_leave(name))])
            waiting += read[at]
            if waiting >= _TENSORS_PER_PIECE and blocked <= at:
                waiting = 0
                yield at + 1

    def _can_leave(self, name: str) -> bool:
        from onnx import TensorProto

        in_numpy = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL)
        return self._types.get(name) in in_numpy

    def part(self, first: int, end: int, watched: Sequence[str]) -> ModelProto:
        """Return the model of the nodes from `first` to `end`; all nodes are the model itself."""
        from onnx import ModelProto, helper

        if (first, end) == (0, self._end):
            return self._model
        graph = self._model.graph
        nodes = graph.node[first:end]
        part = ModelProto(ir_version=self._model.ir_version)
        part.opset_import.extend(self._model.opset_import)
        part.functions.extend(self._model.functions)
        part.graph.name = graph.name
        part.graph.node.extend(nodes)
        part.graph.output.extend(o for o in graph.output if first <= self._made.get(o.name, self._end - 1) < end)
        finished = {output.name for output in part.graph.output}
        made = [name for node in nodes for name in node.output]
        leaving = [name for name in made if self._last.get(name, 0) >= end and name not in finished]
        read = dict.fromkeys((*names_read(nodes), *watched, *finished))
        part.graph.initializer.extend(self._constants[name] for name in read if name in self._constants)
        part.graph.input.extend(self._given[name] for name in read if name in self._given)
        earlier = [name for name in read if self._made.get(name, end) < first]
        # Without shapes: those of the file may be of the example.
        for names, values in ((earlier, part.graph.input), (leaving, part.graph.output)):
            values.extend(helper.make_tensor_value_info(name, self._types[name], None) for name in names)
        part.graph.value_info.extend(
            helper.make_tensor_value_info(name, self._types[name], None) for name in made if name in self._types
        )
        return part
