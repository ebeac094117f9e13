"""A complete example on real data in about a minute: train, quantize, calibrate, fine-tune, export, verify, report.

Read `run` first: it shows all steps.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fakequant.calibration import Calibrator, calibrators
from fakequant.export import ExportReport, VerifyReport, export_onnx, verify_onnx
from fakequant.files import writable_folder, write_whole
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.model.state.checkpoint import save
from fakequant.model.training import qat
from fakequant.model.training.fuse import fuse_batch_norm
from fakequant.ptq import improve
from fakequant.report import (
    Accuracy,
    ReportData,
    accuracy_cells,
    advised,
    environment,
    layers_left,
    measure,
    sizes,
    with_ranges,
    write_report,
)

from .codes import ByCodes, by_codes
from .digits import (
    LEARNING_RATE,
    SEED,
    VERSIONS,
    AugmentedBatches,
    Split,
    in_versions,
    load_digits,
    loss,
    margin,
    one_thread,
    right,
    train,
)

if TYPE_CHECKING:
    from rich.console import Console


def quantized(
    model: nn.Module, config: Config, training: Split, method: str, weight_method: str = "max"
) -> tuple[nn.Module, dict[str, Calibrator]]:
    """Quantize a copy of a float model and calibrate it on training images; returns the copy and its calibrators."""
    copied = prepare(copy.deepcopy(model), config)
    return copied, calibrate(copied, training.images.split(128), method, weight_method=weight_method)


IMPROVED, FINETUNED = "mse, improved", "mse, improved, fine-tuned"
# A configuration is a value: any format for inputs and weights, by name pattern or layer type.
INT2 = Config("INT2", (Rule(input=TensorConfig("uint2"), weight=TensorConfig("int2 per_channel(0)")), Rule("shrink")))


class Measurements:
    """The measurements on distorted versions of the held-out digits; each is printed when it is made."""

    def __init__(self, held_out: Split, console: Console) -> None:
        self.held_out, self.console = held_out, console
        self.rows: list[Accuracy] = []
        self._versions = in_versions(held_out)
        self._of_first: Tensor | None = None

    def add(self, model: nn.Module, format: str, method: str, note: str = "") -> None:
        """Measure a model, and how far it is from the first one."""
        found = right(model, self._versions)
        away = None if self._of_first is None else margin(found, self._of_first)
        if self._of_first is None:
            self._of_first = found
        self.rows.append(Accuracy(format, method, 100 * found.double().mean().item(), note, away))
        _, _, value, change, _ = accuracy_cells([self.rows[0], self.rows[-1]])[-1]
        change = "" if away is None else f", {change} points"
        self.console.print(f"  {value:>6} % right: {format} {method}".rstrip() + change, highlight=False)


@dataclass(frozen=True)
class Int8:
    """The INT8 models by calibrator, their calibrators, and the name of the exported one."""

    models: dict[str, nn.Module]
    calibrators: dict[str, dict[str, Calibrator]]
    exported: str


def int8_by_every_calibrator(model: nn.Module, training: Split, measured: Measurements) -> Int8:
    """Calibrate INT8 with every calibrator; the one with the smallest loss on the training images will be exported."""
    models, used, losses = {}, {}, {}
    for method in calibrators():
        models[method], used[method] = quantized(model, presets.INT8, training, method)
        with torch.no_grad():
            losses[method] = loss(models[method](training.images), training.digits).item()
        measured.add(models[method], "INT8", method, f"loss on training images {losses[method]:.4f}")
    return Int8(models, used, min(losses, key=losses.__getitem__))


def multiplied_by_codes(int8: Int8, measured: Measurements) -> ByCodes:
    """The exported INT8 model with integer products, measured and compared with the simulated one on every image."""
    coded, compared = by_codes(int8.models[int8.exported], measured.held_out.images)
    measured.add(coded, "INT8 by codes", int8.exported, str(compared))
    measured.console.print(f"    {compared}", highlight=False)
    return compared


def finetuned(model: nn.Module, config: Config, training: Split, epochs: int, measured: Measurements) -> nn.Module:
    """A calibrated model, improved without training, then fine-tuned with fake quantization; measured at each step."""
    tuned, _ = quantized(model, config, training, "mse", "mse")
    measured.add(tuned, config.name, "mse")
    improve(tuned, training.images[:512].split(64), "fast", progress=False)
    measured.add(tuned, config.name, IMPROVED, "weights and ranges by the error of outputs, without labels")
    schedule = qat.Schedule(LEARNING_RATE, epochs)
    qat.finetune(tuned, AugmentedBatches(training, SEED + 1), loss, schedule)
    measured.add(tuned, config.name, FINETUNED, f"{schedule.epochs} epoch{'' if schedule.epochs == 1 else 's'} of QAT")
    return tuned


@dataclass(frozen=True)
class Published:
    """An exported model: its file and the reports of export and verification."""

    path: Path
    export: ExportReport
    check: VerifyReport


def publish(model: nn.Module, name: str, folder: Path, example: Tensor, held_out: Split) -> Published:
    """Save a quantized model as checkpoint and ONNX file, and verify the file in ONNX Runtime."""
    save(model, folder / f"{name}-checkpoint")
    path = folder / f"{name}.onnx"
    export = export_onnx(model, example, path, dynamic_shapes=({0: "batch"},))
    return Published(path, export, verify_onnx(path, model, [held_out.images]))


@one_thread()
def run(out: str | os.PathLike[str], *, epochs: int = 40, console: Console | None = None) -> dict[str, Any]:
    """Train a network on handwritten digits, quantize it in several ways, export, verify and report.

    Calibration, fine-tuning and the choice of the exported calibrator use training images only. The held-out images are
    used only to measure.

    Args:
        out: the folder for `report.html`, `results.json`, `int8.onnx`, `int4.onnx` and the checkpoints.
        epochs: epochs of the float training; use fewer for a quick look.
        console: the console for the output.

    Returns:
        The content of `results.json`; see `results`.

    Raises:
        OutputError: the folder cannot be written; raised before training.
    """
    started = time.perf_counter()
    # Imported here because the networks of this package are also used without rich.
    from rich.console import Console

    from fakequant.report.terminal import print_report

    folder, console = writable_folder(out), console or Console()
    training, held_out = load_digits()
    measured = Measurements(held_out, console)
    console.print(f"Training on {len(training.digits)} digits for {epochs} epochs; {len(held_out.digits)} are held out")
    model = fuse_batch_norm(train(training, epochs), training.images[:2])  # engines do it when they load a file
    measured.add(model, "float32", "")
    console.print("INT8 by every calibrator, FP8; INT4 and INT2 calibrated, improved without training, and fine-tuned")
    int8 = int8_by_every_calibrator(model, training, measured)
    compared = multiplied_by_codes(int8, measured)
    measured.add(quantized(model, presets.FP8, training, "max")[0], "FP8", "max")
    int4 = finetuned(model, presets.INT4, training, epochs, measured)
    finetuned(model, INT2, training, epochs, measured)
    console.print("Exporting INT8 and INT4, and verifying both in ONNX Runtime")
    models = {"int8": int8.models[int8.exported], "int4": int4}
    published = {name: publish(model, name, folder, training.images[:2], held_out) for name, model in models.items()}
    data = report_data(training, measured, int8, models, published)
    print_report(console, data)
    write_report(folder / "report.html", data)
    figures = results(data, int8.exported, published)
    figures |= {"by_codes": asdict(compared), "seconds": round(time.perf_counter() - started, 1)}
    write_whole(folder / "results.json", json.dumps(figures, indent=2).encode())
    console.print(f"{figures['seconds']:.0f} seconds. Open {folder / 'report.html'}; the folder also contains:")
    console.print(", ".join(sorted(path.name for path in folder.iterdir())))
    return figures


def report_data(
    training: Split,
    measured: Measurements,
    int8: Int8,
    models: Mapping[str, nn.Module],
    published: Mapping[str, Published],
) -> ReportData:
    """Collect the content of the report."""
    batches = training.images.split(128)
    example = training.images[:2]
    exported = measure(models["int8"], batches, progress=False)
    data = ReportData(
        "Handwritten digits, quantized",
        summary=(
            f"A small residual network, trained on {len(training.digits)} of scikit-learn's handwritten digits, "
            f"and measured on {len(measured.held_out.digits)} held-out ones, each of them in {VERSIONS} distorted "
            "versions. ± is half the 95 % interval of a change.",
            "Ranges, fine-tuning and the choice of the exported INT8 model come from training images alone: of the "
            f"calibrators, {int8.exported} has the smallest loss there.",
            "Layers, distributions and the next step are those of the exported INT8 model.",
        ),
        metric="held-out digits right, %",
        accuracy=measured.rows,
        reported=_row_of(measured.rows, int8.exported),
        layers=exported.layers,
        distributions=with_ranges(exported.distributions, int8.calibrators),
        channels=exported.channels,
        sizes=sizes(
            {f"{name}.onnx": model.path for name, model in published.items()},
            {f"{name}.onnx": model.export.float_bytes for name, model in published.items()},
        ),
        unquantized=layers_left(models, example),
        verifications=[model.check for model in published.values()],
        environment=environment(),
    )
    return advised(models["int8"], data, exported)


def _row_of(rows: list[Accuracy], method: str) -> int:
    """The measurement of the exported INT8 model."""
    return next(at for at, row in enumerate(rows) if (row.format, row.method) == ("INT8", method))


def results(data: ReportData, exported: str, published: Mapping[str, Published]) -> dict[str, Any]:
    """Return the figures of a run for other programs.

    Returns:
        "accuracy": a list of {format, method, percent, margin}, on distorted versions of the held-out digits;
        "percent": float32, int8_best (of all calibrators), int8_exported, fp8, int4_calibrated, int4_improved,
        int4_finetuned, int2_calibrated, int2_improved, int2_finetuned, int8_by_codes (the exported one);
        "exported_method": the calibrator of the exported INT8 model;
        "models": for int8 and int4 {file, bytes, elements, differing, exact, export, verification}: elements compared
        in Q/DQ nodes and those that differ, then the full reports of export and verification;
        "environment": versions and machine. `run` adds "by_codes", the fields of `ByCodes`, and "seconds".
    """
    percent = {(row.format, row.method): row.value for row in data.accuracy}
    int8 = {method: value for (format, method), value in percent.items() if format == "INT8"}
    models = {}
    for name, model in published.items():
        check = model.check
        models[name] = {
            "file": model.path.name,
            "bytes": model.path.stat().st_size,
            "elements": sum(row.elements for row in check.rows),
            "differing": check.differing,
            "exact": check.exact,
            "export": model.export.to_dict(),
            "verification": check.to_dict(),
        }
    return {
        "accuracy": [
            {"format": row.format, "method": row.method, "percent": row.value, "margin": row.margin}
            for row in data.accuracy
        ],
        "percent": {
            "float32": data.accuracy[0].value,
            "int8_best": max(int8.values()),
            "int8_exported": int8[exported],
            "int8_by_codes": percent["INT8 by codes", exported],
            "fp8": percent["FP8", "max"],
            "int4_calibrated": percent["INT4", "mse"],
            "int4_improved": percent["INT4", IMPROVED],
            "int4_finetuned": percent["INT4", FINETUNED],
            "int2_calibrated": percent["INT2", "mse"],
            "int2_improved": percent["INT2", IMPROVED],
            "int2_finetuned": percent["INT2", FINETUNED],
        },
        "exported_method": exported,
        "models": models,
        "environment": dict(data.environment),
    }
