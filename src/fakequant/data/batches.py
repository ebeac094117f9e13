"""Batches: how a model is called with a batch, which part of it is the input, and errors that name the batch."""

from __future__ import annotations

import inspect
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, SupportsIndex, TypeVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from fakequant.data.again import Runs, Values, original, unchanged
from fakequant.data.digest import NoDigestError, digest
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, DTypeError, ShapeError, shown, warn_user
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import SpatialLayer, is_linear
from fakequant.nn.quantized.recurrent import Recurrent
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.wrappers import inside
from fakequant.numerics.granularity import Granularity
from fakequant.restore import Restore, attributes_of, set_to
from fakequant.text import listed, module_name

OF_TORCH = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""Errors that torch raises for wrong inputs. Other errors, such as torch.OutOfMemoryError, are not caught."""


class BatchError(CalibrationError):
    """A model failed on a batch; the cause is the model's own error.

    Attributes:
        number: the number of the batch, from 1.
        batch: the batch itself.
        where: a text with the layer and the shapes of its arguments, see `locate`.
    """

    def __init__(self, number: int, batch: Any, where: str, cause: str, do: str = "") -> None:
        do = do or "correct the batch or the model"
        super().__init__(f"batch {number}, {described(batch)}, failed{where}: {cause}; {do}")
        self.number, self.batch, self.where = number, batch, where


def cure(model: nn.Module, given: Any, cause: str) -> str:
    """A text that says how to cure an error of a model's call with a batch; "" if no cure is known.

    >>> cure(nn.Linear(2, 2), {"x": 1}, "forward() got an unexpected keyword argument 'x'")
    'a dict is taken as keyword arguments: inputs= chooses among its keys, and a tuple, (dict,), passes it whole'
    """
    parts = [given, *given] if _is_sequence(given) else [given]
    refused = any(kind in cause for kind in ("required positional argument", "unexpected keyword argument"))
    if refused and any(isinstance(part, Mapping) and part for part in parts):
        what = "inputs= chooses among its keys, and a tuple, (dict,), passes it whole"
        return f"a dict is taken as keyword arguments: {what}"
    return elsewhere(model, given, cause)


def elsewhere(model: nn.Module, given: Any, cause: str) -> str:
    """A text that says how to cure an error because batch and model are on two devices; "" for other errors.

    >>> import torch
    >>> elsewhere(nn.Linear(2, 2), torch.ones(2, device="meta"), "two devices")
    "the batch is on meta, and the model on cpu; give batch.to('cpu'), or move it in forward="
    """
    own = {str(one.device) for one in (*model.parameters(), *model.buffers())}
    others = {str(leaf.device) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)} - own
    if len(own) != 1 or not others or "device" not in cause:
        return ""
    (device,) = own
    where = f"the batch is on {', '.join(sorted(others))}, and the model on {device}"
    return f"{where}; give batch.to({device!r}), or move it in forward="


@contextmanager
def device_named(model: nn.Module, given: Any, what: str) -> Iterator[None]:
    """A context that turns an error of tensors on two devices into one with the devices of model and batch."""
    try:
        yield
    except RuntimeError as error:
        cure = elsewhere(model, given, str(error))
        if not cure:
            raise
        raise ConfigError(f"{what}: {cure}") from error


@contextmanager
def failure_named(
    model: nn.Module, named: Callable[[str, str], Exception], kinds: tuple[type[Exception], ...] = OF_TORCH
) -> Iterator[None]:
    """A context that turns errors of the types `kinds`, in a call of a model, into errors that name the layer.

    `named` makes the new error from two texts: where the model failed (see `locate`), and why, in one line. Other
    errors are not changed.
    """
    try:
        yield
    except kinds as error:
        where = locate(model, error) if type(error) in kinds else None
        if where is None:
            raise
        raise named(where, one_line(error)) from error


@contextmanager
def input_named(layer: str, number: int) -> Iterator[None]:
    """A context that adds the path of a layer, and the number of the batch, to an error of the layer's input."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"{module_name(layer)}, batch {number + 1}: {error}") from error


def one_line(error: BaseException) -> str:
    """An error as one line: its type and message.

    >>> one_line(ValueError("one\\ntwo"))
    'ValueError: one two'
    """
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")


def described(batch: Any) -> str:
    """The shapes of a batch's tensors, or its type.

    >>> import torch
    >>> described((torch.ones(4, 9), torch.ones(4))), described("text")
    ('tensors of shape [4, 9], [4]', 'a str')
    """
    shapes = [str(list(leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return f"tensors of shape {', '.join(shapes)}" if shapes else f"a {type(batch).__name__}"


def locate(model: nn.Module, error: BaseException) -> str | None:
    """The innermost module in whose call an error arose, as " in layer NAME (TYPE), on SHAPES"; None outside of calls.

    For a quantized layer, TYPE is the class of the float layer.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found, shapes, trace = None, "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names and not isinstance(module, Quantizer):
            found = module
            given = [value for name, value in trace.tb_frame.f_locals.items() if name != "self"]
            tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
            sizes = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors[:4]]
            shapes = f" on {', '.join(sizes)}" if sizes else ""
        trace = trace.tb_next
    if found is None:
        return None
    kind = getattr(type(found), "float_class", type(found)).__name__
    features = [getattr(found, name, None) for name in ("in_features", "out_features")]
    if all(isinstance(size, int) for size in features):
        kind += f" {features[0]} -> {features[1]}"
    return f" in layer {names[id(found)]} ({kind}){shapes}" if names[id(found)] else f" in {kind}{shapes}"


Mask = str | Callable[[Any], Tensor]
"""A function that returns which tokens of a batch count, bool or 0 and 1 [batch, tokens]; or a key of dict batches."""

_SHOWN = 3  # inputs that a warning names with their shapes


class TokenMask:
    """Selects the tokens of each batch that count.

    Args:
        mask: see `Mask`; None if all tokens count.

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
        """The mask of a batch, bool [batch, tokens]; None if all tokens count. Raises ConfigError for a wrong mask."""
        if self._key is None:
            return None
        if isinstance(self._key, str):
            if not isinstance(batch, Mapping) or self._key not in batch:
                what = f"a dict with the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
                what = what or f"a {type(batch).__name__}"
                raise ConfigError(
                    f"mask={self._key!r} is a key of dict batches, but a batch is {what}; pass a function of a batch, "
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
        """The unmasked tokens [1, unmasked, ...] of a layer's input [batch, tokens, ...]; other inputs are not changed.

        `granularity` is that of a quantizer with a fixed range; an input with scales for single positions stays whole.
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
        """Show the calibrators of the quantizers `inputs` only the unmasked tokens of the batch that `enter` got last.

        Returns:
            A function that restores the calibrators of the quantizers.
        """
        restore, self._observers = attributes_of(inputs.values(), "calibrator"), []
        for name, quantizer in inputs.items() if self._key is not None else ():
            layer: Any = model.get_submodule(layer_of(name))
            show: Any = _Unmasked(self, name, layer, quantizer)
            self._observers.append(show)
            quantizer.calibrator = show
        return restore

    def enter(self, batch: Any) -> None:
        """Store the mask of the batch that the model gets next."""
        self.present = self.mask(batch)

    def leave(self) -> None:
        """Show calibrators the unmasked steps of recurrent layers, which are known only when the batch has ended."""
        for observer in self._observers:
            observer.show_steps()

    def select_steps(self, name: str, layer: Recurrent, steps: Sequence[Tensor], mask: Tensor) -> Sequence[Tensor]:
        """The unmasked rows of the inputs [batch, columns] of a recurrent layer's quantizer, by order of calls."""
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
        """Warn once about inputs that the mask does not fit; raise CalibrationError if it fits no input."""
        if not self._whole:
            return
        shapes = [f"{module_name(layer_of(name))} {list(shape)}" for name, shape in self._whole.items()]
        shown = listed(shapes, _SHOWN)
        if not self._masked:
            raise CalibrationError(
                f"the mask has the shape {list(self._shape)}, but no input begins with these axes (the inputs are "
                f"{shown}); pass a mask with the axes [batch, tokens] of the model's inputs"
            )
        warn_user(
            f"the mask [batch, tokens] fits {len(self._masked)} inputs, but not {len(shapes)} others, whose padding "
            f"counts: {shown}. If that matters, give batches without padding",
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
    """Whether an input begins with the mask's [batch, tokens], and no other axis could be the tokens."""
    if isinstance(layer, SpatialLayer) or x.dim() < 3 or x.shape[:2] != mask.shape:
        return False  # a convolution has channels where other layers have tokens
    others = x.shape[2:-1] if is_linear(layer) or isinstance(layer, Recurrent) else x.shape[2:]
    return mask.shape[1] not in others


def _counts_positions(granularity: Granularity, x: Tensor) -> bool:
    """Whether an input has fixed scales for single positions, so that no position can be left out."""
    try:
        return any(count != 1 for count in granularity.group_shape(x.shape)[:2])
    except ShapeError:
        return False  # the calibrator says so


Forward = Callable[[nn.Module, Any], Any]
Inputs = SupportsIndex | slice | Callable[[Any], Any]
"""Which part of a batch the model gets, see `select_inputs`."""

_HOW = (
    "give inputs=0 for the first item, inputs=slice(2) for the first two as positional arguments, or a function such "
    'as inputs=lambda batch: {"x": batch["image"]}'
)


class AmbiguousBatchError(ConfigError):
    """A batch is a tuple whose last item may be labels or an optional argument."""


class Batches:
    """The batches of a user, how a model is called with a batch, and which tokens count.

    Iteration takes batch after batch from the data, a stream only once, and stores none. `kept` stores all batches.

    Args:
        data: a data loader, or another iterable of batches.
        caller: the function that takes the batches, for messages.
        inputs: which part of a batch the model gets, see `select_inputs`; by default see `run_batch`.
        forward: instead of `inputs`, the user's function that calls the model with a batch.
        mask: which tokens of a batch count.
        progress: whether to show a progress bar, see `track`.

    Raises:
        ConfigError: the data is a single batch, or no batches; `inputs` and `forward` are both given; or the mask is
            neither a function nor a key.

    >>> batches = Batches([(torch.ones(1, 2), "label")], "calibrate", inputs=0)
    >>> [batches.run(nn.Identity(), batch) for batch in batches]
    [tensor([[1., 1.]])]
    """

    def __init__(
        self,
        data: Iterable[Any],
        caller: str,
        *,
        inputs: Inputs | None = None,
        forward: Forward | None = None,
        mask: Mask | None = None,
        progress: bool | None = None,
    ) -> None:
        refuse_tensor(data, caller)
        if inputs is not None and forward is not None:
            raise ConfigError(
                "inputs= and forward= both say how the model is called with a batch; pass only one of them"
            )
        self.call: Forward = forward or partial(run_batch, inputs=inputs)
        self.mask, self.progress = TokenMask(mask), progress
        self._data, self._caller, self.runs = data, caller, Runs()
        self._numbers: dict[int, int] = {}

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data, 1):
            self._numbers[id(batch)] = number  # a later batch may get the id of one that is gone
            yield batch

    @property
    def calls_once(self) -> bool:
        """Whether a batch is one call of the model; a user's `forward` may call it several times."""
        return isinstance(self.call, partial) and self.call.func is run_batch

    def tracked(self, what: str) -> Iterator[Any]:
        """The batches, while the progress of the work `what` is shown."""
        return track(self, what, length(self._data), self.progress)

    def one_pass(self, model: nn.Module) -> AbstractContextManager[Values]:
        """A context in which a model's state goes on from batch to batch; afterwards the model is restored."""
        return self.runs.one_pass(model)

    def run(self, model: nn.Module, batch: Any, *, alone: bool = True) -> Any:
        """The outputs of a model for one of the batches; the model and the batch are restored, see `unchanged`.

        With `alone=False` the changes of the model stay, for a caller that changes the model itself. If the model
        fails, the BatchError names the batch's number and shapes, and the layer. Errors of this package except
        DTypeError, and errors outside of the model, are not changed.
        """
        number = self._numbers[id(original(batch))]
        kinds = (*OF_TORCH, DTypeError)  # the quantizers of a model refuse integers before torch does

        def failed(where: str, cause: str) -> BatchError:
            return BatchError(number, batch, where, cause, cure(model, batch, cause))

        with failure_named(model, failed, kinds):
            return self.runs.run(model, batch, self.call, alone=alone)

    def kept(self) -> KeptBatches:
        """All batches, for several runs; raises CalibrationError if there are none, ConfigError for a wrong mask."""
        found = dict(enumerate(self))
        if not found:
            raise CalibrationError(
                f"{self._caller} needs batches, and got none; give a list, or a loader that can be iterated again"
            )
        return KeptBatches(self, found)


class KeptBatches(Batches):
    """Batches that are stored, for several runs in any order.

    Args:
        source: the batches from which the stored batches come, and whose settings they share.
        numbered: the stored batches by their number from 0.
    """

    def __init__(self, source: Batches, numbered: Mapping[int, Any]) -> None:
        vars(self).update(vars(source))
        self._data = self.numbered = numbered
        known = vars(source).get("masks", {})
        self.masks = {n: known[n] if n in known else source.mask.mask(batch) for n, batch in numbered.items()}
        """The mask of each batch, bool [batch, tokens]; None if all tokens count."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbered.values())

    def __len__(self) -> int:
        return len(self.numbered)

    def run_first(self, model: nn.Module) -> Any:
        """The outputs of a model for the first batch; errors are those of `run`."""
        return self.run(model, next(iter(self)))

    def part(self, numbers: Iterable[int]) -> KeptBatches:
        """The batches with these numbers."""
        return KeptBatches(self, {number: self.numbered[number] for number in numbers})

    def distinct(self) -> KeptBatches:
        """The batches that equal no earlier batch, numbered anew; all batches if they cannot be compared.

        >>> x = torch.ones(2)
        >>> Batches([x, x, x + 1], "calibrate").kept().distinct().numbered
        {0: tensor([1., 1.]), 1: tensor([2., 2.])}
        """
        firsts = self.firsts()
        found = KeptBatches(self, {})
        found.masks = {n: self.masks[number] for n, number in enumerate(firsts)}
        found._data = found.numbered = {n: self.numbered[number] for n, number in enumerate(firsts)}
        return found

    def firsts(self) -> list[int]:
        """The numbers of the batches that equal no earlier batch; all numbers if they cannot be compared."""
        first: dict[str, int] = {}
        try:
            for number, batch in self.numbered.items():
                first.setdefault(digest(batch), number)
        except NoDigestError:
            return [*self.numbered]
        return [*first.values()]

    def followed_by(self, batches: Iterable[Any]) -> KeptBatches:
        """These batches, and then those in `batches`; raises ConfigError if these are no iterable of batches."""
        refuse_tensor(batches, self._caller)
        others = dict(enumerate(batches, len(self)))
        self._numbers |= {id(batch): number + 1 for number, batch in others.items()}
        return KeptBatches(self, {**self.numbered, **others})


_HELD, _MEASURED = 8, 4
"""How many batches are held back at most (more judge no better), and how many judge if none is held back."""


class HeldOut(NamedTuple):
    """Batches in two parts: one part makes a result, such as a calibration, the other is held back to judge the result.

    Attributes:
        all: the batches of both parts.
        made: the batches that make the result.
        held: the batches that judge the result. It is empty for a single batch, which is then in `made`.

    >>> batches = HeldOut.of(Batches(list("abcde"), "improve").kept(), 4)
    >>> batches.made.numbered, batches.held.numbered
    ({0: 'a', 2: 'c', 3: 'd', 4: 'e'}, {1: 'b'})
    """

    all: KeptBatches
    made: KeptBatches
    held: KeptBatches

    @classmethod
    def of(cls, batches: KeptBatches, every: int, judge: Iterable[Any] | None = None) -> HeldOut:
        """Hold back the second batch of each group of `every` batches; at most eight are held back.

        Args:
            batches: the batches, numbered from 0.
            every: the number of batches in a group.
            judge: other batches that judge, so that none of `batches` is held back; with `[]`, `held` is empty.
        """
        if judge is not None:
            both = batches.followed_by(judge)
            return cls(both, batches, both.part(range(len(batches), len(both))))
        held = [number for number in batches.numbered if number % every == 1][:_HELD]
        return cls(batches, batches.part(n for n in batches.numbered if n not in held), batches.part(held))

    @property
    def measuring(self) -> KeptBatches:
        """The first batches of `made`; they judge the result if `held` is empty."""
        return self.made.part([*self.made.numbered][:_MEASURED])

    @property
    def judging(self) -> KeptBatches:
        """The batches that judge: `held`, or `measuring` if `held` is empty."""
        return self.held or self.measuring

    def __str__(self) -> str:
        if not self.held:
            return "on the one batch there is, which also made it"
        held, made = (f"{len(own)} {'batch' if len(own) == 1 else 'batches'}" for own in (self.held, self.made))
        return f"on {held} held back, with {made} to make it"


def batch_of(error: BaseException) -> tuple[int, Any] | None:
    """The number and the batch of the `Batches.run` in which an error arose; None outside of `Batches.run`."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is Batches.run.__code__:
            found = trace.tb_frame.f_locals["number"], trace.tb_frame.f_locals["batch"]
        trace = trace.tb_next
    return found


class Arguments(NamedTuple):
    """Positional and keyword arguments of a call of a model, such as an example."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, model: nn.Module) -> Any:
        """The outputs of a model for the arguments; model and arguments are restored, see `unchanged`.

        If the model fails, a ConfigError names the shapes and the layer; errors of this package are not changed.
        """

        def refused(where: str, cause: str) -> ConfigError:
            do = cure(model, (*self.args, self.kwargs), cause) or "give an example that the model takes"
            return ConfigError(f"the example, {described(self)}, failed{where}: {cause}; {do}")

        with failure_named(model, refused), unchanged(model, (self.args, self.kwargs)) as values:
            return values.apart(model(*self.args, **self.kwargs))


def select_inputs(batch: Any, inputs: Inputs) -> tuple[Any, ...] | Mapping[str, Any]:
    """The arguments of a model from a batch: a tuple of positional arguments, or a mapping of keyword arguments.

    Args:
        batch: a batch of a data loader.
        inputs: an index, a slice or a function. The item of a tuple or list at an index, such as 0, is the only
            argument; an item that is a mapping holds the keyword arguments. The items in a slice, such as slice(2),
            are positional arguments. A function of the batch returns positional arguments in a tuple, keyword arguments
            in a mapping, or one argument.

    Raises:
        ConfigError: `inputs` has another type, or the batch is not a tuple or list, or has fewer items.

    >>> select_inputs(("image", "label"), 0)
    ('image',)
    >>> select_inputs(("image", "mask", "label"), slice(2))
    ('image', 'mask')
    >>> select_inputs({"image": 1, "label": 2}, lambda batch: {"x": batch["image"]})
    {'x': 1}
    """
    if isinstance(inputs, slice):
        return tuple(_items(batch, inputs)[inputs])
    if isinstance(inputs, bool) or not (callable(inputs) or hasattr(inputs, "__index__")):
        raise ConfigError(f"inputs must be an index, a slice or a function of a batch, got {inputs!r}; {_HOW}")
    if callable(inputs):
        chosen = inputs(batch)
        return chosen if isinstance(chosen, (tuple, Mapping)) else (chosen,)
    items, index = _items(batch, inputs), operator.index(inputs)
    if not -len(items) <= index < len(items):
        raise ConfigError(f"inputs={index}, but a batch is a {type(batch).__name__} of {len(items)} items; {_HOW}")
    return items[index] if isinstance(items[index], Mapping) else (items[index],)


def example_arguments(example: Any, inputs: Inputs | None = None) -> Arguments:
    """The arguments in an example (a tensor, a tuple or a mapping), or in a part of it, see `select_inputs`."""
    chosen = example if inputs is None else select_inputs(example, inputs)
    if isinstance(chosen, Mapping):
        return Arguments((), dict(chosen))
    return Arguments(tuple(chosen) if _is_sequence(chosen) else (chosen,), {})


def run_batch(model: nn.Module, batch: Any, *, inputs: Inputs | None = None, known: int | None = None) -> Any:
    """Call a model with a batch: a tensor, a mapping of keyword arguments, or a tuple of arguments.

    As many leading items of a tuple are passed as `forward` has parameters, so that a loader's labels are not passed.
    An item for an optional parameter could also be labels: then the batch is refused, unless the item is None.

    Args:
        model: any module, or a wrapper such as DistributedDataParallel.
        batch: a tensor, a mapping or a tuple.
        inputs: which part of the batch the arguments are, see `select_inputs`.
        known: how many leading items of a tuple are arguments, if the caller knows; further items are then passed to
            required parameters only.

    Raises:
        AmbiguousBatchError: the last item of a tuple would be passed to an optional parameter, and may be labels.
    """
    if inputs is not None:
        chosen = select_inputs(batch, inputs)
        return model(**chosen) if isinstance(chosen, Mapping) else model(*chosen)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*_arguments(model, batch, known)) if _is_sequence(batch) else model(batch)


def example_in(model: nn.Module, batch: Any) -> Any:
    """The part of a batch that a model gets without `inputs`: a tuple is cut to the items that `run_batch` passes.

    >>> example_in(nn.ReLU(), ("image", "label"))
    ('image',)
    """
    return tuple(_arguments(model, batch, None)) if _is_sequence(batch) else batch


def refuse_tensor(batches: Iterable[Any], caller: str) -> None:
    """Raise ConfigError if `batches` is not iterable, or is a tensor or mapping, whose items are rows or keys."""
    if isinstance(batches, Mapping):
        raise ConfigError(f"{caller} takes batches, and a mapping is one batch; give a list: [mapping]")
    if isinstance(batches, Tensor):
        raise ConfigError(f"{caller} takes batches, and a tensor would be taken row by row; give a list: [tensor]")
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not iterable or isinstance(batches, (str, bytes, nn.Module, type)):
        raise ConfigError(f"{caller} takes batches, as a list or a data loader, got {shown(batches)}; give [tensor]")


def _is_sequence(value: Any) -> bool:
    """Whether a value is a tuple or list of arguments. A PackedSequence is a tuple, but one argument."""
    return isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence)


def _items(batch: Any, inputs: Any) -> Sequence[Any]:
    if _is_sequence(batch):
        return batch
    what = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        what += f" with the keys {', '.join(map(str, batch))}"
    raise ConfigError(
        f"inputs={inputs!r} takes items of a tuple or list, but a batch is {what}; leave inputs out if the whole batch "
        f"is the input, or {_HOW}"
    )


def _arguments(model: nn.Module, items: Sequence[Any], known: int | None) -> Sequence[Any]:
    # A wrapper of torch passes all arguments on to the module inside.
    parameters = list(inspect.signature(inside(model, kept=True).forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return items if known is None else items[:known]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    if known is not None:
        return items[: min(max(known, required), len(positional))]
    # The first item is an argument in any case: a batch of labels alone means nothing.
    needed = max(required, 1)
    if needed < len(items) <= len(positional) and items[-1] is not None:
        names = [p.name for p in positional[: len(items)]]
        leading = "inputs=0" if needed == 1 else f"inputs=slice({needed})"
        raise AmbiguousBatchError(
            f"a batch is a tuple of {len(items)} items, but forward needs only {needed}: the last item may be labels, "
            f"or the optional argument {names[-1]!r}. If it is labels, pass {leading}; if it is an argument, pass "
            f"inputs=slice({len(items)}), or dicts of arguments ({', '.join(names)})"
        )
    return items[: len(positional)]


Item = TypeVar("Item")

COUNT_EVERY = 10.0
"""The least seconds between two lines of counts."""
BAR_AFTER = 0.5
"""The seconds after which a progress bar appears: short work shows no bar."""


class _Counts(NamedTuple):
    tell: Callable[[str], None]
    bars: bool


_COUNTS: ContextVar[_Counts | None] = ContextVar("counts", default=None)


def counting(tell: Callable[[str], None], *, bars: bool = True) -> AbstractContextManager[None]:
    """A context in which `track` without a bar passes lines to `tell`, at most one line in `COUNT_EVERY` seconds.

    A line is, for example, "calibrating: 16 of 64". With `bars=False`, a terminal gets lines instead of a bar, too.
    """
    return set_to(_COUNTS, _Counts(tell, bars))


def say(text: str) -> None:
    """Pass a line to the function of `counting`, or print it on the error stream."""
    counts = _COUNTS.get()
    if counts is None:
        print(text, file=sys.stderr)
    else:
        counts.tell(text)


def tell(text: str, shown: bool | None = None) -> None:
    """Pass a line to `say` if `shown`; by default on a terminal, in a notebook and inside of `counting`."""
    if shown or (shown is None and (_COUNTS.get() or sys.stderr.isatty() or "ipykernel" in sys.modules)):
        say(text)


def length(items: Iterable[Any]) -> int | None:
    """The number of items; None if it is unknown. A DataLoader over a stream has `__len__`, but it raises.

    >>> length([1, 2]), length(iter([1, 2]))
    (2, None)
    """
    try:
        return len(items)  # pyright: ignore[reportArgumentType]  the error is the answer
    except (TypeError, NotImplementedError, OverflowError, ValueError):  # also one that is infinite or negative
        return None


def track(items: Iterable[Item], what: str, total: int | None, shown: bool | None = None) -> Iterator[Item]:
    """The items, with a progress bar on the error stream, which disappears after the last item.

    `shown` says whether to show the bar. None shows the bar on a terminal and in a notebook; elsewhere, the function
    of `counting`, if any, gets lines with the number of items. `total` is the number of items, if it is known.
    """
    counts, has_bars = (_COUNTS.get() if shown is None else None), find_spec("tqdm") is not None
    if counts is not None and not (counts.bars and has_bars and sys.stderr.isatty()):
        told = time.monotonic()
        for done, item in enumerate(items):
            if done and time.monotonic() - told >= COUNT_EVERY:
                counts.tell(f"{what}: {done}" + ("" if total is None else f" of {total}"))
                told = time.monotonic()
            yield item
        return
    if shown is not False and has_bars:
        from tqdm.auto import tqdm

        # Without a total it would ask for a length. disable=None: by itself, on a terminal and in a notebook.
        disable = None if shown is None else False
        items = tqdm(iter(items), what, total, leave=False, delay=BAR_AFTER, disable=disable)
    elif shown:
        warn_user("a progress bar needs tqdm: pip install fakequant[progress]")
    yield from items
