"""What `improve("fast")` does for batches that it has not seen, with every architecture of the zoo.

`python -m benchmarks.zoo.new_data`: three batches choose weights of INT4_GROUP32, and `--judged` other batches judge: a
figure is the mean of their SQNR in dB, before and after `improve`. Few batches judge badly: for a model with a few
outputs, four differ by 2 dB from two hundred. `--json` keeps the rows, `--beside` shows those of an earlier record. The
command ends with 1 where a model loses more than 0.3 dB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import fakequant as fq
from fakequant.data.batches import Batches
from fakequant.model.run.outputs import OutputDistance, decibels

from . import of_transformers
from .architectures import ARCHITECTURES
from .case import Case

PRESET = "INT4_GROUP32"
FIT = 3
LOST = 0.3
"""dB that a model may lose."""
MODELS = ARCHITECTURES | {one.name: one for one in of_transformers.MORE}
_MOST = 100.0  # dB that count


def measured(name: str, steps: str = "fast", seed: int = 0, judged: int = 32) -> dict[str, Any]:
    """One architecture: dB on new batches before and after, seconds of the CPU, and what was said."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = Case(MODELS[name])
    found = [batch for number in range(seed, seed + (FIT + judged + 1) // 2) for batch in case._build(number)[1]]
    fit, new = found[:FIT], found[FIT : FIT + judged]
    model = case.float(seed)
    judges = [OutputDistance(model, Batches([one], "new_data").kept()) for one in new]
    fq.prepare(model, PRESET, fit[0])
    fq.calibrate(model, fit, progress=False, unseen="float")

    def signal() -> float:
        return statistics.mean(min(decibels(judge.of(model).mean), _MOST) for judge in judges)

    before, begin = signal(), time.process_time()
    improved = fq.ptq.improve(model, fit, steps, progress=False)
    seconds = time.process_time() - begin
    return {"before": before, "after": signal(), "seconds": seconds, "said": improved.conclusions}


def _in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    receive, send = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            send.send(measured(name, options.steps, options.seed, options.judged))
        except BaseException as error:
            send.send({"why": f"{type(error).__name__}: {error}".splitlines()[0][:150]})

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    found = {"why": f"more than {options.limit:.0f} s"}
    if receive.poll(options.limit):
        found = receive.recv()
    process.kill()
    process.join()
    return found


def main(given: list[str] | None = None) -> int:
    """Measure what the command line says; 1 if a model loses."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.new_data")
    parser.add_argument("--only", nargs="+", default=[""], help="architectures whose name has one of these texts")
    parser.add_argument("--steps", default="fast")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of the first batches")
    parser.add_argument("--judged", type=int, default=32, help="batches that judge (%(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a model (%(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="an earlier record")
    options = parser.parse_args(given)
    earlier = {} if options.beside is None else json.loads(options.beside.read_text())
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name in MODELS if any(text in name for text in options.only)):
        rows[name] = own = _in_process(name, options)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1))
        other = earlier.get(name, {})
        beside = f"{other['after'] - other['before']:+8.2f} earlier" if "after" in other else ""
        if "after" in own:
            change = own["after"] - own["before"]
            print(f"{name:36} {own['before']:7.2f} {own['after']:7.2f} {change:+8.2f} dB {beside}", flush=True)
        else:
            print(f"{name:36} left out: {own['why']}", flush=True)
    for title, record in (("earlier", {name: earlier.get(name, {}) for name in rows}), ("now", rows)):
        if changes := [own["after"] - own["before"] for own in record.values() if "after" in own]:
            lost = sum(change < -LOST for change in changes)
            seconds = sum(own["seconds"] for own in record.values() if "after" in own)
            print(
                f"{title}: {len(changes)} models, median {statistics.median(changes):+.2f} dB, worst "
                f"{min(changes):+.2f} dB, {lost} lose more than {LOST} dB, {seconds:.0f} s of the CPU"
            )
    return int(any(own["after"] - own["before"] < -LOST for own in rows.values() if "after" in own))


if __name__ == "__main__":
    sys.exit(main())
