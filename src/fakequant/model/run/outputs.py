"""The float tensors in a model's output, and their distance from the float model's output: one measure for all uses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant.data.again import unchanged
from fakequant.data.batches import Batches, KeptBatches
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, CoverageWarning, warn_user
from fakequant.model.run.recorded import EXTREME, OF_A_CACHE, QUANTIZER, WITHOUT_FLOATS, ModuleCall, Recording, counted
from fakequant.model.run.recorder import PLAIN, Detail, Recorder, holds_mask, largest, name_of, quantizes, tensors_in
from fakequant.model.weights import evaluating
from fakequant.nn.functions import CalledAs, called_as
from fakequant.nn.quantizer import Kind, Quantizer
from fakequant.nn.site_classes import OF_CACHE, hide_caches
from fakequant.nn.sites import operands_of, takes_floats
from fakequant.nn.wrappers import cached_weights
from fakequant.restore import forwards_of, restore_after
from fakequant.text import listed, module_name

_ROUNDING = 1e-6
"""The allowed difference of two runs, as a share of the norm: a GPU adds in any order."""
_VALUES = 2**18
"""How many values of an output are compared in float64 at once."""
Place = tuple[Any, ...]
"""The keys, indices and names of fields that lead to a tensor in an output."""


def named_tensors(output: Any, place: Place = ()) -> dict[Place, Tensor]:
    """The place and value of each float tensor in an output, also in nested tuples, lists, mappings and dataclasses.

    A complex tensor becomes a real tensor, with real and imaginary parts along a new last axis.

    >>> named_tensors({"logits": torch.ones(1), "ids": torch.arange(2)})
    {('logits',): tensor([1.])}
    """
    if isinstance(output, Tensor):
        output = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
        return {place: output} if output.is_floating_point() else {}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, (tuple, list)):
        items = zip(getattr(output, "_fields", range(len(output))), output, strict=True)
    elif is_dataclass(output) and not isinstance(output, type):
        items = [(field.name, getattr(output, field.name)) for field in fields(output)]
    return {name: tensor for key, item in items for name, tensor in named_tensors(item, (*place, key)).items()}


def float_tensors(output: Any) -> list[Tensor]:
    """All float tensors in a model's output, in order."""
    return [*named_tensors(output).values()]


def shown_place(place: Place) -> str:
    """The place of a tensor in an output, as text.

    >>> shown_place(("levels", 0, "boxes"))
    'levels[0].boxes'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".") or "the output"


@dataclass
class Power:
    """The power of a signal and of its error, summed over batches.

    An element whose signal is infinite or NaN, as for masked tokens, counts only if the approximation differs from it.
    """

    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: Tensor, approximate: Tensor) -> None:
        """Add a tensor and its approximation; if their shapes differ, as for a detector, the noise becomes infinite."""
        exact, approximate = exact.detach(), approximate.detach()
        if exact.shape != approximate.shape:
            self.noise = math.inf
            return
        if exact.dtype not in (torch.float32, torch.float64) or approximate.dtype is not exact.dtype:
            exact, approximate = exact.double(), approximate.double()
        # Float32 rounds a difference by 2**-24 of it, and sums are float64. Copies in double take most time.
        signal, noise = _energy(exact), _energy(approximate - exact)
        if not math.isfinite(signal + noise):  # a difference may be too large for float32
            same = (exact == approximate) | (exact.isnan() & approximate.isnan())
            noise = _energy(torch.where(same, 0.0, approximate.double() - exact.double()))
            signal = _energy(torch.where(exact.isfinite(), exact, 0.0))
        self.signal += signal
        self.noise += math.inf if math.isnan(noise) else noise

    @property
    def share(self) -> float:
        """The power of the noise divided by the power of the signal; 1 for noise without a signal."""
        if self.noise == 0.0 or math.isinf(self.noise):
            return self.noise
        return self.noise / self.signal if self.signal else 1.0


def _energy(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2 if x.numel() else 0.0


class Distance:
    """The errors of tensors against their float values, each as a share of the float tensor's energy.

    So a tensor of small values counts as much as a tensor of large values. Empty tensors do not count.

    >>> distance = Distance()
    >>> distance.add({"boxes": torch.full((4,), 500.0), "scores": torch.ones(4)},
    ...              {"boxes": torch.full((4,), 500.0), "scores": torch.full((4,), 0.9)})
    >>> round(distance.mean, 4), round(distance.shares["scores"], 4), distance.worst
    (0.005, 0.01, 'scores')
    """

    def __init__(self) -> None:
        self._powers: dict[Any, Power] = {}

    def add(self, exact: Mapping[Any, Tensor], approximate: Mapping[Any, Tensor]) -> None:
        """Add each tensor and the approximation with the same name; a name in only one mapping gets infinite noise."""
        for name in {**exact, **approximate}:
            one, other = exact.get(name), approximate.get(name)
            if one is None or other is None:
                self._powers.setdefault(name, Power()).noise = math.inf
            elif one.numel() or other.numel():
                self._powers.setdefault(name, Power()).add(one, other)

    @property
    def shares(self) -> dict[Any, float]:
        """For each name, the energy of the error as a share of the exact tensor's energy."""
        return {name: power.share for name, power in self._powers.items()}

    @property
    def energies(self) -> dict[Any, float]:
        """For each name, the energy of the exact tensors; values that are infinite or NaN do not count."""
        return {name: power.signal for name, power in self._powers.items()}

    @property
    def mean(self) -> float:
        """The mean of the shares, by which models are compared; 0 without tensors."""
        return sum(self.shares.values()) / max(len(self._powers), 1)

    @property
    def worst(self) -> Any:
        """The name of the tensor with the largest share."""
        return max(self._powers, key=lambda name: self._powers[name].share)

    @property
    def shown_worst(self) -> str:
        """A text with the place that has the largest share, and this share; "" for a single output."""
        if len(self._powers) < 2:
            return ""
        return f"worst {shown_place(self.worst)} {self._powers[self.worst].share:.2e}"

    @property
    def is_silent(self) -> bool:
        """Whether all signals and errors are 0."""
        return not any(power.signal or power.noise for power in self._powers.values())


def decibels(share: float) -> float:
    """The signal-to-noise ratio in dB, from the noise as a share of the signal; inf for a share of 0.

    >>> decibels(0.001)
    30.0
    """
    return math.inf if share == 0.0 else -10 * math.log10(share)


class OutputErrors(NamedTuple):
    """The errors of a model's outputs against the float model's outputs.

    Attributes:
        distance: the error of each output, over all batches.
        rows: the error of each row of each output, as a share of the output's energy: float64 [rows of all outputs] on
            the CPU. A row is an example, or with a mask a token. An output counts as one row with an infinite error if
            its shape differs from the float model's.
    """

    distance: Distance
    rows: Tensor


def check_again(
    model: nn.Module, batches: Batches, batch: Any, first: Mapping[Place, Tensor], mask: Tensor | None = None
) -> None:
    """Warn if a second run of a model returns other outputs, because of random numbers or of state that a run changes.

    Errors can still be compared: each pass over the batches starts from the same random numbers and state.

    Args:
        model: the model, in the same mode as for the first run.
        first: copies of the outputs of the first run on `batch`.
        mask: the tokens of the outputs that count.
    """

    def run() -> dict[Place, Tensor]:
        outputs = _unmasked(named_tensors(batches.run(model, batch)), mask)
        return {place: y.clone() for place, y in outputs.items()}

    with evaluating(model), torch.no_grad():
        before = torch.get_rng_state()
        with unchanged(model, batch) as values:
            second = run()
            draws = not torch.equal(before, torch.get_rng_state())
            third = run() if draws or values.changes().things else second
    if elsewhere := _differ(first, second):
        warn_user(
            f"two runs of the model on one batch differ by {elsewhere:.1e} of the output, although tensors, attributes "
            "and random numbers were restored: the model changes values elsewhere, and each figure has this "
            "difference; reset these values in forward=",
            CalibrationWarning,
        )
    elif left := _differ(second, third):
        state = f"changes its state in a run ({listed(values.changed.names, 3)})" if values.changed.things else ""
        what = " and ".join(filter(None, (state, "draws random numbers" if draws else "")))
        warn_user(
            f"two runs of the model on one batch differ by {left:.1e} of the output: in eval mode the model {what}. "
            "Compared passes start from the same state, and go on from batch to batch; if batches are independent, "
            "reset the model in forward=",
            CalibrationWarning,
        )


def _differ(one: Mapping[Place, Tensor], other: Mapping[Place, Tensor]) -> float:
    """The distance between the outputs of two runs, as a share of the norm; 0 if the order of sums may explain it."""
    distance = Distance()
    distance.add(one, other)
    found = max(distance.shares.values(), default=0.0) ** 0.5
    return found if found > _ROUNDING else 0.0


class OutputDistance:
    """The stored outputs of a float model, to measure the distance of a quantized model's outputs from them.

    Args:
        model: the model, which now computes in float.
        batches: the batches to compare on. Masked tokens do not count, except in outputs that do not begin with the
            axes [batch, tokens].

    >>> from fakequant.data.batches import Batches
    >>> model = nn.Linear(2, 2)
    >>> OutputDistance(model, Batches([torch.randn(3, 2)], "compare").kept()).of(model).mean
    0.0
    """

    def __init__(self, model: nn.Module, batches: KeptBatches) -> None:
        self.batches = batches
        with batches.one_pass(model):
            self._wanted = [{name: y.clone() for name, y in found.items()} for found in self._outputs(model)]
        if self._wanted:
            check_again(model, batches, next(iter(batches)), self._wanted[0], next(iter(batches.masks.values())))

    @property
    def wanted(self) -> list[Tensor]:
        """All outputs of the float model, without masked tokens."""
        return [y for outputs in self._wanted for y in outputs.values()]

    @property
    def has_outputs(self) -> bool:
        """Whether the float model returns any floats; other outputs have no error."""
        return any(y.numel() for y in self.wanted)

    def check(self, *, has_metric: bool = False) -> None:
        """Check that the float model returns no NaN, and that it returns floats, unless the user has a metric.

        Raises:
            CalibrationError: an output holds NaN; the number of the batch is named.
            ConfigError: the model returns no floats, and there is no metric.
        """
        for number, outputs in zip(self.batches.numbered, self._wanted, strict=True):
            if any(bool(y.isnan().any()) for y in outputs.values()):
                raise CalibrationError(f"batch {number + 1}: an output of the float model is NaN; leave out the batch")
        if not self.has_outputs and not has_metric:
            raise ConfigError("the model returns no floats, of which an error could be measured; pass metric=")

    def of(self, model: nn.Module) -> Distance:
        """The distance of a model's present outputs from the float outputs."""
        found = Distance()
        with cached_weights(model), self.batches.one_pass(model):
            for wanted, outputs in zip(self._wanted, self._outputs(model), strict=True):
                found.add(wanted, outputs)
        return found

    def errors_of(self, model: nn.Module) -> OutputErrors:
        """Run all batches; returns the distance of a model from the float outputs, and the error of each row."""
        with cached_weights(model), self.batches.one_pass(model):
            energy: dict[Place, float] = {}
            for wanted in self._wanted:
                for place, y in wanted.items():
                    energy[place] = energy.get(place, 0.0) + _energy(y.nan_to_num(0.0, 0.0, 0.0))
            found, rows = Distance(), [torch.zeros(0, dtype=torch.float64, device="cpu")]
            for wanted, own in zip(self._wanted, self._outputs(model), strict=True):
                found.add(wanted, own)
                for place, y in wanted.items():
                    other = own.get(place)
                    if other is None or other.shape != y.shape:
                        rows.append(torch.full((1,), math.inf, dtype=torch.float64, device="cpu"))
                        continue
                    if not y.numel():
                        continue
                    both = [one.reshape(len(y) if y.dim() else 1, -1) for one in (y, other)]
                    sums = list[Tensor]()
                    for a, b in zip(*(one.split(max(_VALUES // one.shape[1], 1)) for one in both), strict=True):
                        same = (a == b) | (a.isnan() & b.isnan())
                        sums.append(torch.where(same, 0.0, b.double() - a.double()).square().sum(1))
                    rows.append((torch.cat(sums).cpu() / (energy[place] or 1.0)).nan_to_num(math.inf))
            return OutputErrors(found, torch.cat(rows))

    def _outputs(self, model: nn.Module) -> Iterator[dict[Place, Tensor]]:
        for batch, mask in zip(self.batches, self.batches.masks.values(), strict=True):
            with evaluating(model), torch.no_grad():
                outputs = named_tensors(self.batches.run(model, batch))
            yield _unmasked(outputs, mask)


def _unmasked(outputs: Mapping[Place, Tensor], mask: Tensor | None) -> dict[Place, Tensor]:
    """The unmasked tokens of outputs [batch, tokens, ...]; other outputs are not changed."""
    if mask is None:
        return {**outputs}
    return {name: y if y.shape[:2] != mask.shape else y[mask.to(y.device)] for name, y in outputs.items()}


def record(model: nn.Module, run: Callable[[], object], mode: Callable[..., Any] = evaluating) -> Recording:
    """Run a model in eval mode without gradients, and record its calls; the model is unchanged afterwards.

    Args:
        model: a float model, or a prepared model, whose quantizers only mark the values that they return.
        run: a function that calls the model.
        mode: the context in which the model runs; `evaluating` or `training`.

    >>> class Residual(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.relu(x)
    >>> model, x = nn.Sequential(Residual()), torch.ones(2, 4)
    >>> recording = record(model, lambda: model(x))
    >>> [(call.owner, call.function, sorted(call.operands)) for call in recording.calls]
    [('0', 'relu', ['input']), ('0', 'add', ['input', 'other'])]
    """
    hide_caches()
    recorder = _WholeRecorder(model)
    with unchanged(model), mode(model), torch.no_grad(), recorder.recording_on():
        result = run()
        recorder.recording.kept = recorder.tensors.numbers()
    if recorder.recording.threads:
        names = [module_name(path) for path in sorted(recorder.recording.threads)]
        warn_user(
            f"the model calls {listed(names, 3)} in other threads, where functions are not recorded: they are in no "
            "list, and get no quantizers. Give an example that runs in one thread",
            CoverageWarning,
        )
    returned = [*tensors_in(result), *float_tensors(result)]  # torch's trees end at a dataclass
    recorder.recording.outputs = tuple(dict.fromkeys(recorder.value_of(tensor) for tensor in returned))
    return recorder.recording


@contextmanager
def watching(model: nn.Module) -> Iterator[Recording]:
    """A context that records a run while quantizers work as usual; multiply-accumulates are not counted.

    >>> model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    >>> with watching(model) as found:
    ...     y = model(x)
    >>> [call.path for call in found.modules]
    ['', '0']
    """
    recorder = Recorder(model)
    with recorder.recording_on():
        yield recorder.recording


class _WholeRecorder(Recorder):
    """A recorder that also counts multiply-accumulates, measures magnitudes, and finds possible sites."""

    def __init__(self, model: nn.Module) -> None:
        self.followed: CodeType | None = None
        self.ended: dict[str, ModuleCall] = {}
        """The last call of each module, by path, until the module's hooks have returned."""
        super().__init__(model)

    @contextmanager
    def recording_on(self) -> Iterator[None]:
        """A context that records each call with the module whose `forward` makes it; a call in a hook has no module."""
        with restore_after(forwards_of(self.modules.values())):
            for path, module in self.modules.items():
                follow = self._quantized(module) if quantizes(module) else self._followed(path, module.forward)
                vars(module)["forward"] = follow
            with super().recording_on():
                yield

    def _hook(self, path: str, module: nn.Module, keep: Callable[[Any], None]) -> None:
        keep(module.register_forward_pre_hook(lambda *_: self._enter_hooks(), prepend=True))
        keep(module.register_forward_hook(lambda _, __, y: self._leave_hooks(path, y), always_call=True))

    def _enter_hooks(self) -> None:
        if self.is_here():
            self.running.append((None, 0))

    def _leave_hooks(self, path: str, result: Any) -> None:
        if self.is_here():
            self.running.pop()
            one = self.ended.pop(path, None)
            if one is not None and isinstance(result, Tensor):
                one.output = self.value_of(result)  # a hook may have given another one
                one.results = (one.output,)

    def _followed(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.enter(path, args, kwargs)
            result = None
            try:
                result = forward(*args, **kwargs)
                return result
            finally:
                if self.is_here():
                    self.ended[path] = self.open[-1]
                self.leave(result)

        self.followed = run.__code__  # type: ignore[attr-defined]  one code for all modules
        return run

    def _quantized(self, quantizer: Any) -> Callable[[Tensor], Tensor]:
        """A `forward` for a quantizer: it returns a new tensor with the same numbers, so that no range is needed."""

        def run(x: Tensor) -> Tensor:
            if not quantizer.quantizes:
                return x
            with torch._C.DisableTorchFunction():
                # The result may be written, that of a weight is not, and weights are large.
                is_weight = isinstance(quantizer, Quantizer) and quantizer.kind is Kind.WEIGHT
                result = x.detach() if is_weight else x.clone()
            if self.is_here():
                self._note(QUANTIZER, (self.value_of(x),), [result], 0, PLAIN)
            return result

        return run

    def _computed(self, product: str, run: Callable[[], Any], factors: list[Tensor]) -> tuple[Any, int]:
        return counted(product, run, factors) if factors else (run(), 0)

    def _size(self, tensor: Tensor, number: int) -> float:
        size = largest(tensor)
        if EXTREME <= size < math.inf and holds_mask(tensor, EXTREME):
            self.recording.masks.add(number)
        return size

    def _named(self, func: Any, args: Any, kwargs: Any) -> tuple[CalledAs | None, str]:
        called = called_as(func)
        if called is None:
            return None, name_of(func)
        if not takes_floats(args, kwargs):
            return None, called.function.name + WITHOUT_FLOATS  # as a prepared model, which does not count such calls
        # Whether a cache of transformers makes the call.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self.followed:
            if frame.f_code is OF_CACHE:
                return None, called.function.name + OF_A_CACHE
            frame = frame.f_back
        return called, called.function.name

    def _detail(self, called: CalledAs, args: Any, kwargs: Any) -> Detail:
        operands = operands_of(called, args, kwargs)
        numbers = {operand: self.value_of(tensor) for operand, tensor in operands.items()}
        read = called.function.equation
        # The places in the code that run, from the call of the function up to the `forward` of its owner.
        places, frame = [], sys._getframe(2)
        while frame is not None and frame.f_code is not self.followed:
            places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return Detail(numbers, tuple(places), "" if read is None else read(args, kwargs))
