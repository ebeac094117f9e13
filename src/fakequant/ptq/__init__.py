"""Accuracy without training: ranges and codes of weights, chosen by the error of what their layers compute.

Every step reads the same sums over a layer's inputs, see `InputSums`. No layer ends with a larger error on the
calibration data than by rounding to nearest.
"""

from .adaround import adaround
from .allocation import scores, verify
from .blocks import find_blocks, reconstruct
from .compare import Ways, compare
from .comparison import Compared, Comparison
from .corrections import reestimate_batch_norm
from .equalize import Equalization, EqualizedPair, equalize
from .fold_scales import FoldedScale, FoldedScales, fold_scales
from .improve import STEPS, improve
from .low_rank import low_rank
from .mixes import Allocation, Score, Scores
from .reconstruction import PRESETS, Preset, reconstruct_block
from .results import Improvement, LayerResult
from .rotate import Rotated, Rotations, rotate
from .rounding import descend, gptq
from .search import search
from .sums import InputSums

__all__ = [
    "PRESETS",
    "STEPS",
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
    "compare",
    "descend",
    "equalize",
    "find_blocks",
    "fold_scales",
    "gptq",
    "improve",
    "low_rank",
    "reconstruct",
    "reconstruct_block",
    "reestimate_batch_norm",
    "rotate",
    "scores",
    "search",
    "verify",
]
