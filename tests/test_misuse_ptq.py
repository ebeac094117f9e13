"""What people do wrong with the accuracy algorithms: each gets one clear message before the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import FakeQuantError

X = [torch.ones(4, 8), torch.randn(4, 8)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def ready() -> nn.Module:
    return fq.prepare(net(), "INT4_WEIGHT_ONLY")


def smoothed() -> nn.Module:
    model: Any = fq.prepare(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), "int8")
    model[0].weight.data[3] = 50.0
    batches = [torch.randn(64, 8) for _ in range(4)]
    fq.calibrate(model, batches, progress=False)
    fq.ptq.improve(model, batches, ["smooth"], progress=False)
    assert model[1].input_transform is not None
    return model


NONE: Any = None
TEXT: Any = "model.pt"
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "fold_scales on another width": (
        lambda: fq.ptq.fold_scales(smoothed(), torch.ones(4, 9)),
        r"^batch 1, tensors of shape \[4, 9\], failed in layer 0 \(LayerNorm\) on float32 \[4, 9\]: Run",
    ),
    "improve without a model": (lambda: fq.ptq.improve(NONE, X), r"improve takes a model, got None; write improve\("),
    "reconstruct without a model": (lambda: fq.ptq.reconstruct(NONE, X), "reconstruct takes a model, got None"),
    "scores without a model": (lambda: fq.ptq.scores(NONE, X), "scores takes a model, got None"),
    "statistics without a model": (
        lambda: fq.ptq.reestimate_batch_norm(NONE, X),
        "reestimate_batch_norm takes a model, got None",
    ),
    "improve by nothing": (lambda: fq.ptq.improve(ready(), X, NONE), r'"best", "fast" or a list of input.*got None'),
    "improve by the name of a step": (
        lambda: fq.ptq.improve(ready(), X, "gptq"),
        r"unknown steps 'gptq'; write steps=\['gptq'\]",
    ),
    "scores without choices": (lambda: fq.ptq.scores(net(), X, []), "choices is empty; pass names of presets"),
    "search without choices": (lambda: fq.ptq.search(net(), X, [], bits=5), "choices is empty; pass names of presets"),
    "scores by a mistyped choice": (lambda: fq.ptq.scores(net(), X, "INT9"), "unknown preset 'INT9'; did you mean"),
    "no blocks": (
        lambda: fq.ptq.reconstruct(ready(), X, []),
        r"blocks=\[\]: give a list of names, such as \['0",
    ),
    "blocks as a text": (lambda: fq.ptq.reconstruct(ready(), X, "0"), r"blocks='0': give a list of names, such as"),
    "a block that is not there": (
        lambda: fq.ptq.reconstruct(ready(), X, ["x"]),
        "no module 'x' for blocks=; known",
    ),
    "compare by steps in a list": (
        lambda: fq.ptq.compare(net(), X, fq.ptq.Ways(["INT8"], steps=[["gptq"]])),  # type: ignore[list-item]
        r"""steps of compare are "best", "fast" or None, got \['gptq'\]""",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_clear_message(name: str) -> None:
    work, message = CALLS[name]
    with pytest.raises(FakeQuantError, match=message) as caught:
        work()
    assert "\n" not in str(caught.value)


def test_one_preset_is_a_choice() -> None:
    assert list(fq.ptq.scores(net(), X, "INT8").layers["0"]) == ["INT8"]


def test_a_metric_that_is_nan_is_no_best_way() -> None:
    values = iter([1.0, float("nan"), 0.5])
    found = fq.ptq.compare(net(), X, fq.ptq.Ways(["INT8", "FP8"], steps=[None]), metric=lambda _: next(values))
    assert (found.best.metric, found.rows[-1].failed) == (0.5, "the metric is NaN")
