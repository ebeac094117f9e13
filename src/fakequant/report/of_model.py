"""The report of a model in one call."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
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
from fakequant.files import check_path, read_whole, writable_file
from fakequant.model.engine import known_engines
from fakequant.model.summary import unquantized
from fakequant.model.weights import disabled, evaluating
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.ops.dispatch import backends
from fakequant.ptq.comparison import Comparison
from fakequant.ptq.results import Improvement
from fakequant.ptq.trial import read_rows
from fakequant.report.advice import advised, with_advice
from fakequant.report.data import (
    Accuracy,
    ReportData,
    Section,
    Size,
    read_results,
    write_results,
)
from fakequant.report.measure import measure
from fakequant.report.page import render_pair, write_page, write_report

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


def _installed(packages: Sequence[str]) -> str:
    """The distributions that are installed, with their versions."""
    found = []
    for package in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found) or f"not installed: pip install {packages[0]}"


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
        if engine.packages:
            values[f"engine {engine.name}"] = _installed(engine.packages)
    for backend in backends():
        reason = backend.unavailable()
        values[f"backend {backend.name}"] = "available" if reason is None else f"not available: {reason}"
    compilers = [*([os.environ["CXX"]] if "CXX" in os.environ else []), *_COMPILERS]
    values["C++ compiler"] = next((path for name in compilers if (path := shutil.which(name))), "none found")
    values["CPU"] = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    values["threads"] = str(torch.get_num_threads())
    values["GPU"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch can use"
    return values


def comparison_of(comparison: Comparison | str | os.PathLike[str]) -> Comparison:
    """What `fakequant.compare` returned, or the rows that it wrote to a path.

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
        batches, inputs, forward, progress: as for `calibrate`; the batches are passed over once.
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
        OutputError: one of them cannot be read, or the page cannot be written.
    """
    target = writable_file(path)
    return write_page(target, render_pair(read_results(Path(first)), read_results(Path(second))))
