"""What a quantizer needs to know of processes that share a model's layers out: DTensors, and plain parts of tensors.

The values of a DTensor are those of the whole tensor, whichever process holds them. A plain tensor between layers that
`parallelize_module` shared out may be the part of one process: its range alone would be another one than in one
process, and nothing about the tensor tells.
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
    """The processes that share the layers of one prepared model out; `group` is None while none do."""

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
    """Let the quantizers of a model know together which processes share its layers out, now or later."""
    mesh = Mesh()
    mesh.group = parallel_group(model)
    for module in model.modules():
        if hasattr(module, "is_same_everywhere"):
            cast(Any, module).mesh = mesh


def note_mesh(layer: nn.Module) -> None:
    """Tell the quantizers of a model that one of its layers was shared out after `prepare`."""
    for module in layer.children():
        mesh = getattr(module, "mesh", None)
        if isinstance(mesh, Mesh):
            mesh.group = parallel_group(layer)


def is_shared_out(layer: nn.Module, quantizer: Any) -> bool:
    """Whether `parallelize_module` shared a layer out, so that its hooks turn the result into the part of a process."""
    mesh = getattr(quantizer, "mesh", None)
    if mesh is None or mesh.group is None:
        return False
    return any(parameter is not None and is_sharded(parameter) for parameter in layer._parameters.values())


def known_parts(name: str, spec: QuantSpec, x: Any, *, observed: bool) -> Tensor:
    """A DTensor with partial sums added up, for the quantizer of a path.

    `observed`: a calibrator sees it next, which gathers its parts. Raises a ConfigError as `check_parts`, or if
    processes take it for larger or smaller than others.
    """
    x = whole_sums(x)
    for place, placement in enumerate(x.placements):
        if observed and placement.is_shard():
            own, shapes = tuple(x.shape), gather(tuple(x.shape), x.device_mesh.get_group(place))
            if other := next((shape for shape in shapes if shape != own), None):  # to gather it would end in an abort
                raise ConfigError(
                    f"{name}: the parts of this tensor differ in size, and RowwiseParallel takes them for equal: all "
                    f"would be {list(own)} here, and {list(other)} elsewhere. Take a width that {len(shapes)} divides, "
                    "or ColwiseParallel(output_layouts=Replicate()) before "
                    "RowwiseParallel(input_layouts=Replicate())"
                )
    check_parts(name, spec, x, range(x.device_mesh.ndim))
    return x


def check_parts(name: str, spec: QuantSpec, x: Any, axes: Iterable[int]) -> None:
    """Raise a ConfigError if a DTensor cannot be quantized in parts along axes of its mesh.

    Borders of processes may not cut through its blocks, and DTensors must do what the specification says. It may be on
    the meta device.
    """
    if spec.rounding is Rounding.STOCHASTIC or isinstance(spec.format, TableFormat):
        raise ConfigError(
            f"{name}: {spec} is not there for tensors that are shared out over processes; round to nearest in a format "
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
    """Shape and values of a tensor in few bytes, by which processes compare what they have."""
    values = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(x.shape), hashlib.sha256(values).digest()
