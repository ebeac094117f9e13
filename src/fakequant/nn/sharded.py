"""Quantizers under tensor parallelism, whose inputs are DTensors, or plain tensors that may be one process's part.

All processes give a DTensor the range of the whole tensor. Between layers that `parallelize_module` sharded, a plain
tensor may be a process's part of an activation; nothing marks it, and the range of a part is narrower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fakequant.distributed import gather, is_sharded, parallel_group
from fakequant.errors import ConfigError
from fakequant.numerics.formats.floats import TableFormat
from fakequant.numerics.reference import whole_sums
from fakequant.numerics.spec import QuantSpec, Rounding


class Mesh:
    """Holds the process group over which layers of a prepared model are sharded: `group`, None without sharding."""

    group: Any = None

    def __repr__(self) -> str:
        return f"Mesh({self.group})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        copy = memo[id(self)] = Mesh()
        copy.group = self.group
        return copy

    def __reduce__(self) -> tuple[type[Mesh], tuple[()]]:
        return Mesh, ()  # a group belongs to these processes alone


def share_mesh(model: nn.Module) -> None:
    """Give all quantizers of a model the same `Mesh`, whose group is set now, or later when a layer is sharded."""
    mesh = Mesh()
    mesh.group = parallel_group(model)
    for module in model.modules():
        if hasattr(module, "is_same_everywhere"):
            cast(Any, module).mesh = mesh


def note_mesh(layer: nn.Module) -> None:
    """Set the group of the `Mesh` of a layer's quantizers after the layer was sharded."""
    for module in layer.children():
        mesh = getattr(module, "mesh", None)
        if isinstance(mesh, Mesh):
            mesh.group = parallel_group(layer)


def is_shared_out(layer: nn.Module, quantizer: Any) -> bool:
    """Whether `parallelize_module` sharded a layer, so that its hooks turn its output into one process's part."""
    mesh = getattr(quantizer, "mesh", None)
    if mesh is None or mesh.group is None:
        return False
    return any(parameter is not None and is_sharded(parameter) for parameter in layer._parameters.values())


def known_parts(name: str, spec: QuantSpec, x: Any, *, observed: bool) -> Tensor:
    """The DTensor x with its partial sums added, for the quantizer `name`; raises the ConfigErrors of `check_parts`.

    `observed` says that a calibrator gathers the parts next; then parts of different sizes raise a ConfigError, too.
    """
    x = whole_sums(x)
    for place, placement in enumerate(x.placements):
        if observed and placement.is_shard():
            own, shapes = tuple(x.shape), gather(tuple(x.shape), x.device_mesh.get_group(place))
            if other := next((shape for shape in shapes if shape != own), None):  # to gather it would end in an abort
                raise ConfigError(
                    f"{name}: the parts of this tensor differ in size, but RowwiseParallel takes them for equal. "
                    f"By the part of this process, the tensor has the shape {list(own)}; from another, {list(other)}. "
                    f"Take a width that {len(shapes)} divides, or ColwiseParallel(output_layouts=Replicate()) before "
                    "RowwiseParallel(input_layouts=Replicate())"
                )
    check_parts(name, spec, x, range(x.device_mesh.ndim))
    return x


def check_parts(name: str, spec: QuantSpec, x: Any, axes: Iterable[int]) -> None:
    """Raise ConfigError if a DTensor cannot be quantized part by part along the axes of its mesh.

    A border between processes must not cut a block, and DTensors must support the rounding and format of `spec`. x can
    be on the meta device.
    """
    if spec.rounding is Rounding.STOCHASTIC or isinstance(spec.format, TableFormat):
        raise ConfigError(
            f"{name}: {spec} cannot quantize a tensor that is sharded over processes; round to nearest in a format "
            "without a table, or leave the layer out of the plan of parallelize_module"
        )
    for place in axes:
        if (placement := x.placements[place]).is_shard():
            axis, processes = placement.dim % x.dim(), x.device_mesh.size(place)
            shape, what, values = tuple(x.shape), "blocks", x.shape[placement.dim]
            for granularity in filter(None, (spec.granularity, spec.scale.granularity)):
                size, length = granularity.block_shape(shape)[axis], shape[axis]
                if size not in (1, length) and length // size % processes:
                    each, blocks = -(-values // processes), size * values // length
                    raise ConfigError(
                        f"{name}: {what} of {blocks} do not divide the {each} values of a process: axis {axis} has "
                        f"{values}, which {processes} processes share. Choose blocks that divide {each}, or leave the "
                        "layer out of the plan of parallelize_module"
                    )
                shape, what = granularity.group_shape(shape), "super-blocks"


def fingerprint(x: Tensor) -> tuple[tuple[int, ...], bytes]:
    """The shape and a hash of the values of a tensor, by which processes compare their tensors."""
    values = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(x.shape), hashlib.sha256(values).digest()
