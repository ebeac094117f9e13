"""The blocks of a model that run one after the other, the arguments of their calls, and a folder of finished blocks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import BatchError, KeptBatches
from fakequant.errors import CheckpointError, ConfigError, shown
from fakequant.files import read_whole, remove_abandoned, temporary_file, writable_folder, write_in_order, write_whole
from fakequant.model.state.checkpoint import MANIFEST, read, remove_checkpoint, save
from fakequant.model.state.plan import plain_of, value_of
from fakequant.model.state.snapshots import QuantizedState, file_content
from fakequant.nn.paths import join
from fakequant.ptq.judging import LayerResult
from fakequant.text import listed
from fakequant.version import __version__

BlockFunction = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""A function that computes the output of a block from its number and the arguments of a call."""


Place = int | str
"""The place of the hidden states among the arguments of a block: a number, or a name."""


class BlockCall:
    """The arguments of a call of a block: the hidden states, and all other arguments.

    Args:
        mask: the unmasked tokens, bool [batch, tokens]; None if all count.

    Attributes:
        output: the result of the last run of the block with this call.
    """

    output: Any = None

    def __init__(
        self, hidden: Tensor, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> None:
        self.hidden, self.place, self.mask = hidden, place, mask
        self.args = tuple(None if at == place else value for at, value in enumerate(args))
        self.kwargs = {name: None if name == place else value for name, value in kwargs.items()}

    def with_hidden(self, hidden: Tensor) -> BlockCall:
        """The same call with other hidden states."""
        return BlockCall(hidden, self.place, self.args, self.kwargs, self.mask)

    def run(self, block: nn.Module) -> Any:
        """The result of a block; the hidden states are copied, because the block may write into them."""
        hidden = self.hidden.clone()
        args = [hidden if at == self.place else value for at, value in enumerate(self.args)]
        return block(*args, **{name: hidden if name == self.place else value for name, value in self.kwargs.items()})


def _places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Place, Any]:
    return {**dict(enumerate(args)), **kwargs}


def blocks_of(model: nn.Module, name: str | None) -> dict[str, nn.Module]:
    """The items, by path, of the list of modules `name`; by default of the list that holds most parameters.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    >>> list(blocks_of(model, None))
    ['layers.0', 'layers.1']
    """
    lists = {path: one for path, one in model.named_modules() if isinstance(one, (nn.ModuleList, nn.Sequential))}
    if name is not None and not (isinstance(name, str) and name in lists):
        known = listed([repr(path) for path in lists]) or "none"
        raise ConfigError(f"the model has no list of modules {shown(name)} for blocks=; its lists are {known}")
    if not lists:
        raise ConfigError("the model has no list of modules whose items could be its blocks")
    sizes = {path: sum(parameter.numel() for parameter in one.parameters()) for path, one in lists.items()}
    chosen = max(lists, key=sizes.__getitem__) if name is None else name
    found = {join(chosen, key): block for key, block in lists[chosen].named_children()}
    if len(set(found.values())) < len(lists[chosen]):
        raise ConfigError(f"{chosen} holds a block twice, but each must be called once; improve the model in memory")
    return found


class _Substitute(nn.Module):
    """Replaces a block: a call runs a function, and attributes are read from the block."""

    def __init__(self, number: int, block: nn.Module, see: BlockFunction) -> None:
        super().__init__()
        self.__dict__.update(_number=number, _block=block, _function=see)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._number, args, kwargs)


@contextmanager
def in_place_of(model: nn.Module, blocks: Iterable[str], see: BlockFunction) -> Iterator[None]:
    """A context in which `see` is called in place of each block."""
    places = [(model.get_submodule(path.rpartition(".")[0])._modules, path.rpartition(".")[2]) for path in blocks]
    own = [modules[key] for modules, key in places]
    try:
        for number, ((modules, key), block) in enumerate(zip(places, own, strict=True)):
            assert block is not None
            modules[key] = _Substitute(number, block, see)
        yield
    finally:
        for (modules, key), block in zip(places, own, strict=True):
            modules[key] = block


class Calls(NamedTuple):
    """How a model calls its blocks.

    Attributes:
        of_blocks: for each block its calls by the number of the batch, with the hidden states before the first block.
        before: the paths of the modules that run before the first block.
        as_tuple: whether the model takes the output of a block as the first item of a tuple.
        place: the place of the hidden states among the arguments of a block.
    """

    of_blocks: list[dict[int, BlockCall]]
    before: set[str]
    as_tuple: bool
    place: Place

    def substitute(self, hidden: Callable[[], Tensor]) -> BlockFunction:
        """A function in place of the blocks: it returns the hidden states it gets, for the last block `hidden()`."""

        def see(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            last = number == len(self.of_blocks) - 1
            own = hidden() if last else _places(args, kwargs)[self.place]
            return (own,) if self.as_tuple else own

        return see


_CHANGED = (
    "{1} does not get the output of {0}: the model changes the hidden states between its blocks; improve the model in "
    "memory, or name other blocks="
)


def calls_of(model: nn.Module, blocks: Sequence[str], batches: KeptBatches, *, to_the_end: bool = True) -> Calls:
    """The calls of each block for all batches. No block runs: new hidden states take the place of its output.

    Args:
        to_the_end: whether the first batch runs the modules after the blocks, too, which may call blocks again.

    Raises:
        ConfigError: the model calls its blocks in another order or several times, changes the hidden states between two
            blocks, or gives a block something besides the hidden states that depends on an earlier block.
    """
    first, recorder = next(iter(batches.numbered)), _Recorder(model, blocks, batches)
    for recorder.as_tuple in (False, True):
        # A second run, with the place of the hidden states that the second block showed.
        if recorder.run(first, to_the_end=to_the_end) or (
            recorder.learned and recorder.run(first, to_the_end=to_the_end)
        ):
            break
    else:
        if recorder.failed is not None:
            raise ConfigError(
                f"the model does not run with its blocks replaced, {recorder.failed}; improve it in memory"
            ) from recorder.failed
        raise ConfigError(_CHANGED.format(*blocks))
    found = [own[first] for own in recorder.found]
    recorder.factor = 0.5
    recorder.run(first)
    for path, one, own in zip(blocks, found, recorder.found, strict=True):
        if not _same((one.args, one.kwargs), (own[first].args, own[first].kwargs)):
            raise ConfigError(
                f"an argument of {path}, besides the hidden states, depends on an earlier block; improve the model in "
                "memory"
            )
        for value in (*one.args, *one.kwargs.values()):
            _check_plain(path, value)
    recorder.factor = 1.0
    for number in batches.numbered:
        if not recorder.run(number):
            raise ConfigError(_CHANGED.format(*blocks))
    return Calls(recorder.found, recorder.before, recorder.as_tuple, recorder.place)


class _AllSeen(BaseException):
    """Ends the forward pass of a model before its last block."""


class _Recorder:
    """Records the calls of blocks, which do not run.

    Attributes:
        as_tuple: whether a block returns a tuple.
        learned: whether the last run found another place of the hidden states.
        failed: the error that ended the last run after the call of a block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], batches: KeptBatches) -> None:
        self._model, self._blocks, self._batches = model, blocks, batches
        self.as_tuple, self.place, self.learned, self.factor = False, -1, False, 1.0
        self.before, self.failed = set[str](), None
        self.found: list[dict[int, BlockCall]] = [{} for _ in blocks]
        self._order, self._present, self._fits, self._to_the_end = list[int](), 0, True, False
        self._given: Tensor | None = None

    place: Place
    failed: BatchError | None

    def run(self, number: int, *, to_the_end: bool = False) -> bool:
        """Record the calls for a batch; returns whether each block gets the output of the block before it."""
        self._order.clear()
        self._present, self._fits, self._to_the_end, self._given = number, True, to_the_end, None
        self.learned, self.failed, hooks = False, None, []
        try:
            for path, module in self._model.named_modules():

                def enter(_module: nn.Module, _args: Any, path: str = path) -> None:
                    self.before |= set() if self._order else {path}

                hooks.append(module.register_forward_pre_hook(enter))
            with in_place_of(self._model, self._blocks, self._called), torch.no_grad(), suppress(_AllSeen):
                self._batches.run(self._model, self._batches.numbered[number])
        except BatchError as error:
            if not self._order:  # before the blocks: of the batch
                raise
            self.failed = error
            return False
        finally:
            for hook in hooks:
                hook.remove()
        if self._fits and self._order != [*range(len(self._blocks))]:
            raise ConfigError(
                f"the model calls its blocks in the order {self._order}, not once each in the order of the list; "
                "name other blocks=, or improve the model in memory"
            )
        return self._fits

    def _called(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = _places(args, kwargs)
        if self._given is not None:
            here = next((place for place, value in places.items() if value is self._given), None)
            self._fits = here is not None and here == self.place
            if here is not None and here != self.place:
                self.place, self.learned = here, True
        elif not _is_float(places.get(self.place)):
            self.place = next((place for place, value in places.items() if _is_float(value)), self.place)
        self._order.append(number)
        hidden = places.get(self.place)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            raise ConfigError(f"{self._blocks[number]} gets no hidden states as an argument; name other blocks=")
        calls = self.found[0]
        first = calls[self._present].hidden if number and self._present in calls else hidden
        self.found[number][self._present] = BlockCall(
            first, self.place, args, kwargs, self._batches.masks[self._present]
        )
        if not self._fits or (len(self._order) >= len(self._blocks) and not self._to_the_end):
            raise _AllSeen
        self._given = hidden * self.factor
        return (self._given,) if self.as_tuple else self._given


_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))


def _check_plain(path: str, value: Any) -> None:
    """Raise ConfigError for an argument that may keep values of a call, such as a cache of keys."""
    if isinstance(value, tuple):
        for item in value:
            _check_plain(path, item)
    elif not isinstance(value, _PLAIN):
        raise ConfigError(
            f"{path} gets a {type(value).__name__}, which may keep values of a call; improve the model in memory"
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _same(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    if len(ones) != len(others):
        return False
    pairs = zip(ones, others, strict=True)
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y for x, y in pairs
    )


_RESULTS = "layers.json"
_MARK, _Run = "version of fakequant", dict[str, str]
_OWN = re.compile(r"run-\d+\.json|block-\d{5}|hidden-\d{5}-\d+\.safetensors|copies-\d+")


class Work:
    """A folder for the finished blocks of a run, and the hidden states before the next block.

    Args:
        folder: a new or empty folder, which is made, or the folder of an earlier call.
        rank: the rank of this process; each process stores its hidden states, and the first stores the blocks.

    Raises:
        CheckpointError: the folder holds files that this class did not write.
        OutputError: the folder cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = writable_folder(folder), rank
        names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        if others := names if not self.is_begun(folder) else [name for name in names if not _OWN.fullmatch(name)]:
            raise CheckpointError(
                f"{self.folder} holds other files, {listed(others)}; remove them, or give another folder"
            )
        self.state = lru_cache(maxsize=1)(self._state)
        """The state of a finished block by its number; the state of another block replaces it."""

    @staticmethod
    def is_begun(folder: Path) -> bool:
        """Whether a folder holds a run, by a file that is written first and removed last."""
        for path in folder.glob("run-*.json"):
            with suppress(CheckpointError):
                if _OWN.fullmatch(path.name) and _MARK in _read(path, _Run):
                    return True
        return False

    def mark(self) -> None:
        """Write the file that marks the folder of a run, if there is none."""
        if not self.is_begun(self.folder):
            write_whole(self._run, json.dumps({_MARK: __version__}).encode())

    def begin(self, run: Mapping[str, str]) -> None:
        """Continue a run or begin it; raises CheckpointError if the folder holds another run."""
        run = {_MARK: __version__, **run}
        held = _read(self._run, _Run) if self._run.exists() else {}
        if self.finished and (other := [what for what in run if held.get(what) != run[what]]):
            raise CheckpointError(
                f"{self.folder} holds {self.finished} blocks of a call with other {listed(other)}; call with the same "
                "arguments, remove the folder, or give another folder"
            )
        if held != run:
            for path in self._hidden_files():
                path.unlink(missing_ok=True)
            write_whole(self._run, json.dumps(run).encode())

    @property
    def finished(self) -> int:
        """The number of blocks that are finished, and after which the hidden states are stored."""
        count = 0
        while (self._block(count) / _RESULTS).exists():
            count += 1
        return next((number for number in range(count, 0, -1) if self._hidden(number).is_file()), 0)

    def hidden(self, number: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The hidden states before a block by the number of the batch, of the float and of the quantized model."""
        from safetensors.torch import load_file

        path, found = self._hidden(number), ({}, {})
        try:
            for key, tensor in load_file(path).items():
                kind, _, batch = key.partition(".")
                found[kind == "quantized"][int(batch)] = tensor
        except Exception as error:  # safetensors raises an error class of its own
            raise CheckpointError(f"{path} is damaged: {error}; remove {self.folder}") from error
        return found

    def put_hidden(self, number: int, floats: Mapping[int, Tensor], quantized: Mapping[int, Tensor]) -> None:
        """Store the hidden states before a block."""
        tensors = {f"float.{batch}": x.contiguous() for batch, x in floats.items()}
        tensors |= {f"quantized.{batch}": x.contiguous() for batch, x in quantized.items()}
        with temporary_file(self.folder, file_content(tensors, {})) as ready:
            write_in_order({self._hidden(number): ready})

    def put_block(self, number: int, block: nn.Module | None, layers: Sequence[LayerResult], weights: str) -> None:
        """Store a finished block (None if it has no quantizers), its results, and a digest of its float weights."""
        if self._rank == 0:
            if block is not None:
                save(block, self._block(number), packed=True)
            manifest = "" if block is None else self._manifest(number)
            content = json.dumps(plain_of(_Results(weights, [*layers], manifest))).encode()
            write_whole(writable_folder(self._block(number)) / _RESULTS, content)

    def check_weights(self, number: int, path: str, weights: str) -> None:
        """Raise CheckpointError if a finished block was made from other float weights."""
        if self._results(number).weights != weights:
            raise CheckpointError(
                f"{self.folder} holds {self.finished} blocks of a call with other weights in {path}; call with the "
                "same weights, remove the folder, or give another folder"
            )

    def forget_hidden(self, number: int) -> None:
        """Remove the hidden states that are stored for a block."""
        with suppress(OSError):
            self._hidden(number).unlink()

    def _state(self, number: int) -> QuantizedState:
        if self._manifest(number) != self._results(number).manifest:
            raise CheckpointError(f"{self._block(number)} is damaged: {MANIFEST} was changed; remove {self.folder}")
        return read(self._block(number))[0]

    def _manifest(self, number: int) -> str:
        """The digest of a block's manifest, which holds the digest of its tensors."""
        try:
            return hashlib.sha256(read_whole(self._block(number) / MANIFEST)).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{self._block(number)} is damaged: {error}; remove {self.folder}") from error

    def layers(self, number: int) -> list[LayerResult]:
        """The results of the layers of a finished block."""
        return self._results(number).layers

    def _results(self, number: int) -> _Results:
        return _read(self._block(number) / _RESULTS, _Results)

    def remove(self) -> None:
        """Remove the files that this class wrote, the mark of the run last, and then the folder if it is empty."""
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
        """The files of this process with hidden states; for the first process, which removes the folder, all files."""
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
    """The stored results of a finished block: digests of the float weights and the manifest, and the layers' errors."""

    weights: str
    layers: list[LayerResult]
    manifest: str = ""


def _read(path: Path, kind: Any) -> Any:
    try:
        return value_of(json.loads(read_whole(path)), path.name, kind)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; remove {path.parent}") from error
