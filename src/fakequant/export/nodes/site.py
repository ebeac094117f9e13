"""A quantizer node of the ONNX graph and the standard nodes that replace it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import ExportError
from fakequant.export.capability import Dimension, Encoding, ScaleLayout
from fakequant.export.graph import GraphEditor
from fakequant.export.style import Style
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

if TYPE_CHECKING:
    from onnx import NodeProto


@dataclass
class Emitter:
    """Collects the nodes and constants that replace one node; their names begin with its label."""

    editor: GraphEditor
    label: str
    nodes: list[NodeProto] = field(default_factory=list, kw_only=True)
    added: list[str] = field(default_factory=list, kw_only=True)

    def emit(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """Add a node and return the name of its result; attributes that are None are left out."""
        from onnx import helper

        same = sum(node.op_type == operator for node in self.nodes)
        name = f"{self.label}/{operator}{f'_{same}' if same else ''}"
        present = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, inputs, [result or name], name, **present))
        return result or name

    def split(self, value: str, sizes: str, results: Sequence[str]) -> None:
        """Add a node that splits a value along its last axis; `sizes` names the lengths of the parts."""
        from onnx import helper

        self.nodes.append(helper.make_node("Split", [value, sizes], [*results], f"{results[0]}/Split", axis=-1))

    def add(self, name: str, values: Tensor | np.ndarray) -> str:
        """Add a constant and return its name."""
        array = values.numpy() if isinstance(values, Tensor) else values
        self.added.append(self.editor.add(f"{self.label}/{name}", array, shared=name == "codes"))
        return self.added[-1]

    def number(self, name: str, value: float) -> str:
        """Add a float32 scalar constant and return its name."""
        return self.add(name, np.array(value, np.float32))

    def scalar(self, value: str) -> str:
        """Reshape a value with one element to a scalar."""
        return self.emit("Reshape", value, self.add("no_axes", np.array([], np.int64)))

    def as_float32(self, value: str) -> str:
        """Cast a value to float32 if it has another type."""
        from onnx import TensorProto

        return value if self.editor.type(value) == TensorProto.FLOAT else self.emit("Cast", value, to=TensorProto.FLOAT)

    def repeat(self, value: str, blocks: Sequence[int], shape: Sequence[Dimension], axes: Sequence[int]) -> str:
        """Repeat per-group values [groups, axes kept] along some axes, so that each element has the value of its group.

        Args:
            value: name of the values.
            blocks: the block size along every axis.
            shape: the shape of the grouped tensor.
            axes: the axes to repeat along.
        """
        for axis in axes:
            n = shape[axis]
            assert isinstance(n, int), "an axis that blocks divide is checked to have a known length"
            index = np.arange(n, dtype=np.int64) // blocks[axis]
            value = self.emit("Gather", value, self.add(f"block_of_{axis}", index), axis=axis)
        return value


@dataclass
class EmittedSite(Emitter):
    """A FakeQuantize node, its parameters, and the nodes that replace it."""

    path: str
    spec: QuantSpec
    style: Style
    encoding: Encoding
    layout: ScaleLayout
    blocks: list[Dimension]
    """The block size along every axis."""
    x: str
    y: str
    scale: str
    zero_point: str | None
    constant: QParams | None
    """The parameters [groups, axes kept], if they are in the file."""
    fixed_codes: Tensor | None = None
    """The codes of a weight that quantizing it would not give."""

    def weight_codes(self, params: QParams) -> Tensor:
        """Return the codes of a constant weight."""
        weight = self.editor.tensor(self.x)
        if self.fixed_codes is None:
            return library.quantize(weight, params, self.spec)
        if self.fixed_codes.shape != weight.shape:
            shapes = f"{list(self.fixed_codes.shape)}, but the graph holds its weight as {list(weight.shape)}"
            raise ExportError(f"its codes are fixed in the shape {shapes}; call release_codes() on its quantizer")
        return self.fixed_codes

    def place(self) -> dict[str, Any]:
        """Return the attributes `axis` and `block_size` for the layout of the scales."""
        return {"axis": self.layout.axis, "block_size": self.layout.block_size or None}

    def arrange(self, values: Tensor) -> Tensor:
        """Bring constant values [groups, axes kept] to the shape that ONNX expects."""
        if self.layout.axis is None:
            return values.reshape(())
        if not self.layout.block_size:
            return values.reshape(-1)
        return self._repeated(values, [axis for axis, count in enumerate(self.layout.repeats) if count != 1])

    def arranged(self, name: str) -> str:
        """Bring computed values [groups, axes kept] to the shape that ONNX expects; returns their name."""
        if self.layout.block_size:
            return self._repeat(name, [axis for axis, count in enumerate(self.layout.repeats) if count != 1])
        shape = np.array([] if self.layout.axis is None else [-1], np.int64)
        return self.emit("Reshape", name, self.add("shape", shape))

    def spread(self, values: Tensor) -> Tensor:
        """Repeat constant values [groups, axes kept] along the axes that blocks divide, so they broadcast with x."""
        return self._repeated(values, self._divided(list(values.shape)))

    def spread_computed(self, name: str) -> str:
        """Repeat computed values [groups, axes kept] along the axes that blocks divide; returns their name."""
        return self._repeat(name, self._divided(self.editor.shape(self.scale)))

    def _divided(self, groups: Sequence[Dimension]) -> list[int]:
        pairs = zip(groups, self.editor.shape(self.x), strict=True)
        return [axis for axis, (g, n) in enumerate(pairs) if g not in (1, n)]

    def _repeated(self, values: Tensor, axes: Sequence[int]) -> Tensor:
        shape = self.editor.shape(self.x)
        for axis in axes:
            n, block = shape[axis], self.blocks[axis]
            assert isinstance(n, int)
            assert isinstance(block, int)
            values = values.index_select(axis, torch.arange(n, device=values.device) // block)
        return values

    def _repeat(self, value: str, axes: Sequence[int]) -> str:
        return self.repeat(
            value, [b if isinstance(b, int) else 0 for b in self.blocks], self.editor.shape(self.x), axes
        )
