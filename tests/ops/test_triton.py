"""The kernels for GPUs, in triton's interpreter: bit for bit the reference. And what is true of them without a GPU.

The interpreter is chosen when triton is imported, for the whole process, in which torch.compile needs the other triton.
So it runs the tests of kernels in processes of their own, whatever runs beside them.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fakequant as fq
from fakequant.numerics.formats import FloatFormat, Specials
from fakequant.numerics.granularity import Tiles
from fakequant.ops import dispatch
from fakequant.ops.triton import call
from fakequant.ops.triton.backend import EXCLUSIONS, TritonBackend
from fakequant.ops.triton.call import KernelCall, Reduction, ScaleChoice, Sweep, TilePlace, Tiling
from fakequant.report import environment

TESTS = Path(__file__).parents[1]
FILES = ("test_cpu_kernels.py", "test_cpu_dynamic.py", "test_histogram_kernel.py", "test_sweep.py")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is for Linux")


def run_interpreted(*options, files=FILES, interpret="1"):
    """The cases of the backend for GPUs: without the interpreter there are none."""
    variables = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "triton", *options]
    command += [str(TESTS / "ops" / name) for name in files]
    return subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True, text=True, check=False)


@needs_triton
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_equals_the_reference(chosen):
    found = run_interpreted("-m", f"{chosen} and not exhaustive")
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert " passed" in found.stdout


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FILES)
def test_equals_the_reference_in_every_combination(name):
    found = run_interpreted("-m", "exhaustive", files=[name])
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]


@needs_triton
def test_without_the_interpreter_there_are_no_cases():
    assert run_interpreted(interpret="0").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


# For each exclusion, a call that it is for.
EXCLUDED = (
    (fq.QuantSpec.parse("int8 per_tensor scale=float16"), torch.float32, False),
    (fq.QuantSpec(FloatFormat("wide", 8, 7, Specials.IEEE)), torch.float32, False),
    (
        fq.QuantSpec(FloatFormat("fine", 8, 3, Specials.IEEE, bias=127), rounding=fq.Rounding.STOCHASTIC),
        torch.float32,
        False,
    ),
)


def test_every_exclusion_has_a_call_and_a_line_in_the_documentation():
    page = (TESTS.parent / "docs" / "notes" / "gpu.md").read_text()
    assert len(EXCLUDED) == len(EXCLUSIONS)
    for (what, reason, applies), (spec, dtype, codes) in zip(EXCLUSIONS, EXCLUDED, strict=True):
        x = torch.ones(4, dtype=dtype)
        assert f"| {what} | {reason} |" in page
        assert applies(x, spec, codes)
        assert TritonBackend("cpu").unsupported(x, spec, codes=codes) is not None
        assert TritonBackend("cpu").unsupported(x, fq.QuantSpec("int8"), codes=codes) is None


@pytest.mark.parametrize("fixed", [KernelCall, ScaleChoice, Tiling, Sweep], ids=lambda fixed: fixed.__name__)
def test_kernels_read_every_field_that_they_are_compiled_for(fixed):
    kernels = Path(call.__file__).parent / "kernels"
    read = {name for path in kernels.glob("*.py") for name in re.findall(r"[A-Z]\.([a-z_]+)", path.read_text())}
    assert {field.name for field in fields(fixed)} - read == set()


def test_positions_of_the_last_block_of_a_sweep_fit_in_their_integers():
    """They end beyond the tensor, by as many elements as a program takes."""
    for missing in (1, 7, 3 * 2048, 8 * 2048 - 1):
        place = TilePlace.of(Tiles(1, 2**31 - missing, 1, 1), 2048)
        assert Reduction.of(place).sweep.wide
    assert not Reduction.of(TilePlace.of(Tiles(1, 2**30, 1, 1), 2048)).sweep.wide


def test_says_why_it_cannot_serve(monkeypatch):
    backend, x = TritonBackend(), torch.ones(2)
    assert backend.unsupported(x, fq.QuantSpec("int8"), codes=False) == "the tensor is on cpu"
    plain, subclass = TritonBackend("cpu"), torch.nn.Buffer(x).as_subclass(type("Own", (torch.Tensor,), {}))
    assert plain.unsupported(subclass, fq.QuantSpec("int8"), codes=False) == "Own is not a plain tensor"
    monkeypatch.setattr("fakequant.ops.triton.backend.find_spec", lambda name: None)
    assert backend.unavailable() == "triton is not installed"
    monkeypatch.setattr("fakequant.ops.triton.backend.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.unavailable() == "there is no GPU that torch can use"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in backend.unavailable()


@pytest.fixture
def gpu(monkeypatch):
    """As if torch had a GPU; and a compiler for triton, and the headers of Python."""
    monkeypatch.setattr("fakequant.ops.triton.backend.find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    return monkeypatch


def test_without_what_triton_compiles_with_it_cannot_serve(gpu):
    assert TritonBackend().unavailable() is None
    gpu.setenv("CC", "no-such-compiler")
    assert "CC is 'no-such-compiler', which is not a program" in TritonBackend().unavailable()
    gpu.delenv("CC")
    gpu.setattr(Path, "is_file", lambda path: path.name != "Python.h")
    assert "Python.h; install them" in TritonBackend().unavailable()
    gpu.setattr("shutil.which", lambda name: None)
    assert "there is neither gcc nor clang" in TritonBackend().unavailable()
    # In the interpreter nothing is compiled.
    assert TritonBackend("cpu").unavailable() is None


def test_looking_for_a_compiler_does_not_import_triton():
    code = """
import sys, torch
from fakequant.ops.triton.backend import TritonBackend
torch.cuda.is_available = lambda: True
print(TritonBackend().unavailable(), "triton" in sys.modules)
"""
    env = {**os.environ, "CC": "no-such-compiler"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "which is not a program" in found.stdout or find_spec("triton") is None
    assert found.stdout.split()[-1] == "False"


def test_the_environment_shows_why_it_cannot_serve(gpu):
    gpu.setattr("shutil.which", lambda name: None)
    found = environment()
    assert found["backend triton"].startswith("not available: triton needs a C compiler, and there is neither gcc nor")
    assert found["GPU"] == "a GPU"
    gpu.setattr("shutil.which", lambda name: name)
    assert environment()["backend triton"] == "available"
    gpu.setattr("fakequant.ops.triton.backend.find_spec", lambda name: None)
    assert environment()["backend triton"] == "not available: triton is not installed"


def test_the_reference_serves_where_triton_cannot_compile(gpu):
    """The tensor is on the CPU, and triton would serve it if it could."""
    backend = TritonBackend("cpu")
    gpu.setattr(dispatch, "_backends", (backend, dispatch.REFERENCE))
    assert dispatch.choose(torch.ones(1), fq.QuantSpec("int8")) is backend
    backend = TritonBackend("cuda")
    gpu.setattr(backend, "unsupported", lambda x, spec, *, codes: None)
    gpu.setattr(dispatch, "_backends", (backend, dispatch.REFERENCE))
    gpu.setattr("shutil.which", lambda name: None)
    assert dispatch.choose(torch.ones(1), fq.QuantSpec("int8")) is dispatch.REFERENCE
