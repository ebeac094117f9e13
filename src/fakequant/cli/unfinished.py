"""What a job leaves while it runs: a page after every step, and a checkpoint from which the same command goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import nn

from fakequant.cli.results import CHECKPOINT, PARTS, REPORT
from fakequant.errors import ConfigError, FakeQuantError
from fakequant.files import read_whole, remove_abandoned, writable_file, write_whole
from fakequant.model.state.checkpoint import load, remove_checkpoint, save
from fakequant.model.state.plan import value_of
from fakequant.report import RESULTS, Accuracy, Improved, ReportData, read_results, write_report
from fakequant.text import listed

_FOLDER = "unfinished"
_STATE = ".fakequant-job.json"
"""The name of the state, which shows that this command made the folder."""


def folder_in(out: Path) -> Path:
    """The folder `unfinished` in that of the results; with a number where others made what has this name."""
    names = chain([_FOLDER], (f"{_FOLDER}-{number}" for number in count(2)))
    folders = (out / name for name in names)
    return next(one for one in folders if (one / _STATE).is_file() or not os.path.lexists(one))


class Unfinished:
    """The folder `unfinished` in the folder of the results, see `folder_in`.

    Args:
        out: the folder of the results.
        source: the recipe, as an absolute path.
    """

    def __init__(self, out: Path, source: str) -> None:
        self.folder, self.source, self.settings = folder_in(out), source, ""
        self.done: list[str] = []
        self.accuracy: list[Accuracy] = []
        self.improvement: list[Improved] = []

    @property
    def has_page(self) -> bool:
        """Whether the page of an unfinished job is there."""
        return (self.folder / REPORT).is_file()

    @property
    def has_state(self) -> bool:
        """Whether an earlier call left something to go on from."""
        return (self.folder / _STATE).is_file()

    def resume(self, model: nn.Module, settings: str) -> nn.Module | None:
        """The model as an earlier call of the same job left it; None if there is none that can be read.

        Args:
            model: in float.
            settings: all that decides the quantized model, as text; a state of other settings is not used, nor of "".
        """
        self.settings = settings and hashlib.sha256(settings.encode("utf-8", "backslashreplace")).hexdigest()
        try:
            state = json.loads(read_whole(self.folder / _STATE))
            if not settings or state["settings"] != self.settings:
                return None
            accuracy = value_of(state["accuracy"], "accuracy", Sequence[Accuracy])
            improvement = value_of(state["improvement"], "improvement", Sequence[Improved])
            loaded = load(model, self.folder / CHECKPOINT)
            self.done = [str(step) for step in state["done"]]
        except (FakeQuantError, OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        self.accuracy, self.improvement = accuracy, improvement
        return loaded

    def keep(self, step: str, model: nn.Module, accuracy: Sequence[Accuracy], improvement: Sequence[Improved]) -> None:
        """Keep the model after a step; the state is written last, so that it never names a missing checkpoint."""
        self.done.append(step)
        self._write({"source": self.source})
        save(model, self.folder / CHECKPOINT)
        state = {
            "source": self.source,
            "settings": self.settings,
            "done": self.done,
            "accuracy": [asdict(row) for row in accuracy],
            "improvement": [asdict(row) for row in improvement],
        }
        self._write(state)

    def _write(self, state: dict[str, Any]) -> None:
        write_whole(writable_file(self.folder / _STATE), json.dumps(state).encode())

    def page(self, data: ReportData) -> None:
        """Write the page of what was done so far."""
        write_report(self.folder / REPORT, data)

    def remove(self) -> None:
        """Remove what this command wrote: the results are in their place, or the job starts anew."""
        if not self.has_state:
            return
        remove_checkpoint(self.folder / CHECKPOINT)
        with suppress(OSError):
            remove_abandoned(self.folder)
            for name in (REPORT, _STATE):
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()


def held_before(out: Path, source: str, title: str) -> str:
    """A line on what a folder held before this run; "" of an earlier call of the same command and of an empty folder.

    Args:
        out: the folder of the results.
        source: the recipe, as an absolute path.
        title: of this run's report.
    """
    ours = {Path(part).parts[0] for part in PARTS}
    names = sorted(path.name for path in out.iterdir() if path != folder_in(out) and not path.name.startswith("."))
    if (out / RESULTS).is_file():
        with suppress(FakeQuantError, OSError):
            found = read_results(out)
            if (found.title, found.source) == (title, source):
                return ""
            recipe, _, preset = found.title.rpartition(", quantized to ")
            return f"{out} holds the {preset} run of {found.source or recipe}; this run replaces it"
    replaced = [name for name in names if name in ours]
    others = [name for name in names if name not in ours]
    if replaced:
        return f"{out} holds {listed(replaced, 3)} of another origin; this run replaces what has these names"
    return f"{out} holds {listed(others, 3)}; this run leaves that alone and adds its files" if others else ""


def refuse_other_recipe(out: Path, source: str) -> None:
    """Raise if a folder holds the results of another recipe, or what another recipe left.

    Raises:
        ConfigError: it does; says which, and what to do.
    """
    found = ""
    with suppress(FakeQuantError, OSError):
        found = read_results(out).source if (out / RESULTS).is_file() else ""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = found or json.loads(read_whole(folder_in(out) / _STATE))["source"]
    if found and found != source:
        raise ConfigError(
            f"{out} holds the results of another recipe, {found}; give another folder by --out, or --overwrite to "
            "replace them"
        )
