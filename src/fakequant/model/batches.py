"""How a model is called with a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fakequant.errors import ConfigError

Forward = Callable[[nn.Module, Any], Any]

# torch's wrappers, by name because importing them all takes long, and where they hold the module.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "AveragedModel": "module",
}


def run_batch(model: nn.Module, batch: Any, known: int | None = None) -> Any:
    """Call a model with a batch: a tensor, a mapping of keyword arguments, or a tuple of arguments.

    Of a tuple, as many leading items are passed as `forward` has parameters: a loader's labels are left out. Where the
    last item would fill an optional parameter, nothing tells it from labels, and it is refused, unless it is None.

    Args:
        model: any module, or a wrapper such as DistributedDataParallel.
        batch: of one of these kinds.
        known: how many leading items of a tuple are arguments, where the caller knows; then the others are passed only
            to required parameters.

    Raises:
        ConfigError: the last item of a tuple would be passed as an optional parameter, and might be labels.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*_arguments(model, batch, known))
    return model(batch)


def refuse_tensor(batches: Iterable[Any], caller: str) -> None:
    """Raise if batches are one tensor or one mapping, which would be iterated row by row or key by key."""
    if isinstance(batches, Mapping):
        raise ConfigError(f"{caller} takes batches, and a mapping is one batch; give a list: [mapping]")
    if isinstance(batches, Tensor):
        raise ConfigError(f"{caller} takes batches, and a tensor would be taken row by row; give a list: [tensor]")


def _arguments(model: nn.Module, items: Sequence[Any], known: int | None) -> Sequence[Any]:
    parameters = _parameters(model)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return items if known is None else items[:known]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    if known is not None:
        return items[: min(max(known, required), len(positional))]
    # The first item is an argument in any case: a batch of labels alone means nothing.
    if max(required, 1) < len(items) <= len(positional) and items[-1] is not None:
        names = [p.name for p in positional[: len(items)]]
        raise ConfigError(
            f"a batch is a tuple of {len(items)} items, but forward needs only {max(required, 1)}: the last one may be "
            f"labels or the optional argument {names[-1]!r}; give a dict of arguments ({', '.join(names)}), leave the "
            "labels out, or say by forward= how the model is called"
        )
    return items[: len(positional)]


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a model's `forward`, or of the module in a wrapper of torch, which passes all on."""
    for cls in type(model).__mro__:
        inner = _WRAPPERS.get(cls.__name__) if cls.__module__.startswith("torch.") else None
        if inner is not None:
            return _parameters(getattr(model, inner))
    return list(inspect.signature(model.forward).parameters.values())
