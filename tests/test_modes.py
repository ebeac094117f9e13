"""Runs of a model that look at it run as written, also what a model compiles itself: control flow and parts of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fakequant as fq
from tests.support.bits import assert_same_bits

BATCHES = [sign * torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).abs() for sign in (1, -1, 1)]


class Calls(nn.Module):
    """Calls two layers in a way of torch that compiles what it calls."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.way = way
        if way == "compiled":
            self.first.compile(backend="eager", fullgraph=True)
        self.compiled = torch.compile(lambda x: self.first(x), backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "cond":
            return torch.cond(x.sum() > 0, self.first, lambda y: self.second(y) + 1, (x,))
        if self.way == "while_loop":
            x = while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, self.first(y)), (torch.tensor(0), x))[1]
        elif self.way == "map":
            x = map_rows(self.first, x)
        elif self.way == "scan":
            x = scan(lambda carry, row: (self.first(carry + row), row + 0), torch.zeros(8), x)[0]
        elif self.way == "compiled":
            x = self.first(x)
        else:
            x = self.compiled(x)
        return self.second(x)


WAYS = ["cond", "while_loop", "map", "scan", "compiled", "compiled function"]


def prepared(way: str) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = fq.prepare(Calls(way), "INT8", BATCHES[0])
    fq.calibrate(model, BATCHES, method="max")
    return model


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_compiles_itself_is_calibrated_and_looked_at(way: str) -> None:
    model = prepared(way)
    if way in ("cond", "compiled"):
        same = {"cond": BATCHES[0:3:2], "compiled": BATCHES}[way]
        assert model.first.input_quantizer.scale.item() == torch.cat(same).abs().max().div(127).item()
    for look in (fq.sensitivity, fq.layer_sqnr, fq.ptq.improve):
        look(model, BATCHES)
    fq.summary(model, BATCHES[0])
    with torch.no_grad():
        y = model(BATCHES[0])
        with torch.compiler.set_stance("force_eager"):
            assert_same_bits(model(BATCHES[0]), y)


@pytest.mark.parametrize("transform", [fq.ptq.rotate, lambda model, x: fq.ptq.equalize(model, x, "INT8")])
@pytest.mark.parametrize("way", ["cond", "map"])
def test_float_models_with_control_flow_are_followed(way: str, transform: Callable[[Any, Tensor], Any]) -> None:
    model = Calls(way)
    before = model(BATCHES[0])
    transform(model, BATCHES[0])
    torch.testing.assert_close(model(BATCHES[0]), before)


NEW_PROCESS = """
import torch, fakequant as fq
class Branches(torch.nn.Sequential):
    def forward(self, x):
        return torch.cond(x.sum() > 0, self[0], self[1], (x,))
model, x = fq.prepare(Branches(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), "INT8"), torch.ones(2, 8)
fq.calibrate(model, [x, -x])
"""


def test_control_flow_in_a_process_that_has_compiled_nothing() -> None:
    subprocess.run([sys.executable, "-c", NEW_PROCESS], check=True)


class Attention(nn.Module):
    """Attention by flex_attention, with a bias of each head and a causal mask."""

    def __init__(self, *, biased: bool, masked: bool) -> None:
        super().__init__()
        self.projection, self.out, self.bias = nn.Linear(16, 48), nn.Linear(16, 16), nn.Parameter(torch.ones(2))
        self.biased, self.masked = biased, masked

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask, size = None, x.shape[1]
        if self.masked:
            mask = create_block_mask(lambda _, __, i, j: i >= j, None, None, size, size, device="cpu")
        score = (lambda score, _, head, __, ___: score + self.bias[head]) if self.biased else None
        attended: Any = flex_attention(query, key, value, score_mod=score, block_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("biased", "masked"), [(False, False), (True, False), (False, True), (True, True)])
def test_flex_attention_of_a_model_itself(biased: bool, masked: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 128, 16)
    model = fq.prepare(Attention(biased=biased, masked=masked), "INT8", x)
    fq.calibrate(model, [x])
    (attention,) = [one for one in fq.unquantized(model, x) if one.name == "flex_attention"]
    assert attention.multiplications == 2 * (2 * 2 * 128) * 128 * 8
    fq.sensitivity(model, [x])
    fq.ptq.improve(model, [x, x + 1])
    with pytest.raises(fq.FakeQuantError, match="flex_attention has no form there; let the model"):
        fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert not torch._C._are_functorch_transforms_active()
