"""Quantized layers whose weight contains the batch normalisation after the layer (folding).

Source: Jacob et al. 2018, section 3.2, with the statistics of torch.ao's `ConvBn`: the weight is scaled by the running
statistics, and in training the output is scaled back and normalised by the batch statistics.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from fakequant.errors import ConfigError
from fakequant.nn.quantized.layers import (
    CONVOLUTIONS,
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantizedLayer,
    QuantLinear,
)
from fakequant.nn.quantizer import as_leaf
from fakequant.nn.wrappers import inside

_REMEMBERED = 16
"""How many calls of a layer have their statistics remembered, for a checkpoint that runs the layer again."""


@torch.library.custom_op("fakequant::kept", mutates_args=(), schema="(Tensor x) -> Tensor")
def _kept(x: Tensor) -> Tensor:
    """Copy the running variance x; raise ConfigError if the backward pass runs this operator.

    A checkpoint of a compiled `forward` would do so, after the statistics have changed.
    """
    if torch._C._current_graph_task_id() >= 0:
        raise ConfigError(
            "torch.utils.checkpoint under torch.compile computes a folded batch normalisation again in backward, when "
            "its statistics have changed; use only one of checkpoint and torch.compile, checkpoint other modules, or "
            "call freeze_batch_norm before"
        )
    return x.clone()


@_kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def norm_factor(norm: Any) -> Tensor:
    """gamma / sigma [out] of a batch normalisation, float64, where sigma is from the running variance."""
    variance = norm.variance() if isinstance(norm, FoldedNorm) else norm.running_var
    factor = (variance.double() + norm.eps).rsqrt()
    return factor if norm.weight is None else factor * norm.weight.double()


def norm_offset(norm: Any, bias: Tensor | None, factor: Tensor) -> Tensor:
    """The bias [out] of a folded layer, float64, where `bias` is the layer's bias and `factor` is gamma / sigma."""
    offset = ((0.0 if bias is None else bias.double()) - norm.running_mean.double()) * factor
    return offset if norm.bias is None else offset + norm.bias.double()


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """A fingerprint of the input x: sums over the batch for each element, and a sum for each example."""
    x = x.detach().double()
    return x.sum(0), x.flatten(1).sum(1)


class FoldedNorm(nn.modules.batchnorm._BatchNorm):
    """A folded batch normalisation: its `forward` returns the input; the layer before it reads its tensors.

    Modules inside it, such as the activation of timm's `BatchNormAct2d`, are called with the input.
    """

    layer: str
    axes: int
    _seen: deque[tuple[tuple[Tensor, Tensor], Tensor]] | tuple[()] = ()
    """For each recent call, the fingerprint of its input, and the running variance at the call."""
    _replayed: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        if input.dim() != self.axes:
            raise ConfigError(
                f"the batch normalisation that is folded into {self.layer} got an input of shape {list(input.shape)}, "
                f"and expected {self.axes} axes; with others the channels are on another axis. Give the model such "
                "inputs, or do not call fold_batch_norm"
            )
        for module in self.children():
            input = module(input)
        return input

    def begin(self, x: Tensor) -> None:
        """Remember the running variance for x; if a checkpoint repeats a call, take the variance of the first call."""
        assert self.running_var is not None
        self._replayed = None
        if torch._C._current_graph_task_id() >= 0:  # within a backward pass
            sums = _sums(x)
            for place in range(len(self._seen) - 1, -1, -1):
                seen, var = self._seen[place]
                if len(seen) == len(sums) and all(map(torch.equal, seen, sums)):
                    # Backward passes go from the last call to the first: of equal inputs the one before is the next.
                    del self._seen[place]  # type: ignore[misc]
                    self._seen.appendleft((seen, var))  # type: ignore[union-attr]
                    self._replayed = var
                    return
            raise ConfigError(
                f"a checkpoint runs {self.layer} again on an input that is not among its last {_REMEMBERED}, for which "
                "the statistics of the folded batch normalisation are not known; checkpoint other modules"
            )
        # A checkpoint runs without gradients, or with hooks that keep nothing.
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # pyright: ignore
            held = vars(self).setdefault("_seen", deque(maxlen=_REMEMBERED))
            held.append((_sums(x), self.running_var.clone()))

    def normalised(self, x: Tensor) -> Tensor:
        """x normalised; in training this updates the running statistics, unless a checkpoint repeats the call."""
        if self._replayed is not None:  # the same function, because a checkpoint counts what it saves
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)

    def variance(self) -> Tensor:
        """The running variance [out] that is folded into the weight; of the first call if a checkpoint repeats it."""
        assert self.running_var is not None
        if not self.training:
            return self.running_var
        if torch.compiler.is_compiling():
            return _kept(self.running_var)
        return self.running_var if self._replayed is None else self._replayed


class FoldedBatchNorm1d(FoldedNorm, nn.BatchNorm1d):
    """BatchNorm1d that is folded into the layer before it."""


class FoldedBatchNorm2d(FoldedNorm, nn.BatchNorm2d):
    """BatchNorm2d that is folded into the layer before it."""


class FoldedBatchNorm3d(FoldedNorm, nn.BatchNorm3d):
    """BatchNorm3d that is folded into the layer before it."""


class FoldedSyncBatchNorm(FoldedNorm, nn.SyncBatchNorm):
    """SyncBatchNorm that is folded into the layer before it."""


class FoldedLayer(QuantizedLayer):
    """Base of layers with a folded batch normalisation: weight and bias are the folded tensors, as in an engine.

    If the normalisation is in eval mode, the layer computes with them alone. If the normalisation is in training mode,
    the product with the folded weight is divided by gamma / sigma and then normalised by the statistics of the batch,
    which are taken from the quantized product.
    """

    plain_class: type[QuantizedLayer]
    _norm: tuple[FoldedNorm, nn.Module, str]  # in a tuple, because modules in it have their place in the model already

    @property
    def norm(self) -> FoldedNorm:
        """The folded batch normalisation; raises ConfigError if another module replaced it in the model."""
        norm, holder, name = self._norm
        now = holder._modules.get(name)
        if now is not norm and (now is None or inside(now) is not norm):
            raise ConfigError(
                f"the batch normalisation that is folded into {norm.layer} was replaced by a {type(now).__name__}, "
                "which would normalise a second time; replace it before fold_batch_norm or after merge_batch_norm "
                "(this is true of nn.SyncBatchNorm.convert_sync_batchnorm(model), too)"
            )
        return norm

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight parameter times gamma / sigma of each output channel, computed in float64 and rounded once."""
        own = cast("Tensor", self._parameters["weight"])
        return scaled_weight(self, own, norm_factor(self.norm)).to(own.dtype)

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """The folded bias [out], computed in float64 and rounded once."""
        offset = norm_offset(self.norm, self._parameters.get("bias"), norm_factor(self.norm))
        return offset.to(cast("Tensor", self._parameters["weight"]).dtype)

    def _without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        norm = self.norm
        if isinstance(input, Proxy) or not norm.training:
            return cast("Callable[..., Tensor]", super().forward)(input)
        if not torch.compiler.is_compiling():
            norm.begin(input)
        y = self._without_bias(self.quantized_input(input), self.quantized_weight())
        channels = (-1, *(1 for _ in range(norm.axes - 2)))
        factor = norm_factor(norm).to(y.dtype).view(channels)
        y = y / torch.where(factor == 0, 1.0, factor)
        own = self._parameters.get("bias")
        return norm.normalised(y if own is None else y + own.view(channels))


class FoldedLinear(FoldedLayer, QuantLinear):  # type: ignore[misc]
    """QuantLinear with a folded BatchNorm1d."""

    plain_class = QuantLinear

    def _without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class _FoldedConv(FoldedLayer):
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def _without_bias(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, None)


class FoldedConv1d(_FoldedConv, QuantConv1d):  # type: ignore[misc]
    """QuantConv1d with a folded BatchNorm1d."""

    plain_class = QuantConv1d


class FoldedConv2d(_FoldedConv, QuantConv2d):  # type: ignore[misc]
    """QuantConv2d with a folded BatchNorm2d."""

    plain_class = QuantConv2d


class FoldedConv3d(_FoldedConv, QuantConv3d):  # type: ignore[misc]
    """QuantConv3d with a folded BatchNorm3d."""

    plain_class = QuantConv3d


class FusedBatchNorm(nn.Identity):
    """A module that replaces a fused batch normalisation, and returns its input.

    Its `forward` raises ConfigError for inputs with another number of axes, whose channels are on another axis.

    >>> import fakequant as fq
    >>> print(fq.fuse_batch_norm(nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4)).eval())[1])
    FusedBatchNorm(into 0, inputs of 3 axes)
    """

    def __init__(self, layer: str, axes: int) -> None:
        super().__init__()
        self.layer = layer
        self.axes = axes

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        if input.dim() != self.axes:
            raise ConfigError(
                f"the batch normalisation that was fused into {self.layer} got an input of shape {list(input.shape)}, "
                f"and expected {self.axes} axes; with others the channels are on another axis. Give the model such "
                "inputs, or do not call fuse_batch_norm"
            )
        return input

    @classmethod
    def of(cls, norm: nn.Module, layer: str, axes: int) -> nn.Module:
        """The replacement of `norm`, followed by the modules inside `norm`, such as an activation."""
        made = cls(layer, axes)
        return nn.Sequential(OrderedDict(fused=made, **dict(norm.named_children()))) if [*norm.children()] else made

    def extra_repr(self) -> str:
        return f"into {self.layer}, inputs of {self.axes} axes"


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FOLDABLE = (nn.Linear, *CONVOLUTIONS, *_TRANSPOSED)
"""The layers into whose weight a following batch normalisation can be folded."""


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is of a batch normalisation class of torch, or of a subclass."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def norm_axes(layer: nn.Module) -> int:
    """The number of axes of a layer's output with a batch axis; its axis 1 holds the channels."""
    return 2 + len(getattr(layer, "kernel_size", ()))


def scaled_weight(layer: nn.Module, weight: Tensor, factor: Tensor) -> Tensor:
    """The weight with each output channel multiplied by its entry of `factor` [out], in float64."""
    weight = weight.double()
    if not isinstance(layer, _TRANSPOSED):
        return weight * factor.view(-1, *(1 for _ in weight.shape[1:]))
    # [in, out / groups, ...]: the inputs of a group make the outputs of that group.
    grouped = weight.view(layer.groups, -1, *weight.shape[1:])
    return (grouped * factor.view(layer.groups, 1, -1, *(1 for _ in weight.shape[2:]))).view_as(weight)


FOLDED_NORMS: dict[type[nn.Module], type[FoldedNorm]] = {
    nn.BatchNorm1d: FoldedBatchNorm1d,
    nn.BatchNorm2d: FoldedBatchNorm2d,
    nn.BatchNorm3d: FoldedBatchNorm3d,
    nn.SyncBatchNorm: FoldedSyncBatchNorm,
}
FOLDED_LAYERS: dict[type[nn.Module], type[Any]] = {
    cls.plain_class: cls for cls in (FoldedLinear, FoldedConv1d, FoldedConv2d, FoldedConv3d)
}
