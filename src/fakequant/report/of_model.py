"""The report of a model in one call, with the next step, which was tried, and the code for it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant.data.arguments import Metric, check_metric, check_model
from fakequant.data.arguments import measured as value_of
from fakequant.data.batches import Batches, Forward, Inputs, example_arguments
from fakequant.distributed import refuse_sharded
from fakequant.errors import ConfigError
from fakequant.export import VerifyReport
from fakequant.files import check_path, read_whole, writable_file
from fakequant.model.engine import known_engines
from fakequant.model.summary import unquantized
from fakequant.model.weights import disabled, evaluating
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ops.dispatch import backends
from fakequant.ops.products import convolution_unavailable
from fakequant.ptq.comparison import Comparison
from fakequant.ptq.judging import Improvement
from fakequant.ptq.next_step import USUAL, AdviceContext, next_step
from fakequant.ptq.trial import read_rows
from fakequant.report.data import Accuracy, ReportData, Section, Size, checked_in, read_results, write_results
from fakequant.report.measure import Measured, measure
from fakequant.report.page import render_pair, write_page, write_report
from fakequant.report.sections import BAD_LOSS, FAIR, ranked

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
    found = []
    for name, path in files.items():
        parts = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        found.append(Size(name, sum(file.stat().st_size for file in parts), float_bytes.get(name)))
    return found


def environment() -> dict[str, str]:
    """Return the versions, the machine, the compiler, and for each backend whether it works or why it does not.

    >>> environment()["backend reference"]
    'available'
    """
    values = {"python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    for package in ("fakequant", *_PACKAGES):
        try:
            values[package] = version(package)
        except PackageNotFoundError:
            values[package] = "not installed" if package != "fakequant" else "from source, not installed"
    for engine in dict.fromkeys(known_engines().values()):
        found = list[str]()
        for package in engine.packages:
            with suppress(PackageNotFoundError):
                found.append(f"{package} {version(package)}")
        if engine.packages and not found:
            found.append(f"not installed: pip install {engine.packages[0]}")
        values[f"engine {engine.name}"] = ", ".join(found) or "no Python package runs its files"
    reasons = {f"backend {backend.name}": backend.unavailable() for backend in backends()}
    # Without VNNI, ONNX Runtime's integer sums saturate, too.
    reasons["integer convolutions"] = convolution_unavailable("cpu")
    values |= {name: f"not available: {reason}" if reason else "available" for name, reason in reasons.items()}
    compilers = [*([os.environ["CXX"]] if "CXX" in os.environ else []), *_COMPILERS]
    values["C++ compiler"] = next((path for name in compilers if (path := shutil.which(name))), "none found")
    values["CPU"] = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    values["threads"] = str(torch.get_num_threads())
    values["GPU"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch can use"
    return values


def comparison_of(comparison: Comparison | str | os.PathLike[str]) -> Comparison:
    """A Comparison: the argument, or the content of a file that `fakequant.compare` wrote.

    Raises:
        ConfigError: the file cannot be read or holds no rows.
    """
    if isinstance(comparison, Comparison):
        return comparison
    path, wanted = Path(comparison), "give the path= of fakequant.compare, or what it returned"
    try:
        lines = read_whole(path).decode("utf-8", "replace").splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {wanted}") from error
    found = Comparison()
    if lines and lines[0].startswith('{"fingerprint"'):
        whole = (line for line in lines[1:] if line.endswith("\n"))  # a kill may cut off the last line
        found = Comparison(read_rows(path, whole), negated='"negated": true' in lines[0])
    if not found.rows:
        raise ConfigError(f"{path} holds no rows of a comparison; {wanted}")
    return found


@accepts_wrapped_model
def report(  # noqa: PLR0913  all but the first four by name
    model: nn.Module,
    batches: Iterable[Any],
    path: str | os.PathLike[str],
    metric: Metric | None = None,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    progress: bool | None = None,
    results: Iterable[VerifyReport | Improvement] = (),
    comparison: Comparison | str | os.PathLike[str] | None = None,
    advise: bool = True,
) -> Path:
    """Measure a model and write its report as one HTML file, and the figures as JSON beside it.

    Each layer is also measured alone. This takes about half a run of the model for each layer. If the first batch can
    be cut, its first examples are used, with at least 65,536 values of the output. The page says how many. If
    `set_execution` has set an engine, all figures are computed with the engine's arithmetic.

    The page advises a change that was tried: made with every second of the first eight batches, and judged by the error
    of the output on the other batches; a single batch makes and judges. A change that lowers the error must do so with
    the two parts exchanged, too. It is compared with the model calibrated by its method on the same batches. The page
    shows the change, with the figures before and after, only if it helps; see `ptq/next_step.py`. If little is lost,
    the trials take a run or two of these batches, else about two dozen. If ranges and presets do not halve the error,
    the trials also take once or twice the time of `improve(..., "fast")`.

    Args:
        model: a calibrated model.
        batches, inputs, forward, progress: as for `calibrate`; the batches are passed over once.
        path: the HTML file; the figures get the same name with the ending .json. Folders above it are made.
        metric: called as metric(model), larger is better; measured in float and quantized.
        results: results of `verify_onnx` and `fakequant.ptq.improve` for this model, which the page then shows, too.
        comparison: the result of `compare`, or the path of its rows, for a curve over bits per weight.
        advise: whether to try changes of the model, which is restored afterwards.

    Returns:
        The path of the page.

    Raises:
        ConfigError: the model has no quantizers; there is no batch; or the file of a comparison holds no rows.
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
    curve = None if comparison is None else comparison_of(comparison)
    call = Batches(batches, "report", inputs=inputs, forward=forward).call
    measured = measure(model, batches, forward=call, progress=progress)
    accuracy, name, given = list[Accuracy](), getattr(metric, "__name__", "<none>"), list(results)
    if metric is not None:
        with evaluating(model), torch.no_grad():
            with disabled(model):
                accuracy.append(Accuracy("float", "", value_of(metric, model)))
            accuracy.append(Accuracy("quantized", "", value_of(metric, model)))
    missing = {
        Section.ACCURACY: "Give metric= to fakequant.report: a function of the model, larger is better.",
        Section.SIZES: "Only files are listed here; the first screen has the size of the weights.",
        Section.LEFT: "fq.unquantized(model, example) lists the operations.",
    }
    data = ReportData(
        type(model).__name__,
        metric="metric(model)" if name.startswith("<") else name,
        accuracy=accuracy,
        layers=measured.layers,
        alone_on=measured.alone_on,
        distributions=measured.distributions,
        channels=measured.channels,
        curve=curve,
        improvement=[row for found in given if isinstance(found, Improvement) for row in found.layers],
        verifications=[found for found in given if isinstance(found, VerifyReport)],
        environment=environment(),
        missing=missing,
    )
    if advise:
        data = advised(model, data, measured, metric, inputs=inputs, forward=forward)
    data = with_advice(data)
    write_results(target.with_suffix(".json"), data)
    return write_report(target, data)


def report_pair(first: str | os.PathLike[str], second: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write a page with two runs side by side.

    Args:
        first, second: pages that `report` wrote, or folders of `fakequant quantize`.
        path: the HTML file.

    Raises:
        OutputError: a page or folder cannot be read, or the page cannot be written.
    """
    target = writable_file(path)
    return write_page(target, render_pair(read_results(Path(first)), read_results(Path(second))))


def advised(
    model: nn.Module,
    data: ReportData,
    measured: Measured,
    metric: Metric | None = None,
    *,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    known: AdviceContext = USUAL,
) -> ReportData:
    """The report of a model with the next step, which is tried on the model first; see `ptq/next_step.py`.

    Args:
        model: a calibrated model; it is restored afterwards.
        data: the report so far.
        measured: the measurements of the model's layers.
        metric: the metric of the last row of `data.accuracy`, called as metric(model).
        inputs, forward: as for `calibrate`.
        known: the command and the target, for a page that a command writes.
    """
    if data.next or not all(check.passed for check in data.verifications):
        return with_advice(data)
    # Without inputs=, only the model knows which items of a tuple it takes.
    first = next(iter(measured.batches))
    known_call = forward is None and (inputs is not None or not isinstance(first, (tuple, list)))
    given = {name: value for name, value in (("inputs", inputs), ("forward", forward)) if value is not None}
    known = replace(
        known,
        lost=data.lost if len(data.accuracy) > 1 else None,
        worst=measured.worst,
        metric=metric,
        score=data.accuracy[data.reported].value if metric is not None and data.accuracy else None,
        improved=bool(data.improvement),
        arguments="".join(f", {name}={value if isinstance(value, int) else name}" for name, value in given.items()),
        call=example_arguments(first, inputs) if known_call else None,
    )
    return with_advice(replace(data, advice=next_step(model, measured.batches, known)))


def with_advice(data: ReportData) -> ReportData:
    """The report with the next step that its `advice` suggests; a report that has a next step is not changed."""
    if data.next:
        return data
    text, code = _next(data)
    return replace(data, next=text, code=code)


def _wrong(check: VerifyReport) -> str:
    """A sentence on the fault of a file, or of the program that runs it, with the cure; "" if the file passed."""
    title = Path(check.path).name
    if not check.exact:
        names = [row.name or "its root" for row in checked_in(check) if row.differing or row.fault]
        place = f" at {names[0]}" if names else ""
        return (
            f"{title} computes other values than the model{place}: export it again, and verify it before you deploy it."
        )
    if check.passed:
        return ""
    if check.as_deployed is not False:
        return f"{title} computes the same as the model, but not in every program: see Verification."
    cure = "see Verification; no setting that was tried helps"
    cure = f"run it with {check.restored_by}" if check.restored_by is not None else cure
    return f"{title} computes the same as the model, but not in ONNX Runtime's default session: {cure}."


def _next(data: ReportData) -> tuple[str, str]:
    """The next step as text, and its code or ""."""
    export = "" if data.source else _EXPORT  # a command exports by itself
    if said := next(filter(None, map(_wrong, data.verifications)), ""):
        return said, export
    advice = data.advice
    if advice is not None and advice.best is not None:
        best = advice.tried[advice.best]
        found = [f"the error of the output goes from {advice.error:.2e} to {best.after:.2e} of its energy"]
        if best.bytes != advice.bytes:
            found.append(f"the weights from {advice.bytes:,} to {best.bytes:,} bytes")
        if best.metric is not None and advice.metric is not None:
            sign = -1 if any(row.negated for row in data.accuracy) else 1
            found.append(f"the metric from {sign * advice.metric:.6g} to {sign * best.metric:.6g}")
        return f"{best.what}: {', '.join(found)}, {advice.judged}.", best.code
    if advice is not None and not advice.little:
        return (
            f"The error of the output is {advice.error:.2e} of its energy, and no change that was tried lowers it "
            "clearly. What is left, and was not tried, is training, or more bits.",
            "",
        )
    worst = ranked(data)
    if advice is None and worst and (worst[0].worst < FAIR or data.lost > BAD_LOSS):
        what = "No change was tried: advise=False was given, or the model returns no floats."
        return f"{worst[0].name} hurts most. {what}", ""
    if not data.verifications:
        said = "the file was not verified, see Verification" if data.source else "export the model and verify the file"
        return f"Nothing stands out: {said}.", export
    if not data.accuracy:
        said = "Nothing stands out, but your metric was not measured: measure it before you deploy the file."
        return f"{said} {data.missing.get(Section.ACCURACY, '')}", ""
    return "Nothing stands out: the file is ready to be deployed.", ""


_EXPORT = 'fq.export_onnx(model, example, "model.onnx")\nprint(fq.verify_onnx("model.onnx", model, batches))'
