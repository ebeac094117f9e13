"""The time and size of the report of a BERT with 22.7 million parameters: `python -m benchmarks.report`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fakequant as fq
from tests.support.vision import import_torchvision

SECONDS, BYTES = 20.0, 1_000_000
"""The most that a report may take on two cores, and the largest page."""


def bert() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A calibrated model with random weights, and eight batches of eight sequences of 64 tokens."""
    import_torchvision()  # transformers imports it for its losses
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(config).eval()
    batches = [{"input_ids": torch.randint(0, config.vocab_size, (8, 64))} for _ in range(8)]
    model = fq.prepare(model, "int8")
    fq.calibrate(model, batches)
    return model, batches


def main() -> None:
    """Write the report, and print its size and the seconds that it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the page stays; a temporary folder by default")
    out = parser.parse_args().out
    model, batches = bert()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        page = fq.report(model, batches, out or Path(folder) / "report.html")
        seconds, size = time.perf_counter() - started, page.stat().st_size
    print(f"{parameters:,} parameters: {seconds:.1f} s (at most {SECONDS:g}), {size:,} bytes (at most {BYTES:,})")
    if seconds > SECONDS or size > BYTES:
        raise SystemExit("the report takes too long or is too large")


if __name__ == "__main__":
    main()
