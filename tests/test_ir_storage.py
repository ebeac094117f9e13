"""Graphs in files: which files there are, and what is there when a process dies."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakequant import ir
from fakequant.errors import GraphError, OutputError
from fakequant.ir import storage
from tests.support.crashes import every_death
from tests.support.generations import graph_values, save_graph


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_save_that_dies_leaves_the_old_graph_or_the_new_one(tmp_path: Path) -> None:
    now = {"old": 1.0, "new": 1.0}

    def prepare() -> None:
        save_graph(tmp_path, now["old"])
        now["new"] = now["old"] + 1.0

    def check() -> None:
        (found,) = graph_values(tmp_path)
        assert found in (now["old"], now["new"])
        now["old"] = found

    assert every_death(prepare, lambda: save_graph(tmp_path, now["new"]), check) >= 6


def test_the_text_names_the_file_of_its_constants(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 2.0):
        save_graph(tmp_path, value)
        (constants,) = names_in(tmp_path) - {"graph.txt"}
        assert (tmp_path / "graph.txt").read_text().endswith(f'\n  Constants in: "{constants}"\n')
    (tmp_path / "graph.txt").rename(tmp_path / "renamed.txt")
    assert ir.load(tmp_path / "renamed.txt").name == "2.0"


def test_a_graph_without_large_constants_is_one_file(tmp_path: Path) -> None:
    graph = ir.Graph("small")
    graph.outputs = [graph.add_constant("w", torch.ones(2))]
    save_graph(tmp_path, 1.0)
    assert ir.load(ir.save(graph, tmp_path / "graph.txt")) == graph
    assert names_in(tmp_path) == {"graph.txt"}


def test_graphs_of_earlier_versions_are_loaded(tmp_path: Path) -> None:
    save_graph(tmp_path, 3.0)
    (constants,) = tmp_path.glob("*.safetensors")
    text = (tmp_path / "graph.txt").read_text()
    (tmp_path / "graph.txt").write_text("".join(text.splitlines(keepends=True)[:-1]))
    constants.rename(tmp_path / "graph.txt.safetensors")
    assert graph_values(tmp_path) == {3.0}
    (tmp_path / "graph.txt.safetensors").unlink()
    with pytest.raises(GraphError, match="'w' is not in the text and not among the tensors given"):
        graph_values(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", "..", "a\\u0000b"])
def test_a_text_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    save_graph(tmp_path, 1.0)
    path = tmp_path / "graph.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], f'  Constants in: "{name}"', ""]))
    with pytest.raises(GraphError, match="is no name of a file in the folder of the text"):
        ir.load(path)


def test_only_a_file_of_the_own_form_is_removed(tmp_path: Path) -> None:
    save_graph(tmp_path, 1.0)
    (constants,) = tmp_path.glob("*.safetensors")
    precious = constants.rename(tmp_path / "precious.safetensors")
    path = tmp_path / "graph.txt"
    path.write_text(path.read_text().replace(constants.name, precious.name))
    assert graph_values(tmp_path) == {1.0}
    save_graph(tmp_path, 2.0)
    assert precious.exists()


def test_load_reads_the_text_again_when_its_constants_are_gone(tmp_path: Path, monkeypatch) -> None:
    save_graph(tmp_path, 1.0)
    read, left = storage._text_of, [2.0, 3.0]

    def saved_meanwhile(path: Path) -> str:
        text = read(path)
        if left:
            save_graph(tmp_path, left.pop(0))
        return text

    monkeypatch.setattr(storage, "_text_of", saved_meanwhile)
    assert graph_values(tmp_path) == {3.0}


def test_constants_that_are_gone_or_of_no_dtype_of_torch(tmp_path: Path) -> None:
    save_graph(tmp_path, 1.0)
    (constants,) = tmp_path.glob("*.safetensors")
    save_file({name: tensor.to(torch.int32) for name, tensor in load_file(constants).items()}, constants)
    constants.write_bytes(constants.read_bytes().replace(b'"I32"', b'"F4" '))
    for _ in range(2):
        with pytest.raises(GraphError, match="cannot read the graph with its constants"):
            ir.load(tmp_path / "graph.txt")
        constants.unlink(missing_ok=True)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="File name too long"):
        save_graph_as(tmp_path / ("x" * 250))
    with pytest.raises(OutputError, match="it is a folder"):
        save_graph_as(tmp_path)
    assert os.listdir(tmp_path) == []


def save_graph_as(path: Path) -> None:
    graph = ir.Graph("g")
    graph.outputs = [graph.add_constant("w", torch.ones(8))]
    ir.save(graph, path)
