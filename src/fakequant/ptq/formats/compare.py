"""Presets, calibration methods and steps of `improve` side by side on one model: error and cost."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fakequant.calibration import DEFAULT_METHOD, find_method
from fakequant.data.arguments import Metric, check_float_model, check_metric
from fakequant.data.batches import Batches, Forward, Inputs, KeptBatches
from fakequant.data.digest import digest
from fakequant.data.progress import track
from fakequant.errors import ConfigError, FakeQuantError, shown
from fakequant.files import check_path, output_errors, writable_file, write_whole
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.calibration.choice import AUTO
from fakequant.model.execution import set_execution
from fakequant.model.modes import evaluating, score_of
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.run.outputs import OutputDistance
from fakequant.model.sizes import bits_of_all, weight_bits
from fakequant.model.weights import quantized_weights
from fakequant.nn import cached_weights
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.formats.comparison import Compared, Comparison, best_first, read_rows
from fakequant.ptq.improving.finished import run_of
from fakequant.ptq.improving.improve import checked_steps, improve


class Ways(NamedTuple):
    """The combinations for `compare`: every preset with every calibration method and every choice of steps."""

    presets: Sequence[str] = ("INT8", "FP8", "INT4_GROUP32", "NVFP4", "MXFP4")
    methods: Sequence[str] = (DEFAULT_METHOD,)
    steps: Sequence[str | None] = (None, "fast")


USUAL_WAYS = Ways()
"""What `compare` tries if nothing is said."""


@unwraps
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
    """Quantize copies of a model in many ways, and measure the error and the cost of each.

    Args:
        model: in float; it stays as it is.
        batches: to calibrate, improve and measure the error of the output on.
        ways: names of presets, or `Ways(presets, methods, steps)`: presets without static inputs run with the first
            method alone; steps are those of `improve`, "best" or "fast", None for none.
        metric: called as metric(model), larger is better; also for the float model.
        path: a file of JSON lines; each row is appended when it is measured. Rows in the file for the same model,
            batches, `metric`, `inputs` and `forward` are not measured again. Functions, and attributes of the model,
            count as the same if the float model gives the same output for the first batch and the same metric.
        inputs, forward: as for `calibrate`.
        told: called with each new row when it is measured.

    Raises:
        ConfigError: an unknown preset, method or steps, or a file of another model, batches or metric.
        CalibrationError: no batches, or the model in float gives NaN for one or fails on it (names it, and the layer).
        OutputError: the file cannot be written; raised before the work.
        If one way fails, its row has the reason, and the others run.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> found = compare(model, [torch.randn(16, 32) for _ in range(4)], Ways(["INT8", "INT4_GROUP32"], steps=[None]))
    >>> [row.preset for row in found.rows]
    ['INT8', 'INT4_GROUP32']
    """
    check_float_model(model, "compare", "compare(model, batches)", "compare presets on")
    check_metric(metric, "compare")
    tried = _combined(ways if isinstance(ways, Ways) else Ways([ways] if isinstance(ways, str) else ways))
    if path is not None:
        check_path(path, "compare(model, batches, path='rows.jsonl')")
        path = writable_file(path)
    given = Batches(batches, "compare", inputs=inputs, forward=forward).kept()
    task = _Task(model, given, metric)
    result = Comparison(float_metric=task.score(model), float_milliseconds=task.milliseconds(model))
    known = {}
    if path is not None:
        measure = getattr(metric, "__qualname__", ""), result.float_metric
        known = _read(path, digest([run_of(model, given), measure]))
    for way in track(tried, "comparing", len(tried)):
        row = known.get(way)
        if row is None:
            row = task.measured(way)
            if path is not None:
                with output_errors(path), open(path, "a", encoding="utf-8") as file:
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
        if not isinstance(step, str | None):
            raise ConfigError(f'steps of compare are "best", "fast" or None, got {shown(step)}')
        checked_steps(step or "fast")
    ways = Ways(names, methods, ways.steps)
    found = [(name, method, step or "") for name, method, step in product(*ways)]
    return [way for way in found if way[1] == ways.methods[0] or _has_static_inputs(way[0])]


def _has_static_inputs(name: str) -> bool:
    return any(rule.input is not None and not rule.input.dynamic for rule in find_preset(name).rules)


class _Task:
    """A float model, and the data that measure its quantized copies."""

    def __init__(self, model: nn.Module, batches: KeptBatches, metric: Metric | None) -> None:
        self.model, self.batches, self.metric = model, batches, metric
        self.outputs = OutputDistance(model, batches)
        self.outputs.check(has_metric=metric is not None)

    def measured(self, way: tuple[str, str, str]) -> Compared:
        """Measure one way; an error of this package becomes the reason in its row."""
        name, method, steps = way
        how: dict[str, Any] = {"forward": self.batches.run, "progress": False}
        started = time.perf_counter()
        try:
            twin = prepare(copy.deepcopy(self.model), find_preset(name))
            calibrate(twin, self.batches, method=method, unseen="float", **how)
            if steps:
                improve(twin, self.batches, steps, **how)
            seconds = time.perf_counter() - started
            distance = self.outputs.of(twin)
            error = distance.mean if self.outputs.has_outputs else math.nan
            found = self.score(twin)
        except FakeQuantError as reason:
            return Compared(*way, failed=f"{type(reason).__name__}: {reason}")
        if found is not None and math.isnan(found):
            return Compared(*way, failed="the metric is NaN")
        total = bits_of_all(filter(None, map(weight_bits, quantized_weights(twin).values())))
        size = (total.codes + total.scales) / 8
        speed = self.milliseconds(set_execution(twin, "auto"))
        figures = (error, found, total.per_weight, size, speed, round(seconds, 2))
        return Compared(*way, *figures, worst=distance.shown_worst)

    def score(self, model: nn.Module) -> float | None:
        """The metric of a model; None without one."""
        return None if self.metric is None else score_of(self.metric, model)

    def milliseconds(self, model: nn.Module) -> float:
        """The time of a forward pass of the first batch: the shortest of up to five, or of those that fit in 0.2 s."""
        times: list[float] = []
        with evaluating(model), cached_weights(model), torch.no_grad():
            self.batches.run_first(model)
            while len(times) < 5 and sum(times) < 0.2:
                started = time.perf_counter()
                self.batches.run_first(model)
                times.append(time.perf_counter() - started)
        return round(1e3 * min(times), 4)


def _read(file: Path, fingerprint: str) -> dict[tuple[str, str, str], Compared]:
    """The rows of a file, by way; a new file gets the fingerprint. The last line may be cut off by a kill."""
    with output_errors(file):
        lines = file.read_text("utf-8", "replace").splitlines(keepends=True) if file.exists() else []
        if not lines:
            file.write_text(json.dumps({"fingerprint": fingerprint}) + "\n", encoding="utf-8")
            return {}
    if lines[0].strip() != json.dumps({"fingerprint": fingerprint}):
        raise ConfigError(
            f"{file} is no comparison of this model and these batches with this metric=, inputs= and forward=; give "
            "another path, or remove it"
        )
    if not lines[-1].endswith("\n"):
        lines.pop()
        write_whole(file, "".join(lines).encode())
    return {row.way: row for row in read_rows(file, lines[1:])}
