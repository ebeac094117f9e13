"""Whole models to ONNX: results, sizes, and that the model is not touched."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
import torch
from torch import Tensor, nn

from fakequant.errors import ExportError
from fakequant.export import export_onnx, verify_onnx
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.nn import Add, MatMul, Mode, quantizers
from tests.support.export_models import config, linear
from tests.support.matrix import full, sweep


class Net(nn.Module):
    """One of each kind of layer that has its own path through the exporter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2)
        self.pool = nn.AvgPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.product = MatMul()
        self.sum = Add()
        self.head = nn.Linear(24, 5, bias=False)
        self.head2 = nn.Linear(24, 5)
        self.head2.weight = self.head.weight

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        x = self.norm(self.conv(image)).relu()
        x = self.drop(self.pool(self.up(x)))
        x = self.product(x.flatten(2).transpose(1, 2), x.flatten(2))
        x = self.sum(x.flatten(1)[:, :24], self.embedding(words).flatten(1))
        return self.head(x) + self.head2(x)


def inputs(batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 2, 4, 4, generator=generator)
    return image, torch.randint(0, 11, (batch, 4), generator=generator)


def net(config: Config) -> nn.Module:
    torch.manual_seed(0)
    model = prepare(Net(), config)
    calibrate(model, [inputs(seed=seed) for seed in range(3)])
    return model


ODD = Config(
    "ODD",
    (Rule(input=TensorConfig("int[-100,37] asymmetric"), weight=TensorConfig("uint3 per_channel(0)")),),
)


# Block sizes that do not divide most axes of the model.
NEW = [
    config("MXFP4", "float4_e2m1fn per_block(1:4,pad) scale=float8_e8m0fnu:floor"),
    config("MXFP8", "float8_e4m3fn per_block(1:4,pad) scale=float8_e8m0fnu:ceil"),
    config("MXINT8", "int8 per_block(1:4,pad) scale=float8_e8m0fnu:even"),
    config("NVFP4", "float4_e2m1fn per_block(1:4,pad) scale=float8_e4m3fn@per_tensor"),
    config("INT4_GROUP", "int4 per_block(1:4,pad)"),
    config("DOUBLE", "int4 per_block(1:4,pad) scale=uint8@per_tensor", input=None),
    config("NF4", "nf4 per_block(1:4,pad)", input=None),
    config("FP6", "float6_e3m2fn per_channel(0)", input=TensorConfig("float6_e2m3fn")),
]
CONFIGS = [
    presets.INT8,
    presets.INT8_AFFINE,
    presets.INT8_PER_TOKEN,
    presets.INT8_WEIGHT_ONLY,
    presets.INT4,
    presets.INT4_WEIGHT_ONLY,
    presets.FP8,
    presets.FP8_E5M2,
    ODD,
    *NEW,
]


# Static and dynamic ranges, zero points, float8 and each kind of scale of blocks.
QUICK = ["INT8_PER_TOKEN", "ODD", "NVFP4"]
BY_NAME = {config.name: config for config in CONFIGS}


@sweep("config", full(BY_NAME), full(QUICK), config=BY_NAME)
def test_every_preset_computes_the_same_at_another_batch_size(config: Config, tmp_path: Path) -> None:
    model = net(config)
    shapes: Any = ({0: "batch"}, {0: "batch"})
    report = export_onnx(model, inputs(), tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert sorted(q.quantizer for q in report.quantizers) == sorted(quantizers(model))
    assert report.left_out == []
    found = verify_onnx(tmp_path / "m.onnx", model, [inputs(batch, seed=batch) for batch in (1, 5)])
    assert found.exact, str(found)
    assert len(found.rows) == len(quantizers(model))
    # The sums run in another order, so that a number may round to another step; none is further off. With 8 values and
    # a scale for every 4 numbers, one step is large, and moves the scale of the next layer.
    if config in NEW and config.rules[0].input is not None:
        return
    assert found.outputs[0].argmax_agreement == 1.0
    with torch.no_grad():
        size = model.eval()(*inputs()).abs().max().item()
    assert found.outputs[0].max_abs < 0.02 * size


def test_default_names_are_those_of_the_arguments_and_others_can_be_given(tmp_path: Path) -> None:
    model = net(presets.INT8)
    image, words = inputs()
    export_onnx(model, {"words": words, "image": image}, tmp_path / "a.onnx")
    export_onnx(model, (image, words), tmp_path / "b.onnx", input_names=["i", "w"], output_names=["y"])
    a, b = (onnx.load(tmp_path / name).graph for name in ("a.onnx", "b.onnx"))
    assert sorted(value.name for value in a.input) == ["image", "words"]
    assert [value.name for value in b.input] == ["i", "w"]
    assert [value.name for value in b.output] == ["y"]
    assert verify_onnx(tmp_path / "a.onnx", model, [{"image": image, "words": words}]).exact
    assert verify_onnx(tmp_path / "b.onnx", model, [(image, words, "label")]).exact


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = net(presets.INT8)
    model.train()
    model.get_submodule("norm").eval()
    weight = quantizers(model)["conv._weight_quantizer"]
    weight.reset()  # follows its weight, and is fixed only while the model is traced
    before, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    training = [m.training for m in model.modules()]
    export_onnx(model, inputs(), tmp_path / "m.onnx")
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [type(m) for m in model.modules()] == classes
    assert [m.training for m in model.modules()] == training
    assert weight.scale is None
    assert all(p.requires_grad for p in model.parameters())
    found = verify_onnx(tmp_path / "m.onnx", model, [inputs()])
    assert found.exact
    # Dropout would put zeros everywhere.
    assert found.outputs[0].max_abs < 0.02


def test_the_model_is_left_as_it_was_when_tracing_fails(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(presets.INT8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else x

    model = Fails().train()
    weight = quantizers(model)["layer.0.0._weight_quantizer"]
    weight.reset()
    with pytest.raises(RuntimeError):
        export_onnx(model, torch.ones(1, 8), tmp_path / "m.onnx")
    assert weight.scale is None
    assert model.training
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "most"),
    [
        pytest.param(presets.INT8, 0.25, marks=pytest.mark.exhaustive),
        pytest.param(presets.INT4_WEIGHT_ONLY, 0.125, marks=pytest.mark.exhaustive),
        (config("FP4", "float4_e2m1fn per_channel(0)", input=None), 0.125),
    ],
    ids=["INT8", "INT4", "FP4"],
)
def test_file_shrinks(config: Config, most: float, tmp_path: Path) -> None:
    model = linear(config, features=4096)
    report = export_onnx(model, torch.zeros(1, 4096), tmp_path / "m.onnx")
    assert report.bytes == (tmp_path / "m.onnx").stat().st_size
    torch.onnx.export(
        nn.Linear(4096, 4).eval(), (torch.zeros(1, 4096),), tmp_path / "float.onnx", external_data=False, verbose=False
    )
    size = (tmp_path / "float.onnx").stat().st_size
    assert report.bytes - 3000 < most * size  # 3 kB are the graph and the record
    assert abs(report.float_bytes - size) < 0.1 * size
    assert onnx.load(tmp_path / "m.onnx").graph.initializer[0].name != "0.0.weight"


def test_a_weight_that_is_also_used_in_float_is_kept(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(presets.INT8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ self.layer.get_parameter("0.0.weight")

    export_onnx(Tied(), torch.ones(2, 8), tmp_path / "m.onnx")
    names = {tensor.name for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert {"layer.0.0.weight", "layer.0.0._weight_quantizer/codes"} <= names


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = net(presets.INT8)
    export_onnx(model, inputs(), tmp_path / "m.onnx")
    names = {tensor.name for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer}
    assert "head._weight_quantizer/codes" in names
    assert "head2._weight_quantizer/codes" not in names
    assert {row.quantizer for row in verify_onnx(tmp_path / "m.onnx", model).rows} == set(quantizers(model))


def test_half_precision_model(tmp_path: Path) -> None:
    model = linear(presets.INT8).half()
    export_onnx(model, torch.ones(2, 8).half(), tmp_path / "m.onnx")
    found = verify_onnx(tmp_path / "m.onnx", model, [torch.randn(2, 8).half()])
    assert found.exact, str(found)
    assert {row.elements for row in found.rows} == {16, 32}


def test_learned_scales_are_exported(tmp_path: Path) -> None:
    model = linear(presets.INT8)
    for quantizer in quantizers(model).values():
        quantizer.learn()
    export_onnx(model, torch.ones(2, 8), tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", model, [torch.randn(2, 8)]).exact


def test_quantizers_that_are_off_or_not_reached_are_left_out(tmp_path: Path) -> None:
    class Unreached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = linear(presets.INT8), linear(presets.INT8)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unreached()
    quantizers(model)["used.0.0._input_quantizer"].mode = Mode.OFF
    report = export_onnx(model, torch.ones(2, 8), tmp_path / "m.onnx")
    assert [q.quantizer for q in report.quantizers] == ["used.0.0._weight_quantizer"]
    expected = ["unused.0.0._input_quantizer", "unused.0.0._weight_quantizer", "used.0.0._input_quantizer"]
    assert report.left_out == expected
    why = "off, not reached by the example, or within a constant"
    assert f"not in the file ({why}): {', '.join(expected)}" in str(report)


@pytest.mark.parametrize("shape", [(2, 4, 4), (3, 2, 4, 4)], ids=str)
def test_a_convolution_reads_what_is_dequantized_without_a_batch_too(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = prepare(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2)), presets.INT8)
    calibrate(model, [torch.randn(shape)])
    export_onnx(model, torch.randn(shape), tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx").graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    read = [makers[name] for node in graph.node if node.op_type == "Conv" for name in node.input[:2]]
    assert read == ["DequantizeLinear"] * 4


def test_operator_sets(tmp_path: Path) -> None:
    model = linear(presets.INT8)
    for opset in (18, 25):
        assert export_onnx(model, torch.ones(2, 8), tmp_path / "m.onnx", opset=opset).opset == opset
        file = onnx.load(tmp_path / "m.onnx")
        assert [(entry.domain, entry.version) for entry in file.opset_import] == [("", opset)]
        assert file.ir_version == 10
        assert verify_onnx(tmp_path / "m.onnx", model, [torch.randn(2, 8)]).exact


def test_the_file_holds_nothing_of_the_authors_machine(tmp_path: Path) -> None:
    export_onnx(net(presets.INT8), inputs(), tmp_path / "m.onnx")
    data = (tmp_path / "m.onnx").read_bytes()
    assert os.fsencode(Path(__file__).name) not in data
    assert b"stack_trace" not in data


def test_report_reads_as_a_table(tmp_path: Path) -> None:
    report = export_onnx(linear("int8_narrow"), torch.ones(2, 8), tmp_path / "m.onnx")
    lines = str(report).splitlines()
    assert lines[0].split() == ["quantizer", "specification", "in", "ONNX"]
    assert lines[1].startswith("0.0._input_quantizer   int8_narrow per_tensor")
    assert lines[1].endswith("clipped before to -127 to 127")
    assert f"{tmp_path / 'm.onnx'}: opset 20, {report.bytes:,} bytes" in lines[3]
    assert report.to_dict()["quantizers"][1]["quantizer"] == "0.0._weight_quantizer"


def test_quantizers_within_a_constant_are_named_as_left_out(tmp_path: Path) -> None:
    class LowRank(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ (self.weight @ self.weight)

    rules = Config("", (Rule("*", weight="int8 per_tensor", ops=("matmul",)),))
    model, x = prepare(LowRank(4, 4), rules, example=torch.ones(2, 4)), torch.ones(2, 4)
    calibrate(model, [x])
    written = export_onnx(model, x, tmp_path / "model.onnx")
    assert written.left_out == ["_sites.matmul_0.input", "_sites.matmul_0.other"]
    assert "not in the file (off, not reached by the example, or within a constant): _sites.matmul_0" in str(written)


class Branching(nn.Linear):
    """Runs, and cannot be traced: its way depends on its input."""

    def forward(self, input):
        return super().forward(input) if input.sum() > 0 else input


def test_what_tracing_alone_cannot_do_stays_the_error_of_torch(tmp_path):
    model = prepare(nn.Sequential(Branching(4, 4), nn.Linear(4, 4)), "INT8_WEIGHT_ONLY")
    with pytest.raises(Exception, match="data-dependent") as found:
        export_onnx(model, torch.ones(1, 4), tmp_path / "model.onnx")
    assert not isinstance(found.value, ExportError)


def test_an_example_that_the_model_refuses_is_named_in_one_line(tmp_path, caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    model = prepare(nn.Sequential(nn.Linear(4, 4)), "INT8_WEIGHT_ONLY")
    said = r"^the example, tensors of shape \[2, 5\], failed in layer 0 \(Linear 4 -> 4\)"
    with pytest.raises(ExportError, match=said):
        export_onnx(model, torch.ones(2, 5), tmp_path / "model.onnx")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert log.level == before


class Pair(NamedTuple):
    mean: Tensor
    others: list[Tensor]


# The names of nodes (`linear`, `add`), of inputs (`x`) and of parameters are taken by other values.
RESULTS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "tensor": (lambda y: y, ["output"]),
    "tuple": (lambda y: (y, None, y + 1), ["output", "output_2"]),
    "the same tensor twice": (lambda y: (y, y), ["output", "output_1"]),
    "dict": (lambda y: {"mean": y.sum(), "std": y.mean(), "linear": y + 1}, ["mean", "std", "linear"]),
    "taken": (lambda y: {"x": y, "layer.weight": y + 1, "val_0": y * 2}, ["x_2", "layer.weight_2", "val_0"]),
    "nested": (lambda y: (y, {"a": [y + 1]}), ["output", "output_1_a_0"]),
    "named tuple": (lambda y: Pair(y, [y + 1, y + 2]), ["mean", "others_0", "others_1"]),
    "alike": (lambda y: {"a_0": y, "a": [y + 1]}, ["a_0", "a_0_2"]),
}


@pytest.mark.parametrize(("result", "names"), RESULTS.values(), ids=RESULTS)
def test_outputs_have_the_names_of_the_result(
    result: Callable[[Tensor], Any], names: list[str], tmp_path: Path
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Any:
            return result(self.layer(x))

    torch.manual_seed(0)
    model, x = prepare(Model(), "INT8_WEIGHT_ONLY"), torch.randn(2, 32)
    for given in (None, [f"given_{name}" for name in names]):
        export_onnx(model, x, tmp_path / "m.onnx", output_names=given)
        assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.output] == (given or names)
        report = verify_onnx(tmp_path / "m.onnx", model, [x])
        assert report.exact
        assert [row.name for row in report.outputs] == (given or names)
