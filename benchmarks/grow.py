"""How the time of every function that takes a model grows with the model: `python -m benchmarks.grow`.

Each size runs in a process of its own, on one thread; `python -m benchmarks.grow summary load` times these alone and
writes nothing. Writes benchmarks/results/grow.json and the table of docs/notes/performance.md; ends with 1 if a
function grows faster than it may.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq

from .record import ROOT, machine, put_between, write_results

RESULTS = ROOT / "benchmarks" / "results" / "grow.json"
PAGE = ROOT / "docs" / "notes" / "performance.md"
BEGIN, END = "<!-- grow:begin -->", "<!-- grow:end -->"
SIZES = (8, 32, 128, 512)
MOST = 1.15
"""The largest exponent between the two largest sizes that a function may have, beyond the passes that it makes."""
_LONG_ENOUGH = 0.3
"""Seconds: a shorter call is made again, and the shortest counts."""


class Block(nn.Module):
    """A norm, two linear layers with a function between them, and a residual sum."""

    def __init__(self, width: int, act: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = norm, nn.Linear(width, 2 * width), act, nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x)))) * 0.1


class ConvBlock(nn.Module):
    """A convolution with a batch normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Model:
    """One size: its models, made when they are first asked for; a function that changes a model gets a copy."""

    def __init__(self, blocks: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.blocks, self.folder = blocks, folder
        self.batches = [torch.randn(32, 16) for _ in range(2)]
        self.images = [torch.randn(4, 8, 16) for _ in range(2)]
        self.labelled = [(batch, batch) for batch in self.batches]
        self._made: dict[str, nn.Module] = {}

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self._made:
            self._made[name] = getattr(self, f"_{name}")().eval()
        return self._made[name]

    def _float(self) -> nn.Module:
        return nn.Sequential(*(Block(16, nn.GELU(), nn.LayerNorm(16)) for _ in range(self.blocks)))

    def _relu(self) -> nn.Module:
        return nn.Sequential(*(Block(16, nn.ReLU(), nn.RMSNorm(16)) for _ in range(self.blocks)))

    def _conv(self) -> nn.Module:
        return nn.Sequential(*(ConvBlock(8) for _ in range(self.blocks)))

    def _prepared(self) -> nn.Module:
        return fq.prepare(copy.deepcopy(self["float"]), "int8")

    def _calibrated(self) -> nn.Module:
        model = copy.deepcopy(self["prepared"])
        fq.calibrate(model, self.batches, method="max", progress=False)
        return model

    def _placed(self) -> nn.Module:
        model = fq.prepare(copy.deepcopy(self["float"]), "int8", self.batches[0], target="onnxruntime")
        fq.calibrate(model, self.batches, method="max", progress=False)
        return model

    def _weight_only(self) -> nn.Module:
        return fq.prepare(copy.deepcopy(self["float"]), "int4_group32")

    def _smoothed(self) -> nn.Module:
        model = copy.deepcopy(self["calibrated"])
        fq.ptq.improve(model, self.batches, ["smooth"], progress=False)
        return model

    def _prepared_conv(self) -> nn.Module:
        return fq.prepare(copy.deepcopy(self["conv"]), "int8")

    def _calibrated_conv(self) -> nn.Module:
        model = copy.deepcopy(self["prepared_conv"])
        fq.calibrate(model, self.images, method="max", progress=False)
        return model


Call = Callable[[Model, nn.Module], Any]


@dataclass(frozen=True)
class Case:
    """A function to time.

    Args:
        name: as the table has it.
        of: the model that it gets, see `Model`.
        call: gets all models, and a model of its own.
        before: makes what the call needs beside the model, untimed.
        passes: why the function runs the model as often as it has layers; "" where it does not. Its seconds are divided
            by the number of blocks.
        largest: the most blocks to time.
    """

    name: str
    of: str
    call: Call
    before: Call | None = None
    passes: str = ""
    largest: int = SIZES[-1]


def _export(models: Model, model: nn.Module) -> Any:
    return fq.export_onnx(model, models.batches[0], models.folder / "model.onnx")


def _torch_export(models: Model, model: nn.Module) -> Any:
    path = str(models.folder / "float.onnx")
    return torch.onnx.export(model, (models.batches[0],), path, dynamo=True, verbose=False)


def _save(models: Model, model: nn.Module) -> Any:
    return fq.save(model, models.folder / "saved")


def _finetune(models: Model, model: nn.Module) -> Any:
    schedule, options = fq.qat.Schedule(original_lr=1e-3, original_epochs=10), fq.qat.Options(progress=False)
    return fq.qat.finetune(model, models.labelled, nn.functional.mse_loss, schedule, options)


_EACH_ALONE = "each layer is measured alone: N passes of N layers"
_EACH_PASS = 128
CASES = (
    Case("a forward pass, quantized", "calibrated", lambda m, x: x(m.batches[0])),
    Case("`torch.onnx.export` of the float model, for comparison", "float", _torch_export),
    Case('`prepare(model, "int8")`', "float", lambda m, x: fq.prepare(x, "int8")),
    Case("`prepare` with an example", "float", lambda m, x: fq.prepare(x, "int8", m.batches[0])),
    Case(
        "`prepare` with a target",
        "float",
        lambda m, x: fq.prepare(x, "int8", m.batches[0], target="onnxruntime"),
    ),
    Case("`fuse_batch_norm`", "conv", lambda m, x: fq.fuse_batch_norm(x, m.images[0])),
    Case("`calibrate`", "prepared", lambda m, x: fq.calibrate(x, m.batches, progress=False)),
    Case("`calibrate` of a model for a target", "placed", lambda m, x: fq.calibrate(x, m.batches, progress=False)),
    Case("`recalibrate`", "calibrated", lambda m, x: fq.recalibrate(x, method="max")),
    Case("`summary`", "calibrated", lambda m, x: fq.summary(x)),
    Case("`summary` with an example", "calibrated", lambda m, x: fq.summary(x, m.batches[0])),
    Case("`summary` of a model for a target", "placed", lambda m, x: fq.summary(x, m.batches[0])),
    Case("`unquantized`", "calibrated", lambda m, x: fq.unquantized(x, m.batches[0])),
    Case("`site_plan`", "placed", lambda m, x: fq.site_plan(x)),
    Case("`float_state_dict`", "calibrated", lambda m, x: fq.float_state_dict(x)),
    Case("`layer_sqnr`", "calibrated", lambda m, x: fq.layer_sqnr(x, m.batches, progress=False)),
    Case("`set_execution`", "calibrated", lambda m, x: fq.set_execution(x, "auto")),
    Case("`disabled`", "calibrated", lambda m, x: fq.disabled(x).__enter__()),
    Case("`bake_weights`", "calibrated", lambda m, x: fq.bake_weights(x)),
    Case("`fold`", "calibrated", lambda m, x: fq.fold(x)),
    Case("`save`", "placed", _save),
    Case("`save(packed=True)`", "weight_only", lambda m, x: fq.save(x, m.folder / "packed", packed=True)),
    Case("`load`", "float", lambda m, x: fq.load(x, m.folder / "saved"), lambda m, x: _save(m, m["placed"])),
    Case("`export_onnx`", "calibrated", _export),
    Case("`export_onnx` of a model for a target", "placed", _export),
    Case(
        "`verify_onnx`",
        "calibrated",
        lambda m, x: fq.verify_onnx(m.folder / "model.onnx", x, m.batches[:1]),
        _export,
    ),
    Case("`ir.capture`", "calibrated", lambda m, x: fq.ir.capture(x, m.batches[0])),
    Case('`ptq.improve("fast")`', "calibrated", lambda m, x: fq.ptq.improve(x, m.batches, "fast", progress=False)),
    Case(
        '`ptq.improve("fast")` of a model for a target',
        "placed",
        lambda m, x: fq.ptq.improve(x, m.batches, "fast", progress=False),
    ),
    Case(
        "`ptq.reconstruct`, one step for each block",
        "weight_only",
        lambda m, x: fq.ptq.reconstruct(x, m.batches, iterations=1, progress=False),
    ),
    Case("`ptq.equalize`", "relu", lambda m, x: fq.ptq.equalize(x, m.batches[0], "int8")),
    Case("`ptq.rotate`", "relu", lambda m, x: fq.ptq.rotate(x, m.batches[0])),
    Case("`ptq.fold_scales`", "smoothed", lambda m, x: fq.ptq.fold_scales(x, m.batches[0])),
    Case("`ptq.reestimate_batch_norm`", "calibrated_conv", lambda m, x: fq.ptq.reestimate_batch_norm(x, m.images)),
    Case("`ptq.find_blocks`", "float", lambda m, x: fq.ptq.find_blocks(x)),
    Case("`ptq.scores`", "float", lambda m, x: fq.ptq.scores(x, m.batches, progress=False)),
    Case("`search`", "float", lambda m, x: fq.search(x, m.batches, bits=6)),
    Case("`compare`", "float", lambda m, x: fq.compare(x, m.batches, ["int8"])),
    Case("`qat.fold_batch_norm`", "prepared_conv", lambda m, x: fq.qat.fold_batch_norm(x, m.images[0])),
    Case("`qat.freeze_batch_norm`", "calibrated_conv", lambda m, x: fq.qat.freeze_batch_norm(x)),
    Case("`qat.set_scales`", "calibrated", lambda m, x: fq.qat.set_scales(x, fq.qat.Scales.LEARNED)),
    Case("`qat.finetune`, an epoch of 2 steps", "calibrated", _finetune),
    Case(
        "`sensitivity`, for each block",
        "calibrated",
        lambda m, x: fq.sensitivity(x, m.batches[:1], progress=False),
        passes=_EACH_ALONE,
        largest=_EACH_PASS,
    ),
    Case(
        "`report`, for each block",
        "calibrated",
        lambda m, x: fq.report(x, m.batches[:1], m.folder / "report.html"),
        passes=_EACH_ALONE,
        largest=_EACH_PASS,
    ),
)


def seconds(case: Case, models: Model) -> float:
    """CPU seconds of a call, the shortest of several; of a function that makes passes, for each block."""
    found: list[float] = []
    while not found or (models.blocks >= SIZES[0] and sum(found) < _LONG_ENOUGH and len(found) < 5):
        model = copy.deepcopy(models[case.of])
        if case.before is not None and not found:
            case.before(models, model)
        gc.collect()
        gc.freeze()  # else one collection scans what torch and others hold, 0.5 s, at some sizes and not at others
        started = time.process_time()
        case.call(models, model)
        found.append(time.process_time() - started)
        gc.unfreeze()
    return min(found) / (models.blocks if case.passes else 1)


def chosen(only: list[str]) -> list[Case]:
    """The cases with one of the texts in their names; all without texts."""
    return [case for case in CASES if not only or any(text in case.name for text in only)]


def measured_here(blocks: int, only: list[str]) -> dict[str, float | str]:
    """The seconds of every function, or why it failed; all of them ran once before, with two blocks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for size in (2, blocks):
            (folder := Path(temporary) / str(size)).mkdir()
            models = Model(size, folder)
            for case in chosen(only):
                if size > case.largest:
                    continue
                try:
                    found[case.name] = seconds(case, models)
                except Exception as error:  # one function that fails is a row, and the others are timed
                    found[case.name] = f"{type(error).__name__}: {error}"[:200]
                print(f"{size:4} {case.name}: {found[case.name]}", file=sys.stderr, flush=True)
    return found


def measure(only: list[str]) -> dict[str, dict[str, float | str]]:
    """The seconds of all cases by their names and sizes, each size in a fresh process."""
    found: dict[str, dict[str, float | str]] = {case.name: {} for case in chosen(only)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for blocks in SIZES:
        command = [sys.executable, "-m", "benchmarks.grow", *only, "--blocks", str(blocks)]
        output = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout
        largest = {case.name: case.largest for case in CASES}
        for name, value in json.loads(output.splitlines()[-1]).items():
            if blocks <= largest[name]:
                found[name][str(blocks)] = value
    return found


def exponent(row: dict[str, float | str]) -> float | None:
    """The exponent between the two largest sizes; None if one of them failed."""
    (few, less), (many, more) = list(row.items())[-2:]
    if isinstance(less, str) or isinstance(more, str):
        return None
    return math.log(more / less) / math.log(int(many) / int(few))


_BY_TORCH = "torch's exporter matches its rules against all nodes for each node: 121 of 159 s at 192 blocks"
REASONS: dict[str, str] = {
    "`export_onnx`": _BY_TORCH,
    "`export_onnx` of a model for a target": _BY_TORCH,
    "`load`": "torch's `load_state_dict` looks at all keys of a list of modules for each module in it",
    "`search`": "as many mixes as layers and choices, each of all layers: a quarter of its time at 512 blocks",
}
"""Why a function may grow faster, by its name; measured."""


def too_fast(rows: dict[str, dict[str, float | str]]) -> list[str]:
    """The functions that failed, or grow faster than they may."""
    found = {name: exponent(row) for name, row in rows.items()}
    return [name for name, own in found.items() if own is None or (own > MOST and name not in REASONS)]


def table(rows: dict[str, dict[str, float | str]], where: dict[str, str]) -> str:
    """The rows as a Markdown table."""
    lines = [f"| CPU seconds | {' | '.join(f'{size} blocks' for size in SIZES)} | exponent | |"]
    lines.append("|---|" + "---|" * (len(SIZES) + 2))
    passes = {case.name: case.passes for case in CASES}
    for name, row in rows.items():
        cells = [_cell(row.get(str(size), "")) for size in SIZES]
        own = exponent(row)
        note = REASONS.get(name, passes.get(name, ""))
        lines.append(f"| {name} | {' | '.join(cells)} | {'-' if own is None else f'{own:.2f}'} | {note} |")
    source = f"Written by `make grow`: {where['processor']}, 1 thread, torch {where['torch']}, at {where['commit']}."
    return "\n".join([*lines, "", source])


def _cell(value: float | str) -> str:
    return value.split(":")[0] if isinstance(value, str) else f"{value:.3g}"


def main() -> int:
    """Measure, print, write; 1 if a function grows faster than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="TEXT", help="time the functions with one of these texts alone")
    parser.add_argument("--blocks", type=int, help="time one size, in this process, and print it as JSON")
    given = parser.parse_args()
    if given.blocks:
        print(json.dumps(measured_here(given.blocks, given.only)))
        return 0
    where = machine()  # before the work: the load is then that of other programs
    rows = measure(given.only)
    if not given.only:
        write_results(RESULTS, {"machine": where, "seconds": rows})
        put_between(PAGE, BEGIN, END, table(rows, where))
    print(table(rows, where))
    missed = too_fast(rows)
    print(f"faster than with exponent {MOST:g}: {', '.join(missed)}" if missed else "all grow as they may")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
