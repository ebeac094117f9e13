"""One run over all batches that stops before each layer, and what is added to the results of layers."""

from __future__ import annotations

import _thread
import copy
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.run.outputs import watching
from fakequant.model.weights import off
from fakequant.ptq import collector, improvement
from fakequant.ptq.solvers.sums import Drift
from fakequant.ptq.stream import (
    ResidualInput,
    Stage,
    Stream,
    _BatchThread,
    added_operands,
    call_order,
    check_side_by_side,
)
from tests.support.functional_models import Calls
from tests.support.kept import kept


def run(model: nn.Module, batch: Any) -> Any:
    return model(batch)


class Branching(nn.Module):
    """Skips a layer for some batches, calls another one several times, and adds an early value at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.skipped, self.loop, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        early = y = self.first(x)
        if x.shape[0] > 2:
            y = self.skipped(y)
        for _ in range(x.shape[0]):
            y = self.loop(y).tanh()
        return self.last(input=y) + early


def batches() -> list[Tensor]:
    return [torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) for rows in (3, 1, 2, 4)]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def streamed(model: nn.Module, given: list[Tensor]) -> Stream:
    batches, layers = kept(given, run), layers_of(model)
    return Stream(model, layers, batches, call_order(model, layers, batches))


def test_a_stage_has_the_calls_of_all_batches_that_reach_its_layer() -> None:
    model = Branching()
    layers = layers_of(model)
    recorded = call_order(model, layers, kept(batches(), run))
    assert recorded.order == ["first", "skipped", "loop", "last"]
    assert recorded.siblings["skipped"] == ["skipped"]
    with Stream(model, layers, kept(batches(), run), recorded) as stream:
        stages = {stage.name: {number: len(calls) for number, calls in stage.calls.items()} for stage in stream}
    once = dict.fromkeys(range(4), 1)
    assert stages == {"first": once, "skipped": {0: 1, 3: 1}, "loop": {0: 3, 1: 1, 2: 2, 3: 4}, "last": once}


class Remembering(nn.Module):
    """Keeps a value of its call in itself, as no module should."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return self.second(self.first(x)) + self.kept.sum()


def test_a_model_that_mixes_up_its_batches_is_refused() -> None:
    model = Remembering()
    recorded = call_order(model, layers_of(model), kept(batches(), run))
    with pytest.raises(ConfigError, match="give all examples as one batch"):
        check_side_by_side(model, layers_of(model), kept(batches(), run), recorded)
    alone = kept(batches()[:1], run)
    check_side_by_side(model, layers_of(model), alone, recorded := call_order(model, layers_of(model), alone))
    assert recorded.order == ["first", "second"]


class Counting(Branching):
    numbers = count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(self.numbers)


class Drawing(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.state += 1.0
        return super().forward(x) + torch.rand(()) + self.state


@pytest.mark.parametrize(("cls", "repeats"), [(Counting, False), (Drawing, True)])
def test_a_model_that_keeps_values_elsewhere_is_not(cls: type[Branching], repeats: bool) -> None:
    given = kept(batches(), run)
    recorded = call_order(model := cls(), layers_of(model), given)
    check_side_by_side(model, layers_of(model), given, recorded)
    assert (len(recorded.counts), recorded.outputs_repeat) == (4, repeats)


def test_the_calls_of_some_layers_are_those_of_a_run_that_watches_them_alone() -> None:
    model = Branching()
    layers = layers_of(model)
    some = {name: layers[name] for name in ("first", "loop")}
    own, alone = (call_order(model, watched, kept(batches(), run)) for watched in (layers, some))
    assert (own.of(some).order, own.of(some).counts) == (alone.order, alone.counts)
    assert own.of(some).siblings == alone.siblings


def threads_after(before: int) -> int:
    """The threads of the process, when they are as many as before, or after a second."""
    for _ in range(100):
        if _thread._count() == before:
            break
        time.sleep(0.01)
    return _thread._count()


@pytest.mark.parametrize("stages", [0, 1, 3])
def test_a_stream_that_is_left_ends_its_threads(stages: int) -> None:
    model, before = Branching(), _thread._count()
    with streamed(model, batches()) as stream:
        for _ in range(stages):
            assert isinstance(stream.advance(), Stage)
    assert threads_after(before) == before
    assert not model.first._forward_pre_hooks


def test_an_error_of_a_batch_is_that_of_the_caller() -> None:
    model, given = Branching(), batches()
    stream, before = streamed(model, given), _thread._count()
    model.last.weight = nn.Parameter(torch.zeros(4, 5))
    with stream, pytest.raises(RuntimeError, match=r"4x5|5x4"):
        for _ in stream:
            pass
    assert threads_after(before) == before


def test_the_threads_of_torch_are_as_before() -> None:
    model, before = Branching(), torch.get_num_threads()
    many = [torch.ones(1, 4)] * 1500  # with two threads of torch each: more than the limit
    with streamed(model, many) as stream:
        assert sum(1 for _ in stream) == 3
    assert torch.get_num_threads() == before


def test_lanes_have_the_default_device_of_the_caller() -> None:
    seen: list[torch.device] = []
    with torch.device("meta"):
        lane = _BatchThread(0, Counter(), lambda: seen.append(torch.get_default_device()), lambda: int, int)
    lane.go()
    assert seen == [torch.device("meta")]


def block(end: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Two layers, and what is made of their results."""
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {"first": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 8)}
    parts |= {"down": nn.Linear(8, 4), "dropout": nn.Dropout(0.5)}
    return Calls(lambda m, x: end(x := m.first(x), m.dropout(m.down(m.up(m.norm(x)).relu()))), **parts)


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
    model = block((ADDED | OTHERS)[name]).eval()
    with watching(model) as recording, torch.no_grad():
        model(torch.ones(2, 4))
    found = added_operands(recording, {one: one for one in ("first", "up", "down")})
    assert found == ({"down": ResidualInput("first", 0, is_result=True)} if name in ADDED else {})


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    first, up, down = nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
    parts = {"first": first, "up": up, "down": down}
    return Calls(lambda m, x: (x := m.first(x).relu()) + m.down(m.up(x).relu()), **parts)


def attended(*, batch_first: bool) -> nn.Module:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(8, 8), "attention": nn.MultiheadAttention(8, 2, batch_first=batch_first)}
    return Calls(lambda m, x: (x := m.first(x)) + m.attention(x, x, x, need_weights=False)[0], **parts)


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Calls(lambda m, x: (x := m.first(x)) + m.cell(x), first=nn.Linear(8, 8), cell=nn.RNNCell(8, 8))


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
    "linear": (lambda: block(ADDED["first"]), "down", (3, 4)),
    "tokens": (lambda: block(ADDED["in place"]), "down", (2, 3, 4)),
    "masked": (lambda: block(ADDED["second"]), "down", (2, 3, 4)),
    "convolution": (convolutions, "down", (3, 2, 5, 5)),
    "attention": (lambda: attended(batch_first=True), "attention", (2, 3, 8)),
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


@pytest.mark.parametrize("make", [recurrent, lambda: attended(batch_first=False)])
def test_what_is_no_row_of_the_product_has_no_operand(make: Callable[[], nn.Module]) -> None:
    model, batches = make().eval(), [torch.randn(3, 2, 8) if make is not recurrent else torch.randn(3, 8)] * 2
    own = fq.prepare(model, "INT4_WEIGHT_ONLY", batches[0])
    recorded: list[Any] = []

    def keep(recording: Any, layers: Any) -> Any:
        recorded.append(added_operands(recording, layers))
        return recorded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improvement, "added_operands", keep)
        fq.ptq.improve(own, batches, "fast", judge=[], progress=False)
    assert recorded == [{}]
