"""Accuracy without training: ranges and codes of weights, chosen by the error of what their layers compute.

Every step reads the same sums over a layer's inputs, see `InputSums`. No layer ends with a larger error on the
calibration data than by rounding to nearest.
"""

from importlib import import_module
from typing import Any

from fakequant.ptq.advice import Advice
from fakequant.ptq.allocation import search
from fakequant.ptq.comparison import Ways, compare
from fakequant.ptq.reconstruction import find_blocks, reconstruct
from fakequant.ptq.solvers.problem import descend, gptq

from .advice import advise
from .allocation import Allocation, Score, Scores, scores, verify
from .comparison import Comparison
from .corrections import reestimate_batch_norm
from .equalization import Equalization, EqualizedPair, equalize
from .improvement import STEPS, improve
from .reconstruction import PRESETS, Preset, reconstruct_block
from .results import Improvement, LayerResult
from .rotation import Rotated, Rotations, rotate
from .scale_folding import FoldedScale, FoldedScales, fold_scales
from .solvers.adaround import adaround
from .solvers.sums import InputSums
from .trial import Compared

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
    if name == "improve_folder":  # it delivers too, and is a room above
        return import_module("fakequant.streaming").improve_folder
    raise AttributeError(f"module 'fakequant.ptq' has no attribute {name!r}")
