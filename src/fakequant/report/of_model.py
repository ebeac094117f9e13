"""The report of a model in one call."""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import Metric, check_metric, check_model
from fakequant.data.arguments import measured as value_of
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError
from fakequant.export import VerifyReport
from fakequant.export.verification.verdict import OPTIMISED_ERROR, OutputRow
from fakequant.files import check_path, read_whole, writable_file
from fakequant.model.analysis.summary import unquantized
from fakequant.model.weights import disabled, evaluating
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ops.dispatch import backends
from fakequant.ptq.comparison import Comparison
from fakequant.ptq.results import Improvement
from fakequant.ptq.trial import Compared, read_rows
from fakequant.report.advice import advised, with_advice
from fakequant.report.data import (
    Accuracy,
    Improved,
    NodeCheck,
    Point,
    ReportData,
    Section,
    Size,
    Verification,
    read_results,
    write_results,
)
from fakequant.report.html.page import render_pair, write_page, write_report
from fakequant.report.measure import measure

_PACKAGES = (
    *("torch", "numpy", "onnx", "onnxscript", "onnxruntime", "safetensors"),
    *("matplotlib", "rich", "typer", "scikit-learn", "triton"),
)
_COMPILERS = ("c++", "g++", "clang++", "cl")


def layers_left(models: Mapping[str, nn.Module], example: Any) -> dict[str, list[str]]:
    """List the operations of prepared models that compute on unquantized tensors, matrix products first.

    Args:
        models: the models by the name that the report shows.
        example: an input, a tuple or a dict of inputs, with which the models run.
    """
    return {
        name: [str(op) for op in sorted(unquantized(model, example), key=lambda op: not op.is_product)]
        for name, model in models.items()
    }


def sizes(files: Mapping[str, Path], float_bytes: Mapping[str, int]) -> list[Size]:
    """Return the sizes of files and folders.

    Args:
        files: the paths by the name that the report shows.
        float_bytes: the sizes with float32 weights, where known.
    """
    return [Size(name, _bytes_of(path), float_bytes.get(name)) for name, path in files.items()]


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def environment() -> dict[str, str]:
    """Return the versions, the machine, the compiler, and for each backend whether it works or why it does not.

    >>> environment()["backend reference"]
    'available'
    """
    values = {"python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    values["fakequant"] = _version("fakequant") or "from source, not installed"
    values |= {package: _version(package) or "not installed" for package in _PACKAGES}
    for backend in backends():
        reason = backend.unavailable()
        values[f"backend {backend.name}"] = "available" if reason is None else f"not available: {reason}"
    values["C++ compiler"] = _compiler()
    values["CPU"] = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    values["threads"] = str(torch.get_num_threads())
    values["GPU"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch can use"
    return values


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiler() -> str:
    names = [os.environ["CXX"], *_COMPILERS] if "CXX" in os.environ else list(_COMPILERS)
    return next((path for name in names if (path := shutil.which(name))), "none found")


def verification(title: str, report: VerifyReport) -> Verification:
    """Convert the result of `fakequant.verify_onnx` for a report.

    Args:
        title: the name of the model.
        report: the result of `verify_onnx`.
    """
    nodes = [NodeCheck(row.quantizer, row.spec, row.elements, row.differing, row.note) for row in report.rows]
    nodes += [NodeCheck(name, "", 0, 0, "belongs to no quantizer of the file") for name in report.uncovered]
    nodes += [NodeCheck(name, "", 0, 0, "is an input that the file does not read") for name in report.ignored]
    nodes += [NodeCheck(span.name, "", span.elements, 0, str(span)) for span in report.spans if not span.fits]
    source = "of calibration" if report.inputs == "given" else f"of {report.inputs}"
    notes = [f"Compared in {report.runtime} on {report.counted} {source}.", *report.not_run]
    notes += [f"Against torch: {_output(row)}" for row in report.outputs]
    notes += [f"By ONNX Runtime's default optimisations: {_output(row)}" for row in report.optimised]
    if report.optimised_error is not None:
        notes.append(f"ONNX Runtime fails with its default optimisations: {report.optimised_error}; {OPTIMISED_ERROR}")
    notes += report.deployment
    return Verification(title, nodes, notes, report.runtime, report.as_deployed, report.restored_by)


def _output(row: OutputRow) -> str:
    """What is said of one output of the model, in a sentence.

    Sums in another order round to another step, so that outputs may differ where every quantizer is exact.
    """
    if not row.differing:
        return f"{row.name} has the same bits in all {row.elements:,} values."
    size = (
        f"by at most {row.max_abs:.3g}" if row.steps is None else f"by at most {row.steps:.2g} of a quantization step"
    )
    same = ""
    if row.rows:
        same = f"; the largest value is at the same place in {row.same_argmax:,} of {row.rows:,} rows"
    return (
        f"{row.differing:,} of {row.elements:,} values of {row.name} differ, {size}, for sums in another order{same}."
    )


def improved(found: Improvement) -> list[Improved]:
    """Convert the result of `fakequant.ptq.improve` for a report; the largest remaining error comes first."""
    rows = [Improved(one.layer, one.before, one.after, one.note, one.steps) for one in found.layers]
    return sorted(rows, key=lambda row: -row.after)


DECIBELS = "signal over noise of the output, dB"


def curve_of(comparison: Comparison | str | os.PathLike[str]) -> tuple[list[Point], str]:
    """The points of a comparison and what they measure: "" for the metric of the report, else a name.

    Where a row has no metric, all rows show the error of the output in dB, which is larger for better ones. A row that
    failed becomes a point without a place, with its reason.

    Args:
        comparison: what `fakequant.compare` returned, or the path of the rows that it wrote.

    Raises:
        ConfigError: the file cannot be read or holds no rows.
    """
    found = comparison if isinstance(comparison, Comparison) else _read(Path(comparison))
    rows = found.rows
    with_metric = all(row.metric is not None for row in rows if not row.failed)
    return [_point(row, with_metric, found.negated) for row in rows], "" if with_metric else DECIBELS


def _point(row: Compared, with_metric: bool, negated: bool) -> Point:
    label = " ".join(filter(None, row.way))
    if row.failed:
        return Point(label, 0.0, -math.inf, row.failed)
    if with_metric and row.metric is not None:
        return Point(label, row.bits, row.metric, negated=negated)
    return Point(label, row.bits, -10 * math.log10(row.error) if row.error > 0 else math.inf)


def _read(path: Path) -> Comparison:
    wanted = "give the path= of fakequant.compare, or what it returned"
    try:
        lines = read_whole(path).decode("utf-8", "replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {wanted}") from error
    result = Comparison()
    if lines and lines[0].startswith('{"fingerprint"'):
        whole = (line for line in lines[1:] if line.endswith("\n"))  # a kill may cut off the last line
        result = Comparison(read_rows(path, whole), negated='"negated": true' in lines[0])
    if not result.rows:
        raise ConfigError(f"{path} holds no rows of a comparison; {wanted}")
    return result


@accepts_wrapped_model
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
    figures before and after, only where it helps; see `ptq/next_step.py`. Where little is lost that takes a
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
