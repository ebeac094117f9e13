"""Runs of a model that look at it run as written, also what a model compiles itself: control flow and parts of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import fakequant as fq
from fakequant.errors import StaleScaleWarning
from fakequant.model.weights import evaluating, modes, not_compiled
from fakequant.nn.quantizer import Mode
from tests.support.bits import assert_same_bits

BATCHES = [sign * torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).abs() for sign in (1, -1, 1)]


class Calls(nn.Module):
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


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.w


class Branching(nn.Module):
    """Calls a module that owns sites, and a product of its own, in control flow of torch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self.other, self.w = Residual(), nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        def both(y: Tensor) -> Tensor:
            return self.block(y) @ self.w

        mapped: Any = both
        if self.way == "cond":
            return self.other(x + torch.cond(x.sum() > 0, both, lambda y: y * 2, (x,)))
        if self.way == "map":
            return self.other(x + map_rows(mapped, x))
        return self.other(x + while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, both(y)), (torch.tensor(0), x))[1])


@pytest.mark.parametrize("way", ["cond", "map", "while_loop"])
def test_modules_in_control_flow_own_sites_and_its_own_products_are_named(way: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    rules = fq.presets.INT8.with_rule(fq.Rule("*", fq.presets.INT8, ops=("matmul", "add")))
    model = fq.prepare(Branching(way), rules, BATCHES[0])
    found = [site.path for site in fq.site_plan(model).sites]
    assert found == ["_sites.add_0", "block._sites.matmul_0", "block._sites.add_0"]
    fq.calibrate(model, BATCHES if way == "cond" else BATCHES[:1])
    left = [(one.module, one.name) for one in fq.unquantized(model, BATCHES[0], products_only=True)]
    assert set(left) == {("", "matmul")}
    for x in BATCHES[:2] if way == "cond" else BATCHES[:1]:
        y = model(x)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            assert_same_bits(model(x), y.detach())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointed_owners_of_sites_are_compiled_whole(backend: str, use_reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for block in self:
                input = checkpoint(block, input, use_reentrant=use_reentrant)
            return input

    torch.manual_seed(0)
    torch._dynamo.reset()
    rules = fq.presets.INT8.with_rule(fq.Rule("*", fq.presets.INT8, ops=("matmul", "add")))
    model: Any = fq.prepare(Checkpointed(Residual(), nn.Sequential(Residual(), nn.ReLU())), rules, BATCHES[0])
    fq.calibrate(model, BATCHES)
    outputs, gradients = [], []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        x = BATCHES[0].clone().requires_grad_()
        outputs.append(run(x))
        outputs[-1].square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    assert_same_bits(*outputs)
    for one, other in zip(*gradients, strict=True):
        assert_same_bits(one, other)


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


def test_a_measurement_leaves_the_warning_of_a_changed_weight_to_the_next_call() -> None:
    model, x = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8"), torch.randn(8, 4)
    fq.calibrate(model, [x], progress=False)
    model.eval()(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with modes(model, lambda *_: Mode.QUANTIZE), pytest.warns(StaleScaleWarning):
        model(x)
    with pytest.warns(StaleScaleWarning):
        model(x)


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def test_contexts_that_end_in_any_order_leave_the_stance_of_the_compiler() -> None:
    """Contexts of several threads end so, and that of a call which an interrupt ended after its caller's."""
    for before in ("default", "eager_on_recompile"):
        torch.compiler.set_stance(before)
        try:
            one, other, third = not_compiled(), not_compiled(), not_compiled()
            one.__enter__()
            other.__enter__()
            one.__exit__(None, None, None)
            assert stance() == "force_eager"
            third.__enter__()
            other.__exit__(None, None, None)
            assert stance() == "force_eager"
            third.__exit__(None, None, None)
            assert stance() == before
        finally:
            torch.compiler.set_stance("default")


def test_threads_leave_the_stance_of_the_compiler() -> None:
    model, x = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8"), torch.randn(8, 4)

    def work(_: int) -> None:
        for _ in range(20):
            with evaluating(model):
                model[0].weight.sum()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert stance() == "default"
    fq.calibrate(model, [x], progress=False)
    assert stance() == "default"
