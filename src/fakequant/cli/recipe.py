"""Recipes: a Python file in which the user defines the model and its data for the command line."""

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
    """The functions of a recipe file; each result is checked.

    Attributes:
        path: the file.
        functions: the file's functions, by name.
    """

    path: Path
    functions: dict[str, Callable[..., Any]]

    def offers(self, name: str) -> bool:
        """Whether the file defines a function of this name."""
        return name in self.functions

    def model(self) -> nn.Module:
        """Return a new float model with trained weights.

        Raises:
            RecipeError: `model()` did not return a module.
        """
        model = self.functions["model"]()
        if not isinstance(model, nn.Module):
            raise self._wrong("model()", model, "a torch.nn.Module")
        return model

    def calibration_batches(self) -> Iterable[Any]:
        """Return the batches for calibration, from the first.

        Raises:
            RecipeError: `calibration_batches()` did not return an iterable.
        """
        batches = self.functions["calibration_batches"]()
        if not isinstance(batches, Iterable):
            raise self._wrong("calibration_batches()", batches, "a list, a data loader or a generator of batches")
        return batches

    def first_batch(self) -> Any:
        """Return the first calibration batch.

        Raises:
            RecipeError: there is no batch.
        """
        for batch in self.calibration_batches():
            return batch
        raise RecipeError(f"{self.path}: calibration_batches() returned no batch; return at least one")

    def evaluate(self, model: nn.Module) -> float:
        """Return the metric of a model; larger is better.

        Raises:
            RecipeError: `evaluate(model)` did not return a finite number.
        """
        metric = self.functions["evaluate"](model)
        try:
            value = float(metric)
        except (TypeError, ValueError) as error:
            raise self._wrong("evaluate(model)", metric, "a number, larger is better") from error
        if not math.isfinite(value):
            raise self._wrong("evaluate(model)", metric, "a finite number, larger is better")
        return value

    def train(self, model: nn.Module) -> None:
        """Fine-tune a prepared and calibrated model in place."""
        self.functions["train"](model)

    def _wrong(self, call: str, value: object, expected: str) -> RecipeError:
        return RecipeError(f"{self.path}: {call} returned {value!r:.80} of type {type(value).__name__}, not {expected}")


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Execute a recipe file as `python FILE` does: it can import the files in its folder.

    Args:
        path: a Python file with `model()` and `calibration_batches()`, and optionally `evaluate(model)` and
            `train(model)`.

    Raises:
        RecipeError: the file does not exist, or lacks a function.
        Any error that the file itself raises.
    """
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"there is no recipe file {file}; give the path of a Python file that defines model()")
    module = _execute(file)
    functions = {}
    for name in (*_REQUIRED, "evaluate", "train"):
        function = getattr(module, name, None)
        if function is not None and not callable(function):
            raise RecipeError(f"{file}: {name} is a {type(function).__name__}; it must be a function")
        if function is not None:
            functions[name] = function
    if missing := [f"{name}()" for name in _REQUIRED if name not in functions]:
        raise RecipeError(
            f"{file} lacks the function {' and '.join(missing)}; a recipe defines model() and calibration_batches(), "
            "and optionally evaluate(model) and train(model)"
        )
    return Recipe(file, functions)


def _execute(file: Path) -> ModuleType:
    spec = spec_from_file_location("fakequant_recipe", file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{file} is not a Python file; its name must end in .py")
    module = module_from_spec(spec)
    # Pickle and dataclasses look the module up by name. Its functions may import files of the folder when called.
    sys.modules[spec.name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module
