"""One run over all batches that stops before each layer."""

from __future__ import annotations

import _thread
import time
from collections import Counter
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.ptq.stream import Stage, Stream, _BatchThread, call_order, check_side_by_side
from tests.support.bits import assert_same_bits
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


def test_what_changes_at_a_stage_is_what_later_layers_get() -> None:
    model, changed = Branching(), Branching()
    layers, seen = layers_of(model), {}
    recorded = call_order(model, layers, kept(batches(), run))
    with Stream(model, layers, kept(batches(), run), recorded) as stream, torch.no_grad():
        for stage in stream:
            seen[stage.name] = [calls[-1].first for calls in stage.calls.values()]
            if stage.name in ("first", "skipped"):
                layers[stage.name].weight.mul_(0.5)
                layers_of(changed)[stage.name].weight.mul_(0.5)
    expected: list[Tensor] = []
    changed.last.register_forward_pre_hook(lambda _, args, kwargs: expected.append(kwargs["input"]), with_kwargs=True)
    with torch.no_grad():
        for batch in batches():
            changed(batch)
    for one, other in zip(seen["last"], expected, strict=True):
        assert_same_bits(one, other)


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


def test_layers_that_get_one_tensor_are_siblings() -> None:
    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.out = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.q(x) + self.k(x))

    model = Siblings()
    siblings = call_order(model, layers_of(model), kept(batches(), run)).siblings
    assert siblings == {"q": ["q", "k"], "k": ["q", "k"], "out": ["out"]}


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
    recorded = call_order(model, layers_of(model), kept(batches(), run))
    with Stream(model, layers_of(model), kept(batches(), run), recorded) as stream:
        for _ in range(stages):
            assert isinstance(stream.advance(), Stage)
    assert threads_after(before) == before
    assert not model.first._forward_pre_hooks


def test_an_error_of_a_batch_is_that_of_the_caller() -> None:
    model, given = Branching(), batches()
    recorded = call_order(model, layers_of(model), kept(given, run))
    model.last.weight = nn.Parameter(torch.zeros(4, 5))
    before = _thread._count()
    stream = Stream(model, layers_of(model), kept(given, run), recorded)
    with stream, pytest.raises(RuntimeError, match=r"4x5|5x4"):
        for _ in stream:
            pass
    assert threads_after(before) == before


def test_the_threads_of_torch_are_as_before() -> None:
    model, before = Branching(), torch.get_num_threads()
    many = [torch.ones(1, 4)] * 1500  # with two threads of torch each: more than the limit
    recorded = call_order(model, layers_of(model), kept(many, run))
    with Stream(model, layers_of(model), kept(many, run), recorded) as stream:
        assert sum(1 for _ in stream) == 3
    assert torch.get_num_threads() == before


def test_lanes_have_the_default_device_of_the_caller() -> None:
    seen: list[torch.device] = []
    with torch.device("meta"):
        lane = _BatchThread(0, Counter(), lambda: seen.append(torch.get_default_device()), lambda: int, int)
    lane.go()
    assert seen == [torch.device("meta")]


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_recurrent_layers_take_a_transform_while_lanes_wait_in_them(cls: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.out = cls(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    given = [torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    model = fq.prepare(Recurrent().eval(), "int8")
    fq.calibrate(model, given, progress=False)
    assert fq.ptq.improve(model, given, ["rotate"], progress=False).layers
