"""`prepare` says where one fixed scale of 8 bits is the wrong kind for inputs with single large values."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq

SAID = "single values far larger than the others"


def tokens(size: float, channel: int | None = None) -> Tensor:
    """Tokens of which the first is larger than the others, in all channels or one."""
    x = torch.randn(8, 64, 16, generator=torch.Generator().manual_seed(0))
    x[:, 0, slice(None) if channel is None else channel] *= size
    return x


def said(preset: str, x: Any, **how: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    with warnings.catch_warnings(record=True, action="always") as found:
        fq.prepare(model, preset, x, **how)
    return [str(one.message) for one in found if SAID in str(one.message)]


@pytest.mark.parametrize("preset", ["int8", "int8_affine"])
def test_it_is_said_once_with_the_worst_layer(preset: str) -> None:
    (line,) = said(preset, tokens(500, channel=3))
    assert line.startswith(f"1 input of a linear layer has {SAID}, up to ")
    assert " times the root mean square in 0: " in line
    assert '"int8_per_token" loses less' in line


@pytest.mark.parametrize("size", [1, 5])
def test_nothing_is_said_of_usual_inputs(size: float) -> None:
    assert said("int8", tokens(size)) == []


def test_nothing_is_said_where_scales_of_tokens_would_not_help() -> None:
    x = tokens(1)
    x[..., 0] = 1e4  # in every token
    assert said("int8", x) == []


@pytest.mark.parametrize("preset", ["int8_per_token", "int8_weight_only", "fp8"])
def test_nothing_is_said_of_other_kinds(preset: str) -> None:
    assert said(preset, tokens(500, channel=3)) == []


def test_nothing_is_said_where_an_engine_asks_for_fixed_ranges_or_nothing_runs() -> None:
    assert said("int8", tokens(500, channel=3), target="onnxruntime") == []
    assert said("int8", None) == []


def test_no_hook_stays() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(16, 16)), "int8", tokens(500, channel=3))
    assert not any(one._forward_pre_hooks for one in model.modules())
