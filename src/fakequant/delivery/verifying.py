"""Verify a delivered file: compare its codes, and the outputs of the programs that load it, with the model's."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fakequant.data.arguments import check_model
from fakequant.data.batches import Inputs, refuse_tensor, run_batch, track
from fakequant.delivery.format import LoadedFile, decoded, format_of, without_quantizers
from fakequant.errors import VerificationError
from fakequant.export.verdict import Row, VerifyReport, add_rows, differing_bits
from fakequant.files import check_path
from fakequant.model.state.snapshots import QuantizedState, snapshot
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.model.weights import evaluating
from fakequant.nn.quantizer import Kind, Mode, quantizers
from fakequant.nn.ranges import GLOBAL_SCALE
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats.floats import Format, lowest_of, patterns_of

_CALL = "verify_delivery('folder', model, batches)"


@dataclass
class DeliveryReport(VerifyReport):
    """The result of `verify_delivery`; prints as a table, one row for each weight.

    A row counts the differing codes, scales and zero points of the file, and values in every program that loads it.

    Attributes:
        far: the outputs that differ from the model's outputs by more than the order of sums explains.
        failed: the errors of programs that do not load or run the file, one sentence each.
    """

    far: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether programs load the file, all codes and values are equal, and outputs are within their tolerance."""
        return self.exact and not self.far and not self.failed

    @property
    def faults(self) -> list[str]:
        far = (f"The outputs of {name} are not those of the model." for name in self.far)
        return [*super().faults, *self.failed, *far]


@accepts_wrapped_model
def verify_delivery(
    path: str | os.PathLike[str],
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    inputs: Inputs | None = None,
    progress: bool | None = None,
) -> DeliveryReport:
    """Compare a delivered file with its model: codes, scales and float tensors in the file, and weights and outputs in
    the programs that load the file, as far as they are installed.

    Args:
        path: the result of `deliver`.
        model: the prepared model that was delivered.
        batches: the inputs of the programs and of the model; by default the few tokens in `dummy_inputs` of a model of
            transformers. Without either, outputs are not compared, and the report says so.
        inputs, progress: as for `calibrate`.

    Raises:
        CheckpointError: the file is damaged, or of an unknown format.
        VerificationError: the file is of another model, or `batches` is empty.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "int4_group32")
    >>> with TemporaryDirectory() as folder:
    ...     report = verify_delivery(deliver(model, folder, "compressed-tensors"), model)
    >>> report.passed, report.differing
    (True, 0)
    """
    check_path(path, _CALL, VerificationError)
    check_model(model, "verify_delivery", _CALL, VerificationError)
    if batches is not None:
        refuse_tensor(batches, "verify_delivery")
    source, kept = Path(path), None if batches is None else list(batches)
    format = format_of(source)
    live, stored = snapshot(model), decoded(format, source, model)
    report = DeliveryReport(str(path), "given", [], format.name, "this package's reader")
    if kept is None:
        kept, report.inputs = _dummy_batches(model)
    weights = {path for path, one in quantizers(model).items() if one.kind is Kind.WEIGHT}
    _compare_states(report, live, stored, weights, progress)
    if missing := [name for name in format.packages if find_spec(name) is None]:
        report.not_run.append(f"Not loaded by another program: {' and '.join(missing)} not installed.")
        return report
    engines = None
    while True:  # up to the first program that does not load the file
        engine = None
        with _failing(report, f"Not loaded by a program of {format.name} beside {report.runtime}"):
            engines = engines or iter(format.engines(source, model))
            engine = next(engines, None)
        if engine is None:
            break
        report.runtime += f", {engine.name}"
        report.not_run += engine.notes
        with _failing(report, f"The weights are not read by {engine.name}"):
            for row in report.rows:
                if (name := row.quantizer) in live.weights and name in engine.weights:
                    ours = live.weights[name].values()
                    # 0.0 is added because gguf has no -0.0, which moves no product; codes are compared with their sign.
                    _count(row, [ours + 0.0], [engine.weights[name].to(ours.dtype) + 0.0])
        if kept and engine.model is not None:
            _compare_outputs(report, model, engine, track(kept, f"running {engine.name}", len(kept), progress), inputs)
        elif engine.model is not None:
            report.not_run.append(
                f"Outputs of {engine.name} are not compared: {report.inputs}; give batches of inputs."
            )
    report.batches = len(kept or ())
    return report


def _dummy_batches(model: nn.Module) -> tuple[list[Any], str]:
    """The `dummy_inputs` of a model of transformers as a batch, and a text on their source; else [] and the reason."""
    batch = getattr(model, "dummy_inputs", None)
    if not isinstance(batch, Mapping):
        return [], "the model has no inputs of its own"
    try:
        batch = {name: x.to(next(model.parameters()).device) for name, x in batch.items()}
        with evaluating(model), torch.no_grad():
            model(**batch)
    except Exception as error:  # for example, a model of images, or with fewer tokens
        return [], f"the model does not run on its dummy_inputs ({type(error).__name__}: {error})"
    return [batch], "dummy_inputs"


@contextmanager
def _failing(report: DeliveryReport, what: str) -> Iterator[None]:
    """A context that adds an error of another program to the report, so that earlier comparisons are not lost."""
    try:
        yield
    except Exception as error:  # other programs raise any error: transformers OSError, KeyError, RuntimeError
        report.failed.append(f"{what}: {type(error).__name__}: {error}")


def _compare_states(
    report: DeliveryReport, live: QuantizedState, stored: QuantizedState, weights: set[str], progress: bool | None
) -> None:
    """Add a row for each weight, for the ranges of activations, for the float tensors, and for each missing tensor.

    `weights` are the paths of the quantizers of weights.
    """
    names = [*live.weights, *(one for one in stored.weights if one not in live.weights)]
    for name in track(names, "comparing weights", len(names), progress):
        if name in live.weights and name in stored.weights:
            row = Row(name, str(live.weights[name].spec), "codes")
            _count(row, _numbers(live.weights[name]), _numbers(stored.weights[name]))
        elif name in live.weights and name in stored.tensors:  # the format stores the values of the codes
            row = Row(name, str(live.weights[name].spec), "values")
            _count(row, [live.weights[name].values()], [stored.tensors[name]])
        else:
            row = _Alone(name, "", "", intact=False)
        report.rows.append(row)
    ranges, floats = Row("ranges of activations", "", "activation"), Row("float tensors", "", "in float")
    ours, theirs = (
        {p: one.tensor for p, _, one in state.quantizers() if p not in weights and one.mode is Mode.QUANTIZE}
        for state in (live, stored)
    )
    alone = list[str]()
    for path in {**ours, **theirs}:
        key = f"{path}.scale"
        if path not in ours or path not in theirs or ours[path].dynamic is not theirs[path].dynamic:
            alone.append(path)
        elif key in live.tensors and key in stored.tensors:
            pairs = (live, ours[path]), (stored, theirs[path])
            points = (
                x.tensors.get(f"{path}.zero_point", torch.zeros(1, device="cpu")) - _middle(y.spec.format)
                for x, y in pairs
            )
            _count(ranges, *([x.tensors[key].flatten(), p.flatten()] for (x, _), p in zip(pairs, points, strict=True)))
        elif key in live.tensors or key in stored.tensors:
            alone.append(key)
        key = f"{path}.{GLOBAL_SCALE}"
        if key in live.tensors and key in stored.tensors:
            _count(ranges, [live.tensors[key]], [stored.tensors[key]])
        elif key in live.tensors or key in stored.tensors:
            alone.append(key)
    report.rows += [_Alone(name, "", "", intact=False) for name in alone]
    report.rows += [ranges] if ranges.elements else []
    own = (path for state in (live, stored) for path, _, _ in state.quantizers())
    coded = {*live.weights, *stored.weights}
    for name in without_quantizers(dict.fromkeys([*live.tensors, *stored.tensors]), own):
        if name in coded:
            continue
        if name in live.tensors and (held := stored.shared.get(name, name)) in stored.tensors:
            _count(floats, [live.tensors[name]], [stored.tensors[held]])
        elif name not in live.shared:  # a tied tensor that the file has twice
            report.rows.append(_Alone(name, "", "", intact=False))
    report.rows += [floats] if floats.elements else []


class _Alone(Row):
    """A row for a tensor or quantizer that only the file or only the model has."""

    @property
    def note(self) -> str:
        return "only in the file, or only in the model"


def _count(row: Row, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Add the number of differing values to a row; if two shapes differ, all values count."""
    for one, two in zip(ours, theirs, strict=True):
        one, two = one.cpu(), two.cpu()  # a model may be on another device than a file
        row.elements += one.numel()
        if one.shape != two.shape:
            row.differing += one.numel()
        elif not one.is_floating_point() or one.element_size() == 1 or one.dtype is not two.dtype:
            row.differing += int((one != two).sum())
        else:
            row.differing += differing_bits(one.detach(), two)


def _numbers(weight: WeightCodes) -> list[Tensor]:
    """The codes, scales and zero points; integer codes are made signed, because formats may store them unsigned."""
    point, format = weight.zero_point, weight.spec.format
    point = torch.zeros_like(weight.scale) if point is None else point.reshape(weight.scale.shape)
    middle = 0 if weight.spec.offset is not None else _middle(format)
    return [patterns_of(weight.codes, format) + lowest_of(format) - _middle(format), weight.scale, point - middle]


def _middle(format: Format) -> int:
    """For unsigned integer formats the code that stands for the signed code 0, else 0."""
    return 1 << format.bits - 1 if format.has_zero_point and not format.signed else 0


def _compare_outputs(
    report: DeliveryReport, model: nn.Module, engine: LoadedFile, batches: Iterable[Any], inputs: Inputs | None
) -> None:
    rows: list[Any] = []
    for batch in batches:
        found = None
        with evaluating(model), torch.no_grad():
            with engine.as_it(model):
                expected = _tensors(run_batch(model, batch, inputs=inputs))
            with _failing(report, f"Not run by {engine.name}"):
                here = pytree.tree_map_only(Tensor, Tensor.cpu, batch)
                found = _tensors(run_batch(engine.model, here, inputs=inputs))
        if found is None:
            break
        if [one.shape for one in expected] != [one.shape for one in found]:
            raise VerificationError(
                f"{engine.name} gives outputs of the shapes {[list(one.shape) for one in found]}, but the model gives "
                f"{[list(one.shape) for one in expected]}; pass the model that was delivered"
            )
        names = [f"output {number} in {engine.name}" for number in range(len(found))]
        add_rows(rows, names, found, expected, None)
        for row, one in zip(rows, expected, strict=True):
            peak = one.double().abs().max().item() if one.numel() else 0.0
            gap = math.sqrt(row.noise / max(row.elements, 1)) if engine.on_average else row.max_abs
            if gap > engine.tolerance * peak and row.name not in report.far:
                report.far.append(row.name)
    report.outputs += rows


def _tensors(result: Any) -> list[Tensor]:
    """The float outputs of a call, on the CPU; if the result has "logits", only the logits [rows, vocabulary]."""
    if isinstance(result, Mapping) and "logits" in result:
        return [result["logits"].flatten(0, -2).cpu()]
    return [one.cpu() for one in pytree.tree_leaves(result) if isinstance(one, Tensor) and one.is_floating_point()]
