"""When the quantized values of a weight may be given out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fakequant.functional import choose_qparams
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops.kept import Kept, give, keep, keep_codes
from fakequant.ops.library import is_watched
from fakequant.restore import restore_after

_optimizer_steps = 0


@contextmanager
def counting_optimizer_steps() -> Iterator[None]:
    """A context in which steps of optimizers count: fused ones leave no trace in the version of what they change."""

    def count(*_: Any) -> None:
        global _optimizer_steps
        _optimizer_steps += 1

    handles: list[RemovableHandle] = []
    with restore_after(lambda: [handle.remove() for handle in handles]):
        handles.append(register_optimizer_step_post_hook(count))
        yield


class _Entry(NamedTuple):
    state: tuple[Any, ...]
    held: tuple[Any, ...]
    """The tensors and their memory: freed, they could come back with other values at the same address."""
    values: Tensor
    """The quantized values, or the codes."""
    version: int
    kept: Kept | None
    """The values with their mask; None for codes."""
    params: QParams | None
    """By which codes were found; None for values."""


class WeightCache:
    """The quantized values, or the codes, of one parameter, until something changes that torch counts.

    That is: the parameter or its memory is another one, was written to, or an optimizer made a step; or the scale, the
    zero point or the specification changed; or the values given out were written to. Nothing is kept while a compiler
    or a function transform watches, for tensors that are no parameters, and where rounding is stochastic.

    Copies and pickles of it are None: what a cache belongs to is quantized anew.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def quantize(self, x: Tensor, params: QParams | None, spec: QuantSpec) -> Tensor | None:
        """What `library.fake_quantize` returns, or `fake_quantize_dynamic` without parameters; None if not kept."""
        entry = self._entry_of(x, params, spec, codes=False)
        return None if entry is None or entry.kept is None else give(x, entry.kept)

    def encode(self, x: Tensor, params: QParams | None, spec: QuantSpec) -> tuple[Tensor, QParams] | None:
        """The codes of x and the parameters, by default those that x gives; None if not kept."""
        entry = self._entry_of(x, params, spec, codes=True)
        if entry is None or entry.params is None:
            return None
        return entry.values, entry.params

    def _entry_of(self, x: Tensor, params: QParams | None, spec: QuantSpec, *, codes: bool) -> _Entry | None:
        tensors = (x,) if params is None else (x, params.scale, params.zero_point)
        if is_watched(*tensors) or not isinstance(x, nn.Parameter) or spec.rounding is not Rounding.NEAREST_EVEN:
            return None
        if any(tensor is not None and tensor.is_inference() for tensor in tensors):  # their writes are not counted
            return None
        state = (_optimizer_steps, codes, spec, *map(_state, tensors))
        mask = not codes and torch.is_grad_enabled() and x.requires_grad and spec.gradient is not Gradient.IDENTITY
        entry = self._entry
        if (
            entry is None
            or entry.state != state
            or entry.version != entry.values._version
            or (mask and entry.kept is not None and entry.kept.mask is None)  # was made without
        ):
            if codes:
                kept, params = None, choose_qparams(x.detach(), spec) if params is None else params
                values = keep_codes(x, params, spec)
            else:
                kept = keep(x, params, spec, mask=mask)
                values = kept.values
            if values is None:
                return None
            held = tuple((_owner(tensor), tensor.untyped_storage()) for tensor in tensors if tensor is not None)
            self._entry = entry = _Entry(state, held, values, values._version, kept, params)
        return entry

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _state(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return id(_owner(tensor)), tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _owner(tensor: Tensor) -> Tensor:
    """What a view is of: a scale is brought to the shape of the groups by a new one each time."""
    return tensor if tensor._base is None else tensor._base
