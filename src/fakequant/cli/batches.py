"""Batches that say their number and shapes when the model fails on one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.errors import FakeQuantError, RecipeError
from fakequant.nn.quantizer import Quantizer


class NamedBatches:
    """Batches of a recipe; `current` is the number and the batch that is in use, None between batches."""

    def __init__(self) -> None:
        self.current: tuple[int, Any] | None = None

    def of(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The same batches, noted while they are in use; with a length where they have one."""
        return _Listed(self, batches) if isinstance(batches, Sized) else _Noted(self, batches)

    @contextmanager
    def failures_named(self, model: nn.Module) -> Iterator[None]:
        """Turn an error of the model into one that names the batch, its shapes and the layer.

        Raises:
            RecipeError: the model failed on a batch. Errors that arise outside of the model stay as they are.
        """
        try:
            yield
        except Exception as error:
            place, ours = _place(model, error), isinstance(error, FakeQuantError)
            if place is None or (ours and self.current is None):
                raise
            which = "the model"
            if self.current is not None:
                number, batch = self.current
                which = f"batch {number} of calibration_batches(), {described(batch)},"
            if ours:  # which says what to do
                raise RecipeError(f"{which} failed{place}: {error}") from error
            cause = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
            raise RecipeError(
                f"{which} failed{place}: {cause}; correct the batch or the model (-v shows the traceback)"
            ) from error


class _Noted:
    def __init__(self, note: NamedBatches, batches: Iterable[Any]) -> None:
        self.note, self.batches = note, batches

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.batches)
        for number in count(1):
            self.note.current = None
            try:
                batch = next(source)
            except StopIteration:
                return
            self.note.current = (number, batch)
            yield batch


class _Listed(_Noted):
    def __len__(self) -> int:
        return len(self.batches)  # pyright: ignore[reportArgumentType]  only made of what has a length


def described(batch: Any) -> str:
    """The shapes of a batch's tensors, or its type.

    >>> import torch
    >>> described((torch.ones(4, 9), torch.ones(4))), described("text")
    ('tensors of shape [4, 9], [4]', 'a str')
    """
    shapes = [str(list(leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return f"tensors of shape {', '.join(shapes)}" if shapes else f"a {type(batch).__name__}"


def _place(model: nn.Module, error: BaseException) -> str | None:
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
