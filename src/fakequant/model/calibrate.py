"""The ranges of a prepared model's static quantizers, from batches and from the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fakequant.calibration import DEFAULT_METHOD, Calibrator, make_calibrator
from fakequant.calibration.calibrator import Histogram
from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.data.batches import Batches, Forward, Inputs, Mask
from fakequant.distributed import Ranks, processes_of
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, ShapeError, shown, warn_user
from fakequant.model.observation import Observation, check_unseen, is_chosen, leave_in_float, observed
from fakequant.model.run.recorded import warn_of_masks
from fakequant.model.summary import warn_of_new_layers
from fakequant.model.weights import (
    disabled,
    evaluating,
    give_range,
    is_searched,
    mark_range_current,
    quantized_weights,
    raise_scales,
    scaled_weights,
    tie_scales,
    warn_of_zeros,
)
from fakequant.nn.paths import layer_of
from fakequant.nn.quantizer import Kind, Mode, Quantizer, quantizers
from fakequant.nn.ranges import By, ByValue, CallEnded, Reader, has_tensor_scale, read_values
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.qparams import Range
from fakequant.restore import Restore, attributes_of, restore_after, restore_on_error, state_of
from fakequant.text import listed

DEFAULT_BINS = 10

Model = TypeVar("Model", bound=nn.Module)


class CalibratorByValue(Calibrator):
    """Several calibrators: one for each bin (interval) of a value such as the timestep of a diffusion model."""

    def __init__(self, by_value: ByValue, bins: Sequence[Calibrator]) -> None:
        super().__init__(bins[0].spec)
        self.by_value, self.bins = by_value, [*bins]
        self.method = bins[0].method  # type: ignore[misc]  all bins have one method
        self.mergeable = bins[0].mergeable  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"CalibratorByValue({self.by_value!r}, {self.bins[0]!r})"

    def like(self, make: Callable[[], Calibrator]) -> CalibratorByValue:
        """A new CalibratorByValue with the same bins, and new calibrators from `make`."""
        return CalibratorByValue(self.by_value, [make() for _ in self.bins])

    def observe(self, x: Tensor) -> None:
        """Add x to the calibrator of the present call's bin; if each row has a bin, add it to that bin's calibrator."""
        bins = self.by_value.now()
        if bins is None:
            raise CalibrationError(
                f"a layer was called outside of a call of the model, where {self.by_value.name} is not known; let "
                "batches call the whole model, not a part"
            )
        if len(bins) == 1:
            self.bins[int(bins)].observe(x)
            return
        self.by_value.check_rows(x, len(bins))
        for place in bins.unique().tolist():
            self.bins[place].observe(x[(bins == place).to(x.device)])

    def update(self, x: Tensor) -> None:
        """Does the same as `observe`."""
        self.observe(x)

    @property
    def observed(self) -> bool:
        return any(own.observed for own in self.bins)

    @property
    def missing(self) -> list[int]:
        """The numbers of the bins whose calibrators saw no element."""
        return [place for place, own in enumerate(self.bins) if not own.observed]

    def merge(self, other: CalibratorByValue) -> None:  # type: ignore[override]
        for own, another in zip(self.bins, other.bins, strict=True):
            own.merge(another)

    def load_from(self, other: Calibrator) -> None:
        if not isinstance(other, CalibratorByValue):
            raise ConfigError("the counts come from a calibration without by=, so that they have no bins")
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
        """The range of each bin. A bin without data, or with zeros only, gets the range of the nearest other bin."""
        found = [own.compute_range() if own.observed else None for own in self.bins]
        known = [place for place, own in enumerate(found) if own is not None and bool(own.amax.any())]
        known = known or [place for place, own in enumerate(found) if own is not None]
        if not known:
            return [self.bins[0].compute_range()]  # raises: nothing was observed
        places = [min(known, key=lambda other, place=place: abs(other - place)) for place in range(len(found))]
        ranges = [own for own in (found[place] for place in places) if own is not None]
        shapes = {tuple(own.lo.shape) for own in ranges}
        if len(shapes) > 1 and any(own.lo.numel() > 1 for own in ranges):
            raise ShapeError(f"the bins have ranges of different shapes, {sorted(shapes)}; use per_tensor")
        shape = ranges[0].lo.shape  # one group has the rank of what it saw
        return [Range(own.lo.reshape(shape), own.hi.reshape(shape)) for own in ranges]

    def compute_range(self) -> Range:
        """The range that contains the ranges of all bins."""
        found = self.ranges()
        return Range(torch.stack([own.lo for own in found]).amin(0), torch.stack([own.hi for own in found]).amax(0))

    def histogram(self) -> Histogram | None:
        """The histograms of all bins, merged; None if the method has no histogram, or if they cannot be merged."""
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
    processes: Ranks,
) -> tuple[ByValue | None, Batches]:
    """The `ByValue` that chooses among ranges (None: one range), and the batches, stored if bins are made from them."""
    if by is None:
        if bins is not None or boundaries is not None:
            raise ConfigError(
                'bins= and boundaries= divide the values that by= names, but by= is missing; pass it, as by="timestep"'
            )
        return None, data
    if bins is not None and boundaries is not None:
        raise ConfigError("bins= and boundaries= both say where the bins lie; pass only one of them")
    if boundaries is not None:
        return ByValue(by, boundaries), data
    count = DEFAULT_BINS if bins is None else bins
    if type(count) is not int or count < 2:
        raise ConfigError(f"bins= must be an integer of at least 2, got {shown(bins)}; for one range leave out by=")
    kept = data.kept()
    reader, seen = Reader(model, ByValue(by, [0.0])), list[Tensor]()

    def read(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append(reader.by_value.rows_of(reader.value(args, kwargs)).flatten().cpu())
        if kept.calls_once:
            raise CallEnded

    handle = model.register_forward_pre_hook(read, with_kwargs=True, prepend=True)
    with restore_after(handle.remove), evaluating(model), disabled(model), torch.no_grad():
        for batch in kept:
            with suppress(CallEnded):
                kept.run(model, batch)
    if not seen:
        raise CalibrationError(
            "no batch called the model, so that by= has no values; pass batches, and a forward= that calls the model"
        )
    values = torch.cat(processes.all(torch.cat(seen)))
    return ByValue(by, boundaries_of(values, count, by)), kept


def boundaries_of(values: Tensor, count: int, by: By = "value") -> list[float]:
    """The boundaries of up to `count` bins with equally many values; each is midway between two neighbouring values.

    >>> boundaries_of(torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 20.0]), 3)
    [1.5, 6.5]
    """
    ordered, distinct = values.sort().values, values.unique()
    if len(distinct) < 2:
        raise CalibrationError(
            f"{ByValue(by, [0.0]).name} is {distinct[0].item():g} in all calls, which makes a single bin; pass batches "
            "with several values, or leave out by="
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
    """A context that yields a function `read(by_value)`.

    After `read`, each call of the model also looks up the value of this `ByValue`, such as the timestep, in its
    arguments. After the context, calls look up only the values that the model's quantizers need.
    """
    with restore_after(lambda: follow_values(model)):
        known = (quantizer.by_value for quantizer in quantizers(model).values())
        yield lambda by_value: read_values(model, [*filter(None, known), by_value])


def calibrators_of(by_value: ByValue | None, make: Callable[[], Calibrator]) -> Calibrator:
    """A calibrator, or with `by_value` a `CalibratorByValue` with a calibrator for each bin."""
    return make() if by_value is None else CalibratorByValue(by_value, [make() for _ in range(by_value.count)])


def follow_values(model: nn.Module) -> None:
    """Make each call of a model read the values that choose ranges of the model's quantizers, each value once."""
    known: list[ByValue] = []
    for quantizer in quantizers(model).values():
        own = quantizer.by_value
        if own is not None:
            same = next((other for other in known if own.is_like(other)), own)
            quantizer.by_value = same
            known += [] if same in known else [same]
    read_values(model, known)


def set_range_of(quantizer: Quantizer, calibrator: Calibrator | None, range: Range) -> None:
    """Give a quantizer the range of its calibrator; a `CalibratorByValue` gives it a range for each bin."""
    if not isinstance(calibrator, CalibratorByValue):
        quantizer.set_range(range)
        return
    ranges = [Range(own.lo.to(range.lo.device), own.hi.to(range.lo.device)) for own in calibrator.ranges()]
    quantizer.set_ranges(ranges, calibrator.by_value)


def check_bins(by_value: ByValue | None, calibrators: Mapping[str, Calibrator | None]) -> None:
    """Raise an error if no batch fell into a bin, and warn of quantizers that saw no data in some bins.

    Raises:
        CalibrationError: a bin got no batch; the message names the bin.
        ConfigError: there are bins, but no calibrated activation has a fixed range.
    """
    if by_value is None:
        return
    own = {name: one for name, one in calibrators.items() if isinstance(one, CalibratorByValue)}
    if not own:
        raise ConfigError(
            f"by= sets fixed ranges by {by_value.name}, but no calibrated activation has a fixed range; leave out by="
        )
    missing = {name: set(one.missing) for name, one in own.items() if one.observed}
    everywhere = set.intersection(*missing.values()) if missing else set[int]()
    if everywhere:
        spans = ", ".join(by_value.span(place) for place in sorted(everywhere))
        raise CalibrationError(f"no batch has {spans}; pass batches with such values, or other boundaries")
    some = [name for name, places in missing.items() if places]
    if some:
        warn_user(
            f"{len(some)} quantizers saw nothing in some bins of {by_value.name}, and get the range of the nearest bin "
            f"there: {', '.join(some)}",
            CalibrationWarning,
        )


@accepts_wrapped_model
def calibrate(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any] = (),
    method: str = DEFAULT_METHOD,
    *,
    weight_method: str | None = None,
    weight_options: dict[str, Any] | None = None,
    pattern: str = "*",
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
    unseen: str = "error",
    by: By | None = None,
    bins: int | None = None,
    boundaries: Sequence[float] | None = None,
    group: Any = None,
    **options: Any,
) -> dict[str, Calibrator]:
    """Find the ranges of all static quantizers: those of inputs from batches, those of weights as calls use them.

    The model runs in float and in eval mode; nothing is changed if anything fails. With a pattern, layers that do not
    match run quantized if they have ranges, and in integers if `set_execution` says so. Later layers are calibrated on
    the results of earlier layers. A weight that already has quantized values, as after `fakequant.ptq.improve`, keeps
    its range: another range would change its codes. A weight of zeros gets no range: its scale is computed at each
    call, so that training can move the weight.

    Args:
        model: a prepared model.
        batches: a data loader, or tensors, tuples of arguments, or dicts of keyword arguments. Without `inputs`, a
            tuple's items beyond the parameters of the model's `forward`, such as labels, are not passed; a tuple whose
            last item would be passed to an optional parameter is refused, because it may be labels. `batches` may be
            empty if no input needs calibration; batches are then run only until every layer with a weight was called.
        method: the method for inputs: "mse", "max", "percentile", "entropy" or "moving_average".
        weight_method: the method for weights, by default "max". For codes of fewer than 4 bits, and for scales that
            have a format, such as GGUF's, the default is "mse", which searches scales and offsets by the squared error
            of the weight.
        weight_options: options for the calibrators of the weights, for example {"percentile": 99.9}.
        pattern: a pattern of the paths of the layers to calibrate; `*` matches any characters (fnmatch). A pattern that
            ends with "_quantizer" matches paths of quantizers: "*_weight_quantizer" calibrates only the weights.
        inputs: which part of a batch the model gets: the index of one item, such as 0 for a loader of (x, y); a slice
            of items, such as slice(2), as positional arguments; or a function of the batch, which returns a tuple of
            arguments, a dict of keyword arguments, or one argument.
        forward: called as forward(model, batch) instead of the model.
        mask: which tokens count, if batches have padding: a function from a batch to a bool tensor [batch, tokens],
            or a key of dict batches, such as "attention_mask". A `CalibrationWarning` names inputs of other shapes.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.
        unseen: how to treat layers that need data, but that no batch reached. "error" raises an error. "float" leaves
            the layers in float. "siblings" gives their inputs the merged ranges of the layers at the same place in
            other members of their `nn.ModuleList`, as for the experts of a mixture. With "float" and "siblings" a
            `CalibrationWarning` names the layers. Another `CalibrationWarning` names inputs that are zero in every
            batch: with "error" only these inputs stay in float until a calibration finds a range, with "float" their
            layers stay in float, and with "siblings" the inputs get the merged ranges. A layer that needs no data stays
            in float if it is not called, but another module uses its weight; a `CoverageWarning` names the layer. This
            warning also names layers that are called and whose weight another module uses, too, in the first batch of
            each shape, dtype or flag.
        by: a value, such as the timestep of a diffusion model, that chooses one of several ranges for the inputs of a
            call: the name of an argument of `forward`, or a function that is called with the same arguments. The value
            is a number, or a tensor with a number for each row of the batch.
        bins: the number of ranges, by default 10, each for equally many calls or rows of the batches; all batches are
            stored.
        boundaries: instead of `bins`, where bins begin: [500] makes a bin below 500 and a bin from 500 on.
        group: the processes of torch.distributed that calibrate together, each with other batches: their data are
            merged, and all get the scales that one process would find for all batches. By default the processes of a
            model wrapped in DistributedDataParallel or sharded by fully_shard; False for no group. `forward` gets the
            model that DistributedDataParallel wraps.
        options: options for the calibrators of the inputs, for example percentile=99.9.

    Returns:
        For the name of each quantizer that got a range, its calibrator, with the histogram if the method has one.

    Raises:
        CalibrationError: a batch has NaN or inf (the quantizer is named); the model fails on a batch (the batch and the
            layer are named; the cause is torch's error); layers saw no data (all are named, with the reason and a
            cure); another process failed; or the model has no quantizers.
        ConfigError: the method or an option is unknown; the pattern matches no layer with a static quantizer; the mask
            is not a mask; processes calibrate different models, or by a method that cannot be merged
            ("moving_average"); or the last item of a tuple may be labels or an optional argument.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> loader = [(torch.ones(2, 4), "label"), (torch.full((2, 4), 2.54), "label")]
    >>> used = calibrate(model, loader, method="max", inputs=0)
    >>> model[0].input_quantizer
    Quantizer(int8 per_tensor, input, scale 0.02)
    """
    check_model(model, "calibrate", "calibrate(model, batches)")
    group = processes_of(model, group)
    with reading(model) as read, restore_after(attributes_of(quantizers(model).values(), "calibrator")):
        with Ranks(group) as processes:  # an error of one process is raised in all
            given = Batches(batches, "calibrate", inputs=inputs, forward=forward, mask=mask, progress=progress)
            inputs_of_servers = {
                name: one
                for name, one in _under_global_scales(model).items()
                if one.fixes_global and is_chosen(name, pattern)
            }
            given = given.kept() if inputs_of_servers else given
            check_unseen(unseen)
            refuse_unprepared(model, CalibrationError)
            found = {
                name: q
                for name, q in quantizers(model).items()
                if not (q.dynamic or q.pinned) and is_chosen(name, pattern)
            }
            if not found and pattern != "*":
                raise ConfigError(f"no layer with a static quantizer matches {pattern!r}; correct the pattern")
            by_value, data = chosen_values(model, given, by, bins, boundaries, processes)
            if by_value is not None:
                read(by_value)

            def make(name: str) -> Calibrator:
                if found[name].kind is Kind.INPUT:
                    return calibrators_of(by_value, lambda: make_calibrator(method, found[name].spec, **options))
                named = (
                    "max" if weight_method is None or is_searched(found[name].spec, weight_method) else weight_method
                )
                return make_calibrator(named, found[name].spec, **(weight_options or {}))

            job = Observation(model, found, pattern, data, make, processes)
            parts = processes.all(job.observe(shared=group is not None and group.size() > 1))
        job.take(parts)
        check_bins(by_value, {name: quantizer.calibrator for name, quantizer in job.inputs.items()})
        idle = job.leave_out_unused()
        unreached = job.unseen()
        left = unreached.settle(unseen)
        unreached.say_read(left)
        unreached.share()
        # A function's weight that no call has shown goes on to have the range of every call.
        ranges = {
            name: quantizer.observed_range()
            for name, quantizer in found.items()
            if layer_of(name) not in left and (quantizer.kind is Kind.INPUT or observed(quantizer))
        }
        left += unreached.settle_zeros(unseen, ranges)
        ranges = {name: range for name, range in ranges.items() if layer_of(name) not in left}
        calibrators = {name: quantizer.calibrator for name, quantizer in found.items() if quantizer.calibrator}
        used = {name: calibrator for name, calibrator in calibrators.items() if name in ranges}
        held = quantizers(model)
        modules = [model.get_submodule(name) for name in left]
        owners = {name: model.get_submodule(layer_of(name)) for name in idle}
        with restore_on_error(ranges_of(held.values(), [*modules, *owners.values()])):
            leave_in_float(modules)
            for name, layer in owners.items():
                setattr(layer, name.rpartition(".")[2], None)
            weights = quantized_weights(model)
            for name, range in ranges.items():
                quantizer = held[name]
                if quantizer.needs_calibration and quantizer.collected is not None:  # it was zero before
                    quantizer.mode = Mode.QUANTIZE
                if name not in weights:
                    set_range_of(quantizer, calibrators[name], range)
                elif not weights[name].has_fixed_codes:
                    give_range(weights[name], range, weight_method)
                quantizer.collected = calibrators[name] if quantizer.kind is Kind.INPUT else None
            for name, calibrator in calibrators.items():
                if held[name].kind is Kind.INPUT and name not in ranges and layer_of(name) not in left:
                    held[name].reset()
                    held[name].mode, held[name].collected = Mode.OFF, calibrator
            for name, weight in scaled_weights(model).items():
                if name in ranges:
                    mark_range_current(weight)
            tie_scales(model, ranges)
            raise_scales(model)
            _fix_global_scales(model, inputs_of_servers, given)
    if job.vanishing is not None:
        job.vanishing.warn()
    warn_of_new_layers(model)
    warn_of_zeros(model, ranges)
    warn_of_masks(model, ranges)
    return used


@accepts_wrapped_model
def recalibrate(
    model: nn.Module, calibrators: Mapping[str, Calibrator] | None = None, method: str = DEFAULT_METHOD, **options: Any
) -> dict[str, Calibrator]:
    """Find the ranges of inputs by another method, from the counts of `calibrate`: the batches need not run again.

    A calibration by percentile, entropy or mse collects counts that serve all three methods, and max. The model, and a
    copy of it, has the counts of its last `calibrate`; checkpoints do not. The counts take 64 KiB per input quantizer
    with one scale (8 bytes with max); `quantizer.collected = None` frees them.

    Args:
        model: a calibrated model; its weights keep their ranges.
        calibrators: the calibrators that `calibrate` returned, which are not changed; by default the model's.
        method: as for `calibrate`.
        options: options of that method.

    Returns:
        For the path of each input quantizer: its calibrator.

    Raises:
        ConfigError: the calibrators collected less than the method needs, belong to another model, or are missing; or
            no calibrator belongs to an input. Nothing is changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.full((2, 4), 2.54)], "entropy")
    >>> used = recalibrate(model, method="max")
    >>> model[0].input_quantizer
    Quantizer(int8 per_tensor, input, scale 0.02)
    """
    found = quantizers(model)
    refuse_unprepared(model, CalibrationError)
    if isinstance(calibrators, str):
        raise ConfigError(f"calibrators cannot be {calibrators!r}; write recalibrate(model, method={calibrators!r})")
    if not isinstance(calibrators, Mapping | None):
        raise ConfigError(
            f"calibrators must be the result of calibrate, a mapping of names, got {type(calibrators).__name__}; "
            "recalibrate runs no batches: call calibrate(model, batches) to see new inputs"
        )
    if calibrators is None:
        inputs = {name: quantizer for name, quantizer in found.items() if quantizer.kind is Kind.INPUT}
        # A quantizer without a range that is off was left in float.
        static = {n: q for n, q in inputs.items() if not q.dynamic and (q.calibrated or q.mode is not Mode.OFF)}
        if missing := [name for name, quantizer in static.items() if quantizer.collected is None]:
            raise ConfigError(
                f"{len(missing)} of {len(static)} input quantizers have no counts of calibrate, the first is "
                f"{missing[0]} (a checkpoint does not hold counts); run fakequant.calibrate(model, batches, method), "
                "or pass the result of an earlier call as calibrators="
            )
        calibrators = {name: q.collected for name, q in static.items() if q.collected is not None}
    if unknown := sorted(set(calibrators) - set(found)):
        raise ConfigError(
            f"the model has no quantizers {', '.join(unknown)}; pass what calibrate returned for this model"
        )
    adopted: dict[str, Calibrator] = {}
    for name, used in calibrators.items():
        if found[name].kind is Kind.INPUT:
            by_value = used.by_value if isinstance(used, CalibratorByValue) else None
            spec = found[name].spec
            adopted[name] = calibrators_of(by_value, lambda spec=spec: make_calibrator(method, spec, **options))
            try:
                adopted[name].load_from(used)
            except ConfigError as error:
                raise ConfigError(
                    f"{name}: {error}. Run fakequant.calibrate(model, batches, {method!r}) to collect its counts"
                ) from error
    if not adopted:
        raise ConfigError(
            "there is nothing to recalibrate: no calibrator belongs to an input with fixed ranges; call calibrate first"
        )
    ranges: dict[str, Range] = {}
    for name, calibrator in adopted.items():
        range = calibrator.compute_range()
        own = next(chain(found[name].parameters(), found[name].buffers()), range.lo)  # the model may have moved since
        ranges[name] = Range(range.lo.to(own.device), range.hi.to(own.device))
    with reading(model), restore_on_error(ranges_of(found.values())):
        for name, range in ranges.items():
            set_range_of(found[name], adopted[name], range)
        raise_scales(model)
    return adopted


def ranges_of(quantizers: Iterable[Quantizer], layers: Iterable[nn.Module] = ()) -> Restore:
    """A function that restores the present ranges of quantizers, and the present quantizers of layers."""
    held = list(quantizers)
    learned = [parameter for quantizer in held for parameter in quantizer.parameters()]
    values = [parameter.detach().clone() for parameter in learned]
    states = state_of([*layers, *(module for quantizer in held for module in quantizer.modules())])

    def restore() -> None:
        states()
        for parameter, value in zip(learned, values, strict=True):
            parameter.data.copy_(value)  # a learned range starts again in place, so that optimizers keep it

    return restore


@accepts_wrapped_model
def fix_global_scales(
    model: Model, batches: Iterable[Any], *, inputs: Inputs | None = None, forward: Forward | None = None
) -> Model:
    """Fix the per-tensor scale of each NVFP4 input of a prepared model, in place; the model is returned.

    By default the preset `NVFP4` computes this scale anew in each call. Here it becomes amax / (448 * 6), where amax is
    the largest magnitude of the input in the batches; files of compressed-tensors store 1 / scale. The scales of
    blocks stay dynamic. Values beyond amax are clamped.

    Args:
        model: a prepared model with dynamic inputs whose block scales are multiplied by one per-tensor scale.
        batches: examples of inputs.
        inputs: the part of a batch that is the model's input, as for `calibrate`.
        forward: the function that calls the model with a batch, as for `calibrate`.

    Raises:
        CalibrationError: no input has a per-tensor scale above block scales, or an input, which is named, is 0 in all
            batches. The model is then unchanged.

    >>> model = prepare(nn.Sequential(nn.Linear(32, 32)), "nvfp4", skip=[])
    >>> fix_global_scales(model, [torch.full((1, 32), 2.0)])[0].input_quantizer.global_scale
    tensor([1344.])
    """
    check_model(model, "fix_global_scales", "fix_global_scales(model, batches)", CalibrationError)
    found = _under_global_scales(model)
    if not found:
        raise CalibrationError(
            "no dynamic input has block scales and a per-tensor scale; prepare the model with a preset such as NVFP4"
        )
    _fix_global_scales(model, found, Batches(batches, "fix_global_scales", inputs=inputs, forward=forward))
    return model


def _under_global_scales(model: nn.Module) -> dict[str, Quantizer]:
    """For each path, the quantizer of a dynamic input whose block scales are multiplied by a per-tensor scale."""
    return {
        name: one
        for name, one in quantizers(model).items()
        if one.kind is Kind.INPUT and one.dynamic and one.quantizes and has_tensor_scale(one.spec)
    }


def _fix_global_scales(model: nn.Module, found: Mapping[str, Quantizer], given: Batches) -> None:
    """Set the per-tensor scale of each quantizer in `found` from the largest magnitude of its inputs in all batches."""
    if not found:
        return
    largest: dict[str, Tensor] = {}
    with ExitStack() as hooks, evaluating(model), torch.no_grad():
        for name, one in found.items():

            def see(_: nn.Module, args: tuple[Tensor, ...], key: str = one.range_group or name) -> None:
                if args[0].numel():
                    amax = args[0].detach().abs().amax().float()
                    largest[key] = torch.maximum(amax, largest[key]) if key in largest else amax

            hooks.callback(one.register_forward_pre_hook(see).remove)
        for batch in given:
            given.run(model, batch)
    zero = torch.zeros((), device="cpu")
    if left := [name for name, one in found.items() if not bool(largest.get(one.range_group or name, zero) > 0)]:
        raise CalibrationError(f"{listed(left)} got only zeros, or no data; pass batches that reach them with values")
    with restore_on_error(state_of(found.values())):
        for name, one in found.items():
            scale = one.spec.scale
            assert scale.format is not None, "see `has_tensor_scale`"
            most = scale.format.quant_max * scale.bound(one.spec.format)  # of a block, in units of the global scale
            one.fix_global_scale(most / largest[one.range_group or name].reshape(1))
