"""Changes of float models that keep what they compute, tried on the architectures of the zoo."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar

import pytest
from torch import Tensor, nn

from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.case import Case

T = TypeVar("T")
_LIBRARIES = {"tv": "torchvision", "hf": "transformers", "timm": "timm", "nn": "torch", "peft": "peft"}


def each_architecture(usual: Container[str], names: Iterable[str] = ARCHITECTURES) -> Any:
    """Parametrize by `name`; all but the usual ones are exhaustive."""
    marks = {name: () if name in usual else pytest.mark.exhaustive for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def case_of(name: str) -> Case:
    """An architecture; a test without its library is skipped."""
    library = _LIBRARIES[name.split()[0]]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return Case(ARCHITECTURES[name])


def relative(new: Tensor, old: Tensor) -> float:
    """The norm of the difference as a share of the old norm."""
    new, old = new.detach(), old.detach()
    return float((new - old).norm() / old.norm())


def changed_alike(name: str, change: Callable[[nn.Module, Any], T]) -> T:
    """The result of a change of a model, called with a batch, after which its outputs are the same up to 1e-5."""
    case = case_of(name)
    model = case.float()
    before = case.outputs(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = change(model, case.batches[0])
    assert all(
        relative(new, old) <= 1e-5
        for new, old in zip(case.outputs(model), before, strict=True)
        if old.is_floating_point() and old.norm()
    )
    return found
