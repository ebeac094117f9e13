"""The tensors in what a model returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def float_tensors(output: Any) -> list[Tensor]:
    """All float tensors in a model's output: in tuples, lists, mappings and dataclasses, however nested.

    >>> float_tensors({"logits": torch.ones(1), "ids": torch.arange(2)})
    [tensor([1.])]
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    items: Iterable[Any] = ()
    if isinstance(output, Mapping):
        items = output.values()
    elif isinstance(output, (tuple, list)):
        items = output
    elif is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name) for field in fields(output)]
    return [tensor for item in items for tensor in float_tensors(item)]
