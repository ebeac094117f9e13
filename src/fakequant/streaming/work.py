"""What a run has done so far, in a folder: a run that was ended goes on from there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fakequant.errors import CheckpointError
from fakequant.files import read_whole, remove_abandoned, temporary_file, writable_folder, write_in_order, write_whole
from fakequant.model.state.checkpoint import MANIFEST, read, remove_checkpoint, save
from fakequant.model.state.plan import plain_of, value_of
from fakequant.model.state.snapshots import QuantizedState, file_content
from fakequant.ptq.results import LayerResult
from fakequant.text import listed
from fakequant.version import __version__

_RESULTS = "layers.json"
_MARK, _Run = "version of fakequant", dict[str, str]
_OWN = re.compile(r"run-\d+\.json|block-\d{5}|hidden-\d{5}-\d+\.safetensors|copies-\d+")


class Work:
    """A folder with the finished blocks of a run, and with the hidden states before the next one.

    Args:
        folder: is made. It is new or empty, or an earlier call has left its files there.
        rank: of this process; each has hidden states of its own, and the first one keeps the blocks.

    Raises:
        CheckpointError: the folder holds files that are not of this class.
        OutputError: it cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = writable_folder(folder), rank
        names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if others := names if not self.is_begun(folder) else [name for name in names if not _OWN.fullmatch(name)]:
            raise CheckpointError(
                f"{self.folder} holds other files, {listed(others)}; remove them, or give another folder"
            )
        self.state = lru_cache(maxsize=1)(self._state)
        """The state of a finished block by its number; use it before you ask for another one."""

    @staticmethod
    def is_begun(folder: Path) -> bool:
        """Whether a folder holds a run: a file says so that comes first and goes last."""
        for path in folder.glob("run-*.json"):
            with suppress(CheckpointError):
                if _OWN.fullmatch(path.name) and _MARK in _read(path, _Run):
                    return True
        return False

    def mark(self) -> None:
        """Say that the folder holds a run, if it does not."""
        if not self.is_begun(self.folder):
            write_whole(self._run, json.dumps({_MARK: __version__}).encode())

    def begin(self, run: Mapping[str, str]) -> None:
        """Go on with a run, or begin it.

        Raises:
            CheckpointError: the folder holds another run.
        """
        run = {_MARK: __version__, **run}
        held = _read(self._run, _Run) if self._run.exists() else {}
        if self.finished and (other := [what for what in run if held.get(what) != run[what]]):
            raise CheckpointError(
                f"{self.folder} holds {self.finished} blocks of a call with other {listed(other)}; call with the same "
                "arguments, remove the folder, or give another one"
            )
        if held != run:
            for path in self._hidden_files():
                path.unlink(missing_ok=True)
            write_whole(self._run, json.dumps(run).encode())

    @property
    def finished(self) -> int:
        """How many blocks are finished: with the hidden states after them."""
        count = 0
        while (self._block(count) / _RESULTS).exists():
            count += 1
        return next((number for number in range(count, 0, -1) if self._hidden(number).is_file()), 0)

    def hidden(self, number: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The hidden states before a block by the number of the batch: in float, and with the blocks before it."""
        from safetensors.torch import load_file

        path, found = self._hidden(number), ({}, {})
        try:
            for key, tensor in load_file(path).items():
                kind, _, batch = key.partition(".")
                found[kind == "quantized"][int(batch)] = tensor
        except Exception as error:  # of safetensors, which has its own
            raise CheckpointError(f"{path} is damaged: {error}; remove {self.folder}") from error
        return found

    def put_hidden(self, number: int, floats: Mapping[int, Tensor], quantized: Mapping[int, Tensor]) -> None:
        """Keep the hidden states before a block."""
        tensors = {f"float.{batch}": x.contiguous() for batch, x in floats.items()}
        tensors |= {f"quantized.{batch}": x.contiguous() for batch, x in quantized.items()}
        with temporary_file(self.folder, file_content(tensors, {})) as ready:
            write_in_order({self._hidden(number): ready})

    def put_block(self, number: int, block: nn.Module | None, layers: Sequence[LayerResult], weights: str) -> None:
        """Keep a finished block, None where it has no quantizers, and a digest of its weights in float."""
        if self._rank == 0:
            if block is not None:
                save(block, self._block(number), packed=True)
            manifest = "" if block is None else self._manifest(number)
            content = json.dumps(plain_of(_Results(weights, [*layers], manifest))).encode()
            write_whole(writable_folder(self._block(number)) / _RESULTS, content)

    def check_weights(self, number: int, path: str, weights: str) -> None:
        """Raise if a finished block was made from other weights than those of now.

        Raises:
            CheckpointError: it was.
        """
        if self._results(number).weights != weights:
            raise CheckpointError(
                f"{self.folder} holds {self.finished} blocks of a call with other weights in {path}; call with the "
                "same weights, remove the folder, or give another one"
            )

    def forget_hidden(self, number: int) -> None:
        """Remove the hidden states before a block."""
        with suppress(OSError):
            self._hidden(number).unlink()

    def _state(self, number: int) -> QuantizedState:
        if self._manifest(number) != self._results(number).manifest:
            raise CheckpointError(f"{self._block(number)} is damaged: {MANIFEST} is another; remove {self.folder}")
        return read(self._block(number))[0]

    def _manifest(self, number: int) -> str:
        """The digest of what a block says of itself, which has that of its tensors."""
        try:
            return hashlib.sha256(read_whole(self._block(number) / MANIFEST)).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{self._block(number)} is damaged: {error}; remove {self.folder}") from error

    def layers(self, number: int) -> list[LayerResult]:
        """What was chosen in a finished block."""
        return self._results(number).layers

    def _results(self, number: int) -> _Results:
        return _read(self._block(number) / _RESULTS, _Results)

    def remove(self) -> None:
        """Remove what this class wrote, and the folder if nothing else is in it; what says that it is a run, last."""
        with suppress(OSError):
            remove_abandoned(self.folder)
            for path in self._hidden_files():
                path.unlink()
            for path in sorted(self.folder.glob("block-*"), reverse=True):
                if _OWN.fullmatch(path.name):
                    (path / _RESULTS).unlink(missing_ok=True)
                    remove_checkpoint(path)
            for path in self.folder.glob("run-*.json"):
                if _OWN.fullmatch(path.name):
                    path.unlink()
            self.folder.rmdir()

    def _hidden_files(self) -> list[Path]:
        """The hidden states; of the first process those of all, since it removes the folder."""
        of = r"\d+" if self._rank == 0 else str(self._rank)
        return [
            one for one in self.folder.glob("hidden-*") if re.fullmatch(rf"hidden-\d{{5}}-{of}\.safetensors", one.name)
        ]

    @property
    def _run(self) -> Path:
        return self.folder / f"run-{self._rank}.json"

    def _block(self, number: int) -> Path:
        return self.folder / f"block-{number:05}"

    def _hidden(self, number: int) -> Path:
        return self.folder / f"hidden-{number:05}-{self._rank}.safetensors"


@dataclass
class _Results:
    """What a file says of a finished block: digests of its weights in float and of its plan, and what was chosen."""

    weights: str
    layers: list[LayerResult]
    manifest: str = ""


def _read(path: Path, kind: Any) -> Any:
    try:
        return value_of(json.loads(read_whole(path)), path.name, kind)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; remove {path.parent}") from error
