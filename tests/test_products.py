"""Weights that functions read, and stacked weights, get the same steps as those of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.presets import find_preset
from fakequant.model.weights import quantized_weights

CONV = {"stride": 2, "padding": 1}
TRANSPOSED = {"stride": 2, "padding": 1, "output_padding": 1}


class Calls(nn.Module):
    """A layer's parameters, read by a function."""

    def __init__(self, layer: Any, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(layer.weight.detach().clone()), nn.Parameter(layer.bias.detach().clone())
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self, x)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(32, 16), lambda m, x: F.linear(x, m.w, m.b), (24, 32)),
    "linear, bias by name": (lambda: nn.Linear(32, 16), lambda m, x: F.linear(x, m.w, bias=m.b), (6, 4, 32)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3, **CONV), lambda m, x: F.conv2d(x, m.w, m.b, 2, 1), (4, 8, 7, 7)),
    "conv2d, groups": (
        lambda: nn.Conv2d(8, 12, 3, groups=4, **CONV),
        lambda m, x: F.conv2d(x, m.w, m.b, groups=4, **CONV),
        (4, 8, 7, 7),
    ),
    "conv1d": (lambda: nn.Conv1d(8, 12, 3, padding="same"), lambda m, x: F.conv1d(x, m.w, m.b, 1, "same"), (4, 8, 9)),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(8, 6, 3, **TRANSPOSED),
        lambda m, x: F.conv_transpose2d(x, m.w, m.b, **TRANSPOSED),
        (4, 8, 5, 5),
    ),
}


def config(preset: str) -> fq.Config:
    ops = ("linear", "matmul", "addmm", "conv", "conv_transpose", "embedding")
    own = find_preset(preset)
    return fq.Config("own", (*own.rules, fq.Rule("*", preset, ops=ops, optional=True)))


def improved(model: nn.Module, shape: tuple[int, ...], preset: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    batches = [
        torch.randn(shape) * torch.linspace(0.1, 3, shape[1]).reshape(-1, *[1] * (len(shape) - 2)) for _ in "abcd"
    ]
    model = fq.prepare(model.eval(), config(preset), example=batches[0])
    fq.calibrate(model, batches, progress=False)
    return model, fq.ptq.improve(
        model, batches, ["input", "ranges", "gptq", "descend", "drift", "bias"], judge=[], progress=False
    )


@pytest.mark.parametrize("preset", ["INT8", "INT4_GROUP32", "int4_weight_only"])
@pytest.mark.parametrize("case", CASES)
def test_a_weight_that_a_function_reads_gets_the_values_of_a_layers(case: str, preset: str) -> None:
    make, call, shape = CASES[case]
    torch.manual_seed(1)
    layer: Any = make()
    own, of_own = improved(nn.Sequential(Calls(layer, call)), shape, preset)
    other, of_other = improved(nn.Sequential(layer), shape, preset)
    assert (of_own.before, of_own.after) == (of_other.before, of_other.after)
    assert torch.equal(own[0].w, other[0].weight)
    assert torch.equal(own[0].b, other[0].bias)
    assert of_own.layers[0].steps == of_other.layers[0].steps


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: x @ m.w, (24, 32)),
        (lambda m, x: torch.matmul(x, m.w), (6, 4, 32)),
        (lambda m, x: torch.addmm(m.b, x, m.w), (24, 32)),
        (lambda m, x: torch.mm(m.v, x.mT).mT, (24, 32)),
        (lambda m, x: m.v @ x.mT, (6, 4, 32)),
    ],
    ids=["@", "matmul", "addmm", "mm from the left", "@ from the left"],
)
def test_factors_of_matrix_products_are_chosen(
    function: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.w, self.v = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 32))
            self.b = nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return function(self, x)

    model, found = improved(nn.Sequential(Net()), shape, "int4_weight_only")
    (row,) = [row for row in found.layers if not row.note]
    assert row.after < 0.7 * row.before
    (product,) = quantized_weights(model).values()
    assert torch.equal(product.quantizer(product.tensor), product.tensor)


def test_what_stays_at_the_nearest_values_is_listed_with_its_function() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.stack = nn.Parameter(torch.randn(9, 8)), nn.Parameter(torch.randn(3, 8, 8))
            self.kernel = nn.Parameter(torch.randn(8, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.bmm(F.embedding(x, self.table), self.stack)
            return F.conv_transpose1d(y, self.kernel, groups=4) if y.shape[1] == 8 else y

    batches = [torch.randint(0, 9, (3, 8)) for _ in range(3)]
    model = fq.prepare(Net().eval(), config("int4_weight_only"), example=batches[0])
    notes = {row.layer: row.note for row in fq.ptq.improve(model, batches, progress=False).layers}
    assert notes == {
        "_sites.embedding_0": "nearest: improve has no steps for a call of embedding",
        "_sites.matmul_0": "nearest: improve has no steps for a call of matmul",
        "_sites.conv_transpose1d_0": "nearest: improve has no steps for a call of conv_transpose1d",
    }


def test_choices_for_a_function_go_back_where_they_do_not_help() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(Calls(nn.Linear(8, 8), lambda m, x: F.linear(x, m.w, m.b)))
    batches = [torch.randn(4, 8) for _ in range(2)]
    model = fq.prepare(net.eval(), config("INT8_WEIGHT_ONLY"), example=batches[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = fq.ptq.improve(model, batches, judge=[torch.zeros(4, 8)], progress=False)
    if found.layers[0].note:  # else it helped
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
