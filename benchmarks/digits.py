"""Train a small CNN in 1 and 2 bits in all layers, and count which digits of writers it never saw it reads.

python -m benchmarks.digits                                         # three rows, 10 seeds: about 12 CPU minutes
python -m benchmarks.digits --only W2A2 --ways all --seeds 3        # beside other optimizers, scales and teachers
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fakequant as fq
from examples.demo import digits
from fakequant import qat

TRAINED, EPOCHS = 1200, 20
FOUR_LEVELS = "int2_midrise per_channel(0)"
ROWS = {
    "W2A2": {"weight": FOUR_LEVELS},
    "W1A2": {"weight": "binary per_channel(0)"},
    "W2A2, the image in 8 bits": {"weight": FOUR_LEVELS, "image": "uint8"},
}
RECIPE = "few_bits"


def ways() -> dict[str, dict[str, Any]]:
    """What is another way than the recipe, by name."""
    sgd = torch.optim.SGD
    return {
        RECIPE: {},
        "SGD, half of the float rate": {"lr": digits.LEARNING_RATE / 2, "optimizer": lambda p: sgd(p, 1.0, 0.9)},
        "SGD, 1 % of the float rate": {"lr": digits.LEARNING_RATE / 100, "optimizer": lambda p: sgd(p, 1.0, 0.9)},
        "scales of weights from the largest value": {"weight_method": "max"},
        "fixed scales": {"scales": qat.Scales.FIXED},
        "statistics never frozen": {"freeze_batch_norm_after": 1.0},
        "int2": {"weight": "int2 per_channel(0)"},
        "teacher, weight 0.5": {"teacher": {"weight": 0.5}},
        "teacher, weight 1": {"teacher": {"weight": 1.0}},
        "teacher, weight 1, temperature 4": {"teacher": {"weight": 1.0, "temperature": 4.0}},
    }


def parts() -> tuple[digits.Split, digits.Split]:
    """The first 1200 images of scikit-learn's digits to train on, and the 597 others, of other writers."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(one) for one in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 16
    return digits.Split(images[:TRAINED], labels[:TRAINED]), digits.Split(images[TRAINED:], labels[TRAINED:])


def network() -> nn.Module:
    """Two convolutions and two linear layers; gives logits [n, 10] of images [n, 1, 8, 8]."""
    layers = [[nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()] for i, o in ((1, 16), (16, 32))]
    head = [nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers[0], *layers[1], nn.MaxPool2d(2), *head)


def trained(teacher: nn.Module, split: digits.Split, seed: int, epochs: int | None, given: dict[str, Any]) -> nn.Module:
    """The network in few bits, trained on from a float one, with what a way changes."""
    model = copy.deepcopy(teacher)
    weight, input = (fq.TensorConfig(given[name]) for name in ("weight", "input"))
    first = fq.Rule("0", input=given.get("image", given["input"]), weight=weight)
    fq.prepare(model, fq.Config((fq.Rule(input=input, weight=weight), first, fq.Rule(layers=("MaxPool2d",)))))
    fq.calibrate(model, split.images.split(128), weight_method=given.get("weight_method"), progress=False)
    schedule, options = qat.few_bits(EPOCHS)
    schedule = replace(schedule, original_lr=given.get("lr", schedule.original_lr), original_epochs=EPOCHS)
    if epochs is not None:
        schedule = replace(schedule, fraction=epochs / EPOCHS)
    changed = {name: given[name] for name in ("optimizer", "scales", "freeze_batch_norm_after") if name in given}
    options = replace(options, progress=False, **changed)
    distillation = qat.Distillation(teacher, **given["teacher"]) if "teacher" in given else None
    batches = digits.AugmentedBatches(split, seed + 100)
    qat.finetune(model, batches, digits.loss, schedule, options, teacher=distillation)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, help="by default those of the recipe")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--ways", default=RECIPE, help='ways whose name contains this; "all" for all')
    given = parser.parse_args()
    training, held_out = parts()
    with digits.one_thread():
        floats = [digits.train(training, EPOCHS, network, seed) for seed in range(given.seeds)]
        _say("float", RECIPE, [digits.percent_right(model, held_out) for model in floats], 0.0)
        for name, formats in ROWS.items():
            for way, changes in ways().items():
                if given.only not in name or not (given.ways == "all" or given.ways in way):
                    continue
                begun, settings = time.process_time(), {"input": "uint2", **formats, **changes}
                models = [trained(one, training, seed, given.epochs, settings) for seed, one in enumerate(floats)]
                seconds = (time.process_time() - begun) / given.seeds
                _say(name, way, [digits.percent_right(model, held_out) for model in models], seconds)


def _say(name: str, way: str, percent: list[float], seconds: float) -> None:
    mean = round(sum(percent) / len(percent), 2)
    row = {"row": name, "way": way, "percent": mean, "seeds": [round(one, 2) for one in percent]}
    print(json.dumps(row | {"CPU seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
