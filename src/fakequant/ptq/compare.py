"""Presets, calibration methods and steps of `improve` side by side on one model: what each gives and costs."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.calibration import DEFAULT_METHOD, find_method
from fakequant.errors import CalibrationError, ConfigError, FakeQuantError
from fakequant.files import check_path, writable_file
from fakequant.model.arguments import check_metric, check_model, measured
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.calibrate import calibrate
from fakequant.model.choice import AUTO
from fakequant.model.execution import set_execution
from fakequant.model.failures import naming
from fakequant.model.modes import evaluating
from fakequant.model.outputs import float_tensors
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.progress import track
from fakequant.model.sizes import WeightBits, weight_bits
from fakequant.model.weights import quantized_weights
from fakequant.nn import cached_weights
from fakequant.nn.quantizer import refuse_prepared
from fakequant.ptq.comparison import Compared, Comparison, best_first
from fakequant.ptq.improve import checked_steps, improve

Metric = Callable[[nn.Module], float]


class Ways(NamedTuple):
    """What `compare` tries: every preset with every method of calibration and every choice of steps."""

    presets: Sequence[str] = ("INT8", "FP8", "INT4_GROUP32", "NVFP4", "MXFP4")
    methods: Sequence[str] = (DEFAULT_METHOD,)
    steps: Sequence[str | None] = (None, "fast")


USUAL_WAYS = Ways()
"""What `compare` tries if nothing is said."""


def compare(  # noqa: PLR0913  all but the first three by name
    model: nn.Module,
    batches: Iterable[Any],
    ways: Ways | Sequence[str] = USUAL_WAYS,
    *,
    metric: Metric | None = None,
    path: str | os.PathLike[str] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    told: Callable[[Compared], object] | None = None,
) -> Comparison:
    """Quantize copies of a model in many ways, and say what each gives and costs.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate, improve and measure the error of the output on.
        ways: names of presets, or `Ways(presets, methods, steps)`: presets without static inputs run with the first
            method alone; steps are those of `improve`, "best" or "fast", None for none.
        metric: called as metric(model), larger is better; also for the float model.
        path: a file of JSON lines that gets each row as soon as it is there. Rows that it holds of the same model and
            batches are not run again.
        inputs: which part of a batch the model gets, as for `calibrate`.
        forward: called as forward(model, batch) instead of the model.
        told: gets each new row as soon as it is there.

    Raises:
        ConfigError: an unknown preset, method or steps, or a file of another model or of other batches.
        CalibrationError: no batches, or the model in float fails on one (names it, and the layer).
        OutputError: the file cannot be written; raised before the work.
        What fails in one way of quantizing is a row with the reason.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> found = compare(model, [torch.randn(16, 32) for _ in range(4)], Ways(["INT8", "INT4_GROUP32"], steps=[None]))
    >>> [row.preset for row in found.rows]
    ['INT8', 'INT4_GROUP32']
    """
    check_model(model, "compare", "compare(model, batches)")
    check_metric(metric, "compare")
    refuse_tensor(batches, "compare")
    refuse_prepared(model, "compare")
    tried = _combined(ways if isinstance(ways, Ways) else Ways([ways] if isinstance(ways, str) else ways))
    if path is not None:
        check_path(path, "compare(model, batches, path='rows.jsonl')")
        path = writable_file(path)
    given = list(batches)
    if not given:
        raise CalibrationError("compare needs batches, and got none")
    run = naming(runner(inputs, forward), given)
    known = _read(path, _fingerprint(model, given))
    task = _Task(model, given, run, metric, {"inputs": inputs, "forward": forward})
    result = Comparison(float_metric=task.score(model), float_milliseconds=task.milliseconds(model))
    for way in track(tried, "comparing", len(tried)):
        row = known.get(way)
        if row is None:
            row = task.measured(way)
            if path is not None:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            if told is not None:
                told(row)
        result.rows.append(row)
    result.rows.sort(key=best_first)
    return result


def _combined(ways: Ways) -> list[tuple[str, str, str]]:
    names = list(dict.fromkeys(find_preset(name).name for name in ways.presets))
    methods = [method if method == AUTO else find_method(method) for method in ways.methods]
    for step in ways.steps:
        checked_steps(step or "fast")
    ways = Ways(names, methods, ways.steps)
    found = [(name, method, step or "") for name, method, step in product(*ways)]
    return [way for way in found if way[1] == ways.methods[0] or _has_static_inputs(way[0])]


def _has_static_inputs(name: str) -> bool:
    return any(rule.input is not None and not rule.input.dynamic for rule in find_preset(name).rules)


class _Task:
    """A float model and what its quantized copies are measured on."""

    def __init__(
        self, model: nn.Module, batches: list[Any], run: Forward, metric: Metric | None, how: dict[str, Any]
    ) -> None:
        self.model, self.batches, self.run, self.metric, self.how = model, batches, run, metric, how
        self.wanted = [self._outputs(model, batch) for batch in batches]
        self.energy = sum(float(y.double().square().sum()) for tensors in self.wanted for y in tensors)

    def measured(self, way: tuple[str, str, str]) -> Compared:
        """A row; errors of this package are its reason."""
        name, method, steps = way
        started = time.perf_counter()
        try:
            twin = prepare(copy.deepcopy(self.model), find_preset(name))
            calibrate(twin, self.batches, method=method, progress=False, **self.how)
            if steps:
                improve(twin, self.batches, steps, progress=False, **self.how)
            seconds = time.perf_counter() - started
            error, found = self._error(twin), self.score(twin)
        except FakeQuantError as reason:
            return Compared(*way, failed=f"{type(reason).__name__}: {reason}")
        total = WeightBits(0, 0, 0)
        for weight in quantized_weights(twin).values():
            total = total.plus(weight_bits(weight) or WeightBits(0, 0, 0))
        size = (total.codes + total.scales) / 8
        speed = self.milliseconds(set_execution(twin, "auto"))
        return Compared(*way, error, found, total.per_weight, size, speed, round(seconds, 2))

    def score(self, model: nn.Module) -> float | None:
        """The metric of a model; None without one."""
        if self.metric is None:
            return None
        with evaluating(model), cached_weights(model), torch.no_grad():
            return measured(self.metric, model)

    def milliseconds(self, model: nn.Module) -> float:
        """The time of a forward pass of the first batch: the shortest of up to five, or of those that fit in 0.2 s."""
        times: list[float] = []
        with evaluating(model), cached_weights(model), torch.no_grad():
            self.run(model, self.batches[0])
            while len(times) < 5 and sum(times) < 0.2:
                started = time.perf_counter()
                self.run(model, self.batches[0])
                times.append(time.perf_counter() - started)
        return round(1e3 * min(times), 4)

    def _error(self, model: nn.Module) -> float:
        lost = 0.0
        with cached_weights(model):
            for batch, wanted in zip(self.batches, self.wanted, strict=True):
                for y, reference in zip(self._outputs(model, batch), wanted, strict=True):
                    lost += float((y - reference).double().square().sum())
        return lost / self.energy if self.energy else float(lost > 0)

    def _outputs(self, model: nn.Module, batch: Any) -> list[Tensor]:
        with evaluating(model), torch.no_grad():
            return [tensor.clone() for tensor in float_tensors(self.run(model, batch))]


@torch.no_grad()
def output_error(model: nn.Module, reference: nn.Module, batches: Iterable[Any], run: Forward) -> float:
    """The squared error of a model's outputs, as a share of the energy of those of another model."""
    lost = energy = 0.0
    with evaluating(model), evaluating(reference):
        for batch in batches:
            pairs = zip(float_tensors(run(model, batch)), float_tensors(run(reference, batch)), strict=True)
            for y, wanted in pairs:
                lost += float((y - wanted).double().square().sum())
                energy += float(wanted.double().square().sum())
    return lost / energy if energy else float(lost > 0)


def _fingerprint(model: nn.Module, batches: list[Any]) -> str:
    digest = hashlib.sha256(repr(model).encode())
    tensors = [leaf for leaf in (*model.state_dict().values(), *tree_leaves(batches)) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        digest.update(str(tensor.shape).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(path: str | os.PathLike[str] | None, fingerprint: str) -> dict[tuple[str, str, str], Compared]:
    """The rows of a file, by way; a new file gets the fingerprint. The last line may be cut off by a kill."""
    if path is None:
        return {}
    file = Path(path)
    lines = file.read_text("utf-8", "replace").splitlines(keepends=True) if file.exists() else []
    if not lines:
        file.write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
        return {}
    if lines[0].strip() != json.dumps({"fingerprint": fingerprint}):
        raise ConfigError(f"{path} is no comparison of this model and these batches; give another path, or remove it")
    if not lines[-1].endswith("\n"):
        lines.pop()
        file.write_text("".join(lines), encoding="utf-8")
    try:
        rows = [Compared(**json.loads(line)) for line in lines[1:]]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it") from error
    return {row.way: row for row in rows}
