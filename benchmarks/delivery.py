"""Seconds and memory of `fq.deliver`, beside a copy of the model's own files (Linux): `python -m benchmarks.delivery`.

Prints a line for each delivery: a Llama of random weights in bfloat16, in memory, is prepared and delivered. Its
seconds and CPU seconds, and those of scales and codes alone, are divided by those of `shutil.copyfile` of its own
folder, which is in the cache of the system. The bar is a ratio of 3, and a peak of memory beyond that before of one
shard. A digest shows whether the file has the same bytes. It needs transformers, safetensors and gguf.

python -m benchmarks.delivery                                        # a billion parameters, five deliveries
python -m benchmarks.delivery compressed-tensors:int4_group128 gguf:GGUF_Q4_K --blocks 4 --threads 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import fakequant as fq
from benchmarks.accuracy.memory import resident
from fakequant.model.weights import quantized_weights
from tests.support.vision import import_torchvision

import_torchvision()

import transformers  # noqa: E402

DELIVERIES = [
    "compressed-tensors:int4_group128",
    "compressed-tensors:FP8_PER_CHANNEL",
    "gguf:GGUF_Q8_0",
    "gguf:GGUF_Q4_0",
    "gguf:GGUF_Q4_K",
]


def made(folder: Path, blocks: int) -> None:
    """Save a Llama of random weights, 44 million for each block and 131 million in its tables."""
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=blocks,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    drawn = torch.randn(1 << 20) * 0.02
    for parameter in model.parameters():
        at = torch.randint(1 << 20, ())
        parameter.data = (
            drawn.roll(int(at))
            .repeat(-(-parameter.numel() // len(drawn)))[: parameter.numel()]
            .reshape(parameter.shape)
            .to(torch.bfloat16)
        )
    model.save_pretrained(folder)


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def copied(folder: Path, target: Path) -> dict[str, float]:
    """The fastest of three copies of a folder's shards."""

    def copy() -> None:
        for path in folder.glob("*.safetensors"):
            shutil.copyfile(path, target / path.name)

    return min((timed(copy) for _ in range(3)), key=lambda one: one["seconds"])


@torch.no_grad()
def quantize(model: nn.Module) -> None:
    """Make scales and codes of all weights, one after the other, and keep none."""
    for weight in quantized_weights(model).values():
        weight.quantizer.encoded(weight.tensor)


def delivered(folder: Path, delivery: str, scratch: Path) -> dict[str, Any]:
    """Seconds and memory of one delivery, and the digest of its file."""
    format, _, preset = delivery.partition(":")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # in memory, not mapped
    model = fq.prepare(model, preset, skip=[] if format == "gguf" else ["lm_head"])
    codes = timed(lambda: quantize(model))
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    out = scratch / "delivered"
    found: dict[str, Any] = timed(lambda: fq.deliver(model, out, format))
    found["beyond_MB"] = round((resident("VmHWM") - before) / 1e6)
    digest = hashlib.sha256()
    for path in sorted((*out.glob("*.safetensors"), *out.glob("*.gguf"))):
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    shutil.rmtree(out)
    return found | {"codes": codes, "digest": digest.hexdigest()[:12]}


def main() -> None:
    """Print what was measured, a line of JSON for each delivery."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deliveries", nargs="*", default=DELIVERIES)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        made(folder, given.blocks)
        shard = max(path.stat().st_size for path in folder.glob("*.safetensors"))
        for delivery in given.deliveries:
            copy = copied(folder, Path(scratch))
            found = delivered(folder, delivery, Path(scratch))
            row = {"delivery": delivery, "threads": given.threads, "shard_MB": round(shard / 1e6)}
            row |= {name: found[name] for name in ("beyond_MB", "digest")}
            for what, one in (("delivered", found), ("codes_alone", found["codes"])):
                row[f"{what}_over_copy"] = {name: round(one[name] / copy[name], 2) for name in copy}
            print(json.dumps(row | {"copy": {name: round(value, 2) for name, value in copy.items()}}), flush=True)


if __name__ == "__main__":
    main()
