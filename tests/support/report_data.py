"""The figures of a report that has every section."""

from __future__ import annotations

import math

from fakequant.ptq.trial import NextStep, Tried
from fakequant.report import (
    Accuracy,
    Channels,
    Clip,
    Distribution,
    Improved,
    Layer,
    NodeCheck,
    Point,
    ReportData,
    Size,
    Verification,
)


def full() -> ReportData:
    """Figures for every section, with texts that need escapes."""
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
            Improved("<b>stem", 1e-2, 1e-3, steps={"gptq": 2e-3, "<i>step": 1e-3}),
            Improved("head", 0.0, 0.0, "nearest: a <note>"),
        ],
        curve=[Point("INT<u>8", 8.25, 98.0), Point("INT4", 4.5, 97.0), Point("worse", 6.0, 90.0)],
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
            Verification("int8.onnx", [NodeCheck("a<b>", "int8 per_tensor", 1000, 0)], ["outputs <agree>"]),
            Verification("int4.onnx", [NodeCheck("b", "int4 per_tensor", 1000, 7), NodeCheck("c", "int4", 10, 0)]),
            Verification("nothing.onnx", []),
            Verification("edited.onnx", [NodeCheck("d", "int4", 10, 0, "changed <since> the export")]),
        ],
        environment={"torch <x>": "2"},
        advice=NextStep(0.5, 1000, "on <2> batches", tried=[Tried("Do <this>", "fq.this(<model>)", 0.1, 900)], best=0),
    )
