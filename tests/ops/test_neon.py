"""The kernels for 64-bit Arm processors, compiled and run where the tests run on another."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

import fakequant as fq

NATIVE = Path(__file__).parents[1] / "native" / "neon.cpp"
KERNELS = Path(fq.__file__).parent / "ops" / "cpu"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Those of setup.py but for the optimisation, which takes longer than the run.
FLAGS = ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-static"]

pytestmark = [
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor runs the kernels in every other test"),
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"{COMPILER} or {EMULATOR} is not installed"
    ),
]


def compiled_and_run(kernels, folder, *flags):
    includes = [f"-I{path}" for path in [kernels, *include_paths()]]
    subprocess.run([COMPILER, *FLAGS, *flags, *includes, NATIVE, "-o", folder / "neon"], check=True)
    return subprocess.run([EMULATOR, folder / "neon"], check=True, capture_output=True, text=True).stdout


# With -O2, the least where a compiler takes different types to be apart unasked, it takes half as long again.
@pytest.mark.parametrize(
    "flags", [("-O1", "-fstrict-aliasing"), pytest.param(("-O2",), marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_values_and_masks_are_those_of_the_portable_loops(flags, tmp_path):
    assert compiled_and_run(KERNELS, tmp_path, *flags) == "0 values, 0 codes and 0 bits differ of 8265855\n"


@pytest.mark.exhaustive  # a minute to compile them once more
def test_the_comparison_can_fail(tmp_path):
    """A minimum that tells zeros apart and returns NaN wherever one is, as NEON's own does."""
    shutil.copytree(KERNELS, tmp_path / "kernels")
    header = tmp_path / "kernels" / "neon.h"
    text, right = header.read_text(), "{chosen(vcgtq_f32(a.low, b.low), a.low, b.low), "
    assert right in text
    header.write_text(text.replace(right, "{vmaxq_f32(a.low, b.low), "))
    found = compiled_and_run(tmp_path / "kernels", tmp_path, "-O1")  # which takes half the time
    assert not found.startswith("0 values")
