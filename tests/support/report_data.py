"""The figures of a report that has every section."""

from __future__ import annotations

import math
from typing import Any

from fakequant.export import Row, VerifyReport
from fakequant.ptq import Compared, Comparison
from fakequant.ptq.judging import LayerResult
from fakequant.ptq.trial import NextStep, Tried
from fakequant.report import (
    Accuracy,
    Channels,
    Clip,
    Distribution,
    Layer,
    ReportData,
    Size,
)


def verified(path: str, rows: list[Row], **more: Any) -> VerifyReport:
    """A verification on one batch."""
    return VerifyReport(path, "given", rows, batches=1, **more)


def full() -> ReportData:
    return ReportData(
        "A <b>bold</b> model & more",
        summary=("Measured on <i>these</i> data.",),
        metric='accuracy "top-1", %',
        accuracy=[Accuracy("float32", "", 98.5), Accuracy("INT8<u>", "mse", 98.25, "a <note>")],
        layers=[
            Layer("<b>stem", "Linear", "int8 per_tensor", "int8 per_channel(0)", 12.5, 38.4, 41.0, 100, 104, 400),
            *(
                Layer(f"body.{i}.{n}", "Lin<u>", "int8", "int4", 40.0 + i, 50.0, 30.0, 10, 9, 40)
                for i in (0, 1)
                for n in "ab"
            ),
            Layer("exact", "<i>matmul", "int8", alone=math.inf),
            Layer("lost", "Linear", alone=-math.inf),
            Layer("never", "Linear"),
        ],
        channels=[Channels('<b>"w', [-1.0, -0.5], [1.0, 0.5], 2, 1.5)],
        improvement=[
            LayerResult("<b>stem", 1e-2, 1e-3, steps={"gptq": 2e-3, "<i>step": 1e-3}),
            LayerResult("head", note="nearest: a <note>"),
        ],
        curve=Comparison(
            [
                Compared("INT<u>8", "", "", metric=98.0, bits=8.25),
                Compared("INT4", "", "", metric=97.0, bits=4.5),
                Compared("worse", "", "", metric=90.0, bits=6.0),
            ]
        ),
        distributions=[
            Distribution(
                '<b>"y, input',
                [0.0, 1.0, 2.0],
                [5, 0],
                {"max": (0.0, 2.0), "<i>mse": (-1.0, 1.0)},
                clips={"<i>mse": Clip(0.25, 12.0)},
                whole=20.0,
            ),
            Distribution("w", [-1.0, 0.0, 1.0], [2**40, 1], {}, groups=32),
        ],
        sizes=[Size("model.onnx", 1000, 3980), Size("empty<file>", 0), Size("unknown", 5)],
        unquantized={"INT8": ["<lambda>: softmax, 1 of 1 inputs in float"], "INT4": []},
        verifications=[
            verified("int8.onnx", [Row("a<b>", "int8 per_tensor", "activation", 1000)], not_run=["outputs <agree>"]),
            verified("int4.onnx", [Row("b", "int4", "activation", 1000, 7), Row("c", "int4", "weight", 10)]),
            verified("nothing.onnx", []),
            verified("edited.onnx", [Row("d", "int4", "weight", 10, intact=False)]),
        ],
        environment={"torch <x>": "2"},
        advice=NextStep(0.5, 1000, "on <2> batches", tried=[Tried("Do <this>", "fq.this(<model>)", 0.1, 900)], best=0),
    )
