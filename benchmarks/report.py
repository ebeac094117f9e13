"""The time and size of the report of a BERT with 22.7 million parameters: `python -m benchmarks.report`.

Writes them to benchmarks/results/report.json. With `--pictures FOLDER` it writes nothing there but the page, pictures
of it in Chromium as readers see it, and what it prints, for a person to look at.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fakequant as fq
from tests.support.browser import picture, printed
from tests.support.vision import import_torchvision

from .record import ROOT, machine, write_results

RESULTS = ROOT / "benchmarks" / "results" / "report.json"
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


def pictures(page: Path) -> None:
    """Write pictures of a page into its folder, named by width, colours and scripts, and its print."""
    for width, height in ((1280, 2400), (390, 3600)):
        for scheme, scripts in (("light", True), ("dark", True), ("light", False)):
            name = f"{width}-{scheme}{'' if scripts else '-without-scripts'}.png"
            picture(page, page.with_name(name), width, height, scheme, scripts)
    printed(page, page.with_name("printed.pdf"))


def main() -> None:
    """Write the report, print and record its size and the seconds that it took; or write pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write the page, pictures and a print there")
    folder = parser.parse_args().pictures
    where = machine()  # before the work: the load is then that of other programs
    model, batches = bert()
    if folder:
        pictures(fq.report(model, batches, folder / "report.html"))
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as temporary:
        started = time.perf_counter()
        page = fq.report(model, batches, Path(temporary) / "report.html")
        seconds, size = time.perf_counter() - started, page.stat().st_size
    print(f"{parameters:,} parameters: {seconds:.1f} s (at most {SECONDS:g}), {size:,} bytes (at most {BYTES:,})")
    write_results(RESULTS, {"machine": where, "parameters": parameters, "seconds": seconds, "bytes": size})
    if seconds > SECONDS or size > BYTES:
        raise SystemExit("the report takes too long or is too large")


if __name__ == "__main__":
    main()
