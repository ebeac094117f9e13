"""Accuracy without training: ranges and codes of weights, chosen by the error of their layers' outputs.

Every step reads the same sums over a layer's inputs x, above all of x x^T: `InputSums`. No layer ends with a larger
error on the calibration data than by rounding to nearest.
"""

from importlib import import_module
from typing import Any

from fakequant.ptq.advice import Advice, advise
from fakequant.ptq.allocation import Allocation, Score, Scores, scores, search, verify
from fakequant.ptq.channel_scales import Equalization, EqualizedPair, FoldedScale, FoldedScales, equalize, fold_scales
from fakequant.ptq.comparison import Comparison, Ways, compare
from fakequant.ptq.corrections import reestimate_batch_norm
from fakequant.ptq.improvement import STEPS, improve
from fakequant.ptq.judging import Improvement, LayerResult
from fakequant.ptq.reconstruction import PRESETS, Preset, find_blocks, reconstruct, reconstruct_block
from fakequant.ptq.rotation import Rotated, Rotations, rotate
from fakequant.ptq.solvers.problem import adaround, descend, gptq
from fakequant.ptq.solvers.sums import InputSums
from fakequant.ptq.trial import Compared

__all__ = [
    "PRESETS",
    "STEPS",
    "Advice",
    "Allocation",
    "Compared",
    "Comparison",
    "Equalization",
    "EqualizedPair",
    "FoldedScale",
    "FoldedScales",
    "Improvement",
    "InputSums",
    "LayerResult",
    "Preset",
    "Rotated",
    "Rotations",
    "Score",
    "Scores",
    "Ways",
    "adaround",
    "advise",
    "compare",
    "descend",
    "equalize",
    "find_blocks",
    "fold_scales",
    "gptq",
    "improve",
    "reconstruct",
    "reconstruct_block",
    "reestimate_batch_norm",
    "rotate",
    "scores",
    "search",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "improve_folder":  # streaming imports this package, and delivery
        return import_module("fakequant.streaming").improve_folder
    raise AttributeError(f"module 'fakequant.ptq' has no attribute {name!r}")
