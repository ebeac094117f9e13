"""compat.pytorch_quantization against the rules of the original, and the time of its entropy search over theirs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import seconds
from fakequant.compat.pytorch_quantization import calib, tensor_quant
from tests.support import compat_rules as rules

from .record import ROOT

SCRIPT = ROOT / "tests" / "scripts" / "train_quantized.py"
# One amax, one axis, two axes of three; the tests take more.
AMAX_SHAPES: Sequence[tuple[int, ...]] = ((), (32, 1, 1), (32, 1, 2048))
AFFINE_RANGES = ((-1.0, 2.0), (0.7, 1.9), (-1e30, 1.0))
# Seed, then the numbers that the user's guide prints.
GUIDE_SEED = 12345
GUIDE_VALUES = [0.9843, 0.8828, 0.9921, 0.4609, 0.0859, 0.1797, 0.3672, 0.5703, 0.3359, 0.2109]
GUIDE_CODES = [126, 113, 127, 59, 11, 23, 47, 73, 43, 27]


class Guide(NamedTuple):
    """The example of the user's guide: how many of its numbers differ, and the scale as it prints it."""

    differing: int
    scale: str


class Search(NamedTuple):
    """The entropy search: how many times as fast as the loops, and whether it finds the same amax."""

    times: float
    same: bool


def guide() -> Guide:
    """The example that the user's guide prints, by its seed."""
    x = torch.rand(10, generator=torch.Generator().manual_seed(GUIDE_SEED))
    values = [round(value, 4) for value in tensor_quant.fake_tensor_quant(x, x.abs().max()).tolist()]
    codes, scale = tensor_quant.tensor_quant(x, x.abs().max())
    pairs = [*zip(values, GUIDE_VALUES, strict=True), *zip(codes.tolist(), GUIDE_CODES, strict=True)]
    return Guide(sum(got != wanted for got, wanted in pairs), f"{scale:.4f}")


def differing_from_formulas(amax_shapes: Sequence[tuple[int, ...]] = AMAX_SHAPES) -> int:
    """Elements of outputs and gradients that differ, 1,048,576 of each function in every case."""
    wrong = 0
    for shape in amax_shapes:
        for case in rules.INTEGERS.values():
            wrong += _differing(rules.integer_pairs(*case, shape))
    for shape in (None, *amax_shapes):
        wrong += _differing(rules.e4m3_pairs(shape))
    for low, high in AFFINE_RANGES:
        wrong += _differing(rules.affine_pairs(8, low, high))
    return wrong


def _differing(pairs: Iterable[tuple[Tensor, Tensor]]) -> int:
    from tests.support.bits import bits_of

    return sum(int((bits_of(got) != bits_of(wanted)).sum()) for got, wanted in pairs)


def differing_amax(bins: int = 512) -> int:
    """Calibrators that find another amax than the rules: max, percentile, mse, entropy on every stream."""
    wrong = 0
    for tensors in rules.streams().values():
        largest = calib.MaxCalibrator(8, None, False)
        for x in tensors:
            largest.collect(x)
        found = largest.compute_amax()
        assert found is not None
        wrong += found.item() != max(x.abs().max().item() for x in tensors)
        calibrator = rules.collected(tensors, num_bins=bins)
        counts, edges = rules.histogram_by_rules(tensors, bins)
        for percentile in (50, 99, 99.99, 100):
            found = calibrator.compute_amax("percentile", percentile=percentile)
            assert found is not None
            wrong += found.item() != rules.percentile_by_rules(counts, edges, percentile)
        wrong += sum(got != wanted for _, got, wanted in rules.search_pairs(calibrator, 8, False))
    return wrong


def entropy(bins: int, searches: int = 5) -> Search:
    """The search in a histogram of a million normal numbers against one run of the loops."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    calibrator = rules.collected([x], num_bins=bins)
    counts, edges = rules.histogram_of(calibrator)
    wanted: list[float] = []
    loops = seconds(lambda: wanted.append(rules.entropy_by_loops(counts, edges, 8, False)))
    found: list[Tensor | None] = []
    times = [seconds(lambda: found.append(calibrator.compute_amax("entropy"))) for _ in range(searches)]
    same = all(amax is not None and amax.item() == wanted[0] for amax in found)
    return Search(loops / statistics.median(times), same)


def script_runs() -> bool:
    """Whether a script that imports pytorch_quantization alone calibrates, trains and exports."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "fakequant.compat", "run", str(SCRIPT), folder]
        found = subprocess.run(run, capture_output=True, text=True)
        return found.returncode == 0 and (Path(folder) / "model.onnx").exists()
