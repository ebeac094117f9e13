"""The page of the five commonest jobs: ours needs no more lines than the best peer, and the peers' lines run, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision import import_torchvision

PAGE = (Path(__file__).parents[1] / "docs" / "jobs.md").read_text()
JOBS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
NAMES = list(JOBS)


def blocks(job: str) -> tuple[list[str], list[str]]:
    """The statements of the block of ours without the copy of the model, and of the other library's."""
    ours, theirs = re.findall(r"```python\n(.*?)```", JOBS[job], flags=re.DOTALL)
    own = [line[4:] for line in ours.splitlines() if line.startswith((">>> ", "... "))]
    return [line for line in own if line != "model = copy.deepcopy(net)"], theirs.strip().splitlines()


@pytest.mark.parametrize("job", NAMES)
def test_ours_needs_no_more_lines(job: str) -> None:
    ours, theirs = blocks(job)
    if job.startswith("Export"):  # the quantization is the first job
        ours = [line for line in ours if "calibrate" not in line]
    assert ours
    assert len(ours) <= len(theirs), ours


@pytest.mark.exhaustive  # their imports take ten seconds
@pytest.mark.parametrize("job", NAMES)
def test_the_lines_of_the_others_run(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(blocks(job)[1])
    scope: dict[str, Any] = {}
    if "mtq." in text:
        pytest.importorskip("modelopt")
        import_torchvision()
        exec("import modelopt.torch.quantization as mtq", scope)
    if "quantize_(" in text:
        pytest.importorskip("torchao")
        exec("from torchao.quantization import *\nfrom torchao.quantization.granularity import *", scope)
        exec("from torchao.quantization.qat import QATConfig", scope)
    monkeypatch.chdir(tmp_path)
    setup = re.findall(r"```python\n(.*?)```", PAGE.split("\n## ")[0], flags=re.DOTALL)[0]
    exec("\n".join(line[4:] for line in setup.splitlines() if line.startswith((">>> ", "... "))), scope)
    exec("model = copy.deepcopy(net)", scope)
    exec(text, scope)
