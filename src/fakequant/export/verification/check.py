"""Compare one quantizer of an exported file with torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fakequant.errors import FakeQuantError, ShapeError, SpecError, VerificationError
from fakequant.export.capability import Parameters, SiteRecord, Style, digest
from fakequant.export.inputs import GraphEditor, names_read
from fakequant.export.verification.verdict import (
    DEFAULT,
    WITHOUT_OPTIMISATIONS,
    OutputRow,
    Row,
    Session,
    SessionOptions,
    VerifyReport,
    add_rows,
    differing_bits,
    element_types,
    first_line,
)
from fakequant.functional import choose_qparams, fake_quantize
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics import reference
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.text import module_name

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

# The errors of torch, numpy and this package for constants whose shapes or types do not fit each other.
_UNFIT = (RuntimeError, ValueError, TypeError, LookupError, FakeQuantError)


class Source:
    """Look-up tables for the checks of all quantizers, made once.

    Args:
        file: the exported model.
        model: the torch model that provides the parameters; if None, the file provides them.

    Attributes:
        constants: the constants of the file.
        read_as: the name of the tensor that a quantizer of a float16 tensor reads: its cast to float32.
        names: of all tensors of the file.
        modules: the model's modules by path.
        tensors: the model's parameters and buffers by name.

    ONNX Runtime inserts its own casts to compute float16 in float32, and removes them where they cancel with casts of
    the file, even without optimisations (1.31). The quantizer then reads values before their rounding to float16.
    """

    def __init__(self, file: ModelProto, model: nn.Module | None) -> None:
        from onnx import TensorProto

        self.constants = GraphEditor(file.graph)
        self.has_model = model is not None
        types = element_types(file)
        casts = [node for node in reversed(file.graph.node) if node.op_type == "Cast"]
        self.read_as = {
            node.input[0]: node.output[0]
            for node in casts
            if types.get(node.input[0]) == TensorProto.FLOAT16 and any(a.i == TensorProto.FLOAT for a in node.attribute)
        }
        made = {name for node in file.graph.node for name in node.output}
        self.names = made | {value.name for value in (*file.graph.input, *file.graph.initializer)}
        self.modules = {} if model is None else dict(model.named_modules(remove_duplicate=False))
        named = () if model is None else (model.named_buffers, model.named_parameters)
        self.tensors = {name: x.detach() for of in named for name, x in of(remove_duplicate=False)}


class SiteCheck:
    """Compares the results of one quantizer in a file with those of torch for the same tensor.

    Raises:
        VerificationError: the file lacks a constant, or the model lacks the quantizer.
    """

    def __init__(self, source: Source, record: SiteRecord) -> None:
        self.record = record
        try:
            self._spec = QuantSpec.parse(record.spec)
        except SpecError as error:
            raise VerificationError(f"its record of quantizers is damaged: {error}; export it again") from error
        self._constants = source.constants
        if source.has_model and record.quantizer not in source.modules:
            raise VerificationError(
                f"the file has a quantizer {record.quantizer}, which the model lacks; pass the model that was exported"
            )
        module = source.modules.get(record.quantizer)
        self._quantizer = module if isinstance(module, Quantizer) else None  # else it calls `fake_quantize` itself
        held = () if self._quantizer is None else self._quantizer.state_dict().values()
        self._is_compared = False
        self._device = next((x.device for x in held if isinstance(x, Tensor)), torch.device("cpu"))
        needed = list(record.constants)
        if record.parameters is Parameters.CONSTANT or record.codes:
            point = None if self._spec.symmetric else str(record.zero_point)
            named = (record.codes, record.scale, record.scale_of_scales, point)
            needed += [name for name in named if name is not None]
        if missing := [name for name in dict.fromkeys(needed) if not self._constants.is_constant(name)]:
            raise VerificationError(
                f"the constants {', '.join(missing)} are missing: the file was changed after export"
            )
        read = [record.y] if record.codes else [record.x, record.y]
        if lost := [name for name in read if name not in source.names]:
            raise VerificationError(
                f"its record names the tensor {lost[0]}, which the file lacks: a tool changed the file after export; "
                "verify the file that export_onnx wrote"
            )
        intact = record.digest == digest(self._constants.constant(name) for name in record.constants)
        kind = "weight" if record.codes else "activation"
        self.row = Row(record.quantizer, record.spec, kind, intact=intact)
        self._x = record.x if record.codes else source.read_as.get(record.x, record.x)
        self._weight = source.tensors.get(record.x) if record.codes else None

    @property
    def is_computed(self) -> bool:
        """Whether the weight is one that the model computes, which only the calls of the quantizer reveal."""
        return self.record.codes is not None and self._quantizer is not None and self._weight is None

    @property
    def watched(self) -> list[str]:
        """Names of the file's tensors that `compare` needs."""
        record = self.record
        if record.codes:
            return [record.y]
        params = [record.scale, record.zero_point] if record.parameters is Parameters.COMPUTED else []
        return [self._x, record.y, *(name for name in params if name)]

    @property
    def step(self) -> float | None:
        """The largest constant scale of an integer activation."""
        if self.record.codes or self.record.parameters is not Parameters.CONSTANT:
            return None
        with self._fitting():
            scale = self._constants.tensor(self.record.scale)
            return scale.max().item() if isinstance(self._spec.format, IntegerFormat) and scale.numel() else None

    @property
    def limits(self) -> list[Tensor]:
        """The smallest and the largest result of an activation with one constant scale; else none."""
        if self.record.parameters is not Parameters.CONSTANT or math.prod(self.record.groups) != 1:
            return []
        with self._fitting():
            params, most = self._file_parameters(), torch.finfo(torch.float32).max
            scale, zero_point = (None if p is None else p.reshape(()) for p in (params.scale, params.zero_point))
            ends = torch.tensor([-most, most], dtype=torch.float32, device="cpu")
            return list(fake_quantize(ends, self._spec, scale=scale, zero_point=zero_point))

    @property
    def elements(self) -> int:
        """The number of a weight's codes."""
        return math.prod(self._constants.constant(str(self.record.codes)).dims)

    def moved(self, generator: torch.Generator) -> Tensor:
        """Return a weight, moved by the errors of other values of its size: as far as one that was not yet rounded."""
        with self._fitting():
            weight, params = self._file_weight(torch.float32), self._file_parameters()
            others = weight * (1 - torch.rand(weight.shape, generator=generator, device="cpu") / 2)
            rounded = fake_quantize(others, self._spec, scale=params.scale, zero_point=params.zero_point)
            return weight + rounded - others

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Report errors from constants that do not fit each other as a fault of the file or of the model."""
        try:
            yield
        except VerificationError:
            raise
        except _UNFIT as error:
            raise VerificationError(
                f"{module_name(self.record.quantizer)}: the exported constants do not fit: {first_line(error)}; "
                "pass the model that was exported, or export it again"
            ) from error

    def compare(self, values: Mapping[str, Tensor]) -> None:
        """Compare the results in the file with torch's for the input in the file, and add them to the counts.

        Raises:
            VerificationError: the shapes or dtypes belong to another model.
        """
        if self.is_computed or (self.record.codes and self.row.elements):  # a weight is the same in every batch
            return
        actual = values[self.record.y]
        with self._fitting():
            if not self.record.codes:
                expected = self._expected(values)
            elif self._quantizer is None or self._weight is None:
                expected = self._file_weight(torch.float32 if self._weight is None else self._weight.dtype)
            else:
                expected = self._quantizer.quantized(self._weight).detach()
            expected = expected.cpu()
        if not self.record.codes:
            self.row.nan_inputs += int(values[self._x].isnan().sum())
            expected = expected if self._x == self.record.x else expected.to(actual.dtype)
        self.row.elements += actual.numel()
        self.row.differing += self._differing(actual, expected)

    def compare_weight(self, expected: Tensor, actual: Tensor) -> None:
        """Compare a weight that the model computes, once: it is the same in every batch.

        Raises:
            VerificationError: the shapes or dtypes belong to another model.
        """
        if not self._is_compared:
            self._is_compared = True
            self.row.elements = actual.numel()
            self.row.differing = max(self.row.differing, self._differing(actual, expected.detach().cpu()))

    def check_called(self) -> None:
        """Raise a VerificationError if the model has not computed a weight of the file."""
        if self.is_computed and not self._is_compared:
            raise VerificationError(
                f"the constant {self.record.x} of the file is not a parameter or buffer of the model, and the "
                f"quantizer {self.record.quantizer} was not called; pass the model that was exported"
            )

    def _differing(self, actual: Tensor, expected: Tensor) -> int:
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            raise VerificationError(
                f"{module_name(self.record.quantizer)} gives {actual.dtype} {list(actual.shape)} in the file and "
                f"{expected.dtype} {list(expected.shape)} in torch; the model is not the one that was exported"
            )
        return differing_bits(actual, expected)

    def tensors(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the quantizer receives in the file, and its result; of a weight the result twice."""
        y = values[self.record.y]
        return (y if self.record.codes else values[self._x]), y

    def _expected(self, values: Mapping[str, Tensor]) -> Tensor:
        record = self.record
        x = values[self._x].to(self._device)
        spec = self._spec if self._quantizer is None else self._quantizer.spec
        if self._quantizer is not None and self._quantizer.by_value is not None:
            return self._quantizer.fake_quantize_by_value(x)
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
        # Parameters from a file can have any value, so they are checked here.
        return fake_quantize(x, spec, scale=params.scale, zero_point=params.zero_point)

    def _file_weight(self, dtype: torch.dtype) -> Tensor:
        from onnx import TensorProto

        name, fmt, params = str(self.record.codes), self._spec.format, self._file_parameters()
        stored = self._constants.tensor(name)
        if isinstance(fmt, IntegerFormat):
            stored = stored.to(fmt.storage)
        elif self._constants.type(name) in (TensorProto.UINT4, TensorProto.UINT8):  # bit patterns
            stored = stored.to(torch.uint8).view(fmt.storage)
        else:
            stored = fmt.to_storage(stored)
        if params.scale.shape != self._spec.granularity.group_shape(stored.shape):
            raise ShapeError(f"scales of shape {list(params.scale.shape)} for codes of shape {list(stored.shape)}")
        return reference.dequantize(stored, params, self._spec, dtype)

    def _file_parameters(self) -> QParams:
        scale = self._in_groups(self.record.scale)
        if (name := self.record.scale_of_scales) is not None:
            # The factors of the scales' codes, repeated so that they broadcast.
            shared, granularity = self._constants.tensor(name), self._spec.scale.granularity
            if granularity is None:
                raise VerificationError(
                    f"{self._spec} has one level of scales, but the file has {name}; export it again"
                )
            for axis, block in enumerate(granularity.block_shape(scale.shape) if shared.dim() else ()):
                if shared.shape[axis] not in (1, scale.shape[axis]):
                    groups = torch.arange(scale.shape[axis], device=shared.device) // block
                    shared = shared.index_select(axis, groups)
            scale = scale.float() * shared
        elif scale.dtype == torch.uint8:  # the bits of E8M0, as TensorRT takes them
            scale = scale.view(torch.float8_e8m0fnu).float()
        return QParams(scale, None if self._spec.symmetric else self._in_groups(str(self.record.zero_point)))

    def _in_groups(self, name: str) -> Tensor:
        """Return a constant of the file in the shape [groups, axes kept]."""
        values = self._constants.tensor(name)
        for axis, count in enumerate(self.record.repeats):
            values = values[(slice(None),) * axis + (slice(None, None, count),)]
        return values.reshape(self.record.groups)


_MOST_ELEMENTS = 2**29 - 2**20
"""The float32 weights that one protobuf message can hold."""
_NO_LOSS = 100.0
"""SQNR in dB: sums in another order reach it, a step of 16 bits does not."""

_RESTORING = (
    SessionOptions(
        'SessionOptions.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")',
        entries=(("session.qdq_matmulnbits_accuracy_level", "1"),),
    ),
    SessionOptions(
        'InferenceSession(..., disabled_optimizers=["WeightBiasQuantization"])', ("WeightBiasQuantization",)
    ),
    SessionOptions('InferenceSession(..., disabled_optimizers=["DoubleQDQPairsRemover"])', ("DoubleQDQPairsRemover",)),
    WITHOUT_OPTIMISATIONS,
)
"""Settings that keep ONNX Runtime from other results: first one that costs no speed of integer products."""


class Deployed:
    """Runs a file in ONNX Runtime's default session, and once without rounding to measure what that costs."""

    def __init__(
        self, model: ModelProto, checks: Sequence[SiteCheck], report: VerifyReport, step: float | None
    ) -> None:
        self._model, self._report, self._step = model, report, step
        self._names = [output.name for output in model.graph.output]
        self._batch: tuple[list[Tensor], Mapping[str, Tensor]] | None = None
        self._default: Session | None = None
        self._unrounded: Session | None = None
        try:
            self._default = Session(model, chosen=DEFAULT)
        except VerificationError as error:
            report.optimised_error = str(error)
            return
        if report.style == Style.PORTABLE.value:  # engines of other styles are others
            unrounded = without_rounding(model, checks)
            self._unrounded = None if unrounded is None else Session(unrounded)
            if unrounded is None:
                report.not_run.append("Not judged as deployed: with float weights the file would exceed 2 GB.")

    def add(self, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Compare one batch, of which `values` are the file's results without optimisations."""
        if self._default is None:
            return
        report = self._report
        try:
            found = self._default.run(inputs)
        except VerificationError as error:
            report.optimised_error, self._default = str(error), None
            return
        plain, actual = self._outputs(values), self._outputs(found)
        self._batch = plain, inputs
        self._add(report.optimised, actual, plain)
        if self._unrounded is not None:
            unrounded = self._outputs(self._unrounded.run(inputs))
            self._add(report.deployed, actual, unrounded)
            self._add(report.noise, plain, unrounded)

    def finish(self) -> None:
        """Look for a setting that gives the results without optimisations again, if these lose any."""
        if self._batch is None or all(row.sqnr >= _NO_LOSS for row in self._report.optimised):
            return
        plain, inputs = self._batch
        # Other settings cost the speed of integer products, and are advised only where the file loses too much.
        for options in _RESTORING if self._report.as_deployed is False else _RESTORING[:1]:
            rows: list[OutputRow] = []
            self._add(rows, self._outputs(Session(self._model, chosen=options).run(inputs)), plain)
            if all(row.sqnr >= _NO_LOSS for row in rows):
                self._report.restored_by = options.text
                return

    def _outputs(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        return [values[name] for name in self._names]

    def _add(self, rows: list[OutputRow], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        add_rows(rows, self._names, actual, expected, self._step)


def without_rounding(model: ModelProto, checks: Sequence[SiteCheck]) -> ModelProto | None:
    """Return a file that differs from another as a float model does: the noise of quantization needs no float model.

    Activations pass unrounded, but clipped. Weights are moved by the error that another rounding makes, because
    improved or baked ones are stored rounded in the float model, too. None if the file would be too large.
    """
    from onnx import ModelProto, TensorProto, helper

    weights = {check.record.y: check for check in checks if check.record.codes}
    if sum(check.elements for check in weights.values()) > _MOST_ELEMENTS:
        return None
    types = element_types(model)
    activations = {check.record.y: check for check in checks if not check.record.codes}
    copy = ModelProto()
    copy.CopyFrom(model)
    editor = GraphEditor(copy.graph)
    generator = torch.Generator().manual_seed(0)
    nodes: list[NodeProto] = []
    for node in copy.graph.node:
        y = node.output[0]
        dtype = helper.tensor_dtype_to_np_dtype(types.get(y) or TensorProto.FLOAT)
        if y in weights:
            editor.add(y, weights[y].moved(generator).numpy().astype(dtype))
        elif y in activations:
            has_clip = types.get(y) != TensorProto.BFLOAT16  # no kernel for it
            limits = [editor.add(f"{y}/limit", x.numpy().astype(dtype)) for x in activations[y].limits if has_clip]
            nodes.append(helper.make_node("Clip" if limits else "Identity", [activations[y].record.x, *limits], [y]))
        else:
            nodes.append(node)
    # Only nodes that outputs depend on: quantizers without readers may have types that no kernel takes.
    needed = {output.name for output in copy.graph.output}
    reached: list[NodeProto] = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed |= names_read([node])
            reached.append(node)
    editor.finish(reached[::-1])
    return copy
