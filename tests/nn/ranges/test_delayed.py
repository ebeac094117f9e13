"""Ranges of earlier steps in the forward pass: against an independent implementation, in eager and compiled."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.nn import Quantizer
from tests.support import oracle, ranks
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS

BOUNDS = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}


def delayed(text: str, method: str = "delayed_max", steps: int = 3) -> Quantizer:
    """A quantizer that was calibrated for [-1, 1]."""
    quantizer = Quantizer(text)
    quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    quantizer.learn(method, steps=steps)
    return quantizer


@pytest.mark.parametrize("method", ["delayed_max", "delayed_most_recent"])
@pytest.mark.parametrize("text", BOUNDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_values_and_gradients_are_the_oracles(text: str, method: str, compiled: bool) -> None:
    quantizer = delayed(text, method)
    torch._dynamo.reset()
    call = torch.compile(quantizer, fullgraph=True, backend="aot_eager") if compiled else quantizer
    generator = torch.Generator().manual_seed(0)
    # The range that was calibrated: what it stands for after it was divided by the largest code.
    bound = np.float32(BOUNDS[text])
    past: deque[np.float32] = deque([np.float32(1) / bound * bound], maxlen=3)
    for size in (1.0, 30.0, 0.0, 2.0, 1e-4, 1e-4, 1e-4, 1e-4):
        x = (torch.randn(40, generator=generator) * size).requires_grad_()
        scale = np.full(40, (max(past) if method == "delayed_max" else past[-1]) / bound, np.float32)
        values = x.detach().numpy()
        wanted = oracle.fake_quantize(values, scale, None, FORMATS[text].oracle, "divide")
        y = call(x)
        assert_same_bits(y, torch.from_numpy(wanted.value), size)
        (dx,) = torch.autograd.grad(y.sum(), x)
        if size in (1.0, 30.0):
            inside = np.abs(values) <= bound * scale
            assert (dx.numpy() == inside).mean() > 0.9  # half a code beyond the bound is rounded to it
        if size:
            past.append(np.abs(values).max())


def test_evaluation_has_the_scale_of_the_next_step_and_notes_nothing() -> None:
    quantizer, x = delayed("int8"), torch.tensor([2.54, -1.0])
    quantizer(x)
    quantizer.eval()
    assert quantizer.qparams(x).scale.item() == pytest.approx(0.02)
    for _ in range(3):
        assert_same_bits(quantizer(100 * x), torch.tensor([2.54, -2.56]))
    assert repr(quantizer) == "Quantizer(int8 per_tensor, input, scale 0.02, learned by delayed_max)"
    quantizer.stop_learning()
    assert quantizer.scale is not None
    assert quantizer.scale.item() == pytest.approx(0.02)


def test_what_has_several_scales_is_refused() -> None:
    quantizer = Quantizer("int8 per_token")
    quantizer.set_range(fq.Range(-torch.ones(4, 1), torch.ones(4, 1)))
    with pytest.raises(ConfigError, match="cannot have a delayed scale"):
        quantizer.learn("delayed_max")
    with pytest.raises(ConfigError, match="the number of steps that count, 1 to 65536, such as 16, got 0"):
        delayed("int8", steps=0)
    with pytest.raises(ConfigError, match="1 to 65536, such as 16, got 99999999999"):
        delayed("int8", steps=99999999999)


def test_a_state_dict_makes_a_quantizer_alike() -> None:
    quantizer = delayed("int8", "delayed_most_recent", 5)
    quantizer(torch.ones(3))
    other = Quantizer("int8")
    other.load_state_dict(quantizer.state_dict())
    assert other.learned is not None
    assert other.learned.options() == {"steps": 5}
    assert repr(other) == repr(quantizer)


def trains(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    config = fq.Config(fq.Rule("*", input="int8", weight="int8", gradient="int8; scale=delayed_max:2"))
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    fq.calibrate(model, [torch.ones(2, 4)], group=False)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED, "delayed_max", steps=2)
    held: Any = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + rank)) * (1 + rank * (step == 1))
        held(x).square().sum().backward()
        before = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("history")}
        fq.qat.merge_histories(held)
        torch.save((before, model.state_dict()), folder / f"{rank}_{step}.pt")


@ranks.needs_gloo
def test_processes_go_on_with_the_largest_magnitudes(tmp_path: Path) -> None:
    ranks.run((trains,), tmp_path)
    for step in range(3):
        (first, merged), (second, other) = (torch.load(tmp_path / f"{rank}_{step}.pt") for rank in (0, 1))
        assert len(first) == 6
        differ = 0
        for name in first:
            wanted: Tensor = first[name].clone()
            wanted[0] = torch.maximum(first[name][0], second[name][0])
            differ += int(first[name][0] != second[name][0])
            assert_same_bits(merged[name], wanted, name)
            assert_same_bits(other[name], wanted, name)
        assert differ == 4  # not the weights
