"""The description of a file for an engine: its path, its size, and how far its results are from the simulation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fakequant.data.again import state_before
from fakequant.errors import ExportError
from fakequant.export.verdict import OutputRow
from fakequant.files import writable_folder
from fakequant.model.weights import evaluating
from fakequant.restore import restore_after
from fakequant.text import listed

LEAST = 20.0
"""The least SQNR in dB of a right file: wrong graphs gave 2 to 9, right graphs 45 and more."""


@dataclass(frozen=True)
class EngineFile:
    """The file of `export_executorch`, `export_litert`, `export_coreml` or `export_coreai`; prints as a sentence.

    Attributes:
        path: the file, or the folder of a package.
        engine: the program that ran the file, or read it, with its version.
        bytes: the size.
        left: how often each operator occurs that the engine's integer kernels do not compute, by its name.
        outputs: the distance of each result for the example from the simulation's; empty if the engine cannot run here.
        notes: other comparisons, one sentence each.
    """

    path: Path
    engine: str
    bytes: int
    left: dict[str, int] = field(default_factory=dict)
    outputs: list[OutputRow] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict for JSON."""
        return {**asdict(self), "path": str(self.path)}

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.bytes:,} bytes, {self.engine}"]
        lines += [f"run on the example: {row}" for row in self.outputs]
        if self.left:
            lines.append(f"outside of its integer kernels: {counted(self.left)}")
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__  # what notebooks and consoles show


def new_package(path: str | os.PathLike[str], engine: str, suffix: str) -> Path:
    """The path of a new package, in a folder that is created if necessary and can be written.

    Raises:
        ExportError: another suffix, or the path exists already.
        OutputError: the folder cannot be created or written.
    """
    target = Path(path)
    if target.suffix != suffix:
        raise ExportError(f"packages of {engine} end in {suffix}, got {str(path)!r:.80}")
    if target.exists():
        raise ExportError(f"there is a {target}; give a new path, or remove it")
    writable_folder(target.parent)
    return target


def counted(names: dict[str, int]) -> str:
    """Names with their counts, as text.

    >>> counted({"aten.mm": 2, "aten.exp": 1})
    'aten.mm (2), aten.exp'
    """
    return listed([f"{name} ({count})" if count > 1 else name for name, count in names.items()], 8)


@contextmanager
def as_simulated(model: nn.Module) -> Iterator[None]:
    """A context for running a model in eval mode without gradients; at the end the model's state is restored."""
    with restore_after(state_before(model)), evaluating(model), torch.no_grad():
        yield


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in nested values, in the order of torch.export."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def simulated(model: nn.Module, program: ExportedProgram) -> list[Tensor]:
    """The results of the model, on the CPU, for the example of its graph."""
    args, kwargs = program.example_inputs or ((), {})
    with as_simulated(model):
        return [x.detach().clone().cpu() for x in tensors_in(model(*args, **kwargs))]


def steps_of(program: ExportedProgram) -> list[float | None]:
    """The scale of the quantizer of each result; None for a result that is not quantized per tensor."""
    outputs = next(node for node in program.graph.nodes if node.op == "output")
    steps = []
    for node in pytree.tree_leaves(outputs.args[0]):
        is_one = "dequantize_per_tensor" in str(getattr(node, "target", ""))
        steps.append(float(node.args[1]) if is_one else None)
    return steps


def compared(
    file: EngineFile, expected: Sequence[Tensor], results: Sequence[Any], steps: Sequence[float | None]
) -> EngineFile:
    """The description of a file, with the distances of its results from the simulation's added.

    Raises:
        ExportError: the results have other shapes than the model's, or differ by more than rounding.
    """
    found = [torch.as_tensor(x).detach().cpu() for x in results]
    if [x.shape for x in found] != [x.shape for x in expected]:
        raise ExportError(
            f"{file.engine} returns results of the shapes {[list(x.shape) for x in found]}, but the model returns "
            f"{[list(x.shape) for x in expected]}; let forward return tensors that depend on its arguments"
        )
    rows = [OutputRow(f"output {place}", step=step) for place, step in enumerate(steps)]
    for row, ours, theirs in zip(rows, expected, found, strict=True):
        row.add(theirs, ours)
        if not row.sqnr >= LEAST:
            raise ExportError(
                f"{file.engine} computes something else than the model, so nothing was written: {row}. Give an example "
                "of finite numbers, and prepare with the engine as target=; if the results still differ, leave out "
                "layers to find the layer that is computed differently"
            )
    return replace(file, outputs=rows)
