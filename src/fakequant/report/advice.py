"""What to do next, from the measurements of a report, with the code to paste."""

from __future__ import annotations

import math
from dataclasses import replace

from fakequant.report.data import Distribution, Layer, ReportData
from fakequant.report.histograms import CHOSEN
from fakequant.report.layers import FAIR
from fakequant.text import listed

_GAP = 6.0
"""A layer stands out whose ratio is this many dB below the next: half the amplitude."""
FAIR_LOSS, BAD_LOSS = 0.01, 0.05
"""Shares of the float model's metric: up to the first a loss is small, above the second it is large."""
_WORTH = 1.0
"""Decibels that another range must gain before it is recommended."""


def with_advice(data: ReportData, preset: str = "int8") -> ReportData:
    """The report with the next step, unless it has one.

    Args:
        data: the measurements.
        preset: the name of the preset, for the code.
    """
    if data.next:
        return data
    text, code = _advice(data, preset)
    return replace(data, next=text, code=code)


def cut(distribution: Distribution) -> bool:
    """Whether the whole range would give clearly less noise than the chosen one."""
    clip = distribution.clips.get(CHOSEN)
    return clip is not None and distribution.whole is not None and distribution.whole - clip.sqnr > _WORTH


def ranked(data: ReportData) -> list[Layer]:
    """The layers with a measurement, the worst first."""
    return sorted((layer for layer in data.layers if math.isfinite(layer.worst)), key=lambda layer: layer.worst)


def _advice(data: ReportData, preset: str) -> tuple[str, str]:
    inexact = [check.title for check in data.verifications if not check.exact]
    if inexact:
        return f"{inexact[0]} differs from the model: export it again, and verify it before you deploy it.", _EXPORT
    if lossy := [check.title for check in data.verifications if not check.passed]:
        return f"ONNX Runtime loses too much of {lossy[0]} by default: see Verification for the setting.", _EXPORT
    clipped = [shown.name for shown in data.distributions if cut(shown) and shown.clips[CHOSEN].sqnr < FAIR]
    if clipped:
        return (
            f"The range of {listed(clipped, 1)} cuts off values that matter: the whole range has less noise.",
            'used = fq.recalibrate(model, method="max")  # needs no second pass over the data',
        )
    worst = ranked(data)
    if worst and (worst[0].worst < FAIR or data.lost > BAD_LOSS):
        standing = len(worst) < 2 or worst[1].worst - worst[0].worst >= _GAP
        several = f"Several layers hurt, first {worst[0].name}"
        if worst[0].worst >= FAIR:
            several = f"The metric lost {data.lost:.1%}, though no layer alone hurts much"
        elif standing:
            return (
                f"{worst[0].name} hurts most, by far: leave it in float, and measure again.",
                f'model = fq.prepare(float_model, "{preset}", skip=["{worst[0].name}"])\n'
                "used = fq.calibrate(model, batches)",
            )
        if not data.improvement and any(layer.weight for layer in worst[:5]):
            return (
                f"{several}: choose the weights by the error of their layers.",
                "print(fq.ptq.improve(model, batches))",
            )
        return (
            f"{several}: fine-tune, or fine-tune longer, or take a preset with more bits or finer scales.",
            "history = fq.qat.finetune(model, batches, loss, fq.qat.Schedule(original_lr=0.1, original_epochs=90))",
        )
    if not data.verifications:
        return "Nothing stands out: export the model and verify the file.", _EXPORT
    return "Nothing stands out: the file is ready to be deployed.", ""


_EXPORT = 'fq.export_onnx(model, example, "model.onnx")\nprint(fq.verify_onnx("model.onnx", model, batches))'
