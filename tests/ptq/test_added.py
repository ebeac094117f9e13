"""What the results of layers are added to: where it is seen, and that it counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.run.outputs import watching
from fakequant.model.weights import off
from fakequant.ptq import collector, improvement
from fakequant.ptq.solvers.sums import Drift
from fakequant.ptq.stream import ResidualInput, Stream, added_operands, call_order
from tests.support.bits import assert_same_bits
from tests.support.kept import kept


class Block(nn.Module):
    """Two layers, and what is made of their results."""

    def __init__(self, end: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)
        self._end = end

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self._end(x, self.dropout(self.down(self.up(self.norm(x)).relu())))


ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first": lambda x, y: x + y,
    "second": lambda x, y: y + x,
    "in place": lambda x, y: x.add_(y),
    "by name": lambda x, y: torch.add(input=x, other=y),
    "with a number of 1": lambda x, y: torch.add(x, y, alpha=1),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a difference": lambda x, y: x - y,
    "twice": lambda x, y: torch.add(x, y, alpha=2),
    "of another shape": lambda x, y: x[:1] + y,
    "to itself": lambda x, y: y + y,
    "read by two": lambda x, y: (x + y) * y,
    "after a function": lambda x, y: x + y.relu(),
    "of a number": lambda x, y: y + 1,
    "made later": lambda x, y: x.tanh() + y,
}


@pytest.mark.parametrize("name", [*ADDED, *OTHERS])
def test_the_other_operand_is_found_where_a_result_is_only_added(name: str) -> None:
    model = Block((ADDED | OTHERS)[name]).eval()
    with watching(model) as recording, torch.no_grad():
        model(torch.ones(2, 4))
    found = added_operands(recording, {one: one for one in ("first", "up", "down")})
    assert found == ({"down": ResidualInput("first", 0, is_result=True)} if name in ADDED else {})


@pytest.mark.parametrize("name", ADDED)
def test_a_stage_has_what_is_added_before_it_is_written(name: str) -> None:
    model, batches = Block(ADDED[name]).eval(), [torch.randn(rows, 4) for rows in (2, 3)]
    layers: dict[str, Any] = {"up": model.up, "down": model.down}
    recorded = call_order(model, layers, kept(batches, lambda model, x: model(x)))
    recorded.added = added_operands(recorded.first, {one: one for one in layers})
    seen = {}
    with Stream(model, layers, kept(batches, lambda model, x: model(x)), recorded) as stream:
        for stage in stream:
            seen[stage.name] = {number: x.clone() for number, x in stage.added.items()}
    assert not seen["up"]
    assert [*seen["down"]] == [0, 1]
    for batch, x in zip(batches, seen["down"].values(), strict=True):
        assert_same_bits(x, model.first(batch).detach())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return x + self.down(self.up(x).relu())


class Attended(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.cell = nn.Linear(8, 8), nn.RNNCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.cell(x)


def _last_drift(monkeypatch: pytest.MonkeyPatch) -> list[Drift]:
    """A list that gets the sums over the drift of each weight that is chosen."""
    found, choose = list[Drift](), collector.choose

    def keep(name: str, product: Any, sums: Any, *given: Any) -> Any:
        sums = [*sums]
        found.append(sums[0].drift)
        return choose(name, product, sums, *given)

    monkeypatch.setattr(collector, "choose", keep)
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "linear": (lambda: Block(ADDED["first"]), "down", (3, 4)),
    "tokens": (lambda: Block(ADDED["in place"]), "down", (2, 3, 4)),
    "masked": (lambda: Block(ADDED["second"]), "down", (2, 3, 4)),
    "convolution": (Convolutions, "down", (3, 2, 5, 5)),
    "attention": (lambda: Attended(batch_first=True), "attention", (2, 3, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_drift_of_a_layer_is_that_of_the_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, last, shape = MODELS[name]
    model, batches = make().eval(), [torch.randn(shape) for _ in range(2)]
    mask = (lambda x: x[..., 0] > -0.5) if name == "masked" else None
    own = fq.prepare(copy.deepcopy(model), "INT4_WEIGHT_ONLY", batches[0])
    found = _last_drift(monkeypatch)
    fq.ptq.improve(own, batches, ["gptq", "drift"], judge=[], mask=mask, progress=False)
    product = own.get_submodule(last).products()[-1]
    weight = next(name for name, own in own.named_parameters() if own is product.parameter)
    product.parameter.data.copy_(model.get_parameter(weight))
    with off([product.quantizer]), torch.no_grad():
        errors = [(model(x) - own(x)).double() for x in batches]
    if mask is not None:
        errors = [error[mask(x)] for error, x in zip(errors, batches, strict=True)]
    expected = sum(float(error.square().sum()) for error in errors)
    assert float(found[-1].output_squares.sum()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("make", [Recurrent, lambda: Attended(batch_first=False)])
def test_what_is_no_row_of_the_product_has_no_operand(make: Callable[[], nn.Module]) -> None:
    model, batches = make().eval(), [torch.randn(3, 2, 8) if make is not Recurrent else torch.randn(3, 8)] * 2
    own = fq.prepare(model, "INT4_WEIGHT_ONLY", batches[0])
    recorded: list[Any] = []

    def keep(recording: Any, layers: Any) -> Any:
        recorded.append(added_operands(recording, layers))
        return recorded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improvement, "added_operands", keep)
        fq.ptq.improve(own, batches, "fast", judge=[], progress=False)
    assert recorded == [{}]
