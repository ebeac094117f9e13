"""Compare an exported file with torch: its quantizers, and the parts of the model between quantizers.

Torch computes each part from the values that the file had at the part's start.

Sums in another order differ by rounding, which a quantizer turns into a whole step if a value lies between two codes.
After some layers a right file is as far from torch as quantization is. So torch runs with the results that the
quantizers have in the file. The inputs of the next quantizers, and the outputs, then differ only by rounding.

Where a difference looks large, the effect of rounding is measured: torch runs again, and the last bits of the results
of all operations are changed at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fakequant.data.again import state_before
from fakequant.errors import FakeQuantError, ShapeError, SpecError, VerificationError
from fakequant.export.capability import Parameters, SiteRecord, Style, digest
from fakequant.export.inputs import GraphEditor, names_read
from fakequant.export.verdict import (
    DEFAULT,
    WITHOUT_OPTIMISATIONS,
    OutputRow,
    Row,
    Session,
    SessionOptions,
    Span,
    VerifyReport,
    add_rows,
    differing_bits,
    element_types,
    first_line,
    is_lost,
    judged,
)
from fakequant.functional import choose_qparams, fake_quantize
from fakequant.model.engine import simulated
from fakequant.model.weights import evaluating, exact_products
from fakequant.nn.quantized.recurrent import runs_backwards
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.nn.ranges import ByValue, call_again
from fakequant.numerics import reference
from fakequant.numerics.formats import IntegerFormat
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.ops.graph_operators import seen_as_operators
from fakequant.restore import forwards_of, restore_after
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
        read_as: by the name of a float16 tensor, the name of its float32 copy, which the quantizer reads.
        names: the names of all tensors of the file.
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
    """Compares the results of one quantizer in a file with torch's for the same input.

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
        """Whether the model computes the weight, so that it is known only when the quantizer is called."""
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
        """The largest scale of an activation that has an integer format and constant scales; else None."""
        if self.record.codes or self.record.parameters is not Parameters.CONSTANT:
            return None
        with self._fitting():
            scale = self._constants.tensor(self.record.scale)
            return scale.max().item() if isinstance(self._spec.format, IntegerFormat) and scale.numel() else None

    @property
    def limits(self) -> list[Tensor]:
        """The smallest and the largest result of an activation with a single constant scale; [] for others."""
        if self.record.parameters is not Parameters.CONSTANT or math.prod(self.record.groups) != 1:
            return []
        with self._fitting():
            params, most = self._file_parameters(), torch.finfo(torch.float32).max
            scale, zero_point = (None if p is None else p.reshape(()) for p in (params.scale, params.zero_point))
            ends = torch.tensor([-most, most], dtype=torch.float32, device="cpu")
            return list(fake_quantize(ends, self._spec, scale=scale, zero_point=zero_point))

    @property
    def elements(self) -> int:
        """How many elements the weight has; the file holds a code for each."""
        return math.prod(self._constants.constant(str(self.record.codes)).dims)

    def moved(self, generator: torch.Generator) -> Tensor:
        """The weight of the file plus random rounding errors of typical size, to stand for the float weight."""
        with self._fitting():
            weight, params = self._file_weight(torch.float32), self._file_parameters()
            others = weight * (1 - torch.rand(weight.shape, generator=generator, device="cpu") / 2)
            rounded = fake_quantize(others, self._spec, scale=params.scale, zero_point=params.zero_point)
            return weight + rounded - others

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """A context that raises VerificationError with a cure if constants do not fit each other."""
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
        """Compare the results in the file with torch's for the input in the file, and count the results that differ.

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
        """Compare a weight that the model computes; done once, because it is the same in every batch.

        Raises:
            VerificationError: the shapes or dtypes belong to another model.
        """
        if not self._is_compared:
            self._is_compared = True
            self.row.elements = actual.numel()
            self.row.differing = max(self.row.differing, self._differing(actual, expected.detach().cpu()))

    def check_called(self) -> None:
        """Raise VerificationError if the model has not computed a weight that `is_computed`."""
        if self.is_computed and not self._is_compared:
            raise VerificationError(
                f"the constant {self.record.x} of the file is not a parameter or buffer of the model, and the "
                f"quantizer {self.record.quantizer} was not called; pass the model that was exported"
            )

    def _differing(self, actual: Tensor, expected: Tensor) -> int:
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            raise VerificationError(
                f"{module_name(self.record.quantizer)} gives {actual.dtype} {list(actual.shape)} in the file and "
                f"{expected.dtype} {list(expected.shape)} in torch; this model is not the exported model"
            )
        return differing_bits(actual, expected)

    def tensors(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The quantizer's input and its result in the file; for a weight the result twice."""
        y = values[self.record.y]
        x = y if self.record.codes else values[self._x]
        return (x.clamp(*self.record.clip) if self.record.clip else x), y

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
        """Return a constant of the file in the shape [groups per axis]."""
        values = self._constants.tensor(name)
        for axis, count in enumerate(self.record.repeats):
            values = values[(slice(None),) * axis + (slice(None, None, count),)]
        return values.reshape(self.record.groups)


_MOST_ELEMENTS = 2**29 - 2**20
"""The most float32 weights that a protobuf message can hold."""
_NO_LOSS = 100.0
"""An SQNR in dB: results of sums in another order are above, results with a difference of one 16-bit step below."""

_RESTORING = (
    SessionOptions(
        'SessionOptions.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")',
        entries=(("session.qdq_matmulnbits_accuracy_level", "1"),),
    ),
    # x86 processors with AVX2 but not VNNI add pairs of products of codes in int16, where they saturate.
    SessionOptions(
        'SessionOptions.add_session_config_entry("session.x64quantprecision", "1")',
        entries=(("session.x64quantprecision", "1"),),
    ),
    SessionOptions(
        'InferenceSession(..., disabled_optimizers=["WeightBiasQuantization"])', ("WeightBiasQuantization",)
    ),
    SessionOptions('InferenceSession(..., disabled_optimizers=["DoubleQDQPairsRemover"])', ("DoubleQDQPairsRemover",)),
    WITHOUT_OPTIMISATIONS,
)
"""Settings that stop ONNX Runtime from changing results, the cheapest first. The first slows no integer product."""


class Deployed:
    """Runs a file in ONNX Runtime's default session, and a copy without rounding, to compare their outputs."""

    def __init__(
        self, model: ModelProto, checks: Sequence[SiteCheck], report: VerifyReport, step: float | None
    ) -> None:
        self._model, self._report, self._step = model, report, step
        self._names = [output.name for output in model.graph.output]
        self._batch: tuple[list[Tensor], list[Tensor], Mapping[str, Tensor]] | None = None
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
        """Compare one batch; `values` are the file's results without optimisations."""
        if self._default is None:
            return
        report = self._report
        try:
            found = self._default.run(inputs)
        except VerificationError as error:
            report.optimised_error, self._default = str(error), None
            return
        plain, actual = self._outputs(values), self._outputs(found)
        self._batch = plain, plain, inputs
        self._add(report.optimised, actual, plain)
        if self._unrounded is not None:
            unrounded = self._outputs(self._unrounded.run(inputs))
            self._batch = plain, unrounded, inputs
            self._add(report.deployed, actual, unrounded)
            self._add(report.noise, plain, unrounded)

    def finish(self) -> None:
        """Use the last batch to find a setting that repairs the results of the default optimisations."""
        if self._batch is None or all(row.sqnr >= _NO_LOSS for row in self._report.optimised):
            return
        plain, unrounded, inputs = self._batch
        loses = self._report.as_deployed is False
        noise = list[OutputRow]()
        self._add(noise, plain, unrounded)
        # Other settings cost the speed of integer products, and are advised only where the file loses too much.
        for options in _RESTORING if loses else _RESTORING[:1]:
            rows = list[OutputRow]()
            actual = self._outputs(Session(self._model, chosen=options).run(inputs))
            self._add(rows, actual, unrounded if loses else plain)
            if loses:
                is_restored = not any(is_lost(*pair) for pair in judged(rows, noise))
            else:
                is_restored = all(row.sqnr >= _NO_LOSS for row in rows)
            if is_restored:
                self._report.restored_by = options.text
                return

    def _outputs(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        return [values[name] for name in self._names]

    def _add(self, rows: list[OutputRow], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        add_rows(rows, self._names, actual, expected, self._step)


def without_rounding(model: ModelProto, checks: Sequence[SiteCheck]) -> ModelProto | None:
    """A copy of a file with unrounded values, to measure the noise of quantization without the float model.

    Activations are clipped, but not rounded. Weights are moved by typical rounding errors, because improved or baked
    weights are stored rounded even in the float model. The result is None if the copy would be too large.
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


Run = Callable[[Callable[[Tensor], Tensor]], Any]
"""Calls the model with a batch; the argument is a function that first changes each tensor of the batch."""
Values = Iterator[tuple[dict[str, Tensor], list[int]]]
"""For each piece of the file, its tensors by name, and the indices of the checks whose tensors are among them."""

_UNITS = 8
"""Differences up to this many units in the last place of the largest value need no second run."""
_FACTOR = 32
"""A right file differs by at most this multiple of the effect of changed last bits: a sum has thousands of terms."""
_ALIKE = 1e-3
"""A call in the model matches a quantizer in the file if inputs differ by at most this share of the largest value."""
_HUGE = 2.0**100
"""Magnitudes from here on are masks, and do not count as the largest value."""
_FAKE_QUANTIZE = torch.ops.fakequant.fake_quantize.default


class Spans:
    """Runs a model with the results that quantizers have in the file, and compares the quantizers' inputs.

    The last outputs of the file are the new values of the buffers `state`.
    """

    def __init__(
        self, file: ModelProto, checks: Sequence[SiteCheck], model: nn.Module, state: Sequence[str] = ()
    ) -> None:
        self.checks, self.model, self.state = checks, model, state
        self._file = file
        self.of_checks = [Span(one.record.quantizer) for one in checks]
        self.of_outputs = {output.name: Span(output.name) for output in file.graph.output}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.order: dict[nn.Module, list[int]] = {}
        for index, check in enumerate(checks):
            module = modules[check.record.quantizer]
            is_weight = isinstance(module, Quantizer) and module.kind is Kind.WEIGHT
            if check.record.codes is None or check.is_computed or not is_weight:
                self.order.setdefault(module, []).append(index)

    def found(self) -> list[Span]:
        """The spans with a comparison or a missing call, in the order of the file.

        Raises:
            VerificationError: the model has not computed a weight of the file.
        """
        for check in self.checks:
            check.check_called()
        names = [*(check.record.x for check in self.checks), *self.of_outputs]
        spans = [*self.of_checks, *self.of_outputs.values()]
        ends = {value.name: value.name for value in self._file.graph.input}
        ends |= {one.record.y: "" if one.record.codes else one.record.quantizer for one in self.checks}
        made_by = {output: node for node in self._file.graph.node for output in node.output}
        for name, span in zip(names, spans, strict=True):
            waiting, seen, after = [] if span.fits else [name], {name}, list[str]()
            while waiting:
                node = made_by.get(waiting.pop())
                for source in names_read([node]) - seen if node is not None else ():
                    seen.add(source)
                    if source in ends:
                        after += [ends[source]] if ends[source] else []
                    else:
                        waiting.append(source)
            span.after = sorted(after)
        return [span for span in spans if span.elements or span.missing]

    def add(self, run: Run, values: Callable[[], Values], bins: Mapping[ByValue, Tensor]) -> dict[str, Tensor]:
        """Compare one batch; returns the tensors of the file's last piece, among them its outputs."""
        before = state_before(self.model)
        found = _Pass(self, values(), bins)
        last = found.run(run)
        # The model may call a quantizer whose result it does not use, or the file may lack a call.
        if loose := found.uneven():
            before()
            found = _Pass(self, values(), bins, loose=loose)
            found.run(run)
            for index in found.left(loose):
                self.of_checks[index].missing = True
        moved: dict[int, float] = {}
        if found.suspects:
            with restore_after(state_before(self.model)):
                before()
                again = _Pass(self, values(), bins, loose=loose, ours=found.suspects)
                again.run(run)
            moved = again.moved
        for place, (span, elements, difference, largest, unit) in enumerate(found.compared):
            span.elements += elements
            span.add(difference, largest, max(_UNITS * unit * largest, _FACTOR * moved.get(place, 0.0)))
        return last


class _Pass:
    """A run of the model that takes turns with a run of the file.

    Args:
        spans: the comparisons to add to.
        values: the tensors of the file, piece by piece.
        bins: for ranges that depend on a value, the bins that the batch's values choose.
        loose: modules that the model calls more or fewer times than the file.
        ours: torch's tensors where an earlier run found large differences; if they are passed, this run changes last
            bits.
    """

    def __init__(
        self,
        spans: Spans,
        values: Values,
        bins: Mapping[ByValue, Tensor],
        loose: frozenset[nn.Module] = frozenset(),
        ours: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._spans, self._values, self._bins, self._loose = spans, values, bins, loose
        self._ours, self._wobble = ours, None if ours is None else _Wobble()
        self._places: dict[nn.Module, tuple[int, int]] = dict.fromkeys(spans.order, (0, 0))
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: dict[str, Tensor] = {}
        self._extra: set[nn.Module] = set()
        self._inside: list[nn.Module] = []
        self.compared: list[tuple[Span, int, float, float, float]] = []
        self.suspects: dict[int, Tensor] = {}
        self.moved: dict[int, float] = {}

    def run(self, run: Run) -> dict[str, Tensor]:
        """Run model and file to their ends, and compare the outputs; returns the tensors of the file's last piece."""
        model = self._spans.model
        with evaluating(model), simulated(model), torch.no_grad(), self._replaced(), exact_products():
            ours = outputs_of(model, run(self._moved), self._spans.state)
        while self._advance():
            pass
        for (name, span), x in zip(self._spans.of_outputs.items(), ours, strict=False):
            self._see(span, x, self._last[name])
        return self._last

    def uneven(self) -> frozenset[nn.Module]:
        """The modules that the model called more or fewer times than they have quantizers in the file."""
        left = {one for one, (place, _) in self._places.items() if place < len(self._spans.order[one])}
        return frozenset(self._extra | left)

    def left(self, loose: frozenset[nn.Module]) -> list[int]:
        """The indices of the file's quantizers that no call of the model matched."""
        return [index for one in loose for index in self._spans.order[one][self._places[one][0] :]]

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """A context in which modules that quantize return the file's results."""
        spans, wobble = self._spans, self._wobble

        def enclosed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._inside.append(module)  # which calls `fake_quantize` itself
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside.pop()

        def called(x: Tensor, own: Callable[[], Tensor]) -> Tensor:
            return self._result(self._inside[-1], x, own) if self._inside else own()

        def quantized(quantizer: Quantizer, x: Tensor) -> Tensor:
            with _disable_current_modes():
                own = partial(type(quantizer).forward, quantizer, x)
                # A quantizer of constant parameters keeps torch's result, which the file has bit for bit.
                return self._result(quantizer, x, own) if quantizer in spans.order else self._moved(own())

        has_functions = any(not isinstance(module, Quantizer) for module in spans.order)
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        for module in (*spans.order, *quantizers(spans.model).values()):
            if not isinstance(module, Quantizer):
                forwards[module] = partial(enclosed, module, module.forward)
            elif module in spans.order or wobble is not None or has_functions:
                forwards[module] = partial(quantized, module)
        with restore_after(forwards_of(forwards)), ExitStack() as stack:
            for module, forward in forwards.items():
                vars(module)["forward"] = forward
            if wobble is not None or has_functions:
                stack.enter_context(seen_as_operators())
                stack.enter_context(_Watch(called, wobble))
            yield

    def _moved(self, x: Tensor) -> Tensor:
        return x if self._wobble is None else self._wobble.moved(x)

    def _result(self, module: nn.Module, x: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """The file's result for a call of a module, or torch's if the file has none."""
        order, (place, step) = self._spans.order[module], self._places[module]
        if place == len(order):
            self._extra.add(module)
            return own()
        with torch._C.DisableTorchFunction():
            check = self._spans.checks[order[place]]
            while order[place] not in self._ready:  # the file runs that far
                self._advance()
            (theirs, y), steps = self._ready[order[place]], 0
            if y.dim() == x.dim() + 1:  # the file holds the steps of a loop together
                steps = len(y)
                at = steps - 1 - step if runs_backwards(check.record.quantizer) else step
                theirs, y = theirs[at], y[at]
            if module in self._loose and check.record.codes is None:
                difference, largest = _difference(x, theirs)
                if not difference <= _ALIKE * largest:
                    return own()
            self._places[module] = (place, step + 1) if step + 1 < steps else (place + 1, 0)
            if step + 1 >= steps:
                self._ready.pop(order[place])
            if check.record.codes is None:
                self._see(self._spans.of_checks[order[place]], x, theirs)
            else:
                check.compare_weight(own(), y)
            return self._moved(y.to(x.device, x.dtype, copy=True)) if y.shape == x.shape else own()

    def _advance(self) -> bool:
        """Run the next piece of the file; returns False at the end."""
        found = next(self._values, None)
        if found is None:
            return False
        self._last, indices = found
        judges = self._ours is None and not self._loose
        with call_again(self._bins):
            for index in indices:
                check = self._spans.checks[index]
                if judges:
                    check.compare(self._last)
                self._ready[index] = check.tensors(self._last)
        return True

    def _see(self, span: Span, ours: Tensor, theirs: Tensor) -> None:
        """Compare a tensor of torch with the file's; in a run with changed last bits, also measure their effect."""
        place = len(self.compared)
        difference, largest = _difference(ours, theirs)
        unit = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
        self.compared.append((span, ours.numel(), difference, largest, unit))
        if self._ours is not None:
            if (before := self._ours.get(place)) is not None:
                self.moved[place] = _difference(ours, before)[0]
        elif not difference <= _UNITS * unit * largest:
            self.suspects[place] = ours.detach().cpu().clone()


class _Wobble:
    """Changes the last bits of tensors at random, but not whole numbers such as counts, masks and zeros."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def moved(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or not x.numel() or x.layout is not torch.strided:
            return x
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            signs = torch.randint(0, 2, x.shape, generator=self._generator, device="cpu").to(x.device) * 2 - 1
            return torch.where(x == x.round(), x, x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype))


class _Watch(TorchDispatchMode):
    """Intercepts calls of `fake_quantize`, and changes last bits of the results of all other operations."""

    def __init__(self, quantized: Callable[[Tensor, Callable[[], Tensor]], Tensor], wobble: _Wobble | None) -> None:
        super().__init__()
        self._quantized_by, self._wobble = quantized, wobble

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _FAKE_QUANTIZE:
            return self._quantized_by(args[0], lambda: func(*args, **kwargs))
        is_view = any(argument.alias_info is not None for argument in func._schema.arguments)
        if self._wobble is None or is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        if torch.Tag.pointwise not in func.tags:  # sums, whose terms may cancel
            args, kwargs = pytree.tree_map_only(Tensor, self._wobble.moved, (args, kwargs))
        return pytree.tree_map_only(Tensor, self._wobble.moved, func(*args, **kwargs))


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors (inf if shapes differ), and their largest magnitude except mask values."""
    if ours.shape != theirs.shape:
        return math.inf, 1.0
    if not ours.numel():
        return 0.0, 0.0
    a, b = (x.detach().cpu().double() for x in (ours, theirs))
    same = (a == b) | (a.isnan() & b.isnan())
    sizes = torch.maximum(a.abs(), b.abs())
    largest = sizes.where(sizes < _HUGE, 0.0).max().item()
    return (a - b).abs().nan_to_num(math.inf).where(~same, 0.0).max().item(), largest


def outputs_of(model: nn.Module, result: Any, state: Sequence[str]) -> list[Tensor]:
    """The outputs of a file: the tensors of the model's result, and copies of the buffers that the model wrote."""
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return [*found, *(model.get_buffer(path).detach().clone() for path in state)]
