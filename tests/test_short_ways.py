"""The names and arguments that people of other libraries type."""

import pytest
from torch import nn

import fakequant as fq
from fakequant.calibration import calibrators, find_method, make_calibrator
from fakequant.calibration.calibrator import ALIASES as METHODS
from fakequant.errors import ConfigError
from fakequant.model.presets import ALIASES, find_preset, presets


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def specs(model: nn.Module) -> dict[str, str]:
    return {name: str(quantizer.spec) for name, quantizer in fq.nn.quantizers(model).items()}


def test_other_libraries_names_of_presets_and_methods() -> None:
    assert all(find_preset(alias).name == name for alias, name in ALIASES.items())
    assert set(ALIASES.values()) <= set(presets())
    assert not set(ALIASES) & set(presets())
    assert find_preset("w4a16-g128") is presets()["INT4_GROUP128"]
    assert all(
        type(make_calibrator(alias, "int8")) is type(make_calibrator(name, "int8")) for alias, name in METHODS.items()
    )
    assert not set(METHODS) & set(calibrators())
    assert find_preset("int8wo") is presets()["INT8_WEIGHT_ONLY"]
    assert find_method("hist") == "mse"
    with pytest.raises(ConfigError, match="did you mean W4A16"):
        find_preset("w4a6")


def test_layers_to_skip_and_other_presets_for_some() -> None:
    model = fq.prepare(net(), "w8a8", skip=["0"], rules={"2": "w8a16"})
    assert specs(model) == {
        "1._input_quantizer": "int8 per_tensor",
        "1._weight_quantizer": "int8 per_channel(0)",
        "2._weight_quantizer": "int8 per_channel(0)",
    }
    assert type(model[0]) is nn.Linear
    by_rules = fq.presets.INT8.with_rule(fq.Rule("0"), fq.Rule("2", weight="int8 per_channel(0)"))
    assert specs(fq.prepare(net(), by_rules)) == specs(model)


def test_a_rule_takes_a_preset() -> None:
    assert fq.Rule("2", fq.presets.INT4) == fq.Rule("2", input="uint4", weight="int4 per_channel(0)")
    assert fq.Rule("2", fq.presets.NVFP4).input == fq.TensorConfig(fq.presets.NVFP4.rules[0].input.spec, dynamic=True)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"skip takes a list of patterns, got 'head'; write skip=\['head'\]"):
        fq.prepare(net(), "int8", skip="head")
    with pytest.raises(ConfigError, match="the rule 'head' matches no layer"):
        fq.prepare(net(), "int8", skip=["head"])
    with pytest.raises(ConfigError, match=r"exactly one rule for all layers, and cannot have input="):
        fq.Rule("2", fq.presets.INT8, weight="int4")
    with pytest.raises(ConfigError, match="exactly one rule for all layers"):
        fq.Rule("2", fq.Config("none", ()))
