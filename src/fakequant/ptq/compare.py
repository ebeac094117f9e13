"""Presets, calibration methods and steps of `improve` side by side on one model: what each gives and costs."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.calibration import DEFAULT_METHOD
from fakequant.errors import CalibrationError, ConfigError, FakeQuantError
from fakequant.model.batches import Forward, Inputs, refuse_tensor, runner
from fakequant.model.calibrate import calibrate
from fakequant.model.html import html_result
from fakequant.model.modes import evaluating
from fakequant.model.outputs import float_tensors
from fakequant.model.prepare import prepare
from fakequant.model.presets import find_preset
from fakequant.model.progress import track
from fakequant.model.sizes import WeightBits, weight_bits
from fakequant.model.weights import quantized_weights
from fakequant.ptq.improve import improve

Metric = Callable[[nn.Module], float]
_HEADER = ["preset", "method", "steps", "metric", "error", "bits", "MB", "seconds"]


@dataclass(frozen=True)
class Compared:
    """One way to quantize a model.

    Attributes:
        preset: the name of the preset.
        method: of calibration.
        steps: of `improve`; "" for none.
        error: of the model's output, as a share of its energy.
        metric: what `metric` gives; None without one.
        bits: per quantized weight, with scales.
        bytes: of the quantized weights.
        seconds: to prepare, calibrate and improve.
        failed: why there are no figures; "" where there are.
    """

    preset: str
    method: str
    steps: str
    error: float = float("inf")
    metric: float | None = None
    bits: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    failed: str = ""

    @property
    def way(self) -> tuple[str, str, str]:
        """What was done."""
        return self.preset, self.method, self.steps


@dataclass
class Comparison:
    """The result of `compare`; prints as a table, the best first.

    Attributes:
        rows: the largest metric first, without one the smallest error; then those that failed.
        float_metric: the metric of the model in float; None without one.
    """

    rows: list[Compared] = field(default_factory=list)
    float_metric: float | None = None

    def _cells(self) -> list[list[str]]:
        cells = []
        for row in self.rows:
            metric = "-" if row.metric is None else f"{row.metric:.4g} ({row.metric - (self.float_metric or 0.0):+.3g})"
            figures = [metric, f"{row.error:.2e}", f"{row.bits:.2f}", f"{row.bytes / 1e6:.2f}", f"{row.seconds:.1f}"]
            cells.append([row.preset, row.method, row.steps or "-", *([row.failed] if row.failed else figures)])
        return cells

    def __str__(self) -> str:
        rows = [_HEADER, *self._cells()]
        full = [row for row in rows if len(row) == len(_HEADER)]
        widths = [max(map(len, column)) for column in zip(*full, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        rows = [row + [""] * (len(_HEADER) - len(row)) for row in self._cells()]
        return html_result(_HEADER, rows, numbers=range(3, len(_HEADER)))

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the metric, without one the error, over bits per weight, into an image file.

        Raises:
            ModuleNotFoundError: matplotlib is not installed (pip install 'fakequant[demo]').
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 5))
        shown = [row for row in self.rows if not row.failed]
        heights = [row.error if row.metric is None else row.metric for row in shown]
        axes.scatter([row.bits for row in shown], heights)
        for row, height in zip(shown, heights, strict=True):
            axes.annotate(" ".join(filter(None, row.way)), (row.bits, height), fontsize=7)
        if self.float_metric is None:
            axes.set_yscale("log")
        else:
            axes.axhline(self.float_metric, linestyle="--", label="float")
            axes.legend()
        axes.set_xlabel("bits per weight, with scales")
        axes.set_ylabel("metric" if self.float_metric is not None else "error of the output")
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)
        return Path(path)


class Ways(NamedTuple):
    """What `compare` tries: every preset with every method of calibration and every choice of steps."""

    presets: Sequence[str] = ("INT8", "FP8", "INT4_GROUP32", "NVFP4", "MXFP4")
    methods: Sequence[str] = (DEFAULT_METHOD,)
    steps: Sequence[str | None] = (None, "fast")


USUAL_WAYS = Ways()
"""What `compare` tries if nothing is said."""


def compare(
    model: nn.Module,
    batches: Iterable[Any],
    ways: Ways | Sequence[str] = USUAL_WAYS,
    *,
    metric: Metric | None = None,
    path: str | os.PathLike[str] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
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

    Raises:
        ConfigError: an unknown preset, or a file of another model or of other batches.
        CalibrationError: no batches.
        What fails in one way of quantizing is a row with the reason.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> found = compare(model, [torch.randn(16, 32) for _ in range(4)], Ways(["INT8", "INT4_GROUP32"], steps=[None]))
    >>> [row.preset for row in found.rows]
    ['INT8', 'INT4_GROUP32']
    """
    refuse_tensor(batches, "compare")
    given, run = list(batches), runner(inputs, forward)
    if not given:
        raise CalibrationError("compare needs batches, and got none")
    tried = _combined(ways if isinstance(ways, Ways) else Ways(ways))
    known = _read(path, _fingerprint(model, given))
    result = Comparison(float_metric=None if metric is None else float(metric(model)))
    for way in track(tried, "comparing", len(tried)):
        row = known.get(way)
        if row is None:
            row = _measured(way, model, given, run, metric, {"inputs": inputs, "forward": forward})
            if path is not None:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
        result.rows.append(row)
    result.rows.sort(key=lambda row: (bool(row.failed), row.error if row.metric is None else -row.metric))
    return result


def _combined(ways: Ways) -> list[tuple[str, str, str]]:
    names = [find_preset(name).name for name in ways.presets]
    found = [(name, method, step or "") for name, method, step in product(names, ways.methods, ways.steps)]
    return [way for way in found if way[1] == ways.methods[0] or _has_static_inputs(way[0])]


def _has_static_inputs(name: str) -> bool:
    return any(rule.input is not None and not rule.input.dynamic for rule in find_preset(name).rules)


def _measured(
    way: tuple[str, str, str], model: nn.Module, batches: list[Any], run: Forward, metric: Metric | None, how: Any
) -> Compared:
    """A row; errors of this package are its reason."""
    name, method, steps = way
    started = time.perf_counter()
    try:
        twin = prepare(copy.deepcopy(model), find_preset(name))
        calibrate(twin, batches, method=method, progress=False, **how)
        if steps:
            improve(twin, batches, steps, progress=False, **how)
        seconds = time.perf_counter() - started
        error = output_error(twin, model, batches, run)
        found = None if metric is None else float(metric(twin.eval()))
    except FakeQuantError as reason:
        return Compared(*way, failed=f"{type(reason).__name__}: {reason}")
    total = WeightBits(0, 0, 0)
    for weight in quantized_weights(twin).values():
        total = total.plus(weight_bits(weight) or WeightBits(0, 0, 0))
    return Compared(*way, error, found, total.per_weight, (total.codes + total.scales) / 8, round(seconds, 2))


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
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
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
