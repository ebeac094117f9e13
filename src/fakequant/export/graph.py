"""Read and edit an ONNX graph: constants, types and shapes by name, and unique new names."""

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
    """An editable ONNX graph: looks up constants and values by name, and adds constants."""

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        self._constants: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self._values: dict[str, ValueInfoProto] = {
            value.name: value for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._labels: set[str] = set()
        self._shared: dict[tuple[int, tuple[int, ...], bytes], str] = {}

    def label(self, wanted: str) -> str:
        """Return a unique prefix for the names of a quantizer's nodes and constants."""
        label, count = wanted, 1
        while label in self._labels:
            count += 1
            label = f"{wanted}#{count}"
        self._labels.add(label)
        return label

    def is_constant(self, name: str) -> bool:
        """Whether a value is a constant in the file."""
        return name in self._constants

    def constant(self, name: str) -> TensorProto:
        """Return a constant by name."""
        return self._constants[name]

    def tensor(self, name: str) -> Tensor:
        """Return a constant as a tensor; types that torch lacks are converted to float32."""
        from onnx import TensorProto, numpy_helper

        constant = self._constants[name]
        array = numpy_helper.to_array(constant)
        if constant.data_type == TensorProto.BFLOAT16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        if array.dtype.isbuiltin != 1:
            # Types of ml_dtypes: 4-bit integers and 8-bit floats, which float32 represents exactly.
            array = array.astype(np.float32)
        return torch.from_numpy(array.copy())

    def add(self, name: str, array: np.ndarray, *, shared: bool = False) -> str:
        """Add a constant and return its name, which gets a number if the name is taken.

        Args:
            name: the wanted name.
            array: the values.
            shared: whether to reuse a constant with the same contents, for example for tied weights.
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
        """Return the element type of a value, as in TensorProto."""
        if name in self._constants:
            return self._constants[name].data_type
        return self._values[name].type.tensor_type.elem_type

    def shape(self, name: str) -> list[Dimension]:
        """Return the shape of a value."""
        if name in self._constants:
            return list(self._constants[name].dims)
        dims = self._values[name].type.tensor_type.shape.dim
        return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims]

    def declare(self, name: str, kind: int, shape: Sequence[Dimension], *, visible: bool = False) -> None:
        """Declare a value that nodes will compute.

        Args:
            name: of the value.
            kind: its element type, as in TensorProto.
            shape: its shape.
            visible: whether it is a value of this graph, not of one inside of it.
        """
        from onnx import helper

        self._values[name] = helper.make_tensor_value_info(name, kind, list(shape))
        if visible:
            self.graph.value_info.append(self._values[name])

    def finish(self, nodes: Iterable[NodeProto]) -> None:
        """Replace the nodes of the graph, keep the constants that they use, and remove the exporter's debug data."""
        kept = list(nodes)
        del self.graph.node[:]
        self.graph.node.extend(kept)
        used = {output.name for output in self.graph.output} | names_read(self.graph.node)
        del self.graph.initializer[:]
        self.graph.initializer.extend(tensor for name, tensor in self._constants.items() if name in used)
        _strip(self.graph)


def names_read(nodes: Iterable[NodeProto]) -> set[str]:
    """Return the names of all inputs of nodes, including those that only their inner graphs read."""
    names: set[str] = set()
    for node in nodes:
        names.update(node.input)
        for inner in inner_graphs(node):
            names |= names_read(inner.node) | {output.name for output in inner.output}
    return names


def inner_graphs(node: NodeProto) -> Sequence[GraphProto]:
    """Return the graphs in the attributes of a node, such as branches and loops."""
    return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else []), *a.graphs)]


def _strip(graph: GraphProto) -> None:
    """Remove stack traces and graph dumps: they contain paths of the author's machine and can exceed the weights."""
    for item in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
    for tensor in graph.initializer:
        tensor.ClearField("doc_string")
    for node in graph.node:
        node.ClearField("doc_string")
        for inner in inner_graphs(node):
            _strip(inner)


def stored(array: np.ndarray, element: ElementType) -> np.ndarray:
    """Convert an array of codes to the numpy type of an element type; 4-bit codes are packed later."""
    from onnx import TensorProto, helper

    return array.astype(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(element.name)))


def stored_codes(codes: Tensor, element: ElementType) -> np.ndarray:
    """Convert codes from `fakequant.quantize` to the numpy type of an element type."""
    from onnx import TensorProto, helper

    if not element.integer:
        bits = codes.contiguous().view(torch.uint8).numpy()
        return bits.view(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(element.name)))
    return stored(codes.numpy(), element)
