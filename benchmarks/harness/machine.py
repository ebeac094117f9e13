"""Describe the machine of a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from fakequant.numerics.spec import QuantSpec
from fakequant.ops.dispatch import choose


def machine() -> dict[str, str]:
    """Return the machine, the versions, and the backend of a call.

    >>> sorted(machine())
    ['backend', 'load', 'processor', 'python', 'system', 'threads', 'torch']
    """
    return {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Above 1 other programs ran too, and influence the times.
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "backend": choose(torch.empty(1), QuantSpec("int8")).name,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
