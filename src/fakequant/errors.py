"""What can go wrong, by name.

Every error of this package is a `FakeQuantError` and also the built-in type that a caller would expect, so that both
`except fakequant.FakeQuantError` and `except ValueError` work. Every warning is a `UserWarning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class FakeQuantError(Exception):
    """Root of all errors raised by this package."""


class SpecError(FakeQuantError, ValueError):
    """A specification, format or granularity that cannot mean anything."""


class ShapeError(FakeQuantError, ValueError):
    """A tensor whose shape does not fit the granularity, or parameters whose shape does not fit the tensor."""


class QParamsError(FakeQuantError, ValueError):
    """A scale or zero point with a value that no format allows."""


class DTypeError(FakeQuantError, TypeError):
    """A tensor of a dtype that cannot be quantized."""


class AxisError(ShapeError, IndexError):
    """An axis that the tensor does not have, where torch raises an IndexError."""


class UnsupportedDTypeError(DTypeError, NotImplementedError):
    """A tensor of a dtype that cannot be quantized, where torch raises a NotImplementedError."""


class CallError(FakeQuantError, RuntimeError):
    """Arguments that the library whose interface is offered refuses too, by a RuntimeError."""


class CalibrationError(FakeQuantError, RuntimeError):
    """Calibration met data it cannot use, or saw none."""


class NoWeightError(FakeQuantError, AttributeError):
    """A quantizer that was asked for a weight, as by a style of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__(
            "a quantizer has no weight: torch's RowwiseParallel asks every module inside a layer for one, so call "
            "parallelize_module on the float model first, then fakequant.prepare and fakequant.calibrate"
        )


class ConfigError(FakeQuantError, ValueError):
    """A rule or configuration that matches nothing or contradicts itself."""


class CheckpointError(FakeQuantError, RuntimeError):
    """A checkpoint that is missing, truncated, corrupted or of another model."""


class OutputError(FakeQuantError, OSError):
    """A folder or file that cannot be written; raised before any work is done for it."""


class ExportError(FakeQuantError, RuntimeError):
    """A model that the target format cannot express; raised before any work is done."""


class GraphError(FakeQuantError, ValueError):
    """A graph that is not valid, a text that is not one, or a model that cannot be captured as one."""


class VerificationError(FakeQuantError, RuntimeError):
    """A file that cannot be verified because it is not one of ours, or is damaged."""


class RecipeError(FakeQuantError, ValueError):
    """A recipe file for the command line that lacks what it must offer."""


class CalibrationWarning(UserWarning):
    """Calibration left something in float, chose a range for it, or did not merge what several processes saw."""


class StaleScaleWarning(UserWarning):
    """Weights changed since their scales were set, so that they are clipped or coarser than they need be."""


class CoverageWarning(UserWarning):
    """A prepared model computes in float what could be quantized."""


class FusionWarning(UserWarning):
    """Batch normalisations that `fuse_batch_norm` could not fold into a layer."""


def check_keys(values: Any, known: Sequence[str], what: str, error: type[FakeQuantError]) -> None:
    """Raise the error unless values are a dict with known keys.

    >>> check_keys({"scales": 1}, ["scale"], "a specification", SpecError)
    Traceback (most recent call last):
    fakequant.errors.SpecError: unknown key 'scales' in a specification; did you mean scale?
    """
    if not isinstance(values, dict):
        raise error(f"expected a dict as made by to_dict, got {values!r}")
    for key in values:
        if key not in known:
            raise error(f"unknown key {key!r} in {what}{nearest(str(key), known)}")


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of an error message that offers the names closest to a mistyped one.

    >>> nearest("int9x", ["int9", "uint8", "float8_e5m2"])
    '; did you mean int9 or uint8?'
    """
    # Cut, because a name out of a file may be of any length, and comparing takes many times its memory.
    matches = get_close_matches(name[:100], known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(matches)}?" if matches else f"; known names are {', '.join(known)}"
