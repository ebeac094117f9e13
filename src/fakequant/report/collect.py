"""Collect the plain values of a report from models, calibrators and files."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant.export import VerifyReport
from fakequant.export.verification.verdict import OPTIMISED_ERROR, OutputRow
from fakequant.model.analysis.operations import unquantized
from fakequant.ops.dispatch import backends
from fakequant.ptq.results import Improvement
from fakequant.report.data import Improved, NodeCheck, Size, Verification

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
