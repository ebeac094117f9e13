"""Layers whose class has a forward of its own: with an example, the product that the run shows gets the quantizers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, CoverageWarning
from fakequant.nn.quantizer import Kind, quantizers
from tests.support.bits import assert_same_bits


class SamePadding(nn.Conv2d):
    """Pads by itself, as convolutions of vision packages do."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Causal(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(F.pad(input, (2, 0)), self.weight, self.bias)


class Cropped(nn.ConvTranspose1d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return F.conv_transpose1d(input, self.weight, self.bias, self.stride)[..., :-1]


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input * 0.5, self.weight, self.bias)


class Multiplied(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "same padding": (lambda: SamePadding(8, 8, 3), (2, 8, 6, 6)),
    "depthwise": (lambda: SamePadding(8, 8, 3, groups=8), (2, 8, 6, 6)),
    "causal": (lambda: Causal(8, 4, 3), (2, 8, 9)),
    "transposed": (lambda: Cropped(8, 4, 3), (2, 8, 9)),
    "scaled": (lambda: Scaled(8, 4), (3, 8)),
    "multiplied": (lambda: Multiplied(8, 4), (3, 8)),
}


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(LAYERS[kind][0]()), torch.randn(LAYERS[kind][1])


@pytest.mark.parametrize("preset", ["int8", "int8_weight_only", "int8_per_token"])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_product_is_quantized_where_an_example_shows_it(kind: str, preset: str, tmp_path: Path) -> None:
    (net, x), first = made(kind), copy.deepcopy(made(kind)[0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*stays? in float", CoverageWarning)
        model = fq.prepare(net, preset, x)
    fq.calibrate(model, [x], progress=False)
    with torch.no_grad():
        y, wanted = model(x), first(x)
    assert 0 < (y - wanted).square().sum() < 1e-2 * wanted.square().sum()
    assert sum(q.kind is Kind.WEIGHT for q in quantizers(model).values()) == 1
    assert_same_bits(fq.load(first, fq.save(model, tmp_path / "saved"))(x), y)


def test_rules_and_skip_hold_for_such_layers() -> None:
    x = torch.randn(2, 8, 6, 6)
    net = nn.Sequential(SamePadding(8, 8, 3), SamePadding(8, 8, 3), SamePadding(8, 8, 3), nn.Conv2d(8, 2, 1))
    model = fq.prepare(net, "int8", x, skip=["1"], rules={"2": "int4_weight_only"})
    found = {path: str(q.spec) for path, q in quantizers(model).items()}
    assert [path.split(".")[0] for path in found] == ["0", "0", "2", "3", "3"]
    assert next(spec for path, spec in found.items() if path.startswith("2")).startswith("int4")


def test_without_an_example_the_message_names_it() -> None:
    net, _ = made("same padding")
    with pytest.raises(ConfigError, match=r"prepare\(model, config, example"):
        fq.prepare(net, "int8")
    with pytest.warns(CoverageWarning, match=r"SamePadding \(1: its own forward\)"):
        fq.prepare(nn.Sequential(net, nn.Conv2d(8, 2, 1)), "int8")


FORWARDS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "Sliced": lambda self, x: torch.cat([F.linear(part, self.weight, self.bias) for part in x.split(2)]),
    "Masked": lambda self, x: F.linear(x, self.weight * (self.weight > 0), self.bias),
    "Attends": lambda self, x: (y := F.linear(x, self.weight, self.bias)) @ y.mT,
    "Other": lambda self, x: F.linear(x, torch.eye(8), self.bias) + self.weight.sum(),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_of_more_than_one_product_of_its_weight_stays_in_float(name: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), type(name, (nn.Linear,), {"forward": FORWARDS[name]})(8, 8))
    with pytest.warns(CoverageWarning, match=f"{name} \\(1: its own forward\\)"):
        model = fq.prepare(net, "int8", torch.randn(4, 8))
    assert {path.split(".")[0] for path in quantizers(model)} == {"0"}
    fq.calibrate(model, [torch.randn(4, 8)], progress=False)
    assert model(torch.randn(3, 8)).shape[0] == 3  # another batch size calls other products


@pytest.mark.parametrize("rule", [fq.Rule("0", "int4_weight_only", ops=("linear",)), fq.Rule("*", ops=("linear",))])
def test_rules_of_functions_hold_against_it(rule: fq.Rule) -> None:
    model = fq.prepare(nn.Sequential(Scaled(8, 8), nn.Linear(8, 4)), fq.presets.INT8.with_rule(rule), torch.randn(4, 8))
    own = [str(q.spec) for path, q in quantizers(model).items() if path.startswith("0")]
    assert own == [] if rule.leaves_in_float else [spec[:4] for spec in own] == ["int4"]
