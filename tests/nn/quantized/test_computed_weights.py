"""Layers whose weights torch computes by a norm are quantized as layers that hold these weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fakequant as fq
from fakequant.nn import quantizers
from tests.support.layer_cases import data

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
IDS, OFFSETS = torch.tensor([1, 2, 3, 4, 2, 2, 0]), torch.tensor([0, 2, 5])
X = data(5, 2, 8)
LAYERS: dict[str, tuple[Callable[[], nn.Module], str, tuple[Tensor, ...]]] = {
    "Linear": (lambda: nn.Linear(8, 4), "weight", (X,)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 4, 3), "weight", (X,)),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 4), "weight", (X, X + 1)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(8, 4), "weight", (IDS, OFFSETS)),
    "LSTM-hidden": (lambda: nn.LSTM(8, 6), "weight_hh_l0", (X,)),
    "LSTM-input": (lambda: nn.LSTM(8, 6), "weight_ih_l0", (X,)),
    "GRUCell": (lambda: nn.GRUCell(8, 6), "weight_ih", (X[0], X[0, :, :6])),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", (X, X, X)),
}
NORMS: dict[str, Callable[..., Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm-hook": nn.utils.weight_norm,
    "spectral_norm-hook": nn.utils.spectral_norm,
}


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    found = torch.utils._pytree.tree_leaves(model(*inputs))
    return [y for y in found if isinstance(y, Tensor)]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_computed_weight_is_quantized_as_a_weight(name: str, norm: str) -> None:
    make, attribute, inputs = LAYERS[name]
    torch.manual_seed(0)
    plain = make()
    computed = NORMS[norm](copy.deepcopy(plain), attribute).eval()
    with torch.no_grad():
        outputs(computed, inputs)  # a hook computes the weight in the call
        getattr(plain, attribute).copy_(getattr(computed, attribute))
    for model in (plain, computed):
        fq.calibrate(fq.prepare(model, "int8"), [inputs], inputs=slice(len(inputs)), progress=False)
        assert all(quantizer.calibrated for quantizer in quantizers(model).values())
    for a, b in zip(outputs(plain.eval(), inputs), outputs(computed, inputs), strict=True):
        assert torch.equal(a, b)
    torch.autograd.backward([y.sum() for y in outputs(computed, inputs)])
    assert all(p.grad is not None for p in computed.parameters())
