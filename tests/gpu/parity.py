"""A device beside the CPU, bit by bit: everything that the operator computes, on the cases of the tests."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import fakequant as fq
from fakequant.ops import dispatch, library
from tests.gpu.large import large, large_gradient
from tests.support import cases, dynamic_cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, FormatCase, hostile_gradient
from tests.support.exactness import by_the_reference

# The most faults of one format that are printed.
TOLD = 3
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """The comparisons of one format and dtype, which one process makes."""

    list: str
    format: str
    dtype: str
    device: str
    elements: int

    def __str__(self) -> str:
        return f"{self.list}, {self.format} {self.dtype}"


@dataclass
class Found:
    """What came of a task."""

    compared: int = 0
    values: int = 0
    wrong: list[str] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def compare(self, actual: Results, expected: Results, label: str, device: str) -> None:
        """Count the results of the device, and note those that are not the CPU's."""
        assert actual.keys() == expected.keys()
        for name, right in expected.items():
            found = actual[name]
            self.compared += 1
            self.values += right.numel()
            try:
                assert found.device.type == torch.device(device).type, f"{label} {name}: is on {found.device}"
                assert_same_bits(found, right.to(found.device), f"{label} {name}")
            except AssertionError as difference:
                self.wrong.append(str(difference))

    def note_backend(self, x: Tensor, spec: fq.QuantSpec) -> None:
        """Remember which backend serves, and why those before it do not, unless by being for the CPU."""
        serving = dispatch.choose(x, spec)
        self.served[serving.name] += 1
        for backend in dispatch.backends()[: dispatch.backends().index(serving)]:
            if x.device.type == "cpu" or backend.name != "cpu":
                reason = backend.unavailable() or backend.unsupported(x, spec, codes=False)
                self.reasons.add(f"{backend.name}: {reason}")


def run(task: Task) -> Found:
    """Make the comparisons of a task; an error is one more thing that is wrong, so that others are still made."""
    found, start = Found(), time.monotonic()
    torch.manual_seed(0)
    try:
        with _poisoned_memory():
            LISTS[task.list](task, found)
    except Exception as error:  # Whatever a kernel or its compiler raises is what this is to find.
        place = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip().splitlines() or [""])[0]
        found.wrong.append(f"raises {type(error).__name__}: {first} ({place.filename}:{place.lineno})")
    found.seconds = time.monotonic() - start
    return found


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Within it torch.empty gives NaN, or the largest integer, so that an element that no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on(device: str, params: fq.QParams) -> fq.QParams:
    """Scale and zero point on a device; the seed stays on the CPU, where it is drawn."""
    scale, zero_point = (None if p is None else p.to(device) for p in params[:2])
    assert scale is not None
    return params._replace(scale=scale, zero_point=zero_point)


def by_given(x: Tensor, params: fq.QParams, spec: fq.QuantSpec, dy: Tensor, sums_of: tuple[Tensor, ...]) -> Results:
    """All that is computed with given parameters."""
    results = {"y": library.fake_quantize(x, params, spec)}
    for gradient in fq.Gradient:
        leaf = x.detach().requires_grad_()
        y = library.fake_quantize(leaf, params, spec.replace(gradient=gradient))
        results[f"{gradient.value}, y"] = y.detach()
        results[f"{gradient.value}, dx"] = torch.autograd.grad(y, leaf, dy)[0]
    # In float64, which hides no bit of the sums.
    precise = params._replace(
        scale=params.scale.double(), zero_point=None if params.zero_point is None else params.zero_point.double()
    )
    for gradient in (fq.Gradient.CODE_RANGE, fq.Gradient.CLIP):
        by_gradient = spec.replace(gradient=gradient)
        backend = Calls(dispatch.choose(x, by_gradient))
        for number, inputs in enumerate(sums_of):
            sums = backend.grad_params(dy, inputs, precise, by_gradient, (True, True))
            for name, total in zip(("scale", "zero point"), sums, strict=True):
                if total is not None:
                    results[f"{gradient.value}, gradient of the {name}, {number}"] = total
    codes = library.quantize(x, params, spec)
    results["codes"] = codes
    for dtype in dict.fromkeys((torch.float32, x.dtype)):
        results[f"{dtype} of codes"] = library.dequantize(codes, params, spec, dtype)
    return results


def by_range(x: Tensor, spec: fq.QuantSpec, dy: Tensor) -> Results:
    """All that is computed with the parameters that the range of x gives."""
    params = fq.choose_qparams(x, spec)
    results = {"scale": params.scale, "y": library.fake_quantize_dynamic(x, spec)}
    if params.zero_point is not None:
        results["zero point"] = params.zero_point
    for gradient in fq.Gradient:
        leaf = x.detach().requires_grad_()
        y = library.fake_quantize_dynamic(leaf, spec.replace(gradient=gradient))
        results[f"{gradient.value}, y"] = y.detach()
        results[f"{gradient.value}, dx"] = torch.autograd.grad(y, leaf, dy)[0]
    return results


def finite(x: Tensor) -> Tensor:
    """x without what makes whole sums NaN or infinite."""
    return x.nan_to_num(0.0, 3.0, -3.0).clamp(-1e4, 1e4)


def compare_given(
    task: Task, found: Found, numbers: cases.Numbers, spec: fq.QuantSpec, label: str, layout: str = "contiguous"
) -> None:
    """The device beside the reference; large tensors beside the CPU's own kernels, which equal it bit for bit.

    Tensors are laid out on each side: what moves a tensor between devices leaves out gaps.
    """
    lay, params = LAYOUTS[layout], numbers.params
    x, own, small = lay(numbers.x), lay(numbers.x.to(task.device)), numbers.x.numel() < task.elements
    dy = hostile_gradient(x) if small else large_gradient(x)
    sums_of = (x, finite(x)) if small else (finite(x),)
    with by_the_reference() if small else nullcontext():
        expected = by_given(x, params, spec, dy, sums_of)
    own_sums_of = (own, finite(own)) if small else (finite(own),)
    actual = by_given(own, on(task.device, params), spec, dy.to(task.device), own_sums_of)
    found.note_backend(own, spec)
    found.compare(actual, expected, f"{spec}, {label}", task.device)


def compare_range(
    task: Task, found: Found, x: Tensor, spec: fq.QuantSpec, label: str, layout: str = "contiguous"
) -> None:
    """The same where scales are taken from the input."""
    lay = LAYOUTS[layout]
    x, own, small = lay(x), lay(x.to(task.device)), x.numel() < task.elements
    dy = hostile_gradient(x) if small else large_gradient(x)
    with by_the_reference() if small else nullcontext():
        expected = by_range(x, spec, dy)
    actual = by_range(own, spec, dy.to(task.device))
    found.note_backend(own, spec)
    found.compare(actual, expected, f"{spec}, {label}", task.device)


def _given(task: Task, found: Found) -> None:
    """Every granularity and arithmetic, two memory layouts in turn, and stochastic rounding with one of these."""
    case, dtype = FORMATS[task.format], DTYPES[task.dtype]
    for turn, (name, where) in enumerate(GRANULARITIES.items(), list(FORMATS).index(task.format)):
        arithmetics = case.arithmetics()
        for number, arithmetic in enumerate(arithmetics):
            numbers = cases.hostile(case, where, arithmetic, dtype, seed=turn)
            spec = case.spec(where.granularity, arithmetic)
            for layout in [list(LAYOUTS)[(turn + 2 * number + k) % len(LAYOUTS)] for k in (0, 1)]:
                compare_given(task, found, numbers, spec, f"{name} {layout}", layout)
            if number == turn % len(arithmetics):
                drawn = replace(numbers, params=numbers.params._replace(seed=torch.tensor(turn * 2**40 - 3)))
                stochastic = spec.replace(rounding=fq.Rounding.STOCHASTIC)
                compare_given(task, found, drawn, stochastic, name)


def _ranges(task: Task, found: Found) -> None:
    """Every granularity with every format of scales, in one memory layout each."""
    for turn, (name, where) in enumerate(dynamic_cases.RUNS.items()):
        layout = list(LAYOUTS)[turn % len(LAYOUTS)]
        x = dynamic_cases.hostile(where, DTYPES[task.dtype], turn)
        if where.shape:
            for spec in dynamic_cases.specs(task.format, where.granularity):
                compare_range(task, found, x, spec, f"{name} {layout}", layout)


def _large(task: Task, found: Found) -> None:
    """Every granularity and arithmetic on large tensors, of which the first or the last axis grows, in turn."""
    case: FormatCase = FORMATS[task.format]
    for turn, (name, where) in enumerate(GRANULARITIES.items(), list(FORMATS).index(task.format)):
        for arithmetic in case.arithmetics():
            if arithmetic is not fq.Arithmetic.RECIPROCAL:  # which is given the numbers of DIVIDE
                numbers = large(case, where, arithmetic, DTYPES[task.dtype], task.elements, -(turn % 2))
                label = f"{name} {tuple(numbers.x.shape)}"
            compare_given(task, found, numbers, case.spec(where.granularity, arithmetic), label)
        spec = fq.QuantSpec(case.format, where.granularity, symmetric=case.symmetric)
        compare_range(task, found, numbers.x, spec, f"{label}, from the input")


LISTS = {"given": _given, "from the input": _ranges, "large": _large}
FORMATS_OF = {"given": tuple(FORMATS), "from the input": tuple(dynamic_cases.FORMATS), "large": tuple(FORMATS)}


def tasks(device: str, elements: int) -> list[Task]:
    """All tasks, the quickest first."""
    return [
        Task(name, format, dtype, device, elements) for name in LISTS for format in FORMATS_OF[name] for dtype in DTYPES
    ]
