"""A quantized model as data: its plan, its tensors, and its weights as codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.data.batches import length, track
from fakequant.distributed import gathered, is_sharded
from fakequant.errors import CheckpointError
from fakequant.files import locked, refuse_links, temporary_file, writable_folder, write_in_order
from fakequant.memory import fetched, offloaded
from fakequant.model.state.plan import Plan, layer_entry, plain_of, read_plan, sites_entry
from fakequant.model.state.weight_codes import QuantizedWeights, WeightCodes
from fakequant.model.summary import warn_of_new_layers, warn_unregistered
from fakequant.model.weights import give_values, quantized_weights, warn_stale_scales
from fakequant.nn.products import Product
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import KEY, quantizers
from fakequant.nn.stored import StoredWeight, with_stored
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats.floats import as_integers, integers_of

T = TypeVar("T")
Region = tuple[slice, ...]
"""A part of a tensor: a slice for each axis."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made only when it is written to a file or put into a model.

    Attributes:
        shape: the shape of the tensor.
        dtype: the dtype of the tensor.
        make: returns the tensor.
        make_part: called with a slice for each axis, it returns this part; None if only the whole tensor can be made.

    >>> LazyTensor((2,), torch.float32, lambda: torch.ones(2)).part((slice(0, 1),))
    tensor([1.])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    make_part: Callable[[Region], Tensor] | None = None

    @classmethod
    def of(cls, tensor: Tensor, make: Callable[[], Tensor] | None = None) -> LazyTensor:
        """A lazy tensor with the shape and dtype of a tensor; its values come from `make`, or else from the tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, make or (lambda: tensor))

    def part(self, region: Region) -> Tensor:
        """The part of the tensor in `region`, a slice for each axis."""
        return self.make()[region] if self.make_part is None else self.make_part(region)

    def __repr__(self) -> str:
        return f"LazyTensor({list(self.shape)}, {self.dtype})"


class Made(Mapping[str, T]):
    """A mapping whose values are made anew at each access, by functions."""

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> T:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers


class LazyTensors(Made[Tensor]):
    """A mapping from names to tensors; lazy tensors are made anew at each access."""

    def __init__(self, tensors: Mapping[str, Tensor | LazyTensor]) -> None:
        self.lazy = {name: LazyTensor.of(one) if isinstance(one, Tensor) else one for name, one in tensors.items()}
        super().__init__({name: one.make for name, one in self.lazy.items()})


def lazy(tensors: Mapping[str, Tensor], name: str) -> LazyTensor:
    """A tensor of a mapping as a `LazyTensor`, whose values are read when they are needed."""
    if isinstance(tensors, LazyTensors):
        return tensors.lazy[name]
    return LazyTensor.of(tensors[name], None if isinstance(tensors, dict) else partial(tensors.__getitem__, name))


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedState(Plan):
    """A quantized model as data, from `snapshot` or a file; `fakequant.apply` puts it into a float model.

    A quantized weight has its values in `tensors`, its codes in `weights`, or both. If it is only in `weights`, its
    values are those of the codes, and the quantizers that read it have the scales of the codes. A snapshot has it in
    both, a file in one of the two.

    Attributes:
        tensors: for each name in the state dict, the parameter or buffer, without further names of tied tensors.
        weights: for the name of each quantized parameter, its codes. In a snapshot of a model the codes are computed
            anew at each access: use them before you read the next weight, and before the model changes.
        layers: for the path of each layer, its quantizers.
        sites: the quantizers of functions that a `forward` calls.
        shared: for each further name of a tied tensor, its name in `tensors` or `weights`.
        versions: for the path of each module whose `_version` is not 1, its version; None if versions are not known.
        stale: the paths of quantizers of weights whose scales were made for other weights.

    >>> state = snapshot(prepare(nn.Sequential(nn.Linear(4, 2)), "int4_weight_only"))
    >>> list(state.layers), list(state.tensors)
    (['0'], ['0.weight', '0.bias'])
    >>> weight = state.weights["0.weight"]
    >>> weight.codes.shape, weight.scale.shape, str(weight.spec.format)
    (torch.Size([2, 4]), torch.Size([2, 1]), 'int4')
    """

    tensors: Mapping[str, Tensor]
    weights: Mapping[str, WeightCodes] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"QuantizedState({len(self.weights)} weights as codes, {len(self.tensors)} tensors)"

    @property
    def plan(self) -> dict[str, Any]:
        """All data except the tensors, as values of JSON that `from_plan` reads."""
        return plain_of(self.fields())

    @property
    def in_float(self) -> Mapping[str, str]:
        """For the name of each quantized weight that has no codes: the reason."""
        return self.weights.in_float if isinstance(self.weights, QuantizedWeights) else {}

    @property
    def others(self) -> list[str]:
        """The names in `tensors` except the weights in `weights`, and their scales, zero points and codes."""
        own = set(self.weights)
        for name in self.weights:  # not `values()`: two weights would be alive at once
            own |= {f"{path}.{key}" for path in self.weights[name].quantizers for key in ("scale", "zero_point", KEY)}
        return [name for name in self.tensors if name not in own]

    @classmethod
    def from_plan(
        cls,
        plan: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        weights: Mapping[str, WeightCodes] | None = None,
        source: str = "the plan",
    ) -> QuantizedState:
        """A state with a plan that was read from a file, with tensors and with weights as codes.

        Args:
            plan: the plan in the form of the property `plan`; keys may be omitted.
            source: the name of the plan's file, for messages.

        Raises:
            CheckpointError: a value of the plan has an unexpected type or range.

        >>> layer = {"type": "Linear", "quantizers": {"_weight_quantizer": {"tensor": "int8 per_channel(0)"}}}
        >>> state = QuantizedState.from_plan({"layers": {"0": layer}}, {"0.weight": torch.eye(2)})
        >>> apply(nn.Sequential(nn.Linear(2, 2, bias=False)), state)(torch.ones(2))
        tensor([1., 1.], grad_fn=<...>)
        """
        return cls.of(read_plan(plan, Plan, source), tensors, weights)

    @classmethod
    def of(
        cls, plan: Plan, tensors: Mapping[str, Tensor], weights: Mapping[str, WeightCodes] | None = None
    ) -> QuantizedState:
        """A state made of a plan, its tensors, and weights as codes."""
        return cls(**plan.fields(), tensors=tensors, weights=weights or {})


@accepts_wrapped_model
def snapshot(model: nn.Module) -> QuantizedState:
    """A prepared model as data: its plan, its tensors, and its weights as codes. Nothing is copied.

    Codes are made when they are read, also for weights that hooks of Accelerate hold outside of the model, so that a
    model larger than memory can be written weight by weight. A tensor that is sharded over processes is gathered when
    it is read: all processes must read the same tensors, in the same order.

    Raises:
        CheckpointError: the model is not prepared.
        ConfigError: batch normalisations are folded for training.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), "int8_weight_only")
    >>> again = apply(nn.Sequential(nn.Linear(4, 4)), snapshot(model))
    >>> torch.equal(again(torch.ones(4)), model(torch.ones(4)))
    True
    """
    check_model(model, "snapshot", "snapshot(model)", CheckpointError)
    warn_unregistered(model)
    warn_of_new_layers(model)
    refuse_unprepared(model, CheckpointError, ", or save a float model with torch.save")
    give_values(model)
    shared, weights = shared_names(model), quantized_weights(model)
    return QuantizedState(
        shared=shared,
        versions=versions_of(model),
        layers={name: layer_entry(one) for name, one in model.named_modules() if isinstance(one, QuantizedLayer)},
        sites=sites_entry(model),
        stale=warn_stale_scales(model),
        tensors=LiveTensors(model, shared, weights),
        weights=QuantizedWeights(model, shared, weights),
    )


class LiveTensors(LazyTensors):
    """The state dict of a model, where a tied tensor has one name; offloaded and sharded tensors are fetched at access.

    Args:
        shared: for each further name of a tied tensor, its first name.
        weights: for the path of each weight's quantizer, the quantized weight.
    """

    def __init__(self, model: nn.Module, shared: Mapping[str, str], weights: Mapping[str, Product]) -> None:
        modules = dict(model.named_modules())
        # Fixed codes whose weight has other values by now; sharded weights are gathered, one by one.
        outdated: set[str] = set()
        for path, quantizer in quantizers(model).items():
            if quantizer.fixed_codes is not None and not quantizer.fixed_codes.is_meta:
                is_held = path in weights and quantizer.holds(gathered(weights[path].tensor))
                outdated |= set() if is_held else {f"{path}.{KEY}"}
        elsewhere = {name: name.rpartition(".") for name in offloaded(model)}

        def fetching(name: str, tensor: Tensor | LazyTensor) -> Tensor | LazyTensor:
            if isinstance(tensor, LazyTensor):
                return tensor
            if type(tensor) is StoredWeight:
                make = tensor.values
            elif name in elsewhere:
                path, _, own = elsewhere[name]
                make = partial(fetched, modules[path], own, tensor)
            elif is_sharded(tensor):
                make = partial(gathered, tensor)
            else:
                return tensor
            return LazyTensor.of(tensor, make)

        def codes(weight: Any) -> LazyTensor:
            kind = integers_of(weight.spec.format)
            return LazyTensor(tuple(weight.shape), kind, lambda: as_integers(weight.codes()))

        # The fixed codes that quantizers would have if no weight was stored as codes.
        stored = {path: weight.tensor for path, weight in weights.items() if type(weight.parameter) is StoredWeight}
        state = with_stored(model, model.state_dict()) | {f"{path}.{KEY}": codes(x) for path, x in stored.items()}
        left = (name for name in state if name not in shared and name not in outdated)
        super().__init__({name: fetching(name, state[name]) for name in left})


def versions_of(model: nn.Module) -> dict[str, int]:
    """For the path of each module whose state has another version than torch's default of 1: this version."""
    found = {name: module._version for name, module in model.named_modules(remove_duplicate=False)}
    return {name: version for name, version in found.items() if isinstance(version, int) and version != 1}


def shared_names(model: nn.Module) -> dict[str, str]:
    """For each further name of a tied tensor, its first name."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in with_stored(model, model.state_dict()).items():
        # By the parameter where its memory may be elsewhere, or shared out.
        if is_sharded(tensor) or tensor.is_meta or type(tensor) is StoredWeight:
            key: tuple[Any, ...] = (id(parameters.get(name, tensor)),)
        else:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            shared[name] = first[key]
        first.setdefault(key, name)
    return shared


_MAPPED = 1 << 26
"""How many bytes are read before the file is mapped into memory anew."""


def require_safetensors() -> Any:
    """The package safetensors, or an error that says how to get it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        message = "checkpoints need safetensors, not installed here; run pip install 'fakequant[checkpoint]'"
        raise CheckpointError(message) from error
    return safetensors


def size_of(tensor: Tensor | LazyTensor) -> int:
    """The number of bytes that a tensor takes in a file."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def file_content(
    tensors: Mapping[str, Tensor | LazyTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file of tensors, in parts; a lazy tensor is made when its part is read.

    Args:
        metadata: texts for the header of the file.

    Raises:
        CheckpointError: a lazy tensor states another shape or dtype than the tensor that it makes.

    >>> data = b"".join(file_content({"x": LazyTensor((2,), torch.uint8, lambda: torch.ones(2, dtype=torch.uint8))}))
    >>> len(data), data[-2:]
    (66, b'\\x01\\x01')
    """
    for name in tensors:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"a file cannot hold the name {name!r:.200}: {error.reason}; rename the module"
            ) from error
    # The names of dtypes and the order of tensors, which lies by dtype, are those of the same tensors without values.
    empty = {name: torch.empty(0, dtype=one.dtype, device="cpu") for name, one in tensors.items()}
    outline = require_safetensors().torch.save(empty, None if metadata is None else dict(metadata))
    header: dict[str, Any] = json.loads(outline[8 : 8 + int.from_bytes(outline[:8], "little")])
    if metadata:  # in the given order: the package's is another one each time
        header["__metadata__"] = dict(metadata)
    start = 0
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        entry, end = header[name], start + size_of(tensors[name])
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes_of(name, tensors[name])


def _bytes_of(name: str, stated: Tensor | LazyTensor) -> memoryview:
    # A function, so that no name holds the tensor while the next one is made.
    tensor = stated.make() if isinstance(stated, LazyTensor) else stated
    if tensor.shape != tuple(stated.shape) or tensor.dtype is not stated.dtype:
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype} and shape {list(tensor.shape)}, but its LazyTensor states "
            f"{stated.dtype} and shape {list(stated.shape)}"
        )
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return (torch.view_as_real(whole) if whole.is_complex() else whole).view(torch.uint8).numpy().data


class StoredTensors(LazyTensors):
    """The tensors of a safetensors file, read at each access, and the texts of its header.

    Raises:
        CheckpointError: the file is damaged, or has a dtype that torch does not have; an access may raise it, too.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._mapped = path, 0
        with self._errors():
            self._stamp, self._file = _stamp(path), _open(path)
            self.metadata: dict[str, str] = self._file.metadata() or {}
            names = list(self._file.keys())
            views = {name: self._file.get_tensor(name) for name in names}  # of the mapped file: nothing is read
        super().__init__(
            {
                name: LazyTensor(tuple(view.shape), view.dtype, partial(self._read, name), partial(self._read, name))
                for name, view in views.items()
            }
        )

    def _read(self, name: str, region: Region | None = None) -> Tensor:
        with self._errors():
            if self._mapped > _MAPPED:
                # Let go of the pages that were read: they count as memory of the process while the file is mapped.
                # Another process may have replaced or removed the file: then keep the one that is open.
                with suppress(OSError):
                    if _stamp(self._path) == self._stamp:
                        file = _open(self._path)
                        if _stamp(self._path) == self._stamp:
                            self._file, self._mapped = file, 0
            found = self._file.get_tensor(name)
            if region is not None:
                found = self._file.get_slice(name)[region] if found.numel() and found.dim() else found[region]
        self._mapped += size_of(found)
        return found

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (require_safetensors().SafetensorError, KeyError) as error:  # KeyError: a dtype that torch lacks
            raise CheckpointError(f"{self._path} cannot be read: {error}") from error


def _open(path: Path) -> Any:
    try:
        return require_safetensors().safe_open(path, "pt")
    except RuntimeError as error:  # not of the content: another process may have removed the file
        _stamp(path)
        raise OSError(f"{path} cannot be opened: {error}") from error


def _stamp(path: Path) -> tuple[int, ...]:
    """The device, inode, size and time of change of a file: they differ if another file takes its path."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


Tensors = Mapping[str, Tensor | LazyTensor]
Content = bytes | Tensors | Path | Iterable[bytes | memoryview]
"""The content of a file: bytes, tensors by name, the path of a file to copy, or an iterable of parts."""
Files = Mapping[str, Content]
_TENSORS = ".safetensors"
_COPIED = 1 << 18
"""How many bytes of a file are read at once: each read allocates as many, even for a small file."""


class TensorFile(dict[str, "Tensor | LazyTensor"]):
    """The tensors of a file, with texts for its header.

    >>> TensorFile({"x": torch.ones(2)}, {"made by": "hand"}).metadata
    {'made by': 'hand'}
    """

    def __init__(self, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata or {})


class Codec(NamedTuple):
    """The functions by which a format stores a state."""

    encode: Callable[[QuantizedState], Files]
    decode: Callable[[Mapping[str, bytes | Mapping[str, Tensor]]], QuantizedState]


_codecs: dict[str, Codec] = {}


def register_codec(
    name: str,
    encode: Callable[[QuantizedState], Files],
    decode: Callable[[Mapping[str, bytes | Mapping[str, Tensor]]], QuantizedState],
) -> None:
    """Add a format to `save(model, folder, format=name)` and `load`; a format of the same name is replaced.

    The content of a file is bytes, or a mapping of tensors if the file's name ends in ".safetensors"; also the path of
    a file to copy, or an iterable of bytes.

    Args:
        name: the name of the format.
        encode: returns the names and contents of a state's files, in the order in which they appear. A `LazyTensor` is
            computed while it is written. `encode` raises CheckpointError first if the format cannot hold the state.
        decode: returns the state that the files hold; a file is read when it is accessed. `apply` checks the state.

    Raises:
        CheckpointError: the name is "fakequant", the format of this package.

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
        raise CheckpointError('"fakequant" is the format of this package; register yours under another name')
    _codecs[name] = Codec(encode, decode)


def codec(name: str) -> Codec:
    """The functions of the registered format called `name`.

    Raises:
        CheckpointError: no format has this name.
    """
    if name not in _codecs:
        known = ", ".join(sorted({"fakequant", *_codecs}))
        raise CheckpointError(
            f"unknown format {name!r:.80}, not one of {known}; import the module that registers it "
            "(fakequant.register_codec)"
        )
    return _codecs[name]


def decoded(name: str, folder: Path) -> QuantizedState:
    """The state that the registered format `name` reads from a folder.

    Raises:
        CheckpointError: no format has this name, or its `decode` fails on the files.
    """
    decode = codec(name).decode
    try:
        return decode(read_folder(folder))
    except CheckpointError:
        raise
    except Exception as error:  # of code that reads damaged files: any
        raise CheckpointError(
            f"{folder} is not in the format {name}, or it is damaged: its decode raised {type(error).__name__}: {error}"
        ) from error


def write_folder(
    folder: Path, files: Files, check: Callable[[], object] = lambda: None, *, progress: bool | None = False
) -> None:
    """Write the files of a codec, each whole or not at all, in their order; other files in the folder stay.

    One process at a time writes to a folder. The old files are removed before the first new file appears, so that a
    process that dies leaves all old files, all new files, or a folder without the last file.

    Args:
        files: for the name of each file, its content; the name of a copied file may contain a folder.
        check: a function that is called before anything is written, and again when the folder is locked.
        progress: whether to show a progress bar of the tensors, see `track`.

    Raises:
        CheckpointError: a name is not a file of the folder, or does not fit the content.
        OutputError: a file cannot be written, or is a link to a file elsewhere; the old files are unchanged.
    """
    for name, content in files.items():
        is_tensors, is_copy = isinstance(content, Mapping), isinstance(content, Path)
        is_inside = Path(name).name == name or (is_copy and not {"", "..", "."} & {*name.split("/")})
        if not is_inside or (is_tensors is not name.endswith(_TENSORS) and not is_copy):
            raise CheckpointError(
                f"the codec gives a file {name!r:.80} with a {type(content).__name__}; give a name without a folder, a "
                f"mapping of tensors for a name that ends in {_TENSORS}, and bytes for any other"
            )
    refuse_links(folder, files)
    check()
    counts = [length(one) for one in files.values() if not isinstance(one, (bytes, Path))]
    total = sum(one or 0 for one in counts)
    with ExitStack() as stack:
        ready: dict[Path, bytes | Path] = {}
        told: Any = track(count(), "writing tensors", None if None in counts else total, progress)
        stack.callback(told.close)
        for name, content in files.items():
            if (folder / name).parent != folder:
                writable_folder((folder / name).parent)
            if isinstance(content, bytes):
                ready[folder / name] = content
                continue
            if isinstance(content, Path):
                parts: Any = file_parts(content)
            elif isinstance(content, Mapping):
                metadata = content.metadata if isinstance(content, TensorFile) else None
                parts = _counted(file_content(cast("Tensors", content), metadata), told)
            else:
                parts = _counted(content, told)
            ready[folder / name] = stack.enter_context(temporary_file(folder, parts))
        stack.enter_context(locked(folder))  # only now: processes that gather tensors make them together
        check()
        write_in_order(ready, without_old=len(ready) > 1)


def _counted(parts: Iterable[bytes | memoryview], told: Iterator[int]) -> Iterator[bytes | memoryview]:
    parts = iter(parts)
    yield from islice(parts, 1)  # the header
    for part in parts:
        yield part
        next(told)


def file_parts(path: Path) -> Iterator[bytes]:
    """The content of a file in parts."""
    with open(path, "rb") as file:
        while part := file.read(_COPIED):
            yield part


class _Folder(Mapping[str, "bytes | Mapping[str, Tensor]"]):
    """For the name of each file in a folder, its content, which is read at each access."""

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
    """For the name of each file in a folder, its content, as the `decode` of a format needs it."""
    return _Folder(folder)
