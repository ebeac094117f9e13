"""Encodings of AIMET: by hand, read back, damaged, and, where it is installed, read by AIMET itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export import Encodings
from fakequant.export.encodings import _parsed
from fakequant.nn import quantizers
from fakequant.nn.quantizer import Mode
from tests.support.aimet import aimet
from tests.support.bits import assert_same_bits
from tests.support.mobile import MODELS, PooledFork, rules_of

VERSIONS = ["0.6.1", "1.0.0", "2.0.0"]
FORK = (PooledFork, torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(4)))
TRANSPOSED = (lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.ReLU()), torch.randn(1, 4, 5, 5))
CASES: dict[str, tuple[Any, Any, str | None]] = {
    "cnn": (MODELS["cnn"], "INT8_AFFINE", "qnn"),
    "attention": (MODELS["attention"], "INT8_AFFINE", "qnn"),
    "fork": (FORK, "INT8_AFFINE", "qnn"),
    "w4a16": (MODELS["mlp"], rules_of(weight="int4 per_channel(0)", input="uint16"), "qnn"),
    "tensor": (MODELS["mlp"], rules_of(weight="int8_narrow per_tensor", input="uint8"), "qnn"),
    "groups": (MODELS["mlp"], rules_of(weight="int4 per_block(-1:32)", input="uint8"), "qnn"),
    "zero points": (MODELS["mlp"], rules_of(weight="uint8 per_channel(0)", input="int8 asymmetric"), None),
    "symmetric": (MODELS["mlp"], "INT8", None),
    "tables": (MODELS["tables"], "INT8_WEIGHT_ONLY", None),
    "transposed": (TRANSPOSED, rules_of(weight="int8 per_channel(1)", input="uint8"), "qnn"),
}


def pair(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model that is calibrated, the same that is prepared alone, and an input."""
    (make, x), config, target = CASES[name]
    torch.manual_seed(0)
    net = make().eval()
    model, fresh = (fq.prepare(copy.deepcopy(net), config, x, target=target) for _ in range(2))
    if x.is_floating_point():
        fq.calibrate(model, [x, x / 2], progress=False)
    return model, fresh, x


def cases() -> list[tuple[str, str]]:
    """All cases in one version, and those without axes, with zero points and with other bits in the others."""
    of_others = [(name, version) for name in ("w4a16", "zero points") for version in ("0.6.1", "1.0.0")]
    return [(name, "2.0.0") for name in CASES] + of_others


def assert_is_float(file: Path, model: nn.Module, written: Encodings, x: Tensor) -> None:
    """A file without quantizers, whose weights have the values of their codes."""
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    assert not [node.op_type for node in proto.graph.node if "Linear" in node.op_type or node.domain]
    constants = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in proto.graph.initializer}
    state, weights = fq.snapshot(model), 0
    for tensor, paths in written.tensors.items():
        if paths[0].endswith("_weight_quantizer"):
            assert_same_bits(constants[tensor], state.weights[tensor].values())
            weights += 1
    assert weights == len(state.weights)
    weights_alone = copy.deepcopy(model)
    for path, quantizer in quantizers(weights_alone).items():
        quantizer.mode = quantizer.mode if path.endswith("_weight_quantizer") else Mode.OFF
    with torch.no_grad():
        expected = weights_alone(x).numpy()
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    results: Any = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.allclose(results[0], expected, atol=1e-5)


@pytest.mark.parametrize(("name", "version"), [*cases(), ("groups", "1.0.0")])
def test_what_is_written_is_read_back(name: str, version: str, tmp_path: Path) -> None:
    model, fresh, x = pair(name)
    written = fq.export_encodings(model, x, tmp_path / "m.onnx", version=version)
    assert str(written) == (
        f"{tmp_path / 'm.encodings'}: encodings {version} of {len(written.tensors)} tensors, of {tmp_path / 'm.onnx'}"
    )
    assert_is_float(tmp_path / "m.onnx", model, written, x)
    found = fq.read_encodings(fresh, x, written.path)
    assert found.tensors == written.tensors
    assert sorted(path for paths in found.tensors.values() for path in paths) == sorted(quantizers(model))
    with torch.no_grad():
        assert_same_bits(fresh(x), model(x))
    for path, own in quantizers(fresh).items():
        ours = quantizers(model)[path]
        assert own.scale is not None
        if ours.scale is not None:
            assert_same_bits(own.scale, ours.scale)
            assert (own.zero_point is None) == (ours.zero_point is None)
            assert own.zero_point is None or torch.equal(own.zero_point, ours.zero_point)  # type: ignore[arg-type]


def by_hand(version: str, tmp_path: Path) -> Any:
    """The file of one layer: weights by 0.5 and 2, inputs by 0.25 from -1 on."""
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2)), rules_of(weight="int8 per_channel(0)", input="uint8"))
    own = quantizers(model)
    own["0._weight_quantizer"].set_qparams(fq.QParams(torch.tensor([[0.5], [2.0]])))
    own["0._input_quantizer"].set_qparams(fq.QParams(torch.tensor([[0.25]]), torch.tensor([[4]], dtype=torch.int32)))
    fq.export_encodings(model, torch.zeros(1, 2), tmp_path / "m.onnx", version=version)
    found = json.loads((tmp_path / "m.encodings").read_text())
    assert found.pop("producer") == {"package": "fakequant", "version": fq.__version__}
    assert found.pop("version") == version
    return found


def test_bytes_by_hand(tmp_path: Path) -> None:
    plain = {"bitwidth": 8, "dtype": "int"}
    signed, unsigned = {**plain, "is_symmetric": "True", "offset": -128}, {**plain, "is_symmetric": "False"}
    assert by_hand("0.6.1", tmp_path) == {
        "activation_encodings": {"input": [{**unsigned, "min": -1.0, "max": 62.75, "offset": -4, "scale": 0.25}]},
        "param_encodings": {
            "0.weight": [
                {**signed, "min": -64.0, "max": 63.5, "scale": 0.5},
                {**signed, "min": -256.0, "max": 254.0, "scale": 2.0},
            ]
        },
    }
    plain = {"bw": 8, "dtype": "INT"}
    one = {"name": "input", **plain, "is_sym": False, "scale": [0.25], "offset": [-4], "enc_type": "PER_TENSOR"}
    other = {"name": "0.weight", **plain, "is_sym": True, "scale": [0.5, 2.0], "offset": [-128, -128]}
    assert by_hand("1.0.0", tmp_path) == {
        "activation_encodings": [one],
        "param_encodings": [{**other, "enc_type": "PER_CHANNEL"}],
    }
    assert by_hand("2.0.0", tmp_path) == {
        "encodings": [
            {"name": "input", "output_dtype": "uint8", "y_scale": 0.25, "y_zero_point": 4},
            {"name": "0.weight", "output_dtype": "int8", "y_scale": [0.5, 2.0], "axis": 0},
        ]
    }


@pytest.mark.parametrize(("name", "version"), cases())
def test_aimet_makes_our_onnx_file_of_them(name: str, version: str, tmp_path: Path) -> None:
    quantsim, _ = aimet()
    model, _, x = pair(name)
    written = fq.export_encodings(model, x, tmp_path / "m.onnx", version=version)
    theirs = quantsim.encodings_to_onnx_qdq(str(written.onnx), str(written.path), force_activation_as=None)
    ours = onnx.load(fq.export_onnx(model, x, tmp_path / "q.onnx").path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    results: list[Any] = []
    for file in (theirs, ours):
        session = onnxruntime.InferenceSession(file.SerializeToString(), options)
        results += session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_aimet_reads_blocks(version: str, tmp_path: Path) -> None:
    _, encoding = aimet()
    model, _, x = pair("groups")
    written = fq.export_encodings(model, x, tmp_path / "m.onnx", version=version)
    values = json.loads(written.path.read_text())
    entries = {one["name"]: one for one in values.get("encodings") or values["param_encodings"]}
    for tensor in ("0.weight", "2.weight"):
        scale = quantizers(model)[tensor.replace("weight", "_weight_quantizer")].scale
        assert scale is not None
        axes = {"input_shape": (len(scale), 64), "default_channel_axis": 0, "default_block_axis": 1}
        found = encoding.EncodingBase.from_qnn_encoding_dict(entries[tensor], **axes)
        assert (found.dtype, found.block_size) == ("int4", 32)
        assert np.array_equal(found.scale, scale.numpy())
        assert not found.offset.any()


class Same(nn.Module):
    """What is quantized is an input, and a result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = fq.fake_quantize(x, "uint8", scale=torch.tensor([0.5]), zero_point=torch.tensor([3], dtype=torch.int32))
        return y, torch.relu(y)


def test_a_quantized_input_that_is_a_result(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    model = nn.Sequential(Same())
    written = fq.export_encodings(model, x, tmp_path / "m.onnx")
    assert written.tensors == {"input": ["0"]}
    session = onnxruntime.InferenceSession(str(written.onnx))
    assert "input" not in [one.name for one in session.get_outputs()]
    found: Any = session.run(None, {"input": x.numpy()})
    assert np.array_equal(found[0], x.numpy())
    assert np.array_equal(found[1], x.relu().numpy())
    with pytest.raises(ExportError, match="0 call fake_quantize with ranges as arguments"):
        fq.read_encodings(model, x, written.path)


def test_what_the_example_does_not_reach_is_left_out_and_said(tmp_path: Path) -> None:
    model, fresh, x = pair("symmetric")
    quantizers(model)["2._input_quantizer"].mode = Mode.OFF
    written = fq.export_encodings(model, x, tmp_path / "m.onnx")
    assert written.left_out == ["2._input_quantizer"]
    assert str(written).endswith("; without encodings: 2._input_quantizer")
    with pytest.raises(ExportError, match="it lacks gelu"):
        fq.read_encodings(fresh, x, written.path)


def test_codes_that_rounding_does_not_give_stay(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    layer = nn.Linear(8, 8)
    model = fq.prepare(nn.Sequential(layer).eval(), "INT8_WEIGHT_ONLY")
    fq.calibrate(model, progress=False)
    quantizer = quantizers(model)["0._weight_quantizer"]
    found = quantizer.codes(layer.weight)
    assert found is not None
    quantizer.set_qparams(found[1])
    with torch.no_grad():
        nearest = model(x)
        quantizer.fix_codes(found[0].clamp(max=100) + 7)
        before = model(x)
    assert not torch.equal(before, nearest)
    written = fq.export_encodings(model, x, tmp_path / "m.onnx")
    fq.read_encodings(model, x, written.path)
    with torch.no_grad():
        assert_same_bits(model(x), before)


def test_codes_of_a_solver_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), "INT8_AFFINE")
    fq.calibrate(model, [x, x + 1], progress=False)
    fq.ptq.improve(model, [x, x + 1], "fast", progress=False)
    model.eval()
    with torch.no_grad():
        before = model(x)
    written = fq.export_encodings(model, x, tmp_path / "m.onnx")
    fq.read_encodings(model, x, written.path)
    with torch.no_grad():
        assert_same_bits(model(x), before)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("FP8", r"0\._input_quantizer: float8_e4m3fn.*integers of 4, 8 and 16 bits with all codes; use INT8_AFFINE"),
        (rules_of(weight="int3"), r"0\._weight_quantizer: int3.*4, 8 and 16 bits"),
        (rules_of(weight="int8", input="int8_narrow"), r"0\._input_quantizer: int8_narrow.*with all codes"),
        ("INT8_PER_TOKEN", r"0\._input_quantizer: .*static range such as INT8_AFFINE"),
        (rules_of(weight="int8", input="int8 per_channel(-1)"), r"0\._input_quantizer: .*use per_tensor"),
        (rules_of(weight="int8", input="int8 reciprocal"), r"0\._input_quantizer: .*are divided by one scale"),
        (rules_of(weight="int4 per_block(0:32)"), r"0\._weight_quantizer: encodings have equal blocks of inputs"),
        (rules_of(weight="int4 per_block(-1:48,pad)"), r"0\._weight_quantizer: .*equal blocks of inputs"),
    ],
)
def test_what_they_have_not_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    make, x = MODELS["mlp"]
    model = fq.prepare(make().eval(), config, x)
    fq.calibrate(model, [x], progress=False)
    with pytest.raises(ExportError, match=words):
        fq.export_encodings(model, x, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_a_tensor_has_one_range_for_all_readers(tmp_path: Path) -> None:
    make, x = MODELS["cnn"]
    model = fq.prepare(make().eval(), "INT8_AFFINE", x)
    fq.calibrate(model, [x], progress=False)
    with pytest.raises(ExportError, match=r"0\.a\._input_quantizer: quantizes relu, which others read in float"):
        fq.export_encodings(model, x, tmp_path / "m.onnx")
    x = torch.randn(3, 4)
    model = fq.prepare(Fork().eval(), "INT8_AFFINE")
    fq.calibrate(model, [x], progress=False)
    quantizers(model)["b._input_quantizer"].set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    with pytest.raises(ExportError, match=r"b\._input_quantizer: quantizes x differently from a\._input.*target='qnn'"):
        fq.export_encodings(model, x, tmp_path / "m.onnx")


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    model, _, x = pair("symmetric")
    with pytest.raises(ExportError, match=r"unknown version '1\.0'.*1\.0\.0"):
        fq.export_encodings(model, x, tmp_path / "m.onnx", version="1.0")
    with pytest.raises(ExportError, match="give the ONNX file another ending"):
        fq.export_encodings(model, x, tmp_path / "m.encodings")
    groups, _, example = pair("groups")
    with pytest.raises(ExportError, match="use version 2"):
        fq.export_encodings(groups, example, tmp_path / "m.onnx", version="0.6.1")
    half = fq.prepare(nn.Sequential(nn.Linear(4, 4)).half(), "INT8_WEIGHT_ONLY")
    with pytest.raises(ExportError, match=r"in float32; use model\.float\(\)"):
        fq.export_encodings(half, torch.ones(1, 4).half(), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="cannot be read"):
        fq.read_encodings(model, x, tmp_path / "none")


Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A file of each version, of the model "symmetric"."""
    model, _, x = pair("symmetric")
    folder = tmp_path_factory.mktemp("encodings")
    return {
        version: fq.export_encodings(model, x, folder / "m.onnx", version=version).path.read_bytes()
        for version in VERSIONS
    }


def entry(values: Any) -> dict[str, Any]:
    """What is changed: the last encoding of the file, of 2.weight."""
    parts = values.get("encodings") or values["param_encodings"]
    return parts["2.weight"][0] if isinstance(parts, dict) else next(one for one in parts if one["name"] == "2.weight")


DAMAGES: list[tuple[str, Change, str]] = [
    ("2.0.0", lambda v: v.update(version="3.0.0"), "has the version '3.0.0', expected 0.6.1, 1.0.0, 2.0.0"),
    ("2.0.0", lambda v: v.pop("encodings"), "has no encodings as version 2.0.0 has them"),
    ("1.0.0", lambda v: v.update(param_encodings={}), "has no param_encodings"),
    ("1.0.0", lambda v: v["activation_encodings"].append(v["param_encodings"][0]), "0.weight has two encodings"),
    ("2.0.0", lambda v: entry(v).pop("name"), "entry 3 of encodings has no name"),
    ("2.0.0", lambda v: entry(v).update(name="3.weight"), "it lacks 2.weight; no quantizer of the model has 3.weight"),
    ("2.0.0", lambda v: entry(v).update(output_dtype="float8e4m3fn"), "2.weight: has output_dtype"),
    ("2.0.0", lambda v: entry(v).update(output_dtype="int4"), "2.weight has 32 scales of int4, but 2._weight"),
    ("2.0.0", lambda v: entry(v).update(axis=1), "2.weight has scales along axis 1"),
    ("2.0.0", lambda v: entry(v).pop("axis"), "2.weight: has axis None for y_scale of shape [32]"),
    ("2.0.0", lambda v: entry(v).update(block_size=0), "2.weight: has block_size 0"),
    ("2.0.0", lambda v: entry(v).update(block_size=8), "2.weight has scales along axis 0 in blocks of 8"),
    ("2.0.0", lambda v: entry(v)["y_scale"].pop(), "2.weight has 31 scales of int8"),
    ("2.0.0", lambda v: entry(v)["y_scale"].__setitem__(0, -1.0), "2.weight: has scales that are not positive"),
    ("2.0.0", lambda v: entry(v)["y_scale"].__setitem__(0, float("nan")), "2.weight: has scales that are not positive"),
    ("2.0.0", lambda v: entry(v)["y_scale"].__setitem__(0, 1e-60), "2.weight: has scales that are not positive"),
    ("2.0.0", lambda v: entry(v)["y_scale"].__setitem__(0, "1"), "2.weight: has y_scale that are not numbers"),
    ("2.0.0", lambda v: entry(v)["y_scale"].__setitem__(0, [1]), "2.weight: has y_scale in lists of several lengths"),
    (
        "2.0.0",
        lambda v: entry(v).update(y_zero_point=[1] * 32),
        "2.weight has zero points, but 2._weight",
    ),
    ("2.0.0", lambda v: entry(v).update(y_zero_point=[300] * 32), "2.weight: has offsets or zero points that are no"),
    (
        "1.0.0",
        lambda v: entry(v).update(offset=[-128.5] * 32),
        "2.weight: has offsets or zero points",
    ),
    ("1.0.0", lambda v: entry(v).update(offset=[-128]), "2.weight: has 32 scales and 1 offsets"),
    ("1.0.0", lambda v: entry(v).update(zero_point_shift=[0.5]), "2.weight: .*zero_point_shift"),
    ("1.0.0", lambda v: entry(v).update(enc_type="LPBQ"), "2.weight: has dtype 'INT' and enc_type 'LPBQ'"),
    ("1.0.0", lambda v: entry(v).update(bw=True), "2.weight: has True bits, expected 4, 8 or 16"),
    ("1.0.0", lambda v: entry(v).update(enc_type="PER_TENSOR"), "2.weight: has scales of shape [32], expected one"),
    ("0.6.1", lambda v: entry(v).update(bitwidth=4), "2.weight: has channels of several formats"),
    ("0.6.1", lambda v: entry(v).pop("dtype"), "2.weight: has channels of several formats, or"),
    ("0.6.1", lambda v: v["param_encodings"].update({"2.weight": []}), "2.weight: is not a list of the encodings"),
    ("0.6.1", lambda v: v["activation_encodings"].update({"2.weight": []}), "2.weight: is not a list"),
]


@pytest.mark.parametrize(("version", "change", "words"), DAMAGES, ids=[words[:40] for _, _, words in DAMAGES])
def test_damaged_files_are_refused_by_the_name_of_the_tensor(
    version: str, change: Change, words: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    _, fresh, x = pair("symmetric")
    values = json.loads(files[version])
    change(values)
    (tmp_path / "m.encodings").write_text(json.dumps(values))
    pattern = words if "*" in words else words.replace(".", r"\.").replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ExportError, match=pattern):
        fq.read_encodings(fresh, x, tmp_path / "m.encodings")
    assert all(one.scale is None for one in quantizers(fresh).values())


def test_no_change_of_a_byte_raises_another_error(files: dict[str, bytes], tmp_path: Path) -> None:
    random, refused = Random(0), 0
    for data in files.values():
        for _ in range(100):
            changed = bytearray(data)
            changed[random.randrange(len(changed))] = random.randrange(256)
            (tmp_path / "m.encodings").write_bytes(changed)
            try:
                _parsed(tmp_path / "m.encodings")
            except ExportError:
                refused += 1
    assert refused > 0
    (tmp_path / "m.encodings").write_text("[" * 100_000)
    with pytest.raises(ExportError, match="is not JSON"):
        _parsed(tmp_path / "m.encodings")
