"""Presets, calibration methods and steps of `improve` side by side on one model: error and cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from fakequant.calibration import DEFAULT_METHOD, find_method
from fakequant.data.arguments import Metric, check_float_model, check_metric, named
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.data.digest import digest, function_digest
from fakequant.data.progress import track
from fakequant.errors import ConfigError, shown, warn_renamed
from fakequant.files import check_path, writable_file
from fakequant.model.calibration.choice import AUTO
from fakequant.model.presets import find_preset
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.formats.comparison import Compared, Comparison, Way, best_first, keep_row, kept_rows
from fakequant.ptq.formats.task import Task, has_static_inputs
from fakequant.ptq.improving.finished import run_of
from fakequant.ptq.improving.improve import checked_steps


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
    on_row: Callable[[Compared], object] | None = None,
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
        on_row: called with each new row when it is measured.
        told: the old name of `on_row`, which goes with the next release.

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
    if told is not None:
        warn_renamed("told= of compare", "on_row=")
        on_row = told
    tried = _combined(ways if isinstance(ways, Ways) else Ways([ways] if isinstance(ways, str) else ways))
    if path is not None:
        check_path(path, "compare(model, batches, path='rows.jsonl')")
        path = writable_file(path)
    given = Batches(batches, "compare", inputs=inputs, forward=forward).kept()
    task = Task(model, given, given, metric)
    result = Comparison(float_metric=task.score(model), float_milliseconds=task.milliseconds(model))
    if metric is not None:
        result.metric, result.negated = named(metric).name, named(metric).negated
    known = {}
    if path is not None:
        measure = function_digest(metric), result.float_metric
        known = kept_rows(path, digest([run_of(model, given), measure]), negated=result.negated)
    for way in track(tried, "comparing", len(tried)):
        row = known.get(way)
        if row is None:
            row = task.measured(way)
            if path is not None:
                keep_row(path, row)
            if on_row is not None:
                on_row(row)
        result.rows.append(row)
    result.rows.sort(key=best_first)
    return result


def _combined(ways: Ways) -> list[Way]:
    names = list(dict.fromkeys(find_preset(name).name for name in ways.presets))
    methods = [method if method == AUTO else find_method(method) for method in ways.methods]
    for step in ways.steps:
        if not isinstance(step, str | None):
            raise ConfigError(f'steps of compare are "best", "fast" or None, got {shown(step)}')
        checked_steps(step or "fast")
    ways = Ways(names, methods, ways.steps)
    found = [Way(name, method, step or "") for name, method, step in product(*ways)]
    return [way for way in found if way.method == ways.methods[0] or has_static_inputs(way.preset)]
