"""Verify an exported file: every quantizer bit for bit, and the model's outputs in quantization steps.

Files with types or operators that ONNX Runtime lacks run in onnx's ReferenceEvaluator.

The evaluator computes every node in numpy as the ONNX standard defines it. `operators` replaces definitions that were
measured to be wrong, and adds operators that are not in the standard.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fakequant.data.again import state_before
from fakequant.data.arguments import check_model
from fakequant.data.batches import Inputs, length, refuse_tensor, run_batch, select_inputs, track
from fakequant.errors import VerificationError
from fakequant.export import trt
from fakequant.export.capability import InputRecord, Parameters, SiteRecord, Style, read, require
from fakequant.export.check import Deployed, SiteCheck, Source, Spans, outputs_of
from fakequant.export.inputs import (
    arguments,
    depends_on,
    inner_graphs,
    known_arguments,
    names_read,
    on_device_of,
    random_batch,
    tensors_of,
    unread_inputs,
)
from fakequant.export.verdict import Session, VerifyReport, Watch, add_rows, first_line
from fakequant.files import check_path
from fakequant.model.run.tracing import separate
from fakequant.model.weights import evaluating
from fakequant.nn.ranges import bins_of_call
from fakequant.nn.wrappers import unwrapped
from fakequant.restore import Restore, restore_after

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_OPERATORS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"))


def uncovered_nodes(model: ModelProto, sites: Sequence[SiteRecord]) -> list[str]:
    """Return the names of the nodes that quantize or dequantize for no quantizer of the record, in graph order.

    The nodes of a quantizer lie between its result and its input tensor (or the codes of its weight).
    """
    nodes = list(model.graph.node)
    made_by = {output: index for index, node in enumerate(nodes) for output in node.output}
    covered: set[int] = set()
    for site in sites:
        ends = {site.x, site.codes}
        if site.parameters is Parameters.COMPUTED:
            ends |= {site.scale, site.zero_point}
        waiting = [site.y]
        while waiting:
            index = made_by.get(waiting.pop())
            if index is not None and index not in covered:
                covered.add(index)
                if nodes[index].op_type == "Scan":  # its body is the quantizer's, and what it gives is verified
                    continue
                waiting += [name for name in nodes[index].input if name not in ends]
    rest = [node for index, node in enumerate(nodes) if index not in covered]
    rest += [
        node
        for index, outer in enumerate(nodes)
        if index not in covered
        for graph in inner_graphs(outer)
        for node in _nodes(graph)
    ]
    rest += [node for function in model.functions for node in function.node]
    return [node.name or node.output[0] for node in rest if node.op_type in _OPERATORS or node.domain == trt.DOMAIN]


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield the nodes of a graph and of the graphs inside it."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from _nodes(inner)


# The errors of numpy and the evaluator for unknown nodes and for values that do not fit.
_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError, LookupError, AssertionError)


class Evaluator:
    """An ONNX model in onnx's ReferenceEvaluator.

    Raises:
        VerificationError: the evaluator does not know an operator.
    """

    def __init__(self, model: ModelProto, watched: Sequence[str] = ()) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        from fakequant.export.operators import OPERATORS

        self._watch = Watch(model, watched)
        self.outputs = self._watch.outputs
        self.name = f"the ReferenceEvaluator of onnx {onnx.__version__}"
        try:
            self._evaluator = ReferenceEvaluator(self._watch.model, new_ops=list(OPERATORS))
        except _ERRORS as error:
            raise VerificationError(f"{self.name} cannot load it: {first_line(error)}") from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model and return its inputs, outputs and watched tensors by name.

        Raises:
            VerificationError: the inputs do not fit the model, or the evaluator fails, with its message.
        """
        arrays = self._watch.arrays(inputs)
        try:
            # Overflow, inf and NaN are part of the test data.
            with np.errstate(all="ignore"):
                found = self._evaluator.run(self._watch.names, arrays)
        except _ERRORS as error:
            raise VerificationError(f"{self.name} cannot run it: {first_line(error)}") from error
        return self._watch.tensors(inputs, [np.asarray(value) for value in found])


_TENSORS_PER_PIECE = 64
"""The number of tensors that a piece returns: 512 blocks of four quantizers are 48 pieces, loaded in milliseconds."""


Runtime = Session | Evaluator


class _Piece(NamedTuple):
    runtime: Runtime
    inputs: list[str]
    groups: list[int]


class Pieces:
    """A model that runs in pieces of consecutive nodes, in which every node computes the same as in one run.

    Args:
        model: the model, with its nodes in the order of computation.
        groups: names of tensors that are read together.
        load: makes the runtime of a piece, from its model and the names of the tensors to return.
    """

    def __init__(
        self,
        model: ModelProto,
        groups: Sequence[Sequence[str]],
        load: Callable[[ModelProto, list[str]], Runtime],
    ) -> None:
        self.outputs = [output.name for output in model.graph.output]
        cutter = _Cutter(model, groups)
        self._pieces: list[_Piece] = []
        for first, end in pairwise(cutter.cuts):
            indices = [index for index, ready in enumerate(cutter.ready) if first <= ready < end]
            names = [name for index in indices for name in groups[index]]
            part = cutter.part(first, end, names)
            inputs = [value.name for value in part.graph.input]
            self._pieces.append(_Piece(load(part, names), inputs, indices))
        self._last = {name: at for at, piece in enumerate(self._pieces) for name in piece.inputs}
        self._last |= dict.fromkeys(self.outputs, len(self._pieces))
        self.runtime = self._pieces[0].runtime

    def run(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], list[int]]]:
        """Yield the tensors of every piece by name, and the indices of the groups that are among them.

        The tensors of the last piece include the outputs of the model.
        """
        held = dict(inputs)
        for at, piece in enumerate(self._pieces):
            given = held if len(self._pieces) == 1 else {name: held[name] for name in piece.inputs}
            held |= piece.runtime.run(given)
            yield held, piece.groups
            held = {name: x for name, x in held.items() if self._last.get(name, 0) > at}


class _Cutter:
    """Cuts a graph at places where all tensors that later nodes read have types that numpy has.

    Attributes:
        ready: for every group, the index of the node after which all of its tensors are computed.
        cuts: the indices of the first nodes of the pieces, and the number of nodes.
    """

    def __init__(self, model: ModelProto, groups: Sequence[Sequence[str]]) -> None:
        from onnx import TensorProto

        graph = model.graph
        self._model = model
        self._given = {value.name: value for value in graph.input}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._made = {name: at for at, node in enumerate(graph.node) for name in node.output}
        self._types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
        self._end = max(len(graph.node), 1)
        known = dict.fromkeys((*self._given, *self._constants), 0) | self._made
        self.ready = [max((known.get(name, self._end - 1) for name in names), default=0) for names in groups]
        self._last = {name: at for at, node in enumerate(graph.node) for name in names_read([node])}
        for names, at in zip(groups, self.ready, strict=True):
            self._last |= {name: max(at, self._last.get(name, 0)) for name in names}
        in_numpy = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL)
        read = Counter[int]()
        for names, at in zip(groups, self.ready, strict=True):
            read[at] += len(names)
        self.cuts, waiting, blocked = [0], 0, 0
        for at, node in enumerate(graph.node[:-1]):
            stay = (name for name in node.output if self._types.get(name) not in in_numpy)
            blocked = max([blocked, *(self._last.get(name, 0) for name in stay)])
            waiting += read[at]
            if waiting >= _TENSORS_PER_PIECE and blocked <= at:
                waiting = 0
                self.cuts.append(at + 1)
        self.cuts.append(self._end)

    def part(self, first: int, end: int, watched: Sequence[str]) -> ModelProto:
        """A model of the nodes from `first` to before `end`; for all nodes the whole model."""
        from onnx import ModelProto, helper

        if (first, end) == (0, self._end):
            return self._model
        graph = self._model.graph
        nodes = graph.node[first:end]
        part = ModelProto(ir_version=self._model.ir_version)
        part.opset_import.extend(self._model.opset_import)
        part.functions.extend(self._model.functions)
        part.graph.name = graph.name
        part.graph.node.extend(nodes)
        part.graph.output.extend(o for o in graph.output if first <= self._made.get(o.name, self._end - 1) < end)
        finished = {output.name for output in part.graph.output}
        made = [name for node in nodes for name in node.output]
        leaving = [name for name in made if self._last.get(name, 0) >= end and name not in finished]
        read = dict.fromkeys((*names_read(nodes), *watched, *finished))
        part.graph.initializer.extend(self._constants[name] for name in read if name in self._constants)
        part.graph.input.extend(self._given[name] for name in read if name in self._given)
        earlier = [name for name in read if self._made.get(name, end) < first]
        # Without shapes: those of the file may be of the example.
        for names, values in ((earlier, part.graph.input), (leaving, part.graph.output)):
            values.extend(helper.make_tensor_value_info(name, self._types[name], None) for name in names)
        part.graph.value_info.extend(
            helper.make_tensor_value_info(name, self._types[name], None) for name in made if name in self._types
        )
        return part


_CALL = "verify_onnx('model.onnx', model, batches)"


def verify_onnx(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    *,
    inputs: Inputs | None = None,
    progress: bool | None = None,
) -> VerifyReport:
    """Run an exported file and compare it with torch.

    Every quantizer is compared bit for bit, on the input that ONNX Runtime computes for it with its optimisations off.
    Torch then computes the inputs of quantizers, and the outputs, from the file's results of earlier quantizers: they
    differ by more than rounding only if the file computes something else. The outputs after all layers are reported in
    quantization steps, because sums in another order may round to another step. A separate run reports the changes from
    ONNX Runtime's default optimisations.

    A file in the style "standard" or "trt" that ONNX Runtime cannot load runs in onnx's ReferenceEvaluator: standard
    nodes as the standard defines them, TensorRT's nodes as its documentation describes them. The report says so.

    Args:
        path: a file that `export_onnx` wrote.
        model: the model that was exported, on any device. Its scales, weights and results are compared with the file;
            without a model the file is only checked for consistency. The model does not change.
        batches: as for `calibrate`; by default one batch of random numbers, zeros and outliers in the shapes of the
            example.
        inputs, progress: as for `calibrate`.

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
            return _verified(path, inner, batches, inputs, progress)
    return _verified(path, None, batches, inputs, progress)


def _verified(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    batches: Iterable[Any] | None,
    inputs: Inputs | None,
    progress: bool | None,
) -> VerifyReport:
    if batches is not None:
        refuse_tensor(batches, "verify_onnx")
    try:
        proto = load_exported(Path(path))
        record = read(proto)
        source = Source(proto, model)
        checks = [SiteCheck(source, site) for site in record.sites]
        chosen = "random numbers in the shapes of the example" if batches is None else "given"
        report = VerifyReport(str(path), chosen, [check.row for check in checks], record.style.value)
        report.uncovered = uncovered_nodes(proto, record.sites)
        report.unread = unread_inputs(proto)
        watched = [check.watched for check in checks]
        if record.style is Style.TRT:
            report.not_run.append("Not run in TensorRT: its operators follow its documentation.")
        try:
            plain = Pieces(proto, watched, Session)
        except VerificationError as error:
            if record.style is Style.PORTABLE:
                raise
            plain = Pieces(proto, watched, Evaluator)
            report.not_run.append(f"Not run in ONNX Runtime: {error}")
        report.runtime = plain.runtime.name
        step = next((check.step for check in reversed(checks) if check.step is not None), None)
        deployed = Deployed(proto, checks, report, step) if not isinstance(plain.runtime, Evaluator) else None
        spans = (
            None if model is None else Spans(proto, checks, model, [one.state for one in record.inputs if one.state])
        )
        if batches is None:
            if model is not None:
                _draw_state(model, record.inputs)
            drawn = random_batch(arguments(record.inputs, model), proto.ByteSize())
            chosen_batches: Iterable[Any] = [on_device_of(model, drawn)]
        else:
            chosen_batches = (one if inputs is None else select_inputs(one, inputs) for one in batches)
        for batch in track(chosen_batches, "verifying", 1 if batches is None else length(batches), progress):
            given = _Batch(batch if report.unread else separate(batch), record.inputs, model)
            if spans is None:
                values: Mapping[str, Tensor] = {}
                for values, indices in plain.run(given.inputs):
                    for index in indices:
                        checks[index].compare(values)
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
    except VerificationError as error:
        raise VerificationError(f"{path}: {error}") from error
    return report


@torch.no_grad()
def _draw_state(model: nn.Module, records: list[InputRecord]) -> None:
    """Add random numbers to a model's state, which is often 0 at the start and would hide which nodes read it."""
    generator = torch.Generator().manual_seed(len(records))
    held = dict(model.named_buffers())  # of another model it may lack some, which is refused later
    for buffer in [held[record.state] for record in records if record.state in held]:
        if buffer.is_floating_point() and buffer.numel():
            size = max(float(buffer.abs().amax()), 1.0)
            buffer.add_(torch.rand(buffer.shape, generator=generator, device="cpu").to(buffer) * size)


class _Batch:
    """A batch, with its tensors and the buffers of the model as inputs of the file."""

    def __init__(self, batch: Any, records: list[InputRecord], model: nn.Module | None) -> None:
        own = arguments(records, model)
        self.values, self._known = batch, known_arguments(batch, own)
        self.inputs = tensors_of(batch, own) | {
            record.name: model.get_buffer(record.state).detach().clone()
            for record in records
            if model is not None and record.state is not None
        }

    def run(self, model: nn.Module, values: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
        """Call a model with copies of a batch's values, changed by a function; a forward may write into its inputs."""
        copies: dict[int, Tensor] = {}  # a tensor that occurs twice stays one
        own = pytree.tree_map_only(Tensor, lambda x: copies.setdefault(id(x), change(x.detach().clone())), values)
        return run_batch(model, own, known=self._known)


def _beside(
    spans: Spans, batch: _Batch, plain: Pieces, report: VerifyReport, step: float | None
) -> Mapping[str, Tensor]:
    """Compare a file with its model for one batch; returns the tensors of the file's last piece."""
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
    found, expected = (
        [values[name] for name in plain.outputs],
        _outputs(model, batch, batch.values, before, spans.state),
    )
    if [result.dim() for result in expected] != [result.dim() for result in found]:
        raise VerificationError(
            f"the model's outputs have the shapes {[list(result.shape) for result in expected]}, the file's "
            f"{[list(result.shape) for result in found]}; pass the model that was exported"
        )
    add_rows(report.outputs, plain.outputs, found, expected, step)
    return values


def _outputs(model: nn.Module, batch: _Batch, values: Any, before: Restore, state: Sequence[str]) -> list[Tensor]:
    """The outputs of the torch model for a batch, on the CPU; `before` first restores the model's state."""
    before()
    with evaluating(model), torch.no_grad():
        return [x.detach().cpu() for x in outputs_of(model, batch.run(model, values), state)]


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
            f"its record of quantizers is damaged: the record names the inputs {recorded}, the graph has {names}; "
            "export the model again"
        )
    try:
        onnx.checker.check_model(model)
    except UnicodeDecodeError as error:  # the checker's message quotes a damaged name
        raise VerificationError("is damaged: a name in it is not UTF-8; export it again") from error
    except onnx.checker.ValidationError as error:
        raise VerificationError(f"is damaged: {' '.join(str(error).split())}; export it again") from error
    return model
