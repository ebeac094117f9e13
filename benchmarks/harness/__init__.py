"""Time calls against other calls: pairs are timed alternately in one run, after a comparison with the reference."""

from .case import ATEN, COMPILED, COPY, DOUBLED, Case, square
from .machine import machine
from .pairs import MEASURED, CannotRunError, Prepared, Result, Timed, measure
from .timing import Effort, Function, Pairs, Ratio, keep_memory, ratio, seconds, time_pairs

__all__ = [
    "ATEN",
    "COMPILED",
    "COPY",
    "DOUBLED",
    "MEASURED",
    "CannotRunError",
    "Case",
    "Effort",
    "Function",
    "Pairs",
    "Prepared",
    "Ratio",
    "Result",
    "Timed",
    "keep_memory",
    "machine",
    "measure",
    "ratio",
    "seconds",
    "square",
    "time_pairs",
]
