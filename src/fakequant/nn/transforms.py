"""Transforms of a layer's input before its quantizer, whose inverse in the weight keeps the layer's float function."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fakequant.errors import ConfigError, nearest


class InputTransform(nn.Module, ABC):
    """Base of transforms T in Q(T(x)) Q(W T^-1)^T; an object is a submodule of a quantized layer.

    Each subclass has a name. Its options are whole numbers, so that a checkpoint can store them beside the buffers.
    """

    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[InputTransform]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        InputTransform._kinds[cls.kind] = cls

    @classmethod
    @abstractmethod
    def of(cls, layer: Any, **options: int) -> InputTransform:
        """A transform for a layer, whose buffers a checkpoint may set; ConfigError if the transform cannot fit."""

    def options(self) -> dict[str, int]:
        """The options that `of` needs to make a transform like this."""
        return {}

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The transformed input of the layer."""

    @abstractmethod
    def into_weight(self, layer: Any, weight: Tensor) -> Tensor:
        """The weight whose product with the transformed input equals the product of `weight` with the plain input."""

    def out_of_weight(self, layer: Any, weight: Tensor) -> Tensor:
        """The inverse of `into_weight`, up to rounding; this default inverts a linear transform of the last axis."""
        # x T times W transposed is x times (W times T transposed) transposed; an order moves values as they are.
        matrix = self(torch.eye(weight.shape[-1], device=weight.device))
        return weight @ matrix.mT.to(weight.dtype)


class ChannelScale(InputTransform):
    """The input times one factor per channel: it moves large channels into the weight (SmoothQuant, arXiv 2211.10438).

    >>> layer = nn.Linear(2, 1)
    >>> scale = ChannelScale.of(layer)
    >>> scale.scale = torch.tensor([0.5, 4.0])
    >>> scale(torch.tensor([[10.0, 1.0]]))
    tensor([[5., 4.]])
    """

    kind = "channel_scale"
    scale: Tensor

    def __init__(self, channels: int, axis: int) -> None:
        super().__init__()
        self._shape = (channels,) + (1,) * (-axis - 1)
        self.register_buffer("scale", torch.ones(channels))

    @classmethod
    def of(cls, layer: Any, **options: int) -> ChannelScale:
        groups, weight = getattr(layer, "groups", 1), _first_weight(layer)
        return cls(weight.shape[1] * groups, 1 - weight.dim()).to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.view(self._shape).to(x.dtype)

    def into_weight(self, layer: Any, weight: Tensor) -> Tensor:
        return weight / self._by_groups(layer, weight)

    def out_of_weight(self, layer: Any, weight: Tensor) -> Tensor:
        return weight * self._by_groups(layer, weight)

    def _by_groups(self, layer: Any, weight: Tensor) -> Tensor:
        """The factors in a shape that broadcasts with a weight [out, in / groups, ...], by the inputs of each group."""
        groups = getattr(layer, "groups", 1)
        factors = self.scale.to(weight.dtype).reshape(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
        return factors.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))

    def extra_repr(self) -> str:
        return f"{self.scale.numel()} channels"


class BlockHadamard(InputTransform):
    """Blocks of the last axis times a Hadamard matrix, which spreads a large value (QuaRot, arXiv 2404.00456).

    >>> rotation = BlockHadamard.of(nn.Linear(4, 1), block=2)
    >>> rotation(torch.tensor([[2.0, 0.0, 1.0, 1.0]])).round(decimals=3)
    tensor([[1.4140, 1.4140, 1.4140, 0.0000]])
    """

    kind = "block_hadamard"
    matrix: Tensor

    def __init__(self, block: int) -> None:
        super().__init__()
        self.register_buffer("matrix", hadamard(block))

    @classmethod
    def of(cls, layer: Any, *, block: int = 0, **options: int) -> BlockHadamard:
        weight = _first_weight(layer)
        features = weight.shape[1]
        if weight.dim() != 2 or block < 2 or block & (block - 1) or features % block:
            raise ConfigError(
                f"a rotation by blocks of {block} does not fit the {features} features of a {type(layer).__name__}; "
                "give a power of two that divides the features, and a linear layer"
            )
        return cls(block).to(weight.device)

    def options(self) -> dict[str, int]:
        return {"block": self.matrix.shape[0]}

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, self.matrix.shape[0])) @ self.matrix.to(x.dtype)).flatten(-2)

    def into_weight(self, layer: Any, weight: Tensor) -> Tensor:
        return self(weight)  # the matrix is orthogonal

    def extra_repr(self) -> str:
        return f"blocks of {self.matrix.shape[0]}"


class ScaledHadamard(BlockHadamard):
    """The input times one factor per feature, then rotated by blocks; without factors, a large feature fills its block.

    >>> rotation = ScaledHadamard.of(nn.Linear(2, 1), block=2)
    >>> rotation.scale = torch.tensor([0.5, 1.0])
    >>> rotation(torch.tensor([[2.0, 1.0]])).round(decimals=3)
    tensor([[1.4140, 0.0000]])
    """

    kind = "scaled_hadamard"
    scale: Tensor

    @classmethod
    def of(cls, layer: Any, *, block: int = 0, **options: int) -> ScaledHadamard:
        found = cast("ScaledHadamard", super().of(layer, block=block))
        found.register_buffer("scale", torch.ones_like(_first_weight(layer)[0], dtype=torch.float32))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.to(x.dtype))

    def into_weight(self, layer: Any, weight: Tensor) -> Tensor:
        return super().forward(weight / self.scale.to(weight.dtype))


class Permutation(InputTransform):
    """The last axis in another order, so that groups consist of inputs that are not neighbours (GPTQ's `desc_act`).

    >>> permutation = Permutation.of(nn.Linear(3, 1))
    >>> permutation.order = torch.tensor([2, 0, 1])
    >>> permutation(torch.tensor([[10.0, 20.0, 30.0]]))
    tensor([[30., 10., 20.]])
    """

    kind = "permutation"
    order: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(features))

    @classmethod
    def of(cls, layer: Any, **options: int) -> Permutation:
        weight = _first_weight(layer)
        if weight.dim() != 2:
            raise ConfigError(
                f"a permutation needs a linear layer, and this is a {type(layer).__name__}; leave the permutation out"
            )
        return cls(weight.shape[1]).to(weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.order)

    def into_weight(self, layer: Any, weight: Tensor) -> Tensor:
        return self(weight)

    def extra_repr(self) -> str:
        return f"{self.order.numel()} features"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        given = state_dict.get(f"{prefix}order")
        if given is not None and not torch.equal(given.sort().values.to(self.order), torch.arange(len(self.order))):
            args[-1].append(f"{prefix}order names inputs twice, or others than the {len(self.order)} that there are.")
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def first_weights(layer: Any) -> list[str]:
    """The names of the weights that multiply a layer's input; for a recurrent layer, only those of its first level.

    >>> first_weights(nn.GRU(2, 2, num_layers=2, bidirectional=True))
    ['weight_ih_l0', 'weight_ih_l0_reverse']
    """
    names = ("weight", "weight_ih", "weight_ih_l0", "weight_ih_l0_reverse")
    return [name for name in names if hasattr(layer, name)]


def _first_weight(layer: Any) -> Tensor:
    return cast("Tensor", getattr(layer, first_weights(layer)[0]))


def hadamard(size: int) -> Tensor:
    """The orthogonal Hadamard matrix [size, size] of +1 and -1, divided by sqrt(size), by Sylvester's construction.

    >>> (hadamard(4) * 2).int().tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def walsh_hadamard(x: Tensor) -> Tensor:
    """Multiply blocks of the last axis of x [..., features] by `hadamard(block)`, which is its own inverse.

    The block is the largest power of two that divides the features. The bits of a row depend on that row alone, unlike
    those of a matrix product: it adds pairs, in float32 for narrower dtypes.

    >>> walsh_hadamard(torch.tensor([[2.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    tensor([[1., 1., 1., 1.],
            [2., 0., 0., 0.]])
    """
    block = x.shape[-1] & -x.shape[-1]
    y = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, block))
    apart = 1
    while apart < block:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        apart *= 2
    return (y * block**-0.5).flatten(-2).to(x.dtype)


def make_transform(kind: str, layer: Any, **options: int) -> InputTransform:
    """A new transform for a layer, by the name `kind`; ConfigError for an unknown name or option, or a wrong layer."""
    cls = InputTransform._kinds.get(kind)
    if cls is None:
        raise ConfigError(f"unknown transform {kind!r}{nearest(kind, [*InputTransform._kinds])}")
    known = {*inspect.signature(cls.of).parameters} - {"layer", "options"}
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"the transform {kind!r} has no option {unknown[0]!r}; leave it out")
    return cls.of(layer, **options)
