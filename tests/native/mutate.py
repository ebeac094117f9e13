"""Changes one place of the sources at a time, as mutations.txt says, and sees that the quick tests find each change.

    python tests/native/mutate.py                  # all of them; the first build of the kernels takes minutes
    python tests/native/mutate.py numerics sums.h  # those whose name or file has one of these texts
    python tests/native/mutate.py --list
    python tests/native/mutate.py --tests          # the tests that find them all, for `make core`

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
CPU = f"{SOURCE}/ops/cpu"
LIST = Path(__file__).with_name("mutations.txt")


@dataclass(frozen=True)
class Mutation:
    """One change of a file, and the tests that must fail by it."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @classmethod
    def read(cls, lines: str) -> Mutation:
        name, file, old, new, tests = lines.splitlines()
        if old[0] != "-" or new[0] != "+":
            sys.exit(f"{LIST.name}: {name}: the third line begins with -, the fourth with +")
        return cls(name, f"{SOURCE}/{file}", old[1:], new[1:], tests)

    @property
    def native(self) -> bool:
        return self.file.startswith(CPU)


def mutations() -> list[Mutation]:
    return [Mutation.read(lines) for lines in LIST.read_text().strip().split("\n\n")[1:]]


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
    chosen = [m for m in mutations() if not words or any(word in f"{m.name} {m.file}" for word in words)]
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
        print("\n".join(f"{m.name} ({m.file})" for m in mutations()))
        sys.exit(0)
    if sys.argv[1:] == ["--tests"]:
        print(*dict.fromkeys(test for m in mutations() for test in m.tests.split()))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
