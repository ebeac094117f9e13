"""Tries a wheel with every Python and torch, each in a new environment, and writes the table of docs/notes/release.md.

    python tests/native/versions.py dist/fakequant-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl \\
        --pythons python3.10 python3.11 --torches 2.10.0 2.13.0

Cells that a call does not try stay as they are. Of a torch for GPUs only the package itself is installed, and it works
on the CPU without NVIDIA's libraries (`no_cuda.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "notes" / "release.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
TORCHES = ["2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1"]
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
REQUIREMENTS = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
FOR_GPUS = re.compile(r"nvidia|cuda|triton")
Cells = dict[tuple[str, str], str]


class Failure(Exception):
    """What the last lines of a program say."""


def said(*command: object, **variables: str) -> str:
    """What a program prints."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | variables)
    if done.returncode:
        raise Failure(done.stderr.strip())
    return done.stdout


def tried(wheel: Path, python: str, torch: str, folder: Path) -> str:
    """Which build of torch the wheel works with in a new environment of a Python."""
    said(python, "-m", "venv", folder / "venv")
    within = folder / "venv" / "bin" / "python"
    install = [within, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    said(*install, "--no-deps", f"torch=={torch}")
    required = [line for line in said(within, "-c", REQUIREMENTS).splitlines() if "extra ==" not in line]
    ours = [line for line in required if not FOR_GPUS.match(line)]
    said(*install, "numpy", "safetensors", *ours)
    said(*install, "--no-deps", wheel)
    variables = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    if len(ours) < len(required):
        libraries = Path(said(within, "-c", PURELIB).strip()) / "torch" / "lib"
        said(sys.executable, HERE / "no_cuda.py", libraries, folder / "empty")
        variables["LD_LIBRARY_PATH"] = str(folder / "empty")
    said(within, HERE / "installed.py", **variables)
    return "GPU build" if len(ours) < len(required) else "CPU build"


def outcome(wheel: Path, python: str, torch: str) -> str:
    """The text of one cell."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return f"works, {tried(wheel, python, torch, Path(folder))}"
        except Failure as failure:
            if "No matching distribution" in str(failure):
                return "no build"
            print(failure, file=sys.stderr)
            return f"fails: {str(failure).splitlines()[-1]}".replace("|", "/")


def read(text: str) -> Cells:
    """The cells of the table in a page, by Python and torch."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    if not rows:
        return {}
    head, _, *body = rows
    return {(row[0], torch.split()[-1]): cell for row in body for torch, cell in zip(head[1:], row[1:], strict=True)}


def written(cells: Cells) -> str:
    """The table of cells, Pythons as rows and torches as columns."""

    def by_number(name: str) -> list[int]:
        return [int(part) for part in name.split(".")]

    pythons, torches = (sorted({key[i] for key in cells}, key=by_number) for i in (0, 1))
    head = ["Python", *(f"torch {torch}" for torch in torches)]
    rows = [[python, *(cells.get((python, torch), "not tried") for torch in torches)] for python in pythons]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", nargs="+", default=[sys.executable])
    parser.add_argument("--torches", nargs="+", default=TORCHES)
    given = parser.parse_args()
    for python in given.pythons:
        version = said(python, "-c", "import platform; print(platform.python_version())").strip()
        for torch in given.torches:
            found = outcome(given.wheel, python, torch)
            print(f"Python {version}, torch {torch}: {found}", flush=True)
            # After each cell, so that a call that is stopped keeps what it tried.
            before, table, after = re.split(f"{BEGIN}|{END}", PAGE.read_text())
            table = written(read(table) | {(version, torch): found})
            PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return int("fails" in table)


if __name__ == "__main__":
    sys.exit(main())
