"""Installs wheels beside this environment's torch, without a compiler, and quantizes a first tensor.

    python tests/native/wheel.py dist             # all wheels of a folder
    python tests/native/wheel.py dist/one.whl
    python tests/native/wheel.py dist --record benchmarks/results/wheel.json

Prints size, seconds of the installation, and seconds of the first result beyond those of importing torch. Fails where
the wheel is too large, the seconds are too many, or another backend serves than the wheel is for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LARGEST = 4_000_000  # bytes of a wheel
LONGEST = 30.0  # seconds of the installation and the first result, beyond torch's; five are the aim
FIRST = """
import sys, time
import torch
start = time.perf_counter()
import fakequant as fq
y = fq.fake_quantize(torch.tensor([0.1, -0.52, 1.27]), "int8", scale=0.01)
seconds = time.perf_counter() - start
assert torch.equal(y, torch.tensor([10.0, -52.0, 127.0]) * 0.01), y
from fakequant.ops.cpu.backend import load_kernels
assert sys.argv[1] in fq.__file__, fq.__file__
print(f"{seconds:.2f}", "kernels" if load_kernels() is None else "reference")
"""


def tried(wheel: Path) -> dict[str, Any] | None:
    """The size of a wheel, the seconds that it needs, and what serves from its folder; None for wrong numbers."""
    size = wheel.stat().st_size
    # No compiler is found there.
    without = {**os.environ, "PATH": "/nonexistent", "CC": "/bin/false", "CXX": "/bin/false"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        given = ["install", "--quiet", "--no-deps", "--no-index", "--target", folder, str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *given], env=without, check=True)
        installed = time.perf_counter() - start
        command = [sys.executable, "-c", FIRST, folder]
        variables = {**without, "PYTHONPATH": folder}  # no other copy of the package
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{wheel.name}: the first tensor failed\n{done.stderr[-2000:]}")
        return None
    first, served = done.stdout.split()
    print(f"{wheel.name}: {size:,} bytes of at most {LARGEST:,}, served by the {served}")
    print(f"    {installed:.1f} s to install, {first} s from torch to the first result: of at most {LONGEST:.0f} s")
    return {"wheel": wheel.name, "bytes": size, "installed": installed, "first": float(first), "served": served}


def good(found: dict[str, Any] | None) -> bool:
    """Whether a wheel is small enough, installs fast enough, and is served by what it is for."""
    if found is None:
        return False
    expected = "reference" if found["wheel"].endswith("none-any.whl") else "kernels"
    fast = found["installed"] + found["first"] < LONGEST
    return found["bytes"] < LARGEST and fast and found["served"] == expected


def main() -> int:
    """Try the wheels; 1 if one is not good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=Path, help="a wheel or a folder of wheels")
    parser.add_argument("--record", type=Path, help="the file that gets the figures, for docs/notes/bars.md")
    arguments = parser.parse_args()
    place = arguments.place
    wheels = [place] if place.suffix == ".whl" else sorted(place.glob("*.whl"))
    if not wheels:
        sys.exit(f"{place} holds no wheel; run `make wheel`")
    found = [tried(wheel) for wheel in wheels]
    if arguments.record:
        arguments.record.write_text(json.dumps([one for one in found if one], indent=2) + "\n")
    return int(not all(map(good, found)))


if __name__ == "__main__":
    sys.exit(main())
