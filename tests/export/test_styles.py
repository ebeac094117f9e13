"""Every preset in every style, dynamic and static: the file gives the bits of torch, or is refused by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError, VerificationError
from fakequant.export import VerifyReport, export_onnx, verify_onnx
from fakequant.export.capability import Style
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule
from fakequant.model.prepare import prepare
from fakequant.nn import quantizers
from fakequant.numerics.scales import ScaleRounding
from tests.support.matrix import cases_of
from tests.support.range_cases import hostile

FEATURES = 256
STYLES = [style.value for style in Style]
PRESETS = {config.name: config for config in presets.presets().values()}


def with_activations(config: Config, name: str, **changes: Any) -> Config:
    rules = [r if r.input is None else replace(r, input=replace(r.input, **changes)) for r in config.rules]
    return Config(name, tuple(rules))


def is_dynamic(config: Config) -> bool:
    return any(rule.input is not None and rule.input.dynamic for rule in config.rules)


STATIC = [
    with_activations(c, f"{c.name}_STATIC", spec=c.rules[0].input.spec, dynamic=False)
    for c in PRESETS.values()
    if is_dynamic(c) and c.rules[0].input is not None
]
# TensorRT's rule for the exponent of MXFP8.
CEIL = with_activations(
    PRESETS["MXFP8"], "MXFP8_CEIL", spec="float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:ceil", dynamic=True
)
CONFIGS = {config.name: config for config in (*PRESETS.values(), *STATIC, CEIL)}
BY_TENSORRT = {
    *("INT8", "INT8_WEIGHT_ONLY", "FP8", "MXFP8_CEIL", "NVFP4_WEIGHT_ONLY", "NVFP4_FOUR_OVER_SIX"),
    *("INT4_GROUP64", "INT4_GROUP128", "FP8_TRAINING_STATIC", "MXFP8_TRAINING"),
}


def has_no_onnx_form(config: Config) -> bool:
    """Whether weights have offsets or negative scales."""
    weight = config.rules[0].weight
    assert weight is not None
    return weight.spec.offset is not None or weight.spec.scale.rounding is ScaleRounding.SIGNED


LATTICES = {name for name, config in CONFIGS.items() if has_no_onnx_form(config)}
REFUSED = {
    "portable": LATTICES,
    "standard": LATTICES | {"NF4_WEIGHT_ONLY"},
    "trt": set(CONFIGS) - BY_TENSORRT,
}


class Layers(nn.Module):
    """One linear layer per configuration, each with an input of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: layer(name) for name in names})

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers.values(), xs, strict=True)]

    def batch(self, seed: int) -> tuple[Tensor, ...]:
        return tuple(inputs(name, seed + i) for i, name in enumerate(self.layers))


@cache
def layer(name: str) -> nn.Module:
    """A layer with weights of all sizes, one output without any, and a block that is nothing but zeros."""
    made = nn.Linear(FEATURES, 3)
    with torch.no_grad():
        weight = hostile((3, FEATURES), len(name))
        # Codes of weights must be finite, and products with them too.
        made.weight.copy_(weight.nan_to_num(0.0, 1.0, -1.0).clamp(-1e30, 1e30))
        made.weight[2, :128] = 0.0
    model = prepare(nn.Sequential(made), CONFIGS[name])
    calibrate(model, [torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(0))])
    return model.eval()


def inputs(name: str, seed: int) -> Tensor:
    """Zeros and blocks of them, inf, subnormals, powers of two and their neighbours; NaN where it has a code."""
    x = hostile((3, FEATURES), seed)
    rule = CONFIGS[name].rules[0]
    if rule.input is None:
        return x
    fmt = rule.input.spec.format
    has_nan = bool(fmt.from_storage(fmt.to_storage(torch.tensor([torch.nan])), torch.float32).isnan().all())
    return x if has_nan and not fmt.has_zero_point else x.nan_to_num(0.0, torch.inf, -torch.inf)


# Those that run every time first: each kind of number and of scale, and a refused preset, in every style that has it.
CASES = [
    *(("portable", name) for name in ("INT8", "NVFP4", "INT4_GROUP32", "MXFP8_CEIL", "NF4_WEIGHT_ONLY", "GGUF_Q4_0")),
    *(("standard", name) for name in ("MXFP4", "INT8_AFFINE", "NVFP4", "W8A8_DYNAMIC", "NF4_WEIGHT_ONLY")),
    *(("trt", name) for name in ("MXFP8_CEIL", "INT8", "FP8", "NVFP4_WEIGHT_ONLY", "INT4_GROUP64", "NF4_WEIGHT_ONLY")),
]
CASES += [case for case in product(STYLES, CONFIGS) if case not in CASES]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, VerifyReport]:
    """The presets of this run that a style has, in one file per style, verified on hostile inputs."""
    found, used = {}, [tuple(one.values()) for one in cases_of(request, test_the_file_gives_the_bits_of_torch)]
    for style, always in zip(STYLES, ("INT8", "MXFP4", "MXFP8_CEIL"), strict=True):
        path = tmp_path_factory.mktemp(style) / "m.onnx"
        names = {always, *(name for own, name in used if own == style)}
        model = Layers(name for name in CONFIGS if name in names and name not in REFUSED[style])
        export_onnx(model, model.batch(0), path, style=style)
        found[style] = verify_onnx(path, model, [model.batch(100), model.batch(200)])
    return found


@pytest.mark.parametrize(("style", "name"), CASES)
def test_the_file_gives_the_bits_of_torch(style: str, name: str, reports: dict[str, VerifyReport]) -> None:
    rows = [row for row in reports[style].rows if row.quantizer.startswith(f"layers.{name}.")]
    if name in REFUSED[style]:
        assert rows == []
        return
    assert len(rows) == len(quantizers(layer(name)))
    for row in rows:
        assert row.exact, row
        assert row.elements == (3 * FEATURES if row.kind == "weight" else 2 * 3 * FEATURES)


@pytest.mark.parametrize("style", STYLES)
def test_every_refused_layer_is_named_before_the_model_runs(style: str, tmp_path: Path) -> None:
    if not REFUSED[style]:
        return
    model = Layers(CONFIGS)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ExportError) as error:
        export_onnx(model, model.batch(0), tmp_path / "m.onnx", style=style)
    named = {line.split(".")[1] for line in str(error.value).splitlines()[1:]}
    assert named == REFUSED[style]
    assert not list(tmp_path.iterdir())


def test_the_report_says_what_ran_the_file_and_what_did_not(reports: dict[str, VerifyReport]) -> None:
    portable, standard, trt = (reports[style] for style in STYLES)
    assert [r.style for r in (portable, standard, trt)] == STYLES
    assert portable.runtime.startswith("ONNX Runtime ")
    assert portable.not_run == []
    for report in (standard, trt):
        assert report.runtime.startswith("the ReferenceEvaluator of onnx ")
        assert "Not run in ONNX Runtime: ONNX Runtime cannot load it: " in str(report)
        assert report.optimised == []
    assert "Not run in TensorRT" in str(trt)
    assert "TensorRT" not in str(standard)


def test_what_onnx_runtime_loads_is_run_there_in_every_style(tmp_path: Path) -> None:
    model = Layers(["INT8"])
    for style in STYLES:
        export_onnx(model, model.batch(0), tmp_path / "m.onnx", style=style)
        report = verify_onnx(tmp_path / "m.onnx", model)
        assert report.runtime.startswith("ONNX Runtime ")
        assert report.optimised


NODES = {
    ("standard", "MXFP4"): {
        "QuantizeLinear": 1,
        "DequantizeLinear": 2,
        "Cast": 3,
        "types": {"FLOAT4E2M1", "FLOAT8E8M0"},
        "opset": 24,
        "ir": 12,
    },
    ("standard", "NVFP4"): {
        # For the activation: codes of scales, elements; for the weight: scales, elements.
        "QuantizeLinear": 2,
        "DequantizeLinear": 4,
        "types": {"FLOAT4E2M1", "FLOAT8E4M3FN"},
        "opset": 23,
        "ir": 11,
    },
    ("standard", "MXFP6_E2M3"): {
        "QuantizeLinear": 1,
        "DequantizeLinear": 2,
        "types": {"FLOAT6E2M3", "FLOAT8E8M0"},
        "opset": 28,
        "ir": 14,
    },
    ("trt", "NVFP4_WEIGHT_ONLY"): {
        "DequantizeLinear": 2,
        "types": {"FLOAT4E2M1", "FLOAT8E4M3FN"},
        "opset": 23,
        "ir": 11,
    },
    ("trt", "MXFP8_CEIL"): {
        "TRT_MXFP8DynamicQuantize": 1,
        "TRT_MXFP8DequantizeLinear": 2,
        "types": {"FLOAT8E4M3FN", "UINT8"},
        "opset": 21,
        "ir": 10,
    },
    ("trt", "INT4_GROUP128"): {"DequantizeLinear": 1, "types": {"INT4"}, "opset": 21, "ir": 10},
}


@pytest.mark.parametrize(("style", "name"), NODES, ids=lambda word: word)
def test_operators_and_types(style: str, name: str, tmp_path: Path) -> None:
    expected = NODES[style, name]
    model = Layers([name])
    report = export_onnx(model, model.batch(0), tmp_path / "m.onnx", style=style)
    file = onnx.load(tmp_path / "m.onnx")
    used = [node.op_type for node in file.graph.node]
    for operator, count in expected.items():
        if operator[0].isupper():
            assert used.count(operator) == count, operator
    stored = {onnx.TensorProto.DataType.Name(t.data_type) for t in file.graph.initializer if "codes" in t.name}
    scales = {
        onnx.TensorProto.DataType.Name(t.data_type)
        for t in file.graph.initializer
        if t.name.endswith(("_weight_quantizer/scale", "/exponents"))
    }
    assert (stored | scales) - {"FLOAT"} == expected["types"]
    assert report.opset == expected["opset"]
    assert file.ir_version == expected["ir"]
    assert [(e.domain, e.version) for e in file.opset_import if e.domain] == ([("trt", 1)] if "CEIL" in name else [])


def changed(array: Any) -> Any:
    """Each of the largest elements one code smaller, whatever the type; the scales of zeros are among them."""
    bits = array.reshape(-1).view(f"uint{8 * array.itemsize}")
    bits[bits == bits.max()] -= 1
    return array


TAMPERED = [
    pytest.param("standard", "MXFP4", "_weight_quantizer/scale", marks=pytest.mark.exhaustive),
    pytest.param("standard", "NVFP4", "_weight_quantizer/scale_codes", marks=pytest.mark.exhaustive),
    ("standard", "NVFP4", "_weight_quantizer/scale_of_scales"),
    ("standard", "FP8", "_input_quantizer/scale"),
    pytest.param("trt", "NVFP4_WEIGHT_ONLY", "_weight_quantizer/scale_codes", marks=pytest.mark.exhaustive),
    ("trt", "MXFP8_CEIL", "_weight_quantizer/exponents"),
]


@pytest.mark.parametrize(("style", "name", "constant"), TAMPERED)
def test_a_changed_scale_is_found(style: str, name: str, constant: str, tmp_path: Path) -> None:
    model = Layers([name])
    export_onnx(model, model.batch(0), tmp_path / "m.onnx", style=style)
    assert verify_onnx(tmp_path / "m.onnx", model, [model.batch(1)]).exact
    file = onnx.load(tmp_path / "m.onnx")
    (tensor,) = (t for t in file.graph.initializer if t.name.endswith(constant))
    tensor.CopyFrom(numpy_helper.from_array(changed(numpy_helper.to_array(tensor).copy()), tensor.name))
    onnx.save(file, tmp_path / "m.onnx")
    report = verify_onnx(tmp_path / "m.onnx", model, [model.batch(1)])
    (row,) = (row for row in report.rows if row.quantizer.endswith(constant.split("/")[0]))
    assert not report.exact
    assert row.differing > 0
    assert not row.intact
    # Without the model the file is compared with itself; its digest tells.
    alone = verify_onnx(tmp_path / "m.onnx", None, [model.batch(1)])
    assert [r.intact for r in alone.rows].count(False) == 1
    assert alone.differing == 0


def test_a_portable_file_that_onnx_runtime_cannot_load_is_an_error(tmp_path: Path) -> None:
    model = Layers(["MXFP4"])
    export_onnx(model, model.batch(0), tmp_path / "m.onnx", style="standard")
    data = (tmp_path / "m.onnx").read_bytes().replace(b'"style": "standard"', b'"style": "portable"')
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(VerificationError, match="ONNX Runtime cannot load it"):
        verify_onnx(tmp_path / "m.onnx", model)


def test_half_precision_and_the_function_in_a_models_own_forward(tmp_path: Path) -> None:
    spec = "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:ceil"

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x.half(), spec).float()

    x = hostile((3, 64), 3).clamp(-5e4, 5e4)
    for style in STYLES:
        export_onnx(Half(), x, tmp_path / "m.onnx", style=style)
        report = verify_onnx(tmp_path / "m.onnx", Half(), [x])
        assert report.exact, str(report)
        assert report.outputs[0].differing == 0


def test_a_rule_for_one_layer_makes_a_preset_fit(tmp_path: Path) -> None:
    config = PRESETS["INT8"].with_rule(Rule("1", input=None, weight="float8_e4m3fn per_block(-1:128)"))
    model = prepare(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 2)), config)
    calibrate(model, [torch.randn(2, 128)])
    with pytest.raises(ExportError, match=r"1\._weight_quantizer: float8_e4m3fn per_block\(-1:128\): Tensor"):
        export_onnx(model, torch.randn(2, 128), tmp_path / "m.onnx", style="trt")
