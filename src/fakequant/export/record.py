"""What an exported file says about itself: its quantizers and inputs, as JSON in the model's metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from fakequant.errors import VerificationError
from fakequant.export.style import Style

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

_KEY = "fakequant"
_LAYOUT_VERSION = 1


class Parameters(str, Enum):
    """Where scale and zero point of a quantized tensor come from."""

    CONSTANT = "constant"
    """They are in the file."""
    DYNAMIC = "dynamic"
    """The graph computes them from the range of the tensor itself."""
    COMPUTED = "computed"
    """The graph computes them in another way."""


@dataclass(frozen=True)
class SiteRecord:
    """One QuantizeLinear and DequantizeLinear, or one DequantizeLinear of a folded weight.

    Attributes:
        quantizer: path of the quantizer in the model; "" if the model itself quantizes.
        spec: the specification, as text.
        expressed: in words, how ONNX says it.
        x: the tensor that is quantized; for a folded weight the name of the parameter.
        y: the result.
        parameters: where scale and zero point come from.
        scale: name of the scale, [groups, axes kept] if computed, in ONNX's shape if constant.
        zero_point: name of the zero point, likewise; None if there is none.
        codes: name of a folded weight's codes; None for activations.
        groups: shape of constant scales [groups, axes kept].
        repeats: how often each is repeated along every axis in the file.
        digest: SHA-256 of the constants.
        constants: their names.
        scale_of_scales: name of what the codes of scales are multiplied by; None where `scale` is the scale itself.
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


@dataclass(frozen=True)
class InputRecord:
    """One input of the model: name, shape, torch dtype and range of the example; `key` where it was given by name."""

    name: str
    shape: list[int]
    dtype: str
    low: float
    high: float
    key: str | None = None


@dataclass(frozen=True)
class FileRecord:
    """All that a file says about itself."""

    version: str
    style: Style
    sites: list[SiteRecord]
    inputs: list[InputRecord]


def digest(tensors: Iterable[TensorProto]) -> str:
    """SHA-256 over types, shapes and contents."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.data_type, list(tensor.dims))).encode())
        found.update(tensor.raw_data)
    return found.hexdigest()


def write(model: ModelProto, record: FileRecord) -> None:
    """Put the record into the model's metadata."""
    del model.metadata_props[:]
    model.metadata_props.add(key=_KEY, value=json.dumps({"layout": _LAYOUT_VERSION, **asdict(record)}))


def read(model: ModelProto) -> FileRecord:
    """The record of a model.

    Raises:
        VerificationError: it has none, or one of another version of this package's layout.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == _KEY), None)
    if text is None:
        raise VerificationError("not written by fakequant.export_onnx: it has no record of quantizers")
    try:
        values: dict[str, Any] = json.loads(text)
        if values["layout"] != _LAYOUT_VERSION:
            raise VerificationError(
                f"has a record of layout {values['layout']}, this version reads {_LAYOUT_VERSION}; export it again"
            )
        return FileRecord(
            values["version"],
            Style(values["style"]),
            [SiteRecord(**{**site, "parameters": Parameters(site["parameters"])}) for site in values["sites"]],
            [InputRecord(**entry) for entry in values["inputs"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise VerificationError(f"its record of quantizers is damaged: {error}; export it again") from error
