"""The method by which a model was calibrated: it is known, is not advised again, and code keeps it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.ptq.next_step import weight_methods_of
from tests.support.advised import perceptron, rows, tried_on


@pytest.mark.parametrize("method", ["mse", "max", "percentile", "entropy"])
@pytest.mark.parametrize("again", [False, True])
def test_the_method_of_a_model_is_not_advised_and_its_code_keeps_it(method: str, again: bool) -> None:
    torch.manual_seed(0)
    model, batches = fq.prepare(perceptron(), "int4"), [rows(seed) for seed in range(4)]
    fq.calibrate(model, batches, "mse" if again else method, progress=False, weight_method="mse")
    if again:
        fq.recalibrate(model, method=method)
    tried = tried_on(model, batches, "4").tried
    named = {name for name in ("mse", "max", "percentile") if any(f"by {name!r}" in t.what for t in tried)}
    assert method not in named
    assert named  # the highest percentile may be the maximum
    assert not any(one.failed for one in tried)
    for one in tried:
        if one.what.startswith("Calibrate"):
            exec(one.code, {"fq": fq, "model": copy.deepcopy(model), "batches": batches})
    same = {"mse", "max", "percentile", method} - named
    said = ["" if one == "mse" else f', method="{one}"' for one in same]
    assert tried[-1].code.endswith(tuple(f'fq.calibrate(model, batches{one}, weight_method="mse")' for one in said))


@pytest.mark.parametrize("preset", ["gguf_q4_k", "gguf_q8_0", "gguf_iq4_xs"])
@pytest.mark.parametrize("method", [None, "max", "mse"])
def test_the_method_of_weights_on_a_lattice_is_known(preset: str, method: str | None) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(256, 4)), preset)
    fq.calibrate(model, weight_method=method)
    assert weight_methods_of(model) == ["max" if method == "max" else None]
