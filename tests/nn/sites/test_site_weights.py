"""Parameters that functions take as weights: their axes, and baking them."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.sites.sites import site_plan
from fakequant.model.sites.targets import targets
from fakequant.nn import QuantizedLayer, quantizers
from fakequant.nn.sites.functions import einsum_operand
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


class Products(nn.Module):
    """Weights of four functions: of the module itself, of a child, used twice, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.heads = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5, 2, 3))
        self.matrix, self.twice = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4))
        self.inner = nn.ParameterDict({"turned": torch.randn(4, 4), "direct": torch.randn(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bsd,dhk->bshk", F.linear(x, self.linear), self.heads)
        y = y.sum(2) @ self.matrix
        y = y @ self.twice @ self.twice
        return F.linear(y @ self.inner["turned"].t(), self.inner["direct"])


def prepared(weight: str = "int8 per_channel(0)", model: nn.Module | None = None) -> Any:
    rules = fq.Config("products", (fq.Rule("*", input="int8", weight=weight, ops=("linear", "einsum", "matmul")),))
    made = fq.prepare(Products() if model is None else model, rules, example=X)
    fq.calibrate(made, [X])
    return made


def test_channels_of_every_function_are_its_outputs() -> None:
    made = prepared()
    sites = made._sites
    assert sites.linear_0.weight.scale.shape == (5, 1)
    assert sites.einsum_0.input_1.scale.shape == (1, 2, 1)
    assert sites.matmul_0.other.scale.shape == (1, 4)
    largest = made.heads.detach().abs().amax((0, 2), keepdim=True)
    assert torch.equal(sites.einsum_0.input_1.scale, largest / 127)


def test_blocks_lie_along_the_sum() -> None:
    held = prepared("int4 per_block(-1:2)", _even())._sites.einsum_0.input_1
    assert str(held.spec.granularity) == "per_block(0:2)"


def _even() -> nn.Module:
    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 2, 3))
            self.v = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.einsum("...d, dhk -> ...hk", x, self.w).flatten(-2)
            return F.linear(y @ self.v, self.v)

    return Even()


@pytest.mark.parametrize(
    ("equation", "name", "channels", "reduction"),
    [
        ("ij,jk->ik", "input_1", 1, 0),
        ("ij,kj", "input_1", 0, 1),
        ("...d,dhk->...hk", "input_1", 1, 0),
        ("bi,...io->b...o", "input_1", -1, -2),
        ("bhqd,bhkd->bhqk", "input_1", 2, 3),
        ("i,i->", "input_1", 0, 0),
        ("bi,bi->bi", "input_0", 0, -1),
        ("eto,eoi->eti", "input_1", 2, 1),
    ],
)
def test_axes_of_equations(equation: str, name: str, channels: int, reduction: int) -> None:
    operand = einsum_operand(equation, name)
    assert (operand.channels, operand.reduction) == (channels, reduction)


@pytest.mark.parametrize("weight", ["int8 per_channel(0)", "int4 per_tensor", "float8_e4m3fn per_tensor"])
def test_parameters_of_functions_are_baked(weight: str) -> None:
    made = prepared(weight)
    expected, before = made(X), {name: p.detach().clone() for name, p in made.named_parameters()}
    plan = {site.key: site.weights for site in site_plan(made).sites if site.weights}
    assert plan == {
        "linear_0": {"weight": "linear"},
        "einsum_0": {"input_1": "heads"},
        "matmul_0": {"other": "matrix"},
        "linear_1": {"weight": "inner.direct"},
    }
    fq.bake_weights(made)
    assert_same_bits(made(X), expected)
    changed = {name for name, p in made.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"linear", "heads", "matrix", "inner.direct"}
    left = {name for name, q in fq.nn.quantizers(made).items() if q.kind is fq.nn.Kind.WEIGHT}
    assert left == {f"_sites.matmul_{place}.other" for place in (1, 2, 3)}
    assert_same_bits(fq.bake_weights(made)(X), expected)


def test_baked_functions_are_saved_and_loaded(tmp_path: Path) -> None:
    made = prepared()
    fq.save(made, tmp_path / "before")
    again = fq.load(Products(), tmp_path / "before")
    assert site_plan(again) == site_plan(made)
    expected = made(X)
    fq.save(fq.bake_weights(again), tmp_path / "after")
    assert_same_bits(fq.load(Products(), tmp_path / "after")(X), expected)


def test_a_weight_that_is_also_read_in_float_is_not_baked() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.w) * self.w.mean()

    rules = fq.Config("", (fq.Rule("*", input="int8", weight="int8", ops=("linear",)),))
    made = fq.prepare(Reads(), rules, example=X)
    fq.calibrate(made, [X])
    expected = made(X)
    assert_same_bits(fq.bake_weights(made)(X), expected)
    assert "_sites.linear_0.weight" in fq.nn.quantizers(made)


def test_weights_that_are_off_are_named() -> None:
    made = prepared()
    made._sites.einsum_0.input_1.mode = fq.nn.Mode.OFF
    with pytest.raises(ConfigError, match=r"^_sites.einsum_0: its weight quantizer is off"):
        fq.bake_weights(made)


def test_sizes_count_weights_of_functions() -> None:
    summary = fq.summary(prepared())
    floats = sum(p.numel() for p in Products().parameters())
    assert summary.bytes_quantized < 4 * floats == summary.bytes_float


def test_weights_of_functions_are_not_named_as_left_in_float() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bi,ij->bj", x, self.weight)

    rules = fq.Config("", (fq.Rule(input="int8", weight="int8 per_channel(0)", ops=("einsum",)),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fq.prepare(Product(), rules, example=torch.ones(2, 4))


class Reads(nn.Module):
    """Reads the weight of a layer without calling it, as the attention of torchvision's Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, self.read.weight, self.read.bias))


@pytest.mark.parametrize("target", [None, *sorted(targets())])
def test_a_layer_whose_weight_a_function_quantizes_has_no_quantizers(target: str | None) -> None:
    x = torch.randn(3, 4)
    rules = fq.Rule("*", input="int8", weight="int8 per_channel(0)", ops=("linear",))
    model: Any = fq.prepare(Reads(), fq.presets.INT8.with_rule(rules), example=x, target=target)
    assert not isinstance(model.read, QuantizedLayer)
    fq.calibrate(model, [x])  # which would miss data for the layer
    assert fq.unquantized(model, x, products_only=True) == []


@pytest.mark.parametrize("function", ["matmul", "einsum", "linear", "bmm"])
def test_a_rule_for_weights_alone_takes_the_weight_of_any_product(function: str) -> None:
    calls = {
        "matmul": lambda x, w: x @ w,
        "einsum": lambda x, w: torch.einsum("bi,io->bo", x, w),
        "linear": lambda x, w: nn.functional.linear(x, w.T),
        "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    }

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return calls[function](x, self.w)

    config = fq.Config("", (fq.Rule("*", weight="int8 per_tensor", ops=(function,)),))
    model = fq.prepare(Net(), config, example=torch.ones(2, 8))
    assert [quantizer.kind.name for quantizer in quantizers(model).values()] == ["WEIGHT"]
