"""Wide convolutions, whose inputs are taken in parts so that sums take bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.data import batches as tracking
from fakequant.nn import products as windows
from fakequant.ptq.solvers import transforms
from fakequant.ptq.solvers.sums import InputSums
from fakequant.ptq.solvers.transforms import Parts

SPECS = {  # and the number of transforms, which cut no group of a channel, and no groups that share a scale of scales
    "int4 per_channel(0)": 4,
    "int4": 4,
    "int4 per_block(-1:32,pad)": 4,
    "uint4 per_channel(0)": 4,
    "nf4 per_block(-1:64,pad)": 2,
    "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor": 4,
    "int4 per_block(-1:18) scale=float16": 4,
    "int4 per_channel(0) scale=uint6@per_tensor/float16": 4,
    "int4 per_channel(0) scale=uint6@per_block(0:3,pad)/float16": 1,
    "int4 per_block(-1:18) scale=uint6@per_channel(0)/float16": 1,
    "int4 per_block(-1:18) scale=uint6@per_block(-1:3,pad)/float16": 1,
    "int4 per_block(-1:18) scale=uint6@per_block(-1:4)/float16": 2,
    "uint4 per_block(-1:18) scale=uint6@per_block(-1:2)/float16 offset=uint6@per_block(-1:4)/float16": 2,
}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "_WIDEST", 100)
    monkeypatch.setattr(transforms, "_MOST", 144 * 36)


def net(spec: str) -> Any:
    torch.manual_seed(0)
    rule = fq.Rule(weight=spec)  # type: ignore[arg-type]
    return fq.prepare(nn.Sequential(nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), fq.Config("own", (rule,)))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("spec", SPECS)
def test_wide_convolutions_gain_in_parts(spec: str) -> None:
    model, batches = net(spec), [torch.randn(4, 16, 9, 9) for _ in range(8)]
    count = SPECS[spec]
    assert Parts.of(model[0].products()[0]).count == count
    assert Parts.of(model[2].products()[0]).count == 1
    found = fq.ptq.improve(model, batches, "fast")
    assert found.remaining_error < 0.9
    in_parts = [row.layer for row in found.layers if row.remarks and f"{count} parts" in row.remarks[-1]]
    assert in_parts == ["0"] * (count > 1)
    weight, quantizer = model[0].weight, model[0].weight_quantizer
    assert torch.equal(quantizer(weight), weight)
    stored = quantizer.spec.scale
    assert not stored.is_exact or torch.equal(stored.join(stored.split(quantizer.scale)), quantizer.scale)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("spec", SPECS)
def test_parts_of_a_weight_are_joined_to_the_bit(spec: str) -> None:
    layer = net(spec)[0]
    own, params = Parts.of(layer.products()[0]), layer.weight_quantizer.qparams(layer.weight)
    assert torch.equal(own.join(own.split(layer.weight)), layer.weight)
    back = own.join_params(own.split_params(params))
    assert torch.equal(back.scale, params.scale)
    if params.zero_point is not None:
        assert back.zero_point is not None
        assert torch.equal(back.zero_point, params.zero_point)
    rows = layer.products()[0].rows(torch.randn(2, 16, 5, 5))
    together = (own.rows(rows) @ own.split(layer.weight).reshape(own.count, 8, -1).mT).sum(0)
    torch.testing.assert_close(together, rows[0] @ layer.weight.reshape(8, -1).mT)


def test_windows_are_made_in_blocks_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    add = InputSums.add

    def see(self: InputSums, rows: torch.Tensor, *wanted: torch.Tensor | None) -> None:
        sizes.append(rows.numel())
        add(self, rows, *wanted)

    monkeypatch.setattr(windows, "_MOST", 3 * 16 * 81 * 9)
    monkeypatch.setattr(InputSums, "add", see)
    fq.ptq.improve(net("int4 per_channel(0)"), [torch.randn(8, 16, 9, 9) for _ in range(2)], "fast", judge=[])
    assert max(sizes) <= 3 * 16 * 81 * 9
    assert sum(sizes) == 16 * (49 * 144 + 25 * 72)


@pytest.mark.parametrize(
    ("layer", "columns"),
    [
        (nn.Linear(64, 8), [64]),
        (nn.Conv2d(8, 16, 3), [72]),
        (nn.Conv2d(8, 16, 3, groups=4), [18] * 4),
        (nn.ConvTranspose2d(8, 4, 2), [32]),
        (nn.Conv1d(64, 2, 96), [384] * 16),
    ],
    ids=str,
)
def test_the_memory_of_sums_is_that_of_the_widest_layer(layer: nn.Module, columns: list[int]) -> None:
    model = fq.prepare(nn.Sequential(layer), "int8_weight_only")
    matrices = 8 if sum(columns) <= 2048 else 4
    assert transforms.memory(model[0].products()) == matrices * 8 * sum(count**2 for count in columns)


def test_the_memory_of_sums_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(tracking, "COUNT_EVERY", 0.0)
    model = fq.prepare(nn.Sequential(nn.Linear(1536, 4), nn.Linear(4, 4)), "int8_weight_only")
    with tracking.counting(told.append, bars=False):
        fq.ptq.improve(model, [torch.randn(8, 1536)], "fast")
    assert told == ["choosing weights, in up to 0.2 GB: 1 of 2"]
