"""Write ranges as AIMET's encodings beside a float ONNX file, for Qualcomm's converters, and read such encodings.

A file of encodings lists the tensors of an ONNX file without quantizers: `qairt-converter` reads it by
`--quantization_overrides`. Source: aimet-onnx 2.42, `_encoding.py` and `quantsim.py`, for all three versions:

* "0.6.1": a list of one entry per channel, {scale, offset, bitwidth, min, max, dtype, is_symmetric: "True"}.
* "1.0.0": {scale, offset, bw, dtype: "INT", is_sym, enc_type, block_size}; "is_sym" says that codes are signed.
* "2.0.0": {y_scale, y_zero_point, output_dtype, axis, block_size}, with the meaning that ONNX gives these names.

The offset of the first two versions is the lowest code minus the zero point: x = (q + offset) * scale, for q >= 0.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fakequant.data.arguments import check_model
from fakequant.data.batches import Inputs, select_inputs
from fakequant.errors import ExportError, nearest, shown
from fakequant.export.capability import Parameters, SiteRecord, read, require
from fakequant.export.exporter import export_onnx, finish
from fakequant.export.inputs import GraphEditor, names_read
from fakequant.export.lower import rename_inputs
from fakequant.export.verdict import element_types
from fakequant.files import check_path, read_whole, writable_file, write_in_order
from fakequant.model.calibrate import calibrate
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec
from fakequant.restore import restore_on_error, state_of
from fakequant.text import listed, module_name
from fakequant.version import __version__

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

VERSIONS = "0.6.1", "1.0.0", "2.0.0"
_CALL = "export_encodings(model, example, 'model.onnx')"
_READ = "read_encodings(model, example, 'model.encodings')"
_BITS = 4, 8, 16
_ONE_RANGE = "prepare(..., target='qnn') gives a tensor one range for all its readers"


@dataclass(frozen=True, eq=False)
class TensorEncoding:
    """The quantization of a tensor: x = (q - zero_point) * scale.

    Attributes:
        scale: float32; per tensor [], per channel [channels], per block [channels, blocks, 1, ...].
        zero_point: the code of 0.0, int64, in the shape of the scale.
        bits: the bits of a code.
        signed: whether codes begin at -2**(bits - 1) instead of 0.
        axis: the axis of channels or blocks; None for one scale.
        block_size: how many elements along the axis share a scale; 0 for one scale per channel.
    """

    scale: np.ndarray
    zero_point: np.ndarray
    bits: int
    signed: bool
    axis: int | None = None
    block_size: int = 0

    @property
    def dtype(self) -> str:
        """The name of the integer type, such as "uint8"."""
        return f"{'' if self.signed else 'u'}int{self.bits}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorEncoding):
            return NotImplemented
        alike = self.dtype == other.dtype and self.scale.size == other.scale.size
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        return alike and all(np.array_equal(a.ravel(), b.ravel()) for a, b in pairs)

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Encodings:
    """The encodings that `export_encodings` wrote or `read_encodings` read; prints as a sentence.

    Attributes:
        path: the file of encodings.
        version: the version of AIMET's file layout.
        tensors: the paths of each tensor's quantizers, by the tensor's name in the ONNX file.
        onnx: the float ONNX file beside it; None after reading.
        left_out: paths of quantizers without encodings, because they are off or the example does not reach them;
            `read_encodings` does not change these quantizers.
    """

    path: Path
    version: str
    tensors: dict[str, list[str]] = field(default_factory=dict)
    onnx: Path | None = None
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        beside = f", of {self.onnx}" if self.onnx else ""
        without = f"; without encodings: {listed(self.left_out)}" if self.left_out else ""
        return f"{self.path}: encodings {self.version} of {len(self.tensors)} tensors{beside}{without}"

    __repr__ = __str__


@accepts_wrapped_model
def export_encodings(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    version: str = "2.0.0",
    inputs: Inputs | None = None,
    dynamic_shapes: Any = None,
) -> Encodings:
    """Write a calibrated model as a float ONNX file, and the ranges of its tensors as AIMET's encodings beside it.

    Weights in the file have the values of their codes. The encodings have the name of the file, ending in .encodings.

    Args:
        model: a prepared and calibrated model, with integers of 4, 8 or 16 bits.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: the ONNX file to write; its folder is created if it does not exist.
        version: "0.6.1", "1.0.0" or "2.0.0".
        inputs: which part of the example the model gets, as for `calibrate`.
        dynamic_shapes: as for `export_onnx`.

    Raises:
        ExportError: for the reasons of `export_onnx`; an unknown version; or quantizers that encodings do not describe,
            that give one tensor two ranges, or that only some readers of a tensor use; all are named. Nothing is
            written.
        OutputError: a file cannot be written; raised before any work.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 2)), "INT8_WEIGHT_ONLY")
    >>> with TemporaryDirectory() as folder:
    ...     export_encodings(model, torch.ones(1, 4), folder + "/model.onnx").tensors
    {'0.weight': ['0._weight_quantizer']}
    """
    if version not in VERSIONS:
        raise ExportError(f"unknown version {version!r:.40}{nearest(str(version), list(VERSIONS))}")
    check_model(model, "export_encodings", _CALL, ExportError)
    check_path(path, _CALL, ExportError)
    require("onnx", "onnxscript")
    target = writable_file(path)
    beside = writable_file(target.with_suffix(".encodings"))
    if beside == target:
        raise ExportError("the encodings end in .encodings; give the ONNX file another ending, such as .onnx")
    example = example if inputs is None else select_inputs(example, inputs)
    data, found, names = _split(model, example, version, dynamic_shapes)
    own = quantizers(model)
    weights = {name for name, paths in names.items() if paths[0] in own and own[paths[0]].kind is Kind.WEIGHT}
    document = json.dumps(_document(found, weights, version), indent=1)
    write_in_order({target: data, beside: document.encode()})
    return Encodings(beside, version, names, target, _without(own, names))


@accepts_wrapped_model
def read_encodings(
    model: nn.Module, example: Any, path: str | os.PathLike[str], *, inputs: Inputs | None = None
) -> Encodings:
    """Set the scales and zero points of a prepared model from a file of encodings.

    The file names tensors as in the ONNX file of `export_encodings`. Weights that already have the file's scales keep
    their codes; others are quantized with the new scales.

    Args:
        model: a prepared model; it need not be calibrated.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: a file of version 0.6.1, 1.0.0 or 2.0.0.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ExportError: the file is damaged, has tensors that no quantizer reads, lacks tensors that a quantizer reads,
            or has other formats: the tensors are named. The model is unchanged.

    >>> read_encodings(prepare(nn.Sequential(nn.Linear(4, 2)), "INT8_WEIGHT_ONLY"), torch.ones(1, 4), "no such file")
    Traceback (most recent call last):
    fakequant.errors.ExportError: no such file: cannot be read: ...
    """
    check_model(model, "read_encodings", _READ, ExportError)
    check_path(path, _READ, ExportError)
    require("onnx", "onnxscript")
    source = Path(path)
    version, found = _parsed(source)
    example = example if inputs is None else select_inputs(example, inputs)
    copied = copy.deepcopy(model)
    # The ranges will be those of the file; without any there is no graph.
    if any(one.needs_calibration for one in quantizers(copied).values()):
        calibrate(copied, [example], progress=False)
    elif any(one.scale is None for one in quantizers(copied).values()):
        calibrate(copied, progress=False)
    _, expected, names = _split(copied, example)
    own, ready = quantizers(model), quantizers(copied)
    if calls := sorted({path for paths in names.values() for path in paths} - own.keys()):
        raise ExportError(f"{listed(calls)} call fake_quantize with ranges as arguments; let prepare make quantizers")
    lacking, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if lacking or unknown:
        said = [f"it lacks {listed(lacking)}"] if lacking else []
        said += [f"no quantizer of the model has {listed(unknown)}"] if unknown else []
        raise ExportError(f"{source}: {'; '.join(said)}; prepare the model as it was when the file was written")
    changes = dict[Quantizer, QParams]()
    for name, paths in names.items():
        for path_of_it in paths:
            params = _params(f"{source}: {name}", path_of_it, found[name], expected[name], ready[path_of_it])
            quantizer = own[path_of_it]
            pairs = zip((quantizer.scale, quantizer.zero_point), params[:2], strict=True)
            if not all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs):
                changes[quantizer] = params
    with restore_on_error(state_of([*changes])):
        for quantizer, params in changes.items():
            quantizer.set_qparams(params)
    return Encodings(source, version, names, left_out=_without(own, names))


def _without(own: Mapping[str, Quantizer], names: Mapping[str, list[str]]) -> list[str]:
    return sorted(own.keys() - {path for paths in names.values() for path in paths})


def _params(title: str, path: str, found: TensorEncoding, expected: TensorEncoding, ready: Quantizer) -> QParams:
    """An encoding as parameters for a quantizer; `ready` is a calibrated copy of it. Raises if they do not fit."""
    before, spec = ready.scale, ready.spec
    assert before is not None
    if (found.dtype, found.scale.size) != (expected.dtype, expected.scale.size):
        raise ExportError(
            f"{title} has {found.scale.size} scales of {found.dtype}, but {module_name(path)} has "
            f"{expected.scale.size} of {expected.dtype} ({spec}); prepare the model with the formats of the file"
        )
    axis = expected.axis if found.axis is None else found.axis % max(before.dim(), 1)
    if (axis, found.block_size) != (expected.axis, expected.block_size):
        raise ExportError(
            f"{title} has scales along axis {found.axis} in blocks of {found.block_size}, but {module_name(path)} has "
            f"axis {expected.axis} and blocks of {expected.block_size}; prepare the model with the blocks of the file"
        )
    if ready.zero_point is None and found.zero_point.any():
        raise ExportError(f"{title} has zero points, but {module_name(path)} has none; add 'asymmetric' to its {spec}")
    scale = torch.from_numpy(found.scale).reshape(before.shape).to(before)
    if ready.zero_point is None:
        return QParams(scale)
    return QParams(scale, torch.from_numpy(found.zero_point).reshape(before.shape).to(ready.zero_point))


def _split(
    model: nn.Module, example: Any, version: str = "2.0.0", dynamic_shapes: Any = None
) -> tuple[bytes, dict[str, TensorEncoding], dict[str, list[str]]]:
    """The bytes of a float ONNX file, the encodings of its tensors by name, and the quantizers of each tensor."""
    import onnx

    with TemporaryDirectory() as folder:
        file = export_onnx(model, example, Path(folder, "model.onnx"), dynamic_shapes=dynamic_shapes, style="standard")
        proto = onnx.load(file.path)
    sites = read(proto).sites
    refused = {site.quantizer: reason for site in sites if (reason := _why_not(site))}
    half = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16} & set(element_types(proto).values())
    if half:
        raise ExportError("AIMET's encodings are of models in float32; use model.float()")
    split = None
    if not refused:
        split = _Split(proto, version)
        for site in sites:
            if reason := split.take(site):
                refused[site.quantizer] = reason
        refused |= split.finish()
    if split is None or refused:
        lines = "\n".join(f"{module_name(path)}: {reason}" for path, reason in refused.items())
        raise ExportError(f"cannot be expressed in AIMET's encodings:\n{lines}")
    return finish(proto, file.opset), split.encodings, split.quantizers


def _why_not(site: SiteRecord) -> str | None:
    """Why encodings cannot describe a quantizer; None if they can."""
    spec = QuantSpec.parse(site.spec)
    fmt, is_weight = spec.format, site.codes is not None
    full = isinstance(fmt, IntegerFormat) and IntegerFormat.of(fmt.bits, signed=fmt.signed)
    narrow = isinstance(fmt, IntegerFormat) and is_weight and full and full.low <= fmt.low and fmt.high <= full.high
    if not isinstance(fmt, IntegerFormat) or fmt.bits not in _BITS or not (narrow or fmt == full):
        return f"{spec}: encodings have integers of 4, 8 and 16 bits with all codes; use INT8_AFFINE or INT4"
    if site.parameters is not Parameters.CONSTANT or site.scale_of_scales:
        return f"{spec}: encodings have constant scales in float32; use a static range such as INT8_AFFINE"
    if not is_weight and (len(site.groups) != site.groups.count(1) or spec.arithmetic is not Arithmetic.DIVIDE):
        return f"{spec}: activations are divided by one scale of the tensor; use per_tensor and the arithmetic DIVIDE"
    return None


class _Split:
    """Removes quantizers from a graph, in place, and lists their encodings by the tensors that they quantize."""

    def __init__(self, proto: ModelProto, version: str) -> None:
        self._version = version
        self._proto, self._editor = proto, GraphEditor(proto.graph)
        self._made_by = {name: node for node in proto.graph.node for name in node.output}
        self._removed: list[NodeProto] = []
        self._names: dict[str, str] = {}
        self._read_in_float: dict[str, str] = {}
        self.encodings: dict[str, TensorEncoding] = {}
        self.quantizers: dict[str, list[str]] = {}

    def take(self, site: SiteRecord) -> str | None:
        """Remove a quantizer from the graph; returns the reason if it cannot be removed, else None."""
        between = self._between(site)
        if between is None:
            return "lies in a loop, whose tensors have no encodings"
        self._removed += between
        encoding = self._encoding(site, between)
        if encoding.block_size:
            if self._version == "0.6.1":
                return "version 0.6.1 has no blocks; use version 2.0.0"
            shape = self._editor.shape(str(site.codes))
            if encoding.axis != 1 or len(shape) != 2 or shape[1] != encoding.scale.shape[1] * encoding.block_size:
                return f"encodings have equal blocks of inputs of a matrix [out, in], and this weight is {shape}"
        name = self._names.get(site.x, site.x)
        if site.codes is not None:  # the values of a weight's codes become a constant with the name of the weight
            codes = self._editor.tensor(site.codes).float()
            scale, zero = (torch.from_numpy(one).float() for one in (encoding.scale, encoding.zero_point))
            if encoding.block_size:
                assert encoding.axis is not None
                scale, zero = (one.repeat_interleave(encoding.block_size, encoding.axis) for one in (scale, zero))
            elif encoding.axis is not None:
                shape = [-1 if axis == encoding.axis else 1 for axis in range(codes.dim())]
                scale, zero = scale.reshape(shape), zero.reshape(shape)
            name = self._editor.add(site.x, ((codes - zero) * scale).numpy())
        if self.encodings.setdefault(name, encoding) != encoding:
            others = listed(self.quantizers[name])
            return f"quantizes {name} differently from {others}, but a tensor has one encoding; {_ONE_RANGE}"
        self.quantizers.setdefault(name, []).append(site.quantizer)
        self._names[site.y] = name
        if site.codes is None:
            self._read_in_float[name] = site.quantizer
        return None

    def finish(self) -> dict[str, str]:
        """Write the graph without quantizers; returns a reason for each quantizer whose tensor is read in float."""
        from onnx import helper

        graph = self._proto.graph
        gone = {id(node) for node in self._removed}
        kept = [node for node in graph.node if id(node) not in gone]
        read = names_read(kept) | {output.name for output in graph.output}
        refused = {
            path: f"quantizes {name}, which others read in float, and an encoding holds for all of them; {_ONE_RANGE}"
            for name, path in self._read_in_float.items()
            if name in read
        }
        rename_inputs(kept, self._names)
        taken = {one.name for one in (*graph.input, *graph.output)} | {*self.encodings} - self._made_by.keys()
        for output in graph.output:
            name = self._names.get(output.name)
            if name in taken:
                kept.append(helper.make_node("Identity", [name], [output.name]))
            elif name is not None:
                output.name = name
                taken.add(name)
        made = {name for node in kept for name in node.output} - {output.name for output in graph.output}
        shapes = [one for one in graph.value_info if one.name in made]
        del graph.value_info[:], self._proto.metadata_props[:]
        graph.value_info.extend(shapes)
        self._editor.finish(kept)
        return refused

    def _between(self, site: SiteRecord) -> list[NodeProto] | None:
        """The nodes between a quantizer's input (or a weight's codes) and its result; None if they are in a loop."""
        waiting: list[str] = [site.y]
        found: list[NodeProto] = []
        while waiting:
            name = waiting.pop()
            node = self._made_by.get(name)
            if name in (site.x, site.codes) or self._editor.is_constant(name):
                continue
            if node is None or node.op_type in ("Loop", "Scan", "If"):
                return None
            if node not in found:
                found.append(node)
                waiting += [one for one in node.input if one]
        return found

    def _encoding(self, site: SiteRecord, between: Iterable[NodeProto]) -> TensorEncoding:
        fmt = QuantSpec.parse(site.spec).format
        assert isinstance(fmt, IntegerFormat)
        scale = self._editor.tensor(site.scale).float()
        zero = torch.zeros_like(scale) if site.zero_point is None else self._editor.tensor(site.zero_point)
        node = next(node for node in between if node.op_type == "DequantizeLinear")
        given = {one.name: one.i for one in node.attribute}
        axis = given.get("axis", 1) if scale.dim() else None
        values = scale.numpy(), zero.to(torch.int64).numpy()
        return TensorEncoding(*values, fmt.bits, fmt.signed, axis, given.get("block_size", 0))


def _document(found: Mapping[str, TensorEncoding], weights: Collection[str], version: str) -> dict[str, Any]:
    """The content of a file of encodings, for JSON."""
    producer = {"producer": {"package": "fakequant", "version": __version__}, "version": version}
    entries: dict[str, Any] = {}
    for name, one in found.items():
        scale, low = one.scale.astype(float), -(1 << one.bits - 1) if one.signed else 0
        scales, zeros, offsets = (x.ravel().tolist() for x in (scale, one.zero_point, low - one.zero_point))
        block = {"block_size": one.block_size} if one.block_size else {}
        if version == "2.0.0":
            zero = {"y_zero_point": one.zero_point.tolist()} if one.zero_point.any() else {}
            axis = {} if one.axis is None else {"axis": one.axis}
            form = {"name": name, "output_dtype": one.dtype, "y_scale": scale.tolist()}
            entries[name] = {**form, **zero, **axis, **block}
        elif version == "1.0.0":
            kind = "PER_BLOCK" if one.block_size else "PER_TENSOR" if one.axis is None else "PER_CHANNEL"
            form = {"name": name, "dtype": "INT", "bw": one.bits, "is_sym": one.signed}
            entries[name] = {**form, "scale": scales, "offset": offsets, "enc_type": kind, **block}
        else:
            top = low + (1 << one.bits) - 1
            form = {"bitwidth": one.bits, "dtype": "int", "is_symmetric": str(one.signed)}
            entries[name] = [
                {**form, "min": (low - z) * s, "max": (top - z) * s, "offset": offset, "scale": s}
                for s, z, offset in zip(scales, zeros, offsets, strict=True)
            ]
    if version == "2.0.0":
        return {**producer, "encodings": [*entries.values()]}
    parts: dict[str, Any] = {}
    for part, is_weight in (("activation_encodings", False), ("param_encodings", True)):
        own = {name: entry for name, entry in entries.items() if (name in weights) is is_weight}
        parts[part] = own if version == "0.6.1" else [*own.values()]
    return {**producer, **parts}


def _parsed(source: Path) -> tuple[str, dict[str, TensorEncoding]]:
    """The version of a file and its encodings by tensor; raises ExportError if it is damaged."""
    try:
        values = json.loads(read_whole(source))
    except OSError as error:
        raise ExportError(f"{source}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{source}: is not JSON: {error}") from error
    version = values.get("version") if isinstance(values, dict) else None
    if version not in VERSIONS:
        raise ExportError(f"{source}: has the version {shown(version)}, expected {', '.join(VERSIONS)}")
    found = dict[str, TensorEncoding]()
    parse = {"0.6.1": _of_channels, "1.0.0": _of_offsets, "2.0.0": _of_onnx}[version]
    for part in ("encodings",) if version == "2.0.0" else ("activation_encodings", "param_encodings"):
        entries: Any = values.get(part)
        named: list[tuple[Any, Any]]
        if isinstance(entries, dict) and version == "0.6.1":
            named = [*entries.items()]
        elif isinstance(entries, list) and version != "0.6.1":
            named = [(entry.get("name") if isinstance(entry, dict) else None, entry) for entry in entries]
        else:
            raise ExportError(f"{source}: has no {part} as version {version} has them")
        for place, (name, entry) in enumerate(named):
            if not isinstance(name, str):
                raise ExportError(f"{source}: entry {place} of {part} has no name")
            if name in found:
                raise ExportError(f"{source}: {name} has two encodings")
            try:
                found[name] = parse(entry)
            except (ValueError, RecursionError) as error:
                raise ExportError(f"{source}: {name}: {error}") from error
    return version, found


def _of_channels(entry: Any) -> TensorEncoding:
    if not isinstance(entry, list) or not entry or not all(isinstance(one, dict) for one in entry):
        raise ValueError("is not a list of the encodings of channels")
    alike = {(one.get("dtype"), one.get("is_symmetric"), one.get("bitwidth")) for one in entry if _is_plain(one)}
    if len(alike) != 1 or len(entry) != sum(map(_is_plain, entry)):
        raise ValueError("has channels of several formats, or channels without a format")
    ((dtype, symmetric, bits),) = alike
    if dtype != "int" or symmetric not in ("True", "False"):
        raise ValueError(
            f"has dtype {dtype!r:.40} and is_symmetric {symmetric!r:.40}, expected 'int' and 'True' or 'False'"
        )
    scales, offsets = ([one.get(key) for one in entry] for key in ("scale", "offset"))
    return _from_offsets(scales, offsets, bits, symmetric == "True", is_tensor=len(entry) == 1)


def _is_plain(entry: dict[str, Any]) -> bool:
    return all(isinstance(entry.get(key), str | int) for key in ("dtype", "is_symmetric", "bitwidth"))


def _of_offsets(entry: dict[str, Any]) -> TensorEncoding:
    kind, signed, shift = (entry.get(key) for key in ("enc_type", "is_sym", "zero_point_shift"))
    if entry.get("dtype") != "INT" or kind not in ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK"):
        raise ValueError(
            f"has dtype {entry.get('dtype')!r:.40} and enc_type {kind!r:.40}, expected 'INT' and 'PER_TENSOR', "
            "'PER_CHANNEL' or 'PER_BLOCK'"
        )
    if not isinstance(signed, bool) or shift:
        raise ValueError("has no is_sym, or has a zero_point_shift, which no quantizer computes")
    block = _block_size(entry) if kind == "PER_BLOCK" else 0
    scales, offsets = entry.get("scale"), entry.get("offset")
    return _from_offsets(scales, offsets, entry.get("bw"), signed, is_tensor=kind == "PER_TENSOR", block_size=block)


def _of_onnx(entry: dict[str, Any]) -> TensorEncoding:
    match = re.fullmatch(r"(u?)int(4|8|16)", str(entry.get("output_dtype")))
    if match is None:
        raise ValueError(f"has output_dtype {shown(entry.get('output_dtype'))}, expected integers of 4, 8 or 16 bits")
    scale = _numbers(entry.get("y_scale"), "y_scale")
    zero = entry.get("y_zero_point")
    points = np.zeros(scale.shape) if zero is None else _numbers(zero, "y_zero_point")
    axis = entry.get("axis")
    if (axis is None) != (scale.ndim == 0) or not (axis is None or (type(axis) is int and -8 < axis < 8)):
        raise ValueError(f"has axis {shown(axis)} for y_scale of shape {list(scale.shape)}")
    block = _block_size(entry) if "block_size" in entry else 0
    return _checked(scale, points, int(match[2]), not match[1], axis, block)


def _block_size(entry: dict[str, Any]) -> int:
    size = entry.get("block_size")
    if type(size) is not int or size < 1:
        raise ValueError(f"has block_size {shown(size)}, expected a positive integer")
    return size


def _from_offsets(
    scales: Any, offsets: Any, bits: Any, signed: bool, *, is_tensor: bool, block_size: int = 0
) -> TensorEncoding:
    if type(bits) is not int or bits not in _BITS:
        raise ValueError(f"has {shown(bits)} bits, expected 4, 8 or 16")
    scale, offset = _numbers(scales, "scale"), _numbers(offsets, "offset")
    if scale.ndim != 1 or not scale.size or (is_tensor and scale.size != 1):
        raise ValueError(f"has scales of shape {list(scale.shape)}, expected {'one' if is_tensor else 'a list'}")
    zero = (-(1 << bits - 1) if signed else 0) - offset
    if is_tensor and zero.size == 1:
        scale, zero = scale.reshape(()), zero.reshape(())
    return _checked(scale, zero, bits, signed, None, block_size)


def _checked(
    scale: np.ndarray, zero: np.ndarray, bits: int, signed: bool, axis: int | None, block_size: int
) -> TensorEncoding:
    if scale.shape != zero.shape:
        raise ValueError(f"has {scale.size} scales and {zero.size} offsets or zero points")
    low = -(1 << bits - 1) if signed else 0
    if not bool(((zero >= low) & (zero < low + (1 << bits)) & (zero == np.rint(zero))).all()):
        raise ValueError(f"has offsets or zero points that are not codes of {bits} bits")
    with np.errstate(over="ignore", under="ignore"):
        narrow = scale.astype(np.float32)
    if not bool((np.isfinite(narrow) & (narrow >= np.finfo(np.float32).tiny)).all()):
        raise ValueError("has scales that are not positive normal numbers in float32")
    return TensorEncoding(narrow, zero.astype(np.int64), bits, signed, axis, block_size)


def _numbers(value: Any, key: str) -> np.ndarray:
    if not all(type(one) in (int, float) for one in _leaves(value)):
        raise ValueError(f"has {key} that are not numbers")
    try:
        return np.asarray(value, dtype=np.float64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"has {key} in lists of several lengths, or as too large integers") from error


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
