"""Quantize trained models as a new user does, and judge on other inputs: `python -m benchmarks.real [NAME ...]`.

Each model runs in a process of its own: int8 by default, 4 bits in groups, `improve`, an ONNX file with its
verification, and the report, whose advice is executed as it is printed. With names, only these models run, and their
rows replace the old ones in benchmarks/results/real.json. Ends with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.real.models import MODELS, Task
from benchmarks.record import ROOT, machine, put_between, write_results

RESULTS = ROOT / "benchmarks" / "results" / "real.json"
PAGE = ROOT / "docs" / "notes" / "improve.md"
BEGIN, END = "<!-- real:begin -->", "<!-- real:end -->"
PRESETS = ("int8", "int4_group32")
MOST_MORE_BITS = 1.0
"""Bits per weight that scales may add to a preset's, unless `prepare` says how many there are."""
MOST_BYTES = {"CREPE tiny": 0.5e9}
"""The memory that `improve` may take beside the model, in bytes."""
Row = dict[str, Any]


def _call(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch) if isinstance(batch, dict) else model(batch)


@torch.no_grad()
def outputs(model: nn.Module, batches: list[Any]) -> Tensor:
    """The outputs of all batches, a row for each example."""
    return torch.cat([_call(model.eval(), batch) for batch in batches]).flatten(1).double()


def error(model: nn.Module, task: Task, exact: Tensor) -> Row:
    """How far the outputs are from the float model's on inputs that nothing was chosen by: cosine, and dB."""
    found = outputs(model, task.held)
    noise = float((found - exact).square().sum())
    decibels = 10 * math.log10(float(exact.square().sum()) / noise) if noise else math.inf
    return {"cosine": float(nn.functional.cosine_similarity(found, exact).mean()), "dB": decibels}


@contextlib.contextmanager
def measured(row: Row, step: str) -> Iterator[Row]:
    """Put the seconds and the memory that a step took beyond what the process held into a row, or why it failed."""
    found: Row = row.setdefault(step, {})
    before, started = _reset_peak(), time.process_time()
    try:
        yield found
    except Exception as failure:  # the next step of a user may still work
        traceback.print_exc()
        found["failed"] = f"{type(failure).__name__}: {failure}"[:300]
    found["seconds"] = time.process_time() - started
    found["bytes"] = _status("VmHWM") - before
    print(f"{step}: {found}", file=sys.stderr, flush=True)


def _reset_peak() -> int:
    """The memory of this process now, from which on its peak is counted anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return 1024 * int(line.split()[1])


def quantized(task: Task, preset: str, row: Row) -> nn.Module:
    """A prepared and calibrated copy; what `prepare` says goes into the row."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = fq.prepare(copy.deepcopy(task.model), preset, task.batches[0])
        fq.calibrate(model, task.batches, progress=False)
    row["said"] = [str(one.message) for one in said if "fakequant" in type(one.message).__module__]
    row["bits"] = fq.summary(model).bits_per_weight
    return model


def advised(model: nn.Module, task: Task, exact: Tensor, folder: Path, row: Row) -> None:
    """Write the report, execute its advice as it is printed, and put into the row what that changed on other inputs."""
    page = fq.report(model, task.batches, folder / "report.html")
    data = json.loads(page.with_suffix(".json").read_text())
    row["next"], row["code"] = data["next"], data["code"]
    row["before"] = error(model, task, exact)["dB"]
    names = {
        "fq": fq,
        "model": model,
        "float_model": copy.deepcopy(task.model),
        "batches": task.batches,
        "example": task.batches[0],
    }
    if "export_onnx" in data["code"] or not data["code"]:
        row["after"] = row["before"]  # nothing to change: what it says is left to check
        return
    with contextlib.redirect_stdout(sys.stderr):
        exec(data["code"], names)
    row["after"] = error(names["model"], task, exact)["dB"]


def tried(name: str) -> Row:
    """All steps with one model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task, row = MODELS[name](), Row()
    task.model.eval()
    with measured(row, "float") as found:
        exact = outputs(task.model, task.held)
    found["parameters"] = sum(p.numel() for p in task.model.parameters())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for preset in PRESETS:
            with measured(row, preset) as found:
                model = quantized(task, preset, found)
                found |= error(model, task, exact)
            if "failed" in found:
                continue
            if preset == PRESETS[0]:
                with measured(row, "onnx") as found:
                    path = fq.export_onnx(model, task.batches[0], folder / "model.onnx").path
                    found["exact"] = fq.verify_onnx(path, model, task.held).exact
            else:
                better = copy.deepcopy(model)
                with measured(row, f"{preset}, improve") as found:
                    fq.ptq.improve(better, task.batches, progress=False)
                    found |= error(better, task, exact)
            with measured(row, f"{preset}, report") as found:
                advised(model, task, exact, folder, found)
    return row


def missed(rows: dict[str, Row]) -> list[str]:
    """The bars that are missed, a sentence each."""
    found = []
    for name, row in rows.items():
        found += [f"{name}, {step}: {own['failed']}" for step, own in row.items() if "failed" in own]
        for preset in PRESETS:
            own, most = row.get(preset, {}), int(re.findall(r"\d+", preset)[0]) + MOST_MORE_BITS
            if round(own.get("bits", 0), 1) > most and not any("bits per weight" in text for text in own["said"]):
                found.append(f"{name}, {preset}: {own['bits']:.1f} bits per weight, and prepare says nothing of it")
            advice = row.get(f"{preset}, report", {})
            if "after" in advice and advice["after"] < advice["before"]:
                change = f"{advice['before']:.1f} dB to {advice['after']:.1f} dB"
                found.append(f"{name}, {preset}: the advice made it worse, {change}: {advice['next']}")
        better = row.get(f"{PRESETS[1]}, improve", {})
        if "dB" in better and better["dB"] < row[PRESETS[1]]["dB"]:
            change = f"{row[PRESETS[1]]['dB']:.1f} dB to {better['dB']:.1f} dB"
            found.append(f"{name}: improve made the output worse, {change}")
        if better.get("bytes", 0) > MOST_BYTES.get(name, math.inf):
            found.append(f"{name}: improve took {better['bytes'] / 1e9:.2f} GB, at most {MOST_BYTES[name] / 1e9:g}")
        if not row.get("onnx", {}).get("exact", True):
            found.append(f"{name}: the ONNX file is not exact")
    return found


def table(rows: dict[str, Row], where: dict[str, str]) -> str:
    """The rows as a Markdown table."""
    head = ["model", "step", "bits per weight", "cosine", "dB", "CPU seconds", "MB"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        for step, own in row.items():
            lines.append(f"| {name} | {step} | {' | '.join(_cells(own))} |")
    source = (
        f"64 examples to calibrate and improve on, errors on 32 others. Written by `make real-models`: "
        f"{where['processor']}, 1 thread, torch {where['torch']}, at {where['commit']}."
    )
    return "\n".join([*lines, "", source])


def _cells(own: Row) -> list[str]:
    forms: dict[str, Callable[[Any], str]] = {"bits": "{:.1f}".format, "cosine": "{:.4f}".format, "dB": "{:.1f}".format}
    cells = [form(own[key]) if key in own else "" for key, form in forms.items()]
    if "after" in own:
        cells[2] = f"{own['before']:.1f} -> {own['after']:.1f}"
    if "exact" in own:
        cells[2] = "exact" if own["exact"] else "not exact"
    if "failed" in own:
        cells[2] = "fails"
    return [*cells, f"{own['seconds']:.1f}", f"{own['bytes'] / 1e6:.0f}"]


def main() -> int:
    """Run, print and record; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}: those with one of the texts")
    parser.add_argument("--here", help="run one model in this process and print its row as JSON")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(tried(given.here)))
        return 0
    where = machine()  # before the work: the load is then that of other programs
    rows: dict[str, Row] = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    for name in MODELS:
        if given.names and not any(text in name for text in given.names):
            continue
        command = [sys.executable, "-m", "benchmarks.real", "--here", name]
        run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        rows[name] = json.loads(run.stdout.splitlines()[-1])
        write_results(RESULTS, {"machine": where, "models": rows})
    put_between(PAGE, BEGIN, END, table(rows, where))
    print(table(rows, where))
    found = missed(rows)
    print("\n".join(["missed:", *found]) if found else "all bars are met")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
