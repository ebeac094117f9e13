"""Readers for folders with separate tensors for each layer, such as the folders of GPTQ, AWQ and ModelOpt."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import CONFIG, FileNames, Folder, build, written_in
from fakequant.delivery.format import DeliveryFormat, Part, WeightSlot, float_names, weight_slots, written_in_float
from fakequant.errors import CheckpointError, ExportError, warn_user
from fakequant.functional import quantize
from fakequant.model.config import TensorConfig
from fakequant.model.state.plan import LayerEntry, QuantizerEntry, SitesEntry, TransformEntry
from fakequant.model.state.snapshots import Files, Made, QuantizedState, shared_names
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.nn.paths import join
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.granularity import PerBlock
from fakequant.numerics.scales import ScaleSpec
from fakequant.numerics.spec import QuantSpec
from fakequant.text import listed

Read = Callable[[], Tensor]
"""A function that reads a tensor whose type and shape are checked."""
FLOATS = {torch.float16: ScaleSpec("float16"), torch.bfloat16: ScaleSpec("bfloat16"), torch.float32: ScaleSpec()}
"""The dtypes that scales have in files."""
_INPUTS = "_input_transform"
OTHERS = "tensors that the model does not load"
"""The key in a file's header of the names of tensors that the model does not load, such as tensors of MTP layers."""


@dataclass(frozen=True)
class Groups:
    """The groups of a weight's inputs: inputs in a group, number of groups, and their granularity."""

    size: int
    count: int
    granularity: PerBlock


@dataclass(frozen=True)
class CodedWeight:
    """A weight [out, in] that a file holds as codes.

    Attributes:
        codes: reads the codes in the storage of the format.
        scale: reads the scales [out, groups].
        zero_point: reads the zero points [out, groups]; None without zero points.
        input: the quantization of the layer's input; None for float.
        output: the quantization of the layer's output; None for float.
        ranges: the tensors of both quantizers by name, such as "input.scale" or "output.zero_point".
        transform: the kind and the buffers of the transform of the input; None without a transform.
    """

    spec: QuantSpec
    codes: Read
    scale: Read
    zero_point: Read | None = None
    input: TensorConfig | None = None
    output: TensorConfig | None = None
    ranges: Mapping[str, Tensor] = field(default_factory=dict)
    transform: tuple[str, dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of a file that belong to one weight.

    Attributes:
        shape: the shape [out, in] of the weight.
        classes: the names of the layer's class and its bases; for experts, of the class of a single expert.
        is_alone: whether the layer can have a separate transform; a weight in a stack of weights cannot.
        experts: the number of experts in the tensor if the file has a whole stack as one tensor; else 0.
        inputs_first: whether a stack in the model has its axis of inputs before its axis of outputs.
        used: the names of the tensors that were read.
    """

    folder: Folder
    tensors: Mapping[str, Tensor]
    base: str
    shape: tuple[int, int]
    path: str
    classes: tuple[str, ...]
    is_alone: bool
    key: str = ""
    experts: int = 0
    inputs_first: bool = False
    used: set[str] = field(default_factory=set)

    def has(self, end: str) -> bool:
        """Whether there is a tensor of this layer whose name has this end."""
        return join(self.base, end) in self.tensors

    def get(self, end: str, dtypes: torch.dtype | Iterable[torch.dtype], *shapes: Sequence[int]) -> Read:
        """A function that reads a tensor as the first of `shapes`; raises CheckpointError if it does not fit."""
        key, allowed = join(self.base, end), (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder.path} lacks {key}; it is damaged, or of another model or version")
        tensor = self.tensors[key]
        if tensor.dtype not in allowed or tuple(tensor.shape) not in {tuple(shape) for shape in shapes}:
            expected = " or ".join(map(str, dict.fromkeys(str([*shape]) for shape in shapes)))
            kinds = " or ".join(map(str, allowed))
            self.refuse(f"{end} is {tensor.dtype} of shape {[*tensor.shape]}, not {kinds} of {expected}")
        self.used.add(key)
        return lambda: self.tensors[key].reshape(tuple(shapes[0]))

    def powers(self, end: str, shape: Sequence[int]) -> Read:
        """A function that reads powers of two, whose exponents a file stores as bytes."""
        flat = [(), (1,)] if set(shape) == {1} else []
        exponents = self.get(end, (torch.uint8, torch.float8_e8m0fnu), shape, *flat)
        if bool((exponents().view(torch.uint8) == 255).any()):
            self.refuse(f"{end} holds codes that stand for no number")
        return lambda: torch.ldexp(
            torch.ones(tuple(shape), device="cpu"), exponents().view(torch.uint8).to(torch.int32) - 127
        )

    def fours(self, end: str, rows: int, columns: int) -> Read:
        """A function that reads 4-bit numbers [rows, columns]; a byte holds two inputs, the first in its low bits."""
        packed = self.get(end, torch.uint8, (rows, -(-columns // 2)))
        return lambda: unpack(packed(), 4, columns).to(torch.uint8)

    def groups(self, size: object) -> Groups:
        """The groups for a size in a configuration, -1 for one group; raises CheckpointError for an invalid size."""
        columns = self.shape[1]
        if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
            self.refuse(f"group_size is {size!r:.40}, not a number of inputs or -1")
        given = columns if size == -1 else min(size, columns)
        if not given:
            self.refuse("a weight without inputs has no groups")
        return Groups(given, -(-columns // given), PerBlock({-1: given}, pad=columns % given != 0))

    def in_order(self, groups: Groups, index: Tensor | None) -> tuple[Tensor, PerBlock, Tensor | slice]:
        """An order of inputs in which each group is contiguous, for files where the inputs of a group are scattered.

        Each input becomes a group, with a warning, if groups differ in size, or if a stack would need a permutation.

        Args:
            index: the group of each input; None if groups are contiguous in the file.

        Returns:
            The order of the inputs, the granularity of groups in this order, and the index in the file of each group.
        """
        plain = torch.arange(self.shape[1], device="cpu")
        if index is None:
            return plain, groups.granularity, slice(None)
        if bool((index < 0).any()) or bool((index >= groups.count).any()):
            self.refuse(f"g_idx names groups beyond the {groups.count} that have scales")
        order = torch.sort(index, stable=True).indices
        fits = bool((index[order] == plain // groups.size).all())
        if fits and (self.is_alone or bool((order == plain).all())):
            return order, groups.granularity, slice(None)
        warn_user(
            f"{self.folder.path.name}: some weights have groups of unequal size, or are a stack whose inputs are "
            "permuted; every input of these weights becomes a group, with the same values and more scales"
        )
        return plain, PerBlock({-1: 1}), index

    def refuse(self, reason: str) -> NoReturn:
        """Raise CheckpointError with a reason, and the names of the file and the layer."""
        raise CheckpointError(f"{self.folder.path}: of {self.base or 'the model'}, {reason}")


def permutation(order: Tensor) -> tuple[str, dict[str, Tensor]] | None:
    """The transform that brings a layer's inputs into an order; None for the order that they have."""
    return None if bool((order == torch.arange(len(order), device="cpu")).all()) else ("permutation", {"order": order})


class LayeredFormat(DeliveryFormat):
    """A format that `config.json` names as the method of quantization; only read, unless a subclass sets `writes`."""

    writes = False
    with_tables: ClassVar[bool] = False
    """Whether the files hold codes of tables and tied weights; else they hold floats with the values of the codes."""

    @abstractmethod
    def coded(self, module: LayerTensors) -> CodedWeight | None:
        """The codes and scales of a weight in the file; None for floats. Raises CheckpointError for other tensors."""

    def why_not(self, part: Part) -> str | None:
        raise ExportError(
            f"fakequant reads files of {self.name}, but does not write them; deliver the model as compressed-tensors, "
            "which the same programs load"
        )

    def conflicts(self, model: nn.Module, parts: Sequence[Part]) -> Mapping[str, str]:
        shared = shared_names(model)
        in_float = [] if self.with_tables else written_in_float(parts, shared)
        if in_float and len(in_float) == len(parts):
            reason = "these files hold tables and tied weights in float, and the model has no other quantized weights"
            return dict.fromkeys((part.name for part in parts), reason)
        found: dict[str, str] = {}
        for part in parts:
            if not part.path:
                found[part.name] = (
                    "files name the layer of each tensor, but the model itself is the layer; put it into a "
                    "torch.nn.Sequential"
                )
            elif part in in_float and (left := [name for name in part.operands if name != "weight"]):
                tied = {name for pair in shared.items() if part.weight in pair for name in pair}
                alike = sorted({part.path, *(name.rpartition(".")[0] for name in tied)})
                found[part.name] = (
                    "these files hold its weight in float, like all tables and tied weights, and have no place for its "
                    f"quantized {left[0]}; leave the layers in float by prepare(..., skip={alike!r})"
                )
        return found

    def encode(self, state: QuantizedState, model: nn.Module, parts: Sequence[Part]) -> Files:
        raise ExportError(f"fakequant reads files of {self.name}, but does not write them")

    def recognizes(self, path: Path) -> bool:
        found = Folder(path).quantization if (path / CONFIG).is_file() else None
        return isinstance(found, dict) and found.get("quant_method") == self.name

    def wrote(self, path: Path) -> bool:
        return written_in(path) is not None

    def build(self, path: Path) -> nn.Module:
        return build(path)

    def decode(self, path: Path, model: nn.Module) -> QuantizedState:
        return _LayeredReader(self, Folder(path), model).state()

    def calls(self, folder: Folder, model: nn.Module) -> tuple[SitesEntry, Mapping[str, RangeOfCall]]:
        """The function calls that have quantizers, and the names of the quantizers' tensors in a file."""
        return SitesEntry(), {}

    def skips(self, name: str) -> str | None:
        """Why to skip a tensor that the model has no place for, "" for no message; None if it must not be there."""
        return "" if name.endswith("rotary_emb.inv_freq") else None


class RangeOfCall(NamedTuple):
    """The name of a range's tensor in a file, and its shape in the model, in which -1 stands for any number."""

    key: str
    shape: tuple[int, ...] = (1,)


class _LayeredReader:
    """Reads the state of a model from a folder."""

    def __init__(self, format: LayeredFormat, folder: Folder, model: nn.Module) -> None:
        self.format, self.folder, self.model = format, folder, model
        self.tensors, self.used = folder.tensors(), set[str]()
        self.names = FileNames(model, self.tensors)
        self.own, self.found = model.state_dict(), dict[str, Callable[[], Tensor]]()
        self.layers: dict[str, LayerEntry] = {}
        self.tied: dict[str, list[WeightSlot]] = {}
        self.weights: dict[str, Callable[[], WeightCodes]] = {}

    def state(self) -> QuantizedState:
        shared, slots = shared_names(self.model), weight_slots(self.model)
        for tied, first in shared.items():
            if tied in slots:
                self.tied.setdefault(first, []).append(slots[tied])
        for name in float_names(self.model):
            pieces = self.names.split(name, torch.empty_like(self.own[name], device="meta"))
            if name in shared:
                self.used |= {*pieces}
                continue
            slot = slots.get(name)
            coded = {} if slot is None else {key: self._coded(key, slot, len(pieces)) for key in pieces}
            if slot is None or None in coded.values():
                self._need(*pieces)
                shape, channels = self.own[name].shape, slot and slot.operand.channels
                whole = partial(self.names.joined, name, shape=shape, channels=channels)
                self.found[name] = lambda whole=whole, keys=(*pieces,): whole({key: self.tensors[key] for key in keys})
            else:
                self._add(name, slot, {key: one for key, one in coded.items() if one is not None})
        sites, ranges = self.format.calls(self.folder, self.model)
        for name, (key, shape) in ranges.items():
            self._need(key)
            if shape == (1,) and self.tensors[key].numel() != 1:
                raise CheckpointError(
                    f"{key} in {self.folder.path} has {self.tensors[key].numel()} numbers, but its scheme has one"
                )
            self.found[name] = lambda key=key, shape=shape: self.tensors[key].float().reshape(shape)
        # Tensors that the model has no place for are refused, except those that the format or the model skips.
        left = [name for name in self.tensors if name not in self.used]
        reasons = {name: self.format.skips(name) for name in left}
        # The class of the model, or the file, says which tensors it does not load: with a prefix, those of a head.
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        said, prefix = self.tensors.metadata.get(OTHERS, "[]"), self.names.prefix
        others = [
            name
            for name, reason in reasons.items()
            if reason is None
            and (
                (prefix and not name.startswith(prefix))
                or f'"{name}"' in said
                or any(re.search(pattern, name) for pattern in patterns)
            )
        ]
        if others:
            why = f"{listed(others)} stay in the file, because {type(self.model).__name__} does not load them"
            reasons |= dict.fromkeys(others, why)
        for name, reason in reasons.items():
            if reason is None and name.endswith(".bias") and not self.tensors[name].any():
                reasons[name] = ""  # a bias of 0 that some writers add to layers without a bias
        if damage := [name for name, reason in reasons.items() if reason is None]:
            raise CheckpointError(
                f"{self.folder.path} has tensors for which the model has no place: {listed(sorted(damage))}"
            )
        for reason in dict.fromkeys(reason for reason in reasons.values() if reason):
            warn_user(f"{self.format.name}: {reason}")
        return QuantizedState(
            sites=sites, layers=self.layers, shared=shared, tensors=Made(self.found), weights=Made(self.weights)
        )

    def _coded(self, key: str, slot: WeightSlot, pieces: int) -> CodedWeight | None:
        operand, weight = slot.operand, self.own[join(slot.path, slot.operand.weight)]
        shape = weight.shape[operand.channels], weight.shape[operand.reduction]
        if pieces > 1:
            piece = self.names.split(join(slot.path, operand.weight), torch.empty_like(weight, device="meta"))[key]
            shape = piece.shape[0], piece.shape[1]
        is_alone = not operand.is_stack and operand.channels == 0
        base = key.rpartition(".")[0]
        experts = weight.shape[0] if operand.is_stack and pieces == 1 else 0
        is_turned = operand.is_stack and operand.channels == -1
        module = LayerTensors(
            self.folder, self.tensors, base, shape, slot.path, slot.classes, is_alone, key, experts, is_turned
        )
        found = self.format.coded(module) if weight.dim() - operand.is_stack == 2 else None
        self.used |= module.used if found is not None else set()
        return found

    def _need(self, *keys: str) -> None:
        if missing := [key for key in keys if key not in self.tensors]:
            raise CheckpointError(f"{self.folder.path} lacks {listed(missing)}; it is damaged, or of another model")
        self.used |= {*keys}

    def _add(self, name: str, slot: WeightSlot, coded: Mapping[str, CodedWeight]) -> None:
        first, *others = coded.values()
        if any((one.spec, one.input, one.output) != (first.spec, first.input, first.output) for one in others):
            raise CheckpointError(f"{self.folder.path} has experts of {name} that are quantized in different ways")
        if any(not torch.equal(one.ranges[key], x) for key, x in first.ranges.items() for one in others):
            raise CheckpointError(f"{self.folder.path} has experts of {name} with different ranges of their input")
        config = TensorConfig(first.spec).placed(slot.operand.axes())
        config = config.for_each() if slot.operand.is_stack else config
        entry = self.layers.setdefault(slot.path, LayerEntry(slot.kind, {}))
        entry.quantizers[slot.attribute] = QuantizerEntry(config)
        for other in self.tied.get(name, ()):
            own = self.layers.setdefault(other.path, LayerEntry(other.kind, {})).quantizers
            own[other.attribute] = QuantizerEntry(TensorConfig(first.spec).placed(other.operand.axes()))
        for role, attribute in (("input", slot.input), ("output", "_output_quantizer")):
            if (held := first.input if role == "input" else first.output) is not None and attribute:
                entry.quantizers[attribute] = QuantizerEntry(held)
                for key, x in first.ranges.items():
                    if key.startswith(role):
                        self.found[join(slot.path, f"{attribute}{key.removeprefix(role)}")] = lambda x=x: x
        if first.transform is not None:
            kind, buffers = first.transform
            self.layers[slot.path] = LayerEntry(entry.type, entry.quantizers, TransformEntry(kind, {}))
            for key, value in buffers.items():
                self.found[join(slot.path, f"{_INPUTS}.{key}")] = partial(Tensor.clone, value)
        self.weights[name] = partial(self._weight, name, slot, config.spec, coded)

    def _weight(self, name: str, slot: WeightSlot, spec: QuantSpec, coded: Mapping[str, CodedWeight]) -> WeightCodes:
        like, channels = self.own[name], slot.operand.channels
        groups = spec.granularity.group_shape(tuple(like.shape))
        read = {key: _without_zero_scales(one) for key, one in coded.items()}

        def joined(number: int, shape: Sequence[int]) -> Tensor:
            whole = self.names.joined(name, {key: one[number] for key, one in read.items()}, shape, channels)
            return whole.mT.contiguous() if channels == 1 and not slot.operand.is_stack else whole

        codes, scale = joined(0, like.shape), joined(1, groups)
        point = joined(2, groups).reshape(groups) if all(len(one) == 3 for one in read.values()) else None
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{self.folder.path}: of {name}, scales are not finite; the file is damaged")
        readers = tuple(join(one.path, one.attribute) for one in (slot, *self.tied.get(name, ())))
        return WeightCodes(codes, scale.reshape(groups), point, spec, tuple(like.shape), like.dtype, readers)


def _without_zero_scales(one: CodedWeight) -> list[Tensor]:
    """Codes, scales and zero points; where a scale is 0, it becomes the largest scale, and its codes those of 0."""
    spec, codes, scale = one.spec, one.codes(), one.scale().float().contiguous()
    kind, empty = torch.int32 if spec.offset is None else torch.float32, scale == 0
    point = None if one.zero_point is None else one.zero_point().to(kind)
    if spec.scale.is_exact or not bool(empty.any()):
        return [codes, scale, *([] if point is None else [point])]
    peak = scale.max()
    filled = torch.where(empty, torch.where(peak > 0, peak, torch.ones_like(peak)), scale)
    zeros = torch.zeros_like(codes)  # the code 0 has the value of the offset alone
    if spec.offset is None:
        zeros, _ = quantize(torch.zeros(codes.shape, device="cpu"), spec, scale=filled.float(), zero_point=point)
    sizes = [-(-whole // groups) for whole, groups in zip(codes.shape, scale.shape, strict=True)]
    wide = empty.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)[: codes.shape[0], : codes.shape[1]]
    chosen = torch.where(wide, zeros.view(torch.uint8), codes.view(torch.uint8))  # floats of 8 bits are not chosen from
    return [chosen.view(codes.dtype), filled, *([] if point is None else [point])]
