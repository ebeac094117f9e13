"""Graphs of `quantized_decomposed`: the bits of the simulation in torch, shared quantizers, and what is refused."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export.pt2e import Lowering, lowered
from fakequant.nn import quantizers
from tests.support.bits import assert_same_bits
from tests.support.mobile import ASYMMETRIC, EXACT, MODELS, FlatFork, InPlace, Pooled, PooledFork, calibrated, rules_of


def assert_exported(model: nn.Module, *args: Tensor) -> ExportedProgram:
    """The graph, which has the bits of the model and no float weights that are quantized."""
    program = fq.export_pt2e(model, args)
    with torch.no_grad():
        assert_same_bits(program.module()(*args), model(*args))
    assert not any("fakequant" in str(node.target) for node in program.graph.nodes)
    weights = {name for name, _ in program.named_parameters() if name.endswith("weight")}
    quantized = {path.rpartition(".")[0] for path in quantizers(model) if path.endswith("_weight_quantizer")}
    assert not {name.rpartition(".")[0] for name in weights} & quantized
    return program


def operators(program: ExportedProgram) -> Counter[str]:
    names = (str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function")
    return Counter(name for name in names if "quantize" in name)


@pytest.mark.parametrize("target", [None, "xnnpack"])
@pytest.mark.parametrize("preset", EXACT)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_graph_has_the_bits_of_the_simulation(name: str, preset: str, target: str | None) -> None:
    options = {} if target is None else {"target": target}
    assert_exported(*calibrated(name, EXACT[preset], **options))


@pytest.mark.parametrize("preset", ["int8", "int8_affine", "int8_weight_only", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_presets_that_divide_are_exported_and_said(name: str, preset: str) -> None:
    model, x = calibrated(name, preset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = fq.export_pt2e(model, x)
    said = [str(one.message) for one in caught if "divide by their scale" in str(one.message)]
    assert len(said) == (preset != "int8_weight_only")
    with torch.no_grad():
        difference = (program.module()(x) - model(x)).abs().max()
    assert difference <= 0.02 * model(x).abs().max(), "a code or two of 8 bits"
    assert not said or "target='executorch'" in said[0]


@pytest.mark.parametrize("name", ["mlp", "attention", "tables"])
@pytest.mark.parametrize(
    "weight",
    [
        "int4 per_block(-1:32)",
        "int4 per_block(-1:16) scale=bfloat16",
        "uint4 per_block(-1:32)",
        "int3 per_block(0:2,-1:32)",
    ],
)
def test_groups_of_weights(name: str, weight: str) -> None:
    config = rules_of(weight=weight)
    program = assert_exported(*calibrated(name, config))
    is_row = name == "tables" and ":32" in weight  # a row is one group
    assert set(operators(program)) == {"dequantize_per_channel" + "_group" * (not is_row or "0:2" in weight)}


def test_fixed_codes_of_a_solver_are_in_the_graph() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), "int4_group32")
    fq.ptq.improve(model, [x, x + 1], "fast", progress=False)
    assert_exported(model.eval(), x)


def test_equal_quantizers_of_one_tensor_share_one_quantize() -> None:
    model, x = calibrated("attention", ASYMMETRIC, target="xnnpack")
    program = assert_exported(model, x)
    scales = {
        path: float(one.scale or 0) for path, one in quantizers(model).items() if path.endswith("_input_quantizer")
    }
    assert scales["q._input_quantizer"] == scales["k._input_quantizer"] == scales["v._input_quantizer"]
    readers = Counter(node.args[0] for node in program.graph.nodes if "quantize_per_tensor" in str(node.target))
    found = operators(program)
    assert found["dequantize_per_tensor"] == found["quantize_per_tensor"] + 2, "of q, k and v"
    assert max(readers.values()) == 3
    quantized = [node.args for node in program.graph.nodes if ".quantize_per_tensor." in str(node.target)]
    assert len(quantized) == len({tuple(map(str, args)) for args in quantized})


def test_other_quantizers_of_one_tensor_stay_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    specs: list[Any] = ["int8 reciprocal", "int4 reciprocal"]
    rules = (fq.Rule(name, input=spec) for name, spec in zip("ab", specs, strict=True))
    config = fq.Config("two", tuple(rules))
    x = torch.randn(4, 8)
    model = fq.prepare(Two().eval(), config)
    fq.calibrate(model, [x], progress=False)
    assert operators(assert_exported(model, x))["quantize_per_tensor"] == 2


def test_a_sum_in_place_is_a_sum() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = fq.prepare(InPlace().eval(), ASYMMETRIC, x, target="xnnpack")
    fq.calibrate(model, [x], progress=False)
    program = assert_exported(model.eval(), x)
    assert not any("copy_" in str(node.target) for node in program.graph.nodes)


def test_a_copy_over_a_part_stays() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            before = y[:, :4] + 1
            y[:, :4] += x[:, :4]
            view = y.view(-1)
            y *= 2
            return torch.cat([before.flatten(), view])

    x = torch.randn(2, 8)
    model = fq.prepare(Part().eval(), ASYMMETRIC)
    fq.calibrate(model, [x], progress=False)
    assert_exported(model.eval(), x)


@pytest.mark.parametrize("make", [Pooled, PooledFork, FlatFork])
@pytest.mark.parametrize("config", [ASYMMETRIC, EXACT["symmetric"], EXACT["sixteen"]], ids=str)
def test_what_is_pooled_or_reshaped_is_quantized_before_it(make: Any, config: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = fq.prepare(make().eval(), config, x, target="xnnpack")
    fq.calibrate(model, [x], progress=False)
    program = assert_exported(model.eval(), x)
    readers = {node: [str(one.target) for one in node.users] for node in program.graph.nodes}
    relu = next(node for node in program.graph.nodes if node.name == "relu")
    assert readers[relu] == ["quantized_decomposed.quantize_per_tensor.default"]


SCALES = [0.1, 1 / 3, 0.0117, 1.0, 2.0**-20, 7e-3]


@pytest.mark.parametrize("spec", ["int8", "uint8", "int8 asymmetric", "int16", "int4"])
@pytest.mark.parametrize("scale", SCALES)
def test_ties_zeros_and_infinities(spec: str, scale: float) -> None:
    parsed = fq.QuantSpec.parse(f"{spec} reciprocal")
    point = None if parsed.symmetric else torch.tensor([3], dtype=torch.int32)
    params = fq.QParams(torch.tensor([scale]), point)

    class Quantize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, parsed, scale=params.scale, zero_point=params.zero_point)

    steps = torch.arange(-600, 600) / 2
    x = torch.cat([steps * scale, torch.nextafter(steps * scale, torch.tensor(0.0)), torch.tensor([0.0, -0.0, 1e-40])])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, 3e38])])
    program = fq.export_pt2e(Quantize(), x)
    assert_same_bits(program.module()(x), Quantize()(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(32, 16)).to(dtype).eval(), EXACT["symmetric"])
    x = torch.randn(8, 32, dtype=dtype)
    fq.calibrate(model, [x], progress=False)
    assert_exported(model, x)


def test_a_recurrent_layer_is_written_step_by_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    model = fq.prepare(nn.GRU(16, 8).eval(), EXACT["symmetric"])
    fq.calibrate(model, [x], progress=False)
    program = fq.export_pt2e(model, x)
    with torch.no_grad():
        for one, other in zip(program.module()(x), model(x), strict=True):
            assert_same_bits(one, other)


def test_any_batch_size() -> None:
    model, x = calibrated("cnn", ASYMMETRIC)
    program = fq.export_pt2e(model, x, dynamic_shapes=({0: Dim("batch", max=64)},))
    more = torch.randn(7, 3, 8, 8)
    with torch.no_grad():
        assert_same_bits(program.module()(more), model(more))


def test_keyword_arguments_and_parts_of_a_batch() -> None:
    model, x = calibrated("mlp", ASYMMETRIC)
    program = fq.export_pt2e(model, {"input": x})
    with torch.no_grad():
        assert_same_bits(program.module()(input=x), model(x))
    assert fq.export_pt2e(model, (x, torch.zeros(9)), inputs=0).graph_signature.user_inputs == ("input",)


def test_a_model_is_as_before() -> None:
    model, x = calibrated("cnn", ASYMMETRIC, target="xnnpack")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fq.export_pt2e(model, x)
    assert model.training
    assert before.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_buffer_that_forward_writes_is_written_by_the_graph() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.get_buffer("steps").add_(1)
            return self.fc(x) * self.get_buffer("steps")

    x = torch.randn(2, 4)
    model = fq.prepare(Steps().eval(), EXACT["symmetric"])
    fq.calibrate(model, [x], progress=False)
    steps = model.get_buffer("steps").zero_()
    run = fq.export_pt2e(model, x).module()
    assert steps == 0
    with torch.no_grad():
        for _ in range(3):
            assert_same_bits(run(x), model(x))


class FloatWeights(Lowering):
    float_weights = True


def test_weights_as_floats_that_are_quantized() -> None:
    """The form that LiteRT reads."""
    model, x = calibrated("cnn", ASYMMETRIC)
    program = lowered(model, x, call="export_litert(model, example, path)", operators=FloatWeights)
    with torch.no_grad():
        assert_same_bits(program.module()(x), model(x))
    assert operators(program)["quantize_per_channel"] == operators(program)["dequantize_per_channel"] == 8
    assert not any(value.dtype is torch.int8 for value in program.state_dict.values())


def _observing() -> nn.Module:
    model, _ = calibrated("mlp", "int8")
    quantizers(model)["0._input_quantizer"].mode = fq.nn.Mode.OBSERVE
    return model


def _mlp(config: Any) -> nn.Module:
    return calibrated("mlp", config)[0]


REFUSED: dict[str, tuple[Any, str]] = {
    "fp8": (lambda: _mlp("fp8"), r"0\._input_quantizer: float8_e4m3fn per_tensor: .*integers.*\n0\._weight_quantizer"),
    "nvfp4": (lambda: _mlp("nvfp4"), r"float4_e2m1fn is not one; prepare with int8, or use export_onnx"),
    "nf4": (lambda: _mlp("nf4_weight_only"), r"0\._weight_quantizer: .*nf4 is not one"),
    "dynamic": (
        lambda: _mlp("int8_per_token"),
        r"0\._input_quantizer: .*'int8 per_token asymmetric' alone; use W4A8",
    ),
    "multiplier": (
        lambda: _mlp(rules_of(input="int8 multiplier")),
        r"which Arithmetic\.MULTIPLIER does not; use RECIPROCAL",
    ),
    "stochastic": (lambda: _mlp(rules_of(input="int8 stochastic")), r"rounding=Rounding\.NEAREST_EVEN"),
    "offsets": (lambda: _mlp("GGUF_Q4_1"), r"0\._weight_quantizer: .*offsets and 'signed' to GGUF"),
    "24 bits": (lambda: _mlp(rules_of(input="int[-100000,5]")), r"at most 16 bits"),
    "groups that are cut": (
        lambda: _mlp(rules_of(weight="int4 per_block(-1:48,pad)")),
        r"whose length divides 64",
    ),
    "groups of activations": (lambda: _mlp(rules_of(input="int8 per_block(-1:32)")), r"no groups of activations"),
    "groups of kernels": (
        lambda: calibrated("cnn", "int4_group32")[0],
        r"blocks\.0\.a\._weight_.*per_channel",
    ),
    "not calibrated": (lambda: fq.prepare(MODELS["mlp"][0](), "int8"), r"2 quantizers are not calibrated.*calibrate"),
    "observing": (_observing, r"0\._input_quantizer: is observing; finish the calibration"),
    "float": (lambda: MODELS["mlp"][0](), r"nothing in the model quantizes; prepare it first"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_refused_names_the_quantizer_and_a_cure(name: str) -> None:
    make, words = REFUSED[name]
    model = make()
    example = MODELS["cnn" if "kernels" in name else "mlp"][1]
    with pytest.raises(ExportError, match=words):
        fq.export_pt2e(model, example)


def test_a_scale_of_the_input_is_refused() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, "int8 reciprocal")

    with pytest.raises(ExportError, match=r"the model: .*depends on the input.*static range"):
        fq.export_pt2e(Own(), torch.randn(3, 4))


def test_arguments_that_are_wrong() -> None:
    model, x = calibrated("mlp", ASYMMETRIC)
    with pytest.raises(ExportError, match=r"export_pt2e takes a model, got .*export_pt2e\(model, example\)"):
        fq.export_pt2e(x, model)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="an example is a tensor"):
        fq.export_pt2e(model, 3)
    with pytest.raises(ExportError, match=r"9\]|64"):
        fq.export_pt2e(model, torch.randn(3, 9))


def test_no_warning_where_the_arithmetic_is_that_of_the_graph() -> None:
    model, x = calibrated("cnn", ASYMMETRIC)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fq.export_pt2e(model, x)
