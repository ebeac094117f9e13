"""An editor of ONNX graphs, the records of a file's inputs, and the tensors of batches for the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fakequant.data.batches import OF_TORCH
from fakequant.errors import VerificationError
from fakequant.export.capability import INPUT_DTYPES, Dimension, ElementType, InputRecord

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto


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

        `shared` reuses a constant with the same contents, as for tied weights.
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
        """Declare the type and shape of a value that nodes will compute; `visible` also lists it in this graph."""
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
    """Return the names of all inputs of nodes, including inputs that only their inner graphs read."""
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


_SEED = 0
_BYTES_PER_RANDOM = 40
"""The bytes that a random number takes while it is drawn, with temporary copies and an index; 36 were measured."""
_MOST_BYTES = 2**30
"""The memory that random inputs may always use: one image of 2,000 by 2,000 needs 480 MB."""
_LOWEST, _HIGHEST = -(2**62), 2**62


def input_records(model: ModelProto, program: ExportedProgram, state: Mapping[str, str]) -> list[InputRecord]:
    """The inputs of the file in order, with shapes and ranges of the example, and the paths of buffers among them."""
    args, kwargs = program.example_inputs or ((), {})
    leaves: list[tuple[str | None, Tensor]] = [
        (key, leaf)
        for key, value in ((None, args), *kwargs.items())
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
    records = []
    for declared, (key, x) in zip(model.graph.input, leaves, strict=True):
        finite = x.detach().double()
        finite = finite[finite.isfinite()]
        low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 0.0)
        dtype = str(x.dtype).removeprefix("torch.")
        records.append(InputRecord(declared.name, list(x.shape), dtype, low, high, key, state.get(key or "")))
    return records


def arguments(records: list[InputRecord], model: nn.Module | None) -> list[InputRecord]:
    """The inputs that a batch must contain: all inputs, but without buffers if there is a model.

    Raises:
        VerificationError: the model lacks a buffer.
    """
    state = [record for record in records if record.state is not None]
    if model is None or not state:
        return records
    known = dict(model.named_buffers(remove_duplicate=False))
    if missing := [str(record.state) for record in state if record.state not in known]:
        raise VerificationError(f"the model lacks the buffers {missing}; pass the model that was exported")
    return [record for record in records if record.state is None]


def tensors_of(batch: Any, records: list[InputRecord]) -> dict[str, Tensor]:
    """Return the tensors of a batch by the file's input names; extra trailing tensors of a tuple are ignored.

    Raises:
        VerificationError: the batch has too few tensors, or lacks a name.
    """
    if isinstance(batch, Mapping):
        keys = list(dict.fromkeys(record.key for record in records))
        if missing := [key for key in keys if key not in batch]:
            raise VerificationError(
                f"a batch lacks the arguments {missing}; pass batches of the same form as the example"
            )
        batch = [batch[key] for key in keys]
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if len(leaves) < len(records):
        raise VerificationError(
            f"a batch has {len(leaves)} tensors, but the file has {len(records)} inputs; pass batches of the same form "
            "as the example"
        )
    return {record.name: leaf for record, leaf in zip(records, leaves, strict=False)}


def known_arguments(batch: Any, records: list[InputRecord]) -> int | None:
    """Return how many leading items of a tuple are arguments: those before the first tensor without an input."""
    if not isinstance(batch, (tuple, list)):
        return None
    wanted = len(records)
    for index, item in enumerate(batch):
        wanted -= sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(item))
        if wanted < 0:
            return index
    return len(batch)


def random_batch(records: list[InputRecord], file_bytes: int) -> Any:
    """Draw inputs of the example's size: mostly normal numbers, with zeros of both signs, tiny numbers and outliers.

    Raises:
        VerificationError: the inputs would need much more memory than the file.
    """
    needed = sum(math.prod(record.shape) * _BYTES_PER_RANDOM for record in records)
    if needed > max(_MOST_BYTES, 10 * file_bytes):
        raise VerificationError(
            f"random numbers in the shapes {[record.shape for record in records]} need {needed:,} bytes of memory, but "
            f"the file has only {file_bytes:,} bytes; pass batches"
        )
    generator = torch.Generator().manual_seed(_SEED)
    tensors = []
    for record in records:
        dtype = INPUT_DTYPES[record.dtype]
        if not dtype.is_floating_point:
            low, high = (min(max(int(bound), _LOWEST), _HIGHEST) for bound in (record.low, record.high))
            whole = torch.randint(low, max(high, low) + 1, record.shape, generator=generator, device="cpu")
            tensors.append(whole.to(dtype))
            continue
        # The maximum of a few hundred normal numbers is about 3 standard deviations.
        size = max(abs(record.low), abs(record.high)) / 3 or 1.0
        x = torch.randn(record.shape, generator=generator, dtype=torch.float32, device="cpu") * size
        special = torch.tensor(
            [0.0, -0.0, torch.finfo(dtype).tiny, 30 * size, -30 * size], dtype=x.dtype, device=x.device
        )
        pick = torch.randint(0, 20 * len(special), record.shape, generator=generator, device="cpu")
        tensors.append(torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x).to(dtype))
    if records and all(record.key is not None for record in records):
        return {str(record.key): x for record, x in zip(records, tensors, strict=True)}
    return tuple(tensors)


def on_device_of(model: nn.Module | None, batch: Any) -> Any:
    """A batch, with tensors moved to the device of a model's first parameter or buffer."""
    held = next((x for of in (model.parameters, model.buffers) for x in of()), None) if model is not None else None
    return batch if held is None else pytree.tree_map_only(Tensor, lambda x: x.to(held.device), batch)


def unread_inputs(model: ModelProto) -> list[str]:
    """The names of the inputs that no node of a file reads and that are not outputs."""
    read = names_read(model.graph.node) | {value.name for value in model.graph.output}
    return [value.name for value in model.graph.input if value.name not in read]


def depends_on(run: Callable[[Any], Any], batch: Any, place: int) -> bool | None:
    """Whether a model's results depend on a tensor of a batch; None if the model accepts no other value there.

    `run` calls the model with a batch, and leaves the model as it was.
    """
    leaves, form = pytree.tree_flatten(batch)
    index = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][place]
    # Values that a model should take, too: floats twice as large and more, whole numbers in another order.
    x = leaves[index]
    if x.is_floating_point() or x.is_complex():
        other = 2 * x + 1
    else:
        other = ~x if x.dtype is torch.bool else x.flip([*range(x.dim())])
        other = 1 - x.clamp(0, 1) if torch.equal(other, x) else other
    if torch.equal(other, leaves[index]):
        return None
    try:
        results = [
            [leaf for leaf in pytree.tree_leaves(run(pytree.tree_unflatten(copies, form))) if isinstance(leaf, Tensor)]
            for given in (leaves, [*leaves[:index], other, *leaves[index + 1 :]])
            # A forward may write into its inputs.
            for copies in [[leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]]
        ]
    except OF_TORCH:
        return None
    return any(
        a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*results, strict=False)
    )
