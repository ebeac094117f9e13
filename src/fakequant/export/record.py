"""The record of quantizers and inputs in an exported file, stored as JSON in the model's metadata."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from fakequant.errors import VerificationError
from fakequant.export.style import Style

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_KEY = "fakequant"
_LAYOUT_VERSION = 1
_MOST_AXES = 64
"""The maximum for numpy arrays."""
_LONGEST = 2**31
"""The bound of an axis length, because an ONNX file holds less than 2 GB."""

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
    """They are constants in the file."""
    DYNAMIC = "dynamic"
    """The graph computes them from the range of the tensor."""
    COMPUTED = "computed"
    """The graph computes them in another way."""


@dataclass(frozen=True)
class SiteRecord:
    """One quantizer in the file: the nodes of an activation, or the codes and nodes of a weight.

    Attributes:
        quantizer: path of the quantizer in the model; "" if the model itself quantizes.
        spec: the specification, as text.
        expressed: a description of the ONNX nodes.
        x: name of the quantized tensor; for a weight the name of the parameter.
        y: name of the result.
        parameters: the source of scale and zero point.
        scale: name of the scale, [groups, axes kept] if computed, in ONNX's shape if constant.
        zero_point: name of the zero point, in the same shape; None if there is none.
        codes: name of a weight's codes; None for activations.
        groups: shape of constant scales [groups, axes kept].
        repeats: how often a scale is repeated along every axis in the file.
        digest: SHA-256 of the constants.
        constants: names of the constants.
        scale_of_scales: name of the factor of the scale's codes; None if `scale` is the scale itself.
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

    def seen_as(self, x: str, y: str) -> SiteRecord:
        """The same quantizer, whose tensors of all steps have these names."""
        return replace(self, x=x, y=y)


@dataclass(frozen=True)
class InputRecord:
    """One input of the model: name, shape, torch dtype and range of the example.

    `key` is its keyword, if any, and `state` the path of the buffer that it is, if any.
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
    """The whole record of a file."""

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
        values = _Values(json.loads(text))
        if (layout := values.whole("layout", _LONGEST)) != _LAYOUT_VERSION:
            raise VerificationError(
                f"has a record of layout {layout}, this version reads {_LAYOUT_VERSION}; export it again"
            )
        return FileRecord(
            values.text("version"),
            Style(values.text("style")),
            [_site(_Values(site)) for site in values.items("sites")],
            [_input(_Values(entry)) for entry in values.items("inputs")],
        )
    except (ValueError, KeyError, RecursionError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise VerificationError(f"its record of quantizers is damaged: {what}; export it again") from error


class _Values:
    """A JSON object with typed access to its values.

    Raises:
        ValueError: not a JSON object, or a value has another type or is too large.
        KeyError: a value is missing.
    """

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"an object was expected, got {values!r:.40}")
        self._values = values

    def text(self, key: str) -> str:
        value = str(self._of_type(key, str, "text"))
        value.encode()  # raises for lone surrogates, which no name in a file can have
        return value

    def text_or_none(self, key: str) -> str | None:
        return None if self._values.get(key) is None else self.text(key)

    def items(self, key: str) -> list[Any]:
        return list(self._of_type(key, list, "a list"))

    def texts(self, key: str) -> list[str]:
        return [_Values({key: item}).text(key) for item in self.items(key)]

    def number(self, key: str) -> float:
        value = self._of_type(key, (int, float), "a number")
        if isinstance(value, bool) or not abs(value) < math.inf:
            raise ValueError(f"{key} is {value!r}, expected a finite number")
        return float(value)

    def whole(self, key: str, beyond: int, least: int = 0) -> int:
        value = self._of_type(key, int, "a whole number")
        if isinstance(value, bool) or not least <= value < beyond:
            raise ValueError(f"{key} is {value!r:.40}, expected {least} to {beyond - 1}")
        return int(value)

    def lengths(self, key: str, least: int = 0) -> list[int]:
        """Return the lengths of a tensor's axes."""
        items = self.items(key)
        if len(items) > _MOST_AXES:
            raise ValueError(f"{key} has {len(items)} axes, expected at most {_MOST_AXES}")
        return [_Values({key: item}).whole(key, _LONGEST, least) for item in items]

    def _of_type(self, key: str, kind: type | tuple[type, ...], words: str) -> Any:
        value = self._values[key]
        if not isinstance(value, kind):
            raise ValueError(f"{key} is {value!r:.40}, expected {words}")
        return value


def _site(values: _Values) -> SiteRecord:
    return SiteRecord(
        quantizer=values.text("quantizer"),
        spec=values.text("spec"),
        expressed=values.text("expressed"),
        x=values.text("x"),
        y=values.text("y"),
        parameters=Parameters(values.text("parameters")),
        scale=values.text("scale"),
        zero_point=values.text_or_none("zero_point"),
        codes=values.text_or_none("codes"),
        groups=values.lengths("groups"),
        repeats=values.lengths("repeats", least=1),
        constants=values.texts("constants"),
        digest=values.text("digest"),
        scale_of_scales=values.text_or_none("scale_of_scales"),
    )


def _input(values: _Values) -> InputRecord:
    if (dtype := values.text("dtype")) not in INPUT_DTYPES:
        raise ValueError(f"dtype is {dtype!r:.40}, expected one of {', '.join(INPUT_DTYPES)}")
    low, high = values.number("low"), values.number("high")
    key, state = values.text_or_none("key"), values.text_or_none("state")
    return InputRecord(values.text("name"), values.lengths("shape"), dtype, low, high, key, state)
