"""What `improve` keeps of a sentence encoder in 15 formats: `python -m benchmarks.real.encoder [ROW ...]`.

all-MiniLM-L6-v2 with all linear layers quantized, embeddings and all else in float. 128 sentences of the docstrings of
torch and numpy choose, 512 others judge, by the mean cosine of embeddings to the float model's, and by the share of
sentences whose nearest neighbour is the same. Two formats come again with other rules for their scales. One call
`improve(model, batches, steps, mask="attention_mask")` for each row and steps. Prints a table; figures that
`--keep FILE` holds are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import random
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.real.models import imported_minilm

_NVFP4 = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"
_MXFP4 = "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor"
_NVFP4_46, _MXFP4_EVEN = _NVFP4.replace("@", ":four_over_six@"), _MXFP4.replace("floor", "even")
_NVFP4_OF_11 = _NVFP4.replace("@", ":searched@")
_MXFP8 = "float8_e4m3fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor"
CHOOSE, JUDGE, TOKENS, BATCH = 128, 512, 64, 8
"""Sentences that choose, and that judge; the most tokens of one; sentences in a batch."""


class Row(NamedTuple):
    """The formats of the weights and the inputs of all linear layers, and the goals."""

    name: str
    weight: str
    input: str | None
    cosine: float
    agreement: float | None = None


ROWS = [
    Row("W8A8 static affine", "int8 per_channel(0)", "uint8", 0.9990, 0.965),
    Row("W8A8 per token", "int8 per_channel(0)", "int8 per_token dynamic", 0.9993, 0.965),
    Row("W8", "int8 per_channel(0)", None, 0.9999, 0.99),
    Row("FP8 static", "float8_e4m3fn per_channel(0)", "float8_e4m3fn", 0.9985, 0.955),
    Row("W4 groups of 128", "int4 per_block(-1:128,pad)", None, 0.992, 0.90),
    Row("W4 groups of 32", "int4 per_block(-1:32,pad)", None, 0.9945, 0.925),
    Row("W4 per channel", "int4 per_channel(0)", None, 0.990, 0.89),
    Row("NVFP4 weights", _NVFP4, None, 0.994, 0.93),
    Row("NVFP4 W4A4", _NVFP4, f"{_NVFP4} dynamic", 0.985, 0.85),
    Row("NVFP4 W4A4, 4 or 6", _NVFP4_46, f"{_NVFP4_46} dynamic", 0.985, 0.85),
    Row("NVFP4 W4A4, searched", _NVFP4_OF_11, f"{_NVFP4_OF_11} dynamic", 0.985, 0.85),
    Row("MXFP4 W4A4", _MXFP4, f"{_MXFP4} dynamic", 0.97, 0.80),
    Row("MXFP4 W4A4, even", _MXFP4_EVEN, f"{_MXFP4_EVEN} dynamic", 0.97, 0.80),
    Row("INT4, A4 per token", "int4 per_channel(0)", "int4 per_token dynamic", 0.96, 0.74),
    Row("MXFP8", _MXFP8, f"{_MXFP8} dynamic", 0.998, 0.95),
    Row("W3 groups of 128", "int3 per_block(-1:128,pad)", None, 0.975),
    Row("W2 groups of 64 affine", "uint2 per_block(-1:64,pad)", None, 0.93),
    Row("W2 groups of 32", "int2 per_block(-1:32,pad)", None, 0.93),
]


def sentences() -> list[str]:
    """Sentences of the docstrings of torch and numpy, drawn without repetition."""
    found = dict[str, None]()
    for module in (torch, nn, nn.functional, torch.linalg, torch.optim, torch.distributions, np, np.linalg, np.random):
        for name in sorted(vars(module)):
            text = inspect.getdoc(vars(module)[name]) or ""
            for paragraph in text.split("\n\n"):
                for own in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                    if re.fullmatch(r"[A-Z][a-zA-Z0-9 ,;'()\-]{38,198}\.", own):
                        found[own] = None
    return random.Random(0).sample(sorted(found), CHOOSE + JUDGE)


def batches(tokenizer: Any, texts: list[str]) -> Iterator[dict[str, Tensor]]:
    """The tokens of sentences and their mask: up to 64, padded to the longest of a batch, which the mask leaves out."""
    for start in range(0, len(texts), BATCH):
        given = texts[start : start + BATCH]
        found = tokenizer(given, padding=True, max_length=TOKENS, truncation=True, return_tensors="pt")
        yield {name: found[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def embeddings(model: nn.Module, held: list[dict[str, Tensor]]) -> Tensor:
    """One row for each sentence, of length 1."""
    return torch.cat([model.eval()(**batch) for batch in held])


def alike(exact: Tensor, found: Tensor) -> tuple[float, float]:
    """The mean cosine to the float embeddings, and the share of sentences with the same nearest neighbour."""
    near = [(x @ x.mT).fill_diagonal_(-2.0).argmax(1) for x in (exact, found)]
    cosine = nn.functional.cosine_similarity(exact.double(), found.double())
    return float(cosine.mean()), float((near[0] == near[1]).double().mean())


def quantized(model: nn.Module, row: Row, given: list[dict[str, Tensor]]) -> nn.Module:
    """A copy with all linear layers in the formats of a row, calibrated."""
    config = fq.Config(row.name, (fq.Rule("*", layers=("Linear",), weight=row.weight, input=row.input),))
    found = fq.prepare(copy.deepcopy(model), config, given[0])
    fq.calibrate(found, given, mask="attention_mask", progress=False)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="those with one of the texts in their names")
    parser.add_argument("--steps", nargs="+", default=["nearest", "fast", "best"], help="names, or steps with commas")
    parser.add_argument("--keep", type=Path, help="a file that gets the figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    model, tokenizer = imported_minilm()
    texts = sentences()
    fit, held = (list(batches(tokenizer, own)) for own in (texts[:CHOOSE], sorted(texts[CHOOSE:], key=len)))
    exact = embeddings(model, held)
    print(f"| bits | goal | {' | '.join(given.steps)} |\n|---|---|{'---|' * len(given.steps)}", flush=True)
    for row in (own for own in ROWS if not given.rows or any(text in own.name for text in given.rows)):
        cells = [f"{row.cosine:.4f} / {row.agreement or '-'}"]
        for steps in given.steps:
            key = f"{row.name}, {steps}"
            if key not in kept:
                own, started = quantized(model, row, fit), time.process_time()
                if steps != "nearest":
                    chosen = steps.split(",") if "," in steps else steps
                    fq.ptq.improve(own, fit, chosen, mask="attention_mask", progress=False)
                kept[key] = [time.process_time() - started, *alike(exact, embeddings(own, held))]
                if given.keep:
                    given.keep.write_text(json.dumps(kept, indent=1) + "\n")
            seconds, cosine, agreement = kept[key]
            cells.append(f"{cosine:.5f} / {agreement:.3f} ({seconds:.0f} s)")
        print(f"| {row.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
