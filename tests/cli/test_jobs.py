"""docs/jobs.md: our lines are no more than those of the best other library, and its lines run, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import JOBS, PAGE, blocks, lines
from tests.support.vision import import_torchvision

NAMES = list(JOBS)


@pytest.mark.parametrize("job", NAMES)
def test_ours_needs_no_more_lines(job: str) -> None:
    ours, theirs = lines(job)
    assert 0 < ours <= theirs


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
    setup = re.findall(r"```pycon\n(.*?)```", PAGE.split("\n## ")[0], flags=re.DOTALL)[0]
    exec("\n".join(line[4:] for line in setup.splitlines() if line.startswith((">>> ", "... "))), scope)
    exec("model = copy.deepcopy(net)", scope)
    exec(text, scope)
