"""In-place functions with sites change what their callers hold, and keep what their backward needs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn.sites.sites import sites_of
from tests.support.functional_models import assert_same_bits, only, quantized

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


def test_in_place_functions_change_the_tensor_for_all_who_hold_it() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a = x * 1
            alias = a
            a.add_(y)
            b = F.relu(a, inplace=True)
            return alias, b, a

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    model = quantized(InPlace(), x, y, rules=only("add", "relu"))
    alias, b, a = model(x, y)
    site = sites_of(model)
    assert site is not None
    quantized_sum = site.add_0.input(x) + site.add_0.other(y)
    assert torch.equal(a, torch.relu(site.relu_0.input(quantized_sum)))
    assert alias is a
    assert b is a


def test_in_place_results_with_quantizers_keep_what_their_backward_needs() -> None:
    """The quantized result takes the place of the operand, and not of the one that the backward of relu reads."""

    class InPlace(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.inplace = inplace

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x * 1, inplace=self.inplace) * 1

    rules = (fq.Rule("*", output="int8", ops=("relu",)),)
    x, found = torch.randn(2, 4), []
    for inplace in (True, False):
        model = fq.prepare(InPlace(inplace), fq.Config("results", rules), example=x)
        fq.calibrate(model, [x], progress=False)
        given = x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        found.append([y, given.grad])
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("result", [None, "int8"])
@pytest.mark.parametrize("name", ["addmm_", "baddbmm_", "addbmm_"])
def test_products_that_are_added_in_place_overwrite_what_they_are_added_to(name: str, result: str | None) -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            held = (x[0] if name == "addbmm_" else x) * 1
            return getattr(held, name)(x, y, alpha=0.5), held

    shape = (3, 3) if name == "addmm_" else (2, 3, 3)
    x, y = torch.randn(shape), torch.randn(shape)
    rules = (fq.Rule("*", input="int8", output=result, ops=(name[:-1],)),)
    model: Any = fq.prepare(Adds(), fq.Config("added", rules), example=(x, y))
    fq.calibrate(model, [(x, y)], inputs=slice(2), progress=False)
    given = x.clone()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            y_in_place, held = model(given, y)
            site = model._sites.by_key()[f"{name}0"]
            added = getattr(torch, name[:-1])(x[0] if name == "addbmm_" else x, site.input(x), site.other(y), alpha=0.5)
            assert_same_bits(y_in_place, added if result is None else site.output(added))
        assert held is y_in_place
        assert torch.equal(given, x)
