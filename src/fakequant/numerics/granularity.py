"""Granularities: which elements share one scale.

A granularity says one thing only: its block size along every axis. From that follow the shape of the scales (written
`[groups per axis]`: as many axes as the tensor, along each the number of its blocks), the broadcast view that the
reference computes on, and `Tiles`, the only view that kernels know.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fakequant.errors import ShapeError, SpecError, nearest
from fakequant.numerics.division import is_watched
from fakequant.numerics.formats.floats import Format

Shape = Sequence[int]


class Granularity(ABC):
    """Base of granularities, which say which elements share a scale: blocks with a size along each axis."""

    keeps_whole_axes: ClassVar[bool] = False
    """Whether each axis has a single scale or a scale for each element; the shape of scales then shows if they fit."""

    @abstractmethod
    def block_shape(self, shape: Shape) -> tuple[int, ...]:
        """The block size along every axis of a tensor; a last block that is not full is padded with zeros.

        Raises:
            ShapeError: the granularity does not fit the shape.
        """

    def group_shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape of the scales: for each axis of the tensor, the number of blocks along it."""
        # An axis without elements is one empty block if the block is the whole axis, and no block if its size is 1.
        return tuple(-(-n // b) if b else 1 for n, b in zip(shape, self.block_shape(shape), strict=True))

    def scale_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """The accepted shapes of scales; the first one broadcasts."""
        return [self.group_shape(shape)]

    def remap_axes(self, axes: Mapping[int, int]) -> Granularity:
        """The same granularity with other axes; a granularity that names no axis is returned unchanged.

        Layers call this for their weights: a rule names the axis of output channels 0 and the axis that a product sums
        over -1, but in transposed convolutions these are the axes 1 and 0.

        Args:
            axes: for an axis that the granularity may name, the axis to name instead; other axes stay.
        """
        return self

    def over_window(self, axis: int, window: Mapping[int, int], length: int | None) -> Granularity:
        """The granularity for a product that also sums over the positions of a kernel; by default this granularity.

        Args:
            axis: the axis of the channels that the product sums over.
            window: the axes of the kernel's positions, with their lengths.
            length: for a weight, the number of channels in one sum; None if blocks lie along the channels alone.
        """
        return self

    def for_each(self) -> Granularity:
        """The granularity for a stack [tensors, ...] of tensors quantized one by one; axes must be negative numbers.

        `PerToken` stays as it is, because it already has separate scales along every axis that it does not name, so
        also along the new first axis.

        >>> PerTensor().for_each(), PerChannel(-2).for_each(), PerToken().for_each()
        (PerChannel(axes=(0,)), PerChannel(axes=(0, -2)), PerToken())
        """
        return self

    @classmethod
    @abstractmethod
    def parse(cls, arguments: str) -> Granularity:
        """The granularity from the text between the parentheses of its text form."""


def _axis(axis: int, shape: Shape, granularity: object) -> int:
    if not -len(shape) <= axis < len(shape):
        has = f"has axes {-len(shape)} to {len(shape) - 1}" if shape else "has none"
        raise ShapeError(
            f"{granularity} on shape {tuple(shape)}: axis {axis} is out of range, a tensor of {len(shape)} axes {has}"
        )
    return axis % len(shape)


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor.

    >>> PerTensor().block_shape((8, 64))
    (8, 64)
    """

    keeps_whole_axes: ClassVar[bool] = True

    def block_shape(self, shape: Shape) -> tuple[int, ...]:
        return tuple(shape)

    def group_shape(self, shape: Shape) -> tuple[int, ...]:
        # This reads no sizes: exporters do not know those that depend on values.
        return (1,) * len(shape)

    def scale_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        return [self.group_shape(shape), (), (1,)]

    def for_each(self) -> PerChannel:
        return PerChannel(0)

    @classmethod
    def parse(cls, arguments: str) -> PerTensor:
        if arguments:
            raise SpecError(f"per_tensor takes no arguments, got ({arguments})")
        return cls()

    def __str__(self) -> str:
        return "per_tensor"


@dataclass(frozen=True, init=False)
class PerChannel(Granularity):
    """One scale per index of one axis, or per combination of indices of several axes.

    >>> PerChannel(0).group_shape((8, 3, 5, 5)), PerChannel(0, 1).group_shape((8, 3, 5, 5))
    ((8, 1, 1, 1), (8, 3, 1, 1))
    """

    keeps_whole_axes: ClassVar[bool] = True

    axes: tuple[int, ...]

    def __init__(self, *axes: int) -> None:
        if not axes or not all(isinstance(axis, int) for axis in axes):
            raise SpecError(
                f"PerChannel{axes} needs at least one axis, for example PerChannel(0); for none use PerTensor()"
            )
        object.__setattr__(self, "axes", axes)

    def block_shape(self, shape: Shape) -> tuple[int, ...]:
        kept = {_axis(axis, shape, self) for axis in self.axes}
        if len(kept) < len(self.axes):
            raise ShapeError(f"{self} on shape {tuple(shape)}: an axis is named twice; name it once")
        return tuple(1 if axis in kept else n for axis, n in enumerate(shape))

    def scale_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        full = self.group_shape(shape)
        return [full, (full[self.axes[0]],)] if len(self.axes) == 1 else [full]

    def remap_axes(self, axes: Mapping[int, int]) -> PerChannel:
        return PerChannel(*(axes.get(axis, axis) for axis in self.axes))

    def for_each(self) -> PerChannel:
        return PerChannel(0, *self.axes)

    @classmethod
    def parse(cls, arguments: str) -> PerChannel:
        return cls(*(int(axis) for axis in arguments.split(",")))

    def __str__(self) -> str:
        return f"per_channel({','.join(map(str, self.axes))})"


@dataclass(frozen=True, init=False)
class PerToken(Granularity):
    """One scale per vector along the last axis: per token of activations [..., features]; or along other axes.

    >>> PerToken().group_shape((2, 7, 64)), PerToken(-3, -2, -1).group_shape((2, 3, 8, 8))
    ((2, 7, 1), (2, 1, 1, 1))
    """

    keeps_whole_axes: ClassVar[bool] = True

    axes: tuple[int, ...]

    def __init__(self, *axes: int) -> None:
        if len({*axes}) < len(axes) or not all(isinstance(axis, int) for axis in axes):
            raise SpecError(f"PerToken{axes} takes the axes along which a scale is shared, each once, or none")
        object.__setattr__(self, "axes", axes or (-1,))

    def block_shape(self, shape: Shape) -> tuple[int, ...]:
        if not shape:
            raise ShapeError("per_token on a tensor without axes: there is no last axis; use PerTensor()")
        shared = {_axis(axis, shape, self) for axis in self.axes}
        return tuple(n if axis in shared else 1 for axis, n in enumerate(shape))

    def scale_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        full = self.group_shape(shape)
        shared = {_axis(axis, shape, self) for axis in self.axes}
        return [full, tuple(n for axis, n in enumerate(full) if axis not in shared)]

    def remap_axes(self, axes: Mapping[int, int]) -> PerToken:
        return PerToken(*(axes.get(axis, axis) for axis in self.axes))

    def over_window(self, axis: int, window: Mapping[int, int], length: int | None) -> PerToken:
        return PerToken(*self.axes, *window) if self.axes == (axis,) else self

    @classmethod
    def parse(cls, arguments: str) -> PerToken:
        return cls(*(int(axis) for axis in arguments.split(",") if arguments))

    def __repr__(self) -> str:
        return f"PerToken({', '.join(map(str, self.axes)) if self.axes != (-1,) else ''})"

    def __str__(self) -> str:
        return "per_token" if self.axes == (-1,) else f"per_token({','.join(map(str, self.axes))})"


@dataclass(frozen=True, init=False)
class PerBlock(Granularity):
    """One scale per block of neighbours along some axes; every index of the other axes has its own blocks.

    Args:
        sizes: the block size along each axis.
        pad: whether a last block may be smaller, as if zeros followed; otherwise that is an error.

    >>> PerBlock({-1: 32}).group_shape((8, 64)), PerBlock({0: 128, 1: 128}, pad=True).group_shape((200, 512))
    ((8, 2), (2, 4))
    """

    sizes: tuple[tuple[int, int], ...]
    pad: bool

    def __init__(self, sizes: dict[int, int], *, pad: bool = False) -> None:
        if (
            not isinstance(sizes, dict)
            or not sizes
            or any(not isinstance(n, int) for pair in sizes.items() for n in pair)
            or any(size < 1 for size in sizes.values())
        ):
            raise SpecError(f"PerBlock({sizes}): needs a positive block size for at least one axis, e.g. {{-1: 32}}")
        object.__setattr__(self, "sizes", tuple(sizes.items()))
        object.__setattr__(self, "pad", pad)

    def block_shape(self, shape: Shape) -> tuple[int, ...]:
        blocks = [1] * len(shape)
        seen = set()
        for axis, size in self.sizes:
            index = _axis(axis, shape, self)
            if index in seen:
                raise ShapeError(f"{self} on shape {tuple(shape)}: axis {index} is named twice; name it once")
            seen.add(index)
            if shape[index] % size and not self.pad:
                raise ShapeError(
                    f"{self} on shape {tuple(shape)}: axis {axis} has {shape[index]} elements, no multiple of {size}; "
                    "choose a block size that divides it, allow a smaller last block by PerBlock(..., pad=True), "
                    "or use PerToken() or PerChannel()"
                )
            blocks[index] = size
        return tuple(blocks)

    def remap_axes(self, axes: Mapping[int, int]) -> PerBlock:
        sizes = {axes.get(axis, axis): size for axis, size in self.sizes}
        if len(sizes) < len(self.sizes):
            raise SpecError(f"{self} names two axes that {dict(axes)} maps to one; name one of them")
        return PerBlock(sizes, pad=self.pad)

    def over_window(self, axis: int, window: Mapping[int, int], length: int | None) -> PerBlock:
        """Blocks with at least as many elements as before, of whole kernels or part of a kernel, at most the whole sum.

        >>> PerBlock({1: 32}, pad=True).over_window(1, {-2: 3, -1: 3}, length=64)  # 36 elements
        PerBlock(sizes=((1, 4), (-1, 3), (-2, 3)), pad=True)
        """
        sizes, elements = dict(self.sizes), 1
        if length is None or axis not in sizes or not window.keys().isdisjoint(sizes):
            return self
        wanted = sizes[axis]
        for place, n in (*sorted(window.items(), reverse=True), (axis, length)):
            blocks = max(1, n * elements // wanted)
            if not self.pad:
                blocks = max(count for count in range(1, blocks + 1) if n % count == 0)
            sizes[place] = -(-n // blocks)
            elements *= sizes[place]
        return PerBlock(sizes, pad=self.pad)

    @classmethod
    def parse(cls, arguments: str) -> PerBlock:
        words = arguments.split(",")
        pairs = [word.split(":") for word in words if word != "pad"]
        if any(len(pair) != 2 for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
            raise SpecError(f"per_block({arguments}) needs one axis:size for each axis, such as per_block(-1:32)")
        return cls({int(axis): int(size) for axis, size in pairs}, pad="pad" in words)

    def __str__(self) -> str:
        words = [f"{axis}:{size}" for axis, size in self.sizes] + ["pad"] * self.pad
        return f"per_block({','.join(words)})"


_registry: dict[str, Callable[[str], Granularity]] = {
    "per_tensor": PerTensor.parse,
    "per_channel": PerChannel.parse,
    "per_token": PerToken.parse,
    "per_block": PerBlock.parse,
}
_TEXT = re.compile(r"(\w+)(?:\((.*)\))?")


def register_granularity(name: str, parse: Callable[[str], Granularity]) -> None:
    """Register `parse`, which reads granularities, under the name with which their text form begins.

    A new granularity is a subclass of `Granularity`. It returns the block size along every axis (`block_shape`), writes
    its text form (`__str__`), and reads the arguments of this text (`parse`). If it names axes, it also implements
    `remap_axes`, and `for_each` for stacked tensors.

    Raises:
        SpecError: another granularity already has the name.

    >>> register_granularity("example_per_row", lambda _: PerChannel(0))
    >>> parse_granularity("example_per_row")
    PerChannel(axes=(0,))
    >>> del _registry["example_per_row"]  # of the example only
    """
    if _registry.get(name, parse) != parse:
        raise SpecError(f"a different granularity is already registered as {name!r}; choose another name")
    _registry[name] = parse


def granularities() -> list[str]:
    """The names of all registered granularities."""
    return list(_registry)


def parse_granularity(text: str) -> Granularity:
    """The granularity of a text form; raises SpecError for other texts.

    >>> parse_granularity("per_block(-1:32)")
    PerBlock(sizes=((-1, 32),), pad=False)
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[1] not in _registry:
        raise SpecError(f"unknown granularity {text!r}{nearest(text.split('(')[0], list(_registry))}")
    try:
        return _registry[match[1]](match[2] or "")
    except ValueError as error:
        raise SpecError(f"cannot read the granularity {text!r}: {error}") from error


class Tiles(NamedTuple):
    """A contiguous tensor seen as [g0, b0, g1, b1] with one scale per (g0, g1).

    Per tensor (1, N, 1, 1); channel k (1, outer, C, inner), the first (C, inner, 1, 1); token (T, D, 1, 1); blocks of
    32 (N/32, 32, 1, 1); 128x128 tiles (M/128, 128, K/128, 128).
    """

    g0: int
    b0: int
    g1: int
    b1: int

    @property
    def elements(self) -> int:
        return math.prod(self)

    @property
    def groups(self) -> int:
        return self.g0 * self.g1


def fit_tiles(shape: Shape, blocks: Shape) -> Tiles | None:
    """The tiles of a contiguous tensor; None if its groups and blocks alternate more than twice.

    >>> fit_tiles((8, 3, 5, 5), (8, 1, 5, 5))
    Tiles(g0=1, b0=8, g1=3, b1=25)
    >>> fit_tiles((2, 3, 4, 5), (2, 1, 4, 1)) is None
    True
    """
    slots = [1, 1, 1, 1]
    slot = 0
    for n, b in zip(shape, blocks, strict=True):
        for is_block, size in ((0, n // b if b else 1), (1, b)):
            if size == 1:
                continue
            if slot % 2 != is_block:
                slot += 1
            if slot > 3:
                return None
            slots[slot] *= size
    g0, b0, g1, b1 = slots
    # A run that one scale covers is kept whole in b0, so that kernels see it as one.
    return Tiles(g0, b0 * b1, 1, 1) if g1 == 1 else Tiles(g0, b0, g1, b1)


def padding(shape: Shape, blocks: Shape) -> list[int]:
    """The number of elements by which each axis must be padded so that its last block is full."""
    return [-n % b if b else 0 for n, b in zip(shape, blocks, strict=True)]


def pad_blocks(x: Tensor, blocks: Shape) -> Tensor:
    """x with zeros at the end of every axis whose last block is not full."""
    missing = padding(x.shape, blocks)
    return F.pad(x, [p for n in reversed(missing) for p in (0, n)]) if any(missing) else x


def blocked(x: Tensor, blocks: Shape) -> Tensor:
    """x [n0, n1, ...], padded to full blocks, with every axis that a block divides split into (groups, block)."""
    x = pad_blocks(x, blocks)
    split: list[int] = []
    for n, b in zip(x.shape, blocks, strict=True):
        split += [n // b, b] if b not in (1, n) else [n]
    return x if len(split) == x.dim() else x.reshape(split)


def unblocked(values: Tensor, shape: Shape, blocks: Shape) -> Tensor:
    """Undo `blocked`: the tensor [shape] without padding, and without gaps in memory."""
    missing = padding(shape, blocks)
    values = values.reshape([n + m for n, m in zip(shape, missing, strict=True)])
    for axis, m in enumerate(missing):
        if m:
            values = values.narrow(axis, 0, shape[axis])
    return values.clone() if any(missing) else values  # strides decide the order of sums in a product's gradient


def blocked_groups(values: Tensor, shape: Shape, blocks: Shape) -> Tensor:
    """Per-group values [groups per axis] shaped to broadcast with `blocked(x)`."""
    split: list[int] = []
    for groups, n, b in zip(values.shape, _padded(shape, blocks), blocks, strict=True):
        split += [groups, 1] if b not in (1, n) else [groups]
    return values if len(split) == values.dim() else values.reshape(split)


def block_axes(shape: Shape, blocks: Shape) -> tuple[int, ...]:
    """The axes of `blocked(x)` inside a block: a reduction per group runs over them."""
    axes: list[int] = []
    position = 0
    for n, b in zip(_padded(shape, blocks), blocks, strict=True):
        position += b not in (1, n)
        if b != 1:
            axes.append(position)
        position += 1
    return tuple(axes)


def over_blocks(values: Tensor, blocks: Shape, reduce: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """Reduce every block, and repeat the result at each element of the block.

    `reduce` takes `blocked(values)` and the axes of a block, and keeps these axes with size 1.

    >>> over_blocks(torch.tensor([1, 2, 3, 4]), (2,), lambda view, axes: view.sum(axes, True))
    tensor([3, 3, 7, 7])
    """
    axes = block_axes(values.shape, blocks)
    if not axes or not values.numel():
        return values
    view = blocked(values, blocks)
    return unblocked(reduce(view, axes).expand(view.shape), values.shape, blocks)


def _padded(shape: Shape, blocks: Shape) -> list[int]:
    return [n + m for n, m in zip(shape, padding(shape, blocks), strict=True)]


_HALF = (torch.float16, torch.bfloat16)
"""Dtypes to which torch's own conversion rounds as the formats do, in a tenth of the time."""


class StoredScales(NamedTuple):
    """Scales or offsets as a file stores them.

    Attributes:
        codes: [groups per axis], in the storage of their format; float32 without a format.
        shared: the scales that multiply codes, float32 [groups of groups per axis]; None without shared scales.
    """

    codes: Tensor
    shared: Tensor | None = None


def rounded(v: Tensor, fmt: Format) -> Tensor:
    """The nearest code of a format."""
    if fmt.storage in _HALF and v.dtype is torch.float32 and not is_watched():
        return fmt.clamp(v.to(fmt.storage).to(v.dtype))  # of a number beyond the end it is inf
    return fmt.round(fmt.clamp(v))


def split_scales(
    values: Tensor,
    fmt: Format | None,
    granularity: Granularity | None,
    shared: Format | None,
    under: Tensor | None = None,
) -> StoredScales | None:
    """Scales in their stored form, see `ScaleSpec.split`; None if no split is exact."""
    if fmt is None:
        return StoredScales(values)
    if granularity is None:
        stored = fmt.to_storage(values)  # of no number that is not of the format, as reading it shows
        return StoredScales(stored) if torch.equal(fmt.from_storage(stored, values.dtype), values) else None
    if not values.numel():
        return StoredScales(fmt.to_storage(values), values.new_zeros(granularity.group_shape(values.shape)))
    blocks = granularity.block_shape(values.shape)
    view = blocked(values, blocks)
    axes = block_axes(values.shape, blocks)
    found = _shared(view, axes, fmt, shared) if under is None else under.expand(view.amax(axes, True).shape)
    if found is None or (under is not None and not torch.equal(_codes(view, found, fmt) * found, view)):
        return None
    codes = fmt.to_storage(unblocked(_codes(view, found, fmt), values.shape, blocks))
    return StoredScales(codes, found.reshape(granularity.group_shape(values.shape)))


def join_scales(stored: StoredScales, fmt: Format | None, granularity: Granularity | None) -> Tensor:
    """The scales computed from their stored form, see `ScaleSpec.join`."""
    if fmt is None:
        return stored.codes
    codes = fmt.from_storage(stored.codes, torch.float32)
    if granularity is None or stored.shared is None:
        return codes
    blocks = granularity.block_shape(codes.shape)
    shared = stored.shared.float().reshape(granularity.group_shape(codes.shape))
    return unblocked(blocked(codes, blocks) * blocked_groups(shared, codes.shape, blocks), codes.shape, blocks)


def farthest(view: Tensor, axes: tuple[int, ...]) -> Tensor:
    """In every block, the value farthest from 0, with its sign; the block's axes are kept."""
    low, high = (view.amin(axes, True), view.amax(axes, True)) if axes else (view, view)
    return torch.where(-low > high, low, high)


def _codes(view: Tensor, shared: Tensor, fmt: Format) -> Tensor:
    return rounded(view / torch.where(shared == 0, 1.0, shared), fmt)


def _shared(view: Tensor, axes: tuple[int, ...], fmt: Format, shared: Format | None) -> Tensor | None:
    """Every block's farthest scale divided by the farthest code that gives an exact split; None without such a code."""
    whole = farthest(view, axes)
    found, open = torch.zeros_like(whole), whole != 0
    if fmt.has_zero_point:
        codes = [float(code) for code in range(int(fmt.quant_min), int(fmt.quant_max) + 1) if code]
    else:
        patterns = torch.arange(1 << fmt.bits, device="cpu").to(torch.uint8).view(fmt.storage)
        codes = [code for code in fmt.from_storage(patterns, torch.float64).tolist() if 0 < code < math.inf]
    # The farthest first; of q and -q, the sign of the format's farthest.
    for code in sorted(codes, key=lambda code: (-abs(code), code * fmt.farthest < 0)):
        value, end = whole / code, torch.full_like(whole, torch.inf)
        # In float32 also the neighbours of the nearest number.
        near = [value, torch.nextafter(value, end), torch.nextafter(value, -end)]
        for tried in near if shared is None else [rounded(value, shared)]:
            if not bool(open.any()):
                return found
            # Subnormal shared scales would be flushed somewhere.
            same = (_codes(view, tried, fmt) * tried == view) & (tried.abs() >= torch.finfo(tried.dtype).tiny)
            good = open & (same.amin(axes, True) if axes else same)
            found, open = torch.where(good, tried, found), open & ~good
    return None if bool(open.any()) else found
