"""Recurrent layers as one operator for all steps, against the layers themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn.recurrent_loop import written_as_loops

IN, HIDDEN, N, STEPS = 5, 6, 3, 4


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def state(layer: Any, *shape: int) -> Any:
    h = data(len(layer.all_weights), *shape, HIDDEN)
    return (h, 2 * h) if layer.mode == "LSTM" else h


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("config", ["int8", "int8_per_token", "int8_weight_only"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}, {"nonlinearity": "relu"}],
    ids=str,
)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_loop_computes_what_the_layer_does(cls: Any, options: Any, config: str, is_given: bool) -> None:
    if cls is not nn.RNN:
        options = {key: value for key, value in options.items() if key != "nonlinearity"}
    torch.manual_seed(0)
    layer = fq.prepare(cls(IN, HIDDEN, **options).eval(), config)
    x = data(N, STEPS, IN) if options.get("batch_first") else data(STEPS, N, IN)
    fq.calibrate(layer, [x])
    for example, sizes in ((x, (N,)), (x[0], ())):
        hx = state(layer, *sizes) if is_given else None
        expected = layer(example, hx)
        with written_as_loops(), torch.no_grad():
            actual = layer(example, hx)
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (actual, expected)), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=2e-6)
