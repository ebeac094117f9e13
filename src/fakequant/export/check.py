"""One quantizer of an exported file against torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fakequant.errors import VerificationError
from fakequant.export.graph import GraphEditor
from fakequant.export.record import Parameters, SiteRecord, digest
from fakequant.export.verdict import Row, differing_bits
from fakequant.functional import choose_qparams
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics import reference
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

if TYPE_CHECKING:
    from onnx import ModelProto


class SiteCheck:
    """Compares what was computed for one quantizer of a file with what torch computes from the same tensor.

    Args:
        file: the exported model.
        record: what it says of the quantizer.
        model: the torch model whose parameters are taken; without it those of the file.

    Raises:
        VerificationError: the file lacks a constant, or the model lacks the quantizer.
    """

    def __init__(self, file: ModelProto, record: SiteRecord, model: nn.Module | None) -> None:
        self._record = record
        self._spec = QuantSpec.parse(record.spec)
        self._constants = GraphEditor(file.graph)
        self._model = model
        self._quantizer = None if model is None else _quantizer(model, record.quantizer)
        if missing := [name for name in record.constants if not self._constants.is_constant(name)]:
            raise VerificationError(
                f"the constants {', '.join(missing)} are missing: the file was changed after export"
            )
        found = digest(self._constants.constant(name) for name in record.constants)
        kind = "weight" if record.codes else "activation"
        self.row = Row(record.quantizer, record.spec, kind, intact=found == record.digest)
        # A weight is the same in every batch.
        self._weight = self._expected_weight() if record.codes else None

    @property
    def watched(self) -> list[str]:
        """The tensors of the file that `compare` needs."""
        record = self._record
        if record.codes:
            return [record.y]
        computed = record.parameters is Parameters.COMPUTED
        return [
            record.x,
            record.y,
            *([record.scale, *([record.zero_point] if record.zero_point else [])] if computed else []),
        ]

    @property
    def step(self) -> float | None:
        """The largest constant scale of an integer activation."""
        if self._record.codes or self._record.parameters is not Parameters.CONSTANT:
            return None
        scale = self._constants.tensor(self._record.scale)
        return scale.max().item() if isinstance(self._spec.format, IntegerFormat) and scale.numel() else None

    def compare(self, values: Mapping[str, Tensor]) -> None:
        """Count one batch, given the watched tensors as they were computed.

        Raises:
            VerificationError: shapes or dtypes show that the model is another one.
        """
        actual = values[self._record.y]
        if self._weight is not None:
            if self.row.elements:
                return
            expected = self._weight
        else:
            expected = self._expected(values)
            self.row.nan_inputs += int(values[self._record.x].isnan().sum())
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            raise VerificationError(
                f"{self._record.quantizer or 'the model'} gives {actual.dtype} {list(actual.shape)} in the file and "
                f"{expected.dtype} {list(expected.shape)} in torch; the model is not the one that was exported"
            )
        self.row.elements += actual.numel()
        self.row.differing += differing_bits(actual, expected)

    def _expected(self, values: Mapping[str, Tensor]) -> Tensor:
        record = self._record
        x = values[record.x]
        spec = self._spec if self._quantizer is None else self._quantizer.spec
        if self._quantizer is not None:
            params = self._quantizer.qparams(x)
        elif record.parameters is Parameters.CONSTANT:
            params = self._file_parameters()
        elif record.parameters is Parameters.DYNAMIC:
            params = choose_qparams(x, spec)
        else:
            params = QParams(values[record.scale], values[record.zero_point] if record.zero_point else None)
        return library.fake_quantize(x, params, spec)

    def _expected_weight(self) -> Tensor:
        weight = None if self._model is None else _tensor(self._model, self._record.x)
        if weight is not None and self._quantizer is not None:
            return library.fake_quantize(weight, self._quantizer.qparams(weight), self._quantizer.spec).detach()
        assert self._record.codes is not None
        dtype = torch.float32 if weight is None else weight.dtype
        return reference.dequantize(self._codes(self._record.codes), self._file_parameters(), self._spec, dtype)

    def _codes(self, name: str) -> Tensor:
        """Codes of the file in the dtype in which `fakequant.quantize` gives them."""
        from onnx import TensorProto

        fmt, codes = self._spec.format, self._constants.tensor(name)
        if isinstance(fmt, IntegerFormat):
            return codes.to(fmt.storage)
        if self._constants.type(name) in (TensorProto.UINT4, TensorProto.UINT8):  # bit patterns
            return codes.to(torch.uint8).view(fmt.storage)
        return fmt.to_storage(codes)

    def _file_parameters(self) -> QParams:
        scale = self._in_groups(self._record.scale)
        if self._record.scale_of_scales is not None:
            scale = scale.float() * self._shared(self._record.scale_of_scales, scale.shape)
        elif scale.dtype == torch.uint8:  # the bits of E8M0, as TensorRT takes them
            scale = scale.view(torch.float8_e8m0fnu).float()
        return QParams(scale, None if self._spec.symmetric else self._in_groups(str(self._record.zero_point)))

    def _shared(self, name: str, shape: torch.Size) -> Tensor:
        """What the codes of scales [shape] are multiplied by, repeated where it does not broadcast."""
        values, granularity = self._constants.tensor(name), self._spec.scale.granularity
        assert granularity is not None
        for axis, block in enumerate(granularity.block_shape(shape) if values.dim() else ()):
            if values.shape[axis] not in (1, shape[axis]):
                values = values.index_select(axis, torch.arange(shape[axis], device=values.device) // block)
        return values

    def _in_groups(self, name: str) -> Tensor:
        """A constant of the file as [groups, axes kept]."""
        values = self._constants.tensor(name)
        for axis, count in enumerate(self._record.repeats):
            values = values[(slice(None),) * axis + (slice(None, None, count),)]
        return values.reshape(self._record.groups)


def _quantizer(model: nn.Module, path: str) -> Quantizer | None:
    """The quantizer at a path; None where a module of the user's calls `fake_quantize` itself."""
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise VerificationError(
            f"the file has a quantizer {path}, which the model lacks; give the model that was exported"
        ) from error
    return module if isinstance(module, Quantizer) else None


def _tensor(model: nn.Module, name: str) -> Tensor:
    for known, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if known == name:
            return tensor.detach()
    raise VerificationError(f"the file has a weight {name}, which the model lacks; give the model that was exported")
