"""What a run has done so far, in a folder: a run that was ended goes on from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fakequant.errors import CheckpointError
from fakequant.files import temporary_file, writable_folder, write_in_order, write_whole
from fakequant.model.state.checkpoint import read, save
from fakequant.model.state.json_values import plain_of, value_of
from fakequant.model.state.snapshots import QuantizedState
from fakequant.model.state.tensor_file import file_content
from fakequant.ptq.results import LayerResult
from fakequant.text import listed

_RESULTS = "layers.json"
_OWN = "run-*.json", "block-*", "hidden-*", "copies-*"


class Work:
    """A folder with the finished blocks of a run, and with the hidden states before the next one.

    Args:
        folder: is made.
        run: what the run depends on, by name, as texts. A folder that holds another run is refused.
        rank: of this process; each has hidden states of its own, and the first one keeps the blocks.

    Raises:
        CheckpointError: the folder holds another run.
        OutputError: it cannot be written.
    """

    def __init__(self, folder: Path, run: Mapping[str, str], rank: int) -> None:
        self.folder, self._rank = writable_folder(folder), rank
        own = {path for pattern in _OWN for path in self.folder.glob(pattern)}
        if others := sorted(
            path.name for path in self.folder.iterdir() if path not in own and not path.name.startswith(".")
        ):
            raise CheckpointError(
                f"{self.folder} holds other files, {listed(others)}; remove them, or give another folder"
            )
        path = self.folder / f"run-{rank}.json"
        held = _json(path) if path.exists() else {}
        if self.finished and (other := [what for what in run if held.get(what) != run[what]]):
            raise CheckpointError(
                f"{self.folder} holds {self.finished} blocks of a call with other {listed(other)}; call with the same "
                "arguments, remove the folder, or give another one"
            )
        if held != run:
            self._clear("hidden-*")
            write_whole(path, json.dumps(run).encode())
        self._state = lru_cache(maxsize=1)(lambda number: read(self._block(number))[0])

    @property
    def finished(self) -> int:
        """How many blocks are finished: with the hidden states after them."""
        count = 0
        while (self._block(count) / _RESULTS).exists():
            count += 1
        return next((number for number in range(count, 0, -1) if self._hidden(number).exists()), 0)

    def hidden(self, number: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The hidden states before a block by the number of the batch: in float, and with the blocks before it."""
        from safetensors.torch import load_file

        path = self._hidden(number)
        try:
            held = load_file(path)
        except Exception as error:  # of safetensors, which has its own
            raise CheckpointError(f"{path} is damaged: {error}; remove {self.folder}") from error
        found: tuple[dict[int, Tensor], ...] = ({}, {})
        for key, tensor in held.items():
            kind, _, batch = key.partition(".")
            found[kind == "quantized"][int(batch)] = tensor
        return found[0], found[1]

    def put_hidden(self, number: int, floats: Mapping[int, Tensor], quantized: Mapping[int, Tensor]) -> None:
        """Keep the hidden states before a block."""
        tensors = {f"float.{batch}": x.contiguous() for batch, x in floats.items()}
        tensors |= {f"quantized.{batch}": x.contiguous() for batch, x in quantized.items()}
        with temporary_file(self.folder, file_content(tensors, {})) as ready:
            write_in_order({self._hidden(number): ready})

    def put_block(self, number: int, block: nn.Module | None, layers: Sequence[LayerResult]) -> None:
        """Keep a finished block; None where it has no quantizers."""
        if self._rank == 0:
            if block is not None:
                save(block, self._block(number), packed=True)
            content = json.dumps([plain_of(layer) for layer in layers]).encode()
            write_whole(writable_folder(self._block(number)) / _RESULTS, content)

    def forget_hidden(self, number: int) -> None:
        """Remove the hidden states before a block."""
        with suppress(OSError):
            self._hidden(number).unlink()

    def state(self, number: int) -> QuantizedState:
        """The state of a finished block; use it before you ask for another one."""
        return self._state(number)

    def layers(self, number: int) -> list[LayerResult]:
        """What was chosen in a finished block."""
        path = self._block(number) / _RESULTS
        return value_of(_json(path), str(path), list[LayerResult])

    def remove(self) -> None:
        """Remove what this class wrote, and the folder if nothing else is in it."""
        self._clear(*_OWN)
        with suppress(OSError):
            self.folder.rmdir()

    def _clear(self, *patterns: str) -> None:
        for path in [path for pattern in patterns for path in self.folder.glob(pattern)]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif self._rank == 0 or path.name.endswith(f"-{self._rank}.safetensors"):
                path.unlink(missing_ok=True)

    def _block(self, number: int) -> Path:
        return self.folder / f"block-{number:05}"

    def _hidden(self, number: int) -> Path:
        return self.folder / f"hidden-{number:05}-{self._rank}.safetensors"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; remove {path.parent}") from error
