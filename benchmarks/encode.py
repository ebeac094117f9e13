"""Memory and seconds of `fq.encode` for 1.1 billion weights in bfloat16 (Linux).

Each job runs in a process of its own: a model of a few large linear layers, all of whose tensors are made one after the
other and let go of, as a trainer sends them to a server. The memory is the largest that was resident, without that of
the imports, in copies of the model.

python -m benchmarks.encode
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

import fakequant as fq

PRESETS = ("w8a8_dynamic", "fp8_block", "nvfp4_weight_only", "nvfp4_four_over_six", "int4_group128")
_WIDE, _LAYERS = 8192, 16


def resident() -> int:
    """The largest number of bytes that were resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def job(preset: str, dtype: str) -> dict[str, float]:
    """Encode a model, whose own weights are of a dtype, as it is served in bfloat16."""
    small = fq.prepare(nn.Sequential(nn.Linear(256, 256)).to(torch.bfloat16), preset, skip=[])
    fq.calibrate(small, [torch.ones(1, 256, dtype=torch.bfloat16)], progress=False)
    dict(fq.encode(small, "compressed-tensors", dtype=torch.bfloat16))  # what is imported at the first use
    start = resident()
    kind = getattr(torch, dtype)
    layers = [nn.utils.skip_init(nn.Linear, _WIDE, _WIDE, bias=False, dtype=kind) for _ in range(_LAYERS)]
    first = torch.randn(_WIDE, _WIDE, generator=torch.Generator().manual_seed(0)).to(kind)
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.weight.copy_(first.roll(number, 0) if number else first)
    del first
    model = fq.prepare(nn.Sequential(*layers), preset, skip=[])
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    loaded, began, count = resident() - start, time.perf_counter(), 0
    for _, tensor in fq.encode(model, "compressed-tensors", dtype=torch.bfloat16).items():
        count += tensor.numel() * tensor.element_size()
    found = {"seconds": time.perf_counter() - began, "copies before": loaded / size}
    return {**found, "copies": (resident() - start) / size, "GB of the model": size / 1e9, "GB sent": count / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", nargs=2, metavar=("PRESET", "DTYPE"))
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if given.job:
        print(json.dumps(job(*given.job)))
        return
    for preset in PRESETS:
        words = [sys.executable, "-m", "benchmarks.encode", "--job", preset, given.dtype]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"{preset:20}", ", ".join(f"{key} {value:.2f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
