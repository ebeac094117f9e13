"""Where a compiled training step spends its time on a GPU: `python -m benchmarks.gpu.profiled`, with src on PYTHONPATH.

Prints the milliseconds of a step in float and with INT8 weights and activations, eager and compiled, their ratio, and
the operators and kernels of the compiled INT8 step by their time. Writes a row of the ratios with `--out FILE`.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fakequant as fq
from benchmarks.gpu.machine import title, unavailable
from examples.demo.text import Block

_WARM, _TIMES, _SHOWN = 5, 30, 25


def milliseconds(step: Callable[[], object], device: str) -> float:
    """The mean time of a step."""
    for _ in range(_WARM):
        step()
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_TIMES):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _TIMES


def step_of(model: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter], x: Tensor) -> Callable[[], None]:
    """Forward, backward and SGD."""
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.profiled", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu tries the program itself, without times")
    parser.add_argument("--width", type=int, default=1024, help="of the block of attention")
    parser.add_argument("--out", type=Path, help="a file of JSON lines that gets the row")
    asked = parser.parse_args()
    if asked.device != "cpu" and (reason := unavailable()):
        print(reason)
        return 0
    torch.manual_seed(0)
    block, x = Block(asked.width, 8).to(asked.device), torch.randn(8, 256, asked.width, device=asked.device)
    quantized = fq.prepare(copy.deepcopy(block), "int8")
    fq.calibrate(quantized, [x], progress=False)
    steps = {
        f"{how} {name}": step_of(torch.compile(model) if how == "compiled" else model, model.parameters(), x)
        for name, model in (("float", block), ("int8", quantized))
        for how in ("eager", "compiled")
    }
    print(title(asked.device))
    if asked.device != "cpu":
        row = {name: milliseconds(step, asked.device) for name, step in steps.items()}
        for name, time in row.items():
            print(f"{name}: {time:.3f} ms")
        print(f"compiled int8 over compiled float: {row['compiled int8'] / row['compiled float']:.2f}")
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps({"machine": title(asked.device), "torch": torch.__version__, **row}) + "\n")
    for _ in range(_WARM):
        steps["compiled int8"]()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if asked.device != "cpu" else [])]
    with profile(activities=kinds) as seen:
        for _ in range(_TIMES if asked.device != "cpu" else 1):
            steps["compiled int8"]()
    by = "self_cpu_time_total" if asked.device == "cpu" else "self_cuda_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=_SHOWN, max_name_column_width=80))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
