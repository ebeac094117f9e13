"""Parameters that functions take as weights: their axes, and baking them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, CoverageWarning
from fakequant.model.sites import site_plan
from fakequant.nn import QuantizedLayer, quantizers
from fakequant.nn.functions import einsum_operand
from tests.support.bits import assert_same_bits
from tests.support.functional_models import Calls, weight
from tests.support.placements import PLACING

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))


class Products(nn.Module):
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
    def even(model: Any, x: Tensor) -> Tensor:
        y = torch.einsum("...d, dhk -> ...hk", x, model.w).flatten(-2)
        return F.linear(y @ model.v, model.v)

    held = prepared("int4 per_block(-1:2)", Calls(even, w=weight(4, 2, 3), v=weight(6, 4)))._sites.einsum_0.input_1
    assert str(held.spec.granularity) == "per_block(0:2)"


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
    model = Calls(lambda model, x: F.linear(x, model.w) * model.w.mean(), w=weight(4, 4))
    rules = fq.Config("", (fq.Rule("*", input="int8", weight="int8", ops=("linear",)),))
    made = fq.prepare(model, rules, example=X)
    fq.calibrate(made, [X])
    expected = made(X)
    assert_same_bits(fq.bake_weights(made)(X), expected)
    assert "_sites.linear_0.weight" in fq.nn.quantizers(made)


def test_weights_that_are_off_are_named() -> None:
    made = prepared()
    made._sites.einsum_0.input_1.mode = fq.nn.Mode.OFF
    with pytest.raises(ConfigError, match=r"^_sites.einsum_0: the mode of the weight quantizer is 'off'"):
        fq.bake_weights(made)


def test_sizes_count_weights_of_functions() -> None:
    summary = fq.summary(prepared())
    floats = sum(p.numel() for p in Products().parameters())
    assert summary.bytes_quantized < 4 * floats == summary.bytes_float


def test_weights_of_functions_are_not_named_as_left_in_float() -> None:
    model = Calls(lambda model, x: torch.einsum("bi,ij->bj", x, model.w), w=weight(4, 4))
    rules = fq.Config("", (fq.Rule(input="int8", weight="int8 per_channel(0)", ops=("einsum",)),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fq.prepare(model, rules, example=torch.ones(2, 4))


class Reads(nn.Module):
    """Reads the weight of a layer without calling it, as the attention of torchvision's Swin."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.called, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self.function(x, self.read.weight))


@pytest.mark.parametrize("function", [lambda x, w: x @ w.t(), F.linear], ids=["transposed", "linear"])
@pytest.mark.parametrize("target", [None, *PLACING])
def test_a_layer_whose_weight_a_function_quantizes_has_no_quantizers(target: str | None, function: Any) -> None:
    x = torch.randn(3, 4)
    rules = fq.Rule("*", input="int8", weight="int8 per_channel(0)", ops=("linear", "matmul"), optional=True)
    model: Any = fq.prepare(Reads(function), fq.presets.INT8.with_rule(rules), example=x, target=target)
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
    net = Calls(lambda model, x: calls[function](x, model.w), w=weight(8, 8))
    config = fq.Config("", (fq.Rule("*", weight="int8 per_tensor", ops=(function,)),))
    model = fq.prepare(net, config, example=torch.ones(2, 8))
    assert [quantizer.kind.name for quantizer in quantizers(model).values()] == ["WEIGHT"]


ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
ALL = ["onnxruntime", "openvino", "qnn", "tensorrt", "xnnpack"]


def adapted() -> nn.Module:
    def forward(model: Any, x: Tensor) -> Tensor:
        return F.linear(x, torch.softmax(model.base + model.a @ model.b, -1))

    return Calls(forward, base=weight(8, 8), a=weight(8, 2), b=weight(2, 8))


def transposed() -> nn.Module:
    return Calls(lambda model, x: x @ model.weight.mT, weight=weight(8, 8))


class Scores(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = x @ x.mT
        scores = scores + (torch.zeros(5, 5) if mask is None else mask)
        return torch.softmax(scores, -1) @ x


@pytest.mark.parametrize("target", ALL)
def test_what_computes_a_weight_from_parameters_has_no_quantizers(target: str) -> None:
    model = fq.prepare(adapted(), "INT8", example=ROWS, target=target)
    (site,) = fq.site_plan(model).sites
    assert site.path == "_sites.linear_0"
    assert {"input", "weight"} <= set(site.quantizers)


@pytest.mark.parametrize("make", [adapted, transposed])
def test_parameters_of_a_computed_weight_are_not_left_in_float(make: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CoverageWarning)
        model = fq.prepare(make(), "INT8", example=ROWS, target="openvino")
    assert fq.unquantized(model, ROWS, products_only=True) == []


def test_a_computed_weight_that_a_rule_leaves_is_told() -> None:
    model = transposed()
    config = fq.Config("sums", (fq.Rule("*", input="int8", ops=("add",), optional=True),))
    with pytest.warns(CoverageWarning, match="100 % of the parameters stays in float"):
        fq.prepare(model, config, example=ROWS)


@pytest.mark.parametrize("join", [torch.hstack, torch.vstack, torch.dstack, torch.column_stack])
def test_other_names_of_concatenation_share_a_scale(join: object) -> None:
    joined = Calls(lambda model, x: join((x.relu(), x.sigmoid())))  # type: ignore[operator]
    (site,) = fq.site_plan(fq.prepare(joined, "INT8", ROWS[0], target="xnnpack")).sites
    assert site.function == "cat"
    assert len({quantizer.group for quantizer in site.quantizers.values() if quantizer.group}) == 1


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_results_of_recurrent_layers_for_an_engine_that_quantizes_all_results(cell: type[nn.Module]) -> None:
    for target, held in (("qnn", True), ("onnxruntime", False)):
        model = fq.prepare(nn.Sequential(cell(8, 8)), "INT8_AFFINE", example=ROWS, target=target)
        assert (model[0].output_quantizer is not None) is held


def test_a_mask_that_the_example_lacked_is_told() -> None:
    model = fq.prepare(Scores(), "INT8", example=ROWS, target="qnn")
    mask = torch.zeros(5, 5).masked_fill(CAUSAL, -1e9)
    with pytest.warns(CalibrationWarning, match=r"_sites.add_0.other and 1 more reaches -1e\+09.*'add', 'softmax'"):
        fq.calibrate(model, [{"x": ROWS, "mask": mask}])
    with pytest.raises(CalibrationError, match="if an attention mask makes the -inf, give prepare an example with"):
        fq.calibrate(model, [{"x": ROWS, "mask": torch.zeros(5, 5).masked_fill(CAUSAL, -torch.inf)}])
    with warnings.catch_warnings():
        warnings.simplefilter("error", CalibrationWarning)
        masked = fq.prepare(Scores(), "INT8", example={"x": ROWS, "mask": mask}, target="qnn")
        fq.calibrate(masked, [{"x": ROWS, "mask": mask}])
