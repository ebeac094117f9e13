"""The notebooks: their cells run in order, and the saved pages show that they did."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))}
NEEDS = {
    "diagnosis": ("sklearn",),
    "few_bits": ("sklearn",),
    "language_model": ("transformers", "gguf"),
    "phone": ("sklearn",),
    "server": ("transformers", "compressed_tensors"),
}


def cells(name: str, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOKS[name].read_text())["cells"] if cell["cell_type"] == kind]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_are_five() -> None:
    assert [*NOTEBOOKS] == [*NEEDS]


@pytest.mark.parametrize("name", NEEDS)
def test_the_cells_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("matplotlib", *NEEDS[name]):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")  # so that what a cell sets ends with the test
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", pyplot.close)
    pyplot.switch_backend("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        for number, cell in enumerate(cells(name, "code"), 1):
            exec(compile(text(cell), f"{name}.ipynb, code cell {number}", "exec"), names)


@pytest.mark.parametrize("name", NEEDS)
def test_a_saved_notebook_was_run_from_top_to_bottom(name: str) -> None:
    code = cells(name, "code")
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert {output["name"] for output in outputs if "name" in output} == {"stdout"}
    assert any("image/png" in output.get("data", ()) for output in outputs)
    assert NOTEBOOKS[name].stat().st_size < 300_000
    assert not re.search(r"/tmp|/home|/root|site-packages", NOTEBOOKS[name].read_text())


@pytest.mark.parametrize("name", NEEDS)
def test_links_of_a_notebook_lead_to_files(name: str) -> None:
    links = [link for cell in cells(name, "markdown") for link in re.findall(r"\]\(([^)]+)\)", text(cell))]
    assert links
    assert [link for link in links if not (NOTEBOOKS[name].parent / link).is_file()] == []
