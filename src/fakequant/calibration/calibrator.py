"""The interface of calibrators, and the registry of their names."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fakequant.errors import CalibrationError, ConfigError, nearest
from fakequant.numerics.formats.floats import power_of_two
from fakequant.numerics.qparams import Range, check_tensor
from fakequant.numerics.spec import QuantSpec, as_spec


class Observer(ABC):
    """Collects statistics of a stream of tensors for a calibration method, in bounded memory.

    A subclass says in `update` what it collects. An observer that computes a range is a `Calibrator`.
    """

    mergeable: ClassVar[bool] = True
    """Whether the result depends on the observed values alone: not on how they were cut into batches, on the order of
    the batches, or on which of several merged observers saw which batch. If False, `merge` raises ConfigError."""

    def __init__(self) -> None:
        # The state is read, changed and written back: without a lock, two threads would lose an update.
        self._observing = Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'spec', '')})"

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the lock, which cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_observing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._observing = Lock()

    def observe(self, x: Tensor) -> None:
        """Update the state with a batch of any shape; a batch without elements changes nothing.

        Several threads may call it. It works under every grad mode and under `torch.inference_mode`.

        Raises:
            CalibrationError: the batch holds NaN or inf, or has no values (device meta); the state stays as it was.
            ShapeError: the batch does not fit the granularity, or has other groups than the batches before.
            DTypeError: the batch is not a dense floating-point tensor.
        """
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            with self._observing:
                self._checked_update(x)
            return
        # The state must be plain tensors, also when the batches come under torch.inference_mode.
        with torch.inference_mode(False), torch.no_grad(), self._observing:
            self._checked_update(x)

    def _checked_update(self, x: Tensor) -> None:
        check_tensor("batch", x)
        if x.is_meta:
            raise CalibrationError(
                "a batch on the device meta holds no values; move the model and the batches to a device, such as by "
                "model.to_empty(device='cpu') and loading its weights"
            )
        self.update(x)

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Update the state with a batch that `observe` has checked; one thread at a time, without gradients."""

    def merge(self, other: Observer) -> None:
        """Update the state with the data of `other`, bit for bit as if this observer had observed these data.

        Raises:
            ConfigError: observers of this class do not merge, or `other` has another method, specification or number
                of bins.
            ShapeError: `other` has other groups.
        """
        raise ConfigError(f"{type(self).__name__} does not merge; its result depends on the order of the batches")

    @property
    @abstractmethod
    def observed(self) -> bool:
        """Whether any element was seen."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The state as tensors that can be sent to other ranks; an empty dict if nothing was observed."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the state that `state_dict` of an observer of the same class and options returned.

        Raises:
            CalibrationError: a tensor is missing, unknown or of a wrong shape; nothing is replaced.
        """


def check_keys(state: dict[str, Tensor], expected: tuple[str, ...]) -> None:
    """Raise CalibrationError unless a state has exactly the expected tensors."""
    if set(state) != set(expected):
        raise CalibrationError(
            f"a calibrator state with the tensors {sorted(state)}, expected {sorted(expected)}; "
            "load it into a calibrator of the method that made it"
        )


class Histogram(NamedTuple):
    """The counts of magnitudes of every group."""

    counts: Tensor
    """int64 [groups, 2, bins], first of negative x: bin k counts the x with k * width <= |x| < (k + 1) * width."""
    exponent: Tensor
    """int32 [groups]: the width of a bin is 2**exponent, in units of x."""
    range: Range
    """The exact range seen, in units of x; lo and hi [groups]."""

    @property
    def bins(self) -> int:
        """Bins on either side of 0.0."""
        return self.counts.shape[2]

    @property
    def width(self) -> Tensor:
        """float64 [groups]: the width of a bin in units of x; 0.0 for a group that has seen zeros only."""
        return power_of_two_or_zero(self.exponent)

    def line(self) -> tuple[Tensor, Tensor]:
        """The bins of both sides in a row, from the lowest to the highest value, for plots.

        Returns:
            edges, float64 [groups, 2 * bins + 1] in units of x, and counts [groups, 2 * bins] between them.
        """
        steps = torch.arange(-self.bins, self.bins + 1, dtype=torch.float64, device=self.counts.device)
        return steps * self.width[:, None], torch.cat([self.counts[:, 0].flip(-1), self.counts[:, 1]], dim=1)

    def to(self, device: torch.device | str) -> Histogram:
        """The histogram on a device."""
        lo, hi = self.range
        return Histogram(self.counts.to(device), self.exponent.to(device), Range(lo.to(device), hi.to(device)))

    def split(self, groups: int) -> Iterator[Histogram]:
        """The histogram in parts of at most `groups` groups."""
        for start in range(0, self.counts.shape[0], groups):
            part = slice(start, start + groups)
            yield Histogram(self.counts[part], self.exponent[part], Range(self.range.lo[part], self.range.hi[part]))


def power_of_two_or_zero(exponent: Tensor) -> Tensor:
    """2.0**exponent in float64, exactly; 0.0 where the power is not a normal number."""
    normal = (exponent >= -1022) & (exponent <= 1023)
    return torch.where(normal, power_of_two(torch.where(normal, exponent, 0).to(torch.int64)), 0.0)


_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  a room of torch without type stubs


@contextmanager
def outside_of_transforms(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """A context outside of all transforms of torch.func, which yields the values of `tensors` as plain tensors.

    A tensor that `vmap` wraps becomes one tensor [members, *shape] of all members; other tensors keep their shape.

    >>> def see(row):
    ...     with outside_of_transforms(row) as (x,):
    ...         print(x.tolist())
    ...     return row
    >>> y = torch.vmap(see)(torch.ones(2, 3))
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if not torch._C._are_functorch_transforms_active():
        yield [*tensors]
        return
    unwrapped: list[tuple[Tensor, list[int]]] = []  # with the axis of each `vmap`, the inner ones first
    for x in tensors:  # while the transforms run, to which the wrappers belong
        axes: list[int] = []
        while _functorch.is_functorch_wrapped_tensor(x):
            if (axis := _functorch.maybe_get_bdim(x)) >= 0:
                axes.insert(0, axis)
            x = _functorch.get_unwrapped(x)
        unwrapped.append((x, axes))
    with temporarily_clear_interpreter_stack():
        plain: list[Tensor] = []
        for x, axes in unwrapped:
            for place, axis in enumerate(axes):
                x = x.movedim(axis + place, place)
            plain.append(x.flatten(0, len(axes) - 1) if axes else x)
        yield plain


NOTHING_OBSERVED = (
    "no data was observed (empty batches do not count), so there is no range; run calibration batches that reach "
    "this tensor, or leave it unquantized"
)


class Calibrator(Observer):
    """An observer that computes the range to quantize.

    Args:
        spec: how the tensor will be quantized; its granularity says which elements share a range.
    """

    method: ClassVar[str] = ""
    """The name under which the class is registered."""

    def __init__(self, spec: QuantSpec | str) -> None:
        super().__init__()
        self.spec = as_spec(spec)

    def observe(self, x: Tensor) -> None:
        """Observe a tensor; if `torch.vmap` wraps it, observe the values of all members."""
        if not torch._C._are_functorch_transforms_active():
            super().observe(x)
            return
        with outside_of_transforms(x) as (plain,):
            for one in [plain] if plain.shape == x.shape else self._joined(plain):
                super().observe(one)

    def _joined(self, members: Tensor) -> list[Tensor]:
        """The members of a vmap [number, *shape] as one tensor, joined along an axis where joining adds no groups.

        Without such an axis, a list of the single members.
        """
        shape, groups = members.shape[1:], self.spec.granularity.group_shape
        for axis in range(len(shape)):
            joined = members.movedim(0, axis).flatten(axis, axis + 1)
            if groups(joined.shape) == groups(shape):
                return [joined]
        return [*members]

    def load_from(self, other: Calibrator) -> None:
        """Copy the state of `other`, of any method: then this calibrator has the bits as if it had seen the data.

        Raises ConfigError if `other` has another specification or num_bins, or lacks data that this method needs.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot use what {type(other).__name__} saw; call fakequant.calibrate by this method"
        )

    @abstractmethod
    def compute_range(self) -> Range:
        """The range to quantize, in units of x, with as many axes as x; lo <= 0 <= hi, and not wider than the data.

        If all values seen are equal, the range is exactly from that value to zero.

        Raises:
            CalibrationError: nothing was observed.
        """

    def histogram(self) -> Histogram | None:
        """The histogram from which the range is computed; None if the method needs none, or nothing was observed."""
        return None


_registry: dict[str, type[Calibrator]] = {}
_Class = TypeVar("_Class", bound=type[Calibrator])
_Method = TypeVar("_Method", bound=type[Any])


def registered_in(registry: dict[str, Any], name: str, kind: str) -> Callable[[_Method], _Method]:
    """The decorator that puts a class into a registry and sets its `method`; raises ConfigError for a taken name."""

    def register(cls: _Method) -> _Method:
        if registry.get(name, cls) is not cls:
            raise ConfigError(f"a different {kind} is already registered as {name!r}; choose another name")
        cls.method = name
        registry[name] = cls
        return cls

    return register


def register_calibrator(name: str) -> Callable[[_Class], _Class]:
    """A decorator that registers a calibrator class under a name.

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
"""The default method for inputs. The output of trained models then has the smallest error on average, as
`python -m benchmarks.accuracy.methods` shows."""

ALIASES = {"absmax": "max", "ema": "moving_average", "hist": "mse", "kl": "entropy", "minmax": "max"}
"""Names of methods in other libraries. A HistogramObserver of torch takes the range of least squared error."""


def find_method(method: str) -> str:
    """The registered name of a method, from any library's name in upper or lower case; raises ConfigError if unknown.

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
    """A new calibrator of a registered method.

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
    check_options(cls, options, f"calibrator {method!r}")
    return cls(spec, **options)


def check_mergeable(calibrator: Calibrator, purpose: str) -> None:
    """Raise ConfigError if the data of a calibrator cannot be merged; the message names methods that can merge.

    `purpose` begins the message, for example "several processes calibrate together".
    """
    if not calibrator.mergeable:
        mergeable = ", ".join(name for name in calibrators() if _registry[name].mergeable)
        raise ConfigError(
            f"{purpose}, and the method {calibrator.method!r} cannot merge their data, because its result depends "
            f"on the order of the batches; use one of {mergeable}"
        )


def check_options(cls: type[Any], options: Iterable[str], what: str) -> None:
    """Raise ConfigError if `cls` lacks one of `options`; the message has the nearest option, and begins with `what`."""
    known = _options(cls)
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else "; it has no options"
            raise ConfigError(f"{what} has no option {name!r}{hint}")


@cache
def _options(cls: type[Any]) -> list[str]:
    """The options of a class. They are cached: a lookup takes 30 us, and every quantizer of a model needs it."""
    return [name for name in inspect.signature(cls).parameters if name != "spec"]
