"""Builds the kernels with a sanitizer, sees that it catches a deliberate fault, and runs `sanitized.py` with them.

    python tests/native/sanitize.py                # address, then undefined
    python tests/native/sanitize.py undefined

Of the repository's root; the normal kernels stay as they are. Exit status 1 where a sanitizer reports something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("address", "undefined")
# By which a report is known.
REPORTS = {"address": "ERROR: AddressSanitizer", "undefined": "runtime error"}
# Python allocates much that lives until the end, which is no leak of the kernels.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def library(name: str) -> str:
    """The path of a library of GCC."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def build(kind: str) -> Path:
    """A copy of the package with sanitized kernels, and the folder that has it."""
    folder = ROOT / "build" / f"sanitize-{kind}"
    package = folder / "fakequant"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "src/fakequant", package, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "build_ext",
        "--build-lib",
        folder,
        "--build-temp",
        folder / "tmp",
    ]
    subprocess.run(
        command, cwd=ROOT, env=os.environ | {"FAKEQUANT_SANITIZER": kind, "CC": "gcc", "CXX": "g++"}, check=True
    )
    if not list((package / "ops/cpu").glob("_kernels*.so")):
        sys.exit(f"the kernels were not built with -fsanitize={kind}; the compiler's messages above say why")
    return folder


def run(kind: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`sanitized.py` with the sanitized kernels."""
    settings = OPTIONS | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "2"}
    if kind == "address":  # Python itself is not compiled with it, and the C++ library must be there before it
        settings["LD_PRELOAD"] = f"{library('libasan.so')} {library('libstdc++.so')}"
    command = [sys.executable, str(ROOT / "tests/native/sanitized.py"), *arguments]
    return subprocess.run(command, env=os.environ | settings, stdout=None, stderr=subprocess.PIPE, text=True)


def check(kind: str) -> bool:
    """Whether the sanitizer catches the fault, and reports nothing else."""
    start = time.monotonic()
    folder = build(kind)
    print(f"{kind}: built in {time.monotonic() - start:.0f} s", flush=True)
    fault = run(kind, folder, "fault", kind)
    if fault.returncode == 0 or REPORTS[kind] not in fault.stderr:
        print(f"{kind}: the deliberate fault was not caught:\n{fault.stderr}")
        return False
    print(f"{kind}: the deliberate fault is caught", flush=True)
    start = time.monotonic()
    found = run(kind, folder)
    clean = found.returncode == 0 and REPORTS[kind] not in found.stderr
    print(f"{kind}: {'no report' if clean else found.stderr} after {time.monotonic() - start:.0f} s", flush=True)
    return clean


def main() -> None:
    kinds = sys.argv[1:] or KINDS
    unknown = set(kinds) - set(KINDS)
    if unknown:
        sys.exit(f"unknown sanitizers {sorted(unknown)}; give some of {', '.join(KINDS)}, or none for all")
    clean = [check(kind) for kind in kinds]
    sys.exit(not all(clean))


if __name__ == "__main__":
    main()
