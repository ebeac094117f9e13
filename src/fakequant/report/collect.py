"""From models, calibrators and files to the plain values that a report shows."""

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
    """What calibrators saw and which ranges they chose, one distribution per quantizer.

    Args:
        calibrators: what `fakequant.calibrate` returned, by method. For a quantizer the counts are taken from the
            first method that keeps a histogram; a quantizer that none has a histogram for is left out.
        bins: how many bars the plot will have.
    """
    names = dict.fromkeys(name for by_name in calibrators.values() for name in by_name)
    found = []
    for name in names:
        own = {method: by_name[name] for method, by_name in calibrators.items() if name in by_name}
        shown = _distribution(name, own, bins)
        if shown is not None:
            found.append(shown)
    return found


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
    """The operations of prepared models that compute on unquantized tensors, as text, products first.

    Args:
        models: by the name that the report shows.
        example: an input, a tuple or a dict of inputs, with which the models are traced.
    """
    found = {}
    for name, model in models.items():
        left = sorted(unquantized(model, example), key=lambda operation: not operation.is_product)
        found[name] = [str(operation) for operation in left]
    return found


def pictures(models: Mapping[str, nn.Module], example: Any) -> dict[str, str]:
    """The graphs of models in eval mode, as SVG images.

    Args:
        models: by the name that the report shows.
        example: an input, a tuple or a dict of inputs, with which the models are captured.
    """
    found = {}
    for name, model in models.items():
        with evaluating(model):
            found[name] = to_svg(capture(model, example))
    return found


def sizes(files: Mapping[str, Path], float_bytes: Mapping[str, int]) -> list[Size]:
    """The sizes of files and folders.

    Args:
        files: by the name that the report shows.
        float_bytes: what they would take in float32, for those where that is known.
    """
    return [Size(name, _bytes_of(path), float_bytes.get(name)) for name, path in files.items()]


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def environment() -> dict[str, str]:
    """Versions, machine, backends with the reason why one cannot serve, compiler, GPU, threads.

    >>> environment()["backend reference"]
    'serves'
    """
    found = {"python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    found["fakequant"] = _version("fakequant") or "from source, not installed"
    found |= {package: _version(package) or "not installed" for package in _PACKAGES}
    for backend in backends():
        reason = backend.unavailable()
        found[f"backend {backend.name}"] = "serves" if reason is None else f"cannot serve: {reason}"
    found["C++ compiler"] = _compiler()
    found["CPU"] = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    found["threads"] = str(torch.get_num_threads())
    found["GPU"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none that torch can use"
    return found


def _version(package: str) -> str | None:
    """That of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiler() -> str:
    names = [os.environ["CXX"], *_COMPILERS] if "CXX" in os.environ else list(_COMPILERS)
    return next((path for name in names if (path := shutil.which(name))), "none found")


def verification(title: str, report: VerifyReport) -> Verification:
    """The comparison of an exported model, as `fakequant.verify_onnx` found it.

    Args:
        title: which model.
        report: what `verify_onnx` returned.
    """
    nodes = [
        NodeCheck(
            row.quantizer, row.spec, row.elements, row.differing, "" if row.intact else "changed since the export"
        )
        for row in report.rows
    ]
    nodes += [NodeCheck(name, "", 0, 0, "of no quantizer that the file names") for name in report.uncovered]
    notes = [f"Compared in {report.runtime} on {report.batches} batches: {report.inputs}.", *report.not_run]
    notes += [f"The model's outputs against torch: {row}." for row in report.outputs]
    notes += [f"What ONNX Runtime's default optimisations change: {row}." for row in report.optimised]
    if report.optimised_error is not None:
        notes.append(
            f"ONNX Runtime fails with its default optimisations: {report.optimised_error}; {WITHOUT_OPTIMISATIONS}"
        )
    return Verification(title, nodes, notes, report.runtime)
