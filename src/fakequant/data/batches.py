"""How a model is called with a batch, and which part of the batch is its input."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, SupportsIndex

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fakequant.errors import CalibrationError, ConfigError, shown
from fakequant.nn.wrappers import inside

Forward = Callable[[nn.Module, Any], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
Inputs = SupportsIndex | slice | Callable[[Any], Any]
"""Which part of a batch the model gets, see `select_inputs`."""

_HOW = (
    "give inputs=0 for the first item, inputs=slice(2) for the first two as positional arguments, or a function such "
    'as inputs=lambda batch: {"x": batch["image"]}'
)


class AmbiguousBatchError(ConfigError):
    """A tuple whose last item may be labels or an optional argument."""


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


def runner(inputs: Inputs | None, forward: Forward | None = None) -> Forward:
    """The function by which a model is called with a batch: run(model, batch).

    Args:
        inputs: which part of a batch the model gets; None for `run_batch`.
        forward: how the user calls the model, in place of `inputs`.

    Raises:
        ConfigError: both are given.
    """
    if inputs is None:
        return forward or run_batch
    if forward is not None:
        raise ConfigError("inputs= and forward= both say how the model is called with a batch; give one of them")

    def run(model: nn.Module, batch: Any) -> Any:
        chosen = select_inputs(batch, inputs)
        return model(**chosen) if isinstance(chosen, Mapping) else model(*chosen)

    return run


def example_arguments(example: Any, inputs: Inputs | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example: a tensor, a tuple of arguments, or a mapping.

    Args:
        inputs: which part of the example they are, see `select_inputs`; None for all of it.
    """
    chosen = example if inputs is None else select_inputs(example, inputs)
    if isinstance(chosen, Mapping):
        return (), dict(chosen)
    return (tuple(chosen) if _is_sequence(chosen) else (chosen,)), {}


def run_batch(model: nn.Module, batch: Any, known: int | None = None) -> Any:
    """Call a model with a batch: a tensor, a mapping of keyword arguments, or a tuple of arguments.

    As many leading items of a tuple are passed as `forward` has parameters, which leaves out a loader's labels. If the
    last item would be passed to an optional parameter, it may be labels too: then the batch is refused, unless the
    item is None.

    Args:
        model: any module, or a wrapper such as DistributedDataParallel.
        batch: a batch of one of these kinds.
        known: how many leading items of a tuple are arguments, if the caller knows; the others are then passed to
            required parameters only.

    Raises:
        AmbiguousBatchError: the last item of a tuple would be passed to an optional parameter, and may be labels.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if _is_sequence(batch):
        return model(*_arguments(model, batch, known))
    return model(batch)


def refuse_tensor(batches: Iterable[Any], caller: str) -> None:
    """Raise if batches are none, or one tensor or one mapping, which would be iterated row by row or key by key."""
    if isinstance(batches, Mapping):
        raise ConfigError(f"{caller} takes batches, and a mapping is one batch; give a list: [mapping]")
    if isinstance(batches, Tensor):
        raise ConfigError(f"{caller} takes batches, and a tensor would be taken row by row; give a list: [tensor]")
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if not iterable or isinstance(batches, (str, bytes, nn.Module, type)):
        raise ConfigError(f"{caller} takes batches, as a list or a data loader, got {shown(batches)}; give [tensor]")


def batch_list(batches: Iterable[Any], caller: str) -> list[Any]:
    """What a data loader gives, as a list.

    Raises:
        ConfigError: one tensor or one mapping, or nothing that can be iterated.
        CalibrationError: no batches.
    """
    refuse_tensor(batches, caller)
    given = list(chain(batches))  # list() asks for a length, which a data set of a stream may refuse
    if not given:
        raise CalibrationError(f"{caller} needs batches, and got none")
    return given


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
