"""The order of inputs as a transform: exact, differentiable, and checked where it is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from fakequant.errors import ConfigError
from fakequant.nn.transforms import Permutation, hadamard, make_transform, walsh_hadamard


def test_a_permutation_keeps_the_function() -> None:
    layer, x = nn.Linear(6, 3), torch.randn(2, 4, 6, requires_grad=True)
    permutation = make_transform("permutation", layer)
    permutation.load_state_dict({"order": torch.tensor([4, 0, 5, 1, 2, 3])})
    y = linear(permutation(x), permutation.into_weight(layer, layer.weight), layer.bias)
    torch.testing.assert_close(y, layer(x))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))


@pytest.mark.parametrize("order", [[0, 0, 2], [1, 2, 3], [-1, 0, 1], [0, 1]])
def test_other_orders_are_not_loaded(order: list[int]) -> None:
    permutation: Any = Permutation.of(nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="order names inputs twice, or others than the 3 that"):
        permutation.load_state_dict({"order": torch.tensor(order)})
    assert permutation.order.tolist() == [0, 1, 2]


def test_a_permutation_is_for_linear_layers() -> None:
    with pytest.raises(ConfigError, match="a permutation needs a linear layer, and this is a Conv2d"):
        Permutation.of(nn.Conv2d(2, 2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 12, 16, 80])
def test_walsh_hadamard_is_the_product_with_the_matrix(features: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, features, dtype=dtype, generator=torch.Generator().manual_seed(0))
    block = features & -features
    expected = (x.double().unflatten(-1, (-1, block)) @ hadamard(block).double()).flatten(-2)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(walsh_hadamard(x).double(), expected, rtol=8 * eps, atol=8 * eps)
    assert torch.equal(walsh_hadamard(x)[2, 1], walsh_hadamard(x[2, 1].clone()))
