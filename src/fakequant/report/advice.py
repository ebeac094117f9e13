"""What to do next, from the measurements of a report, with the code to paste; what it says was tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from fakequant.data.arguments import Metric
from fakequant.data.batches import Forward, Inputs, example_arguments
from fakequant.export import VerifyReport
from fakequant.ptq.next_step import USUAL, AdviceContext, next_step
from fakequant.report.data import ReportData, Section, checked_in
from fakequant.report.measure import Measured
from fakequant.report.sections import FAIR, ranked

FAIR_LOSS, BAD_LOSS = 0.01, 0.05
"""Shares of the float model's metric: up to the first a loss is small, above the second it is large."""


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
        model: calibrated; it is as it was afterwards.
        data: the measurements.
        measured: those of its layers.
        metric: of the last row of `data.accuracy`, called as metric(model).
        inputs, forward: as for `calibrate`.
        known: the command and the target, for a page that a command writes.
    """
    if data.next or not all(check.passed for check in data.verifications):
        return with_advice(data)
    # Without inputs= only the model says which items of a tuple it takes.
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
    """The report with the next step, unless it has one; what was tried is in its `advice`."""
    if data.next:
        return data
    text, code = _next(data)
    return replace(data, next=text, code=code)


def _wrong(check: VerifyReport) -> str:
    """What is wrong with a file, or with what runs it, and what to do; "" where it passed."""
    title = Path(check.path).name
    if not check.exact:
        names = [row.name or "its root" for row in checked_in(check) if row.differing or row.fault]
        place = f" at {names[0]}" if names else ""
        return f"{title} is not the model{place}: export it again, and verify it before you deploy it."
    if check.passed:
        return ""
    if check.as_deployed is not False:
        return f"{title} is the model, but not in every program: see Verification."
    cure = "see Verification; no setting that was tried helps"
    cure = f"run it with {check.restored_by}" if check.restored_by is not None else cure
    return f"{title} is the model, but ONNX Runtime's default session is not: {cure}."


def _next(data: ReportData) -> tuple[str, str]:
    """What to do next, and its code."""
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
        what = "What helps was not tried: by advise=False, or without floats to compare."
        return f"{worst[0].name} hurts most. {what}", ""
    if not data.verifications:
        said = "the file was not verified, see Verification" if data.source else "export the model and verify the file"
        return f"Nothing stands out: {said}.", export
    if not data.accuracy:
        said = "Nothing stands out, but your metric was not measured: measure it before you deploy the file."
        return f"{said} {data.missing.get(Section.ACCURACY, '')}", ""
    return "Nothing stands out: the file is ready to be deployed.", ""


_EXPORT = 'fq.export_onnx(model, example, "model.onnx")\nprint(fq.verify_onnx("model.onnx", model, batches))'
