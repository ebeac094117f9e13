"""Accuracy without training: ranges and codes of weights, chosen by the error of what their layers compute.

Every step reads the same sums over a layer's inputs, see `InputSums`. No layer ends with a larger error on the
calibration data than by rounding to nearest.
"""

from importlib import import_module
from typing import Any

from fakequant.ptq.advising.advise import Advice
from fakequant.ptq.blocks.reconstruction import find_blocks, reconstruct
from fakequant.ptq.formats.allocation import search
from fakequant.ptq.formats.comparison import Ways, compare
from fakequant.ptq.solvers.problem import descend, gptq

from .advising.advise import advise
from .blocks.reconstruction import PRESETS, Preset, reconstruct_block
from .float_model.equalize import Equalization, EqualizedPair, equalize
from .float_model.fold_scales import FoldedScale, FoldedScales, fold_scales
from .float_model.rotate import Rotated, Rotations, rotate
from .formats.allocation import scores, verify
from .formats.comparison import Compared, Comparison
from .formats.mixes import Allocation, Score, Scores
from .improving.corrections import reestimate_batch_norm
from .improving.improve import STEPS, improve
from .results import Improvement, LayerResult
from .solvers.adaround import adaround
from .solvers.sums import InputSums

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
