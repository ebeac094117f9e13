"""The report of a model in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import Metric, check_metric, check_model
from fakequant.data.arguments import measured as value_of
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.distributed import refuse_sharded
from fakequant.export import VerifyReport
from fakequant.files import check_path, writable_file
from fakequant.model.modes import disabled, evaluating
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.formats.comparison import Comparison
from fakequant.ptq.results import Improvement
from fakequant.report.advice import advised, with_advice
from fakequant.report.collect import environment, improved, verification
from fakequant.report.curve import curve_of
from fakequant.report.data import Accuracy, ReportData, Section
from fakequant.report.html.page import write_page, write_report
from fakequant.report.html.pair import render_pair
from fakequant.report.measure import measure
from fakequant.report.saved import read_results, write_results


@unwraps
def report(  # noqa: PLR0913  all but the first four by name
    model: nn.Module,
    batches: Iterable[Any],
    path: str | os.PathLike[str],
    metric: Metric | None = None,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    results: Iterable[VerifyReport | Improvement] = (),
    comparison: Comparison | str | os.PathLike[str] | None = None,
    advise: bool = True,
) -> Path:
    """Measure a model and write its report as one HTML file, and the figures as JSON beside it.

    Each layer is also measured alone, which takes about half a run of the model for each layer: on as many examples of
    the first batch as give 65,536 values of the output, if the batch can be cut. The page says how many.

    What the page advises next was tried: changed by every second of the first eight batches, and judged by the error of
    the output on the others, of a single batch on that one. What lowers the error there must do so with the two parts
    exchanged. It is compared with the model calibrated by its own method on the same batches, and is said with the
    figures before and after, only where it helps; see `ptq/advising/`. Where little is lost that takes a
    run or two of these batches, else about two dozen, and where ranges and presets do not halve the error once or twice
    the time of `improve(..., "fast")`.

    Args:
        model: a calibrated model.
        batches, inputs, forward: as for `calibrate`, passed over once.
        path: the HTML file; the figures get the same name with the ending .json. Folders above it are made.
        metric: called as metric(model), larger is better; measured in float and quantized.
        results: what `verify_onnx` and `fakequant.ptq.improve` returned for this model, to show it too.
        comparison: what `compare` returned, or the path of the rows that it wrote, for a curve over bits per weight.
        advise: whether to try changes of the model, which is as it was afterwards.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the model has no quantizers, or there is no batch; or the file of a comparison holds no rows.
        CalibrationError: an input is not calibrated, or the model failed on a batch.
        OutputError: the file cannot be written; raised before the work.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> with TemporaryDirectory() as folder:
    ...     page = report(model, [torch.ones(1, 4)], f"{folder}/report.html").read_text()
    >>> "worst layer" in page
    True
    """
    check_model(model, "report", "report(model, batches, 'report.html')")
    check_metric(metric, "report")
    refuse_sharded(model, "report on", offloading=False)
    check_path(path, "report(model, batches, 'report.html')")
    target = writable_file(path)
    curve, curve_metric = ([], "") if comparison is None else curve_of(comparison)
    measured = measure(model, batches, forward=Batches(batches, "report", inputs=inputs, forward=forward).call)
    given = list(results)
    missing = {
        Section.ACCURACY: "Give metric= to fakequant.report: a function of the model, larger is better.",
        Section.SIZES: "Only files are listed here; the first screen has the size of the weights.",
        Section.LEFT: "fq.unquantized(model, example) lists the operations.",
    }
    data = ReportData(
        type(model).__name__,
        metric=_name(metric),
        accuracy=[] if metric is None else _accuracy(model, metric),
        layers=measured.layers,
        alone_on=measured.alone_on,
        distributions=measured.distributions,
        channels=measured.channels,
        curve=curve,
        curve_metric=curve_metric,
        improvement=[row for found in given if isinstance(found, Improvement) for row in improved(found)],
        verifications=[verification(Path(f.path).name, f) for f in given if isinstance(f, VerifyReport)],
        environment=environment(),
        missing=missing,
    )
    if advise:
        data = advised(model, data, measured, metric, inputs=inputs, forward=forward)
    data = with_advice(data)
    write_results(target.with_suffix(".json"), data)
    return write_report(target, data)


def _name(metric: Metric | None) -> str:
    name = getattr(metric, "__name__", "<none>")
    return "metric(model)" if name.startswith("<") else name


def _accuracy(model: nn.Module, metric: Metric) -> list[Accuracy]:
    with evaluating(model), torch.no_grad():
        with disabled(model):
            before = value_of(metric, model)
        return [Accuracy("float", "", before), Accuracy("quantized", "", value_of(metric, model))]


def report_pair(first: str | os.PathLike[str], second: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write a page with two runs side by side.

    Args:
        first, second: pages that `report` wrote, or folders of `fakequant quantize`.
        path: the HTML file.

    Raises:
        OutputError: one of them cannot be read, or the page cannot be written.
    """
    target = writable_file(path)
    return write_page(target, render_pair(read_results(Path(first)), read_results(Path(second))))
