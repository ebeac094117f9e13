"""Generations of files that all say one number, so that a mix of two is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import fakequant as fq
from fakequant.cli.job import Job, run
from fakequant.cli.results import GRAPH, NOT_WHOLE, ONNX, REPORT, publish, results_folder, staged
from fakequant.report import RESULTS

Values = set[float | None]
FILES = (ONNX, GRAPH, REPORT, RESULTS)


@dataclass(frozen=True)
class Writer:
    """Writers of files that all hold one number, and their readers: one number is one whole generation."""

    write: Callable[[Path, float], object]
    read: Callable[[Path], Values]


def model_of(value: float, config: str = "int8_weight_only") -> nn.Module:
    """A prepared model whose parameters all have one value."""
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2)), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(folder: Path) -> float:
    """The value of the parameters of a checkpoint."""
    return fq.load(nn.Sequential(nn.Linear(2, 2)), folder)[0].bias[0].item()


def make_run(out: Path, value: float, without: str = "") -> None:
    """Publishes a run whose files all hold one value."""
    with results_folder(out), staged(out) as folder:
        fq.save(model_of(value), folder / "checkpoint")
        for name in FILES:
            if name != without:
                (folder / name).write_text(str(value))
        publish(folder, out)


def is_whole(out: Path) -> bool:
    """Whether the figures of a run are there, as numbers or as JSON; they come last."""
    return (out / RESULTS).exists() and (out / RESULTS).read_bytes() != NOT_WHOLE


def values_in(out: Path, files: tuple[str, ...] = FILES) -> Values:
    """The values that the files of a run say, None for one that is not there."""
    found: Values = {float((out / name).read_text()) if (out / name).exists() else None for name in files}
    if not (out / "checkpoint" / "fakequant.json").exists():
        return found | {None}
    return found | {value_of(out / "checkpoint")}


def export(folder: Path, value: float) -> None:
    """Exports a model whose bias has one value."""
    fq.export_onnx(model_of(value), torch.ones(1, 2), folder / ONNX)


def onnx_values(folder: Path) -> Values:
    import onnx

    model = onnx.load(folder / ONNX)
    biases = [onnx.numpy_helper.to_array(one) for one in model.graph.initializer if one.name.endswith("bias")]
    return {float(bias[0]) for bias in biases} or {0.0}  # the exporter drops a bias of zeros


_RECIPE = """
import torch
from torch import nn

def model():
    net = nn.Sequential(nn.Linear(2, 2))
    nn.init.constant_(net[0].weight, VALUE + 0.25)
    nn.init.constant_(net[0].bias, VALUE)
    return net

def calibration_batches():
    return [torch.ones(2, 2)]

def evaluate(net):
    return VALUE
"""


def quantize(folder: Path, value: float) -> None:
    """Runs the whole job for a model whose bias has one value, into a folder next to the recipe."""
    recipe = folder / "recipe.py"
    recipe.write_text(_RECIPE.replace("VALUE", str(value)))
    run(Job(recipe, "int8", "max", folder / "out"), Console(quiet=True))


def quantized_values(folder: Path) -> Values:
    out = folder / "out"
    if not is_whole(out):
        return {None}
    page = (out / REPORT).read_text()
    row = page.split("<td>float32</td><td></td><td", 1)[1]
    said = float(row[row.index(">") + 1 : row.index("<")])
    # The graph says numbers as text, as those of the bias: [1.0, 1.0].
    (bias,) = [line for line in (out / GRAPH).read_text().splitlines() if ' = parameter "0.bias"' in line]
    return {value_of(out / "checkpoint"), *onnx_values(out), said, float(bias.rsplit("[", 1)[1].split(",")[0])}


WRITERS = {
    "checkpoint": Writer(lambda folder, value: fq.save(model_of(value), folder), lambda folder: {value_of(folder)}),
    "onnx": Writer(export, onnx_values),
    "run": Writer(make_run, lambda folder: values_in(folder) if is_whole(folder) else {None}),
    "quantize": Writer(quantize, quantized_values),
}
