"""What consoles and notebooks show of values and results: a short text, or the table that `print` gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fakequant as fq
from fakequant import Config, QuantSpec, Rule, TensorConfig
from fakequant.export.exporter import Exported, ExportReport
from fakequant.export.verdict import Row, VerifyReport
from fakequant.model.engine import known_engines
from fakequant.model.sites import PlannedSite, SitePlan, SiteQuantizer
from fakequant.model.summary import LayerSummary, Summary
from fakequant.model.training.fuse import Fusions
from fakequant.numerics.formats import parse_format
from fakequant.ptq.advice import TriedVariant

LONGEST = 200
PARSED = (QuantSpec, fq.ScaleSpec, fq.OffsetSpec, TensorConfig, Rule, fq.GradientConfig)
ptq = fq.ptq
PLANNED = PlannedSite("blocks.0", "add", 0, ("input", "other"), {"other": SiteQuantizer(TensorConfig("int8"))})
TRIED_WAY = TriedVariant(ptq.Compared("INT8", "mse", ""), 900, 21.0)
SCORE = ptq.Score(0.001, 4000)
LAYERS = [LayerSummary(f"blocks.{i}", "Linear", {}, calibrated=True, has_weight=True) for i in range(50)]

STATE = fq.snapshot(fq.prepare(torch.nn.Linear(4, 4), "int8_weight_only"))
SHORT: list[Any] = [
    *fq.presets.presets().values(),
    # Without those of training in blocks, which hold five specifications.
    *(rule for preset in fq.presets.presets().values() for rule in preset.rules if "input=" not in str(rule.gradient)),
    *(rule.weight for preset in fq.presets.presets().values() for rule in preset.rules if rule.weight),
    *(rule.weight.spec for preset in fq.presets.presets().values() for rule in preset.rules if rule.weight),
    *map(parse_format, fq.formats()),
    STATE,
    *STATE.weights.values(),
    fq.LazyTensor((2, 3), torch.float32, lambda: torch.zeros(2, 3)),
    fq.PerTensor(),
    fq.PerToken(),
    fq.PerChannel(0),
    fq.PerBlock({0: 128, -1: 128}),
    fq.ScaleSpec(),
    fq.ScaleSpec("float8_e8m0fnu"),
    fq.OffsetSpec("uint6", granularity=fq.PerBlock({-1: 8}), shared="float16"),
    fq.ScaleSpec("float8_e4m3fn", granularity=fq.PerTensor()),
    fq.choose_qparams(torch.ones(4), "int8"),
    fq.Range(torch.tensor(-1.0), torch.tensor(1.0)),
    ptq.Allocation(dict.fromkeys(map(str, range(100)), "INT4_GROUP32"), 0.012, 4500, 1000, 0.0123, 0.98),
    ptq.Compared("INT4_GROUP128", "percentile", "smooth, gptq", 0.01, 0.98, 4.25, 1e6, 1.5, 3.0),
    ptq.LayerResult("model.layers.10.mlp.down_proj", 0.02, 0.01, {"gptq": 0.015}),
    ptq.EqualizedPair("blocks.0", ("blocks.1",)),
    ptq.Rotated("residual stream", 512, ("embed",), ("head",)),
    ptq.FoldedScale("blocks.0", "norm"),
    SCORE,
    fq.GradientConfig("int8 stochastic", input="int8", hadamard=16),
    *known_engines().values(),
    *(engine.placement() for engine in known_engines().values() if engine.placement is not None),
    *ptq.PRESETS.values(),
]
TABLES: list[Any] = [
    Summary(LAYERS),
    VerifyReport("model.onnx", "given", [Row("0._input_quantizer", "int8", "activation", 1000)] * 9),
    ExportReport(Path("model.onnx"), 21, 100, 400, [Exported("0._input_quantizer", "int8", "QDQ")] * 9, []),
    ptq.Comparison([ptq.Compared("INT8", "mse", "")] * 9),
    ptq.Advice(
        [TRIED_WAY] * 9, TRIED_WAY, True, 20.0, "dB", "it is", "code", "", "not measured", "here", [], False, 900
    ),
    ptq.Improvement([ptq.LayerResult("0", 0.02, 0.01)] * 9),
    ptq.Equalization(0.1, 0.05, [ptq.EqualizedPair("0", ("1",))] * 9),
    ptq.Rotations([ptq.Rotated("heads", 64, ("0",), ("1",))] * 9),
    ptq.FoldedScales([ptq.FoldedScale("0", "norm")] * 9),
    ptq.Scores({"0": {"INT8": SCORE}}, {"0": 1000}, [], {("0", "INT8"): torch.ones(4)}),
    Fusions({"1": "0"}, {"3": "it follows no layer"}),
    SitePlan((PLANNED,) * 9),
]


@pytest.mark.parametrize("value", SHORT, ids=lambda value: f"{type(value).__name__}")
def test_values_are_short(value: Any) -> None:
    assert len(repr(value)) <= LONGEST
    assert "\n" not in repr(value)


@pytest.mark.parametrize("value", TABLES, ids=lambda value: type(value).__name__)
def test_results_are_the_table_that_print_gives(value: Any) -> None:
    assert repr(value) == str(value)
    assert not repr(value).startswith(type(value).__name__)


def test_every_public_dataclass_has_a_case() -> None:
    known = {type(value) for value in SHORT + TABLES}
    public = [getattr(module, name) for module in (fq, ptq) for name in module.__all__]
    classes = {value for value in public if isinstance(value, type) and dataclasses.is_dataclass(value)}
    assert classes - known - {fq.FloatFormat, fq.IntegerFormat} == set()


@pytest.mark.parametrize("value", [v for v in SHORT if isinstance(v, PARSED)], ids=str)
def test_a_specification_and_a_rule_come_back(value: Any) -> None:
    assert eval(repr(value), {cls.__name__: cls for cls in PARSED}) == value


def test_a_rule_says_what_is_not_the_default() -> None:
    given: Any = {"input": "int8 per_token dynamic", "layers": "Linear", "ops": "add", "execution": "integer"}
    rule = Rule("head", **given, tied=True)
    text = (
        "Rule('head', input='int8 per_token dynamic', layers=('Linear',), execution='integer', ops=('add',), tied=True)"
    )
    assert repr(rule) == text


def test_a_configuration_is_counted_and_printed_rule_by_rule() -> None:
    assert repr(fq.presets.INT8) == "Config('INT8', 2 rules)"
    assert repr(Config("own", (Rule("head"),))) == "Config('own', 1 rule)"
    assert str(Config("own", (Rule("head"), Rule("*", weight=TensorConfig("int8"))))).splitlines() == [
        "Config('own', 2 rules)",
        "  Rule('head')",
        "  Rule('*', weight='int8 per_tensor')",
    ]


def test_a_format_that_no_text_gives_back_is_said_so() -> None:
    own = QuantSpec(fq.TableFormat("unheard_of", (-1.0, 0.0, 1.0)))
    assert repr(own) == "<QuantSpec unheard_of per_tensor>"
    assert repr(own.format) == "TableFormat('unheard_of', 3 values)"


def test_without_batch_normalisations_there_is_a_text() -> None:
    assert repr(Fusions({}, {})) == "no batch normalisations"
