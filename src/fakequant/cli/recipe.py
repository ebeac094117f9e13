"""Recipes: a Python file, a module or a folder that defines the model and its data; and a recipe to start from."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fakequant.cli.console import LOADED
from fakequant.cli.huggingface import FolderTask, folder_functions, task_of
from fakequant.data.arguments import NamedMetric
from fakequant.errors import OutputError, RecipeError
from fakequant.files import writable_file, write_whole

_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REQUIRED = ("model", "calibration_batches")


@dataclass(frozen=True)
class Recipe:
    """The functions of a recipe; each result is checked."""

    path: Path
    functions: dict[str, Callable[..., Any]]
    task: FolderTask = field(default_factory=lambda: FolderTask("evaluate(model)"))
    _given: list[Iterator[Any]] = field(default_factory=list, repr=False)
    """The iterators that `calibration_batches` returned: each can be read once."""

    @property
    def source(self) -> str:
        """The absolute path of the recipe."""
        return str(self.path.resolve())

    @property
    def content(self) -> str:
        """The text of the file and of files imported from its folder; for a Hugging Face folder, path and task."""
        if not self.path.is_file():
            return f"{self.source}\0{self.task.content}"
        modules = [vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
        places = {Path(file).resolve() for module in modules if (file := module.get("__file__"))}
        folder = self.path.resolve().parent
        own = [place for place in places if place.is_relative_to(folder) and "site-packages" not in place.parts]
        files = [self.path, *sorted(place for place in own if place.suffix == ".py")]
        return "\0".join(file.read_text("utf-8", "replace") for file in files if file.is_file())

    def offers(self, name: str) -> bool:
        """Whether the file defines a function of this name."""
        return name in self.functions

    @property
    def metric(self) -> NamedMetric | None:
        """`evaluate` under the name of its task; None if the recipe does not define it."""
        return NamedMetric(self.evaluate, self.task.name, self.task.smaller) if self.offers("evaluate") else None

    def model(self) -> nn.Module:
        """Return a new float model with trained weights; raises RecipeError if it is not a module."""
        model = self.functions["model"]()
        if not isinstance(model, nn.Module):
            raise self._wrong("model()", model, "a torch.nn.Module")
        return model

    def calibration_batches(self) -> Iterable[Any]:
        """Return the calibration batches; raises RecipeError for other types, and for a used generator."""
        batches = self.functions["calibration_batches"]()
        if not isinstance(batches, Iterable):
            raise self._wrong("calibration_batches()", batches, "a list, a data loader or a generator of batches")
        if isinstance(batches, (Tensor, Mapping, str)):
            what = type(batches).__name__
            raise RecipeError(
                f"{self.path}: calibration_batches() returned a {what}, which would be taken item by item; return a "
                f"list of batches: [{what.lower()}]"
            )
        if isinstance(batches, Iterator):
            if any(batches is given for given in self._given):
                raise RecipeError(
                    f"{self.path}: calibration_batches() returned the same generator twice, but a generator can be "
                    "read only once; make the generator inside the function, or return a list"
                )
            self._given.append(batches)
        return batches

    def first_batch(self) -> Any:
        """Return the first calibration batch; raises RecipeError if there is none."""
        for batch in self.calibration_batches():
            return batch
        raise RecipeError(f"{self.path}: calibration_batches() returned no batch; return at least one")

    def evaluate(self, model: nn.Module) -> float:
        """Return the metric of a model, larger is better; raises RecipeError if it is not a finite number."""
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


def load_recipe(
    path: str | os.PathLike[str], text: Path | None = None, trust: bool = False, task: str = "none"
) -> Recipe:
    """Execute a recipe file like `python FILE`: it can import the files in its folder.

    A recipe is a Python file with `model()` and `calibration_batches()`, and optionally `evaluate(model)` and
    `train(model)`; or `package.module:function`, whose function makes the model and whose module defines the others; or
    a folder that `save_pretrained` of Hugging Face wrote.
    """
    file = Path(path)
    if (file / "config.json").is_file():
        functions = folder_functions(file, text, trust)
        found = task_of(task, file, Path(text or ""), trust, functions["model"])
        return Recipe(file, functions | ({"evaluate": found.evaluate} if found.evaluate else {}), found)
    given = {"--text": text is not None, "--trust-remote-code": trust, "--task": task not in ("none", "auto")}
    if options := [option for option, was_given in given.items() if was_given]:
        raise RecipeError(f"{options[0]} is for a folder of Hugging Face, but {file} is not one; leave it out")
    if _MODULE.fullmatch(str(path)) and not file.exists():
        module_name, _, function = str(path).partition(":")
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise RecipeError(
                f"there is no module {module_name}; run the command in the folder that holds it"
            ) from error
        if not hasattr(module, function):
            raise RecipeError(f"{module_name} defines no {function}; give the function that makes the model")
        file = Path(module.__file__ or module_name)
        LOADED.add(str(file))
        return Recipe(file, _functions(str(path), {**vars(module), "model": getattr(module, function)}))
    if file.is_dir():
        raise RecipeError(
            f"{file} is a folder without config.json; give a Python file that defines model(), or a folder that "
            "save_pretrained of Hugging Face wrote"
        )
    if not file.is_file():
        raise RecipeError(
            f"there is no recipe file {file}; give the path of a Python file that defines model(), or "
            "package.module:function"
        )
    spec = spec_from_file_location("fakequant_recipe", file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{file} is not a Python file; its name must end in .py")
    module = module_from_spec(spec)
    # Pickle and dataclasses look the module up by name. Its functions may import files of the folder when called.
    sys.modules[spec.name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    LOADED.add(f"{spec.origin}")  # absolute, as in tracebacks
    spec.loader.exec_module(module)
    return Recipe(file, _functions(str(file), vars(module)))


def _functions(file: str, defined: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions of a recipe; raise if a required one is missing."""
    functions: dict[str, Callable[..., Any]] = {}
    for name in (*_REQUIRED, "evaluate", "train"):
        function = defined.get(name)
        if isinstance(function, nn.Module):
            raise RecipeError(
                f"{file}: {name} is a Module, but it must be a function; write `def {name}(): return ...`, which makes "
                "a new module at every call"
            )
        if function is not None and not callable(function):
            raise RecipeError(f"{file}: {name} is a {type(function).__name__}; it must be a function")
        if function is not None:
            functions[name] = function
    if missing := [f"{name}()" for name in _REQUIRED if name not in functions]:
        raise RecipeError(
            f"{file} lacks the function{'s' if len(missing) > 1 else ''} {' and '.join(missing)}; a recipe defines "
            "model() and calibration_batches(), and optionally evaluate(model) and train(model)"
        )
    return functions


STARTER = '''"""A recipe for fakequant: the model and its data. Replace every part that is marked EDIT.

    fakequant quantize {name} --out quantized
"""

import torch
from torch import nn


def model():
    """A new float model with its trained weights, the same each time, so that an interrupted run can go on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))  # EDIT: your model
    # net.load_state_dict(torch.load("weights.pt"))                      # EDIT: your weights
    return net


def calibration_batches():
    """Some hundred examples that look like the inputs in use; not the examples that evaluate() measures."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        yield torch.randn(32, 16, generator=generator)  # EDIT: yield images, or (images, labels), or a dict


# EDIT: optional. A number, larger is better; it is called in eval mode without gradients.
# def evaluate(net):
#     right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in held_out)
#     return 100 * right / sum(len(labels) for _, labels in held_out)


# EDIT: optional. Fine-tunes the quantized model in place.
# def train(net):
#     import fakequant as fq
#
#     schedule = fq.qat.Schedule(original_lr=0.1, original_epochs=90)
#     fq.qat.finetune(net, loader, torch.nn.functional.cross_entropy, schedule)
'''


def write_starter(path: Path) -> None:
    """Write a recipe that runs as it is; raises OutputError if the file exists."""
    if path.exists():
        raise OutputError(f"{path} exists; give another name, or remove it first")
    write_whole(writable_file(path), STARTER.replace("{name}", path.name).encode())
