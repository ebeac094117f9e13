"""Train a byte model from its first step in few bits, gradients too; each loss over that of float, same steps and seed.

python -m benchmarks.few_bits                          # 800 steps, three seeds: about 25 CPU minutes
python -m benchmarks.few_bits --steps 200 --seeds 1 --only NVFP4 --compiled
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import fakequant as fq
from examples.demo import text
from fakequant.nn.backward import GradientConfig


def variants() -> dict[str, Any]:
    """The rule of the linear layers of the blocks, by what is trained; the recipes leave other layers in float, too."""
    found = {}
    for name in ("FP8_TRAINING", "MXFP8_TRAINING", "MXFP4_TRAINING", "NVFP4_TRAINING"):
        rule = fq.presets.presets()[name].rules[0]
        own = rule.gradient
        assert own is not None
        found |= {name: rule, f"{name}, gradients in float": replace(rule, gradient=None)}
        if own.hadamard:
            nearest = GradientConfig.parse(str(own).replace(" stochastic", ""))
            without = {
                "rounded to nearest": nearest,
                "without Hadamard": replace(own, hadamard=0),
                "without both": replace(nearest, hadamard=0),
            }
            found |= {f"{name}, {how}": replace(rule, gradient=gradient) for how, gradient in without.items()}
    return found


class Timed(text.Windows):
    """Windows that note when a step begins: a hook of the model would be compiled with it, anew at each step."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.begun = list[float]()
        for batch in super().__iter__():
            self.begun.append(time.process_time())
            yield batch


def trained(corpus: text.Corpus, rule: fq.Rule | None, given: argparse.Namespace, seed: int) -> dict[str, float]:
    """The loss of a model that was trained in a rule's formats, and the CPU seconds of a step after the first five."""
    torch.manual_seed(seed)
    steps, features = given.steps, given.features
    model = text.Transformer(features, 4)
    if rule is not None:
        fq.prepare(model, fq.Config(replace(rule, pattern="blocks.*", layers=("Linear",))))
        if rule.input is not None and not rule.input.dynamic:  # the weights' ranges follow them in all other rows
            fq.calibrate(model, [windows for windows, _ in text.Windows(corpus.training, 1, seed)])
    optimizer = text.adamw(model.parameters(), 3e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    if given.compiled:
        model.compile()
    windows = Timed(corpus.training, steps, seed)
    text.fit(model, windows, optimizer, rates)
    seconds = statistics.median(end - begin for begin, end in pairwise(windows.begun[5:]))
    return {"nats": text.nats_per_byte(model, corpus.held_out), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--compiled", action="store_true", help="time and train under torch.compile")
    given = parser.parse_args()
    torch.set_num_threads(1)
    corpus = text.load_corpus()
    floats = [trained(corpus, None, given, seed) for seed in range(given.seeds)]
    rows = [("float", floats)]
    for name, rule in variants().items():
        if given.only in name:
            rows.append((name, [trained(corpus, rule, given, s) for s in range(given.seeds)]))
            own = [one["nats"] / other["nats"] for one, other in zip(rows[-1][1], floats, strict=True)]
            mean = sum(one["nats"] for one in rows[-1][1]) / given.seeds
            step = sum(one["seconds"] for one in rows[-1][1]) / sum(one["seconds"] for one in floats)
            row = {"name": name, "nats": round(mean, 4), "over float": [round(one, 4) for one in own]}
            print(json.dumps(row | {"step": round(step, 2)}), flush=True)
    print(json.dumps({"float": floats}))


if __name__ == "__main__":
    main()
