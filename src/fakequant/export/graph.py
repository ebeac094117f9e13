"""An ONNX graph as `lower` needs it: constants by name, types and shapes by name, fresh names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fakequant.export.capability import Dimension, ElementType

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto


class GraphEditor:
    """The constants and values of a graph, and what is added to them."""

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        self._constants: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self._values: dict[str, ValueInfoProto] = {
            value.name: value for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._labels: set[str] = set()
        self._shared: dict[tuple[int, tuple[int, ...], bytes], str] = {}

    def label(self, wanted: str) -> str:
        """A name that no other quantizer has, to begin the names of its nodes and constants with."""
        label, count = wanted, 1
        while label in self._labels:
            count += 1
            label = f"{wanted}#{count}"
        self._labels.add(label)
        return label

    def is_constant(self, name: str) -> bool:
        """Whether a value is in the file."""
        return name in self._constants

    def constant(self, name: str) -> TensorProto:
        """A constant by name."""
        return self._constants[name]

    def tensor(self, name: str) -> Tensor:
        """A constant as a tensor; types that torch lacks come as float32."""
        from onnx import TensorProto, numpy_helper

        constant = self._constants[name]
        array = numpy_helper.to_array(constant)
        if constant.data_type == TensorProto.BFLOAT16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        if array.dtype.isbuiltin != 1:
            # ml_dtypes: 4-bit integers and 8-bit floats, whose values float32 holds.
            array = array.astype(np.float32)
        return torch.from_numpy(array.copy())

    def add(self, name: str, array: np.ndarray, *, shared: bool = False) -> str:
        """Add a constant and return its name, which has a number if another constant has the name.

        Args:
            shared: whether one with the same contents is taken whatever its name (tied weights).
        """
        from onnx import numpy_helper

        tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        content = (tensor.data_type, tuple(tensor.dims), tensor.raw_data)
        if shared and content in self._shared:
            return self._shared[content]
        count = 1
        while tensor.name in self._constants and self._constants[tensor.name] != tensor:
            count += 1
            tensor.name = f"{name}#{count}"
        self._constants[tensor.name] = tensor
        if shared:
            self._shared[content] = tensor.name
        return tensor.name

    def type(self, name: str) -> int:
        """The element type of a value, as in TensorProto."""
        if name in self._constants:
            return self._constants[name].data_type
        return self._values[name].type.tensor_type.elem_type

    def shape(self, name: str) -> list[Dimension]:
        """The shape of a value."""
        if name in self._constants:
            return list(self._constants[name].dims)
        dims = self._values[name].type.tensor_type.shape.dim
        return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims]

    def finish(self, nodes: Iterable[NodeProto]) -> None:
        """Put in these nodes and the constants that they use, without what torch's exporter notes about the source."""
        kept = list(nodes)
        del self.graph.node[:]
        self.graph.node.extend(kept)
        used = {output.name for output in self.graph.output} | _used(self.graph)
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensor for name, tensor in self._constants.items() if name in used)
        _strip(self.graph)


def _used(graph: GraphProto) -> set[str]:
    """The names that the nodes of a graph and of the graphs inside it read."""
    names: set[str] = set()
    for node in graph.node:
        names.update(node.input)
        for inner in inner_graphs(node):
            names |= _used(inner) | {output.name for output in inner.output}
    return names


def inner_graphs(node: NodeProto) -> Sequence[GraphProto]:
    """The graphs in a node's attributes: branches and loops."""
    return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else []), *a.graphs)]


def _strip(graph: GraphProto) -> None:
    """Remove stack traces and graph dumps: they name files of the author's machine, and can outweigh the weights."""
    for item in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
    for tensor in graph.initializer:
        tensor.ClearField("doc_string")
    for node in graph.node:
        node.ClearField("doc_string")
        for inner in inner_graphs(node):
            _strip(inner)


def stored(array: np.ndarray, element: ElementType) -> np.ndarray:
    """An array of codes in the numpy type of an element type; 4-bit codes are packed when they are written."""
    from onnx import TensorProto, helper

    return array.astype(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(element.name)))


def stored_codes(codes: Tensor, element: ElementType) -> np.ndarray:
    """Codes as `fakequant.quantize` makes them, in the numpy type of an element type."""
    from onnx import TensorProto, helper

    if not element.integer:
        bits = codes.contiguous().view(torch.uint8).numpy()
        return bits.view(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(element.name)))
    return stored(codes.numpy(), element)
