"""`make test-gpu` on the CPU as the device: a GPU is seldom there, and what compares must itself be able to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

import fakequant as fq
from benchmarks.gpu import machine
from fakequant.ops import dispatch, products
from tests.gpu import __main__ as command
from tests.gpu import execution, parity
from tests.gpu.large import large
from tests.support import cases

ROOT = Path(__file__).parents[2]
NAME = "uint1_affine"  # the fewest arithmetics
HERE = ["--device", "cpu", "--processes", "0", "--elements", "20000"]


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch):
    monkeypatch.setattr(command, "build_kernels", lambda: "the C++ kernels")


def task(name="given", format=NAME, dtype="float32", elements=20_000):
    return parity.Task(name, format, dtype, "cpu", elements)


def test_every_format_and_dtype_is_in_every_list():
    found = {(one.list, one.format, one.dtype) for one in parity.tasks("cuda", 10)}
    assert {
        (name, format, dtype) for name in ("given", "large") for format in cases.FORMATS for dtype in cases.DTYPES
    } < found
    assert {one.format for one in parity.tasks("cuda", 10) if one.list == "from the input"} == set(
        parity.dynamic_cases.FORMATS
    )


@pytest.mark.exhaustive
def test_green_lines_and_a_count_of_what_was_compared(monkeypatch, capsys):
    monkeypatch.setattr(parity, "GRANULARITIES", {"tensor": cases.GRANULARITIES["tensor"]})
    assert (
        command.main([*HERE, f"given, {NAME} float16", f"large, {NAME} float32", "integer products", "launches"]) == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "small tensors beside the reference, large ones beside the C++ kernels"
    assert printed[2].startswith(f"ok   given, {NAME} float16: ")
    assert printed[3].startswith(f"ok   large, {NAME} float32: ")
    assert " results, " in printed[4]
    assert "served: " in printed[4]
    assert printed[-4].startswith("--   launches: is of CUDA, and this is cpu")
    assert printed[-3].startswith("ok   integer products: 5 shapes")
    assert printed[-2].startswith("0 wrong, ")


# The callables of a plan that compute each result.
CALLS_OF = {
    "fake_quantize": ("values", "values_and_mask"),
    "grad_input": ("grad_input",),
    "grad_params": ("gradients",),
    "quantize": ("codes",),
    "dequantize": ("decode",),
}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("fake_quantize", {"y", "clip, y"}),
        ("grad_input", {"clip, dx", "code_range, dx"}),
        ("grad_params", {"clip, gradient of the scale, 0", "code_range, gradient of the zero point, 1"}),
        ("quantize", {"codes"}),
        ("dequantize", {"torch.float32 of codes"}),
    ],
)
def test_each_wrong_result_is_counted(operation, expected, monkeypatch):
    serving = type(dispatch.backends()[0] if not dispatch.backends()[0].unavailable() else dispatch.REFERENCE)
    right = serving.plan
    definition = serving is dispatch.ReferenceBackend

    def spoiled(function):
        def wrong(*given):
            result = function(*given)
            if operation == "quantize":  # the codes, not whether something was NaN
                return moved(result[0]), result[1]
            return tuple(map(moved, result)) if isinstance(result, tuple) else moved(result)

        return wrong

    def plan_with_faults(self, kind):
        plan = right(self, kind)
        if plan is None or (definition and len(dispatch.backends()) == 1):  # what is right
            return plan
        wrong = {name: spoiled(getattr(plan, name)) for name in CALLS_OF[operation] if getattr(plan, name) is not None}
        return plan._replace(**wrong)

    monkeypatch.setattr(dispatch, "_known", {})
    monkeypatch.setattr(serving, "plan", plan_with_faults)
    found = parity.Found()
    where = cases.GRANULARITIES["tensor"]
    numbers = cases.hostile(cases.FORMATS["int8_affine"], where, fq.Arithmetic.DIVIDE, torch.float32)
    parity.compare_given(task(), found, numbers, fq.QuantSpec("int8", where.granularity, symmetric=False), "here")
    named = {line.split("here ")[1].split(":")[0] for line in found.wrong}
    assert expected <= named
    assert found.compared == 19


def moved(result):
    """A tensor whose last element is another one; masks, which are bytes, stay."""
    if result is None or result.dtype == torch.uint8 or not result.numel():
        return result
    result = result.contiguous().clone()
    result.view(-1)[-1] = 3 if not result.is_floating_point() else 0.123
    return result


@pytest.mark.parametrize("name", parity.LISTS)
def test_a_scale_that_is_another_on_the_device_makes_every_list_red(name, monkeypatch):
    right = parity.library.fake_quantize, parity.library.fake_quantize_dynamic
    turns = {"number": 0}

    def every_second(function):
        def call(x, *rest):
            turns["number"] += 1
            return function(x, *rest) + 2.0**-10 * (turns["number"] > 5)

        return call

    monkeypatch.setattr(parity.library, "fake_quantize", every_second(right[0]))
    monkeypatch.setattr(parity.library, "fake_quantize_dynamic", every_second(right[1]))
    monkeypatch.setattr(parity, "GRANULARITIES", {"tensor": cases.GRANULARITIES["tensor"]})
    monkeypatch.setattr(parity.dynamic_cases, "RUNS", {"tensor": cases.GRANULARITIES["tensor"]})
    found = parity.run(task(name, "uint8_affine" if name != "from the input" else "uint8"))
    assert found.wrong
    assert "elements differ, first at" in found.wrong[0]


def test_a_red_task_is_printed_and_decides(monkeypatch, capsys):
    def red(task):
        return parity.Found(10, 1000, ["a differs", "b", "c", "d"])

    monkeypatch.setattr(parity, "run", red)
    assert command.main([*HERE, f"given, {NAME} float32"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == f"RED  given, {NAME} float32: 4 of 10 results, 1,000 values, 0.0 s"
    assert printed[3:6] == ["       a differs", "       b", "       c"]
    assert printed[-4].startswith("3 wrong, ")
    assert printed[-3] == f"RED  given, {NAME} float32: a differs"


def test_an_error_is_red_too_and_names_its_place(monkeypatch):
    monkeypatch.setattr(parity, "by_given", lambda *call: torch.ones(2) @ torch.ones(3))
    (wrong,) = parity.run(task()).wrong
    assert wrong.startswith("raises RuntimeError: ")
    assert "test_gpu_parity.py:" in wrong


def test_a_result_on_another_device_is_wrong():
    found = parity.Found()
    found.compare({"y": torch.ones(2)}, {"y": torch.ones(2)}, "it", "cuda")
    assert found.wrong == ["it y: is on cpu"]


def test_what_another_backend_cannot_serve_is_told():
    found, x = parity.Found(), torch.ones(4)
    wide = fq.QuantSpec(fq.FloatFormat("e7m3", 7, 3, fq.numerics.formats.Specials.NONE))
    found.note_backend(x, wide)
    assert found.served == {"reference": 1}
    assert any("2**64" in reason or "not built" in reason for reason in found.reasons)


@pytest.mark.exhaustive
def test_a_process_of_its_own(capsys):
    assert command.main([*HERE[:3], "2", *HERE[4:], f"given, {NAME} float32"]) == 0
    assert f"ok   given, {NAME} float32" in capsys.readouterr().out


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("name", cases.GRANULARITIES)
def test_large_tensors_have_their_groups_and_repeat_moved_ties(name, axis, monkeypatch):
    monkeypatch.setattr("tests.gpu.large._MADE", 1 << 10)
    monkeypatch.setattr("tests.gpu.large._MOVED", 1 << 12)
    where, case = cases.GRANULARITIES[name], cases.FORMATS["int8_affine"]
    numbers = large(case, where, fq.Arithmetic.DIVIDE, torch.float32, 30_000, axis)
    if not where.shape:
        assert numbers.x.shape == ()
        return
    assert 30_000 <= numbers.x.numel() < 60_000
    groups = where.granularity.group_shape(numbers.x.shape)
    assert numbers.params.scale.shape == numbers.params.zero_point.shape == groups
    codes = numbers.x.double() / cases_spread(numbers.params.scale.double(), numbers.x.shape)
    finite = codes[codes.isfinite() & (codes.abs() < 300)]
    near_a_tie = ((finite - finite.floor()) - 0.5).abs() < 1e-4
    assert 0.15 < near_a_tie.float().mean() < 0.7
    assert len(numbers.x.unique()) > 1 << 10


def cases_spread(scale, shape):
    for axis, (n, groups) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = scale.repeat_interleave(n // groups, axis)
    return scale


# How a device executes


@pytest.mark.exhaustive
def test_what_can_be_tried_on_the_cpu_is_right_there():
    assert execution.beyond_32_bits("cpu", 30_001, 4096) == "30,001 elements"
    assert execution.compiled_bits("cpu", "aot_eager", 2) == "2 kinds in 2 dtypes"
    assert execution.compiled_parameters("cpu", "aot_eager") == "4 chosen, 5 learned"
    for name in ("integer products", "histograms", "calibration"):
        assert execution.tried(name, "cpu")[0] == "ok"


def test_all_else_says_that_it_is_of_cuda():
    cuda = ("launches", "no synchronisation in a training step", "no synchronisation in a call", "CUDA graphs")
    for name in (*cuda, "the current stream"):
        assert execution.tried(name, "cpu") == ("--", "is of CUDA, and this is cpu")


def test_steps_that_differ_are_red(monkeypatch):
    smaller = {execution.CNN: (2, 3, 8, 8), execution.BLOCK: (4, 384)}
    assert "transformer's block" in execution.training_steps("cpu", smaller)
    right = products.scaled
    monkeypatch.setattr(products, "scaled", lambda *given, **options: 2.0 * right(*given, **options))
    assert execution.tried("integer products", "cpu")[0] == "RED"


def test_pieces_that_differ_and_wrong_ranges_are_red(monkeypatch):
    right = execution.both_ways

    def wrong(quantize, x, dy):
        y, dx = right(quantize, x, dy)
        return y, torch.zeros_like(dx) if x.numel() > 5000 else dx

    monkeypatch.setattr(execution, "both_ways", wrong)
    with pytest.raises(AssertionError, match="dx from 0 on"):
        execution.beyond_32_bits("cpu", 30_001, 4096)
    numbers = iter(range(1, 99))
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_: x * next(numbers))
    assert execution.tried("calibration", "cpu")[0] == "RED"


def test_products_of_two_tensors_and_counts_that_differ_are_red(monkeypatch):
    matmul, observe = products.matmul, execution.observe
    monkeypatch.setattr(products, "matmul", lambda *given: 2.0 * matmul(*given))
    assert "torch.int8 None by torch.int8 None" in execution.tried("integer products", "cpu")[1]
    monkeypatch.setattr(
        execution, "observe", lambda *given: observe(*given)._replace(counts=observe(*given).counts + 1)
    )
    outcome, what = execution.tried("histograms", "cpu")
    assert outcome == "RED"
    assert "counts" in what


def test_errors_and_reasons_of_checks_are_told(monkeypatch):
    def refuses(device):
        raise execution.NotHere("not on this one")

    monkeypatch.setattr(execution, "CHECKS", {"one": refuses, "two": lambda device: 1 / 0})
    assert execution.tried("one", "cpu") == ("--", "not on this one")
    assert execution.tried("two", "cpu") == ("RED", "raises ZeroDivisionError: division by zero")
    assert command.main([*HERE, "one", "two"]) == 1


def test_launches_are_what_a_profile_shows_on_the_device():
    events = [
        SimpleNamespace(name=name, device_type=kind)
        for name, kind in (("cudaLaunch", DeviceType.CPU), ("kernel", DeviceType.CUDA))
    ]
    assert execution.launches(events) == ["kernel"]


# Without


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert command.main([]) == 0
    finds_none, no_torch = capsys.readouterr().out.splitlines()
    assert "finds no GPU here; nothing was run" in finds_none
    assert no_torch.startswith("torch is not installed for")


def test_kernels_that_cannot_be_built_are_told(monkeypatch):
    monkeypatch.setattr("fakequant.ops.cpu.backend.load_kernels", LoadsNot())
    failed = subprocess.CompletedProcess([], 1, "", "warning\nno compiler\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *call, **named: failed)
    assert machine.build_kernels() == "the reference, because the C++ kernels cannot be built here: no compiler"


class LoadsNot:
    def __call__(self):
        return "not built"

    def cache_clear(self):
        pass


OPTIONAL = "matplotlib onnx onnx_ir onnxruntime onnxscript rich safetensors sklearn triton typer yaml pytest"
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL.split()!r}))  # as if they were not installed
from tests.gpu.__main__ import main
raise SystemExit(main({[*HERE, f"given, {NAME} float32", "calibration"]!r}))
"""


@pytest.mark.exhaustive
def test_torch_and_numpy_are_all_that_it_needs():
    paths = os.pathsep.join(str(ROOT / place) for place in ("src", "."))
    given = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=given, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
