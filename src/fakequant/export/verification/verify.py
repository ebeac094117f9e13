"""Verify an exported file: every quantizer bit for bit, the model's outputs in quantization steps."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fakequant.data.arguments import check_model
from fakequant.data.batches import Inputs, refuse_tensor, run_batch, select_inputs
from fakequant.errors import VerificationError
from fakequant.export.packages import require
from fakequant.export.record import INPUT_DTYPES, InputRecord, read
from fakequant.export.style import Style
from fakequant.export.verification.check import SiteCheck, Source, recorded_calls
from fakequant.export.verification.coverage import uncovered_nodes
from fakequant.export.verification.deployed import Deployed
from fakequant.export.verification.evaluator import Evaluator
from fakequant.export.verification.pieces import Pieces
from fakequant.export.verification.runtime import Session
from fakequant.export.verification.verdict import VerifyReport, add_rows
from fakequant.files import check_path
from fakequant.model.execution import simulated
from fakequant.model.modes import evaluating
from fakequant.nn.ranges.by_value import ByValue, bins_of_call, call_again

if TYPE_CHECKING:
    from onnx import ModelProto

_SEED = 0
_BYTES_PER_RANDOM = 40
"""A float32 number, its temporary copies and an index; measured: 36."""
_MOST_BYTES = 2**30
"""The memory that random inputs may use for any file: one image of 2,000 by 2,000 needs 480 MB."""
_LOWEST, _HIGHEST = -(2**62), 2**62


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
    The outputs of the whole model are compared in quantization steps, because sums in another order may round to
    another step. A separate run reports the changes from ONNX Runtime's default optimisations.

    A file in the style "standard" or "trt" that ONNX Runtime cannot load runs in onnx's ReferenceEvaluator: standard
    nodes as the standard defines them, TensorRT's nodes as its documentation describes them. The report says so.

    Args:
        path: a file that `export_onnx` wrote.
        model: the model that was exported. Its scales, weights and outputs are compared with the file; without it the
            file is only checked for consistency.
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
        plain = _runtime(proto, [check.watched for check in checks], record.style, report)
        step = next((check.step for check in reversed(checks) if check.step is not None), None)
        deployed = Deployed(proto, checks, report, step) if not isinstance(plain.runtime, Evaluator) else None
        for batch in [_random_batch(record.inputs, proto.ByteSize())] if batches is None else batches:
            batch = batch if inputs is None or batches is None else select_inputs(batch, inputs)
            given = _inputs(batch, record.inputs)
            known = _known(batch, record.inputs)
            calls = {} if model is None or report.batches else _calls(model, batch, known, checks)
            values: dict[str, Tensor] = {}
            with call_again(_bins(model, batch, known)):
                for values, indices in plain.run(given):
                    for index in indices:
                        checks[index].compare(values, calls)
            expected = found = [values[name] for name in plain.outputs]
            if model is not None:
                expected = _torch_outputs(model, batch, known, found)
                add_rows(report.outputs, plain.outputs, found, expected, step)
            if deployed is not None:
                deployed.add(values, expected, given)
            report.batches += 1
        if not report.batches:
            raise VerificationError("batches is empty; pass at least one batch, or None for random numbers")
        if deployed is not None:
            deployed.finish()
    return report


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


def _bins(model: nn.Module | None, batch: Any, known: int | None) -> Mapping[ByValue, Tensor]:
    """Which ranges a batch chooses by its values."""
    return {} if model is None else bins_of_call(model, lambda: run_batch(model, batch, known=known))


def _torch_outputs(model: nn.Module, batch: Any, known: int | None, found: list[Tensor]) -> list[Tensor]:
    """Return the outputs of the torch model for one batch, whose first `known` items are arguments."""
    with evaluating(model), torch.no_grad():
        results = pytree.tree_leaves(run_batch(model, batch, known=known))
    expected = [result for result in results if isinstance(result, Tensor)]
    if [list(result.shape) for result in expected] != [list(result.shape) for result in found]:
        raise VerificationError(
            f"the model's outputs have the shapes {[list(result.shape) for result in expected]}, the file's "
            f"{[list(result.shape) for result in found]}; pass the model that was exported"
        )
    return expected


def _calls(model: nn.Module, batch: Any, known: int | None, checks: list[SiteCheck]) -> Mapping[str, Sequence[Tensor]]:
    """Record the arguments of the quantizers whose checks need them."""
    paths = {check.computed for check in checks if check.computed is not None}
    if not paths:
        return {}
    with recorded_calls(model, paths) as found, evaluating(model), simulated(model), torch.no_grad():
        run_batch(model, batch, known=known)
    return found


def _inputs(batch: Any, records: list[InputRecord]) -> dict[str, Tensor]:
    """Return the tensors of a batch by the file's input names; extra trailing tensors of a tuple are ignored.

    Raises:
        VerificationError: the batch has too few tensors, or lacks a name.
    """
    if isinstance(batch, Mapping):
        keys = list(dict.fromkeys(record.key for record in records))
        if missing := [key for key in keys if key not in batch]:
            raise VerificationError(
                f"a batch lacks the arguments {missing}; pass batches of the same form as the example"
            )
        batch = [batch[key] for key in keys]
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if len(leaves) < len(records):
        raise VerificationError(f"a batch has {len(leaves)} tensors, but the file has {len(records)} inputs")
    return {record.name: leaf for record, leaf in zip(records, leaves, strict=False)}


def _known(batch: Any, records: list[InputRecord]) -> int | None:
    """Return how many leading items of a tuple are arguments: those before the first tensor without an input."""
    if not isinstance(batch, (tuple, list)):
        return None
    wanted = len(records)
    for index, item in enumerate(batch):
        wanted -= sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(item))
        if wanted < 0:
            return index
    return len(batch)


def _random_batch(records: list[InputRecord], file_bytes: int) -> Any:
    """Draw inputs of the example's size: mostly normal numbers, with zeros of both signs, tiny numbers and outliers.

    Raises:
        VerificationError: they would need much more memory than the file.
    """
    needed = sum(math.prod(record.shape) * _BYTES_PER_RANDOM for record in records)
    if needed > max(_MOST_BYTES, 10 * file_bytes):
        raise VerificationError(
            f"random numbers in the shapes {[record.shape for record in records]} need {needed:,} bytes of memory, but "
            f"the file has only {file_bytes:,} bytes; pass batches"
        )
    generator = torch.Generator().manual_seed(_SEED)
    tensors = [_random_input(record, generator) for record in records]
    if records and all(record.key is not None for record in records):
        return {str(record.key): x for record, x in zip(records, tensors, strict=True)}
    return tuple(tensors)


def _random_input(record: InputRecord, generator: torch.Generator) -> Tensor:
    dtype = INPUT_DTYPES[record.dtype]
    if not dtype.is_floating_point:
        low, high = (min(max(int(bound), _LOWEST), _HIGHEST) for bound in (record.low, record.high))
        values = torch.randint(low, max(high, low) + 1, record.shape, generator=generator, device="cpu")
        return values.to(dtype)
    # The maximum of a few hundred normal numbers is about 3 standard deviations.
    size = max(abs(record.low), abs(record.high)) / 3 or 1.0
    x = torch.randn(record.shape, generator=generator, dtype=torch.float32, device="cpu") * size
    special = torch.tensor([0.0, -0.0, torch.finfo(dtype).tiny, 30 * size, -30 * size], dtype=x.dtype, device=x.device)
    pick = torch.randint(0, 20 * len(special), record.shape, generator=generator, device="cpu")
    return torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x).to(dtype)
