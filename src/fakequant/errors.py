"""The errors and warnings of this package.

Every error is a `FakeQuantError` and also the built-in type that a caller expects, so both
`except fakequant.FakeQuantError` and `except ValueError` work. Every warning is a `UserWarning`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class FakeQuantError(Exception):
    """Base class of all errors of this package."""


class SpecError(FakeQuantError, ValueError):
    """An invalid specification, format or granularity."""


class ShapeError(FakeQuantError, ValueError):
    """A tensor whose shape does not fit the granularity, or parameters whose shape does not fit the tensor."""


class QParamsError(FakeQuantError, ValueError):
    """An invalid value of a scale or zero point."""


class DTypeError(FakeQuantError, TypeError):
    """A tensor of a dtype that cannot be quantized."""


class AxisError(ShapeError, IndexError):
    """An axis that the tensor does not have; also an IndexError, as in torch."""


class UnsupportedDTypeError(DTypeError, NotImplementedError):
    """A tensor of a dtype that cannot be quantized; also a NotImplementedError, as in torch."""


class CallError(FakeQuantError, RuntimeError):
    """A call that cannot be computed; also a RuntimeError, as torch raises for such calls."""


class CalibrationError(FakeQuantError, RuntimeError):
    """Calibration received data that it cannot use, or no data."""


class NoWeightError(FakeQuantError, AttributeError):
    """A quantizer was asked for its weight, for example by a tensor-parallel style."""

    def __init__(self) -> None:
        super().__init__(
            "a quantizer has no weight: torch's RowwiseParallel asks every module inside a layer for a weight, so call "
            "parallelize_module on the float model first, then fakequant.prepare and fakequant.calibrate"
        )


class ConfigError(FakeQuantError, ValueError):
    """An argument, a rule or a configuration that is wrong, contradicts another, or matches nothing."""


class SiteError(FakeQuantError, RuntimeError):
    """A module called functions otherwise than `prepare` recorded, so that their quantizers do not fit the calls."""


class CheckpointError(FakeQuantError, RuntimeError):
    """A checkpoint that is missing, truncated, corrupted or belongs to another model."""


class OutputError(FakeQuantError, OSError):
    """A folder or file that cannot be written; raised before the work starts if this is known then."""


class ExportError(FakeQuantError, RuntimeError):
    """A model that cannot be exported or delivered in a format, or a wrong option of such a call."""


class GraphError(FakeQuantError, ValueError):
    """An invalid graph, a text that is not a graph, or a model that cannot be captured as a graph."""


class VerificationError(FakeQuantError, RuntimeError):
    """A file that cannot be verified, or whose engine does not load or run it."""


class RecipeError(FakeQuantError, ValueError):
    """A recipe, a folder of Hugging Face or an option that the command line cannot use."""


class CalibrationWarning(UserWarning):
    """A calibration or a measurement is perhaps not what the user expects, for example because layers stay in float."""


class StaleScaleWarning(UserWarning):
    """Scales or fixed codes of weights no longer fit, for example because the weights changed after they were set."""


class CoverageWarning(UserWarning):
    """A prepared model leaves operations in float that could be quantized."""


class FusionWarning(UserWarning):
    """Batch normalisations that `fuse_batch_norm` could not fold into a layer."""


def check_keys(values: Any, known: Sequence[str], what: str, error: type[FakeQuantError]) -> None:
    """Raise the error unless `values` is a dict whose keys are all known.

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
    """Return the end of an error message: the known names that are closest to a mistyped name.

    >>> nearest("int9x", ["int9", "uint8", "float8_e5m2"])
    '; did you mean int9 or uint8?'
    """
    # A name from a file can have any length, and the comparison needs many times its memory.
    matches = get_close_matches(name[:100], known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(matches)}?" if matches else f"; known names are {', '.join(known)}"


def shown(value: Any) -> str:
    """A value in one line: its `repr` if that is short, else its type.

    >>> shown("int8"), shown([1, 2]), shown(torch.nn.Linear(4, 4))
    ("'int8'", '[1, 2]', 'a Linear')
    """
    if isinstance(value, (str, int, float, type(None), list, tuple, dict)) and "\n" not in (text := repr(value)):
        return text if len(text) <= 60 else f"a {type(value).__name__}"
    return f"a {type(value).__name__}"


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def first_line(error: BaseException) -> str:
    """The type of an error, and the first line of its message.

    >>> first_line(ImportError("\\nLlama needs sentencepiece.\\nInstall it."))
    'ImportError: Llama needs sentencepiece.'
    """
    return (f"{type(error).__name__}: {str(error).strip()}".rstrip(": ").splitlines() or [""])[0]


def not_imported(error: ImportError) -> str:
    """The first cause of an import that failed inside an installed package, and a cure, as a text."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    return f"{first_line(first):.300}; install what is missing, or versions of the packages that fit each other"


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's program: the nearest caller outside of this package and `contextlib`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def renamed(old: str, new: str) -> Any:
    """A property under the old name of an attribute, for one more release; reading it gives a warning.

    >>> class Result:
    ...     error = 0.5
    ...     left = renamed("left", "error")
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     Result().left, str(said[0].message)
    (0.5, 'Result.left is now called Result.error, and the next release removes the old name')
    """

    def read(owner: Any) -> Any:
        kind = type(owner).__name__
        warn_renamed(f"{kind}.{old}", f"{kind}.{new}")
        return getattr(owner, new)

    return property(read)


def warn_renamed(old: str, new: str) -> None:
    """Warn at the line of the user's program that uses an old name."""
    warn_user(f"{old} is now called {new}, and the next release removes the old name", DeprecationWarning)
