"""One quantizer of an exported file against torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fakequant.errors import FakeQuantError, ShapeError, SpecError, VerificationError
from fakequant.export.graph import GraphEditor
from fakequant.export.record import Parameters, SiteRecord, digest
from fakequant.export.runtime import element_types, first_line
from fakequant.export.verdict import Row, differing_bits
from fakequant.functional import choose_qparams, fake_quantize
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics import reference
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library

if TYPE_CHECKING:
    from onnx import ModelProto


# What torch, numpy and this package raise for constants whose shapes or types do not fit each other.
_UNFIT = (RuntimeError, ValueError, TypeError, LookupError, FakeQuantError)


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
        try:
            self._spec = QuantSpec.parse(record.spec)
        except SpecError as error:
            raise VerificationError(f"its record of quantizers is damaged: {error}; export it again") from error
        self._constants = GraphEditor(file.graph)
        self._model = model
        self._quantizer = None if model is None else _quantizer(model, record.quantizer)
        if missing := [name for name in _needed(record, self._spec) if not self._constants.is_constant(name)]:
            raise VerificationError(
                f"the constants {', '.join(missing)} are missing: the file was changed after export"
            )
        found = digest(self._constants.constant(name) for name in record.constants)
        kind = "weight" if record.codes else "activation"
        self.row = Row(record.quantizer, record.spec, kind, intact=found == record.digest)
        self._x = record.x if record.codes else _as_read(file, record.x)
        self._weight = None if model is None or not record.codes else _tensor(model, record.x)

    @property
    def computed(self) -> str | None:
        """The path of the quantizer whose calls tell a constant that the model has by no name; None for all else."""
        asked = self._record.codes is not None and self._quantizer is not None and self._weight is None
        return self._record.quantizer if asked else None

    @property
    def watched(self) -> list[str]:
        """The tensors of the file that `compare` needs."""
        record = self._record
        if record.codes:
            return [record.y]
        computed = record.parameters is Parameters.COMPUTED
        return [
            self._x,
            record.y,
            *([record.scale, *([record.zero_point] if record.zero_point else [])] if computed else []),
        ]

    @property
    def step(self) -> float | None:
        """The largest constant scale of an integer activation."""
        if self._record.codes or self._record.parameters is not Parameters.CONSTANT:
            return None
        with self._fitting():
            scale = self._constants.tensor(self._record.scale)
            return scale.max().item() if isinstance(self._spec.format, IntegerFormat) and scale.numel() else None

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """A context in which constants that do not fit each other are the file's fault, or the model's."""
        try:
            yield
        except VerificationError:
            raise
        except _UNFIT as error:
            raise VerificationError(
                f"{self._record.quantizer or 'the model'}: what was exported does not fit: {first_line(error)}; give "
                "the model that was exported, or export it again"
            ) from error

    def compare(self, values: Mapping[str, Tensor], calls: Mapping[str, Sequence[Tensor]]) -> None:
        """Count one batch.

        Args:
            values: the watched tensors as they were computed.
            calls: what the model's quantizers were called with, by path, where `computed` asks for it.

        Raises:
            VerificationError: shapes or dtypes show that the model is another one.
        """
        actual = values[self._record.y]
        if self._record.codes and self.row.elements:  # a weight is the same in every batch
            return
        with self._fitting():
            expected = self._expected_weight(actual, calls) if self._record.codes else self._expected(values)
        if not self._record.codes:
            self.row.nan_inputs += int(values[self._x].isnan().sum())
            expected = expected if self._x == self._record.x else expected.to(actual.dtype)
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            raise VerificationError(
                f"{self._record.quantizer or 'the model'} gives {actual.dtype} {list(actual.shape)} in the file and "
                f"{expected.dtype} {list(expected.shape)} in torch; the model is not the one that was exported"
            )
        self.row.elements += actual.numel()
        self.row.differing += differing_bits(actual, expected)

    def _expected(self, values: Mapping[str, Tensor]) -> Tensor:
        record = self._record
        x = values[self._x]
        spec = self._spec if self._quantizer is None else self._quantizer.spec
        if self._quantizer is not None:
            params = self._quantizer.qparams(x)
        elif record.parameters is Parameters.CONSTANT:
            params = self._file_parameters()
        elif record.parameters is Parameters.DYNAMIC:
            params = choose_qparams(x, spec)
        else:
            params = QParams(values[record.scale], values[record.zero_point] if record.zero_point else None)
        if self._quantizer is not None:
            return library.fake_quantize(x, params, spec)
        # A file may say anything: here parameters are checked.
        return fake_quantize(x, spec, scale=params.scale, zero_point=params.zero_point)

    def _expected_weight(self, actual: Tensor, calls: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """What torch makes of a weight; of those that a quantizer was called with, the one that is nearest."""
        quantizer, codes = self._quantizer, self._record.codes
        assert codes is not None
        if quantizer is None:
            dtype = torch.float32 if self._weight is None else self._weight.dtype
            stored, params = self._codes(codes), self._file_parameters()
            if params.scale.shape != self._spec.granularity.group_shape(stored.shape):
                raise ShapeError(f"scales of shape {list(params.scale.shape)} for codes of shape {list(stored.shape)}")
            return reference.dequantize(stored, params, self._spec, dtype)
        found = calls.get(self._record.quantizer, ()) if self._weight is None else (self._weight,)
        fitting = [x for x in found if (x.shape, x.dtype) == (actual.shape, actual.dtype)] or list(found)
        if not fitting:
            raise VerificationError(
                f"the file has a constant {self._record.x}, which is no parameter or buffer of the model, and its "
                f"quantizer {self._record.quantizer} was not called with one; give the model that was exported"
            )
        made = [library.fake_quantize(x, quantizer.qparams(x), quantizer.spec).detach() for x in fitting]
        return made[0] if len(made) == 1 else min(made, key=lambda y: _distance(actual, y))

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
        if granularity is None:
            raise VerificationError(f"{self._spec} has no scales of scales, but the file has {name}; export it again")
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


def _as_read(file: ModelProto, x: str) -> str:
    """The name of what a quantizer reads: of a float16 tensor, its cast to float32.

    ONNX Runtime computes much of float16 in float32, with casts of its own, and leaves out those that cancel with the
    casts of the file, also without optimisations (1.31). The quantizer then reads numbers that were not yet rounded.
    """
    from onnx import TensorProto

    if element_types(file).get(x) != TensorProto.FLOAT16:
        return x
    casts = (node for node in file.graph.node if node.op_type == "Cast" and node.input[0] == x)
    found = (node.output[0] for node in casts if any(a.i == TensorProto.FLOAT for a in node.attribute))
    return next(found, x)


def _needed(record: SiteRecord, spec: QuantSpec) -> list[str]:
    """The constants that a file must have."""
    needed = list(record.constants)
    if record.parameters is Parameters.CONSTANT or record.codes:
        zero_point = None if spec.symmetric else str(record.zero_point)
        needed += [
            name for name in (record.codes, record.scale, record.scale_of_scales, zero_point) if name is not None
        ]
    return list(dict.fromkeys(needed))


def _quantizer(model: nn.Module, path: str) -> Quantizer | None:
    """The quantizer at a path; None where a module of the user's calls `fake_quantize` itself."""
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise VerificationError(
            f"the file has a quantizer {path}, which the model lacks; give the model that was exported"
        ) from error
    return module if isinstance(module, Quantizer) else None


def _tensor(model: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of a name; None for a tensor that the model computes."""
    for known, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if known == name:
            return tensor.detach()
    return None


def _distance(actual: Tensor, expected: Tensor) -> int:
    same = (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    return differing_bits(actual, expected) if same else actual.numel() + 1


@contextmanager
def recorded_calls(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, list[Tensor]]]:
    """A context that collects what quantizers of a model are called with, by path."""
    calls: dict[str, list[Tensor]] = {path: [] for path in paths}
    hooks = []
    try:
        for path, found in calls.items():

            def keep(_: nn.Module, given: tuple[Tensor, ...], found: list[Tensor] = found) -> None:
                found.append(given[0].detach().clone())

            hooks.append(model.get_submodule(path).register_forward_pre_hook(keep))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
