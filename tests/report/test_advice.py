"""The verdict at the top of the report: the tiles, and the next step that follows from what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fakequant.export import Row
from fakequant.ptq.judging import LayerResult
from fakequant.ptq.trial import NextStep, Tried
from fakequant.report import (
    Accuracy,
    Layer,
    ReportData,
    render,
    with_advice,
)
from tests.support.parsed_page import Page
from tests.support.report_data import verified


def test_tiles_say_metric_size_exactness_and_worst_layer() -> None:
    data = ReportData(
        "x",
        accuracy=[Accuracy("float32", "", 90.0), Accuracy("INT8", "mse", 80.0)],
        layers=[Layer("a", "Linear", weight="int8", alone=9.0, elements=1000, bytes=1000, float_bytes=4000)],
        advice=FOUND,
        verifications=[verified("model.onnx", [Row("a", "int8", "weight", 1000)], runtime="ONNX Runtime")],
    )
    words = Page(render(with_advice(data))).words
    for text in (
        "80.00 -10.00 against float32; INT8 mse",
        "1 kB 4 kB in float: 4.00 times smaller, 8.00 bits per weight",
        "exact all 1 quantizers, 1,000 values, bit for bit in ONNX Runtime",
        "9.0 dB with this layer alone quantized",
        "Do <this>: the error of the output goes from 5.00e-01 to 1.00e-01 of its energy, the weights from 1,000",
        "to 900 bytes, the metric from 80 to 85, on 2 batches held back.",
        "fq.this(model)",
        "Tried: 2, on 2 batches held back",
        "Do that ConfigError: why",
    ):
        assert text in words, text


def test_the_next_step_shows_a_perplexity_without_the_sign_by_which_it_is_compared() -> None:
    rows = [Accuracy("float32", "", -80.0, negated=True), Accuracy("INT8", "mse", -90.0, negated=True)]
    advice = replace(FOUND, metric=-90.0, tried=[replace(FOUND.tried[0], metric=-85.0), *FOUND.tried[1:]])
    said = with_advice(ReportData("x", accuracy=rows, advice=advice)).next
    assert "the metric from 90 to 85, on 2 batches" in said


def test_the_tile_is_of_the_reported_model() -> None:
    assert "49.90 -0.10 against float32; INT8" in Page(render(ReportData("x", accuracy=LOST, reported=1))).words
    assert "40.00 -10.00 against float32; INT2" in Page(render(ReportData("x", accuracy=LOST))).words


def test_a_page_says_what_ratios_mean_after_weights_were_chosen() -> None:
    data = ReportData("x", layers=[GOOD])
    assert "keep the chosen values" not in render(data)
    assert "keep the chosen values" in render(replace(data, improvement=[LayerResult("good", 1.0, 0.5)]))


EXACT, DIFFERS = Row("a", "", "weight", 5), Row("a", "", "weight", 5, 1)
LOSES = {"optimised_error": "it fails"}
LOST_IN = "f computes the same as the model, but not in ONNX Runtime's default session"
GOOD = Layer("good", "Linear", weight="int8", alone=50.0)
LOST = [Accuracy(name, "", value) for name, value in (("float32", 50.0), ("INT8", 49.9), ("INT2", 40.0))]
SOME = [Layer(name, "Linear", weight="int8", alone=value) for name, value in (("x", 15.0), ("y", 16.0))]
TRIED = [
    Tried("Do <this>", "fq.this(model)", 0.1, 900, 85.0, helps=True),
    Tried("Do that", "fq.that(model)", failed="ConfigError: why"),
]
FOUND = NextStep(0.5, 1000, "on 2 batches held back", tried=TRIED, best=0, metric=80.0)
NOTHING = replace(FOUND, tried=TRIED[1:], best=None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"verifications": [verified("f", [DIFFERS])]}, "f computes other values than the model at a: export it again"),
        (
            {"verifications": [verified("f", [EXACT, replace(DIFFERS, quantizer="b")])]},
            "f computes other values than the model at b",
        ),
        (
            {"verifications": [verified("f", [replace(EXACT, intact=False)])]},
            "f computes other values than the model at a",
        ),
        ({"verifications": [verified("f", [EXACT], restored_by="a setting", **LOSES)]}, f"{LOST_IN}: run it with a se"),
        ({"verifications": [verified("f", [EXACT], **LOSES)]}, f"{LOST_IN}: see Verification; no setting"),
        (
            {"verifications": [verified("f", [replace(DIFFERS, quantizer="")])]},
            "f computes other values than the model at its root",
        ),
        ({"verifications": [verified("f", [DIFFERS])], "advice": FOUND}, "f computes other values than the model at a"),
        ({"layers": [GOOD], "advice": FOUND}, "Do <this>: the error of the output goes from"),
        ({"layers": SOME, "advice": NOTHING}, "The error of the output is 5.00e-01 of its energy, and no change"),
        ({"layers": SOME, "advice": replace(NOTHING, little=True)}, "Nothing stands out: export"),
        ({"layers": SOME}, "x hurts most. No change was tried"),
        ({"layers": [GOOD]}, "Nothing stands out: export the model and verify the file"),
        ({"verifications": [verified("f", [EXACT])]}, "Nothing stands out, but your metric was not measured: me"),
        ({"verifications": [verified("f", [EXACT])], "accuracy": LOST, "reported": 1}, "Nothing stands out: the file"),
        ({"layers": [GOOD], "accuracy": LOST}, "good hurts most. No change was tried"),
        ({"layers": [GOOD], "accuracy": LOST, "reported": 1}, "Nothing stands out: export the model"),
        ({"next": "as given"}, "as given"),
    ],
)
def test_the_next_step_follows_from_what_was_tried(values: dict, said: str) -> None:
    assert with_advice(ReportData("x", **values)).next.startswith(said)


def test_the_page_says_why_a_change_is_not_advised() -> None:
    lucky = replace(NOTHING, tried=[*NOTHING.tried, Tried("Do it by luck", "", 0.2, 1000, by_chance=True)])
    words = Page(render(with_advice(ReportData("x", layers=SOME, advice=lucky)))).words
    assert "Do it by luck 2.00e-01 1,000 by chance: not on other batches" in words
    assert "Do that ConfigError: why" in words


@pytest.mark.parametrize(("ratio", "said"), [(math.inf, True), (40.0, False)])
def test_a_weight_on_its_codes_is_not_taken_for_free(ratio: float, said: bool) -> None:
    words = Page(render(ReportData("x", layers=[replace(GOOD, weight_sqnr=ratio)]))).words
    assert ("The error against the weights before that is in none of these columns." in words) is said
