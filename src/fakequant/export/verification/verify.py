"""Verify an exported file: every quantizer bit for bit, the model's outputs in quantization steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fakequant.data.again import state_before
from fakequant.data.arguments import check_model
from fakequant.data.batches import Inputs, refuse_tensor, run_batch, select_inputs
from fakequant.errors import VerificationError
from fakequant.export.inputs import (
    arguments,
    depends_on,
    known_arguments,
    on_device_of,
    random_batch,
    tensors_of,
    unread_inputs,
)
from fakequant.export.packages import require
from fakequant.export.record import InputRecord, read
from fakequant.export.style import Style
from fakequant.export.verification.check import SiteCheck, Source
from fakequant.export.verification.coverage import uncovered_nodes
from fakequant.export.verification.deployed import Deployed
from fakequant.export.verification.evaluator import Evaluator
from fakequant.export.verification.pieces import Pieces
from fakequant.export.verification.runtime import Session
from fakequant.export.verification.spans import Spans, Values, outputs_of
from fakequant.export.verification.verdict import VerifyReport, add_rows
from fakequant.files import check_path
from fakequant.model.modes import evaluating
from fakequant.model.run.tracing import separate
from fakequant.nn.ranges.by_value import bins_of_call
from fakequant.nn.wrappers import unwrapped
from fakequant.restore import Restore, restore_after

if TYPE_CHECKING:
    from onnx import ModelProto

_CALL = "verify_onnx('model.onnx', model, batches)"


def verify_onnx(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    *,
    inputs: Inputs | None = None,
) -> VerifyReport:
    """Run an exported file and compare it with torch.

    Every quantizer is compared bit for bit, on the input that ONNX Runtime computes for it with its optimisations off.
    What quantizers and outputs get is compared with what torch computes from the results that the quantizers have in
    the file: by more than rounding, it differs only if the file computes something else. The outputs after all layers
    are reported in quantization steps, because sums in another order may round to another step. A separate run reports
    the changes from ONNX Runtime's default optimisations.

    A file in the style "standard" or "trt" that ONNX Runtime cannot load runs in onnx's ReferenceEvaluator: standard
    nodes as the standard defines them, TensorRT's nodes as its documentation describes them. The report says so.

    Args:
        path: a file that `export_onnx` wrote.
        model: the model that was exported, on any device. Its scales, weights and results are compared with the file;
            without it the file is only checked for consistency. Afterwards it is as before.
        batches: as for `calibrate`; by default one batch of random numbers, zeros and outliers in the shapes of the
            example.
        inputs: which part of a batch the model gets, as for `calibrate`.

    Raises:
        VerificationError: the file is damaged, cannot be run, belongs to another model, or fakequant did not write it.
        ExportError: onnx or onnxruntime is not installed.

    >>> from tempfile import TemporaryDirectory
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), "INT8_WEIGHT_ONLY")
    >>> with TemporaryDirectory() as folder:
    ...     written = fq.export_onnx(model, torch.ones(3, 4), f"{folder}/model.onnx")
    ...     report = verify_onnx(written.path, model)
    >>> report.exact, report.differing
    (True, 0)
    """
    require("onnx", "onnxruntime")
    check_path(path, _CALL, VerificationError)
    if model is not None:
        check_model(model, "verify_onnx", _CALL, VerificationError)
        with unwrapped(model) as inner, restore_after(state_before(inner)):
            return _verified(path, inner, batches, inputs)
    return _verified(path, None, batches, inputs)


def _verified(
    path: str | os.PathLike[str], model: nn.Module | None, batches: Iterable[Any] | None, inputs: Inputs | None
) -> VerifyReport:
    if batches is not None:
        refuse_tensor(batches, "verify_onnx")
    with _named(path):
        proto = load_exported(Path(path))
        record = read(proto)
        source = Source(proto, model)
        checks = [SiteCheck(source, site) for site in record.sites]
        chosen = "random numbers in the shapes of the example" if batches is None else "given"
        report = VerifyReport(str(path), chosen, [check.row for check in checks], record.style.value)
        report.uncovered = uncovered_nodes(proto, record.sites)
        report.unread = unread_inputs(proto)
        plain = _runtime(proto, [check.watched for check in checks], record.style, report)
        step = next((check.step for check in reversed(checks) if check.step is not None), None)
        deployed = Deployed(proto, checks, report, step) if not isinstance(plain.runtime, Evaluator) else None
        spans = (
            None if model is None else Spans(proto, checks, model, [one.state for one in record.inputs if one.state])
        )
        if batches is None and model is not None:
            _draw_state(model, record.inputs)
        for batch in _batches(
            batches, inputs, model, lambda: random_batch(arguments(record.inputs, model), proto.ByteSize())
        ):
            given = _Batch(batch if report.unread else separate(batch), record.inputs, model)
            if spans is None:
                values = _alone(plain.run(given.inputs), checks)
            else:
                values = _beside(spans, given, plain, report, step)
            if deployed is not None:
                deployed.add(values, given.inputs)
            report.batches += 1
        if not report.batches:
            raise VerificationError("batches is empty; pass at least one batch, or None for random numbers")
        report.spans = [] if spans is None else spans.found()
        if deployed is not None:
            deployed.finish()
    return report


def _batches(
    batches: Iterable[Any] | None, inputs: Inputs | None, model: nn.Module | None, drawn: Callable[[], Any]
) -> Iterator[Any]:
    """The arguments of the model, from the batches that were given, or random ones."""
    if batches is None:
        yield on_device_of(model, drawn())
    for batch in () if batches is None else batches:
        yield batch if inputs is None else select_inputs(batch, inputs)


def _alone(values: Values, checks: Sequence[SiteCheck]) -> Mapping[str, Tensor]:
    """Check a file without its model; returns its last tensors."""
    last: Mapping[str, Tensor] = {}
    for last, indices in values:
        for index in indices:
            checks[index].compare(last)
    return last


@torch.no_grad()
def _draw_state(model: nn.Module, records: list[InputRecord]) -> None:
    """Give the state of a model other values than those at its start, which are often 0: these hide what reads it."""
    generator = torch.Generator().manual_seed(len(records))
    held = dict(model.named_buffers())  # of another model it may lack some, which is refused later
    for buffer in [held[record.state] for record in records if record.state in held]:
        if buffer.is_floating_point() and buffer.numel():
            size = max(float(buffer.abs().amax()), 1.0)
            buffer.add_(torch.rand(buffer.shape, generator=generator).to(buffer) * size)


class _Batch:
    """A batch, and its tensors and the buffers of the model as inputs of the file."""

    def __init__(self, batch: Any, records: list[InputRecord], model: nn.Module | None) -> None:
        own = arguments(records, model)
        self.values, self._known = batch, known_arguments(batch, own)
        self.inputs = tensors_of(batch, own) | {
            record.name: model.get_buffer(record.state).detach().clone()
            for record in records
            if model is not None and record.state is not None
        }

    def run(self, model: nn.Module, values: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
        """Call a model with changed copies of values of the batch: a forward may write into its inputs."""
        copies: dict[int, Tensor] = {}  # a tensor that occurs twice stays one
        own = pytree.tree_map_only(Tensor, lambda x: copies.setdefault(id(x), change(x.detach().clone())), values)
        return run_batch(model, own, known=self._known)


def _beside(
    spans: Spans, batch: _Batch, plain: Pieces, report: VerifyReport, step: float | None
) -> Mapping[str, Tensor]:
    """Compare a file with its model for one batch; returns the last tensors of the file."""
    model = spans.model
    before = state_before(model)
    values = spans.add(
        lambda change: batch.run(model, batch.values, change),
        lambda: plain.run(batch.inputs),
        bins_of_call(model, lambda: batch.run(model, batch.values)),
    )
    for name in [] if report.batches else report.unread:
        place = [*batch.inputs].index(name)
        if depends_on(lambda values: _outputs(model, batch, values, before, spans.state), batch.values, place):
            report.ignored.append(name)
    found = [values[name] for name in plain.outputs]
    add_rows(report.outputs, plain.outputs, found, _expected(spans, batch, found, before), step)
    return values


def _outputs(model: nn.Module, batch: _Batch, values: Any, before: Restore, state: Sequence[str]) -> list[Tensor]:
    """The outputs of the torch model for values of a batch, from the state that it had."""
    before()
    with evaluating(model), torch.no_grad():
        return [x.detach().cpu() for x in outputs_of(model, batch.run(model, values), state)]


def _runtime(model: ModelProto, watched: list[list[str]], style: Style, report: VerifyReport) -> Pieces:
    """Load a file in ONNX Runtime, or in the ReferenceEvaluator if its style allows that; the report names which."""
    missing = ["Not run in TensorRT: its operators follow its documentation."] if style is Style.TRT else []
    try:
        pieces = Pieces(model, watched, Session)
    except VerificationError as error:
        if style is Style.PORTABLE:
            raise
        pieces = Pieces(model, watched, Evaluator)
        missing.append(f"Not run in ONNX Runtime: {error}")
    report.runtime, report.not_run = pieces.runtime.name, missing
    return pieces


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the name of the file before the messages of errors."""
    try:
        yield
    except VerificationError as error:
        raise VerificationError(f"{path}: {error}") from error


def load_exported(path: Path) -> ModelProto:
    """Load an ONNX file and check it with ONNX's own checker."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        if path.exists() and not path.is_file():  # of a device, reading may not end
            raise VerificationError("is a folder or a device, not a file; pass the path of an ONNX file")
        model = onnx.load_model_from_string(path.read_bytes())
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise VerificationError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except DecodeError as error:
        raise VerificationError("is not an ONNX file, or is truncated; export it again") from error
    record = read(model)
    if outside := [tensor.name for tensor in model.graph.initializer if tensor.external_data]:
        raise VerificationError(f"its constants {', '.join(outside)} are in other files; export it again")
    if (recorded := [entry.name for entry in record.inputs]) != (names := [value.name for value in model.graph.input]):
        raise VerificationError(
            f"its record of quantizers is damaged: it names the inputs {recorded}, the graph has {names}; export it "
            "again"
        )
    try:
        onnx.checker.check_model(model)
    except UnicodeDecodeError as error:  # the checker's message quotes a damaged name
        raise VerificationError("is damaged: a name in it is not UTF-8; export it again") from error
    except onnx.checker.ValidationError as error:
        raise VerificationError(f"is damaged: {' '.join(str(error).split())}; export it again") from error
    return model


def _expected(spans: Spans, batch: _Batch, found: list[Tensor], before: Restore) -> list[Tensor]:
    """The outputs of the torch model for a batch.

    Raises:
        VerificationError: it has other outputs than the file.
    """
    expected = _outputs(spans.model, batch, batch.values, before, spans.state)
    if [result.dim() for result in expected] != [result.dim() for result in found]:
        raise VerificationError(
            f"the model's outputs have the shapes {[list(result.shape) for result in expected]}, the file's "
            f"{[list(result.shape) for result in found]}; pass the model that was exported"
        )
    return expected
