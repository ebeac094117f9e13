"""The element type, operator set and attributes that ONNX needs for a specification, or why ONNX cannot express it.

Source: the ONNX operators QuantizeLinear and DequantizeLinear: 8-bit integers since opset 10, float8 since 19, 4-bit
and 16-bit integers and blocks since 21, float4 since 23, scales in E8M0 since 24, float6 since 28. The scale is one
value, a vector along one axis, or one value per block of one axis. Formats that ONNX Runtime does not run are computed
by `export.loops` in `Style.PORTABLE`, and use their own element types in the other styles.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fakequant.errors import ExportError, VerificationError, nearest
from fakequant.model.state.plan import keys_of, number, value_of
from fakequant.numerics.formats import (
    FLOAT4_E2M1FN,
    FLOAT6_E2M3FN,
    FLOAT6_E3M2FN,
    FLOAT8_E4M3FN,
    FLOAT8_E4M3FNUZ,
    FLOAT8_E5M2,
    FLOAT8_E5M2FNUZ,
    FLOAT8_E8M0FNU,
    Format,
    IntegerFormat,
)
from fakequant.numerics.granularity import Granularity, PerBlock
from fakequant.numerics.scales import ScaleRounding
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


def require(*names: str, reader: str = "ONNX", install: str = "'fakequant[onnx]'") -> None:
    """Check that packages can be imported.

    Args:
        names: the packages.
        reader: the export that needs the packages, for the message.
        install: the argument of pip install, for the message.

    Raises:
        ExportError: a package is missing; the message says how to install it.

    >>> require("numpy")
    """
    if missing := [name for name in names if find_spec(name) is None]:
        raise ExportError(f"{reader} needs {' and '.join(missing)}, not installed here; run pip install {install}")


_ALIASES = {"tensorrt": "trt", "onnxruntime": "portable", "ort": "portable", "onnx": "standard"}
"""For names of engines and forms that users give as a style, the style that they mean."""


class Style(str, Enum):
    """The operators and element types that a file may use."""

    PORTABLE = "portable"
    """Operators that ONNX Runtime runs; basic operators compute 4- and 6-bit floats, tables and scales in E8M0."""
    STANDARD = "standard"
    """QuantizeLinear and DequantizeLinear with all element types of the ONNX standard; few runtimes have them all."""
    TRT = "trt"
    """Operators that TensorRT's parser reads, including operators of domain `trt` for dynamic MXFP8."""

    @classmethod
    def parse(cls, text: str) -> Style:
        """The style called `text`.

        Raises:
            ExportError: no style has this name; the message lists the nearest names.

        >>> Style.parse("standard")
        <Style.STANDARD: 'standard'>
        """
        names = [style.value for style in cls]
        if text not in names:
            raise ExportError(f"unknown style {text!r}{nearest(_ALIASES.get(text.lower(), text), names)}")
        return cls(text)


_KEY = "fakequant"
_LAYOUT_VERSION = 1
_MOST_AXES = 64
"""The largest number of axes of a numpy array."""
_LONGEST = 2**31
"""The bound of the length of an axis, because an ONNX file has less than 2 GB."""

INPUT_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int8),
        *(torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    )
}
"""The allowed dtypes of inputs by name; names from a file are only looked up here."""


class Parameters(str, Enum):
    """The source of the scale and zero point of a quantized tensor."""

    CONSTANT = "constant"
    """Constants in the file."""
    DYNAMIC = "dynamic"
    """Computed by the graph from the range of the tensor."""
    COMPUTED = "computed"
    """Computed by the graph in another way."""


@dataclass(frozen=True)
class SiteRecord:
    """One quantizer in the file: the nodes of an activation, or the codes and nodes of a weight.

    Attributes:
        quantizer: path of the quantizer in the model; "" if the model itself quantizes.
        spec: the specification, as text.
        expressed: a description of the ONNX nodes.
        x: name of the quantized tensor; for a weight the name of the parameter.
        y: name of the quantized result.
        parameters: the source of scale and zero point.
        scale: name of the scale; a computed scale is [groups per axis], a constant has ONNX's shape.
        zero_point: name of the zero point, in the scale's shape; None if there is none.
        codes: name of a weight's codes; None for activations.
        groups: shape of constant scales [groups per axis].
        repeats: how often the file repeats each scale along every axis.
        digest: SHA-256 of the constants.
        constants: names of the constants.
        scale_of_scales: name of the factor of the scale's codes; None if `scale` is the scale itself.
        clip: the bounds of a Clip, Max or Min node that stood in front of the quantizer and was removed, because the
            quantizer's smallest and largest codes already clip to these bounds; empty if none was removed.
    """

    quantizer: str
    spec: str
    expressed: str
    x: str
    y: str
    parameters: Parameters
    scale: str
    zero_point: str | None
    codes: str | None
    groups: list[int]
    repeats: list[int]
    constants: list[str]
    digest: str
    scale_of_scales: str | None = None
    clip: list[float] = field(default_factory=list)

    def seen_as(self, x: str, y: str) -> SiteRecord:
        """The record with new names for x and y; in a loop, these tensors hold the values of all steps."""
        return replace(self, x=x, y=y)


@dataclass(frozen=True)
class InputRecord:
    """One input of the file: its name, and shape, torch dtype and range in the example.

    `key` is the keyword if the input is a keyword argument, and `state` the path if the input is a buffer.
    """

    name: str
    shape: list[int]
    dtype: str
    low: float
    high: float
    key: str | None = None
    state: str | None = None


@dataclass(frozen=True)
class FileRecord:
    """The record of quantizers and inputs in a file's metadata."""

    version: str
    style: Style
    sites: list[SiteRecord]
    inputs: list[InputRecord]


def digest(tensors: Iterable[TensorProto]) -> str:
    """Return the SHA-256 of the types, shapes and contents of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.data_type, list(tensor.dims))).encode())
        found.update(tensor.raw_data)
    return found.hexdigest()


def write(model: ModelProto, record: FileRecord) -> None:
    """Write the record into the model's metadata."""
    del model.metadata_props[:]
    model.metadata_props.add(key=_KEY, value=json.dumps({"layout": _LAYOUT_VERSION, **asdict(record)}))


def read(model: ModelProto) -> FileRecord:
    """Read the record of a model.

    Raises:
        VerificationError: the record is missing, damaged, or has the layout of another version.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == _KEY), None)
    if text is None:
        raise VerificationError("not written by fakequant.export_onnx: it has no record of quantizers")
    try:
        values = json.loads(text)
        json.dumps(values, ensure_ascii=False).encode()  # raises for lone surrogates, which no name in a file can have
        (layout,) = keys_of(values, "", "layout")
        if number(layout, "layout") != _LAYOUT_VERSION:
            raise VerificationError(
                f"has a record of layout {layout}, this version reads {_LAYOUT_VERSION}; export it again"
            )
        record: FileRecord = value_of({key: x for key, x in values.items() if key != "layout"}, "", FileRecord)
        lengths = [("shape", one.shape, 0) for one in record.inputs]
        for site in record.sites:
            lengths += [("groups", site.groups, 0), ("repeats", site.repeats, 1)]
        for what, axes, least in lengths:
            if len(axes) > _MOST_AXES:
                raise ValueError(f"{what} has {len(axes)} axes, expected at most {_MOST_AXES}")
            if wrong := [n for n in axes if not least <= n < _LONGEST]:
                raise ValueError(f"{what} is {wrong[0]}, expected {least} to {_LONGEST - 1}")
        for entry in record.inputs:
            if entry.dtype not in INPUT_DTYPES:
                raise ValueError(f"dtype is {entry.dtype!r:.40}, expected one of {', '.join(INPUT_DTYPES)}")
            for name, bound in (("low", entry.low), ("high", entry.high)):
                if not math.isfinite(bound):
                    raise ValueError(f"{name} is {bound}, expected a finite number")
        return record
    except (ValueError, RecursionError, ExportError) as error:  # ExportError: an unknown style
        raise VerificationError(f"its record of quantizers is damaged: {error}; export it again") from error


Dimension = int | str
"""The length of an axis; a text if it is symbolic."""

FIRST_OPSET = 18
"""The oldest opset that torch's exporter writes without a conversion."""
LAST_OPSET = 25
"""The newest opset that torch's exporter writes correctly; types of newer opsets are converted afterwards."""
DEFAULT_OPSET = 20
"""This opset has 8-bit formats per tensor and per axis; ONNX Runtime loads it with fewer defects than opset 21."""
BLOCKED_OPSET = 21
"""The first opset with one scale per block."""


@dataclass(frozen=True)
class ElementType:
    """An element type of ONNX that QuantizeLinear writes: its name, its bits, and its first opset."""

    name: str
    bits: int
    opset: int
    integer: bool = True


_FLOATS: dict[Format, ElementType] = {
    FLOAT8_E4M3FN: ElementType("FLOAT8E4M3FN", 8, 19, integer=False),
    FLOAT8_E5M2: ElementType("FLOAT8E5M2", 8, 19, integer=False),
    FLOAT8_E4M3FNUZ: ElementType("FLOAT8E4M3FNUZ", 8, 19, integer=False),
    FLOAT8_E5M2FNUZ: ElementType("FLOAT8E5M2FNUZ", 8, 19, integer=False),
}
_FLOATS_BEYOND_ONNX_RUNTIME: dict[Format, ElementType] = {
    FLOAT4_E2M1FN: ElementType("FLOAT4E2M1", 4, 23, integer=False),
    FLOAT6_E2M3FN: ElementType("FLOAT6E2M3", 6, 28, integer=False),
    FLOAT6_E3M2FN: ElementType("FLOAT6E3M2", 6, 28, integer=False),
}
_E8M0 = ElementType("FLOAT8E8M0", 8, 24, integer=False)
_EXPONENT = ElementType("UINT8", 8, 13)
"""The type of the exponents for TensorRT's MXFP8 operators, which take the bits of E8M0."""
_INTEGERS: dict[IntegerFormat, ElementType] = {
    IntegerFormat.of(bits, signed=signed): ElementType(f"{'' if signed else 'U'}INT{bits}", bits, opset)
    for bits, opset in ((4, 21), (8, 13), (16, 21))
    for signed in (True, False)
}


@dataclass(frozen=True)
class Encoding:
    """The storage of a format's codes.

    Attributes:
        element: the element type.
        clips: whether the type has more codes than the format, so values must be clipped first.
        portable: whether QuantizeLinear cannot write the format. Then other operators round activations, and Gather
            looks up the values of a weight's codes in a table.
        scale: the element type of the scales, or of the scales' codes if there is a second level; None for float32.
        guarded: whether to put a Sum of one tensor before QuantizeLinear and after DequantizeLinear. The default
            optimisations of ONNX Runtime (1.31) fuse float8 there as if it were int8: the file then needs operators
            that ONNX Runtime lacks and does not load, or loses a ReLU and gives other results.
    """

    element: ElementType
    clips: bool = False
    portable: bool = False
    scale: ElementType | None = None
    guarded: bool = False

    @property
    def powers(self) -> bool:
        """Whether QuantizeLinear and DequantizeLinear read scales in E8M0, powers of two."""
        return self.scale == _E8M0

    @property
    def has_zero_point(self) -> bool:
        """Whether a zero point declares the element type, as in opsets before `output_dtype`."""
        return self.scale is None and (self.element.integer or self.element.opset < BLOCKED_OPSET)

    def opset(self, *, constant: bool) -> int:
        """Return the first opset that supports the encoding, for constants or activations."""
        if self.scale is not None:
            return max(self.element.opset, self.scale.opset, BLOCKED_OPSET)
        return self.element.opset if constant or not self.portable else FIRST_OPSET


def encoding(fmt: Format, style: Style = Style.PORTABLE) -> Encoding:
    """Return the encoding with the smallest element type that holds all codes of a format.

    Raises:
        ExportError: the style has no such type.

    >>> from fakequant.numerics.formats import parse_format
    >>> encoding(parse_format("int8_narrow"))
    Encoding(element=ElementType(name='INT8', ...), clips=True, portable=False, scale=None, guarded=False)
    >>> encoding(parse_format("float6_e2m3fn")).portable
    True
    >>> encoding(parse_format("float6_e2m3fn"), Style.STANDARD).element.name
    'FLOAT6E2M3'
    """
    own_types = style is not Style.PORTABLE
    if found := _FLOATS.get(fmt) or (_FLOATS_BEYOND_ONNX_RUNTIME.get(fmt) if own_types else None):
        return Encoding(found, guarded=not own_types)
    if isinstance(fmt, IntegerFormat):
        for stored, element in _INTEGERS.items():
            # Unsigned codes use an unsigned type, even if a signed type of the same size could hold them.
            if stored.signed == fmt.signed and stored.low <= fmt.low and fmt.high <= stored.high:
                return Encoding(element, clips=stored != fmt)
    elif own_types:
        raise ExportError(
            f'the format {fmt} has no element type in ONNX; style="portable" computes it with other operators'
        )
    elif fmt.bits <= 8:
        return Encoding(_INTEGERS[IntegerFormat.of(4 if fmt.bits <= 4 else 8, signed=False)], portable=True)
    raise ExportError(
        f"the format {fmt} has no element type in ONNX that QuantizeLinear writes; use integers of at most 16 bits, "
        "or floats and tables of at most 8 bits"
    )


@dataclass(frozen=True)
class ScaleLayout:
    """The layout of a tensor's scales in ONNX.

    Attributes:
        axis: the axis of the scales; None for one scale per tensor.
        block_size: the number of elements of that axis that share a scale; 0 for one scale per index of the axis.
        repeats: how often each scale is repeated along every axis to get ONNX's shape from [groups per axis].
        symbolic: whether the number of scales is only known at run time.
    """

    axis: int | None = None
    block_size: int = 0
    repeats: tuple[int, ...] = ()
    symbolic: bool = False

    @property
    def opset(self) -> int:
        """The first opset that supports the layout; zero points of symbolic length need `output_dtype`, of opset 21."""
        return BLOCKED_OPSET if self.block_size or self.symbolic else FIRST_OPSET

    def __str__(self) -> str:
        if self.axis is None:
            return "per tensor"
        return f"blocks of {self.block_size} along axis {self.axis}" if self.block_size else f"axis {self.axis}"


def layout(
    shape: Sequence[Dimension], groups: Sequence[Dimension], blocks: Sequence[Dimension] | None = None
) -> ScaleLayout:
    """Return the layout for a tensor [shape] with scales [groups per axis].

    One scale per token of [batch, tokens, features] is one block of all features. Blocks along several axes become
    blocks along one axis, with each scale repeated along the others.

    Args:
        shape: the shape of the tensor.
        groups: the shape of the scales.
        blocks: the block size along every axis, from `block_sizes`; by default all blocks are full.

    Raises:
        ExportError: ONNX has no such layout.

    >>> layout((8, 3, 5, 5), (1, 3, 1, 1))
    ScaleLayout(axis=1, block_size=0, repeats=(), symbolic=False)
    >>> print(layout(("batch", 7, 64), ("batch", 7, 1)))
    blocks of 64 along axis 2
    """
    if blocks is None:
        pairs = list(zip(shape, groups, strict=True))
        if cut := [(n, g) for n, g in pairs if n != g != 1 and not (isinstance(n, int) and isinstance(g, int))]:
            n, g = cut[0]
            raise ExportError(
                f"an axis of symbolic length {n} is divided into {g} groups; export it with a static length, or use "
                "PerToken() or PerTensor()"
            )
        blocks = [1 if n == g else n if g == 1 else int(n) // int(g) for n, g in pairs]
    grouped = [axis for axis, g in enumerate(groups) if g != 1]
    if not grouped:
        return ScaleLayout()
    symbolic = any(isinstance(g, str) for g in groups)
    if len(grouped) == 1 and blocks[grouped[0]] == 1:
        return ScaleLayout(grouped[0], symbolic=symbolic)
    sizes = [b if isinstance(b, int) else 0 for b in blocks]
    axis = max(range(len(sizes)), key=lambda i: (sizes[i], i))
    repeats = [1 if i == axis else b for i, b in enumerate(blocks)]
    if any(not isinstance(b, int) for b in repeats) or not sizes[axis]:
        raise ExportError(
            f"scales of shape {_text(groups)} on a tensor of shape {_text(shape)}: ONNX has scales per tensor, along "
            "one axis, or per block of one axis whose length is known; choose one of these granularities, or make the "
            "other axes static"
        )
    return ScaleLayout(axis, sizes[axis], tuple(int(b) for b in repeats), symbolic)


def block_sizes(granularity: Granularity, shape: Sequence[Dimension]) -> list[Dimension]:
    """Return the block size of a granularity along every axis, at most the length of the axis.

    Raises:
        ExportError: blocks divide an axis of symbolic length.

    >>> block_sizes(PerBlock({-1: 32}, pad=True), ("batch", 40)), block_sizes(PerBlock({-1: 32}, pad=True), (3, 20))
    ([1, 32], [1, 20])
    """
    if isinstance(granularity, PerBlock):
        _refuse_symbolic([(shape[axis], size) for axis, size in granularity.sizes])
    try:
        # The granularities of this package read only the lengths of the axes that they divide.
        blocks: Sequence[Dimension] = granularity.block_shape(shape)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ExportError(
            f"{granularity} needs static axes, got {_text(shape)}; export without dynamic_shapes"
        ) from error
    _refuse_symbolic([(n, b) for n, b in zip(shape, blocks, strict=True) if isinstance(b, int) and b != 1])
    return [min(b, n) if isinstance(b, int) and isinstance(n, int) else b for b, n in zip(blocks, shape, strict=True)]


def _refuse_symbolic(blocks: Sequence[tuple[Dimension, int]]) -> None:
    """Raise ExportError for the first axis of symbolic length that blocks divide."""
    for n, size in blocks:
        if isinstance(n, str):
            raise ExportError(
                f"an axis of symbolic length {n} is divided into blocks of {size}; export it with a static length, or "
                "use PerToken() or PerTensor()"
            )


def _text(shape: Sequence[Dimension]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def overflows(element: ElementType, where: ScaleLayout, axes: int) -> bool:
    """Whether ONNX Runtime may round inf, and values beyond 2**31 steps, to the lowest instead of the highest code.

    Its CPU kernels for 4-bit integers, and for blocks along any axis except the last, convert to int32 before they
    saturate (seen in 1.31). The exporter then clips the values first.
    """
    return element.integer and (element.bits == 4 or (where.block_size > 0 and where.axis != axes - 1))


def check_spec(spec: QuantSpec, style: Style = Style.PORTABLE) -> Encoding:
    """Return the encoding of a specification, which does not depend on the tensor.

    Raises:
        ExportError: ONNX cannot express the specification exactly.
    """
    if spec.arithmetic.has_two_scales:
        raise ExportError(
            f"{spec}: the codes are made by another scale than they are decoded by, and ONNX has one scale for both; "
            "prepare the model with Arithmetic.DIVIDE (or RECIPROCAL), or deliver the model as GGUF"
        )
    if spec.arithmetic is Arithmetic.MULTIPLIER:
        raise ExportError(
            f"{spec}: the multiplier arithmetic divides codes by the multiplier and keeps the sign of zero, which "
            "DequantizeLinear cannot; prepare the model with Arithmetic.DIVIDE (or RECIPROCAL)"
        )
    if spec.rounding is Rounding.STOCHASTIC:
        raise ExportError(
            f"{spec}: stochastic rounding draws other codes in every run, which QuantizeLinear cannot; set "
            "quantizer.spec = quantizer.spec.replace(rounding=Rounding.NEAREST_EVEN) and export again"
        )
    if spec.offset is not None:
        raise ExportError(
            f"{spec}: ONNX has zero points, which are codes, but no offsets in units of x; use a zero point (leave "
            f"{spec.offset} out), or deliver the model in a format that has offsets, such as GGUF"
        )
    if spec.scale.rounding is ScaleRounding.SIGNED:
        raise ExportError(
            f"{spec}: scales of ONNX are positive, but {spec.scale} has signs; use an unsigned format of "
            "scales without the rule 'signed', or deliver the model in a format whose scales have signs, such as GGUF"
        )
    codes, fmt = encoding(spec.format, style), spec.scale.format
    # Exact scales without a second level are float32 numbers.
    if style is Style.PORTABLE or fmt is None or (spec.scale.is_exact and spec.scale.granularity is None):
        return codes
    powers = _E8M0 if style is Style.STANDARD else _EXPONENT
    return replace(codes, scale=powers if fmt == FLOAT8_E8M0FNU else encoding(fmt, style).element)


def check_choice(spec: QuantSpec) -> None:
    """Check that a graph can compute the scales of a specification from the range of a tensor.

    Raises:
        ExportError: the graph cannot compute the scales.
    """
    scale = spec.scale
    if scale.is_exact or scale.needs_values:
        raise ExportError(
            f"{spec}: the file cannot compute {scale} scales from each input; calibrate the quantizer, or use them for "
            "weights only"
        )


def check_scale(scale: Tensor, spec: QuantSpec, style: Style = Style.PORTABLE) -> None:
    """Check constant scales, because ONNX Runtime does not check them and returns wrong codes for invalid scales.

    Raises:
        ExportError: a scale is neither a positive normal number nor the smallest value of the scale format; or a scale
        to be stored in E8M0 is not a power of two.
    """
    # 2**-127, the smallest scale of OCP Microscaling, is subnormal but has a finite reciprocal.
    if spec.scale.is_exact:
        _require(scale > 0, scale, "positive numbers: all values of a group are 0; use scales in float32, never 0")
    smallest = 0.0 if spec.scale.format is None else spec.scale.format.grid.quant_min
    good = scale.isfinite() & ((scale >= torch.finfo(torch.float32).tiny) | ((scale == smallest) & (scale > 0)))
    _require(good, scale, "positive normal float32 numbers; calibrate it again")
    if spec.scale.format == FLOAT8_E8M0FNU and style is not Style.PORTABLE:
        kind = f'powers of two, as {spec.scale.format} has them; calibrate it again, or use style="portable"'
        _require(torch.frexp(scale)[0] == 0.5, scale, kind)


def _require(good: Tensor, scale: Tensor, expected: str) -> None:
    if not bool(good.all()):
        raise ExportError(f"has the scale {scale[~good].flatten()[0].item()}, expected {expected}")


def check_opset(opset: int | None, needed: int, subject: str) -> int:
    """Return the opset to write: the requested opset, or the smallest that suffices.

    Args:
        opset: the requested opset, or None.
        needed: the first opset that supports everything in the model.
        subject: the quantizer that needs it, for the message.

    Raises:
        ExportError: the requested opset is too old, or the exporter does not write it.
    """
    if opset is None:
        return max(needed, DEFAULT_OPSET)
    last = max(LAST_OPSET, needed)
    if not FIRST_OPSET <= opset <= last:
        raise ExportError(f"opset={opset}: expected {FIRST_OPSET} to {last}, or None to choose by the formats")
    if opset < needed:
        raise ExportError(f"opset={opset} is too old: {subject} needs {needed} or newer; leave opset=None to choose it")
    return opset
