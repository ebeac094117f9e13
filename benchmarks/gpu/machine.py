"""Whether there is a GPU, which one, and what the CPU computes with."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def unavailable() -> str | None:
    """Why no GPU can be used here, in one line; None if one can."""
    if importlib.util.find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}, so no GPU can be used; nothing was run"
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} of {sys.executable} finds no GPU here; nothing was run"


def device_name(device: str) -> str:
    """The name of the GPU, or of the processor."""
    import torch

    from benchmarks import harness

    return torch.cuda.get_device_name(device) if device != "cpu" else harness.machine()["processor"]


def build_kernels() -> str:
    """Have the C++ kernels, built in place if they are not there yet: the CPU's side, 20 to 100 times as fast.

    Returns:
        What the CPU computes with, in words.
    """
    from fakequant.ops.cpu.backend import load_kernels

    if load_kernels() is not None:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        load_kernels.cache_clear()
        if reason := load_kernels():
            said = (built.stderr.strip().splitlines() or [reason])[-1]
            return f"the reference, because the C++ kernels cannot be built here: {said}"
    return "the C++ kernels"


def title(device: str) -> str:
    """The machine in one line."""
    import torch

    try:
        triton = f"triton {version('triton')}"
    except PackageNotFoundError:
        triton = "no triton"
    return f"{device_name(device)}, torch {torch.__version__}, {triton}, Python {platform.python_version()}"
