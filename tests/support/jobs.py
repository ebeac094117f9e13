"""The page of the five commonest jobs: our lines and those of the best other library, job by job."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text()
JOBS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def blocks(job: str) -> tuple[list[str], list[str]]:
    """The statements of the block of ours without the copy of the model, and of the other library's."""
    ours, theirs = re.findall(r"```(?:python|pycon)\n(.*?)```", JOBS[job], flags=re.DOTALL)
    own = [line[4:] for line in ours.splitlines() if line.startswith((">>> ", "... "))]
    return [line for line in own if line != "model = copy.deepcopy(net)"], theirs.strip().splitlines()


def lines(job: str) -> tuple[int, int]:
    ours, theirs = blocks(job)
    if job.startswith("Export"):  # the quantization is the first job
        ours = [line for line in ours if "calibrate" not in line]
    return len(ours), len(theirs)
