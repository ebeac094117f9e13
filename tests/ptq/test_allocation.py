"""A format for each layer under a budget."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError
from fakequant.ptq import Allocation, Score, Scores
from tests.support.bits import unchanged
from tests.support.functional_models import Calls

CHOICES = ["INT8_WEIGHT_ONLY", "INT4_GROUP32", "NVFP4_WEIGHT_ONLY"]


class Net(nn.Module):
    """Convolutions, siblings that read one tensor, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = nn.Conv2d(3, 16, 3), nn.Linear(64, 64), nn.Linear(64, 64)
        self.twice, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(1)[:, :64].relu()
        x = self.left(x).tanh() + self.right(x)
        return self.head(self.twice(self.twice(x).relu()))


def batches() -> list[Tensor]:
    return [torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def found() -> Scores:
    return fq.ptq.scores(Net(), batches(), CHOICES, progress=False)


def test_every_layer_that_is_reached_has_scores(found: Scores) -> None:
    assert list(found.layers) == ["stem", "left", "right", "twice", "head"]
    assert sorted(map(sorted, found.ties)) == [["head"], ["left", "right"], ["stem"], ["twice"]]
    for own in found.layers.values():
        assert list(own) == CHOICES
        assert own["INT8_WEIGHT_ONLY"].loss < 0.1 * own["INT4_GROUP32"].loss
    assert found.layers["left"]["INT4_GROUP32"].bits == 64 * 64 * 5  # 4 and a float32 scale for every 32
    assert "head" in str(found)


def test_the_model_stays_as_it_is() -> None:
    model = Net()
    with unchanged(model):
        fq.ptq.scores(model, batches()[:1], CHOICES[:1], progress=False)
    assert type(model.head) is nn.Linear
    assert not model.head._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def ranks(values: list[Any]) -> Tensor:
    return torch.tensor(values).argsort().argsort().double()


def test_the_order_of_random_mixes_is_predicted(found: Scores) -> None:
    draw = random.Random(0)
    mixes = []
    for _ in range(12):
        chosen = [(group, draw.choice(CHOICES)) for group in found.ties]
        mixes.append(found.predict({layer: name for group, name in chosen for layer in group}))
    measured = fq.ptq.verify(Net(), batches(), mixes)
    both = torch.stack([ranks([mix.loss for mix in measured]), ranks([mix.measured for mix in measured])])
    assert float(torch.corrcoef(both)[0, 1]) > 0.9
    for mix in measured:
        assert 0.5 < mix.loss / (mix.measured or 0.0) < 2


def test_the_curve_is_that_of_all_mixes() -> None:
    """Additive losses: every layer's error arrives in a direction of its own."""
    draw = random.Random(1)
    layers = {
        str(place): {name: Score(draw.random(), draw.randrange(1, 30) * 8) for name in "abc"} for place in range(5)
    }
    arriving = {}
    for place, (layer, own) in enumerate(layers.items()):
        for name, score in own.items():
            direction = torch.zeros(5, dtype=torch.float64)
            direction[place] = (5 * score.loss) ** 0.5
            arriving[layer, name] = direction
    scores = Scores(layers, dict.fromkeys(layers, 10), [[layer] for layer in layers], arriving)
    every = [scores.predict(dict(zip(layers, names, strict=True))) for names in itertools.product("abc", repeat=5)]
    best = []
    for point in sorted(every, key=lambda point: (point.bits, point.loss)):
        if not best or point.loss < best[-1].loss - 1e-12:
            best.append(point)
    curve = scores.curve()
    assert [point.bits for point in curve] == [point.bits for point in best]
    assert [round(point.loss, 9) for point in curve] == [round(point.loss, 9) for point in best]


def test_a_budget_is_kept_and_its_configuration_prepares_the_model(found: Scores) -> None:
    for chosen in (found.allocate(bits=6.5), found.allocate(size=found.allocate(bits=6.5).size)):
        assert chosen.bits_per_weight <= 6.5
        assert chosen.choices["left"] == chosen.choices["right"]
        model = fq.prepare(Net(), chosen.config())
        for layer, choice in chosen.choices.items():
            preset = fq.presets.find_preset(choice)
            assert model.get_submodule(layer).weight_quantizer.spec.format == preset.rules[0].weight.spec.format
    smallest = found.allocate(loss=1.0)
    assert smallest.bits == found.curve()[0].bits
    assert isinstance(smallest, Allocation)


@pytest.mark.parametrize("bits", [2.625, 5.0, 6.5625, 3.5, 4.5])
def test_types_of_gguf_are_allocated_by_the_bytes_of_their_blocks(bits: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    blocks = {"GGUF_Q2_K": 84, "GGUF_Q3_K": 110, "GGUF_Q4_K": 144, "GGUF_Q6_K": 210}  # bytes of 256 weights
    mix = fq.search(net, [torch.randn(32, 256)], list(blocks), bits=bits)
    taken = [blocks[name] for name in mix.choices.values()]
    assert mix.bits_per_weight == sum(taken) / 4 * 8 / 256 <= bits
    assert bits / 8 * 256 * 4 - sum(taken) < 66  # no layer could take the next larger type
    model = fq.prepare(net, mix.config())
    assert fq.summary(model).bytes_quantized == 256 * sum(taken)


def test_bit_operations_are_a_budget_of_their_own() -> None:
    """A layer that is called twice has twice the products; sizes of weights know nothing of that."""
    found = fq.ptq.scores(Net(), batches()[:1], ["INT8", "INT8_WEIGHT_ONLY", "INT4"], progress=False)
    assert found.products == {
        "stem": 16 * 16 * 2 * 4 * 27, "left": 16 * 4096, "right": 16 * 4096, "twice": 2 * 16 * 4096, "head": 16 * 512
    }  # fmt: skip
    own = found.layers["twice"]
    assert own["INT8"].operations == 64 * 2 * 16 * 4096
    assert own["INT8_WEIGHT_ONLY"].operations == 4 * own["INT8"].operations
    assert own["INT4"].operations == own["INT8"].operations // 4
    mix = found.allocate(operations=50)
    assert mix.operations_per_product <= 50 < 64
    assert mix.operations == sum(found.layers[layer][name].operations for layer, name in mix.choices.items())
    assert found.curve("operations")[0].operations_per_product == 16
    with pytest.raises(ConfigError, match="the fewest bit operations for a multiply-accumulate are 16; "):
        found.allocate(operations=15)
    with pytest.raises(ConfigError, match='over= must be "bits" or "operations", got \'size\''):
        found.curve("size")


def test_layers_are_scored_by_the_divergence_of_logits_or_a_function() -> None:
    model, given = Net().double(), [batch.double() for batch in batches()[:2]]
    logits = torch.cat([model(batch) for batch in given]).log_softmax(-1).detach()

    @torch.no_grad()
    def measure(tried: nn.Module) -> float:
        own = torch.cat([tried(batch) for batch in given]).log_softmax(-1)
        return float((logits.exp() * (logits - own)).sum(-1).mean())

    by_name = fq.ptq.scores(model, given, CHOICES, measure="kl", progress=False)
    by_function = fq.ptq.scores(model, given, CHOICES, measure=measure, progress=False)
    for layer, own in by_name.layers.items():
        for name, score in own.items():
            alone = fq.prepare(copy.deepcopy(model), fq.Config("one", (fq.Rule(layer, name),)))
            fq.calibrate(alone, progress=False)
            assert score.loss == pytest.approx(measure(alone), rel=1e-9)
            assert by_function.layers[layer][name].loss == pytest.approx(score.loss, rel=1e-9)
    mix = by_name.allocate(bits=6)
    assert mix.loss == pytest.approx(sum(by_name.layers[layer][name].loss for layer, name in mix.choices.items()))
    with pytest.raises(ConfigError, match="the loss with stem alone in INT8_WEIGHT_ONLY is NaN"):
        fq.ptq.scores(model, given, CHOICES, measure=lambda tried: float("nan") if tried is not model else 0.0)
    with pytest.raises(ConfigError, match=r'measure= must be "kl", \("kl", axis\) or a function of the model, got'):
        fq.ptq.scores(model, given, CHOICES, measure="hessian")


def test_what_is_refused(found: Scores) -> None:
    for budgets in ({}, {"bits": 4, "size": 100}):
        with pytest.raises(ConfigError, match="exactly one budget is needed"):
            found.allocate(**budgets)
    smallest = r"mix has (4\.\d+) bits per weight, scales included: 4.\d+ in \S+ as NVFP4_WEIGHT_ONLY"
    with pytest.raises(ConfigError, match=smallest):
        found.allocate(bits=2)
    in_float = r"864 stay in float \(256 in left, 256 in right, 256 in twice and the others in 2 more modules\)"
    with pytest.raises(ConfigError, match=f"smallest mix has 8,\\d+ bytes, of which {in_float}; pass other"):
        found.allocate(size=100)
    with pytest.raises(ConfigError, match="the smallest loss is"):
        found.allocate(loss=0.0)
    with pytest.raises(ConfigError, match="unknown preset 'INT9'"):
        fq.ptq.scores(Net(), batches(), ["INT9"])
    with pytest.raises(ConfigError, match="no linear layers and no convolutions"):
        fq.ptq.scores(nn.ReLU(), batches())
    with pytest.raises(CalibrationError, match="scores needs batches"):
        fq.ptq.scores(Net(), [])


class Usual(nn.Module):
    """A model as people write it, and one that computes the same by other means."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.kind = nn.Linear(64, 64), nn.Linear(64, 8), kind
        self.relu = nn.ReLU(inplace=kind == "in place")
        self.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.relu(self.one(input=x) if self.kind == "by keyword" else self.one(x))
        x = x.add_(y) if self.kind == "in place" else x + y
        return self.other(x)


@pytest.mark.parametrize("kind", ["in place", "frozen", "by keyword"])
def test_models_that_compute_the_same_have_the_same_scores(kind: str) -> None:
    given = [torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    usual, other = (fq.ptq.scores(Usual(one), given, CHOICES, progress=False) for one in ("usual", kind))
    assert usual.layers == other.layers


def test_scores_in_inference_mode_are_the_same(found: Scores) -> None:
    model, given = Net(), batches()
    with torch.inference_mode():
        assert fq.ptq.scores(model, given, CHOICES, progress=False).layers == found.layers


def test_a_batch_with_nan_is_numbered() -> None:
    given = batches()
    given[2][0, 0, 0, 0] = torch.nan
    for work in (fq.ptq.scores, lambda *args: fq.ptq.search(*args, bits=6)):
        with pytest.raises(CalibrationError, match=r"^batch 3: an output or its gradient holds NaN; leave the batch"):
            work(Net(), given, CHOICES)
    given = [given[0], given[2]]
    with pytest.raises(CalibrationError, match=r"^batch 2: an output of the float model is NaN; leave out the batch"):
        fq.ptq.compare(Net(), given, CHOICES)


def test_layers_without_scores_are_named() -> None:
    torch.manual_seed(0)
    parts = {"table": nn.Embedding(9, 32), "lstm": nn.LSTM(32, 32, batch_first=True), "head": nn.Linear(32, 4)}
    partly = Calls(lambda m, x: m.head(m.lstm(m.table(x))[0]), **parts, idle=nn.Linear(32, 4))
    given = [torch.arange(9).view(1, 9)]
    with pytest.warns(CalibrationWarning, match="idle"):
        scores = fq.ptq.scores(partly, given, ["INT8", "INT4_GROUP32"], progress=False)
    assert scores.why_float == {
        "table": "a Embedding has no score",
        "lstm": "a LSTM has no score",
        "idle": "the first batch does not reach it",
    }
    said = "3 stay in float: table (a Embedding has no score), lstm (a LSTM has no score), idle ("
    assert str(scores).endswith(f"{said}the first batch does not reach it)")
    with pytest.warns(CalibrationWarning, match="idle"):
        mix = fq.ptq.search(partly, given, ["INT8", "INT4_GROUP32"], bits=9)
    assert said in repr(mix)
    assert list(mix.choices) == ["head"]


class Mixed(nn.Module):
    """Weights of every kind: in attention, tied, computed, read without a call, never reached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.attention = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.other.weight = self.one.weight
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.read, self.idle, self.head = nn.Linear(32, 32), nn.Linear(32, 3), nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.norm(self.table(x)))
        y = self.other(self.one(y).relu()) + self.computed(y.tanh())
        return self.head(nn.functional.linear(y, self.read.weight))


@pytest.fixture(scope="module")
def mixed() -> Scores:
    given = [torch.arange(48).view(4, 12)]
    return fq.ptq.scores(Mixed().eval(), given, ["INT8_WEIGHT_ONLY", "INT4_GROUP32"], progress=False)


def test_a_size_is_that_of_the_summary(mixed: Scores, found: Scores) -> None:
    for scores, kind in ((mixed, Mixed), (found, Net)):
        curve = scores.curve()
        assert len(curve) > 3
        for mix in curve:
            summary = fq.summary(fq.prepare(kind(), mix.config()))
            assert mix.size == summary.bytes_quantized
            assert mix.bits_per_weight == summary.bits_per_weight or kind is Mixed  # which computes a weight
        middle = curve[len(curve) // 2]
        fitting = scores.allocate(size=middle.size)
        assert fitting.size <= middle.size
        assert fitting.loss <= middle.loss
        assert f" {middle.size:,} bytes in all, {sum(scores.in_float.values()):,} of them in float, " in repr(middle)
    assert repr(curve[0]).startswith(f"Allocation(5 layers with {curve[0].bits_per_weight:.4g} bits per weight, ")


def test_layers_that_share_their_weight_get_one_choice_and_count_once(mixed: Scores) -> None:
    assert ["one", "other"] in mixed.ties
    assert (mixed.weights["one"], mixed.weights["other"]) == (32 * 32, 0)
    assert all(mix.choices["one"] == mix.choices["other"] for mix in mixed.curve())


def test_why_a_layer_stays_in_float(mixed: Scores) -> None:
    left = {name: why for name, why in mixed.why_float.items() if name not in ("table", "attention.self_attn")}
    assert left == {
        "attention.self_attn.out_proj": "attention.self_attn uses its weight in float",
        "computed.parametrizations.weight": "a ParametrizationList has no score",
        "read": "the model uses its weight in float",
        "idle": "the first batch does not reach it",
    }


def test_a_first_axis_that_holds_no_examples_gives_right_scores() -> None:
    """Both halves of what the layer gets are of the same examples, and their errors cancel."""

    def siamese() -> nn.Module:
        torch.manual_seed(0)
        return Calls(
            lambda m, x: torch.sub(*m.layer(torch.cat([x, x + 0.01 * x.square()])).chunk(2)), layer=nn.Linear(32, 16)
        )

    given = [torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    scores = fq.ptq.scores(siamese(), given, ["INT4_WEIGHT_ONLY"], progress=False)
    mix = fq.ptq.verify(siamese(), given, scores.curve())[0]
    assert 0.4 < mix.loss / mix.measured < 2.5


def test_an_output_of_zero_or_without_floats_has_no_scores() -> None:
    model = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
    with pytest.raises(ConfigError, match="every output of the model is 0, but scores are shares of the energy"):
        fq.ptq.scores(model, [torch.randn(4, 32)], CHOICES, progress=False)
    model.append(Calls(lambda _, x: x.argmax(-1)))
    with pytest.raises(ConfigError, match="the model returns no floats, but scores are shares of the energy"):
        fq.ptq.scores(model, [torch.randn(4, 32)], CHOICES, progress=False)


@pytest.mark.parametrize(
    "gives", [lambda y, found: found, lambda y, found: {"found": found, "all": y}, lambda y, found: found.mT]
)
def test_outputs_without_rows_have_scores(gives: Any) -> None:
    """A model may give the rows that it finds, which may be none."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(32, 32), "b": nn.Linear(32, 8)}
    finds = Calls(lambda m, x: gives(y := m.b(m.a(x).relu()), y[x[:, 0] > 0]), **layers)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    found = fq.ptq.scores(finds.eval(), [x, -x.abs()], ["INT8_WEIGHT_ONLY"], progress=False)
    assert {*found.layers} == {"a", "b"}
