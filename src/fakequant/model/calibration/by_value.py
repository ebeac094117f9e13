"""Calibration of several ranges by a value of the batch: where the bins lie, and a calibrator for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy

import torch
from torch import Tensor, nn

from fakequant.calibration import Calibrator
from fakequant.calibration.calibrator import Histogram
from fakequant.data.batches import Batches, KeptBatches
from fakequant.distributed import Together
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, ShapeError, shown, warn_user
from fakequant.model.weights import disabled, evaluating
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.nn.ranges.by_value import By, ByValue, CallEnded, Reader, read_values
from fakequant.numerics.qparams import Range
from fakequant.restore import restore_after

DEFAULT_BINS = 10


class CalibratorByValue(Calibrator):
    """A calibrator for each bin.

    Args:
        by_value: says which bin a call is of.
        bins: the calibrators of all bins, alike.
    """

    def __init__(self, by_value: ByValue, bins: Sequence[Calibrator]) -> None:
        super().__init__(bins[0].spec)
        self.by_value, self.bins = by_value, [*bins]
        self.method = bins[0].method  # type: ignore[misc]  that of its parts
        self.mergeable = bins[0].mergeable  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"CalibratorByValue({self.by_value!r}, {self.bins[0]!r})"

    def like(self, make: Callable[[], Calibrator]) -> CalibratorByValue:
        """A fresh one with other calibrators."""
        return CalibratorByValue(self.by_value, [make() for _ in self.bins])

    def observe(self, x: Tensor) -> None:
        """Show x to the calibrator of the call's bin, and where its rows are of several, each row to its own."""
        bins = self.by_value.now()
        if bins is None:
            raise CalibrationError(f"called without {self.by_value.name}: batches go through the model as a whole")
        if len(bins) == 1:
            self.bins[int(bins)].observe(x)
            return
        self.by_value.check_rows(x, len(bins))
        for place in bins.unique().tolist():
            self.bins[place].observe(x[(bins == place).to(x.device)])

    def update(self, x: Tensor) -> None:
        """As `observe`."""
        self.observe(x)

    @property
    def observed(self) -> bool:
        return any(own.observed for own in self.bins)

    @property
    def missing(self) -> list[int]:
        """The bins without a value."""
        return [place for place, own in enumerate(self.bins) if not own.observed]

    def merge(self, other: CalibratorByValue) -> None:  # type: ignore[override]
        for own, another in zip(self.bins, other.bins, strict=True):
            own.merge(another)

    def load_from(self, other: Calibrator) -> None:
        if not isinstance(other, CalibratorByValue):
            raise ConfigError("was calibrated without by=")
        for own, another in zip(self.bins, other.bins, strict=True):
            if another.observed:
                own.load_from(another)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{place}.{key}": x for place, own in enumerate(self.bins) for key, x in own.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for place, own in enumerate(self.bins):
            held = {key.partition(".")[2]: x for key, x in state.items() if key.partition(".")[0] == str(place)}
            if held:
                own.load_state_dict(held)

    def ranges(self) -> list[Range]:
        """The range of each bin; that of the nearest one, the lower of two, where a bin saw nothing but zeros."""
        found = [own.compute_range() if own.observed else None for own in self.bins]
        known = [place for place, own in enumerate(found) if own is not None and bool(own.amax.any())]
        known = known or [place for place, own in enumerate(found) if own is not None]
        if not known:
            return [self.bins[0].compute_range()]  # raises: nothing was observed
        places = [min(known, key=lambda other, place=place: abs(other - place)) for place in range(len(found))]
        ranges = [own for own in (found[place] for place in places) if own is not None]
        shapes = {tuple(own.lo.shape) for own in ranges}
        if len(shapes) > 1 and any(own.lo.numel() > 1 for own in ranges):
            raise ShapeError(f"the groups of bins have different shapes, {sorted(shapes)}; use per_tensor")
        shape = ranges[0].lo.shape  # one group has the rank of what it saw
        return [Range(own.lo.reshape(shape), own.hi.reshape(shape)) for own in ranges]

    def compute_range(self) -> Range:
        """The range that holds those of all bins."""
        found = self.ranges()
        return Range(torch.stack([own.lo for own in found]).amin(0), torch.stack([own.hi for own in found]).amax(0))

    def histogram(self) -> Histogram | None:
        """The counts of all bins together; None if the method needs none, or cannot merge."""
        seen = [own for own in self.bins if own.observed]
        if not seen or not self.mergeable:
            return None
        whole = deepcopy(seen[0])
        for own in seen[1:]:
            whole.merge(own)
        return whole.histogram()


def chosen_values(
    model: nn.Module,
    data: Batches,
    by: By | None,
    bins: int | None,
    boundaries: Sequence[float] | None,
    processes: Together,
) -> tuple[ByValue | None, Batches]:
    """Which ranges a calibration finds, and its batches, which are kept where the values are looked for first."""
    if by is None:
        if bins is not None or boundaries is not None:
            raise ConfigError('bins= and boundaries= are those of a value; name it, such as by="timestep"')
        return None, data
    if bins is not None and boundaries is not None:
        raise ConfigError("bins= and boundaries= both say where the bins lie; give one of them")
    if boundaries is not None:
        return ByValue(by, boundaries), data
    count = DEFAULT_BINS if bins is None else bins
    if type(count) is not int or count < 2:
        raise ConfigError(f"bins= is a number of at least 2, got {shown(bins)}; leave out by= for one range")
    kept = data.kept()
    values = torch.cat(processes.all(_values(model, kept, by)))
    return ByValue(by, boundaries_of(values, count, by)), kept


def _values(model: nn.Module, data: KeptBatches, by: By) -> Tensor:
    """The values of all rows of the batches, float32 on the CPU."""
    reader, seen = Reader(model, ByValue(by, [0.0])), list[Tensor]()

    def read(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append(reader.by_value.rows_of(reader.value(args, kwargs)).flatten().cpu())
        if data.calls_once:
            raise CallEnded

    handle = model.register_forward_pre_hook(read, with_kwargs=True, prepend=True)
    with restore_after(handle.remove), evaluating(model), disabled(model), torch.no_grad():
        for batch in data:
            with suppress(CallEnded):
                data.run(model, batch)
    if not seen:
        raise CalibrationError("no batch called the model, so that there are no values; let forward= call it")
    return torch.cat(seen)


def boundaries_of(values: Tensor, count: int, by: By = "value") -> list[float]:
    """Boundaries of bins that hold equally many values, midway between neighbours.

    >>> boundaries_of(torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 20.0]), 3)
    [1.5, 6.5]
    """
    ordered, distinct = values.sort().values, values.unique()
    if len(distinct) < 2:
        raise CalibrationError(
            f"all calls have the value {distinct[0].item():g} of {ByValue(by, [0.0]).name}, which makes one bin; give "
            "batches of several, or leave out by="
        )
    ends = [ordered[len(ordered) * place // count] for place in range(1, count)]
    starts = torch.stack(ends) if len(distinct) > count else distinct[1:]
    places = torch.searchsorted(distinct, starts).unique()
    places = places[places > 0]
    middle = (distinct[places - 1].double() + distinct[places].double()) / 2
    # Midway between neighbours of float32 may be the lower one.
    return torch.maximum(middle.float(), distinct[places - 1].nextafter(distinct[places])).tolist()


@contextmanager
def reading(model: nn.Module) -> Iterator[Callable[[ByValue], None]]:
    """A context that gives a function to have the calls of a model read a value, too.

    After it they read the values that its quantizers follow then.
    """
    with restore_after(lambda: follow_values(model)):
        yield lambda by_value: read_values(model, [*_followed(model), by_value])


def calibrators_of(by_value: ByValue | None, make: Callable[[], Calibrator]) -> Calibrator:
    """A calibrator, or one for each bin of a value."""
    return make() if by_value is None else CalibratorByValue(by_value, [make() for _ in range(by_value.count)])


def follow_values(model: nn.Module) -> None:
    """Have the calls of a model read the values that its quantizers follow; those that are alike become one."""
    known: list[ByValue] = []
    for quantizer in quantizers(model).values():
        own = quantizer.by_value
        if own is not None:
            same = next((other for other in known if own.is_like(other)), own)
            quantizer.by_value = same
            known += [] if same in known else [same]
    read_values(model, known)


def set_range_of(quantizer: Quantizer, calibrator: Calibrator | None, range: Range) -> None:
    """Give a quantizer the range that its calibrator found, or those of all bins."""
    if not isinstance(calibrator, CalibratorByValue):
        quantizer.set_range(range)
        return
    ranges = [Range(own.lo.to(range.lo.device), own.hi.to(range.lo.device)) for own in calibrator.ranges()]
    quantizer.set_ranges(ranges, calibrator.by_value)


def _followed(model: nn.Module) -> list[ByValue]:
    return [own for q in quantizers(model).values() if (own := q.by_value) is not None]


def check_bins(by_value: ByValue | None, calibrators: Mapping[str, Calibrator | None]) -> None:
    """Raise where a bin got no batch at all, and warn of quantizers that saw nothing in some.

    Raises:
        CalibrationError: names the bin.
    """
    if by_value is None:
        return
    own = {name: one for name, one in calibrators.items() if isinstance(one, CalibratorByValue)}
    if not own:
        raise ConfigError(
            f"there are no ranges by {by_value.name}: no activation that is calibrated has a fixed one; leave out by="
        )
    missing = {name: set(one.missing) for name, one in own.items() if one.observed}
    everywhere = set.intersection(*missing.values()) if missing else set[int]()
    if everywhere:
        spans = ", ".join(by_value.span(place) for place in sorted(everywhere))
        raise CalibrationError(f"no batch has {spans}; give batches that do, or other boundaries")
    some = [name for name, places in missing.items() if places]
    if some:
        warn_user(
            f"{len(some)} quantizers saw nothing in some bins of {by_value.name}, where they get the range of the "
            f"nearest bin: {', '.join(some)}",
            CalibrationWarning,
        )
