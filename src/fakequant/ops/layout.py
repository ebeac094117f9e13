"""The memory order in which kernels read a tensor of any strides as tiles, and when a ReLU keeps strides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from fakequant.errors import ShapeError
from fakequant.numerics.granularity import Granularity, Tiles, fit_tiles, pad_blocks, padding, unblocked


@dataclass(frozen=True)
class Layout:
    """How tensors of one shape and stride are passed to a kernel.

    `blocks` are the granularity's block sizes. `split` is the shape of a view in which each axis is two, the number
    of its blocks and their size, and `order` lists the view's axes from slowest to fastest in the kernel. If `dense`,
    no axis is split, and a tensor in that memory order is not copied: channels-last tensors stay channels-last.
    `packed_stride` are the strides of a tensor in that order, None if not `dense`. `result_stride` are the strides of
    every result, without gaps and for every granularity the same.
    """

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    dense: bool
    packed_stride: tuple[int, ...] | None
    result_stride: tuple[int, ...]
    tiles: Tiles
    group_shape: tuple[int, ...]
    group_order: tuple[int, ...]

    @property
    def row_major(self) -> bool:
        """Whether the kernel reads the elements in row-major order."""
        axes = [axis for axis in self.order if self.shape[axis] > 1] if self.dense else None
        return axes is not None and axes == sorted(axes)

    def pack(self, x: Tensor) -> Tensor:
        """The tensor, copied if the kernel cannot read its memory in order, and padded to full blocks."""
        if x.stride() == self.packed_stride:
            return x
        if self.dense:
            wanted = x.permute(self.order)
            return x if wanted.is_contiguous() else wanted.contiguous().permute(_inverse(self.order))
        return pad_blocks(x, self.blocks).reshape(self.split).permute(self.order).contiguous()

    def unpack(self, y: Tensor) -> Tensor:
        """A result in the kernel's order as a tensor of `shape`."""
        if self.dense:
            return y
        y = unblocked(y.permute(_inverse(self.order)), self.shape, self.blocks)
        if y.stride() == self.result_stride:
            return y
        return torch.empty_strided(self.shape, self.result_stride, dtype=y.dtype, device=y.device).copy_(y)

    def pack_groups(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Values per group [groups per axis] in the kernel's order; raises ShapeError for any other shape.

        With a wrong shape a kernel would read beyond the memory of the tensor.
        """
        if values.shape != self.group_shape:
            raise ShapeError(
                f"parameters of shape {list(values.shape)} do not fit a tensor of shape {list(self.shape)}, which "
                f"has groups of shape {list(self.group_shape)}; give one value for each group"
            )
        if values.numel() > 1:
            values = values.permute(self.group_order).contiguous()
        return values if values.dtype == dtype else values.to(dtype)

    def unpack_groups(self, values: Tensor) -> Tensor:
        """Values per group [groups], in the kernel's order, reshaped to [groups per axis]."""
        ordered = values.view([self.group_shape[axis] for axis in self.group_order])
        return ordered.permute(_inverse(self.group_order))


@lru_cache(maxsize=4096)
def layout_of(granularity: Granularity, shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """The layout of tensors of a shape and stride, cached; raises ShapeError if the granularity does not fit."""
    blocks = granularity.block_shape(shape)
    group_shape = granularity.group_shape(shape)
    # The axes from slowest to fastest in memory, if the tensor is dense; else their usual order.
    axes = tuple(range(len(shape)))
    order = tuple(sorted(axes, key=lambda a: (-stride[a] if shape[a] > 1 else 0, a)))
    packed = _strides(shape, order)
    if any(n > 1 and stride[a] != packed[a] for a, n in enumerate(shape)):
        order, packed = axes, _strides(shape, axes)
    has_no_gaps = all(n <= 1 or stride[a] == packed[a] for a, n in enumerate(shape))
    # Also where an axis has one element, whose stride decides whether a tensor counts as channels-last.
    result = stride if has_no_gaps else packed
    full = not any(padding(shape, blocks))
    tiles = fit_tiles([shape[a] for a in order], [blocks[a] for a in order]) if full else None
    if tiles is not None:
        return Layout(shape, blocks, shape, order, True, result, result, tiles, group_shape, order)
    # A last block is not full, or groups and blocks alternate too often for [g0, b0, g1, b1]: a padded copy with all
    # groups first, then all that lies in a block.
    split: list[int] = []
    for groups_along, b in zip(group_shape, blocks, strict=True):
        split += [groups_along, b]
    groups, inner = tuple(range(0, len(split), 2)), tuple(range(1, len(split), 2))
    elements = torch.Size([split[a] for a in groups]).numel()
    tiles = Tiles(elements, torch.Size([split[a] for a in inner]).numel(), 1, 1)
    return Layout(shape, blocks, tuple(split), groups + inner, False, None, result, tiles, group_shape, axes)


def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose axes have this order in memory, slowest first."""
    strides, elements = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = elements
        elements *= max(shape[axis], 1)
    return tuple(strides)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def relu_later(x: Tensor) -> Tensor:
    """x if a quantizer after a reshape or maximum may compute the ReLU; torch.relu(x) if ReLU would change strides."""
    return x if keeps_strides(x) else torch.relu(x)


@cache
def keeps_negative_zero(dtype: torch.dtype) -> bool:
    """Whether torch.relu keeps -0.0 here, as the kernels do; in torch it depends on the processor's maximum."""
    return bool(torch.relu(torch.full((67,), -0.0, dtype=dtype, device="cpu")).signbit().all())


def keeps_strides(x: Tensor) -> bool:
    """Whether torch.relu surely keeps the strides of x, on which the order of the next product's sums may depend."""
    for format in (torch.contiguous_format, *_CHANNELS_LAST.get(x.dim(), ())):
        if x.is_contiguous(memory_format=format):
            # An axis of one element may have any stride; torch gives it that of the format.
            return torch.empty(x.shape, device="meta", memory_format=format).stride() == x.stride()
    return False
