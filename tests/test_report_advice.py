"""The verdict at the top of the report: the tiles, and the next step that follows from what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fakequant.report import (
    Accuracy,
    Clip,
    Distribution,
    Improved,
    Layer,
    NodeCheck,
    ReportData,
    Verification,
    render,
    with_advice,
)
from tests.support.parsed_page import Page


def test_tiles_say_metric_size_exactness_and_worst_layer() -> None:
    data = ReportData(
        "x",
        accuracy=[Accuracy("float32", "", 90.0), Accuracy("INT8", "mse", 80.0)],
        layers=[Layer("a", "Linear", weight="int8", alone=9.0, elements=1000, bytes=1000, float_bytes=4000)],
        verifications=[Verification("model.onnx", [NodeCheck("a", "int8", 1000, 0)], runtime="ONNX Runtime")],
    )
    words = Page(render(with_advice(data, "int4"))).words
    for text in (
        "80.00 -10.00 against float32; INT8 mse",
        "1 kB 4 kB in float: 4.00 times smaller, 8.00 bits per weight",
        "exact all 1 quantizers, 1,000 values, bit for bit in ONNX Runtime",
        "9.0 dB with this layer alone quantized",
        'model = fq.prepare(float_model, "int4", skip=["a"])',
    ):
        assert text in words, text


def test_the_tile_is_of_the_reported_model() -> None:
    assert "49.90 -0.10 against float32; INT8" in Page(render(ReportData("x", accuracy=LOST, reported=1))).words
    assert "40.00 -10.00 against float32; INT2" in Page(render(ReportData("x", accuracy=LOST))).words


def test_a_page_says_what_ratios_mean_after_weights_were_chosen() -> None:
    data = ReportData("x", layers=[GOOD])
    assert "keep the chosen values" not in render(data)
    assert "keep the chosen values" in render(replace(data, improvement=[Improved("good", 1.0, 0.5)]))


GOOD = Layer("good", "Linear", weight="int8", alone=50.0)
CUT = Distribution(
    "good, input", [0.0, 1.0], [1], {"chosen": (0.0, 0.5)}, clips={"chosen": Clip(0.1, 10.0)}, whole=20.0
)
LOST = [Accuracy(name, "", value) for name, value in (("float32", 50.0), ("INT8", 49.9), ("INT2", 40.0))]
FINE = replace(CUT, clips={"chosen": Clip(0.1, 40.0)}, whole=45.0)
SOME = [Layer(name, "Linear", weight="int8", alone=value) for name, value in (("x", 15.0), ("y", 16.0))]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"verifications": [Verification("f", [NodeCheck("a", "", 5, 1)])]}, "f differs from the model"),
        ({"layers": [GOOD], "distributions": [CUT]}, "The range of good, input cuts off values that matter"),
        ({"layers": [GOOD], "distributions": [FINE]}, "Nothing stands out: export"),
        ({"layers": [*SOME[:1], GOOD]}, "x hurts most, by far: leave it in float"),
        ({"layers": SOME}, "Several layers hurt, first x: choose the weights by the error of their layers"),
        ({"layers": SOME, "improvement": [Improved("x", 1.0, 0.5)]}, "Several layers hurt, first x: fine-tune"),
        ({"layers": [GOOD]}, "Nothing stands out: export the model and verify the file"),
        ({"verifications": [Verification("f", [NodeCheck("a", "", 5, 0)])]}, "Nothing stands out: the file is ready"),
        ({"layers": [GOOD], "accuracy": LOST}, "The metric lost 20.0%, though no layer alone hurts much: choose the"),
        ({"layers": [GOOD], "accuracy": LOST, "reported": 1}, "Nothing stands out: export the model"),
        ({"next": "as given"}, "as given"),
    ],
)
def test_the_next_step_follows_from_the_measurements(values: dict, said: str) -> None:
    assert with_advice(ReportData("x", **values)).next.startswith(said)


@pytest.mark.parametrize(("ratio", "said"), [(math.inf, True), (40.0, False)])
def test_a_weight_on_its_codes_is_not_taken_for_free(ratio: float, said: bool) -> None:
    words = Page(render(ReportData("x", layers=[replace(GOOD, weight_sqnr=ratio)]))).words
    assert ("The error against the weights before that is in none of these columns." in words) is said
