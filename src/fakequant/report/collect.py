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

from fakequant.calibration import Calibrator
from fakequant.export import VerifyReport
from fakequant.export.verdict import WITHOUT_OPTIMISATIONS
from fakequant.ir import capture, to_svg
from fakequant.model.modes import evaluating
from fakequant.model.operations import unquantized
from fakequant.ops.dispatch import backends
from fakequant.report.data import Distribution, NodeCheck, Size, Verification

_PACKAGES = (
    *("torch", "numpy", "onnx", "onnxscript", "onnxruntime", "safetensors"),
    *("matplotlib", "rich", "typer", "scikit-learn", "triton"),
)
_COMPILERS = ("c++", "g++", "clang++", "cl")


def distributions(calibrators: Mapping[str, Mapping[str, Calibrator]], *, bins: int = 96) -> list[Distribution]:
    """Return the histogram and the chosen ranges of every quantizer.

    Args:
        calibrators: the results of `fakequant.calibrate`, by method. The counts of a quantizer come from the first
            method that keeps a histogram; a quantizer without any histogram is left out.
        bins: the number of bars in the plot.
    """
    names = dict.fromkeys(name for by_name in calibrators.values() for name in by_name)
    collected = []
    for name in names:
        own = {method: by_name[name] for method, by_name in calibrators.items() if name in by_name}
        distribution = _distribution(name, own, bins)
        if distribution is not None:
            collected.append(distribution)
    return collected


def _distribution(name: str, calibrators: Mapping[str, Calibrator], bins: int) -> Distribution | None:
    histogram = next((h for c in calibrators.values() if (h := c.histogram()) is not None), None)
    if histogram is None:
        return None
    lowest, highest = histogram.range.lo.min().double().item(), histogram.range.hi.max().double().item()
    if lowest == highest:
        return None
    edges, counts = histogram.line()
    centres = ((edges[:, 1:] + edges[:, :-1]) / 2).clamp(lowest, highest)
    index = ((centres - lowest) * (bins / (highest - lowest))).long().clamp(0, bins - 1)
    total = torch.zeros(bins, dtype=torch.int64).scatter_add_(0, index.reshape(-1).cpu(), counts.reshape(-1).cpu())
    ranges = {method: c.compute_range() for method, c in calibrators.items()}
    return Distribution(
        name,
        torch.linspace(lowest, highest, bins + 1, dtype=torch.float64).tolist(),
        total.tolist(),
        {method: (r.lo.min().item(), r.hi.max().item()) for method, r in ranges.items()},
        histogram.counts.shape[0],
    )


def layers_left(models: Mapping[str, nn.Module], example: Any) -> dict[str, list[str]]:
    """List the operations of prepared models that compute on unquantized tensors, matrix products first.

    Args:
        models: the models by the name that the report shows.
        example: an input, a tuple or a dict of inputs, with which the models are traced.
    """
    return {
        name: [str(op) for op in sorted(unquantized(model, example), key=lambda op: not op.is_product)]
        for name, model in models.items()
    }


def pictures(models: Mapping[str, nn.Module], example: Any) -> dict[str, str]:
    """Draw the graphs of models in eval mode as SVG images.

    Args:
        models: the models by the name that the report shows.
        example: an input, a tuple or a dict of inputs, with which the models are captured.
    """
    images = {}
    for name, model in models.items():
        with evaluating(model):
            images[name] = to_svg(capture(model, example))
    return images


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
    nodes = [
        NodeCheck(
            row.quantizer, row.spec, row.elements, row.differing, "" if row.intact else "changed since the export"
        )
        for row in report.rows
    ]
    nodes += [NodeCheck(name, "", 0, 0, "belongs to no quantizer of the file") for name in report.uncovered]
    notes = [f"Compared in {report.runtime} on {report.batches} batches: {report.inputs}.", *report.not_run]
    notes += [f"The model's outputs against torch: {row}." for row in report.outputs]
    notes += [f"Changed by ONNX Runtime's default optimisations: {row}." for row in report.optimised]
    if report.optimised_error is not None:
        notes.append(
            f"ONNX Runtime fails with its default optimisations: {report.optimised_error}; {WITHOUT_OPTIMISATIONS}"
        )
    return Verification(title, nodes, notes, report.runtime)
