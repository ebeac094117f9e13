"""The interface of calibrators, and the registry of their names."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fakequant.errors import ConfigError, nearest
from fakequant.numerics.qparams import Range
from fakequant.numerics.spec import QuantSpec, as_spec

from .counts import Histogram
from .observer import Observer
from .transformed import outside_of_transforms

NOTHING_OBSERVED = (
    "no data was observed (empty batches do not count), so there is no range; run calibration batches that reach "
    "this tensor, or leave it unquantized"
)


class Calibrator(Observer):
    """An observer that answers with the range to quantize.

    Args:
        spec: how the tensor will be quantized; its granularity says which elements share a range.
    """

    method: ClassVar[str] = ""
    """The name under which the class is registered."""

    def __init__(self, spec: QuantSpec | str) -> None:
        super().__init__()
        self.spec = as_spec(spec)

    def observe(self, x: Tensor) -> None:
        """Observe a tensor; if `torch.vmap` wraps it, the values of all members."""
        if not torch._C._are_functorch_transforms_active():
            super().observe(x)
            return
        with outside_of_transforms(x) as (plain,):
            for one in [plain] if plain.shape == x.shape else self._joined(plain):
                super().observe(one)

    def _joined(self, members: Tensor) -> list[Tensor]:
        """Members [number, *shape] joined along an axis that has one group; one each if there is none."""
        shape, groups = members.shape[1:], self.spec.granularity.group_shape
        for axis in range(len(shape)):
            joined = members.movedim(0, axis).flatten(axis, axis + 1)
            if groups(joined.shape) == groups(shape):
                return [joined]
        return [*members]

    def load_from(self, other: Calibrator) -> None:
        """Copy what a calibrator of any method has seen; the bits are those of having seen it here.

        Raises:
            ConfigError: the other has another specification or resolution, or collects less than this method needs.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot go on from {type(other).__name__}; call fakequant.calibrate with this method"
        )

    @abstractmethod
    def compute_range(self) -> Range:
        """The range to quantize [groups, axes kept], in units of x; lo <= 0 <= hi, never wider than what was seen.

        If all values seen are equal, it is exactly from that value to zero.

        Raises:
            CalibrationError: nothing was observed.
        """

    def histogram(self) -> Histogram | None:
        """The counts behind the range; None if the method needs none or nothing was observed."""
        return None


_registry: dict[str, type[Calibrator]] = {}
_Class = TypeVar("_Class", bound=type[Calibrator])
_Method = TypeVar("_Method", bound=type[Any])


def registered_in(registry: dict[str, Any], name: str, kind: str) -> Callable[[_Method], _Method]:
    """A decorator that puts a class into a registry, with the name as its `method`, unless another class has it."""

    def register(cls: _Method) -> _Method:
        if registry.get(name, cls) is not cls:
            raise ConfigError(f"a different {kind} is already registered as {name!r}; choose another name")
        cls.method = name
        registry[name] = cls
        return cls

    return register


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
    >>> del _registry["example_median"]  # for this example only
    """
    return registered_in(_registry, name, "calibrator")


def calibrators() -> list[str]:
    """The names of all registered calibrators.

    >>> {"entropy", "max", "moving_average", "mse", "percentile"} <= set(calibrators())
    True
    """
    return sorted(_registry)


DEFAULT_METHOD = "mse"
"""The method for inputs where none is named: on average the smallest error of the output of trained models, in
`python -m benchmarks.accuracy.methods`."""

ALIASES = {"absmax": "max", "ema": "moving_average", "hist": "mse", "kl": "entropy", "minmax": "max"}
"""What other libraries call these methods. A HistogramObserver of torch takes the range of least squared error."""


def find_method(method: str) -> str:
    """The registered name of a method, or of another library's name for it, in any case.

    Raises:
        ConfigError: there is none; the nearest are offered.

    >>> find_method("KL")
    'entropy'
    """
    if not isinstance(method, str):
        raise ConfigError(f"a method is given by its name, such as {DEFAULT_METHOD!r}, got {method!r:.80}")
    name = ALIASES.get(method.lower(), method.lower())
    if name not in _registry:
        raise ConfigError(f"unknown calibrator {method!r}{nearest(method, [*calibrators(), *ALIASES])}")
    return name


def make_calibrator(method: str, spec: QuantSpec | str, **options: Any) -> Calibrator:
    """A fresh calibrator of a registered method.

    Args:
        method: one of `calibrators()`, or another library's name for it: "minmax", "absmax", "kl" or "ema".
        spec: how the tensor will be quantized.
        options: the keyword arguments of the calibrator's class, such as `percentile=99.9`.

    Raises:
        ConfigError: an unknown method or option (the message offers the nearest), or a value out of bounds.

    >>> calibrator = make_calibrator("percentile", "int8", percentile=99.0)
    >>> calibrator.observe(torch.linspace(-1, 1, 1001))
    >>> calibrator.compute_range().hi
    tensor([0.9902])
    """
    cls = _registry[find_method(method)]
    known = _options(cls)
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else "; it has no options"
            raise ConfigError(f"calibrator {method!r} has no option {name!r}{hint}")
    return cls(spec, **options)


def check_mergeable(calibrator: Calibrator, purpose: str) -> None:
    """Raise unless a calibrator merges.

    Args:
        calibrator: of any method.
        purpose: what it would have to merge, as a sentence: "several processes calibrate together".

    Raises:
        ConfigError: it does not; names the methods that do.
    """
    if not calibrator.mergeable:
        mergeable = ", ".join(name for name in calibrators() if _registry[name].mergeable)
        raise ConfigError(
            f"{purpose}, and the method {calibrator.method!r} cannot merge what they see, because its result depends "
            f"on the order of the batches; use one of {mergeable}"
        )


@cache
def _options(cls: type[Calibrator]) -> list[str]:
    """The options of a class. A lookup takes 30 us, and every quantizer of a model needs one."""
    return [name for name in inspect.signature(cls).parameters if name != "spec"]
