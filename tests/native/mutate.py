"""Changes the kernels and the definition in one place at a time, and sees that the quick tests find each change.

    python tests/native/mutate.py                  # all of them; the first build of the kernels takes minutes
    python tests/native/mutate.py numerics sums.h  # those whose name or file has one of these texts
    python tests/native/mutate.py --list

Works in a copy of the tree, in build/mutate; object files are kept there, so that a change of one C++ file compiles the
files that read it. Exit status 1 where a change survives or its text is gone from the source.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutate"
TREE, OBJECTS = FOLDER / "tree", FOLDER / "objects"
SOURCE = "src/fakequant"
NUMERICS, CPU = f"{SOURCE}/numerics", f"{SOURCE}/ops/cpu"


@dataclass(frozen=True)
class Mutation:
    """One change of a file, and the tests that must fail by it."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def native(self) -> bool:
        return self.file.startswith(CPU)


MUTATIONS = [
    Mutation(
        "integers round half up",
        f"{NUMERICS}/integers.py",
        "return v.round()",
        "return (v + 0.5).floor()",
        "tests/numerics/test_reference.py",
    ),
    Mutation(
        "NaN has the integer code 0",
        f"{NUMERICS}/integers.py",
        "code.isnan(), self.low, code",
        "code.isnan(), 0, code",
        "tests/numerics/test_reference.py",
    ),
    Mutation(
        "ties of tables go to odd codes",
        f"{NUMERICS}/tables.py",
        "above % 2 == 0",
        "above % 2 == 1",
        "tests/numerics/test_reference.py",
    ),
    Mutation(
        "integers keep a negative zero",
        f"{NUMERICS}/reference.py",
        "codes = codes + 0.0",
        "codes = codes * 1.0",
        "tests/numerics/test_reference.py",
    ),
    Mutation(
        "the highest code is outside the mask",
        f"{NUMERICS}/reference.py",
        "inside = (code >= spec.format.quant_min) & (code <= spec.format.quant_max)",
        "inside = (code >= spec.format.quant_min) & (code < spec.format.quant_max)",
        "tests/numerics/test_reference.py",
    ),
    Mutation(
        "clipping passes gradients at its lower end",
        f"{NUMERICS}/reference.py",
        "inside = (b.x > lo) & (b.x < hi)",
        "inside = (b.x >= lo) & (b.x < hi)",
        "tests/numerics/test_reference.py",
    ),
    Mutation(
        "the range of inputs is open at its upper end",
        f"{NUMERICS}/reference.py",
        "inside = (b.x >= lo) & (b.x <= hi)",
        "inside = (b.x >= lo) & (b.x < hi)",
        "tests/numerics/test_reference.py tests/ops/test_library.py",
    ),
    Mutation(
        "the gradient of a multiplier has the other sign",
        f"{NUMERICS}/reference.py",
        "scale = (-scale / b.scale / b.scale)",
        "scale = (scale / b.scale / b.scale)",
        "tests/ops/test_plans_learned.py",
    ),
    Mutation(
        "sums keep half of their digits",
        f"{NUMERICS}/sums.py",
        "DIGITS = 4",
        "DIGITS = 2",
        "tests/numerics/test_sums.py",
    ),
    Mutation(
        "a negative zero is stored where the format has none",
        f"{NUMERICS}/floats.py",
        "torch.signbit(code) & ((code != 0) | self.grid.negative_zero)",
        "torch.signbit(code)",
        "tests/numerics/test_formats.py tests/numerics/test_reference.py",
    ),
    Mutation(
        "zero points are cut off",
        f"{NUMERICS}/qparams.py",
        "divide(lo, scale).round()",
        "divide(lo, scale).trunc()",
        "tests/ops/test_functional.py",
    ),
    Mutation(
        "random words of nine rounds",
        f"{NUMERICS}/philox.py",
        "_ROUNDS = 10",
        "_ROUNDS = 9",
        "tests/numerics/test_philox.py",
    ),
    Mutation(
        "kernels round half up",
        f"{CPU}/rounding.h",
        "return std::rint(v);",
        "return std::floor(v + C(0.5));",
        "tests/ops/test_cpu_kernels.py",
    ),
    Mutation(
        "bits of the last byte of a mask in the other order",
        f"{CPU}/apply_mask.h",
        "(mask[bytes] >> (i % 8)) & 1",
        "(mask[bytes] >> (7 - i % 8)) & 1",
        "tests/ops/test_cpu_kernels.py",
    ),
    Mutation(
        "sums of codes are scaled in another order",
        f"{CPU}/products.cpp",
        "static_cast<float>(sums[c]) * (s * column_scale[c])",
        "(static_cast<float>(sums[c]) * s) * column_scale[c]",
        "tests/ops/test_integer.py",
    ),
    Mutation(
        "the rest of a transposed product reads the next column",
        f"{CPU}/products.cpp",
        "out[c * inner + i] = scaled[i * e.columns + c];",
        "out[c * inner + i] = scaled[i * e.columns + (c + 1) % e.columns];",
        "tests/ops/test_integer.py",
    ),
    Mutation(
        "power-of-two scales step one number late",
        f"{CPU}/scales.h",
        "(mantissa >= up_from)",
        "(mantissa > up_from)",
        "tests/ops/test_cpu_dynamic.py",
    ),
    Mutation(
        "an infinity counts as finite",
        f"{CPU}/histogram.cpp",
        "lo > Ordered<C>::of(-kInfinity)",
        "lo >= Ordered<C>::of(-kInfinity)",
        "tests/ops/test_histogram_kernel.py",
    ),
    Mutation(
        "a thread leaves out its last element",
        f"{CPU}/chunks.h",
        "std::min(end * kChunk, elements) - begin * kChunk);",
        "std::min(end * kChunk, elements) - begin * kChunk - (begin > 0));",
        "tests/ops/test_cpu_kernels.py",
    ),
    Mutation(
        "sums of gradients keep half of their digits",
        f"{CPU}/sums.h",
        "constexpr int kDigits = 4;",
        "constexpr int kDigits = 2;",
        "tests/ops/test_cpu_kernels.py",
    ),
]


def compile_once(command: list[str]) -> int:
    """Runs a compiler, or copies the object file of an earlier run with the same preprocessed source and flags."""
    if "-c" not in command:
        return subprocess.run(command).returncode
    target = command.index("-o") + 1
    rest = [word for place, word in enumerate(command) if place not in (target - 1, target)]
    read = subprocess.run([*rest, "-E"], stdout=subprocess.PIPE)
    if read.returncode:
        return read.returncode
    # Lines that begin with # name the folder of the copy.
    text = b"\n".join(line for line in read.stdout.splitlines() if not line.startswith(b"#"))
    kept = OBJECTS / f"{hashlib.sha256(shlex.join(rest).encode() + text).hexdigest()}.o"
    if not kept.exists():
        if code := subprocess.run(command).returncode:
            return code
        shutil.copy(command[target], kept)
    shutil.copy(kept, command[target])
    return 0


def copy_tree() -> None:
    """The files that git knows, as they are now."""
    shutil.rmtree(TREE, ignore_errors=True)
    OBJECTS.mkdir(parents=True, exist_ok=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    for name in filter(None, names):
        source, target = ROOT / os.fsdecode(name), TREE / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    for kernels in (ROOT / CPU).glob("_kernels*.so"):
        shutil.copy(kernels, TREE / CPU)


def build() -> None:
    """Builds the kernels of the copy, in place."""
    compiler = shlex.join([sys.executable, str(Path(__file__).resolve()), "--compile", "g++"])
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", str(FOLDER / "tmp")]
    shutil.rmtree(FOLDER / "tmp", ignore_errors=True)
    for kernels in (TREE / CPU).glob("_kernels*.so"):
        kernels.unlink()
    subprocess.run(command, cwd=TREE, env=os.environ | {"CC": compiler, "CXX": compiler}, check=True)
    if not list((TREE / CPU).glob("_kernels*.so")):
        sys.exit("the kernels were not built; the compiler's messages above say why")


def is_found(mutation: Mutation) -> bool:
    """Whether a test fails; an error before the tests, such as a missing file, ends the program."""
    options = ["-q", "-x", "-n", "0", "-m", "not exhaustive and not slow"]
    command = [sys.executable, "-m", "pytest", *options, *mutation.tests.split()]
    paths = {"PYTHONPATH": os.pathsep.join([str(TREE / "src"), str(TREE)])}
    found = subprocess.run(command, cwd=TREE, env=os.environ | paths, capture_output=True, text=True)
    if found.returncode not in (0, 1):
        sys.exit(f"{mutation.name}: the tests did not run\n{found.stdout[-3000:]}{found.stderr[-3000:]}")
    return found.returncode == 1


def try_out(mutation: Mutation) -> bool:
    """Prints and returns whether the tests find a change."""
    start, file = time.monotonic(), TREE / mutation.file
    right = file.read_text()
    if right.count(mutation.old) != 1:
        print(f"STALE     {mutation.name}: {mutation.file} has its text {right.count(mutation.old)} times, expected 1")
        return False
    try:
        file.write_text(right.replace(mutation.old, mutation.new))
        if mutation.native:
            build()
        found = is_found(mutation)
    finally:
        file.write_text(right)
    seconds = f"{time.monotonic() - start:.0f} s"
    print(f"{'found    ' if found else 'SURVIVED '} {mutation.name} ({mutation.file}), {seconds}", flush=True)
    return found


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in f"{m.name} {m.file}" for word in words)]
    if not chosen:
        sys.exit(f"no change has one of the texts {words}; `--list` shows all")
    copy_tree()
    found = []
    # The Python files first: their kernels are the ones that are installed.
    for mutation in sorted(chosen, key=lambda m: m.native):
        found.append(try_out(mutation))
    print(f"{sum(found)} of {len(found)} changes are found")
    return int(not all(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        sys.exit(compile_once(sys.argv[2:]))
    if sys.argv[1:] == ["--list"]:
        print("\n".join(f"{m.name} ({m.file})" for m in MUTATIONS))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
