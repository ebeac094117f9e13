"""The error of a model that failed: the layer, and the batch or the example with its shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.errors import CalibrationError
from fakequant.nn.quantizer import Quantizer
from fakequant.text import module_name

OF_TORCH = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
"""What torch raises of wrong inputs. Other classes, such as torch.OutOfMemoryError, are left to the caller."""


class BatchError(CalibrationError):
    """A model failed on a batch; the cause is the model's own error.

    Attributes:
        number: of the batch, from 1.
        batch: itself.
        where: in which layer, on what, see `locate`.
    """

    def __init__(self, number: int, batch: Any, where: str, cause: str, cure: str = "") -> None:
        cure = cure or "correct the batch or the model"
        super().__init__(f"batch {number}, {described(batch)}, failed{where}: {cause}; {cure}")
        self.number, self.batch, self.where = number, batch, where


def elsewhere(model: nn.Module, given: Any, cause: str) -> str:
    """What to do where an error speaks of devices, and tensors are on another one than the model; else "".

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
def failure_named(
    model: nn.Module, named: Callable[[str, str], Exception], kinds: tuple[type[Exception], ...] = OF_TORCH
) -> Iterator[None]:
    """Turn an error of a model's call into one that names the layer; errors that arise outside of the model stay.

    Args:
        named: makes the error, from where the model failed (see `locate`) and why, in one line.
        kinds: the classes of errors, without those derived from them.
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
    """Name the layer and the batch in an error of what the layer gets.

    Args:
        layer: its path.
        number: of the batch, from 0.
    """
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
    """The innermost module in whose call an error arose, as " in layer NAME (TYPE), on SHAPES"; None if in none.

    The type of a quantized layer is that of the float layer.
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
