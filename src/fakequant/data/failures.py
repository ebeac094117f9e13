"""The batch on which a model failed: its number and shapes, and the layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import Forward
from fakequant.errors import CalibrationError, ConfigError, DTypeError, ExportError, FakeQuantError
from fakequant.nn.quantizer import Quantizer
from fakequant.restore import restore_after

_OF_TORCH = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What torch raises of wrong inputs. Other classes, such as torch.OutOfMemoryError, are left to the caller."""

_OF_A_BATCH = (*_OF_TORCH, DTypeError)
"""What wrong inputs raise in a quantized model: its quantizers refuse integers before torch does."""

_LOG = "torch._subclasses.fake_tensor"
"""Where torch writes the traceback of an error in tracing, which it raises, too."""


class BatchError(CalibrationError):
    """A model failed on a batch; the cause is the model's own error.

    Attributes:
        number: of the batch, from 1.
        batch: itself.
        where: in which layer, on what, see `place`.
    """

    def __init__(self, number: int, batch: Any, where: str, cause: str) -> None:
        super().__init__(f"batch {number}, {described(batch)}, failed{where}: {cause}; correct the batch or the model")
        self.number, self.batch, self.where = number, batch, where


@contextmanager
def failure_named(model: nn.Module, number: int, batch: Any) -> Iterator[None]:
    """Turn an error of a model's call into one that names the batch, its shapes and the layer.

    Args:
        number: of the batch, from 1.

    Raises:
        BatchError: the model failed. Other errors of this package than that of a dtype, and those that arise outside of
            the model, stay.
    """
    try:
        yield
    except _OF_A_BATCH as error:
        where = place(model, error) if type(error) in _OF_A_BATCH else None
        if where is None:
            raise
        raise BatchError(number, batch, where, one_line(error)) from error


def naming(run: Forward, batches: Sequence[Any]) -> Forward:
    """A function that calls a model as `run` does; an error names the batch, whose number is its place in a list."""
    numbers = {id(batch): number for number, batch in enumerate(batches, 1)}

    def named(model: nn.Module, batch: Any) -> Any:
        with failure_named(model, numbers[id(batch)], batch):
            return run(model, batch)

    return named


@contextmanager
def input_named(layer: str, number: int) -> Iterator[None]:
    """Name the layer and the batch in an error of what the layer gets.

    Args:
        layer: its path.
        number: of the batch, from 0.
    """
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"{layer or 'the model'}, batch {number + 1}: {error}") from error


@contextmanager
def example_failure_named(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error of torch in a model's call with an example into one that names its shapes and the layer.

    Raises:
        ConfigError: the model failed. Errors of this package, and those that arise outside of the model, stay.
    """
    try:
        yield
    except _OF_TORCH as error:
        if type(error) not in _OF_TORCH or (where := place(model, error)) is None:
            raise
        raise ConfigError(_refused(args, kwargs, where, error)) from error


@contextmanager
def example_named(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error of torch's tracing into one that names shapes and layer, if the model itself fails on the example.

    Raises:
        ExportError: a call of the model with the example fails, too. Other errors stay.
    """
    log = logging.getLogger(_LOG)
    level = log.level
    try:
        with restore_after(lambda: log.setLevel(level)):
            log.setLevel(logging.CRITICAL)
            yield
    except FakeQuantError:
        raise
    except _OF_TORCH as error:
        if (refused := _refusal(model, args, kwargs)) is None:
            raise
        raise ExportError(refused) from error


def _refusal(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What a model says of an example on which it fails; None if it takes it."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except _OF_TORCH as error:
        where = place(model, error) if type(error) in _OF_TORCH else None
        if where is None:
            return None
        return _refused(args, kwargs, where, error)
    return None


def _refused(args: Sequence[Any], kwargs: Mapping[str, Any], where: str, error: BaseException) -> str:
    given = described((args, kwargs))
    return f"the example, {given}, failed{where}: {one_line(error)}; give an example that the model takes"


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


def place(model: nn.Module, error: BaseException) -> str | None:
    """The innermost module in whose call an error arose, as " in layer NAME (TYPE), on SHAPES"; None if in none.

    Of quantized layers the type is that of the float layer.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found, shapes, trace = None, "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names and not isinstance(module, Quantizer):
            found, shapes = module, _got(trace.tb_frame.f_locals)
        trace = trace.tb_next
    if found is None:
        return None
    kind = getattr(type(found), "float_class", type(found)).__name__
    sizes = [getattr(found, name, None) for name in ("in_features", "out_features")]
    if all(isinstance(size, int) for size in sizes):
        kind += f" {sizes[0]} -> {sizes[1]}"
    return f" in layer {names[id(found)]} ({kind}){shapes}" if names[id(found)] else f" in {kind}{shapes}"


def _got(variables: dict[str, Any]) -> str:
    """What a call got, as " on float32 [4, 9]"; "" if it holds no tensor."""
    given = [value for name, value in variables.items() if name != "self"]
    found = [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        for leaf in tree_leaves(given)
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    ]
    return f" on {', '.join(found[:4])}" if found else ""
