"""The interface of file formats: which parts a format can hold, how states become files and back, and its programs."""

from __future__ import annotations

import os
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_prepared
from fakequant.delivery.folder import CONFIG, FileNames, Folder, written_in
from fakequant.errors import CheckpointError, ExportError, QParamsError, nearest
from fakequant.files import check_path
from fakequant.model.config import TensorConfig
from fakequant.model.state.applying import apply_from
from fakequant.model.state.snapshots import Files, LazyTensor, Made, QuantizedState, TensorFile, lazy
from fakequant.model.state.weight_codes import QuantizedWeights, WeightCodes
from fakequant.nn.paths import join, module_at
from fakequant.nn.quantized.forms import own_class, quantized_class
from fakequant.nn.quantized.layers import QuantizedLayer, is_linear, is_table
from fakequant.nn.quantizer import quantizers
from fakequant.nn.stored import with_stored
from fakequant.nn.transforms import first_weights, make_transform
from fakequant.nn.wrappers import Operand, Role
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed, module_name

_TURNED = {0: -1, 1: 0, -1: 0, -2: -1}
"""By an axis of a matrix, the same axis of the transposed matrix."""


def is_turned(operand: Operand, shape: Sequence[int]) -> bool:
    """Whether a weight is the matrix [in, out] of a linear layer, which files have as [out, in]."""
    return len(shape) == 2 and operand.channels == 1 and not operand.is_stack


def in_rows(spec: QuantSpec, shape: tuple[int, ...], operand: Operand) -> tuple[QuantSpec, tuple[int, ...]]:
    """The specification and shape of a weight in files, where a matrix [in, out] is transposed."""
    return (TensorConfig(spec).placed(_TURNED).spec, shape[::-1]) if is_turned(operand, shape) else (spec, shape)


def turned(weight: WeightCodes) -> WeightCodes:
    """The codes of the transposed matrix."""
    point = weight.zero_point
    return replace(
        weight,
        codes=weight.codes.mT.contiguous(),
        scale=weight.scale.mT.contiguous(),
        zero_point=None if point is None else point.mT.contiguous(),
        spec=TensorConfig(weight.spec).placed(_TURNED).spec,
        shape=weight.shape[::-1],
    )


@dataclass(frozen=True)
class Part:
    """A layer with one of its weights, or a call of a function: the unit that a format holds or refuses.

    Attributes:
        path: the path of the layer, or of the module whose `forward` calls the function.
        kind: the class of the float layer, or the function.
        module: the module at the path.
        operands: the quantized tensors by name: "input", "weight" and "output" of a layer, operands of the function.
        paths: the paths of the tensors' quantizers.
        places: the axes of a layer's tensors; empty for a function.
        call: the name of the call in the module, such as "sdpa_0"; "" for a layer.
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
        """The name of the part in messages."""
        return join(self.path, self.call) if self.call else module_name(self.path)

    @property
    def weight(self) -> str:
        """The name of the weight in the state dict; "" if there is none."""
        return join(self.path, self.places["weight"].weight) if "weight" in self.places else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight; () without a weight."""
        return tuple(self.module.get_parameter(self.places["weight"].weight).shape) if self.weight else ()

    @property
    def is_table(self) -> bool:
        """Whether the weight is a table whose rows are looked up."""
        return is_table(self.module)

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is a table, or the matrix [out, in] of a linear layer."""
        return self.is_table or is_linear(self.module)

    @property
    def is_turned(self) -> bool:
        """Whether the weight is the matrix [in, out] of a linear layer."""
        return bool(self.weight) and is_turned(self.places["weight"], self.shape)

    @property
    def in_rows(self) -> tuple[QuantSpec, tuple[int, ...]]:
        """The specification and shape of the weight in files: see the function `in_rows`."""
        return in_rows(self.operands["weight"].spec, self.shape, self.places["weight"])

    @property
    def refused(self) -> str:
        """Why files cannot hold this kind of layer, for a message: transformers 5.23 loads no codes of Conv1D."""
        if not self.is_turned:
            return f"this is a {self.kind}"
        others = "GGUF files of GPT-2 (a preset GGUF_...) and export_onnx hold it"
        return f"this is a {self.kind}, whose weight is [in, out], for which transformers loads no codes; {others}"

    @property
    def is_stack(self) -> bool:
        """Whether the weight is a stack of matrices, one for each expert."""
        return bool(self.weight) and self.places["weight"].is_stack


@dataclass(frozen=True)
class LoadedFile:
    """A delivered file, loaded by another program.

    Attributes:
        name: the name of the program, with its version.
        weights: the values of the weights by their name in the model; {} if the program does not show them.
        model: a callable with the arguments and outputs of the model; None if the program does not run it.
        tolerance: how far an output may be from the model's, relative to its largest magnitude.
        notes: sentences that say which comparisons are missing, and why.
        as_it: a context in which the model computes as the program does.
        on_average: whether the tolerance is for the root mean square of the differences, because sums in another order
            change codes.
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
    """The suffix of the file; "" if the format is a folder."""
    writes: ClassVar[bool] = True
    """Whether `deliver` writes the format; else it is only read."""
    packages: ClassVar[tuple[str, ...]] = ()
    """The packages that `engines` imports."""

    @abstractmethod
    def why_not(self, part: Part) -> str | None:
        """Why the format cannot hold a part; None if it can. Reads no values, so that presets can be tried."""

    def refuses(self, model: nn.Module) -> str | None:
        """Why the format can hold no part of a model; None if it may hold some. Called before `why_not`."""
        return None

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        """Reasons why the format cannot hold a part together with the others, by the part's name."""
        return {}

    @abstractmethod
    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        """The files of a state by name, in the order in which they appear; see `fakequant.register_codec`.

        Codes are written unchanged; a `LazyTensor` is made while it is written. A file that is neither bytes nor
        tensors is an iterable of bytes. In a folder, each file `*.safetensors`, a `TensorFile` or another mapping of
        tensors, is written in shards if it is larger than `max_shard_size`. Use `warn_user` for what a user must know.
        """

    def with_others(self, files: Files, tensors: Mapping[str, LazyTensor]) -> Files | None:
        """The files of `encode`, with tensors added that the model does not load; None if the format cannot hold these.

        The tensors are in float, by the names that the model's source has.
        """
        return None

    @abstractmethod
    def recognizes(self, path: Path) -> bool:
        """Whether a file or folder seems to have this format; tensors are not read."""

    def wrote(self, path: Path) -> bool:
        """Whether `deliver` wrote a file or folder, so that the next delivery may replace it."""
        return self.recognizes(path)

    @abstractmethod
    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        """The state in a file or folder.

        Args:
            path: a file or folder that `recognizes` returned True for.
            model: the model, in float or prepared; its names, classes and shapes are read, but no values.

        Raises:
            CheckpointError: the file is damaged, or has unknown contents. Other errors count as damage.
        """

    def build(self, path: Path) -> nn.Module:
        """A float model from the configuration in a file or folder; its weights are meaningless."""
        raise CheckpointError(f"{path} does not say which model it holds; give the model: fakequant.read(path, model)")

    def engines(self, path: Path, model: nn.Module) -> Iterable[LoadedFile]:
        """The file as each program loads it, one after the other; called only if `packages` are installed."""
        return ()


_added: dict[str, DeliveryFormat] = {}


def register_delivery(format: DeliveryFormat) -> None:
    """Add a format for `deliver`, `read` and `verify_delivery`; a format of the same name is replaced.

    Raises:
        CheckpointError: the argument is not an instance of a `DeliveryFormat`, or it has no name.
    """
    if not isinstance(format, DeliveryFormat) or not isinstance(getattr(format, "name", None), str):
        hint = "its instance, with brackets: register_delivery(Own())"
        raise CheckpointError(f"register_delivery takes a DeliveryFormat with a name, not {format!r:.80}; give {hint}")
    _added[format.name] = format


def delivery_formats() -> dict[str, DeliveryFormat]:
    """All formats in the order of their names: from the folder `formats`, and by `register_delivery`."""
    folder = Path(__file__).parent / "formats"
    names = [one.name for one in pkgutil.iter_modules([str(folder)])]
    modules = [import_module(f"{__package__}.formats.{name}") for name in names]
    values = ((module.__name__, value) for module in modules for value in vars(module).values())
    classes = [one for name, one in values if isinstance(one, type) and one.__module__ == name]
    own = {cls.name: cls() for cls in classes if issubclass(cls, DeliveryFormat) and hasattr(cls, "name")}
    return dict(sorted((own | _added).items()))


def delivery_format(name: str) -> DeliveryFormat:
    """The format called `name`; raises CheckpointError if there is none."""
    known = delivery_formats()
    if not isinstance(name, str) or name not in known:
        raise CheckpointError(f"unknown format {name!r:.80}{nearest(str(name), list(known))}")
    return known[name]


def format_of(path: Path) -> DeliveryFormat:
    """The format that recognizes a file or folder; raises CheckpointError if no format does."""
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
                f"{path} is quantized by {str(method or said)!r:.60}, but the formats that are read are "
                f"{', '.join(known)}; load it dequantized by the program that wrote it, and quantize that model anew"
            )
        raise CheckpointError(
            f"{path} is a model in float: its {CONFIG} says nothing of quantization; load it by from_pretrained of "
            "transformers, then call fakequant.prepare"
        )
    if written_in(path) is not None:
        raise CheckpointError(f"{path} holds a part of a delivery, which ended before it was whole; deliver again")
    raise CheckpointError(f"{path} has none of the formats {', '.join(known)}, or lacks the file that names its format")


class WeightSlot(NamedTuple):
    """A weight of a layer that can be quantized.

    Attributes:
        classes: the names of the layer's class and its bases; ("Linear",) for a stack of experts.
        attribute: the name of the weight's quantizer.
        input: the name of the quantizer of the input that the weight multiplies; "" without a quantizer.
        operand: the axes of the weight.
    """

    path: str
    kind: str
    classes: tuple[str, ...]
    attribute: str
    input: str
    operand: Operand


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """The weights of a model that can be quantized, by their names in the state dict."""
    found: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        form = type(module) if isinstance(module, QuantizedLayer) else quantized_class(module)
        if form is None:
            continue
        own = getattr(module, "float_class", None) or own_class(module)
        operands = form.operands(module)
        bases = tuple(cls.__name__ for cls in own.__mro__)
        for name, source in paired(operands).items():
            classes = ("Linear",) if operands[name].is_stack else bases
            slot = WeightSlot(path, own.__name__, classes, name, source, operands[name])
            found[join(path, operands[name].weight)] = slot
    return found


def paired(operands: Mapping[str, Operand]) -> dict[str, str]:
    """The input's quantizer for each weight's quantizer; "" if the numbers of weights and inputs differ."""
    weights, inputs = (
        [name for name, one in operands.items() if one.role is role] for role in (Role.WEIGHT, Role.INPUT)
    )
    return dict(zip(weights, inputs if len(inputs) == len(weights) else [""] * len(weights), strict=True))


def float_names(model: nn.Module) -> list[str]:
    """The names in a model's state dict without the names of quantizers' tensors: the names of the float model."""
    return without_quantizers(with_stored(model, model.state_dict()), quantizers(model))


def dtype_of(state: QuantizedState, model: nn.Module) -> torch.dtype:
    """The dtype that the first parameter of a model has in a state."""
    name, parameter = next(iter(model.named_parameters()))
    return lazy(state.tensors, name).dtype if name in state.tensors else parameter.dtype


def without_quantizers(names: Iterable[str], quantizers: Iterable[str]) -> list[str]:
    """The names of tensors that belong to none of the quantizers at these paths."""
    own = tuple(f"{path}." for path in quantizers)
    return [name for name in names if not name.startswith(own)]


class Stored(NamedTuple):
    """A tensor of a file: which part of a weight it stores, its shape and dtype, and functions that convert the part.

    The part, `field`, is "codes", "scale" or "zero_point" of `WeightCodes`, or "values" for a weight stored as
    floats. A quantized scale has two parts: "scale_codes", and "shared", the scale that multiplies these codes.
    """

    field: str
    shape: Sequence[int]
    dtype: torch.dtype
    store: Callable[[Tensor], Tensor] = lambda x: x
    load: Callable[[Tensor], Tensor] = lambda x: x


def written_in_float(parts: Sequence[Part], shared: Mapping[str, str]) -> list[Part]:
    """The parts whose weights files store as floats with the values of the codes: tables, and tied weights."""
    tied = {*shared, *shared.values()}
    return [part for part in parts if part.weight and (part.is_table or part.weight in tied)]


def undivided(model: nn.Module, parts: Sequence[Part]) -> dict[str, str]:
    """Reasons why files cannot hold a stack in pieces: a piece is a stack, or cuts a group of a scale; by part."""
    names, reasons = FileNames(model), dict[str, str]()
    for part in (one for one in parts if one.is_stack and "weight" in one.operands):
        grid = part.operands["weight"].spec.granularity
        high, wide = grid.block_shape(part.shape)[-2:]
        try:
            scales = names.split(part.weight, torch.empty(grid.group_shape(part.shape), device="meta"))
        except ValueError:  # of transformers, which cannot divide them
            scales = {}
        for key, piece in names.split(part.weight, torch.empty(part.shape, device="meta")).items():
            if piece.dim() > 2:
                reasons[part.name] = (
                    "files have experts one by one, and transformers does not divide the tensor of this model's "
                    "experts; leave it in float by Rule(pattern)"
                )
                continue
            expected = (-(-piece.shape[-2] // high), -(-piece.shape[-1] // wide))
            is_cut = piece.shape[-2] < part.shape[-2] and piece.shape[-2] % high
            if is_cut or key not in scales or tuple(scales[key].shape[-2:]) != expected:
                why = f"files store {key} alone, with {piece.shape[-2]} rows, but a scale is for {high} rows"
                reasons.setdefault(part.name, why)
    return reasons


class LayeredWriter:
    """Makes the tensors of files from a state, by their names in files; stacked experts become a tensor each.

    Args:
        stored: a function of a layer, and of a weight's shape [out, in] and dtype, that returns the tensors of the
            weight by the ends of their names.
        with_tables: whether tables and tied weights are codes, too; a tied weight is stored once, under its first name.

    Attributes:
        in_float: weights that are written as floats with the values of their codes: tables, which programs read as
            floats, and tied weights.
        pieces: for each weight with codes, its names in files.
        merged: as of `FileNames`.
        unmerged: those of them of which no weight has codes.
        divided: the weights in float that files hold in pieces, as stacks of experts.
        under: for each weight that `merge_scales` merged, by name, the second-level scale that the merged weights
            share.
        ignored: layers in float, by their names in files, and by their names in the model if those differ, because
            transformers looks for modules of the model.
    """

    def __init__(
        self,
        state: QuantizedState,
        model: nn.Module,
        parts: Sequence[Part],
        stored: Callable[[Part, Sequence[int], torch.dtype], Mapping[str, Stored]],
        *,
        with_tables: bool = False,
    ) -> None:
        self.state, self._names = state, FileNames(model)
        self.in_float = [] if with_tables else [part.weight for part in written_in_float(parts, state.shared)]
        left = {"", *self.in_float, *state.shared}
        self.coded = {part.weight: part for part in parts if part.weight not in left}
        self.merged = self._names.merged
        self.unmerged = [one for one in self.merged if not any(re.search(f"{one}$", name) for name in self.coded)]
        self.tensors, ignored = TensorFile({}, {"format": "pt"}), dict[str, None]()
        self.pieces: dict[str, list[str]] = {}
        self.divided: list[str] = []
        self.under: dict[str, Tensor] = {}
        self._made: tuple[str, dict[str, dict[str, Tensor]]] = "", {}
        stacks = {name for name, slot in weight_slots(model).items() if slot.operand.is_stack}
        quantizers = (path for path, _, _ in state.quantizers())
        for name in without_quantizers([*state.tensors, *state.shared], quantizers):
            tensor = lazy(state.tensors, state.shared.get(name, name))
            pieces = self._names.split(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            self.divided += [name] if len(pieces) > 1 and name not in self.coded else []
            for key, piece in pieces.items():
                base, is_whole = key.removesuffix(".weight"), piece.shape == tensor.shape
                if (part := self.coded.get(name)) is not None:
                    self.pieces.setdefault(name, []).append(base)
                    for end, one in stored(part, piece.shape, piece.dtype).items():
                        self.tensors[f"{base}.{end}"] = self._piece(name, key, one)
                    continue
                path, own = key.rpartition(".")[0], name.rpartition(".")[0]
                is_matrix = base != key and piece.dim() == 2 and not is_table(module_at(model, own))
                if is_matrix or name in stacks:
                    ignored |= dict.fromkeys([path, own] if is_whole else [path])
                if name not in state.shared:
                    plain = Stored("values", piece.shape, piece.dtype)
                    is_plain = is_whole and name not in self.in_float
                    self.tensors[key] = tensor if is_plain else self._piece(name, key, plain)
        self.ignored = [*ignored]

    def _piece(self, name: str, key: str, one: Stored) -> LazyTensor:
        return LazyTensor(tuple(one.shape), one.dtype, lambda: one.store(self.field(name, one.field)[key]))

    def field(self, name: str, field: str) -> dict[str, Tensor]:
        """A field of a weight, or the values of a tensor, cut into the pieces that files hold.

        A stack is computed whole and then split; the pieces of the last weight are cached.
        """
        if self._made[0] != name:
            self._made = name, {}
        fields = self._made[1]
        if field in fields:
            return fields[field]
        state = self.state
        if field == "values":
            found = state.weights[name].values() if name in self.in_float else state.tensors[name]
        elif field == "codes":
            found = state.weights[name].codes
        else:
            part = self.coded[name]
            spec = part.operands["weight"].spec
            groups = spec.granularity.group_shape(part.shape)
            if field == "zero_point" and spec.symmetric:
                found = torch.zeros(groups, dtype=torch.int32, device="cpu")
            else:
                found = self._params(name, "zero_point" if field == "zero_point" else "scale")
            if field in ("scale_codes", "shared"):
                codes, shared = spec.scale.split(found, self.under.get(name))
                assert shared is not None
                found = codes if field == "scale_codes" else shared.expand(*groups[:-1], 1)
        fields[field] = self._names.split(name, found)
        return fields[field]

    def _params(self, name: str, one: str) -> Tensor:
        """The scales or zero points [groups per axis] of a coded weight."""
        part, weights = self.coded[name], self.state.weights
        found = self.state.tensors.get(f"{part.paths['weight']}.{one}")
        if found is None:  # of a weight that no call has shown
            found = getattr(weights.params(name) if isinstance(weights, QuantizedWeights) else weights[name], one)
        return found.reshape(part.operands["weight"].spec.granularity.group_shape(part.shape))

    def merge_scales(self, names: Sequence[str]) -> None:
        """Store the scales of several weights, unchanged, as codes of the largest of their second-level scales.

        Raises ExportError if a scale is not a code times the largest second-level scale.
        """
        spec, scales = self.coded[names[0]].operands["weight"].spec, [self._params(name, "scale") for name in names]
        if not spec.scale.is_under_a_tensor:
            return
        largest = torch.stack([x for x in map(spec.scale.shared_by, scales) if x is not None]).amax(0)
        try:
            for scale in scales:
                spec.scale.split(scale, largest)
        except QParamsError as error:
            raise ExportError(
                f"servers merge {listed(names)} into a matrix with a single second-level scale, but these weights have "
                "several: call fakequant.calibrate(model) before deliver, and before improve"
            ) from error
        self.under |= dict.fromkeys(names, largest)


_CALL = "read('folder', model)"


def read(path: str | os.PathLike[str], model: nn.Module | None = None, *, dequantize: bool = False) -> nn.Module:
    """Read a file or folder into a prepared model, which can be analyzed, improved and trained further.

    Args:
        path: a file or folder of a format of `fakequant.delivery.delivery_formats()`.
        model: a fresh float model of the architecture; it is changed in place and returned. Default: a transformers
            model in eval mode, made from the file's configuration.
        dequantize: return a float model with the dequantized weights, which can be quantized in another way. Its
            activations are float. Transforms of inputs, such as GPTQ's permutation, are folded into the weights.

    Raises:
        CheckpointError: the file does not exist, is damaged, or has an unknown format; or the model has another
            architecture.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "fp8", skip=[])
    >>> used = calibrate(model, [torch.ones(1, 64)])
    >>> with TemporaryDirectory() as folder:
    ...     again = read(deliver(model, folder, "compressed-tensors"), nn.Sequential(nn.Linear(64, 64)))
    >>> print(again[0].weight_quantizer.spec)
    float8_e4m3fn per_channel(0)
    """
    check_path(path, _CALL, CheckpointError)
    if model is not None:
        check_model(model, "read", _CALL, CheckpointError)
        refuse_prepared(model, "read")
    source = Path(path)
    format = format_of(source)
    with _damage(format, source):
        built = format.build(source) if model is None else model

    def state(_: bool) -> tuple[QuantizedState, str]:
        found = decoded(format, source, built)
        return _dequantized(built, found) if dequantize else found, ""

    return apply_from(built, state)


@torch.no_grad()
def _dequantized(model: nn.Module, state: QuantizedState) -> QuantizedState:
    """The state of a float model with the dequantized values of a quantized state."""
    found = {name: state.tensors[name] for name in float_names(model) if name in state.tensors}
    slots = weight_slots(model)
    for name in state.weights:
        slot, held = slots[name], state.weights[name]
        held.check()
        found[name], entry = held.values(), state.layers[slot.path].transform
        layer = module_at(model, slot.path)
        if entry is not None and name.rpartition(".")[2] in first_weights(layer):
            transform = make_transform(entry.kind, layer, **entry.options)
            prefix = f"{join(slot.path, '_input_transform')}."
            own = {key.removeprefix(prefix): state.tensors[key] for key in state.tensors if key.startswith(prefix)}
            transform.load_state_dict(own)
            found[name] = transform.out_of_weight(layer, found[name])
    return QuantizedState(tensors=found, shared=state.shared, versions=state.versions)


def decoded(format: DeliveryFormat, path: Path, model: nn.Module) -> QuantizedState:
    """The state in a file or folder, whose tensors are read at each access; raises CheckpointError if it is damaged."""
    with _damage(format, path):
        state = format.decode(path, model)
    tensors, weights = (
        Made({name: _damage(format, path)(partial(held.__getitem__, name)) for name in held})
        for held in (state.tensors, state.weights)
    )
    return replace(state, tensors=tensors, weights=weights)


@contextmanager
def _damage(format: DeliveryFormat, path: Path) -> Iterator[None]:
    """A context that adds the name of the file to an error of the reader."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # of code that reads damaged files: any
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is not in the format {format.name}, or it is damaged: {what}") from error
