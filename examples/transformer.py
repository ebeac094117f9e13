"""What 4-bit and 8-bit formats cost a small language model, and what fine-tuning wins back.

python examples/transformer.py --out transformer-output

A byte-level transformer is trained on the source text of Python's standard library, then quantized in several formats
(weights, inputs of linear layers, and both operands of the attention products; in INT4 weights only), measured on
held-out files, fine-tuned with fake quantization in its graph, and measured again. As a control the float model is
trained on for as long. Settings are chosen on other files than those: `--on development` measures there.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from typing import Any

import torch
from demo import text
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fakequant as fq
from fakequant.files import writable_folder, write_whole

EPOCHS = 10
STEPS_PER_EPOCH = 500
STEPS = EPOCHS * STEPS_PER_EPOCH
SCHEDULE = fq.qat.Schedule(text.LEARNING_RATE, EPOCHS, fraction=0.1, start=1 / 6)
TUNING_STEPS = SCHEDULE.epochs * STEPS_PER_EPOCH
THREADS = 1
CONTROL = "float32, trained on"
SPLITS = ("held_out", "development")


def for_training(preset: fq.Config) -> fq.Config:
    """A preset with embeddings in float, and with weights whose scales follow them at every step."""
    first = preset.rules[0]
    assert first.weight is not None
    follows = fq.Rule(input=first.input, weight=fq.TensorConfig(first.weight.spec, dynamic=True))
    return fq.Config(preset.name, (follows, fq.Rule(layers=("Embedding",))))


CONFIGS = tuple(
    for_training(preset) for preset in (fq.presets.NVFP4, fq.presets.MXFP4, fq.presets.INT4_GROUP32, fq.presets.FP8)
)


def quantized(model: nn.Module, how: fq.Config, training: Tensor) -> nn.Module:
    """A quantized copy, calibrated on training text."""
    copied = fq.prepare(copy.deepcopy(model), how)
    fq.calibrate(copied, (windows for windows, _ in text.Windows(training, 4, text.SEED + 2)), progress=False)
    return copied


def trained_on(model: nn.Module, training: Tensor) -> nn.Module:
    """A copy of the float model trained for as long as the quantized ones: what more training wins by itself."""
    copied = copy.deepcopy(model)
    optimizer = text.adamw(copied.parameters())
    text.fit(copied, tuning_windows(training), optimizer, fq.qat.scheduler(optimizer, SCHEDULE, TUNING_STEPS))
    return copied


def finetuned(model: nn.Module, teacher: nn.Module, training: Tensor) -> nn.Module:
    """A calibrated model, trained in place towards the logits of the float model that it came from."""
    options = fq.qat.Options(optimizer=text.adamw)
    fq.qat.finetune(model, text.Taught(tuning_windows(training), teacher), text.divergence, SCHEDULE, options)
    return model


def tuning_windows(training: Tensor) -> text.Windows:
    """The windows of one epoch, the same for every model, other ones than those of the float training."""
    return text.Windows(training, STEPS_PER_EPOCH, text.SEED + 1)


def study(console: Console, split: str = SPLITS[0], features: int = text.FEATURES) -> dict[str, Any]:
    """Train, quantize, fine-tune and measure.

    Args:
        split: the part of the corpus to measure on.
        features: the width of the model.

    Returns:
        "nats_per_byte": "float32", "float32_trained_on", and "formats": by format {calibrated, finetuned, recovered,
        recovered_of_control}. "recovered" is the share of what quantization lost that fine-tuning won back, against the
        float model as it was; "recovered_of_control" is the same against the float model trained on for as long.
        "split", "features", "steps", "tuning_steps", "bytes", "seconds", "environment": what was run and where.
    """
    started = time.perf_counter()
    corpus = text.load_corpus()
    measured = getattr(corpus, split)
    console.print(f"Training on {len(corpus.training):,} bytes; measuring on {len(measured):,} others ({split})")
    model = text.train(corpus, STEPS, features)
    start = text.nats_per_byte(model, measured)
    console.print(f"  {start:.4f} nats per byte: float32 ({time.perf_counter() - started:.0f} s)", highlight=False)
    control = text.nats_per_byte(trained_on(model, corpus.training), measured)
    console.print(f"  {control:.4f}: {CONTROL}", highlight=False)
    rows = {}
    for how in CONFIGS:
        copied = quantized(model, how, corpus.training)
        before = text.nats_per_byte(copied, measured)
        after = text.nats_per_byte(finetuned(copied, model, corpus.training), measured)
        console.print(f"  {before:.4f}, fine-tuned {after:.4f}: {how.name}", highlight=False)
        rows[how.name] = {
            "calibrated": before,
            "finetuned": after,
            "recovered": 1 - (after - start) / (before - start),
            "recovered_of_control": 1 - (after - control) / (before - start),
        }
    return {
        "nats_per_byte": {"float32": start, "float32_trained_on": control, "formats": rows},
        "split": split,
        "features": features,
        "steps": STEPS,
        "tuning_steps": TUNING_STEPS,
        "bytes": {"training": len(corpus.training), "measured": len(measured)},
        "seconds": round(time.perf_counter() - started, 1),
        "environment": {"python": platform.python_version(), "torch": torch.__version__, "threads": THREADS},
    }


def print_table(console: Console, found: dict[str, Any]) -> None:
    """The result as a table."""
    losses = found["nats_per_byte"]
    start = losses["float32"]
    table = Table(title=f"Nats per byte, {found['split']} files (float32: {start:.4f})")
    for column in ("format", "calibrated", "lost", "fine-tuned", "left", "recovered", "of control"):
        table.add_column(column, justify="left" if column == "format" else "right")
    control = losses["float32_trained_on"]
    table.add_row(CONTROL, "", "", f"{control:.4f}", f"{control - start:+.4f}", "", "")
    for name, row in losses["formats"].items():
        before, after = row["calibrated"], row["finetuned"]
        numbers = (f"{before:.4f}", f"{before - start:+.4f}", f"{after:.4f}", f"{after - start:+.4f}")
        table.add_row(name, *numbers, f"{row['recovered']:.0%}", f"{row['recovered_of_control']:.0%}")
    console.print(table)


def main() -> None:
    """Run the study and write `results.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default="transformer-output", help="the folder for results.json")
    parser.add_argument("--on", choices=SPLITS, default=SPLITS[0], help="the files to measure on")
    parser.add_argument("--features", type=int, default=text.FEATURES, help="the width of the model")
    given = parser.parse_args()
    folder = writable_folder(given.out)
    console = Console()
    # The number of threads decides how sums are rounded: with one number, runs on one machine agree.
    torch.set_num_threads(THREADS)
    found = study(console, given.on, given.features)
    print_table(console, found)
    write_whole(folder / "results.json", json.dumps(found, indent=2).encode() + b"\n")
    console.print(f"{found['seconds']:.0f} seconds; figures are in {folder / 'results.json'}")


if __name__ == "__main__":
    main()
