"""What a format of files says of itself: what it can hold, how states become files and back, programs that load it."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from fakequant.delivery.folder import CONFIG, Folder, written_in
from fakequant.errors import CheckpointError, nearest
from fakequant.model.state.codecs import Files
from fakequant.model.state.snapshots import LazyTensor, QuantizedState
from fakequant.model.tensor_config import TensorConfig
from fakequant.nn.operands import Operand
from fakequant.nn.paths import join
from fakequant.text import listed, module_name


@dataclass(frozen=True)
class Part:
    """A layer with one of its weights, or a call of a function, as a format is asked for it.

    Attributes:
        path: of the layer, or of the module whose `forward` calls the function.
        kind: the class of the float layer, or the function.
        module: at the path.
        operands: what is quantized, by name: "input", "weight" and "output" of a layer, those of the function.
        paths: those of their quantizers.
        places: of a layer, where these tensors have their axes.
        call: which of the functions that the module calls, as "sdpa_0"; "" of a layer.
    """

    path: str
    kind: str
    module: nn.Module
    operands: Mapping[str, TensorConfig]
    paths: Mapping[str, str]
    places: Mapping[str, Operand] = field(default_factory=dict)
    call: str = ""

    @property
    def name(self) -> str:
        """The name of the product in messages."""
        return join(self.path, self.call) if self.call else module_name(self.path)

    @property
    def weight(self) -> str:
        """The name of the weight in the state dict; "" where there is none."""
        return join(self.path, self.places["weight"].weight) if "weight" in self.places else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return tuple(self.module.get_parameter(self.places["weight"].weight).shape) if self.weight else ()

    @property
    def is_stack(self) -> bool:
        """Whether the weight is a stack of matrices, one for each expert."""
        return bool(self.weight) and self.places["weight"].is_stack


@dataclass(frozen=True)
class Engine:
    """A delivered file as another program has it.

    Attributes:
        name: of the program, with its version.
        weights: the values of the weights by their name in the model; {} where the program does not show them.
        model: what is called as the model is, and gives its outputs; None where nothing runs.
        tolerance: how far an output may be from the model's, relative to its largest magnitude.
        notes: what was not compared, and why, one sentence each.
        as_it: a context in which the model computes as the program does.
        on_average: whether the tolerance is that of the root mean square, where sums in another order change codes.
    """

    name: str
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    model: Any = None
    tolerance: float = 0.0
    notes: Sequence[str] = ()
    as_it: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    on_average: bool = False


class DeliveryFormat(ABC):
    """A format of files that other programs load. A subclass is one file in `delivery/formats`, or is registered."""

    name: ClassVar[str]
    suffix: ClassVar[str] = ""
    """The suffix of its file; "" where it is a folder."""
    writes: ClassVar[bool] = True
    """Whether it is written, or only read."""
    packages: ClassVar[tuple[str, ...]] = ()
    """What `engines` imports."""

    @abstractmethod
    def why_not(self, part: Part) -> str | None:
        """Why the format cannot hold a part; None if it can. Presets are tried by it, too, so it reads no values."""

    def refuses(self, model: nn.Module) -> str | None:
        """Why the format holds no part of a model, however it is quantized; None if it may. It is asked first."""
        return None

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        """Why a format cannot hold parts together, each of which it could hold alone, by their names."""
        return {}

    @abstractmethod
    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        """The files of a state by name, in the order in which they shall appear; see `fakequant.register_codec`.

        Codes are written as they are; use `LazyTensor` for what is made while it is written. A file that is neither
        bytes nor tensors is an iterable of bytes. In a folder, each file `*.safetensors`, of a `TensorFile` or another
        mapping of tensors, is written in shards where it is larger than `max_shard_size`. Say what one should know
        about the file by `warn_user`.
        """

    def with_others(self, files: Files, tensors: Mapping[str, LazyTensor]) -> Files | None:
        """The files with tensors that the model does not load; None where they cannot hold any.

        Args:
            files: of `encode`.
            tensors: in float, by the names that the model's source has.
        """
        return None

    @abstractmethod
    def recognizes(self, path: Path) -> bool:
        """Whether a file or folder looks like one of this format; nothing is read whole."""

    def wrote(self, path: Path) -> bool:
        """Whether `deliver` wrote a file or folder, so that the next delivery may replace it."""
        return self.recognizes(path)

    @abstractmethod
    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        """The state in a file or folder.

        Args:
            path: what `recognizes` said yes to.
            model: the model, in float or prepared: its names, classes and shapes are asked, no values.

        Raises:
            CheckpointError: damage, or what this reader does not know. Any other error is taken for damage.
        """

    def build(self, path: Path) -> nn.Module:
        """A float model for a file or folder, with values of no meaning."""
        raise CheckpointError(f"{path} does not say which model it is of; give one: fakequant.read(path, model)")

    def engines(self, path: Path, model: nn.Module) -> Iterable[Engine]:
        """The programs that load the file, one after the other; `packages` are there."""
        return ()


_added: dict[str, DeliveryFormat] = {}


def register_delivery(format: DeliveryFormat) -> None:
    """Add a format for `deliver`, `read` and `verify_delivery`; one of the same name is replaced.

    Raises:
        CheckpointError: no instance of a `DeliveryFormat`, or one without a name.
    """
    if not isinstance(format, DeliveryFormat) or not isinstance(getattr(format, "name", None), str):
        hint = "its instance, with brackets: register_delivery(Own())"
        raise CheckpointError(f"register_delivery takes a DeliveryFormat with a name, not {format!r:.80}; give {hint}")
    _added[format.name] = format


def delivery_formats() -> dict[str, DeliveryFormat]:
    """All formats by name: those in the folder `formats`, and those that were registered."""
    folder = Path(__file__).parent / "formats"
    names = [one.name for one in pkgutil.iter_modules([str(folder)])]
    modules = [import_module(f"{__package__}.formats.{name}") for name in names]
    return {name: made for module in modules for name, made in _formats_in(module)} | _added


def _formats_in(module: Any) -> Iterator[tuple[str, DeliveryFormat]]:
    for value in vars(module).values():
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and issubclass(value, DeliveryFormat) and hasattr(value, "name"):
            yield value.name, value()


def delivery_format(name: str) -> DeliveryFormat:
    """The format of a name.

    Raises:
        CheckpointError: there is none.
    """
    known = delivery_formats()
    if name not in known:
        raise CheckpointError(f"unknown format {name!r:.80}{nearest(str(name), list(known))}")
    return known[name]


def format_of(path: Path) -> DeliveryFormat:
    """The format that recognizes a file or folder.

    Raises:
        CheckpointError: there is nothing, or no format does.
    """
    try:
        is_there = path.exists()
    except OSError as error:
        raise CheckpointError(f"{str(path)!r:.80} cannot be read: {error.strerror or error}") from error
    if not is_there:
        raise CheckpointError(f"there is no {path}; give the file or folder that fakequant.deliver wrote")
    known = delivery_formats()
    for one in known.values():
        if one.recognizes(path):
            return one
    inside = sorted(path.glob("*")) if path.is_dir() else []
    if files := [str(file) for file in inside if any(one.suffix and one.recognizes(file) for one in known.values())]:
        raise CheckpointError(f"{path} is a folder; give the file in it: {listed(files)}")
    if (path / CONFIG).is_file():
        said = Folder(path).quantization
        method = said.get("quant_method") if isinstance(said, dict) else None
        if said:
            raise CheckpointError(
                f"{path} is quantized by {str(method or said)!r:.60}, and the formats that are read are "
                f"{', '.join(known)}; load it dequantized by the program that wrote it, and quantize that model anew"
            )
        raise CheckpointError(
            f"{path} is a model in float: its {CONFIG} says nothing of quantization; load it by from_pretrained of "
            "transformers, then call fakequant.prepare"
        )
    if written_in(path) is not None:
        raise CheckpointError(f"{path} holds a part of a delivery, which ended before it was whole; deliver again")
    raise CheckpointError(f"{path} is of none of the formats {', '.join(known)}; or it lacks the file that says so")
