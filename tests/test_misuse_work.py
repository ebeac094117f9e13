"""Mistakes with functions' quantizers, delivery, training, gradients and streaming: one message each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import FakeQuantError

X = torch.randn(4, 8)
PAIRS = [(X, torch.randn(4, 2))]
TEXT: Any = "model.pt"
NONE: Any = None
MSE = nn.functional.mse_loss
UNPREPARED = r"^the model has no quantizers; call fakequant\.prepare"
LEARNED = fq.qat.Scales.LEARNED


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def ready() -> nn.Sequential:
    model = fq.prepare(net(), "int8")
    fq.calibrate(model, [X], progress=False)
    return model


def four() -> nn.Sequential:
    return fq.prepare(net(), "int4_group32")


def plan() -> fq.qat.Schedule:
    return fq.qat.Schedule(0.1, 3)


def tune(model: Any = None, batches: Any = PAIRS, loss: Any = MSE, schedule: Any = None, *more: Any, **how: Any) -> Any:
    return fq.qat.finetune(model or ready(), batches, loss, schedule or plan(), *more, **how)


def wide() -> fq.Config:
    return fq.Config("mine", (fq.Rule("*", "int8", ops=("matmul",)),))


def floats() -> fq.Config:
    return fq.presets.INT8.with_rule(fq.Rule("*", ops="relu"))


def stream(path: Path, *more: Any, **how: Any) -> Any:
    return fq.improve_folder(path / "absent", path / "out", "int4_group32", *more, **how)


CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "sites of a path": (
        lambda _: fq.site_plan(TEXT),
        r"site_plan takes a model, got 'model\.pt'; write site_plan\(mod",
    ),
    "sites of a tensor": (lambda _: fq.site_plan(X), r"site_plan takes a model, got a Tensor"),  # type: ignore[arg-type]
    "sites of a list": (lambda _: fq.prepare([net()], "int8"), r"prepare takes a model first, got a list; write"),  # type: ignore[type-var]
    "sites without an example": (
        lambda _: fq.prepare(net(), "int8", target="onnxruntime"),
        r"pass prepare an example=",
    ),
    "sites for a number": (lambda _: fq.prepare(net(), "int8", X, target=TEXT), r"unknown target.*known names are cor"),
    "sites of no function": (lambda _: fq.Rule("*", "int8", ops=("mtmul",)), r"no function 'mtmul'.*did you mean mat"),
    "sites of a number": (lambda _: fq.Rule("*", "int8", layers=3), r"layers must be class names or classes, got 3"),  # type: ignore[arg-type]
    "a function without an example": (lambda _: fq.prepare(net(), wide()), r"rules name functions \(matmul\)"),
    "execution of no layer": (lambda _: fq.set_execution(ready(), "integer", "head"), r"no quantized layer matches 'h"),
    "execution of a float model": (lambda _: fq.set_execution(net(), "integer"), UNPREPARED),
    "off for a path": (lambda _: fq.disabled(TEXT), r"disabled takes a model, got 'model\.pt'; write with disabled"),
    "state of a path": (lambda _: fq.float_state_dict(TEXT), r"float_state_dict takes a model, got 'model\.pt'"),
    "bake a path": (lambda _: fq.bake_weights(TEXT), r"bake_weights takes a model, got 'model\.pt'; write bake_wei"),
    "codes of a float model": (lambda _: fq.store_codes(net()), UNPREPARED),
    "floats of a float model": (lambda _: fq.store_floats(net()), UNPREPARED),
    "bake a float model": (lambda _: fq.bake_weights(net()), UNPREPARED),
    "scales of a float model": (
        lambda _: fq.qat.set_scales(net(), LEARNED),
        UNPREPARED,
    ),
    "merge in a float model": (lambda _: fq.qat.merge_batch_norm(net()), UNPREPARED),
    "ratios of a float model": (lambda _: fq.layer_sqnr(net(), [X]), UNPREPARED),
    "ranges of nothing": (lambda _: fq.recalibrate(ready(), {}), r"there is nothing to recalibrate"),
    "ranges of weights alone": (lambda _: fq.recalibrate(four()), r"there is nothing to recalibrate"),
    "train without a layer": (
        lambda _: fq.qat.Training(skip=["0"]).prepare(ready()),
        r"skip= and rules= change",
    ),
    "functions in float alone": (
        lambda _: fq.prepare(net(), floats(), X),
        r"^Rule\('\*', .* quantizes nothing",
    ),
    "deliver a float model": (lambda p: fq.deliver(net(), p / "o", "gptq"), UNPREPARED),
    "deliver mistyped": (
        lambda p: fq.deliver(four(), p / "o", "compressed-tensor"),
        r"did you mean compressed-tensors",
    ),
    "deliver no format": (lambda p: fq.deliver(four(), p / "o", NONE), r"give a format, such as deliver"),
    "deliver turned round": (lambda p: fq.deliver(TEXT, p / "o", "gguf"), r"deliver takes a model, got 'model\.pt'"),
    "deliver to nothing": (
        lambda _: fq.deliver(four(), NONE, "gptq"),
        r"a path is a text or a pathlib\.Path, got None",
    ),
    "shards of nothing": (
        lambda p: fq.deliver(four(), p / "o", "compressed-tensors", max_shard_size=0),
        r"max_shard_size is a number of bytes, such as 5 \* 10\*\*9, got 0",
    ),
    "shards by a text": (
        lambda p: fq.deliver(four(), p / "o", "compressed-tensors", max_shard_size=TEXT),
        r"max_shard_size is a number of bytes, .*got 'model\.pt'",
    ),
    "shards of a stream by a text": (
        lambda p: stream(p, [X], max_shard_size=TEXT),
        r"max_shard_size is a number of bytes, .*got 'model\.pt'",
    ),
    "read nothing": (lambda p: fq.read(p / "absent"), r"there is no .*absent; give the file or folder that fakequant"),
    "read an empty folder": (
        lambda p: fq.read(p),
        r"has none of the formats auto-round, .* or lacks the file that",
    ),
    "read a model": (lambda _: fq.read(net()), r"got a Sequential; write read\('folder', model\)"),  # type: ignore[arg-type]
    "verify turned round": (lambda p: fq.verify_delivery(ready(), net()), r"got a Sequential; write verify_delivery"),  # type: ignore[arg-type]
    "verify without a model": (lambda p: fq.verify_delivery(p, NONE), r"verify_delivery takes a model, got None; wri"),
    "a state turned round": (lambda _: fq.apply(fq.snapshot(ready()), NONE), r"apply takes a model, got a Quantized"),  # type: ignore[type-var]
    "a state of a float model": (lambda _: fq.snapshot(net()), UNPREPARED),
    "train turned round": (lambda _: fq.qat.finetune(NONE, ready(), MSE, plan()), r"finetune takes a model, got None"),  # type: ignore[arg-type]
    "train in float": (lambda _: tune(net()), UNPREPARED),
    "train uncalibrated": (lambda _: tune(fq.prepare(net(), "int8")), r"0\._input_quantizer has not been calibrated"),
    "train on nothing": (lambda _: tune(None, []), r"epoch 1: the batches were empty; give a list or a loader"),
    "train by a name": (
        lambda _: tune(loss="mse"),
        r"takes a function as loss, or None, got 'mse'; write finetune\(mo",
    ),
    "train without a loss": (lambda _: tune(loss=None), r"loss=None takes the loss that the model returns, but its"),
    "train by a number": (lambda _: tune(schedule=0.1), r"finetune takes a Schedule, got 0\.1; write finetune\(model"),
    "train by a dict": (lambda _: tune(None, PAIRS, MSE, None, {"lr": 1}), r"takes Options, got \{'lr': 1\}; write fi"),
    "train to a vector": (
        lambda _: tune(loss=lambda a, b: (a - b).mean(1)),
        r"the loss of batch 1 is of shape \[4\], not a tensor of one number; return its mean",
    ),
    "train to a text": (lambda _: tune(loss=lambda a, b: "x"), r"the loss of batch 1 is 'x', not a tensor of one num"),
    "train by no teacher": (lambda _: tune(teacher="slf"), r"the teacher must be a module, or \"self\" .* got 'slf'"),
    "train without targets": (lambda _: tune(None, [X]), r"a batch is of type Tensor, but the loss needs targets; gi"),
    "train for less than nothing": (lambda _: fq.qat.Schedule(0.1, -1), r"original_epochs=-1\): must be positive"),
    "scales by a name": (
        lambda _: fq.qat.set_scales(ready(), TEXT),
        r"takes a member of Scales, such as Scales\.LEARNED, got 'm",
    ),
    "scales of a path": (lambda _: fq.qat.set_scales(TEXT, LEARNED), r"set_scales takes a model, got 'model\.pt'; wri"),
    "scales by no method": (lambda _: fq.qat.set_scales(ready(), LEARNED, "lqs"), r"unknown method 'lqs'.*mean lsq\?"),
    "scales uncalibrated": (lambda _: fq.qat.set_scales(fq.prepare(net(), "int8"), LEARNED), r"no range to learn; ca"),
    "frozen norms of a path": (lambda _: fq.qat.freeze_batch_norm(TEXT), r"freeze_batch_norm takes a model, got 'mo"),
    "merged norms of a path": (lambda _: fq.qat.merge_batch_norm(TEXT), r"merge_batch_norm takes a model, got 'model"),
    "a gradient mistyped": (lambda _: fq.GradientConfig("float8_e5m3"), r"unknown format 'float8_e5m3'; did you mean"),
    "a gradient by bits": (lambda _: fq.GradientConfig(8), r"expected a QuantSpec or its text, such as .*, got 8"),  # type: ignore[arg-type]
    "stream from nothing": (lambda p: stream(p, [X]), r"absent holds no checkpoint .*: there is no config\.json in"),
    "stream on a tensor": (lambda p: stream(p, X), r"improve_folder takes batches, and a tensor would be taken row"),
    "stream on nothing": (lambda p: stream(p, None), r"improve_folder takes batches, .* got None; give \[tensor\]"),
    "stream by no steps": (lambda p: stream(p, [X], "slow"), r"unknown steps 'slow'; known names are best, fast"),
    "stream to no format": (lambda p: stream(p, [X], format="ggfu"), r"unknown format 'ggfu'; did you mean gguf\?"),
    "stream a model in memory": (
        lambda p: fq.improve_folder(net(), p / "o", "int4_group32", [X]),
        r"takes a folder; or a model with all parameters on the meta device, and load=",
    ),
    "a group without processes": (lambda _: fq.calibrate(ready(), [X], group=3), r"torch\.distributed is not initial"),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_clear_message(name: str, tmp_path: Path) -> None:
    work, message = CALLS[name]
    with pytest.raises(FakeQuantError) as caught:
        work(tmp_path)
    assert re.search(message, f"{caught.value}"), f"{caught.value}"
    assert "\n" not in f"{caught.value}"
