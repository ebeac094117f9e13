"""Packages of Core AI, run by its runtime; most tests are skipped without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fakequant as fq
from fakequant.errors import ConfigError, ExportError
from fakequant.export import coreai as module
from fakequant.export.capability import require
from fakequant.export.pt2e import lowered
from fakequant.numerics.spec import QuantSpec
from tests.support.bits import assert_same_bits
from tests.support.language_models import IDS, llama
from tests.support.mobile import calibrated, rules_of

WEIGHTS = {
    "int8": "int8 per_channel(0)",
    "int8 affine": "int8 per_channel(0) asymmetric",
    "int4": "int4 per_channel(0)",
    "int4 groups": "int4 per_block(-1:32)",
    "int4 groups with zero points": "uint4 per_block(-1:32)",
    "offsets": "uint4 per_block(-1:32) scale=float16 offset=float16",
    "int3": "int3 per_channel(0)",
    "ternary": "int2_narrow per_tensor scale=float32:mean",
    "nf4": "nf4 per_block(-1:32)",
    "mxfp4": "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "nvfp4": "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    "fp6": "float6_e2m3fn per_channel(0)",
    "fp8": "float8_e4m3fn per_channel(0)",
    "fnuz": "float8_e4m3fnuz per_channel(0)",
}


@pytest.fixture
def engine() -> None:
    pytest.importorskip("coreai_torch", reason="needs coreai-torch: make engines")


def assert_runs(model: nn.Module, example: Any, path: Path, decibels: float = 120.0) -> Any:
    """The package's description; the graph in Apple's operators has the bits of the simulation."""
    program = lowered(model, example, call="export_coreai(x)", multiplies=False, operators=module._ToCoreAI)
    args, kwargs = program.example_inputs or ((), {})
    with torch.no_grad():
        graph, ours = program.module()(*args, **kwargs), model(*args, **kwargs)
    for one, own in zip(tree_leaves(graph), tree_leaves(ours), strict=True):
        assert_same_bits(one, own)
    file = fq.export_coreai(model, example, path)
    assert [row.sqnr >= decibels for row in file.outputs] == [True] * len(file.outputs), file
    assert file.path == path
    assert path.is_dir()
    assert file.bytes > 1000
    return file


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", ["mlp", "attention", "tables"])
def test_weights_of_any_format(name: str, weight: str, tmp_path: Path) -> None:
    assert_runs(*calibrated(name, rules_of(weight=WEIGHTS[weight])), tmp_path / "m.aimodel")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("preset", ["INT8", "INT8_AFFINE", "FP8", "FP8_E5M2", "INT4_WEIGHT_ONLY"])
@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_activations_of_8_bits(name: str, preset: str, tmp_path: Path) -> None:
    assert_runs(*calibrated(name, preset), tmp_path / "m.aimodel")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("name", "axis"), [("cnn", 1), ("mlp", -1)])
def test_scales_of_channels_of_activations(name: str, axis: int, tmp_path: Path) -> None:
    config = rules_of(weight="int8 per_channel(0)", input=f"uint8 per_channel({axis})")
    assert_runs(*calibrated(name, config), tmp_path / "m.aimodel")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("preset", ["INT4_GROUP32", "NF4_WEIGHT_ONLY", "MLX_MXFP4", "INT8"])
def test_a_language_model(preset: str, tmp_path: Path) -> None:
    model = fq.prepare(llama(), preset)
    example = {"input_ids": IDS, "use_cache": False}
    fq.calibrate(model, [example], progress=False)
    # Another order of a sum is another code of an activation here and there.
    assert_runs(model, example, tmp_path / "m.aimodel", 50 if preset == "INT8" else 120)


@pytest.mark.usefixtures("engine")
def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        model = fq.prepare(llama(tied=tied), "INT8_WEIGHT_ONLY")
        file = assert_runs(model, {"input_ids": IDS, "use_cache": False}, tmp_path / f"{tied}.aimodel")
        sizes.append(file.bytes)
    assert sizes[1] - sizes[0] > 512 * 256


@pytest.mark.usefixtures("engine")
def test_codes_of_a_solver_are_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), "int4_group32")
    fq.ptq.improve(model, [x, x + 1], "fast", progress=False)
    assert_runs(model.eval(), x, tmp_path / "m.aimodel")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("weight", "bits"), [("int4", 4), ("nf4", 4), ("int3", 4), ("int2", 2)])
def test_codes_are_packed(weight: str, bits: int, tmp_path: Path) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(512, 512, bias=False)).eval(), rules_of(weight=weight))
    fq.calibrate(model, progress=False)
    file = fq.export_coreai(model, torch.randn(1, 512), tmp_path / "m.aimodel")
    assert 0 < file.bytes - 512 * 512 * bits // 8 < 8000


class Two(nn.Module):
    """Layers by other names than the order of the arguments; layers with the names of Apple's operands."""

    def __init__(self) -> None:
        super().__init__()
        self.indices_lut, self.lut_indices = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, z: Tensor, a: Tensor, flag: bool = True) -> dict[str, Tensor]:
        y = self.lut_indices(z) + self.indices_lut(a)
        return {"z": y, "a": self.indices_lut(a) if flag else y, "best": y.argmax(-1), "same": y}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("weight", ["int8", "nf4"])
def test_inputs_and_results_keep_their_order(weight: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    z, a = torch.randn(3, 8), 5 * torch.randn(3, 8)
    model = fq.prepare(Two().eval(), rules_of(weight=weight), (z, a))
    file = assert_runs(model, {"a": a, "z": z, "flag": True}, tmp_path / "m.aimodel")
    assert len(file.outputs) == 4
    assert_runs(model, (z, a), tmp_path / "n.aimodel")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("preset", ["INT4_WEIGHT_ONLY", "NF4_WEIGHT_ONLY", "INT8"])
def test_half_precision(preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 64).to(dtype)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype).eval(), preset, x)
    fq.calibrate(model, [x], progress=False)
    assert_runs(model, x, tmp_path / "m.aimodel", 40 if dtype is torch.bfloat16 or preset == "INT8" else 50)


@pytest.mark.usefixtures("engine")
def test_another_scale_is_an_error_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = module._converted_and_run

    def other(program: Any, path: Path) -> list[Tensor]:
        name = next(name for name in program.state_dict if "scales" in name)
        program.state_dict[name] = program.state_dict[name] * 2
        return convert(program, path)

    monkeypatch.setattr(module, "_converted_and_run", other)
    model, x = calibrated("mlp", "INT8_WEIGHT_ONLY")
    with pytest.raises(ExportError, match="computes something else than the model, so nothing was written"):
        fq.export_coreai(model, x, tmp_path / "m.aimodel")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("engine")
def test_in_a_running_loop(tmp_path: Path) -> None:
    model, x = calibrated("mlp", "INT8_WEIGHT_ONLY")

    async def notebook() -> Any:
        return fq.export_coreai(model, x, tmp_path / "m.aimodel")

    assert asyncio.run(notebook()).outputs[0].sqnr > 120


class Counting(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.layer(x) + self.count


class Inverse(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return torch.linalg.inv(self[0](input))


class Numbers(nn.Sequential):
    def forward(self, input: Tensor) -> Any:
        return self[0](input), 3


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Counting(), "forward writes count, and the package is run without states"),
        (Inverse(nn.Linear(8, 8)), r"Core AI refuses the model, so nothing was written: .*linalg_inv"),
        (Numbers(nn.Linear(8, 8)), "forward returns 3 beside tensors"),
        (nn.Sequential(nn.Linear(8, 8)).double(), r"the model in float64; use model\.float\(\)"),
    ],
)
def test_models_that_cannot_be_run(net: nn.Module, words: str, tmp_path: Path) -> None:
    model = fq.prepare(net.eval(), "INT8_WEIGHT_ONLY")
    x = torch.randn(8, 8, dtype=next(model.parameters()).dtype)
    with pytest.raises(ExportError, match=words):
        fq.export_coreai(model, x, tmp_path / "m.aimodel")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("W8A8_DYNAMIC", r"0\._input_quantizer: .*takes its range from every tensor, and Core AI has constants; use"),
        (rules_of(weight="int8", input="int16"), r"0\._input_quantizer: .*Core AI has int8, uint8.*use INT8 or FP8"),
        (rules_of(weight="int8", input="int8_narrow"), r"0\._input_quantizer: .*use INT8 or FP8"),
        (rules_of(weight="int8", input="int8 reciprocal"), r"0\._input_quantizer: .*prepare with target='coreai'"),
        (rules_of(weight="int16"), r"0\._weight_quantizer: .*at most 8 bits; use INT8_WEIGHT_ONLY, not int16"),
        (rules_of(weight="int4 per_block(-1:48,pad)"), r"0\._weight_quantizer: .*groups of equal length.*\[64, 64\]"),
    ],
)
def test_what_it_has_not_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    model, x = calibrated("mlp", config)
    with pytest.raises(ExportError, match=words):
        fq.export_coreai(model, x, tmp_path / "m.aimodel")


@pytest.mark.usefixtures("engine")
def test_paths_that_are_refused(tmp_path: Path) -> None:
    model, x = calibrated("mlp", "INT8_WEIGHT_ONLY")
    with pytest.raises(ExportError, match=r"end in \.aimodel"):
        fq.export_coreai(model, x, tmp_path / "m.mlpackage")
    (tmp_path / "m.aimodel").mkdir()
    with pytest.raises(ExportError, match="give a new path, or remove it"):
        fq.export_coreai(model, x, tmp_path / "m.aimodel")


@pytest.mark.parametrize(
    ("spec", "constant", "words"),
    [
        ("int8 per_channel(0)", True, None),
        ("float8_e4m3fn", False, None),
        ("int8 reciprocal", True, None),
        ("int8 multiplier", True, "decodes by one scale"),
        ("int8 stochastic", True, "rounds to nearest"),
        ("int8 multiplier", False, "divides by the scale"),
        ("uint8 offset=float32", False, "for activations"),
    ],
)
def test_which_specifications_it_has(spec: str, constant: bool, words: str | None) -> None:
    reason = module._ToCoreAI.why_not(QuantSpec.parse(spec), constant=constant)
    assert reason is None if words is None else words in str(reason)


def test_its_target_refuses_what_it_has_not() -> None:
    with pytest.raises(ConfigError, match=r"(?s)coreai cannot load W8A8_DYNAMIC: .*0\._input_quantizer: .*WEIGHT_ONLY"):
        fq.prepare(nn.Sequential(nn.Linear(4, 4)), "W8A8_DYNAMIC", target="coreai")


def test_its_target_divides() -> None:
    config = rules_of(weight="int8 per_channel(0)", input="int8 reciprocal")
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), config, target="coreai")
    assert str(fq.nn.quantizers(model)["0._input_quantizer"].spec) == "int8 per_tensor"


def test_without_the_packages_an_error_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "require", lambda *names, **options: require("no_such_package", **options))
    with pytest.raises(ExportError, match=r"Core AI needs no_such_package.*pip install coreai-core==1\.0\.0b3"):
        fq.export_coreai(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "m.aimodel")
