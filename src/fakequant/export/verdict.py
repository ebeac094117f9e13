"""The report of a verification and its counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import VerificationError
from fakequant.text import html_result, listed, table

if TYPE_CHECKING:
    from onnx import ModelProto

NO_BFLOAT16 = "ONNX Runtime has no bfloat16 kernels on the CPU: export the model in float32, as by model.float()"


class Watch:
    """A copy of a model that also outputs intermediate tensors; `arrays` and `tensors` convert inputs and outputs."""

    def __init__(self, model: ModelProto, watched: Sequence[str]) -> None:
        from onnx import ModelProto, TensorProto, helper

        self.outputs = [output.name for output in model.graph.output]
        self._types = element_types(model)
        known = {*self.outputs, *(value.name for value in model.graph.input)}
        self._watched = [name for name in dict.fromkeys(watched) if name not in known]
        self.model = ModelProto()
        self.model.CopyFrom(model)
        self.names = [*self.outputs]
        for name in self._watched:
            alias, kind = name, self._types.get(name, TensorProto.FLOAT)
            if kind == TensorProto.BFLOAT16:  # read as float32, because numpy has no bfloat16
                alias, kind = f"{name}/float32", TensorProto.FLOAT
                self.model.graph.node.append(helper.make_node("Cast", [name], [alias], to=kind))
            self.model.graph.output.append(helper.make_tensor_value_info(alias, kind, None))
            self.names.append(alias)

    def arrays(self, inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Convert the inputs of the model to numpy arrays.

        Raises:
            VerificationError: a tensor is bfloat16, or has another dtype or shape than the file takes.
        """
        from onnx import helper

        if any(value.dtype == torch.bfloat16 for value in inputs.values()):
            raise VerificationError(f"numpy has no bfloat16, and {NO_BFLOAT16}")
        arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in inputs.items()}
        kinds = {value.name: value.type.tensor_type for value in self.model.graph.input}
        for name, array in arrays.items():
            kind = kinds[name]
            expected = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
            expected = expected if kind.HasField("shape") else [None] * array.ndim
            fits = len(expected) == array.ndim and all(
                n in (None, m) for n, m in zip(expected, array.shape, strict=True)
            )
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            if not fits or array.dtype != dtype:
                shape = ["any" if n is None else n for n in expected]
                longer = ", or export with dynamic_shapes= for other lengths" if array.dtype == dtype else ""
                raise VerificationError(
                    f"the input {name} is {array.dtype} {list(array.shape)}, but the file takes {dtype} {shape}; pass "
                    f"batches of the same form as the example{longer}"
                )
        return arrays

    def tensors(self, inputs: Mapping[str, Tensor], arrays: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return inputs, outputs and watched tensors by name, from arrays in the order of `names`."""
        from onnx import TensorProto

        pairs = zip([*self.outputs, *self._watched], arrays, strict=True)
        results = {name: torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)) for name, array in pairs}
        for name in self._watched:
            if self._types.get(name) == TensorProto.BFLOAT16:
                results[name] = results[name].bfloat16()
        return {**dict(inputs), **results}


class SessionOptions(NamedTuple):
    """Settings of a session: text to paste, disabled optimizers, config entries, whether graphs are optimised."""

    text: str
    disabled: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    optimised: bool = True


DEFAULT = SessionOptions("SessionOptions()")
WITHOUT_OPTIMISATIONS = SessionOptions(
    "SessionOptions.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL", optimised=False
)


class Session:
    """An ONNX model in ONNX Runtime on the CPU.

    Raises:
        VerificationError: ONNX Runtime cannot load the model, with its message.
    """

    def __init__(
        self, model: ModelProto, watched: Sequence[str] = (), chosen: SessionOptions = WITHOUT_OPTIMISATIONS
    ) -> None:
        import onnxruntime
        from onnx import TensorProto

        self._watch = Watch(model, watched)
        self.outputs = self._watch.outputs
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if chosen.optimised else levels.ORT_DISABLE_ALL
        for key, value in chosen.entries:
            options.add_session_config_entry(key, value)
        options.log_severity_level = 4
        data = self._watch.model.SerializeToString()
        try:
            self._session = onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(chosen.disabled)
            )
        except _errors() as error:
            lacking = "NOT_IMPLEMENTED" in str(error) and TensorProto.BFLOAT16 in element_types(model).values()
            reason = NO_BFLOAT16 if lacking else first_line(error)
            raise VerificationError(f"ONNX Runtime cannot load it: {reason}") from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model and return its inputs, outputs and watched tensors by name.

        Raises:
            VerificationError: the inputs do not fit the model, or ONNX Runtime fails, with its message.
        """
        arrays = self._watch.arrays(inputs)
        try:
            found = self._session.run(self._watch.names, arrays)
        except _errors() as error:
            raise VerificationError(f"ONNX Runtime cannot run it: {first_line(error)}") from error
        return self._watch.tensors(inputs, [np.asarray(array) for array in found])


def element_types(model: ModelProto) -> dict[str, int]:
    """Return the known element types of a graph's values by name, as in TensorProto."""
    graph = model.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return {**types, **{tensor.name: tensor.data_type for tensor in graph.initializer}}


def _errors() -> tuple[type[Exception], ...]:
    """Return the error classes of ONNX Runtime, which have no common base class."""
    state = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    values: list[Any] = list(vars(state).values())
    own = [value for value in values if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, ValueError, RuntimeError)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; other libraries append pages of context."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


OPTIMISED_ERROR = f"it runs with {WITHOUT_OPTIMISATIONS.text}, as it did here"

_NAMED = 5
_SUMS = 16
"""Sums in another order may change outputs by this many units in the last place."""
_HEADER = ("quantizer", "specification", "kind", "elements", "differing", "")
_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing_bits(actual: Tensor, expected: Tensor) -> int:
    """Count the elements whose bits differ; NaN equals NaN, -0.0 does not equal +0.0.

    >>> differing_bits(torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0]))
    1
    """
    integer = _SAME_SIZE[actual.element_size()]
    same = actual.contiguous().view(integer) == expected.contiguous().view(integer)
    return int((~(same | (actual.isnan() & expected.isnan()))).sum())


@dataclass
class Row:
    """One quantizer in the file.

    Attributes:
        quantizer: the path of the quantizer, "" for the model itself.
        spec: the specification, as text.
        kind: "weight" or "activation".
        elements: the number of compared results.
        differing: the number of results whose bits differ from torch.
        nan_inputs: the number of NaN inputs, which always differ because integer codes have no NaN.
        intact: whether the quantizer's constants are unchanged since the export.
    """

    quantizer: str
    spec: str
    kind: str
    elements: int = 0
    differing: int = 0
    nan_inputs: int = 0
    intact: bool = True

    @property
    def exact(self) -> bool:
        """Whether the constants are intact and no result differs."""
        return self.intact and self.differing == 0

    @property
    def note(self) -> str:
        """The reason why the row is not intact; "" if it is."""
        return "" if self.intact else "changed since the export"


@dataclass
class Span:
    """A comparison of a quantizer's input, or an output: the file and torch compute it from the same earlier values.

    Attributes:
        name: the path of the quantizer, or the name of the output.
        after: the quantizers and inputs from which the tensor is computed; empty if `fits`.
        elements: the number of compared values.
        gap: the largest difference, as a share of the largest value.
        allowed: the difference that rounding explains, as a share of the largest value.
        missing: whether the model lacks the call of this quantizer.
    """

    name: str
    after: list[str] = field(default_factory=list)
    elements: int = 0
    gap: float = 0.0
    allowed: float = 0.0
    missing: bool = False

    @property
    def fits(self) -> bool:
        """Whether rounding explains the difference, and the model has the call."""
        return self.gap <= self.allowed and not self.missing

    def add(self, difference: float, largest: float, allowed: float) -> None:
        """Add one comparison, in units of the tensor; the span keeps the one with the largest difference / allowed."""
        if _ratio(difference, allowed) >= _ratio(self.gap, self.allowed):
            self.gap, self.allowed = (x / (largest or 1.0) for x in (difference, allowed))

    def __str__(self) -> str:
        if self.missing:
            return f"the model has no call whose tensor is that of {self.name} in the file"
        after = f" from {listed(self.after, 4)}" if self.after else ""
        return (
            f"{self.name} gets other values than in torch{after}: they differ by {self.gap:.2g} of the largest, and "
            f"rounding explains {self.allowed:.1g}"
        )


def _ratio(difference: float, allowed: float) -> float:
    if difference == 0.0 or math.isinf(allowed):
        return 0.0
    return difference / allowed if allowed else math.inf


@dataclass
class OutputRow:
    """One output of the model, compared with another run.

    Attributes:
        name: the name of the output in the file.
        elements: the number of compared values.
        differing: the number of values that are not equal.
        max_abs: the largest difference, in the output's units; inf if only one of the values is finite.
        step: the scale of the last integer quantizer before the outputs, or None if there is none.
        rows: the number of rows of an output with two axes, else None.
        same_argmax: the number of rows with the same arg-max.
        signal: the sum of the squares of the finite expected values.
        noise: the sum of the squares of the differences.
        eps: the relative rounding of the output's dtype; 0 for integers.
    """

    name: str
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    step: float | None = None
    rows: int | None = None
    same_argmax: int = 0
    signal: float = 0.0
    noise: float = 0.0
    eps: float = 0.0

    @property
    def sqnr(self) -> float:
        """The signal-to-noise ratio in dB: inf if nothing differs, -inf if there is no finite signal."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal and self.noise < math.inf else -math.inf

    @property
    def share(self) -> float:
        """The fraction of values that differ."""
        return self.differing / self.elements if self.elements else 0.0

    @property
    def steps(self) -> float | None:
        """The largest difference in quantization steps, or None without a step."""
        return None if self.step is None else self.max_abs / self.step

    @property
    def argmax_agreement(self) -> float | None:
        """The fraction of rows with the same arg-max; None unless the output has two axes."""
        return self.same_argmax / self.rows if self.rows else None

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Add one batch to the counts."""
        self.elements += actual.numel()
        if actual.shape != expected.shape:  # the sizes of a detector's outputs depend on values
            self.differing += actual.numel()
            self.max_abs = self.noise = math.inf
            return
        self.eps = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
        exact = expected.detach().double()
        self.signal += exact.where(exact.isfinite(), 0.0).square().sum().item()
        differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
        self.differing += int(differs.sum())
        if bool(differs.any()):
            gap = (actual.double() - exact)[differs].abs().nan_to_num(nan=math.inf)
            self.max_abs = max(self.max_abs, gap.max().item())
            self.noise += gap.square().sum().item()
        if actual.dim() == 2 and actual.numel():
            self.rows = (self.rows or 0) + len(actual)
            self.same_argmax += int((actual.argmax(1) == expected.argmax(1)).sum())

    def __str__(self) -> str:
        words = [f"{self.name}: {self.differing:,} of {self.elements:,} differ, at most by {self.max_abs:.3g}"]
        if self.steps is not None:
            words.append(f"{self.steps:.3g} steps")
        if self.differing:
            words.append(f"{self.sqnr:.1f} dB")
        if self.argmax_agreement is not None:
            words.append(f"arg-max equal in {self.argmax_agreement:.2%}")
        return ", ".join(words)


@dataclass
class VerifyReport:
    """The result of `verify_onnx`; prints as a table.

    Attributes:
        path: the file.
        inputs: a description of the inputs.
        style: the style of the file.
        runtime: the runtime that executed the file.
        not_run: the runtimes that did not execute the file, with the reason, one sentence each.
        batches: the number of batches.
        rows: one row per quantizer in the file.
        outputs: the outputs compared with torch; empty without a model.
        spans: the inputs of quantizers, and the outputs, compared with torch; empty without a model.
        unread: the inputs of the file that none of its nodes reads.
        ignored: the inputs among `unread` on which the outputs of the model depend.
        optimised: the outputs with ONNX Runtime's default optimisations compared with the outputs without them.
        deployed: the outputs with ONNX Runtime's default optimisations compared with the outputs without rounding.
        noise: the outputs of the file compared with the outputs without rounding: the cost of quantization.
        restored_by: a setting of ONNX Runtime. If its default session loses more than quantization does, the setting
            prevents this; else the setting gives the results without optimisations. None: not needed, or none helps.
        optimised_error: ONNX Runtime's message if it cannot load or run the file with its optimisations.
        uncovered: names of nodes that quantize but belong to no quantizer of the file, so they are not compared.
    """

    path: str
    inputs: str
    rows: list[Row]
    style: str = "portable"
    runtime: str = ""
    not_run: list[str] = field(default_factory=list)
    batches: int = 0
    outputs: list[OutputRow] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    optimised: list[OutputRow] = field(default_factory=list)
    deployed: list[OutputRow] = field(default_factory=list)
    noise: list[OutputRow] = field(default_factory=list)
    restored_by: str | None = None
    optimised_error: str | None = None
    uncovered: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the file computes what the model computes.

        Every quantizer gives the same bits as torch for its input, the parts between quantizers differ from torch only
        by rounding, and the file is unchanged since the export.
        """
        is_wired = not self.uncovered and not self.ignored and all(span.fits for span in self.spans)
        return bool(self.rows) and all(row.exact for row in self.rows) and is_wired

    @property
    def as_deployed(self) -> bool | None:
        """Whether ONNX Runtime's default session adds no more noise to any output than quantization does.

        None for the styles "standard" and "trt", which other engines run, and if no output is a finite float.
        """
        if self.style != "portable":
            return None
        if self.optimised_error is not None:
            return False
        return all(not is_lost(*pair) for pair in self._judged) if self._judged else None

    @property
    def _judged(self) -> list[tuple[OutputRow, OutputRow]]:
        return judged(self.deployed, self.noise)

    @property
    def passed(self) -> bool:
        """Whether the file is exact, and ONNX Runtime's default session loses nothing."""
        return self.exact and self.as_deployed is not False

    @property
    def faults(self) -> list[str]:
        """The faults of the file apart from differing quantizers, one sentence each."""
        found = [] if self.rows else ["The file names no quantizer, so nothing was compared."]
        if self.uncovered:
            first = ", ".join(self.uncovered[:_NAMED]) + (", ..." if len(self.uncovered) > _NAMED else "")
            found.append(
                f"{len(self.uncovered)} nodes quantize but belong to no quantizer of the file, so they were not "
                f"compared: {first}. Export the model again."
            )
        found += [f"No node reads the input {name}, on which the model depends." for name in self.ignored]
        unfit = [span for span in self.spans if not span.fits]
        found += [f"The file is not the model: {span}." for span in unfit[:_NAMED]]
        if len(unfit) > _NAMED:
            found.append(f"{len(unfit) - _NAMED} more quantizers and outputs get other values.")
        return found

    @property
    def differing(self) -> int:
        """The number of differing elements of all quantizers."""
        return sum(row.differing for row in self.rows)

    @property
    def counted(self) -> str:
        """The number of batches, in words."""
        return "1 batch" if self.batches == 1 else f"{self.batches} batches"

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        values = asdict(self)
        for name in ("outputs", "optimised", "deployed", "noise"):
            for row, found in zip(values[name], getattr(self, name), strict=True):
                row.update(share=found.share, steps=found.steps, argmax_agreement=found.argmax_agreement)
                row.update(sqnr=found.sqnr if math.isfinite(found.sqnr) else None)
        verdicts = {"exact": self.exact, "as_deployed": self.as_deployed, "passed": self.passed}
        return {**values, **verdicts, "differing": self.differing}

    def __str__(self) -> str:
        return table([_HEADER, *map(_cells, self.rows)], self._lines(), line=True)

    __repr__ = __str__  # what notebooks and consoles show

    def _repr_html_(self) -> str:
        return html_result(_HEADER, [_cells(row) for row in self.rows], self._lines(), numbers=(3, 4))

    def _lines(self) -> list[str]:
        """The lines that are printed below the table of quantizers."""
        differing = f": {self.differing:,} elements differ" if self.differing else ""
        verdict = "exact" if self.exact and not self.faults else f"NOT exact{differing}"
        lines = [f"{self.path}: {verdict} in {self.runtime}; {self.counted}: {self.inputs}"]
        if nan := sum(row.nan_inputs for row in self.rows if row.differing):
            lines.append(f"{nan:,} NaN reached quantizers, and have no integer code; give batches without NaN")
        lines += self.faults
        lines += self.not_run
        lines += [f"against torch, {row}" for row in self.outputs]
        lines += [f"with ONNX Runtime's optimisations, {row}" for row in self.optimised]
        if self.optimised_error is not None:
            lines.append(f"with ONNX Runtime's optimisations: {self.optimised_error}; {OPTIMISED_ERROR}")
        return lines + self.deployment

    @property
    def deployment(self) -> list[str]:
        """Lines that compare the SQNR of ONNX Runtime with and without optimisations, and name a setting for repair."""
        lines = []
        for row, noise in self._judged:
            verdict = "NOT as deployed" if is_lost(row, noise) else "as deployed"
            lines.append(
                f"{verdict}: against {row.name} without rounding, {row.name} has {row.sqnr:.1f} dB in ONNX Runtime's "
                f"default session, and {noise.sqnr:.1f} dB without optimisations"
            )
        if self.restored_by is not None:
            asked = (
                "To repair it" if self.as_deployed is False else "Only if you need the results without optimisations"
            )
            lines.append(f"{asked}, run ONNX Runtime with {self.restored_by}.")
        return lines


def judged(deployed: Sequence[OutputRow], noise: Sequence[OutputRow]) -> list[tuple[OutputRow, OutputRow]]:
    """The pairs of rows (deployed, noise) of the outputs that are floats, and finite without rounding."""
    pairs = zip(deployed, noise, strict=False)
    return [pair for pair in pairs if pair[0].eps and pair[0].elements and math.isfinite(pair[1].noise)]


def is_lost(deployed: OutputRow, noise: OutputRow) -> bool:
    """Whether the default session's noise exceeds twice the noise of rounding to codes.

    If only some codes differ, the noise stays about the same. The bound is higher for outputs of few elements, whose
    noise may grow by chance.
    """
    by_rounding = 2 * (1 + noise.elements**-0.5) * noise.noise
    return deployed.noise > max(by_rounding, (_SUMS * deployed.eps) ** 2 * deployed.signal)


def add_rows(
    rows: list[OutputRow],
    names: Sequence[str],
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    step: float | None,
) -> None:
    """Add one batch to the rows of outputs; the first batch makes the rows."""
    if not rows:
        rows += [OutputRow(name, step=step) for name in names]
    for row, a, b in zip(rows, actual, expected, strict=True):
        row.add(a, b)


def _cells(row: Row) -> tuple[str, ...]:
    notes = [row.note] if row.note else []
    if row.nan_inputs:
        notes.append(f"{row.nan_inputs:,} NaN in")
    name = row.quantizer or "(model)"
    return name, row.spec, row.kind, f"{row.elements:,}", f"{row.differing:,}", ", ".join(notes)
