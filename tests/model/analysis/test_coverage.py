"""What stays in float is said once, in one line, and only where it is not meant."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fakequant as fq
from fakequant.errors import ConfigError, CoverageWarning
from fakequant.model import presets
from fakequant.model.weights import weights_of
from fakequant.nn import Mode, quantizers
from tests.support.models import small_net


class Pairs(nn.Bilinear):
    """A bilinear layer with a forward of its own, which has no quantized form."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return F.bilinear(input1, input2, self.weight, self.bias)


class Rows(nn.Module):
    """A layer of another package, which has no quantized form."""

    def __init__(self, rows: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, features))


class Mixed(nn.Module):
    """64 of its 164 weights can be quantized: those of `known`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.known = nn.Linear(8, 8, bias=False)
        self.first, self.second = Pairs(4, 4, 4, bias=False), Rows(6, 6)
        self.norm = nn.LayerNorm([2, 4])
        self.scale = nn.Parameter(torch.ones(1, 8))
        self.count = nn.Parameter(torch.ones(3, 3, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.known(x * self.scale)
        return y @ y.t() + self.first(y[:, :4], y[:, 4:]).sum() + self.norm(y.view(-1, 2, 4)).sum()


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def told(model: nn.Module, config: Any = "int8", example: Any = None) -> str:
    """The one line that preparing says of what stays in float, or nothing."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        fq.prepare(model, config, example)
    found = [warning for warning in caught if warning.category is CoverageWarning]
    found = [warning for warning in found if "bits per weight with scales" not in str(warning.message)]  # small layers
    assert len(found) <= 1
    assert all(warning.filename == __file__ for warning in found)
    return str(found[0].message) if found else ""


def test_classes_shares_and_what_to_do() -> None:
    model = Mixed()
    weights = 64 + 64 + 36
    total = sum(p.numel() for p in model.parameters())
    assert told(model) == (
        f"2 modules with {100 * 100 / total:.0f} % of the parameters stay in float: Pairs (1: its own forward), "
        "Rows (1: no quantized form) (fakequant.summary(model, example) lists all; fakequant.nn.quantizes "
        "registers a quantized form, and Rule('*', layers=('Pairs', 'Rows')) ends this warning)"
    )
    assert sum(p.numel() for module in model.modules() for p in weights_of(module)) == weights


def test_many_classes_are_cut_short() -> None:
    classes = [type(f"Class{i}", (Rows,), {}) for i in range(9)]
    text = told(nn.Sequential(nn.Linear(2, 2), *(cls(4, i + 2) for i, cls in enumerate(classes))))
    assert "9 modules" in text
    assert text.index("Class8") < text.index("Class7")  # those with most parameters first
    assert "Class3 (1: no quantized form) and 3 more (" in text


@pytest.mark.parametrize("name", sorted(presets.presets()))
def test_nothing_is_said_where_all_is_quantized_or_meant(name: str) -> None:
    config = presets.presets()[name]
    if config.rules[0].gradient is not None:
        config = config.with_rule(fq.Rule("up"), fq.Rule("product"))  # their gradients stay in float, which is said
    assert told(small_net(), config) == ""
    assert told(small_net(), config.with_rule(fq.Rule("head"), fq.Rule("br*"))) == ""


def test_layers_that_no_rule_takes_are_meant() -> None:
    assert told(small_net(), fq.Config("mine", fq.Rule("head", weight="int8"))) == ""


def test_rules_end_the_warning() -> None:
    left = presets.INT8.with_rule(fq.Rule("*", layers=("Pairs",)))
    assert "1 module with" in told(Mixed(), left)
    assert "Rows (1" in told(Mixed(), left)
    assert told(Mixed(), left.with_rule(fq.Rule("sec*"))) == ""
    # A later rule takes the word back.
    again = left.with_rule(fq.Rule("sec*"), fq.Rule("*", weight="int8"))
    assert "2 modules" in told(Mixed(), again)


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), *(Pairs(2, 2, 4, bias=False) for _ in range(2)))
    model[2].weight = model[1].weight
    assert told(model).startswith("2 modules with 50 % of the parameters")


def test_a_weight_that_a_quantized_layer_has_too_is_not_counted_as_left_and_its_other_use_is_told() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), Rows(6, 6))
    model[1].weight = model[0].weight
    said = "layers share a weight and do not have the same codes of it: 0, and 1 (Rows) uses it in float"
    assert told(model) == said


def test_a_model_without_parameters() -> None:
    assert told(nn.Sequential(nn.AvgPool2d(2))) == ""


def test_small_shares_are_not_zero() -> None:
    text = told(nn.Sequential(nn.Linear(100, 100), Pairs(2, 2, 2)))
    assert "with less than 1 % of the parameters" in text


def test_an_example_tells_the_products() -> None:
    text = told(Mixed(), "int8", X)
    known, matmul, bilinear = 3 * 64, 3 * 3 * 8, 3 * 4 * 16
    total = known + matmul + bilinear
    share = f"{100 * matmul / total:.0f} %"  # the bilinear layer's own product is taken
    assert f"; products with {share} of the multiply-accumulates have inputs in float: matmul {share} (fakeq" in text


def test_products_of_what_a_rule_leaves_are_meant() -> None:
    text = told(Mixed(), presets.INT8.with_rule(fq.Rule("first"), fq.Rule("second")), X)
    assert text.startswith("products with 16 % of the multiply-accumulates have inputs in float: matmul 16 % (fake")
    assert "ends this warning" not in text


def test_presets_that_leave_inputs_in_float_speak_of_no_products() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    assert told(model, "int8_weight_only", X) == ""
    assert "products" not in told(Mixed(), "int8_weight_only", X)


class Depends(nn.Module):
    """Takes a branch that depends on data, which nothing that traces can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x @ x.t()


def test_a_model_that_cannot_be_traced_is_counted_by_its_run() -> None:
    x = X.abs()
    assert told(Depends(), "int8", x) == ""
    assert "matmul 100 % (" in told(Depends(), "int8", -x)


def test_a_model_that_cannot_run_stays_as_it_was() -> None:
    model = Depends()
    with pytest.raises(ConfigError, match=r"failed in layer layer \(Linear 8 -> 8\) .*shapes cannot be multiplied"):
        fq.prepare(model, "int8", X.abs()[:, :5])
    assert type(model.layer) is nn.Linear
    assert quantizers(model) == {}
    fq.prepare(model, "int8")


def test_products_with_quantized_results_before_them_are_quantized() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y.view(1, -1, 8) @ y.t().relu()

    assert "matmul" in told(Product(), "int8", X)
    assert told(Product(), fq.Config("outputs", fq.Rule("*", input="int8", weight="int8", output="int8")), X) == ""
    functions = presets.INT8.with_rule(fq.Rule("*", input="int8", ops=("matmul",)))
    assert told(Product(), functions, X) == ""


def test_a_warning_made_an_error_leaves_the_model_as_it_was() -> None:
    model = Mixed()
    with warnings.catch_warnings(action="error"), pytest.raises(CoverageWarning):
        fq.prepare(model, "int8")
    assert type(model.known) is nn.Linear
    assert quantizers(model) == {}


def test_tracing_leaves_quantizers_as_they_are() -> None:
    model = Mixed()
    told(model, "int8", X)
    assert all(q.mode is Mode.QUANTIZE and not q.dynamic for q in quantizers(model).values())
    assert model.training


@pytest.mark.parametrize(
    ("base", "size", "shape", "ops"),
    [
        (nn.Conv2d, (3, 4, 3), (1, 3, 8, 8), ("conv",)),
        (nn.ConvTranspose1d, (3, 4, 3), (1, 3, 8), ("conv_transpose",)),
        (nn.Linear, (3, 4), (2, 3), ("linear",)),
    ],
)
def test_the_warning_names_the_rule_for_products_in_own_forwards(
    base: Any, size: tuple[int, ...], shape: tuple[int, ...], ops: tuple[str, ...]
) -> None:
    class Own(base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model, x = nn.Sequential(Own(*size), nn.Flatten(), nn.LazyLinear(2)), torch.ones(shape)
    model(x)
    with pytest.warns(CoverageWarning, match=re.escape(f"; Rule('*', preset, ops={ops}) quantizes such products")):
        fq.prepare(copy.deepcopy(model), "INT4_WEIGHT_ONLY")
    rule = fq.Rule("*", "INT4_WEIGHT_ONLY", ops=ops)
    (path,) = quantizers(fq.prepare(model, fq.Config("own", (rule,)), x))
    assert path.startswith(f"0._sites.{ops[0]}")


class Tabled(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(rows, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.table(x))


@pytest.mark.parametrize(
    ("rows", "preset", "options", "said"),
    [
        (1000, "int4_group32", {}, "8.29 bits per weight with scales, because table (8.50 bits) has more than 4-bit"),
        (1000, "nvfp4_weight_only", {}, "because table (8.50 bits) has more than 4-bit codes"),
        (1000, "int8_weight_only", {}, ""),
        (1000, "int4_group32", {"rules": {"table": "int8_weight_only"}}, ""),  # said by the user
        (1000, "int4_group32", {"skip": ["table"]}, ""),
    ],
)
def test_a_preset_whose_name_promises_fewer_bits_says_so(
    rows: int, preset: str, options: dict[str, Any], said: str
) -> None:
    with warnings.catch_warnings(record=True, action="always") as found:
        fq.prepare(Tabled(rows), preset, **options)
    texts = [str(warning.message) for warning in found if "because" in str(warning.message)]
    assert len(texts) == bool(said)
    assert all(said in text for text in texts)


@pytest.mark.parametrize(
    ("preset", "cure"),
    [
        ("int4_weight_only", "rules={name: 'int8_weight_only'} gives them finer codes"),
        ("int8_weight_only", "Rule(name, weight='int8') gives a layer one scale for all of its weights"),
        ("mlx_8bit", "Rule(name, weight='int8') gives a layer one scale for all of its weights"),
    ],
)
def test_what_is_advised_against_large_scales_changes_the_layer(preset: str, cure: str) -> None:
    layer = nn.Linear(8, 32) if "mlx" in preset else nn.Conv2d(32, 32, 3, groups=32)
    with pytest.warns(CoverageWarning, match=re.escape(cure)):
        fq.prepare(nn.Sequential(layer), preset)
