import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, CoverageWarning
from fakequant.model import presets
from fakequant.model.config import NAMED, Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.nn import quantizers
from fakequant.numerics.granularity import Granularity
from fakequant.numerics.spec import QuantSpec
from tests.support.models import small_net


@pytest.mark.parametrize("name", sorted(presets.presets()))
def test_presets_prepare_and_round_trip_through_json(name: str) -> None:
    config = presets.presets()[name]
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    model = prepare(small_net(), config)
    assert model.stem._weight_quantizer is not None
    assert type(model.maximum) is nn.MaxPool2d
    with_inputs = any(rule.input for rule in config.rules)
    assert any("_input_quantizer" in q for q in quantizers(model)) == with_inputs


def test_the_last_matching_rule_holds() -> None:
    config = presets.INT8.with_rule(
        Rule("head"),
        Rule("br*", input=TensorConfig("float8_e4m3fn")),
        Rule("stem", weight=TensorConfig("int4 per_channel(0)"), layers=("Conv2d",)),
    )
    model = prepare(small_net(), config)
    assert type(model.head) is nn.Linear
    assert str(model.branch._input_quantizer.spec) == "float8_e4m3fn per_tensor"
    assert model.branch._weight_quantizer is None
    assert str(model.stem._weight_quantizer.spec) == "int4 per_channel(0)"
    assert model.stem._input_quantizer is None


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule("haed"), r"the rule 'haed' matches no layer; layers that can be quantized are stem \(Conv2d\)"),
        (Rule("head", layers=("Conv2d",)), r"the rule 'head' of type Conv2d matches no layer"),
    ],
    ids=["name", "type"],
)
def test_a_rule_that_matches_nothing_raises(rule: Rule, text: str) -> None:
    model = small_net()
    with pytest.raises(ConfigError, match=text):
        prepare(model, presets.INT8.with_rule(rule))
    assert quantizers(model) == {}
    assert type(model.stem) is nn.Conv2d


def test_a_model_without_layers_raises() -> None:
    with pytest.raises(ConfigError, match="no layer that can be quantized"):
        prepare(nn.Sequential(nn.ReLU()), presets.INT8)


def test_an_optional_rule_may_match_nothing() -> None:
    prepare(small_net(), presets.INT8.with_rule(Rule("nowhere", optional=True)))


@dataclass(frozen=True)
class PerPair(Granularity):
    """One scale for every two neighbours along an axis; it is not registered, so rules take it as a value."""

    axis: int = 0

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(2 if axis == self.axis else n for axis, n in enumerate(shape))

    def remap_axes(self, axes: Mapping[int, int]) -> "PerPair":
        return PerPair(axes.get(self.axis, self.axis))

    @classmethod
    def parse(cls, arguments: str) -> "PerPair":
        return cls(int(arguments))


def test_a_granularity_of_your_own_moves_its_axes() -> None:
    config = Config("mine", [Rule("*", weight=TensorConfig(QuantSpec("int8", PerPair())))])
    model = prepare(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(6, 4, 3)), config)
    shapes = [tuple(fq.choose_qparams(layer.weight, layer._weight_quantizer.spec).scale.shape) for layer in model]
    assert shapes == [(3, 1, 1, 1), (1, 2, 1, 1)]


def test_the_granularity_of_scales_moves_its_axes() -> None:
    weight = "float4_e2m1fn per_block(-1:2) scale=float8_e4m3fn@per_channel(0)"
    model = prepare(nn.Sequential(nn.ConvTranspose2d(6, 4, 3)), Config("mine", [Rule("*", weight=weight)]))
    moved = "float4_e2m1fn per_block(0:1,-1:3,-2:1) scale=float8_e4m3fn@per_channel(1)"
    assert str(model[0]._weight_quantizer.spec) == moved


def test_subclasses_that_compute_something_else_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(2, 2), Doubled(2, 2))
    with pytest.warns(CoverageWarning, match=r"Doubled \(1: its own forward\)"):
        prepare(model, presets.INT8)
    assert list(quantizers(model)) == ["0._input_quantizer", "0._weight_quantizer"]


class Large(nn.MaxPool2d):
    """A subclass that changes only how a layer is made."""

    def __init__(self) -> None:
        super().__init__(4)


def test_rules_name_subclasses_by_their_own_class_and_by_their_base() -> None:
    for layers in ("Large", "MaxPool2d", nn.MaxPool2d, Large):
        assert Rule("*", layers=layers).matches("0", Large())  # type: ignore[arg-type]
    assert not Rule("*", layers=("MaxPool1d",)).matches("0", Large())
    model = prepare(nn.Sequential(nn.Conv2d(1, 1, 3), Large()), presets.INT8)
    assert type(model[1]) is Large  # presets leave max pooling in float


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))


def test_a_rule_may_leave_in_float_what_cannot_be_quantized() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Table(), nn.LayerNorm(2))
    config = presets.INT8.with_rule(Rule("1"))
    assert set(config.resolve(model)) == {"0"}
    assert config.left_on_purpose(model) == {model[1]}
    with pytest.raises(ConfigError, match="the rule '1' matches no layer"):
        presets.INT8.with_rule(Rule("1", weight="int8")).resolve(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the rule '2' matches no layer"):
        presets.INT8.with_rule(Rule("2")).resolve(model)  # a norm has no weights


def test_texts_stand_for_what_they_say() -> None:
    rule = Rule("head", input="int8 per_token dynamic", weight="int4 per_channel(0)", layers="Linear")
    assert rule == Rule(
        "head",
        input=TensorConfig("int8 per_token", True),
        weight=TensorConfig("int4 per_channel(0)"),
        layers=("Linear",),
    )
    assert Config("mine", [rule]).rules == Config("mine", rule).rules == (rule,)  # type: ignore[arg-type]
    pools = nn.Sequential(nn.AvgPool2d(1), nn.AdaptiveAvgPool2d(1))
    assert set(Config("pools", Rule(input="int8", layers="AdaptiveAvgPool2d")).resolve(pools)) == {"1"}  # type: ignore[arg-type]
    assert str(prepare(small_net(), "int8-weight-only")) == str(prepare(small_net(), presets.INT8_WEIGHT_ONLY))


def test_a_shared_layer_is_matched_by_any_of_its_names() -> None:
    def shared() -> nn.Module:
        model = nn.Sequential()
        model.body = nn.Sequential(nn.Linear(2, 2))
        model.head = model.body
        return model

    first, last = Rule(weight="int8"), Rule("head*", weight="int4")  # type: ignore[arg-type]
    assert Config("c", (first, last)).resolve(shared()) == {"body.0": last}
    assert Config("c", (last, first)).resolve(shared()) == {"body.0": first}
    assert Config("c", (last, Rule("body.0"))).resolve(shared()) == {"body.0": Rule("body.0")}
    assert quantizers(prepare(shared(), presets.INT8.with_rule(Rule("head*")))) == {}


def test_layers_may_be_given_as_classes() -> None:
    assert Rule(layers=(nn.Linear, "Conv2d")) == Rule(layers=("Linear", "Conv2d"))  # type: ignore[arg-type]
    rule = Rule("*", layers=nn.Linear)  # type: ignore[arg-type]
    assert json.loads(json.dumps(rule.to_dict()))["layers"] == ["Linear"]
    model = prepare(small_net(), presets.INT8.with_rule(rule))
    assert type(model.head) is nn.Linear
    assert model.stem._weight_quantizer is not None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Rule(input=8), "a rule's input must be a TensorConfig, a QuantSpec, a text or None, got 8"),
        (lambda: Rule(layers=(nn.Linear(1, 1),)), r"layers must be class names or classes, .*torch.nn.Linear"),
        (lambda: Config(Rule("a"), Rule("b")), "a text, got .*; write Config"),
        (lambda: prepare(small_net(), Config("c", Rule(weight="int8 per_channel(5)"))), r"stem: .*axis 5 is out of ra"),
    ],
    ids=["rule", "layers", "two rules", "granularity"],
)
def test_mistakes_are_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "x", "rules": [{"pattern": "*", "exection": "integer"}]}, "unknown key 'exection' in a rule; did"),
        ({"name": "x", "rule": []}, "unknown key 'rule' in a configuration; did you mean"),
        ({"rules": []}, "needs the key 'name'"),
        ({"name": "x", "rules": ["int8"]}, "expected a dict as made by to_dict, got 'int8'"),
        ({"name": "x", "rules": {"pattern": "*"}}, "'rules' of a configuration has a wrong type: {'pattern'"),
        ({"name": 5}, "'name' of a configuration has a wrong type: 5"),
        ({"name": "x", "rules": [{"pattern": 5}]}, "'pattern' of a rule has a wrong type: 5"),
        ({"name": "x", "rules": [{"optional": "no"}]}, "'optional' of a rule has a wrong type: 'no'"),
        ({5: 5}, "unknown key 5 in a configuration"),
    ],
)
def test_a_dict_with_mistakes_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(values)


def test_missing_keys_take_their_defaults():
    assert Config.from_dict({"name": "x", "rules": [{"weight": "int8"}]}) == Config("x", (Rule(weight="int8"),))


class Own(nn.Module):
    """A layer with a weight and a function, as PyTorch Geometric and flows have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Spline(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oi->bo", x, self.weight)


class Times(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.mT


@pytest.mark.parametrize("cls", [Own, Spline, Times])
@pytest.mark.parametrize("op", ["linear", "matmul", "einsum"])
def test_weights_in_functions_say_which_target_or_rule_takes_them(cls: type[nn.Module], op: str) -> None:
    x = torch.ones(2, 4)
    message = (
        r"the rule '\*' matches nothing: the weights of the model are in 1 modules .*the first is 0 \(" + cls.__name__
    )
    with pytest.raises(ConfigError, match=message) as caught:
        fq.prepare(nn.Sequential(cls()), "int8", x)
    assert all(text in str(caught.value) for text in ("target='onnxruntime'", "ops=(", "fakequant.nn.quantizes"))
    assert fq.nn.quantizers(fq.prepare(nn.Sequential(cls()), "int8_affine", x, target="onnxruntime"))
    if op == {Own: "linear", Spline: "einsum", Times: "matmul"}[cls]:  # beside the rule of the preset for layers
        config = fq.presets.INT8.with_rule(fq.Rule("*", fq.presets.INT8, ops=(op,)))
        assert (
            list(fq.nn.quantizers(fq.prepare(nn.Sequential(cls()), config, x)))
            == [f"0._sites.{op}_0.{name}" for name in ("input", "other" if op == "matmul" else "weight")]
            or op == "einsum"
        )


@pytest.mark.parametrize("script", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 4))])
@pytest.mark.parametrize("inside", [False, True])
def test_torchscript_says_to_prepare_what_was_written(script: Any, inside: bool) -> None:
    with warnings.catch_warnings(action="ignore"):
        net = script(nn.Sequential(nn.Linear(4, 4)).eval())
    model = nn.Sequential(net) if inside else net
    with pytest.raises(ConfigError, match=r"is TorchScript, .* of torch; prepare the model as"):
        fq.prepare(model, "int8")


@pytest.mark.parametrize("name", ["GGUF_Q4_K_M", "gguf_q3_k_s", "GGUF_Q5_K_M_A8"])
def test_a_mixture_of_gguf_on_another_model_is_an_error_of_the_preset(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?i){name} is a mixture for models that llama.cpp knows: .* single types"):
        fq.prepare(nn.Sequential(nn.Linear(256, 256)), name)


def test_presets_are_registered_by_name() -> None:
    mine = fq.Config("tiny_head", (fq.Rule(weight="int4 per_channel(0)"), fq.Rule("1", weight="int8 per_tensor")))
    try:
        assert fq.register_preset(mine) is mine
        fq.register_preset(fq.Config("tiny_head", mine.rules))  # an equal one again
        model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "Tiny-Head")
        assert str(model[1].weight_quantizer.spec) == "int8 per_tensor"
        with pytest.raises(ConfigError, match="another preset has the name TINY_HEAD"):
            fq.register_preset(fq.Config("TINY_HEAD", (fq.Rule(weight="int8 per_tensor"),)))
        with pytest.raises(ConfigError, match=r"did you mean .*TINY_HEAD"):
            fq.prepare(nn.Linear(4, 4), "tiny_haed")
    finally:
        NAMED.pop("TINY_HEAD", None)
    for name in ("INT8", "w4a16"):
        with pytest.raises(ConfigError, match="another preset has the name"):
            fq.register_preset(fq.Config(name, mine.rules))
    with pytest.raises(ConfigError, match=r"register_preset takes a fakequant.Config, got 'int8'"):
        fq.register_preset("int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="letters, digits and _"):
        fq.register_preset(fq.Config("int8 per_channel(0)", mine.rules))
