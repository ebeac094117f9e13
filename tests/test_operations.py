from collections import UserDict

import pytest
import torch
from models import images, small_net
from torch import Tensor, nn

from fakequant.model import presets
from fakequant.model.config import Rule
from fakequant.model.operations import operations, unquantized
from fakequant.model.prepare import prepare
from fakequant.model.summary import summary
from fakequant.nn import quantizers


class Attention(nn.Module):
    """A functional product and addition, which `prepare` cannot reach."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2)
        return torch.softmax(scores, -1) @ x + x


def test_functional_products_are_listed() -> None:
    model = prepare(Attention(), presets.INT8)
    left = unquantized(model, torch.randn(2, 3, 8), products_only=True)
    assert [(o.name, o.float_inputs, o.inputs) for o in left] == [("matmul", 2, 2), ("matmul", 2, 2)]
    others = [o.name for o in unquantized(model, torch.randn(2, 3, 8)) if not o.is_product]
    assert others == ["softmax", "add"]


def test_nothing_is_left_where_all_products_are_quantized() -> None:
    model = prepare(small_net(), presets.INT8)
    assert unquantized(model, images(), products_only=True) == []
    assert {(o.module, o.name) for o in unquantized(model, images())} == {
        ("norm", "batch_norm"),
        ("", "mean"),
        ("", "add"),
    }
    assert all(not q.dynamic for q in quantizers(model).values())


def test_a_layer_left_by_a_rule_is_listed_with_its_name() -> None:
    model = prepare(small_net(), presets.INT8.with_rule(Rule("head")))
    (left,) = unquantized(model, images(), products_only=True)
    assert str(left) == "head: linear, 2 of 2 inputs in float"


def test_weight_only_leaves_one_input() -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    (left,) = unquantized(model, torch.ones(1, 4), products_only=True)
    assert (left.float_inputs, left.inputs) == (1, 2)


def test_a_float_model_has_only_float_operations() -> None:
    found = operations(small_net(), (images(),))
    assert all(not o.quantized for o in found)
    assert sum(o.is_product for o in found) == 5


def test_a_dynamic_quantizer_is_not_an_operation() -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_PER_TOKEN)
    assert unquantized(model, {"input": torch.ones(2, 4)}) == []


def test_an_example_may_be_any_mapping() -> None:
    found = operations(nn.Linear(4, 4), UserDict(input=torch.ones(2, 4)))
    assert [operation.name for operation in found] == ["linear"]


def test_values_that_only_move_stay_quantized() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = small_net().product

        def forward(self, x: Tensor) -> Tensor:
            return self.product(x.reshape(4, 4), x.view(4, 4).t())

    assert unquantized(prepare(Moved(), presets.INT8), torch.ones(16)) == []


def test_summary_counts_bytes_and_states() -> None:
    model = prepare(small_net(), presets.INT4_WEIGHT_ONLY)
    found = summary(model)
    float_bytes = sum(p.numel() * 4 for p in model.parameters())
    weights = sum(layer.weight.numel() for layer in (model.stem, model.branch, model.up, model.head))
    assert found.bytes_float == float_bytes
    assert found.bytes_quantized == float_bytes - weights * 4 + weights // 2
    assert all(layer.calibrated for layer in found.layers)
    assert "left in float" not in str(found)


def test_bytes_of_half_precision_and_tied_weights() -> None:
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).half()
    tied[1].weight = tied[0].weight
    found = summary(prepare(tied, presets.INT4_WEIGHT_ONLY))
    assert (found.bytes_float, found.bytes_quantized) == (128, 32)


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_is_no_factor(bias: bool) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear = nn.Bilinear(2, 2, 2, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.bilinear(x, x)

    (found,) = operations(Pair(), torch.ones(1, 2))
    assert (found.name, found.float_inputs, found.inputs) == ("bilinear", 3, 3)


def test_summary_with_an_example_lists_what_is_left() -> None:
    text = str(summary(prepare(Attention(), presets.INT8), torch.randn(2, 3, 8)))
    assert "left in float: 2 products, 2 other operations" in text
    assert "(model): matmul, 2 of 2 inputs in float" in text
    assert "not calibrated" in text
