"""Judge a file as ONNX Runtime runs it by default: what its optimisations change, beside what quantization costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fakequant.errors import VerificationError
from fakequant.export.graph import GraphEditor, names_read
from fakequant.export.style import Style
from fakequant.export.verification.check import SiteCheck
from fakequant.export.verification.runtime import DEFAULT, WITHOUT_OPTIMISATIONS, Session, SessionOptions, element_types
from fakequant.export.verification.verdict import OutputRow, VerifyReport, add_rows

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_MOST_ELEMENTS = 2**29 - 2**20
"""The float32 weights that one protobuf message can hold."""
_NO_LOSS = 100.0
"""SQNR in dB: sums in another order reach it, a step of 16 bits does not."""

_RESTORING = (
    SessionOptions(
        'SessionOptions.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")',
        entries=(("session.qdq_matmulnbits_accuracy_level", "1"),),
    ),
    SessionOptions(
        'InferenceSession(..., disabled_optimizers=["WeightBiasQuantization"])', ("WeightBiasQuantization",)
    ),
    SessionOptions('InferenceSession(..., disabled_optimizers=["DoubleQDQPairsRemover"])', ("DoubleQDQPairsRemover",)),
    WITHOUT_OPTIMISATIONS,
)
"""Settings that keep ONNX Runtime from other results: first one that costs no speed of integer products."""


class Deployed:
    """Runs a file in ONNX Runtime's default session, and once without rounding to measure what that costs.

    Args:
        model: the file.
        checks: its quantizers.
        report: gets the results.
        step: the scale of the last integer quantizer.
    """

    def __init__(
        self, model: ModelProto, checks: Sequence[SiteCheck], report: VerifyReport, step: float | None
    ) -> None:
        self._model, self._report, self._step = model, report, step
        self._names = [output.name for output in model.graph.output]
        self._batch: tuple[list[Tensor], Mapping[str, Tensor]] | None = None
        self._default: Session | None = None
        self._unrounded: Session | None = None
        try:
            self._default = Session(model, chosen=DEFAULT)
        except VerificationError as error:
            report.optimised_error = str(error)
            return
        if report.style == Style.PORTABLE.value:  # engines of other styles are others
            unrounded = without_rounding(model, checks)
            self._unrounded = None if unrounded is None else Session(unrounded)
            if unrounded is None:
                report.not_run.append("Not judged as deployed: with float weights the file would exceed 2 GB.")

    def add(self, values: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Compare one batch.

        Args:
            values: the file's results without optimisations.
            inputs: of the file.
        """
        if self._default is None:
            return
        report = self._report
        try:
            found = self._default.run(inputs)
        except VerificationError as error:
            report.optimised_error, self._default = str(error), None
            return
        plain, actual = self._outputs(values), self._outputs(found)
        self._batch = plain, inputs
        self._add(report.optimised, actual, plain)
        if self._unrounded is not None:
            unrounded = self._outputs(self._unrounded.run(inputs))
            self._add(report.deployed, actual, unrounded)
            self._add(report.noise, plain, unrounded)

    def finish(self) -> None:
        """Look for a setting that gives the results without optimisations again, if these lose any."""
        if self._batch is None or all(row.sqnr >= _NO_LOSS for row in self._report.optimised):
            return
        plain, inputs = self._batch
        # Other settings cost the speed of integer products, and are advised only where the file loses too much.
        for options in _RESTORING if self._report.as_deployed is False else _RESTORING[:1]:
            rows: list[OutputRow] = []
            self._add(rows, self._outputs(Session(self._model, chosen=options).run(inputs)), plain)
            if all(row.sqnr >= _NO_LOSS for row in rows):
                self._report.restored_by = options.text
                return

    def _outputs(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        return [values[name] for name in self._names]

    def _add(self, rows: list[OutputRow], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        add_rows(rows, self._names, actual, expected, self._step)


def without_rounding(model: ModelProto, checks: Sequence[SiteCheck]) -> ModelProto | None:
    """Return a file that differs from another as a float model does: the noise of quantization needs no float model.

    Activations pass unrounded, but clipped. Weights are moved by the error that another rounding makes, because
    improved or baked ones are stored rounded in the float model, too. None if the file would be too large.
    """
    from onnx import ModelProto, TensorProto, helper

    weights = {check.record.y: check for check in checks if check.record.codes}
    if sum(check.elements for check in weights.values()) > _MOST_ELEMENTS:
        return None
    types = element_types(model)
    activations = {check.record.y: check for check in checks if not check.record.codes}
    copy = ModelProto()
    copy.CopyFrom(model)
    editor = GraphEditor(copy.graph)
    generator = torch.Generator().manual_seed(0)
    nodes: list[NodeProto] = []
    for node in copy.graph.node:
        y = node.output[0]
        dtype = helper.tensor_dtype_to_np_dtype(types.get(y) or TensorProto.FLOAT)
        if y in weights:
            editor.add(y, weights[y].moved(generator).numpy().astype(dtype))
        elif y in activations:
            has_clip = types.get(y) != TensorProto.BFLOAT16  # no kernel for it
            limits = [editor.add(f"{y}/limit", x.numpy().astype(dtype)) for x in activations[y].limits if has_clip]
            nodes.append(helper.make_node("Clip" if limits else "Identity", [activations[y].record.x, *limits], [y]))
        else:
            nodes.append(node)
    editor.finish(_reached(nodes, [output.name for output in copy.graph.output]))
    return copy


def _reached(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[NodeProto]:
    """Return the nodes that outputs depend on: quantizers without readers may have types that no kernel takes."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed |= names_read([node])
            kept.append(node)
    return kept[::-1]
