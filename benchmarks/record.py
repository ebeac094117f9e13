"""Where figures come from and where they go: the machine, files written whole, tables between the markers of a page."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fakequant as fq
from fakequant.files import write_whole

ROOT = Path(__file__).parent.parent


@cache
def machine() -> dict[str, str]:
    """Where the figures come from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fakequant": fq.__version__,
        # Above 1, other programs ran too, and the times are theirs as much as ours.
        "load": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown",
        "commit": commit.strip() + ("+changes" if changed.strip() else ""),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Replace a file of results in one step: an interrupted run leaves the old one."""
    write_whole(path, (json.dumps(results, indent=2) + "\n").encode())


def put_between(page: Path, begin: str, end: str, content: str) -> None:
    """Replace what stands between two markers of a page.

    Raises:
        ValueError: a marker is missing.
    """
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks the markers {begin} and {end}; put them where the table belongs")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    write_whole(page, f"{before}{begin}\n{content}\n{end}{after}".encode())
