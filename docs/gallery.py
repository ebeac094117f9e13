"""Write the reports that docs/gallery.md shows: `python docs/gallery.py build/gallery`, in about a minute."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import fakequant as fq

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.demo import digits, text

EPOCHS, STEPS, BITS = 6, 400, 5.0


def cnn(folder: Path) -> Path:
    """The network of the demo in INT8, exported and verified."""
    training, held_out = digits.load_digits()
    model = fq.prepare(fq.fuse_batch_norm(digits.train(training, EPOCHS), training.images[:2]), fq.presets.INT8)
    batches = list(training.images.split(128))
    fq.calibrate(model, batches, method="mse", progress=False)
    file = folder / "cnn.onnx"
    fq.export_onnx(model, batches[0], file, dynamic_shapes=({0: "batch"},))
    checked = fq.verify_onnx(file, model, batches[:1])
    file.unlink()

    def percent_right(net: torch.nn.Module) -> float:
        return digits.percent_right(net, held_out)

    return fq.report(model, batches, folder / "cnn.html", percent_right, results=[checked])


@cache
def language_model() -> tuple[torch.nn.Module, text.Corpus]:
    """A byte-level language model and its data."""
    corpus = text.load_corpus()
    return text.train(corpus, STEPS), corpus


def windows() -> list[Tensor]:
    """Batches of training text."""
    _, corpus = language_model()
    return [batch for batch, _ in text.Windows(corpus.training, 4, seed=2)]


def minus_nats(model: torch.nn.Module) -> float:
    """The metric: larger is better."""
    return -text.nats_per_byte(model, language_model()[1].held_out, windows=32)


def transformer(folder: Path) -> Path:
    """INT4 weights in groups of 32, improved."""
    model = fq.prepare(copy.deepcopy(language_model()[0]), fq.presets.INT4_GROUP32)
    fq.calibrate(model, windows(), progress=False)
    found = fq.ptq.improve(model, windows(), "fast", progress=False)
    return fq.report(model, windows(), folder / "transformer.html", minus_nats, results=[found])


def mixed(folder: Path) -> Path:
    """A preset for each layer within a budget."""
    net = language_model()[0]
    mix = fq.search(net, windows()[:2], ["INT8_WEIGHT_ONLY", "INT4_GROUP32"], bits=BITS)
    model = fq.prepare(copy.deepcopy(net), mix.config())
    fq.calibrate(model, windows(), progress=False)
    return fq.report(model, windows(), folder / "mixed.html", minus_nats)


def main(folder: Path) -> None:
    """Write all three and remove the figures beside them, to which no page links."""
    folder.mkdir(parents=True, exist_ok=True)
    with digits.one_thread():
        for make in (cnn, transformer, mixed):
            page = make(folder)
            page.with_suffix(".json").unlink()
            print(f"{page}: {page.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
