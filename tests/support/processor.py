"""What the processor of a test run announces and does not have."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_LIMIT = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_FP16"
_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def avoid_broken_amx() -> str | None:
    """Keep torch from AMX where a virtual machine announces it and traps on it; says so in a line.

    There, torch's own product of two bfloat16 matrices kills the process.
    """
    processor = Path("/proc/cpuinfo")
    if _LIMIT in os.environ or not processor.exists() or "amx_tile" not in processor.read_text():
        return None
    is_broken = subprocess.run([sys.executable, "-c", _PRODUCT], check=False).returncode == -signal.SIGILL
    os.environ[_LIMIT] = _WITHOUT_AMX if is_broken else "DEFAULT"  # processes that this one starts need not ask again
    if not is_broken:
        return None
    return f"this processor announces AMX and traps on it: {_LIMIT}={_WITHOUT_AMX}"


def why_sums_saturate() -> str | None:
    """Why integer convolutions of other libraries are wrong on this processor, or None.

    Without VNNI, oneDNN and ONNX Runtime add pairs of products of uint8 and int8 in int16, where they saturate.
    """
    from fakequant.ops.products import convolution_unavailable  # after `avoid_broken_amx`

    return convolution_unavailable("cpu")


LOST_BY_SUMS = re.compile(r"default\s+session\s+loses.*x64quantprecision", re.DOTALL)
"""In the error of `fakequant quantize` where sums of ONNX Runtime's default session saturate."""


def needs_convolutions() -> pytest.MarkDecorator:
    """Skips tests on processors on which the kernel for convolutions of codes does not run."""
    from fakequant.ops.products import _has_kernel

    return pytest.mark.skipif(not _has_kernel(), reason="the kernel needs a processor with AVX-512 VNNI")


def needs_exact_sums() -> pytest.MarkDecorator:
    """Skips tests on processors whose sums of products of codes saturate."""
    reason = why_sums_saturate()
    return pytest.mark.skipif(reason is not None, reason=str(reason))
