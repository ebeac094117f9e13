"""The mask of the tokens of a batch: padding moves neither ranges nor sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, ShapeError, warn_user
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import SpatialLayer
from fakequant.nn.quantized.recurrent_layers import Recurrent
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics.granularity import Granularity
from fakequant.restore import Restore, attributes_of
from fakequant.text import listed, module_name

Mask = str | Callable[[Any], Tensor]
"""Which tokens of a batch count, bool or 0 and 1 [batch, tokens]: a function of the batch, or a key of a dict batch."""

_SHOWN = 3  # inputs that a warning names with their shapes


class TokenMask:
    """The tokens of each batch that count.

    Args:
        mask: see `Mask`; None: all count.

    >>> tokens = TokenMask("attention_mask")
    >>> mask = tokens.mask({"attention_mask": torch.tensor([[1, 0], [1, 1]])})
    >>> x = torch.arange(8.0).view(2, 2, 2)
    >>> tokens.select("0", nn.Linear(2, 2), x, mask)
    tensor([[[0., 1.],
             [4., 5.],
             [6., 7.]]])
    """

    def __init__(self, mask: Mask | None) -> None:
        if not (mask is None or isinstance(mask, str) or callable(mask)):
            raise ConfigError(f"mask must be a function of a batch, or a key of dict batches, got {mask!r}")
        self._key = mask
        self._masked: set[str] = set()
        self._whole: dict[str, tuple[int, ...]] = {}
        self._shape: tuple[int, ...] = ()
        self._observers: list[_Unmasked] = []
        self.present: Tensor | None = None
        """The mask of the present batch; None if all tokens count."""

    def mask(self, batch: Any) -> Tensor | None:
        """The mask of a batch, bool [batch, tokens]; None if all tokens count.

        Raises:
            ConfigError: it is no tensor of two axes with True and False, or 1 and 0.
        """
        if self._key is None:
            return None
        if isinstance(self._key, str):
            if not isinstance(batch, Mapping) or self._key not in batch:
                what = f"a dict with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
                what = what or f"a {type(batch).__name__}"
                raise ConfigError(
                    f"mask={self._key!r} is a key of dict batches, but a batch is {what}; give a function of a batch, "
                    "such as mask=lambda batch: batch[1]"
                )
            found = batch[self._key]
        else:
            found = self._key(batch)
        wanted = "mask must give a bool tensor [batch, tokens], True for tokens that count"
        if not isinstance(found, Tensor) or found.dim() != 2:
            shape = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
            raise ConfigError(f"{wanted}; it gave a {type(found).__name__}{shape}")
        if found.is_floating_point() or not bool(((found == 0) | (found == 1)).all()):
            raise ConfigError(f"{wanted}; it gave a tensor of {found.dtype} with other values than 0 and 1")
        self._shape = tuple(found.shape)
        return found.bool()

    def select(
        self, name: str, layer: nn.Module, x: Tensor, mask: Tensor | None, granularity: Granularity | None = None
    ) -> Tensor:
        """The unmasked tokens of an input [batch, tokens, ...] of a layer: [1, unmasked, ...]; other inputs unchanged.

        Args:
            name: of the input, for `warn_unmasked`.
            layer: that gets the input.
            x: the input.
            mask: of the batch.
            granularity: of a fixed range for the input, which may have scales for positions.
        """
        is_recurrent = isinstance(layer, Recurrent)
        if mask is None or (is_recurrent and x[..., 0].numel() == int(mask.sum())):  # as in `select_steps`
            return x
        if _has_tokens(layer, x, mask) and (granularity is None or not _counts_positions(granularity, x)):
            self._masked.add(name)
            return x[mask.to(x.device)][None]
        if (
            is_recurrent or x.dim() != 2 or len(x) != len(mask) or x.shape == mask.shape
        ):  # else one row for each example has no tokens
            self._whole[name] = tuple(x.shape)
        return x

    def observe_through(self, model: nn.Module, inputs: Mapping[str, Quantizer]) -> Restore:
        """Have the calibrators of input quantizers see the unmasked tokens of the batch that `enter` got last.

        Args:
            model: that the quantizers are in.
            inputs: quantizers by path, each with its calibrator.

        Returns:
            A function that gives the quantizers their own calibrators back.
        """
        restore, self._observers = attributes_of(inputs.values(), "calibrator"), []
        for name, quantizer in inputs.items() if self._key is not None else ():
            layer: Any = model.get_submodule(layer_of(name))
            show: Any = _Unmasked(self, name, layer, quantizer)
            self._observers.append(show)
            quantizer.calibrator = show
        return restore

    def enter(self, batch: Any) -> None:
        """Make a batch the present one."""
        self.present = self.mask(batch)

    def leave(self) -> None:
        """Show calibrators what recurrent layers did step by step in the present batch, when all steps are known."""
        for observer in self._observers:
            observer.show_steps()

    def select_steps(self, name: str, layer: Recurrent, steps: Sequence[Tensor], mask: Tensor) -> Sequence[Tensor]:
        """The unmasked rows of the inputs [batch, columns] that a quantizer of a recurrent layer saw in a batch.

        Args:
            name: of the quantizer.
            layer: that it is in.
            steps: the inputs, in the order of its calls.
            mask: of the batch.
        """
        if sum(map(len, steps)) == int(mask.sum()):  # all tokens count, or a packed sequence has no others
            return steps
        places = layer.places(name.rpartition(".")[2], len(steps))
        if places is None or len(steps) != mask.shape[1] or any(len(x) != len(mask) for x in steps):
            self._whole[name] = tuple(steps[0].shape)
            return steps
        self._masked.add(name)
        columns = mask.to(steps[0].device).unbind(1)
        return [x[columns[place]] for place, x in zip(places, steps, strict=True) if columns[place].any()]

    def warn_unmasked(self) -> None:
        """Warn once about inputs that the mask does not fit, whose padding counts.

        Raises:
            CalibrationError: the mask fits no input at all.
        """
        if not self._whole:
            return
        shapes = [f"{module_name(layer_of(name))} {list(shape)}" for name, shape in self._whole.items()]
        shown = listed(shapes, _SHOWN)
        if not self._masked:
            raise CalibrationError(
                f"the mask has the shape {list(self._shape)}, and no input has these leading axes: {shown}; give a "
                "mask of shape [batch, tokens] of the model's inputs"
            )
        warn_user(
            f"the mask [batch, tokens] fits {len(self._masked)} inputs and not {len(shapes)} others, whose padding "
            f"counts: {shown}. Where that matters, give batches without padding",
            CalibrationWarning,
        )


class _Unmasked:
    """Shows a calibrator the unmasked tokens of each tensor."""

    def __init__(self, tokens: TokenMask, name: str, layer: nn.Module, quantizer: Quantizer) -> None:
        self._tokens, self._name, self._layer = tokens, name, layer
        self._granularity, self._calibrator = quantizer.spec.granularity, quantizer.calibrator
        self._steps: list[Tensor] = []

    @property
    def observed(self) -> bool:
        return self._calibrator is not None and self._calibrator.observed

    def observe(self, x: Tensor) -> None:
        mask = self._tokens.present
        if isinstance(self._layer, Recurrent) and mask is not None:
            self._steps.append(x)
        elif self._calibrator is not None:
            self._calibrator.observe(self._tokens.select(self._name, self._layer, x, mask, self._granularity))

    def show_steps(self) -> None:
        """Show the steps of the present batch."""
        steps, mask, self._steps = self._steps, self._tokens.present, []
        layer = self._layer
        if steps and isinstance(layer, Recurrent) and mask is not None and self._calibrator is not None:
            for x in self._tokens.select_steps(self._name, layer, steps, mask):
                self._calibrator.observe(x)


def _has_tokens(layer: nn.Module, x: Tensor, mask: Tensor) -> bool:
    """Whether the leading axes of an input are those of the mask, and no other axis may be that of its tokens."""
    if isinstance(layer, SpatialLayer) or x.dim() < 3 or x.shape[:2] != mask.shape:
        return False  # a convolution has channels where other layers have tokens
    others = x.shape[2:-1] if isinstance(layer, nn.Linear | Recurrent) else x.shape[2:]
    return mask.shape[1] not in others


def _counts_positions(granularity: Granularity, x: Tensor) -> bool:
    """Whether fixed scales of an input are of single positions, so that none can be left out."""
    try:
        return any(count != 1 for count in granularity.group_shape(x.shape)[:2])
    except ShapeError:
        return False  # the calibrator says so
