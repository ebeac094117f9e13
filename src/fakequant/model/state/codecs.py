"""Formats of quantized models that others add: two functions between a state and the files of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor

from fakequant.errors import CheckpointError
from fakequant.files import locked, refuse_links, temporary_file, writable_folder, write_in_order
from fakequant.model.state.snapshots import LazyTensor, QuantizedState
from fakequant.model.state.tensor_file import StoredTensors, file_content

Tensors = Mapping[str, Tensor | LazyTensor]
Content = bytes | Tensors | Path | Iterable[bytes | memoryview]
"""What a file holds: bytes, tensors by name, the path of a file to copy, or parts that are made one after the other."""
Files = Mapping[str, Content]
_TENSORS = ".safetensors"
_COPIED = 1 << 18
"""Bytes of a file that are read at once: each read allocates as many, also for a small file."""


class TensorFile(dict[str, "Tensor | LazyTensor"]):
    """The tensors of a file, with texts for its header.

    >>> TensorFile({"x": torch.ones(2)}, {"made by": "hand"}).metadata
    {'made by': 'hand'}
    """

    def __init__(self, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata or {})


class Codec(NamedTuple):
    """How a format stores a state."""

    encode: Callable[[QuantizedState], Files]
    decode: Callable[[Mapping[str, bytes | Mapping[str, Tensor]]], QuantizedState]


_codecs: dict[str, Codec] = {}


def register_codec(
    name: str,
    encode: Callable[[QuantizedState], Files],
    decode: Callable[[Mapping[str, bytes | Mapping[str, Tensor]]], QuantizedState],
) -> None:
    """Add a format to `save(model, folder, format=name)` and `load`; one of the same name is replaced.

    The content of a file is bytes; of one whose name ends in ".safetensors" it is its tensors by name. It may also be
    the path of a file to copy, or an iterable of bytes.

    Args:
        name: of the format.
        encode: the files of a state, by name, in the order in which they shall appear. Use `LazyTensor` for what is
            made while it is written. It raises CheckpointError for what the format cannot hold, before the work.
        decode: the state in files, which are read when they are asked for. `apply` checks all of it.

    Raises:
        CheckpointError: the name of the format of this package.

    >>> import json
    >>> def encode(state):
    ...     return {"t.safetensors": state.tensors, "plan.json": json.dumps(state.plan).encode()}
    >>> def decode(files):
    ...     return QuantizedState.from_plan(json.loads(files["plan.json"]), files["t.safetensors"])
    >>> register_codec("plain", encode, decode)
    >>> from tempfile import TemporaryDirectory
    >>> net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4))
    >>> model = prepare(net(), "int8_weight_only")
    >>> with TemporaryDirectory() as folder:
    ...     again = load(net(), save(model, folder, format="plain"), format="plain")
    >>> torch.equal(again(torch.ones(4)), model(torch.ones(4)))
    True
    """
    if name == "fakequant":
        raise CheckpointError('"fakequant" is the format of this package; give yours another name')
    _codecs[name] = Codec(encode, decode)


def codec(name: str) -> Codec:
    """The functions of a format that was registered.

    Raises:
        CheckpointError: it was not.
    """
    if name not in _codecs:
        known = ", ".join(sorted({"fakequant", *_codecs}))
        raise CheckpointError(
            f"unknown format {name!r:.80}, not one of {known}; import what registers it (fakequant.register_codec)"
        )
    return _codecs[name]


def decoded(name: str, folder: Path) -> QuantizedState:
    """The state in the files of a folder, by a format that was registered.

    Raises:
        CheckpointError: it was not, or its `decode` fails on the files.
    """
    decode = codec(name).decode
    try:
        return decode(read_folder(folder))
    except CheckpointError:
        raise
    except Exception as error:  # of code that reads damaged files: any
        raise CheckpointError(
            f"{folder} is no {name}, or it is damaged: its decode raised {type(error).__name__}: {error}"
        ) from error


def write_folder(folder: Path, files: Files, check: Callable[[], object] = lambda: None) -> None:
    """Write the files of a codec whole, the last one last; others in the folder stay.

    One process at a time writes to a folder. The old files go before the first new one comes, so that a process that
    dies leaves all old files, all new ones, or a folder that lacks the last one.

    Args:
        folder: where they lie.
        files: by name; that of a copied file may have a folder.
        check: is called before anything is written, and again when the folder is locked.

    Raises:
        CheckpointError: a name that is no file of the folder, or content that does not fit it.
        OutputError: a file cannot be written, or is a link to one elsewhere; the old ones are unchanged.
    """
    for name, content in files.items():
        is_tensors, is_copy = isinstance(content, Mapping), isinstance(content, Path)
        is_inside = Path(name).name == name or (is_copy and not {"", "..", "."} & {*name.split("/")})
        if not is_inside or (is_tensors is not name.endswith(_TENSORS) and not is_copy):
            raise CheckpointError(
                f"the codec gives a file {name!r:.80} with a {type(content).__name__}; names have no folder, and what "
                f"ends in {_TENSORS} has a mapping of tensors, all others bytes"
            )
    refuse_links(folder, files)
    check()
    with ExitStack() as stack:
        ready: dict[Path, bytes | Path] = {}
        for name, content in files.items():
            if (folder / name).parent != folder:
                writable_folder((folder / name).parent)
            if isinstance(content, bytes):
                ready[folder / name] = content
            else:
                ready[folder / name] = stack.enter_context(temporary_file(folder, _parts(content)))
        stack.enter_context(locked(folder))  # only now: processes that gather tensors make them together
        check()
        write_in_order(ready, without_old=len(ready) > 1)


def _parts(content: Tensors | Path | Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    if isinstance(content, Path):
        return file_parts(content)
    if isinstance(content, TensorFile):
        return file_content(content, content.metadata)
    return file_content(cast("Tensors", content)) if isinstance(content, Mapping) else content


def file_parts(path: Path) -> Iterator[bytes]:
    """The content of a file in parts."""
    with open(path, "rb") as file:
        while part := file.read(_COPIED):
            yield part


class _Folder(Mapping[str, "bytes | Mapping[str, Tensor]"]):
    """The files of a folder by name, read at each access."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> bytes | Mapping[str, Tensor]:
        path = self._folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{self._folder} holds no checkpoint of this format: there is no {name!s:.80} in it")
        try:
            return StoredTensors(path) if name.endswith(_TENSORS) else path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in sorted(self._folder.glob("*")) if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in set(self)


def read_folder(folder: Path) -> Mapping[str, bytes | Mapping[str, Tensor]]:
    """The files of a folder by name, as a codec reads them."""
    return _Folder(folder)
