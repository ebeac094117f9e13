"""What to do next, from the measurements of a report, with the code to paste; what it says was tried."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from typing import Any

from torch import nn

from fakequant.data.arguments import Metric
from fakequant.data.batches import Arguments, Forward, Inputs, example_arguments
from fakequant.model.analysis.summary import breakable
from fakequant.ptq.next_step import USUAL, AdviceContext, next_step
from fakequant.ptq.trial import NextStep, Tried
from fakequant.report.data import Distribution, Layer, ReportData, Section, Verification
from fakequant.report.measure import CHOSEN, Measured

WORST = 10
BAD, FAIR = 20.0, 30.0
"""Below these ratios in dB the noise is a tenth, or a thirtieth, of the signal's size; the colours change there."""
_LONGEST = 60.0
_HEADER = ("layer", "type", "input; weight", "alone, dB", "input, dB", "weight, dB", "bits", "share")


def layer_tables(layers: Sequence[Layer]) -> str:
    """The ten worst layers, and all layers in network order."""
    total = sum(layer.bytes for layer in layers) or 1
    worst = sorted((layer for layer in layers if math.isfinite(layer.worst)), key=lambda layer: layer.worst)[:WORST]
    parts = [
        "<p>Signal over quantization noise: <em>alone</em>, of the model's output with only this layer quantized; "
        "<em>input</em> and <em>weight</em>, of its own tensors. <em>bits</em> counts codes and scales per weight; "
        "<em>share</em> is of the bytes of quantized weights. "
        f'<span class="bad">Below {BAD:g} dB</span>, <span class="fair">below {FAIR:g} dB</span>, '
        '<span class="good">above</span>.</p>'
    ]
    if any(layer.weight_sqnr == math.inf for layer in layers):
        parts.append(
            "<p>A weight that reads <em>exact</em> already has the values of its codes, as after "
            "<code>fq.ptq.improve</code>. The error against the weights before that is in none of these columns.</p>"
        )
    if len(layers) > WORST:
        parts += [f"<h3>The {len(worst)} worst</h3>", layer_table(worst, total), "<h3>All, in network order</h3>"]
    return "".join(parts) + f'<div id="rows">{folded(layers, lambda some: layer_table(some, total))}</div>'


def folded(layers: Sequence[Layer], render: Callable[[Sequence[Layer]], str]) -> str:
    """Layers in their order; those of a block that repeats are folded under its name."""
    block = blocks([layer.name for layer in layers])
    parts = []
    for name, some in groupby(layers, key=lambda layer: block[layer.name]):
        own = list(some)
        if not name:
            parts.append(f"<div>{render(own)}</div>")
            continue
        worst = min(own, key=lambda layer: layer.worst)
        shown = f"worst {decibels(worst.worst)} dB" if math.isfinite(worst.worst) else ""
        heat = "".join(f'<i class="{grade(layer.worst)}"></i>' for layer in own)
        parts.append(
            f"<details><summary><code>{breakable(name)}</code> "
            f'<span class="soft">{len(own)} layers{", " if shown else ""}{shown}</span>'
            f'<span class="heat" aria-hidden="true">{heat}</span></summary>{render(own)}</details>'
        )
    return "".join(parts)


def blocks(names: Sequence[str]) -> dict[str, str]:
    """The block of each layer: its path up to the first number, if several layers share it; else "".

    >>> blocks(["stem", "body.0.a", "body.0.b", "body.1.a", "body.1.b", "head.0"])["body.1.b"]
    'body.1'
    """
    found = {name: match.group(1) if (match := re.match(r"(.*?(?:^|\.)\d+)\.", name)) else "" for name in names}
    sizes = Counter(found.values())
    return {name: block if sizes[block] > 1 else "" for name, block in found.items()}


def layer_table(layers: Sequence[Layer], total: int) -> str:
    """The rows of some layers."""
    header = "".join(f"<th>{cell}</th>" for cell in _HEADER)
    rows = "".join(_row(layer, total) for layer in layers)
    return f'<table class="layers single"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'


def _row(layer: Layer, total: int) -> str:
    bits = f"{8 * layer.bytes / layer.elements:.2f}" if layer.elements else ""
    share = f"{layer.bytes / total:.1%}" if layer.bytes else ""
    specs = f"{layer.input or 'float'}; {layer.weight}" if layer.weight else layer.input or "float"
    return (
        f"<tr><th scope=row><code>{breakable(layer.name)}</code></th>"
        f"<td>{escape(layer.type)}</td><td>{escape(specs)}</td>"
        f"{measured(layer.alone)}{measured(layer.input_sqnr)}{measured(layer.weight_sqnr)}"
        f"<td>{bits}</td><td>{share}</td></tr>"
    )


def measured(value: float | None) -> str:
    """A cell with a ratio in dB, coloured, with a bar."""
    if value is None:
        return "<td></td>"
    length = 100 * min(max(value, 0.0), _LONGEST) / _LONGEST
    return f'<td class="{grade(value)}">{decibels(value)}<i style="width:{length:.0f}%"></i></td>'


def grade(value: float) -> str:
    """The colour of a ratio in dB."""
    return "bad" if value < BAD else "fair" if value < FAIR else "good"


def decibels(value: float) -> str:
    """A ratio as text; "exact" without noise."""
    return "exact" if value == math.inf else f"{value:.1f}"


FAIR_LOSS, BAD_LOSS = 0.01, 0.05
"""Shares of the float model's metric: up to the first a loss is small, above the second it is large."""
_WORTH = 1.0
"""Decibels by which the whole range must be better than the chosen one before that is said."""


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
    given = {name: value for name, value in (("inputs", inputs), ("forward", forward)) if value is not None}
    known = replace(
        known,
        lost=data.lost if len(data.accuracy) > 1 else None,
        worst=measured.worst,
        metric=metric,
        score=data.accuracy[data.reported].value if metric is not None and data.accuracy else None,
        improved=bool(data.improvement),
        arguments="".join(f", {name}={value if isinstance(value, int) else name}" for name, value in given.items()),
        call=_call(next(iter(measured.batches)), inputs) if forward is None else None,
    )
    return with_advice(replace(data, advice=next_step(model, measured.batches, known)))


def _call(batch: Any, inputs: Inputs | None) -> Arguments | None:
    """The arguments of a call of the model; None where only the model says which items of a tuple it takes."""
    return None if inputs is None and isinstance(batch, (tuple, list)) else example_arguments(batch, inputs)


def with_advice(data: ReportData) -> ReportData:
    """The report with the next step, unless it has one; what was tried is in its `advice`."""
    if data.next:
        return data
    text, code = _advice(data)
    return replace(data, next=text, code=code)


def cut(distribution: Distribution) -> bool:
    """Whether the whole range would give clearly less noise than the chosen one."""
    clip = distribution.clips.get(CHOSEN)
    return clip is not None and distribution.whole is not None and distribution.whole - clip.sqnr > _WORTH


def ranked(data: ReportData) -> list[Layer]:
    """The layers with a measurement, the worst first."""
    return sorted((layer for layer in data.layers if math.isfinite(layer.worst)), key=lambda layer: layer.worst)


def _advice(data: ReportData) -> tuple[str, str]:
    export = "" if data.source else _EXPORT  # a command exports by itself
    if said := next(filter(None, map(_wrong, data.verifications)), ""):
        return said, export
    if data.advice is not None:
        if data.advice.best is not None:
            best = data.advice.tried[data.advice.best]
            return f"{best.what}: {_effect(data.advice, best, data)}.", best.code
        if not data.advice.little:
            return (
                f"The error of the output is {data.advice.error:.2e} of its energy, and no change that was tried "
                "lowers it clearly. What is left, and was not tried, is training, or more bits.",
                "",
            )
    worst = ranked(data)
    if data.advice is None and worst and (worst[0].worst < FAIR or data.lost > BAD_LOSS):
        return (
            f"{worst[0].name} hurts most. What helps was not tried: by advise=False, or without floats to compare.",
            "",
        )
    if not data.verifications:
        said = "the file was not verified, see Verification" if data.source else "export the model and verify the file"
        return f"Nothing stands out: {said}.", export
    if not data.accuracy:
        cure = data.missing.get(Section.ACCURACY, "")
        return (
            f"Nothing stands out, but your metric was not measured: measure it before you deploy the file. {cure}",
            "",
        )
    return "Nothing stands out: the file is ready to be deployed.", ""


def _wrong(check: Verification) -> str:
    """What is wrong with a file, or with what runs it, and what to do; "" where it passed."""
    if not check.exact:
        names = [node.name or "its root" for node in check.nodes if node.differing or node.fault]
        place = f" at {names[0]}" if names else ""
        return f"{check.title} is not the model{place}: export it again, and verify it before you deploy it."
    if check.passed:
        return ""
    cure = "see Verification; no setting that was tried helps"
    cure = cure if check.restored_by is None else f"run it with {check.restored_by}"
    return f"{check.title} is the model, but ONNX Runtime's default session is not: {cure}."


def _effect(advice: NextStep, one: Tried, data: ReportData) -> str:
    """What a change does to the error of the output, to the bytes and to the metric, and how that is known."""
    found = [f"the error of the output goes from {advice.error:.2e} to {one.after:.2e} of its energy"]
    if one.bytes != advice.bytes:
        found.append(f"the weights from {advice.bytes:,} to {one.bytes:,} bytes")
    if one.metric is not None and advice.metric is not None:
        sign = -1 if any(row.negated for row in data.accuracy) else 1
        found.append(f"the metric from {sign * advice.metric:.6g} to {sign * one.metric:.6g}")
    return f"{', '.join(found)}, {advice.judged}"


_EXPORT = 'fq.export_onnx(model, example, "model.onnx")\nprint(fq.verify_onnx("model.onnx", model, batches))'
