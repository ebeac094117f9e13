"""Time a training step of a model whose functions have quantizers that are off, over the step without these quantizers.

python -m benchmarks.sites

Layers are quantized in neither, so that the ratio is what finding the calls of sites costs. Both steps take turns, and
the median of the ratios of pairs counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fakequant as fq
from examples.demo.text import Block

_SIZES = ((64, 4, 96), (96, 4, 256), (192, 4, 512))
"""Features, heads and tokens of four texts for two blocks of a transformer; from about 6 to 120 ms on two cores."""
_OPERATORS = ("add", "scaled_dot_product_attention")


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """A function that runs one training step and gives its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def measure(features: int, heads: int, tokens: int, pairs: int) -> tuple[int, float, float]:
    """The number of sites, the seconds of a step without them, and the median ratio."""
    torch.manual_seed(0)
    x = torch.randn(4, tokens, features)
    plain = nn.Sequential(Block(features, heads), Block(features, heads))
    owner = nn.Sequential(Block(features, heads), Block(features, heads))
    rule = fq.Rule("*", input="int8", weight="int8", ops=_OPERATORS)
    with_sites = fq.prepare(owner, fq.Config("sites", (rule,)), example=x)
    found = len(fq.site_plan(with_sites).sites)
    with fq.disabled(with_sites):
        steps = step_of(plain, x), step_of(with_sites, x)
        for step in steps * 3:
            step()
        timed = [(steps[0](), steps[1]()) for _ in range(pairs)]
    return found, statistics.median(one for one, _ in timed), statistics.median(two / one for one, two in timed)


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=61)
    pairs = parser.parse_args().pairs
    for features, heads, tokens in _SIZES:
        sites, seconds, ratio = measure(features, heads, tokens, pairs)
        print(f"{features} features, {tokens} tokens: {sites} sites, {1e3 * seconds:.1f} ms, with sites {ratio:.3f}")


if __name__ == "__main__":
    main()
