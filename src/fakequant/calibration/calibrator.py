"""What every calibrator does, and the registry of their names."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.numerics.qparams import Range
from fakequant.numerics.spec import QuantSpec, as_spec

from .counts import Histogram

NOTHING_OBSERVED = (
    "no data was observed (empty batches do not count), so there is no range; run calibration batches that reach "
    "this tensor, or leave it unquantized"
)


class Calibrator(ABC):
    """Watches a stream of tensors and finds the range to quantize.

    Memory is bounded whatever the stream holds, and the result does not depend on how it was cut into batches, on
    their order, or on which of several merged calibrators saw which batch.

    Args:
        spec: how the tensor will be quantized; its granularity says which elements share a range.
    """

    method: ClassVar[str] = ""
    """The name under which the class is registered."""

    def __init__(self, spec: QuantSpec | str) -> None:
        self.spec = as_spec(spec)

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Take in a batch of any shape that the granularity accepts; one without elements changes nothing.

        Raises:
            CalibrationError: the batch holds NaN or inf; nothing of it is taken in.
            ShapeError: the batch does not fit the granularity, or has other groups than the batches before.
            DTypeError: the batch is not a floating tensor.
        """

    @abstractmethod
    def merge(self, other: Calibrator) -> None:
        """Take in all that another calibrator has seen, bit for bit as if this one had seen it.

        Raises:
            ConfigError: the other has another method, specification or resolution.
            ShapeError: the other has other groups.
        """

    def adopt(self, other: Calibrator) -> None:
        """Replace all that was seen by what a calibrator of any method has seen, bit for bit as if seen by this one.

        Raises:
            ConfigError: the other has another specification or resolution, or keeps less than this method needs.
        """
        raise ConfigError(f"{type(self).__name__} cannot go on from another calibrator; show it the batches")

    @abstractmethod
    def compute_range(self) -> Range:
        """The range to quantize [groups, axes kept], in units of x; lo <= 0 <= hi, never wider than what was seen.

        Of one value, or equal ones, it is exactly from these to zero.

        Raises:
            CalibrationError: nothing was observed.
        """

    @classmethod
    def compute_ranges(cls, calibrators: Sequence[Calibrator]) -> list[Range] | None:
        """`compute_range` of several calibrators of this class that have observed something, found together, in less
        time and with the same bits; None where that gains nothing."""
        return None

    @property
    @abstractmethod
    def observed(self) -> bool:
        """Whether any element was seen."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """All that was seen, as tensors that can travel between ranks; empty if nothing was."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace all that was seen by a state of a calibrator like this one.

        Raises:
            CalibrationError: a tensor is missing, unknown or of a wrong shape; nothing is replaced.
        """

    def histogram(self) -> Histogram | None:
        """The counts behind the range, or None where the method needs none or nothing was observed."""
        return None


_registry: dict[str, type[Calibrator]] = {}
_Class = TypeVar("_Class", bound=type[Calibrator])


def register_calibrator(name: str) -> Callable[[_Class], _Class]:
    """Make a calibrator class known by a name.

    Raises:
        ConfigError: another class already has the name.

    >>> from fakequant.calibration import PercentileCalibrator
    >>> @register_calibrator("example_median")
    ... class Median(PercentileCalibrator):
    ...     def __init__(self, spec):
    ...         super().__init__(spec, percentile=50.0)
    >>> calibrator = make_calibrator("example_median", "int8")
    >>> calibrator.observe(torch.tensor([-1.0, 2.0, 8.0]))
    >>> calibrator.compute_range()  # up to the end of a bin
    Range(lo=tensor([-1.]), hi=tensor([2.0039]))
    >>> del _registry["example_median"]  # of the example only
    """

    def register(cls: _Class) -> _Class:
        if _registry.get(name, cls) is not cls:
            raise ConfigError(f"a different calibrator is already registered as {name!r}; choose another name")
        cls.method = name
        _registry[name] = cls
        return cls

    return register


def calibrators() -> list[str]:
    """The names of all registered calibrators.

    >>> {"entropy", "max", "mse", "percentile"} <= set(calibrators())
    True
    """
    return sorted(_registry)


def make_calibrator(method: str, spec: QuantSpec | str, **options: Any) -> Calibrator:
    """A fresh calibrator of a registered method.

    Args:
        method: one of `calibrators()`.
        spec: how the tensor will be quantized.
        options: the keyword arguments of the calibrator's class, such as `percentile=99.9`.

    Raises:
        ConfigError: an unknown method or option (the nearest are offered), or a value that means nothing.

    >>> calibrator = make_calibrator("percentile", "int8", percentile=99.0)
    >>> calibrator.observe(torch.linspace(-1, 1, 1001))
    >>> calibrator.compute_range().hi
    tensor([0.9902])
    """
    cls = _registry.get(method)
    if cls is None:
        raise ConfigError(f"unknown calibrator {method!r}{nearest(method, calibrators())}")
    known = _options(cls)
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else "; it has no options"
            raise ConfigError(f"calibrator {method!r} has no option {name!r}{hint}")
    return cls(spec, **options)


@cache
def _options(cls: type[Calibrator]) -> list[str]:
    """The options of a class; to look them up takes 30 us, for every quantizer of a model."""
    return [name for name in inspect.signature(cls).parameters if name != "spec"]


def check_keys(state: dict[str, Tensor], expected: tuple[str, ...]) -> None:
    """Raise unless a state has exactly the expected tensors."""
    if set(state) != set(expected):
        raise CalibrationError(
            f"a calibrator state with the tensors {sorted(state)}, expected {sorted(expected)}; "
            "load it into a calibrator of the method that made it"
        )
