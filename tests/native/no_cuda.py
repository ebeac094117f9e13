"""Writes empty libraries in the place of NVIDIA's, with which a torch built for GPUs works on a CPU without several GB.

    python tests/native/no_cuda.py .venv/lib/python3.11/site-packages/torch/lib FOLDER
    LD_LIBRARY_PATH=FOLDER .venv/bin/python -c 'import torch'

torch itself is not changed. Its libraries name what they need; every function there answers that there is no GPU. For
Linux on x86-64, with gcc, nm and readelf.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OF_NVIDIA = re.compile(r"lib(cu|nv|nccl)")
FUNCTIONS = re.compile(r" U ((?:cu|_?_?nv|nccl|__cuda)\w+)")
NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE


def said(*command: object) -> str:
    """What a program prints."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def write(libraries: Path, folder: Path) -> None:
    """The libraries that those of torch need and that are not beside them, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, set[str]] = {}  # by library, the versions that its symbols need
    functions: set[str] = set()
    for path in libraries.glob("*.so*"):
        functions.update(FUNCTIONS.findall(said("nm", "-D", "--undefined-only", path)))
        for name in re.findall(r"NEEDED.*\[(.*)\]", said("readelf", "-dW", path)):
            names.setdefault(name, set())
        for name, versions in re.findall(r"File: (\S+) .*\n((?:.* Name: .*\n)+)", said("readelf", "-VW", path)):
            names.setdefault(name, set()).update(re.findall(r" Name: (\S+)", versions))
    beginnings = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in sorted(functions))
    source, script = folder / "functions.s", folder / "versions"
    source.write_text(f'.text\n{beginnings}mov ${NO_DEVICE}, %eax\nret\n.section .note.GNU-stack, "", @progbits\n')
    for name, versions in names.items():
        if OF_NVIDIA.match(name) and not (libraries / name).exists():
            # The first version has all functions; the dynamic linker asks only for one that is there.
            script.write_text(
                "".join(f"{v} {{ {'' if i else 'global: *;'} }};\n" for i, v in enumerate(sorted(versions)))
            )
            options = [f"-Wl,--version-script={script}"] if versions else []
            said("gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", *options, "-o", folder / name, source)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
