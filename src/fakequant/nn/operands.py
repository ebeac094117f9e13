"""Which tensors of a layer have quantizers, and where their axes are: one table for each quantized layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Role(Enum):
    """What a tensor is to its layer; the values are the names of a rule's fields."""

    INPUT = "input"
    WEIGHT = "weight"
    OUTPUT = "output"


class Kernel(NamedTuple):
    """The positions of a kernel, which a product sums over with the channels."""

    window: Mapping[int, int]
    """Their axes, counted from the end, with the kernel's lengths; those of length 1 are left out."""
    length: int | None = None
    """The number of channels in one sum of a weight; None for an input, whose blocks lie along its channels alone."""

    @classmethod
    def of(cls, sizes: Sequence[int], length: int | None = None) -> Kernel:
        """The kernel with these lengths along the last axes of a tensor."""
        window = {axis - len(sizes): size for axis, size in enumerate(sizes) if size != 1}
        return cls(window, length)


NO_KERNEL = Kernel({})


class Operand(NamedTuple):
    """A tensor of a layer that a quantizer belongs to."""

    role: Role
    reduction: int = -1
    """The axis that the product sums over, which axis -1 of a rule stands for; of an output, that of its channels."""
    channels: int = 0
    """The axis of a weight that holds output channels; a rule calls it axis 0."""
    weight: str = ""
    """Where the layer holds a weight: "weight", or "out_proj.weight" for that of a submodule."""
    is_stack: bool = False
    """Whether a weight is a stack of weights along its first axis, each with its own ranges; its other axes are counted
    from the end."""
    optional: bool = False
    """Whether calls may do without it: calibration takes the quantizer away if no call of its layer used it."""
    kernel: Kernel = NO_KERNEL
    """That of a convolution."""

    def axes(self) -> dict[int, int]:
        """From the axes that a rule names by their role to those of the tensor."""
        if self.role is not Role.WEIGHT:
            return {-1: self.reduction}
        named = {0: self.channels, -1: self.reduction}
        return {**named, -2: self.channels, 1: self.reduction} if self.is_stack else named
