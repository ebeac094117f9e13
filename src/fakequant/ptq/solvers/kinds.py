"""Layers with a weight matrix: how their input becomes the rows that it multiplies, and what the product is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fakequant.errors import ConfigError
from fakequant.nn.foreign import QuantConv1D
from fakequant.nn.integer import Execution
from fakequant.nn.low_rank import LowRank
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import InputTransform
from fakequant.ptq.solvers.projections import Projection

_MOST = 2**22
"""Values of the windows that are there at a time. Another number gives other roundings of float32 products."""
_PARTS = (Quantizer, InputTransform, LowRank)
_WINDOW = ["kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "output_padding", "same_pad"]
"""The attributes by which a convolution makes rows of its input."""


class Kind(NamedTuple):
    """What algorithms ask of a kind of layer.

    Attributes:
        rows: called as rows(layer, x); the rows [groups, rows, columns] of an input.
        product: called as product(layer, weight, x); the output for a weight of the shape of its own, without the bias.
        is_turned: whether the weight is [in, out, ...], and its matrix that with both turned.
        takes_transform: whether a transform of the input can stand before it.
    """

    rows: Callable[[Any, Tensor], Tensor]
    product: Callable[[Any, Tensor, Tensor], Tensor]
    is_turned: bool = False
    takes_transform: bool = True


def rows_of(layer: Any, x: Tensor) -> Tensor:
    """The rows [groups, rows, columns] that a layer multiplies with its weight matrix, of an input x.

    Raises:
        ConfigError: the layer is of a kind without a weight matrix.
    """
    if not has_rows(layer):
        raise ConfigError(f"a {type(layer).__name__} has no weight matrix")
    return KINDS[_kind(layer)].rows(layer, x)


def blocks_of(layer: Any, x: Tensor) -> Sequence[Tensor]:
    """Parts of an input of a convolution whose windows take 16 MB, at least one example each; else the input."""
    if not isinstance(layer, _ConvNd) or not x.numel():
        return [x]
    x = with_axis(layer, x)
    step = 1 if isinstance(layer, _ConvTransposeNd) else math.prod(layer.stride)
    return x.split(max(1, _MOST * step // (x[0].numel() * math.prod(layer.kernel_size))))


def product_of(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    """What a layer with a weight matrix gives for an input and another weight, without its bias.

    Args:
        layer: or a `Projection`.
        weight: of the shape of its own.
        x: of any float dtype: under autocast, layers get inputs of another dtype than their weight's.
    """
    return KINDS[_kind(layer)].product(layer, weight, x.to(weight.dtype))


def with_axis(layer: Any, x: Tensor) -> Tensor:
    """An input with a first axis of rows or examples, which is added where a call left it out."""
    axes = len(layer.kernel_size) + 2 if isinstance(layer, _ConvNd) else 2
    return x[None] if x.dim() == axes - 1 else x


def computes_product(layer: Any, x: Tensor) -> bool:
    """Whether the call of a layer multiplies its rows of an input with its weight, and does nothing else."""
    x = with_axis(layer, x)
    try:
        rows, wanted = rows_of(layer, x), product_of(layer, layer.weight, x)
    except (RuntimeError, TypeError):  # of torch, for what its own forward does
        return False
    matrix = layer.weight.reshape(len(rows), -1, rows.shape[-1])
    channels = wanted.movedim(1 if isinstance(layer, _ConvNd) else -1, -1)
    found = (rows.to(matrix.dtype) @ matrix.mT).movedim(0, 1).reshape(-1, channels.shape[-1])
    return found.numel() == channels.numel() and torch.allclose(found, channels.reshape_as(found), 1e-3, 1e-4)


def has_own_forward(layer: Any) -> bool:
    """Whether a layer computes by a function of another package than torch and this one."""
    if isinstance(layer, Projection):
        return False
    return type(layer).forward.__module__.partition(".")[0] not in ("torch", "fakequant")


def has_rows(layer: Any) -> bool:
    """Whether a layer multiplies rows of its input with a weight matrix: [out, columns], or turned."""
    return isinstance(layer, tuple(KINDS)) and not (isinstance(layer, _ConvTransposeNd) and layer.groups > 1)


def is_turned(layer: Any) -> bool:
    """Whether the weight of a layer with a weight matrix is [in, out, ...]."""
    return KINDS[_kind(layer)].is_turned


def takes_transform(layer: Any) -> bool:
    """Whether a layer with a weight matrix can have a transform of its input."""
    return KINDS[_kind(layer)].takes_transform


def makes_same_rows(one: Any, other: Any) -> bool:
    """Whether two layers with a weight matrix make the same rows of the same input."""
    if isinstance(one, Projection) or isinstance(other, Projection):
        return one is other
    return _kind(one) is _kind(other) and all(
        getattr(one, name, None) == getattr(other, name, None) for name in _WINDOW
    )


def _kind(layer: Any) -> type:
    return next(kind for kind in KINDS if isinstance(layer, kind))


def _rows_of_linear(layer: Any, x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _rows_of_convolution(layer: Any, x: Tensor) -> Tensor:
    """Every window as a row, by a convolution of each channel with a kernel that picks one value of it each."""
    return _windows(layer, x, _convolved)


def _rows_of_transposed(layer: Any, x: Tensor) -> Tensor:
    """Every window as a row, by a transposed convolution with a kernel that puts one value of it each."""
    return _windows(layer, x, lambda layer, picks, x: _transposed(layer, picks.transpose(0, 1), x))


def _windows(layer: Any, x: Tensor, convolve: Callable[[Any, Tensor, Tensor], Tensor]) -> Tensor:
    """The rows [groups, rows, columns] of an input: each channel is an example, so that the work is that of a copy."""
    x, positions = with_axis(layer, x), math.prod(layer.kernel_size)
    picks = torch.eye(positions, dtype=x.dtype, device=x.device).view(positions, 1, *layer.kernel_size)
    windows = convolve(_with(layer, groups=1), picks, x.flatten(0, 1)[:, None]).flatten(2)  # with the layer's padding
    columns, places = x.shape[1] // layer.groups * positions, windows.shape[2]
    windows = windows.reshape(len(x), layer.groups, columns, places)
    return windows.permute(1, 0, 3, 2).reshape(layer.groups, len(x) * places, columns)


def _linear(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    return _called(layer, weight, x) if has_own_forward(layer) else F.linear(x, weight)


def _turned_linear(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight


def _convolved(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    return _called(layer, weight, x) if has_own_forward(layer) else layer._conv_forward(x, weight, None)


def _called(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    """The result of a layer's own forward with another weight, without bias and quantizers."""
    parts = {name: None if isinstance(own, _PARTS) else own for name, own in layer._modules.items()}
    parameters = {**layer._parameters, "weight": weight, "bias": None}
    twin = _with(layer, _parameters=parameters, _modules=parts, execution=Execution.SIMULATE)
    return type(layer).forward(twin, x)


def _with(layer: Any, **attributes: Any) -> Any:
    """The same layer with other attributes."""
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer) | attributes)
    return twin


def _transposed(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(layer.kernel_size) - 1]
    return convolve(x, weight, None, layer.stride, layer.padding, layer.output_padding, 1, layer.dilation)


KINDS: dict[type, Kind] = {
    nn.Linear: Kind(_rows_of_linear, _linear),
    Projection: Kind(_rows_of_linear, _linear, takes_transform=False),
    QuantConv1D: Kind(_rows_of_linear, _turned_linear, is_turned=True, takes_transform=False),
    _ConvTransposeNd: Kind(_rows_of_transposed, _transposed, is_turned=True, takes_transform=False),
    _ConvNd: Kind(_rows_of_convolution, _convolved),
}
"""All kinds; the first one that fits a layer holds."""
