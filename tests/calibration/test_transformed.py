"""Calibration within the transforms of torch.func, whose tensors let no function look at their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.calibration import calibrators, make_calibrator
from fakequant.calibration.calibrator import outside_of_transforms
from tests.support.bits import assert_same_bits

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MEMBERS = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1))
TOGETHER = {  # how the members of a vmap are one tensor with the groups of one member, if they can be
    "int8": MEMBERS.reshape(20, 8),
    "int8 per_channel(-1)": MEMBERS.reshape(20, 8),
    "int8 per_channel(0)": MEMBERS.transpose(0, 1).reshape(4, 40),
    "int8 per_channel(0,1)": None,
    "int8 per_block(-1:4)": None,
}


@pytest.mark.parametrize("spec", TOGETHER)
@pytest.mark.parametrize("method", calibrators())
def test_vmap_shows_what_a_batch_of_its_members_does(method: str, spec: str) -> None:
    mapped, plain = make_calibrator(method, spec), make_calibrator(method, spec)
    torch.vmap(lambda member: (mapped.observe(member), member)[1], in_dims=1)(MEMBERS.transpose(0, 1))
    together = TOGETHER[spec]
    for x in MEMBERS if together is None else [together]:
        plain.observe(x)
    for found, wanted in zip(mapped.compute_range(), plain.compute_range(), strict=True):
        assert_same_bits(found, wanted)


def test_members_of_nested_vmaps_come_first_and_transforms_go_on() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    shapes: list[list[int]] = []

    def see(row: Tensor) -> Tensor:
        with outside_of_transforms(row, x) as (plain, whole):
            assert not torch._C._are_functorch_transforms_active()
            assert whole is x
            assert_same_bits(plain, x.permute(2, 0, 1).reshape(8, 3))
            shapes.append(list(plain.shape))
        return row * 2

    y = torch.vmap(torch.vmap(see, in_dims=0, out_dims=0), in_dims=2, out_dims=2)(x)
    assert_same_bits(y, x * 2)
    assert shapes == [[8, 3]]


class Mapped(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.w = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "layer":
            return torch.vmap(self.layer)(x)
        if self.way == "site":
            return self.layer(torch.vmap(lambda row: row @ self.w)(x))
        if self.way == "gradient":
            return torch.func.grad(lambda t: self.layer(t).square().sum())(x)
        if self.way == "tangent":
            return torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))[1]
        if self.way == "jacobian":
            return torch.vmap(torch.func.jacrev(self.layer))(x)
        weights = torch.stack([self.layer.weight, self.w])
        return torch.vmap(lambda w: torch.func.functional_call(self.layer, {"weight": w}, (x,)))(weights)


@pytest.mark.parametrize("way", ["layer", "site", "gradient", "tangent", "jacobian", "ensemble"])
def test_models_with_transforms_inside_are_calibrated(way: str) -> None:
    config = fq.presets.INT8.with_rule(fq.Rule("*", fq.presets.INT8, ops=("matmul",), optional=True))
    model: Any = fq.prepare(Mapped(way), config, X)
    fq.calibrate(model, [X, X + 1], method="max")
    assert torch.isfinite(model(X)).all()
    if way == "layer":
        plain: Any = fq.prepare(nn.Linear(8, 8), "INT8")
        fq.calibrate(plain, [X, X + 1], method="max")
        assert model.layer.input_quantizer.scale.item() == plain.input_quantizer.scale.item()
        assert_same_bits(model(X), model.layer(X))
    if way == "site":
        site: Any = model.get_submodule("_sites.matmul_0")
        assert site.input.scale.item() == torch.cat([X, X + 1]).abs().max().div(127).item()


def test_what_looks_at_layers_looks_at_all_members() -> None:
    mapped = fq.prepare(Mapped("layer"), "INT8", X)
    fq.calibrate(mapped, [X])
    plain = mapped.layer
    sqnr = fq.layer_sqnr(mapped, [X])
    inner = {f"layer.{name}": value for name, value in fq.layer_sqnr(plain, [X]).items()}
    assert sqnr == inner
    assert [row.value for row in fq.sensitivity(mapped, [X])] == [row.value for row in fq.sensitivity(plain, [X])]
    state = {name: value.clone() for name, value in mapped.state_dict().items()}
    with pytest.raises(fq.FakeQuantError, match=r"the model calls layer.* within torch\.vmap .* skip=\('layer',\)"):
        fq.ptq.improve(mapped, [X, X + 1])
    assert all(torch.equal(value, state[name]) for name, value in mapped.state_dict().items())
