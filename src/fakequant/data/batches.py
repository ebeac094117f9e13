"""Batches: how a model is called with one, which part of it is the input, and the error that names it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.data.again import Runs, Values, original, unchanged
from fakequant.data.failures import OF_TORCH, BatchError, described, elsewhere, failure_named
from fakequant.data.progress import length, track
from fakequant.data.token_mask import Mask, TokenMask
from fakequant.errors import CalibrationError, ConfigError, DTypeError, shown
from fakequant.nn.wrappers import inside

Forward = Callable[[nn.Module, Any], Any]
Inputs = SupportsIndex | slice | Callable[[Any], Any]
"""Which part of a batch the model gets, see `select_inputs`."""

_HOW = (
    "give inputs=0 for the first item, inputs=slice(2) for the first two as positional arguments, or a function such "
    'as inputs=lambda batch: {"x": batch["image"]}'
)


class AmbiguousBatchError(ConfigError):
    """A tuple whose last item may be labels or an optional argument."""


class Batches:
    """What a user passes in: batches, how a model is called with one, and which tokens count.

    It is iterated as the data is: once, if that is a stream, of which it keeps no batch. `kept` makes a list.

    Args:
        data: what a data loader gives.
        caller: the function that takes them, for messages.
        inputs: which part of a batch the model gets, see `select_inputs`; by default see `run_batch`.
        forward: how the user calls the model with a batch, in place of `inputs`.
        mask: which tokens of a batch count.
        progress: whether to show a progress bar, see `track`.

    Raises:
        ConfigError: the data is no batches, or one; `inputs` and `forward` are both given; or a mask of another kind.

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
            raise ConfigError("inputs= and forward= both say how the model is called with a batch; give one of them")
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
        """Whether a batch is one call of the model, and not what a user's function makes of it."""
        return isinstance(self.call, partial) and self.call.func is run_batch

    def tracked(self, what: str) -> Iterator[Any]:
        """The batches, with progress shown.

        Args:
            what: the work does.
        """
        return track(self, what, length(self._data), self.progress)

    def one_pass(self, model: nn.Module) -> AbstractContextManager[Values]:
        """A context in which a model goes on from batch to batch; afterwards it is as before."""
        return self.runs.one_pass(model)

    def run(self, model: nn.Module, batch: Any, *, alone: bool = True) -> Any:
        """What a model gives for one of the batches; the model and the batch are as before, see `unchanged`.

        Args:
            model: any.
            batch: one of these.
            alone: whether nothing else changes the model meanwhile; else what it changes itself stays.

        Raises:
            BatchError: the model failed; names the number of the batch, its shapes and the layer. Other errors of this
                package than that of a dtype, and those that arise outside of the model, stay.
        """
        number = self._numbers[id(original(batch))]
        kinds = (*OF_TORCH, DTypeError)  # the quantizers of a model refuse integers before torch does

        def failed(where: str, cause: str) -> BatchError:
            return BatchError(number, batch, where, cause, elsewhere(model, batch, cause))

        with failure_named(model, failed, kinds):
            return self.runs.run(model, batch, self.call, alone=alone)

    def kept(self) -> KeptBatches:
        """All batches, for several runs.

        Raises:
            CalibrationError: there is no batch.
            ConfigError: a mask that is none (see `TokenMask.mask`).
        """
        found = dict(enumerate(self))
        if not found:
            raise CalibrationError(f"{self._caller} needs batches, and got none")
        return KeptBatches(self, found)


class KeptBatches(Batches):
    """Batches that are kept, for several runs in any order.

    Args:
        of: the batches, all or more than these.
        numbered: these by their number from 0.
    """

    def __init__(self, of: Batches, numbered: Mapping[int, Any]) -> None:
        vars(self).update(vars(of))
        self._data = self.numbered = numbered
        known = vars(of).get("masks", {})
        self.masks = {n: known[n] if n in known else of.mask.mask(batch) for n, batch in numbered.items()}
        """The mask of each batch, bool [batch, tokens]; None if all tokens count."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbered.values())

    def __len__(self) -> int:
        return len(self.numbered)

    def run_first(self, model: nn.Module) -> Any:
        """What a model gives for the first one; errors as by `run`."""
        return self.run(model, next(iter(self)))

    def part(self, numbers: Iterable[int]) -> KeptBatches:
        """Some of the batches."""
        return KeptBatches(self, {number: self.numbered[number] for number in numbers})

    def followed_by(self, batches: Iterable[Any]) -> KeptBatches:
        """These batches, and others after them.

        Raises:
            ConfigError: the others are no batches.
        """
        refuse_tensor(batches, self._caller)
        others = dict(enumerate(batches, len(self)))
        self._numbers |= {id(batch): number + 1 for number, batch in others.items()}
        return KeptBatches(self, {**self.numbered, **others})


def batch_of(error: BaseException) -> tuple[int, Any] | None:
    """The number and the batch of the `Batches.run` in which an error arose; None if in none."""
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
        """What a model gives for them; both are as before, see `unchanged`.

        Raises:
            ConfigError: the model failed; names the shapes and the layer. Errors of this package stay.
        """

        def refused(where: str, cause: str) -> ConfigError:
            cure = elsewhere(model, (self.args, self.kwargs), cause) or "give an example that the model takes"
            return ConfigError(f"the example, {described(self)}, failed{where}: {cause}; {cure}")

        with failure_named(model, refused), unchanged(model, (self.args, self.kwargs)) as values:
            return values.apart(model(*self.args, **self.kwargs))


def select_inputs(batch: Any, inputs: Inputs) -> tuple[Any, ...] | Mapping[str, Any]:
    """The arguments that a model gets of a batch: a tuple of positional ones, or a mapping of keyword arguments.

    Args:
        batch: what a data loader gives.
        inputs: an index, such as 0: that item of a tuple or list is the one argument (a mapping: keyword arguments); a
            slice, such as slice(2) for the two leading items: these are positional arguments; or a function of the
            batch, whose result is a tuple of positional arguments, a mapping of keyword arguments, or one argument.

    Raises:
        ConfigError: another type of `inputs`, a batch that is no tuple or list, or one with fewer items.

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
    """Positional and keyword arguments of an example: a tensor, a tuple of arguments, or a mapping.

    Args:
        inputs: which part of the example they are, see `select_inputs`; None for all of it.
    """
    chosen = example if inputs is None else select_inputs(example, inputs)
    if isinstance(chosen, Mapping):
        return Arguments((), dict(chosen))
    return Arguments(tuple(chosen) if _is_sequence(chosen) else (chosen,), {})


def run_batch(model: nn.Module, batch: Any, *, inputs: Inputs | None = None, known: int | None = None) -> Any:
    """Call a model with a batch: a tensor, a mapping of keyword arguments, or a tuple of arguments.

    As many leading items of a tuple are passed as `forward` has parameters, which leaves out a loader's labels. If the
    last item would be passed to an optional parameter, it may be labels too: then the batch is refused, unless the
    item is None.

    Args:
        model: any module, or a wrapper such as DistributedDataParallel.
        batch: a batch of one of these kinds.
        inputs: which part of it the arguments are, see `select_inputs`.
        known: how many leading items of a tuple are arguments, if the caller knows; the others are then passed to
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
    """What a model gets of a batch without `inputs`: of a tuple, the leading items that `run_batch` passes.

    >>> example_in(nn.ReLU(), ("image", "label"))
    ('image',)
    """
    return tuple(_arguments(model, batch, None)) if _is_sequence(batch) else batch


def refuse_tensor(batches: Iterable[Any], caller: str) -> None:
    """Raise if batches are none, or one tensor or one mapping, which would be iterated row by row or key by key."""
    if isinstance(batches, Mapping):
        raise ConfigError(f"{caller} takes batches, and a mapping is one batch; give a list: [mapping]")
    if isinstance(batches, Tensor):
        raise ConfigError(f"{caller} takes batches, and a tensor would be taken row by row; give a list: [tensor]")
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not iterable or isinstance(batches, (str, bytes, nn.Module, type)):
        raise ConfigError(f"{caller} takes batches, as a list or a data loader, got {shown(batches)}; give [tensor]")


def _is_sequence(value: Any) -> bool:
    """Whether a value is a tuple or list of arguments. A PackedSequence is a tuple, and one argument."""
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
    parameters = _parameters(model)
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
            f"a batch is a tuple of {len(items)} items, but forward needs only {needed}: the last one may be labels or "
            f"the optional argument {names[-1]!r}. Give {leading} if it is labels, or inputs=slice({len(items)}) if it "
            f"is an argument; or give a dict of arguments ({', '.join(names)})"
        )
    return items[: len(positional)]


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a model's `forward`; those of the module inside for a wrapper of torch, which passes all on."""
    return list(inspect.signature(inside(model, kept=True).forward).parameters.values())
