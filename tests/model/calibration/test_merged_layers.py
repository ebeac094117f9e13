"""Layers that vLLM merges have one number where the server has one: experts of a block, gate and up.

vLLM was not run with these. By its sources the fused experts take the largest input scale of all experts, and of the
weights of gate and up of each expert the larger scale.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, ExportError
from fakequant.nn import Kind
from fakequant.ops import library

NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen": ("gate_proj", "up_proj", "down_proj")}
_FP8 = fq.TensorConfig(fq.QuantSpec("float8_e4m3fn"))
STATIC = fq.Config("static", (fq.Rule("*", weight=_FP8, input=_FP8),))


class Expert(nn.Module):
    def __init__(self, names: tuple[str, str, str], size: float) -> None:
        super().__init__()
        self.names = names
        for name, (inner, outer) in zip(names, ((32, 64), (32, 64), (64, 32)), strict=True):
            self.add_module(name, nn.Linear(inner, outer, bias=False))
        with torch.no_grad():
            self.get_submodule(names[1]).weight.mul_(size)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = map(self.get_submodule, self.names)
        return down(nn.functional.silu(gate(x)) * up(x))


class Block(nn.Module):
    """Experts that get rows of other sizes; the last one none where `unreached`."""

    def __init__(self, style: str, unreached: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(NAMES[style], 1.0 + place) for place in range(3))
        self.unreached = unreached

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(4)[: 3 - self.unreached]
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=False)])


class Net(nn.Module):
    def __init__(self, style: str, **how: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(style, **how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batches(count: int = 3) -> list[Tensor]:
    sizes = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(4)[:, None]
    return [torch.randn(12, 32, generator=torch.Generator().manual_seed(seed)) * sizes for seed in range(count)]


def calibrated(style: str, preset: Any, target: str | None = "vllm", how: Any = None, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    model = fq.prepare(Net(style, **(how or {})).eval(), preset, target=target)
    fq.calibrate(model, batches(), progress=False, **given)
    return model


def in_file(model: nn.Module) -> dict[str, float]:
    """The numbers that a file has once for a tensor, by the paths of the quantizers."""
    file = fq.encode(model, "compressed-tensors")
    found = dict[str, float]()
    for name in fq.nn.quantizers(model):
        layer, _, attribute = name.rpartition(".")
        start = f"{layer}.{attribute.strip('_').removesuffix('_quantizer')}"
        own = [file[key] for end in ("global_scale", "scale") if (key := f"{start}_{end}") in file]
        found[name] = float(own[0])
    return found


def groups(model: nn.Module, style: str) -> dict[tuple[Any, ...], list[str]]:
    """What the server merges: the inputs of all experts by the layer, the weights of gate and up by the expert."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, quantizer in fq.nn.quantizers(model).items():
        _, block, _, expert, layer, _ = name.split(".")
        is_down = layer == NAMES[style][2]
        key = (block, is_down) if quantizer.kind is Kind.INPUT else (block, is_down, expert)
        found.setdefault(key, []).append(name)
    return found


@pytest.mark.parametrize("preset", [STATIC, "NVFP4"], ids=["static", "nvfp4"])
@pytest.mark.parametrize("style", NAMES)
def test_what_a_server_merges_has_one_number(style: str, preset: Any) -> None:
    model = calibrated(style, preset)
    held, merged = in_file(model), groups(model, style)
    found = {key: {held[name] for name in names} for key, names in merged.items()}
    assert {key: len(scales) for key, scales in found.items()} == dict.fromkeys(merged, 1)
    assert len({scale for scales in found.values() for scale in scales}) == len(found)  # others have their own


@pytest.mark.parametrize("style", NAMES)
def test_the_merge_changes_no_codes(style: str) -> None:
    """The largest scale of all, as the server takes it, gives the codes that were simulated."""

    def changed(model: nn.Module) -> int:
        held, count = fq.nn.quantizers(model), 0
        seen: dict[str, Tensor] = {}

        def see(name: str, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0]

        for path, one in held.items():
            one.register_forward_pre_hook(lambda _, args, path=path: see(path, args))
        with torch.no_grad():
            model(batches()[0])
            for names in groups(model, style).values():
                own_scales = {name: scale for name in names if (scale := held[name].scale) is not None}
                largest = torch.stack([*own_scales.values()]).amax(0)
                for name, scale in own_scales.items():
                    codes = [library.encode(seen[name], fq.QParams(s, None), held[name].spec) for s in (scale, largest)]
                    own, servers = (one.float() for one in codes if one is not None)
                    count += int((own != servers).sum())
        return count

    assert changed(calibrated(style, STATIC)) == 0
    assert changed(calibrated(style, STATIC, target=None)) > 1000


@pytest.mark.parametrize("preset", [STATIC, "NVFP4"], ids=["static", "nvfp4"])
def test_an_unreached_expert_has_the_range_of_the_others(preset: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        model = calibrated("mixtral", preset, how={"unreached": True}, unseen="siblings")
    held = in_file(model)
    for names in groups(model, "mixtral").values():
        assert len({held[name] for name in names}) == 1


def test_an_unreached_expert_is_named_where_its_input_needs_data() -> None:
    with pytest.raises(CalibrationError, match="6 of 18 input quantizers saw no data"):
        calibrated("mixtral", STATIC, how={"unreached": True})


def test_improve_gives_merged_weights_that_have_no_scales_yet_one_number() -> None:
    model = fq.prepare(Net("qwen").eval(), "NVFP4_WEIGHT_ONLY", target="vllm")
    fq.ptq.improve(model, batches(64), ["gptq"], progress=False)
    assert all(one.fixed_codes is not None for one in fq.nn.quantizers(model).values())
    held = in_file(model)
    assert {len({held[name] for name in names}) for names in groups(model, "qwen").values()} == {1}


def test_improve_keeps_the_range_that_experts_share() -> None:
    model = calibrated("qwen", STATIC)
    before = in_file(model)
    fq.ptq.improve(model, batches(), "best", progress=False)
    after = in_file(model)
    inputs = [name for name, one in fq.nn.quantizers(model).items() if one.kind is Kind.INPUT]
    assert [after[name] for name in inputs] == [before[name] for name in inputs]


def test_recalibrating_and_copies_keep_it() -> None:
    model = copy.deepcopy(calibrated("qwen", STATIC))
    fq.recalibrate(model, method="percentile")
    held = in_file(model)
    for names in groups(model, "qwen").values():
        assert len({held[name] for name in names}) == 1


def test_methods_that_cannot_merge_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 quantizers of blocks\.0\.experts\.\*.* share a range"):
        calibrated("qwen", STATIC, method="moving_average")


def test_without_a_server_each_layer_has_its_own_range() -> None:
    model = calibrated("qwen", STATIC, target=None)
    held, merged = in_file(model), groups(model, "qwen")
    assert all(len({held[name] for name in names}) > 1 for names in merged.values() if len(names) > 1)


@pytest.mark.parametrize("style", NAMES)
@pytest.mark.parametrize(
    "preset", ["INT8", "FP8", fq.Config([fq.Rule(weight="int8 per_tensor", input="int8")])], ids=str
)
def test_experts_in_a_list_are_refused_with_fixed_ranges_that_no_server_takes(
    style: str, preset: Any, tmp_path: Path
) -> None:
    said = r"blocks\.0\.experts\.0\..*with a fixed range .*servers take .*W8A8_DYNAMIC and FP8_DYNAMIC"
    with pytest.raises(ConfigError, match=f"^vllm cannot load .*: {said}"):
        fq.prepare(Net(style), preset, target="vllm")
    model = calibrated(style, preset, target=None)
    with pytest.raises(ExportError, match=said):
        fq.deliver(model, tmp_path / "served", target="sglang")
    assert not (tmp_path / "served").exists()
    assert fq.deliver(model, tmp_path / "served", target="transformers").is_dir()
