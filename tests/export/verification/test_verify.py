"""Verification finds what is wrong: other scales, codes and models, and files that are damaged, foreign or crafted."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError, VerificationError
from fakequant.export import export_onnx, verify_onnx
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.nn import quantizers
from tests.hostile.record_mutations import record_mutations
from tests.support.export_files import INPUT, WEIGHT, batch, constant, exported, rewrite, two_layers
from tests.support.matrix import full, sweep


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m.onnx").write_bytes(exported())
    return tmp_path / "m.onnx"


def replace(path: Path, name: str, change: Any) -> None:
    """Change a constant of a file."""
    model = onnx.load(path)
    tensor = constant(model, name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))
    onnx.save(model, path)


def test_an_untouched_file_is_exact(path: Path) -> None:
    report = verify_onnx(path, two_layers(), [batch(), batch(3)])
    assert report.exact
    assert report.differing == 0
    assert report.batches == 2
    assert [(row.quantizer, row.kind, row.elements) for row in report.rows] == [
        (INPUT, "activation", 48),
        (WEIGHT, "weight", 128),
        ("2._input_quantizer", "activation", 96),
        ("2._weight_quantizer", "weight", 64),
    ]
    (output,) = report.outputs
    assert (output.elements, output.rows, output.argmax_agreement) == (24, 6, 1.0)
    assert output.max_abs < 1e-6
    scale = quantizers(two_layers())["2._input_quantizer"].scale
    assert scale is not None
    assert output.step == scale.item()
    assert output.steps == output.max_abs / scale.item()
    assert len(report.optimised) == 1
    assert report.optimised_error is None


def test_without_model_and_batches(path: Path) -> None:
    report = verify_onnx(path)
    assert report.exact
    assert report.outputs == []
    assert report.inputs == "random numbers in the shapes of the example"
    assert [row.elements for row in report.rows] == [24, 128, 48, 64]


def one_ulp_more(array: Any) -> Any:
    return (array.view("int32") + 1).view("float32")


TAMPERED = {
    "activation_scale": (f"{INPUT}/scale", one_ulp_more, INPUT),
    "activation_zero_point": (f"{INPUT}/zero_point", lambda z: z - 1, INPUT),
    "weight_scale": (f"{WEIGHT}/scale", one_ulp_more, WEIGHT),
    "weight_code": (f"{WEIGHT}/codes", lambda codes: codes ^ (codes == codes.max()), WEIGHT),
}


@pytest.mark.parametrize(("name", "change", "quantizer"), TAMPERED.values(), ids=TAMPERED)
def test_a_changed_constant_is_found(path: Path, name: str, change: Any, quantizer: str) -> None:
    replace(path, name, change)
    # Numbers beyond the range, because only there a zero point shows.
    report = verify_onnx(path, two_layers(), [batch() * 3])
    rows = {row.quantizer: row for row in report.rows}
    assert not report.exact
    assert rows[quantizer].differing > 0
    assert not rows[quantizer].intact
    assert all(row.exact for row in report.rows if row.quantizer != quantizer)
    assert "NOT exact" in str(report)
    assert "changed since the export" in str(report)
    # Without the model its parameters are unknown, but the digest is not.
    alone = verify_onnx(path, None, [batch()])
    assert not alone.exact
    assert [row.quantizer for row in alone.rows if not row.intact] == [quantizer]


def test_a_changed_node_is_found(path: Path) -> None:
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.name == f"{INPUT}/DequantizeLinear")
    node.input[1] = "2._input_quantizer/scale"
    onnx.save(model, path)
    rows = {row.quantizer: row for row in verify_onnx(path, None, [batch()]).rows}
    assert rows[INPUT].differing > 0
    assert rows[INPUT].intact


def test_a_model_that_was_trained_on_is_found(path: Path) -> None:
    model = two_layers()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1.5)
    rows = {row.quantizer: row for row in verify_onnx(path, model, [batch()]).rows}
    assert rows[WEIGHT].differing > 0
    assert rows[INPUT].exact


def test_nan_inputs_are_counted(path: Path) -> None:
    x = batch()
    x[0, :3] = float("nan")
    report = verify_onnx(path, None, [x])
    assert (report.rows[0].nan_inputs, report.rows[0].differing) == (3, 3)
    assert "3 NaN in" in str(report)
    assert "3 NaN reached quantizers, and have no integer code; give batches without NaN" in str(report)


OTHER_MODELS = {
    "without_the_quantizer": (lambda: nn.Linear(8, 4), "has a quantizer 0._input_quantizer, which the model lacks"),
    "of_another_shape": (
        lambda: nn.Sequential(*prepare_linear(8, 12), nn.ReLU(), *prepare_linear(12, 4)),
        "this model is not the exported model",
    ),
}


def prepare_linear(n: int, m: int) -> nn.Sequential:
    model = prepare(nn.Sequential(nn.Linear(n, m)), presets.INT8_AFFINE)
    calibrate(model, [torch.randn(4, n)])
    return model


@pytest.mark.parametrize(("make", "text"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_another_model_is_an_error(path: Path, make: Any, text: str) -> None:
    with pytest.raises(VerificationError, match=text) as error:
        verify_onnx(path, make(), [batch()])
    assert str(error.value).startswith(f"{path}: ")


BATCHES = {
    "none": ([], "batches is empty"),
    "too_few_tensors": ([()], "a batch has 0 tensors, but the file has 1 inputs"),
    "wrong_shape": (
        [torch.zeros(3, 9)],
        r"input is float32 \[3, 9\], but the file takes float32 \[3, 8\]; .* dynamic_shapes= for other lengths$",
    ),
    "wrong_dtype": (
        [torch.zeros(3, 8).double()],
        r"input is float64 \[3, 8\], but the file takes float32 \[3, 8\]; .* as the example$",
    ),
    "wrong_kind": ([{"x": torch.zeros(3, 8)}], "pass batches of the same form as the example"),
}


@pytest.mark.parametrize(("batches", "text"), BATCHES.values(), ids=BATCHES)
def test_batches_that_do_not_fit_are_an_error(path: Path, batches: Any, text: str) -> None:
    with pytest.raises(VerificationError, match=text):
        verify_onnx(path, None, batches)


LOADS = {
    "INT8": presets.INT8,
    "INT8_AFFINE": presets.INT8_AFFINE,
    "INT4": presets.INT4,
    "odd": Config("odd", (Rule(input=TensorConfig("int[-100,37]"), weight=TensorConfig("int3 per_channel(0)")),)),
    "clipped_4_bits": Config("3 bits", (Rule(input=TensorConfig("uint3"), weight=TensorConfig("int4")),)),
}


@sweep("config", full(LOADS), full(["INT8_AFFINE", "odd"]), config=LOADS)
def test_the_optimised_file_loads(config: Config, tmp_path: Path) -> None:
    model = two_layers(config)
    export_onnx(model, batch(), tmp_path / "m.onnx", dynamic_shapes=({0: "batch"},))
    report = verify_onnx(tmp_path / "m.onnx", model, [batch()])
    assert report.exact
    assert report.optimised_error is None


def test_bfloat16_inside_a_float_model(tmp_path: Path) -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x.bfloat16(), "int8", scale=0.1).float()

    export_onnx(Inside(), batch(), tmp_path / "m.onnx")
    report = verify_onnx(tmp_path / "m.onnx", Inside(), [batch() * 4])
    assert report.exact
    assert report.rows[0].elements == 24


def test_blocks_that_onnx_needs_repeated_are_read_back_from_the_file(tmp_path: Path) -> None:
    class Tiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))
            self.register_buffer("scale", torch.rand(2, 2) + 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x @ fq.fake_quantize(self.weight, "int8 per_block(0:4,1:2)", scale=self.get_buffer("scale"))

    export_onnx(Tiled(), batch(), tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", None, [batch()]).exact


def test_random_inputs_stay_in_the_range_of_integer_examples(tmp_path: Path) -> None:
    model = prepare(nn.Sequential(nn.Embedding(5, 4)), presets.INT8_WEIGHT_ONLY)
    calibrate(model)
    export_onnx(model, torch.tensor([[0, 4, 2]]), tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", model).exact


def test_report_goes_to_json(path: Path) -> None:
    report = verify_onnx(path, two_layers(), [batch()])
    values = json.loads(json.dumps(report.to_dict()))
    assert values["exact"] is True
    assert values["rows"][0]["quantizer"] == INPUT
    assert values["outputs"][0]["argmax_agreement"] == 1.0
    (output,) = report.outputs
    assert values["outputs"][0]["sqnr"] == (output.sqnr if output.differing else None)
    json.dumps(report.to_dict()["outputs"], allow_nan=False)
    lines = str(report).splitlines()
    assert lines[0].split() == ["quantizer", "specification", "kind", "elements", "differing"]
    assert lines[2].split() == [INPUT, "uint8", "per_tensor", "activation", "24", "0"]
    assert lines[6].startswith(f"{path}: exact in ONNX Runtime {onnxruntime.__version__}; 1 batch: given")


def test_how_far_the_output_is_in_decibels(path: Path) -> None:
    model = two_layers()
    with torch.no_grad():
        model.get_parameter("2.bias").add_(0.01)
    (output,) = verify_onnx(path, model, [batch()]).outputs
    with torch.no_grad():
        power = model(batch()).square().mean().item()
    assert output.sqnr == pytest.approx(10 * math.log10(power / 0.01**2), abs=0.1)


def test_bfloat16_models_say_what_to_do(tmp_path: Path) -> None:
    advice = re.escape("export the model in float32, as by model.float()")
    x = batch().bfloat16()
    linear = prepare(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16(), presets.INT8_WEIGHT_ONLY)
    export_onnx(linear, x, tmp_path / "m.onnx")
    with pytest.raises(VerificationError, match=advice):
        verify_onnx(tmp_path / "m.onnx", linear)
    # At opset 20 ONNX has no convolution of bfloat16.
    convolution = prepare(nn.Sequential(nn.Conv1d(3, 8, 3)).bfloat16(), presets.INT8_WEIGHT_ONLY)
    with pytest.raises(ExportError, match=advice):
        export_onnx(convolution, x, tmp_path / "m.onnx")


@sweep("preset", full(["INT8", "INT8_PER_TOKEN", "FP8"]), full(["INT8_PER_TOKEN"]), preset=presets.presets())
def test_float16_models_are_exact(preset: Config, tmp_path: Path) -> None:
    """ONNX Runtime computes a ReLU of float16 in float32, and leaves out the casts between it and a quantizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).half()
    x = torch.randn(64, 8).half()
    calibrate(prepare(model, preset), [x])
    export_onnx(model, x, tmp_path / "m.onnx")
    assert verify_onnx(tmp_path / "m.onnx", model, [x * 2]).exact


class Masked(nn.Module):
    """A model with an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x if mask is None else x * mask)


@pytest.mark.parametrize("given", [1, 2])
def test_optional_arguments_are_those_that_the_file_has_as_inputs(tmp_path: Path, given: int) -> None:
    model, example = prepare(Masked(), presets.INT8_AFFINE), (batch(), batch(3))[:given]
    calibrate(model, [{"x": batch(), "mask": batch(3)}])
    export_onnx(model, example, tmp_path / "m.onnx")
    for batches in (None, [(*example, torch.zeros(3, 8))]):
        (output,) = verify_onnx(tmp_path / "m.onnx", model, batches).outputs
        assert output.max_abs < 1e-5


def _foreign() -> bytes:
    make = onnx.helper
    value = [make.make_tensor_value_info(name, 1, [2]) for name in ("x", "y")]
    graph = make.make_graph([make.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    return make.make_model(graph, ir_version=10).SerializeToString()


FILES = {
    "not_onnx": (lambda data: b"this is no model", "is not an ONNX file, or is truncated"),
    "empty": (lambda data: b"", "not written by fakequant.export_onnx"),
    "of_another_tool": (lambda data: _foreign(), "not written by fakequant.export_onnx"),
    "half": (lambda data: data[: len(data) // 2], "is not an ONNX file, or is truncated"),
    "one_byte_short": (lambda data: data[:-1], "is not an ONNX file, or is truncated"),
    "damaged_record": (lambda data: data.replace(b'{"layout"', b'["layout"'), "its record of quantizers is damaged"),
    "newer_record": (lambda data: data.replace(b'{"layout": 1', b'{"layout": 9'), "has a record of layout 9"),
    "misnamed_node": (lambda data: data.replace(b"\x0eQuantizeLinear", b"\x0eQuantizeLinEar"), "is damaged: No Op"),
}


@pytest.mark.parametrize(("change", "text"), FILES.values(), ids=FILES)
def test_a_file_that_is_not_ours_or_is_damaged_is_an_error(path: Path, change: Any, text: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(VerificationError, match=text) as error:
        verify_onnx(path)
    assert str(error.value).startswith(f"{path}: ")


def test_every_shorter_file_is_an_error(path: Path) -> None:
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(VerificationError):
            verify_onnx(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="cannot be read: No such file"):
        verify_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    ("name", "text"),
    [(".", "is a folder or a device"), ("/dev/null", "is a folder or a device"), ("a\0b", "embedded null byte")],
)
def test_what_is_no_file_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(VerificationError, match=text):
        verify_onnx(tmp_path / name)


def test_damaged_bytes_are_one_line_or_no_fault(path: Path) -> None:
    """Every 23rd byte, so that names in nodes, constants and the record are hit, becomes one that UTF-8 lacks."""
    data, messages = path.read_bytes(), set()
    for place in range(0, len(data), 23):
        path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        try:
            verify_onnx(path)
        except VerificationError as error:
            messages.add(str(error).removeprefix(f"{path}: "))
    assert "is damaged: a name in it is not UTF-8; export it again" in messages
    assert not [message for message in messages if "\n" in message]


def test_a_missing_constant_is_an_error(path: Path) -> None:
    model = onnx.load(path)
    tensor = constant(model, f"{INPUT}/scale")
    tensor.name = "renamed"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == f"{INPUT}/scale":
                node.input[index] = "renamed"
    onnx.save(model, path)
    with pytest.raises(VerificationError, match=f"the constants {INPUT}/scale are missing"):
        verify_onnx(path)


def test_a_record_without_quantizers_is_not_exact(path: Path) -> None:
    rewrite(path, lambda values: values.update(sites=[]))
    report = verify_onnx(path)
    assert not report.exact
    assert len(report.uncovered) == 6
    assert "6 nodes quantize but belong to no quantizer of the file" in str(report)


@pytest.mark.parametrize("site", range(4))
def test_every_missing_quantizer_is_found(path: Path, site: int) -> None:
    rewrite(path, lambda values: values["sites"].pop(site))
    report = verify_onnx(path)
    assert not report.exact
    assert all(row.exact for row in report.rows)
    assert len(report.uncovered) == (2 if site % 2 == 0 else 1)


def set_input(**values: Any) -> Any:
    return lambda record: record["inputs"][0].update(values)


def set_site(site: int, **values: Any) -> Any:
    return lambda record: record["sites"][site].update(values)


CRAFTED = {
    "huge_input": (set_input(shape=[100_000, 100_000]), "pass batches"),
    "beyond_axes": (set_input(shape=[2**70]), "1180591620717411303424, not a"),
    "many_axes": (set_input(shape=[1] * 100), "shape has 100 axes"),
    "negative": (set_input(shape=[-3, 8]), "shape is -3, expected 0 to"),
    "text": (set_input(shape="3 by 8"), "shape is '3 by 8', not a list"),
    "module": (set_input(dtype="nn"), "dtype is 'nn', expected one of float32"),
    "function": (set_input(dtype="load"), "dtype is 'load'"),
    "nothing": (set_input(dtype="nope"), "dtype is 'nope'"),
    "nan": (set_input(low=float("nan")), "low is nan, expected a finite number"),
    "other_input": (set_input(name="z"), "the record names the inputs"),
    "repeats": (set_site(0, repeats=[0]), "repeats is 0, expected 1 to"),
    "huge_repeats": (set_site(1, repeats=[1, 2**30]), "the exported constants do not fit"),
    "negative_groups": (set_site(1, groups=[-1, 1]), "groups is -1, expected 0 to"),
    "other_groups": (set_site(1, groups=[1, 16]), "the exported constants do not fit"),
    "one_group": (set_site(1, groups=[1, 1]), "the exported constants do not fit"),
    "no_parameters": (set_site(0, parameters="elsewhere"), "parameters is 'elsewhere', which is none of"),
    "no_spec": (set_site(0, spec="int8 per_moon"), "its record of quantizers is damaged"),
    "other_spec": (set_site(0, spec="int8 per_channel(1)"), "the exported constants do not fit"),
    "unknown_scale": (set_site(0, scale="nowhere"), "the constants nowhere are missing"),
    "no_zero_point": (set_site(0, zero_point=None), "the constants None are missing"),
    "number_as_name": (set_site(0, y=3), "y is 3, not a text"),
    "no_object": (lambda record: record.update(sites=[3]), "sites[0] is 3, not an object"),
    "truth": (lambda record: record.update(layout=True), "layout is True"),
}


@pytest.mark.parametrize(("change", "text"), CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_record_is_an_error(path: Path, change: Any, text: str) -> None:
    rewrite(path, change)
    with pytest.raises(VerificationError, match=re.escape(text)):
        verify_onnx(path)


def test_a_constant_in_another_file_is_not_read(path: Path) -> None:
    model = onnx.load(path)
    tensor = constant(model, f"{WEIGHT}/codes")
    onnx.external_data_helper.set_external_data(tensor, "/etc/hostname")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(VerificationError, match=f"its constants {WEIGHT}/codes are in other files"):
        verify_onnx(path)


@pytest.mark.parametrize("name", ["If", "function"])
def test_quantizers_inside_other_graphs_are_found(path: Path, name: str) -> None:
    from fakequant.export.capability import read
    from fakequant.export.verify import uncovered_nodes

    helper, model = onnx.helper, onnx.load(path)
    node = helper.make_node("QuantizeLinear", ["a", "b"], ["c"], "hidden")
    if name == "If":
        branch = helper.make_graph([node], "branch", [], [])
        model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))
    else:
        function = helper.make_function("d", "f", ["a", "b"], ["c"], [node], [helper.make_opsetid("", 20)])
        model.functions.append(function)
    assert set(uncovered_nodes(model, read(model).sites)) == {"hidden"}


def test_mutated_records_give_an_error_or_a_report(tmp_path: Path) -> None:
    for data in itertools.islice(record_mutations(0), 100):
        (tmp_path / "m.onnx").write_bytes(data)
        with contextlib.suppress(VerificationError):
            assert isinstance(verify_onnx(tmp_path / "m.onnx").exact, bool)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_file_that_a_tool_rewrote_is_named(at: int, tmp_path: Path) -> None:
    """As ONNX Runtime's optimizer does, which removes and renames tensors."""
    path = tmp_path / "m.onnx"
    path.write_bytes(exported())
    model = onnx.load(path)
    values = json.loads(model.metadata_props[0].value)["sites"]
    old = [values[0]["y"], values[1]["y"], values[2]["x"]][at]
    for node in model.graph.node:
        node.input[:] = ["renamed" if name == old else name for name in node.input]
        node.output[:] = ["renamed" if name == old else name for name in node.output]
    onnx.save(model, path)
    with pytest.raises(
        VerificationError, match=r"its record names the tensor .*, which the file lacks: a tool changed"
    ):
        verify_onnx(path, two_layers(), [batch()])
