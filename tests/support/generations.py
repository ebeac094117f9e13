"""Generations of files that all say one number, so that a mix of two is seen."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import fakequant as fq
from fakequant.cli.job import Job, run
from fakequant.cli.results import GRAPH, NOT_WHOLE, ONNX, REPORT, publish, results_folder, staged
from fakequant.errors import CheckpointError, OutputError
from fakequant.report import RESULTS

Values = set[float | None]
FILES = (ONNX, GRAPH, REPORT, RESULTS)


@dataclass(frozen=True)
class Writer:
    """Writers of files that all hold one number, and their readers: one number is one whole generation."""

    write: Callable[[Path, float], object]
    read: Callable[[Path], Values]
    once: Callable[[Path, float], object] | None = None


def model_of(value: float, config: str = "int8_weight_only") -> nn.Module:
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2)), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(folder: Path) -> float:
    return fq.load(nn.Sequential(nn.Linear(2, 2)), folder)[0].bias[0].item()


def make_run(out: Path, value: float, without: str = "") -> None:
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


def linear(value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)
    return net


def deliver(folder: Path, value: float) -> None:
    quiet(
        lambda: fq.deliver(
            fq.prepare(linear(value), "int4_group32"), folder / "out", "compressed-tensors", max_shard_size=700
        )
    )


def delivered(folder: Path) -> Values:
    """The values in a delivery; none where it is refused."""
    try:
        found = fq.read(folder / "out", linear(0.0))
    except CheckpointError:
        return {None}
    with torch.no_grad():
        own = [round(parameter.mean().item(), 3) for layer in found for parameter in (layer.weight, layer.bias)]  # type: ignore[union-attr]
    return {*own}


def stream_once(folder: Path, value: float) -> None:
    made = linear(value)
    how: dict[str, Any] = {"load": lambda path: made.get_submodule(path).state_dict(), "progress": False}
    empty, x = linear(value).to("meta"), torch.ones(2, 32)
    quiet(lambda: fq.improve_folder(empty, folder / "out", "int4_group32", [x], ("ranges",), **how))


def stream(folder: Path, value: float) -> None:
    """Improves a folder block by block; what an earlier call has made goes before, as its user would do it."""
    try:
        stream_once(folder, value)
    except (OutputError, CheckpointError):
        shutil.rmtree(folder / "out")
        stream_once(folder, value)


_ADVISED: dict[str, Any] = {"presets": ["INT4_WEIGHT_ONLY", "INT8_WEIGHT_ONLY"], "floor": 200.0, "progress": False}


def advise_once(folder: Path, value: float) -> None:
    quiet(lambda: fq.advise(noise(), [torch.ones(2, 32)] * 3, work=folder / "work", **_ADVISED))


def advise(folder: Path, value: float) -> None:
    shutil.rmtree(folder / "work", ignore_errors=True)
    advise_once(folder, value)


def noise() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def advised(folder: Path) -> Values:
    """One value where the call that goes on finds what one without a folder finds."""
    given = noise(), [torch.ones(2, 32)] * 3
    found = quiet(lambda: fq.advise(*given, work=folder / "work", **_ADVISED))
    whole = quiet(lambda: fq.advise(*given, **_ADVISED))
    return (
        {0.0}
        if [row.measured.way for row in found.rows] == [row.measured.way for row in whole.rows]
        and ([row.score for row in found.rows] == [row.score for row in whole.rows])
        else {0.0, 1.0}
    )


def quiet(act: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return act()


WRITERS = {
    "deliver": Writer(deliver, delivered),
    "improve_folder": Writer(stream, delivered, stream_once),
    "advise": Writer(advise, advised, advise_once),
    "checkpoint": Writer(lambda folder, value: fq.save(model_of(value), folder), lambda folder: {value_of(folder)}),
    "onnx": Writer(export, onnx_values),
    "run": Writer(make_run, lambda folder: values_in(folder) if is_whole(folder) else {None}),
    "quantize": Writer(quantize, quantized_values),
}
