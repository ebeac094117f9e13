"""Measure the seconds and the memory of `fq.ptq.improve` on an encoder of 22 million parameters (Linux).

python -m benchmarks.accuracy.memory                        # 6 blocks, 128 texts of 64 tokens, "fast"
python -m benchmarks.accuracy.memory --blocks 12 --length 128
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fakequant as fq
from examples.demo.text import Block

_FEATURES, _HEADS, _WORDS = 384, 12, 30_522


class Encoder(nn.Module):
    """Words [n, length] to one vector for each text [n, features]."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _FEATURES)
        self.blocks = nn.ModuleList(Block(_FEATURES, _HEADS) for _ in range(blocks))

    def forward(self, texts: Tensor) -> Tensor:
        x = self.words(texts)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


def block_bytes(model: Encoder, batches: list[Tensor]) -> int:
    """The bytes of a block: its parameters, its input, and what each of its layers gives, for all batches."""
    found = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    hooks = [model.blocks[0].register_forward_pre_hook(lambda _, args: add(args[0]))]
    leaves = [module for module in model.blocks[0].modules() if not [*module.children()]]
    hooks += [leaf.register_forward_hook(lambda _, args, output: add(output)) for leaf in leaves]

    def add(tensor: Tensor) -> None:
        nonlocal found
        found += tensor.nbytes

    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    return found


def resident(field: str = "VmRSS") -> int:
    """The bytes of this process in memory: now, or VmHWM, the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("blocks", 6), ("texts", 128), ("length", 64), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", default="fast")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Encoder(given.blocks).eval()
    batches = list(torch.randint(0, _WORDS, (given.texts, given.length)).split(given.batch))
    largest = block_bytes(model, batches)
    config = fq.Config("W4", (fq.Rule(layers="Linear", weight="int4 per_block(-1:128,pad)"),))
    model = fq.prepare(model, config)
    with torch.no_grad():
        model(batches[0])
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    started = time.perf_counter()
    found = fq.ptq.improve(model, batches, given.steps, progress=False)
    seconds, beyond = time.perf_counter() - started, resident("VmHWM") - before
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.contiguous().numpy().tobytes())
    row = vars(given) | {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(seconds, 1),
        "beyond_MB": round(beyond / 1e6),
        "block_MB": round(largest / 1e6),
        "blocks_beyond": round(beyond / largest, 2),
        "left": round(found.remaining_error, 4),
        "digest": digest.hexdigest()[:12],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
