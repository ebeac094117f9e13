"""Recipes: a user's Python file that says what to quantize, for the command line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fakequant.errors import RecipeError

_REQUIRED = ("model", "calibration_batches")


@dataclass(frozen=True)
class Recipe:
    """What a recipe file offers; every call is checked.

    Attributes:
        path: the file.
        functions: the file's functions by name.
    """

    path: Path
    functions: dict[str, Callable[..., Any]]

    def offers(self, name: str) -> bool:
        """Whether the file has a function of this name."""
        return name in self.functions

    def model(self) -> nn.Module:
        """A fresh float model, with trained weights.

        Raises:
            RecipeError: `model()` returned something else.
        """
        found = self.functions["model"]()
        if not isinstance(found, nn.Module):
            raise self._wrong("model()", found, "a torch.nn.Module")
        return found

    def calibration_batches(self) -> Iterable[Any]:
        """The batches to calibrate with, from the first.

        Raises:
            RecipeError: `calibration_batches()` returned nothing that can be iterated.
        """
        found = self.functions["calibration_batches"]()
        if not isinstance(found, Iterable):
            raise self._wrong("calibration_batches()", found, "a list, a data loader or a generator of batches")
        return found

    def first_batch(self) -> Any:
        """The first calibration batch.

        Raises:
            RecipeError: there is none.
        """
        for batch in self.calibration_batches():
            return batch
        raise RecipeError(f"{self.path}: calibration_batches() gave no batch; give at least one")

    def evaluate(self, model: nn.Module) -> float:
        """The metric of a model; larger is better.

        Raises:
            RecipeError: `evaluate(model)` returned no finite number.
        """
        found = self.functions["evaluate"](model)
        try:
            value = float(found)
        except (TypeError, ValueError) as error:
            raise self._wrong("evaluate(model)", found, "a number, larger is better") from error
        if not math.isfinite(value):
            raise self._wrong("evaluate(model)", found, "a finite number, larger is better")
        return value

    def train(self, model: nn.Module) -> None:
        """Fine-tune a prepared and calibrated model in place."""
        self.functions["train"](model)

    def _wrong(self, call: str, found: object, expected: str) -> RecipeError:
        return RecipeError(f"{self.path}: {call} returned {found!r:.80} of type {type(found).__name__}, not {expected}")


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe file, as `python FILE` would: the files beside it can be imported.

    Args:
        path: a Python file with `model()` and `calibration_batches()`, and optionally `evaluate(model)` and
            `train(model)`.

    Raises:
        RecipeError: no such file, or it lacks a function; names both.
        Whatever the file itself raises.
    """
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"there is no recipe file {file}; give the path of a Python file with model()")
    module = _execute(file)
    functions = {}
    for name in (*_REQUIRED, "evaluate", "train"):
        found = getattr(module, name, None)
        if found is not None and not callable(found):
            raise RecipeError(f"{file}: {name} is a {type(found).__name__}; it must be a function")
        if found is not None:
            functions[name] = found
    if missing := [f"{name}()" for name in _REQUIRED if name not in functions]:
        raise RecipeError(
            f"{file} lacks the function {' and '.join(missing)}; a recipe offers model() and calibration_batches(), "
            "and optionally evaluate(model) and train(model)"
        )
    return Recipe(file, functions)


def _execute(file: Path) -> ModuleType:
    spec = spec_from_file_location("fakequant_recipe", file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{file} is no Python file; its name must end in .py")
    module = module_from_spec(spec)
    # Pickle and dataclasses look a module up by its name; functions may import neighbours when they are called.
    sys.modules[spec.name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module
