import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant import fake_quantize
from fakequant.errors import ConfigError
from fakequant.model import presets
from fakequant.model.config import Rule
from fakequant.model.prepare import prepare
from fakequant.model.run.recorded import has
from fakequant.model.sites import site_plan
from fakequant.model.summary import operations, summary, unquantized
from fakequant.nn import quantizers
from fakequant.nn.functions import Trait
from fakequant.nn.quantizer import Mode
from tests.support.models import images, small_net
from tests.support.plan_cases import needs_kernels


class Attention(nn.Module):
    """A functional product and addition, which `prepare` cannot reach."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2)
        return torch.softmax(scores, -1) @ x + x


def test_functional_products_are_listed() -> None:
    model, x = prepare(Attention(), presets.INT8), torch.randn(2, 3, 8)
    left = unquantized(model, x, products_only=True)
    assert [(o.name, o.float_inputs, o.inputs) for o in left] == [("matmul", 2, 2), ("matmul", 2, 2)]
    assert [o.name for o in unquantized(model, x) if not o.is_product] == ["softmax", "add"]
    text = str(summary(model, x))
    assert "left in float: 2 products, 2 other operations" in text
    assert "(model): matmul, 2 of 2 inputs in float" in text
    assert "not calibrated" in text


def test_a_result_that_is_quantized_in_place_reaches_the_next_product_quantized() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.first(x))
            return self.last(x) * x.cos()

    x = images()[:, :1].expand(-1, 3, -1, -1)
    model = prepare(Forked(), presets.INT8_AFFINE, x, target="onnxruntime")
    assert "act._sites.relu_0: output uint8" in str(site_plan(model))
    assert [(one.module, one.name) for one in unquantized(model, x, products_only=True)] == []


@pytest.mark.parametrize("mask", [torch.zeros(3, 3), torch.ones(3, 3, dtype=torch.bool)], ids=["float", "bool"])
def test_a_mask_is_no_factor_of_attention(mask: Tensor) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, mask)

    (left,) = unquantized(Masked(), (torch.randn(2, 3, 8), mask))
    assert (left.float_inputs, left.inputs) == (3, 3)


def data(*shape: int) -> Tensor:
    return torch.randn(shape)


def halves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.bfloat16() for tensor in tensors]


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


OFFSETS = torch.tensor([16, 32], dtype=torch.int32)
# A function, its inputs, and its multiply-accumulates.
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "linear": (F.linear, (data(5, 2, 4), data(3, 4), data(3)), 10 * 3 * 4),
    "conv1d": (F.conv1d, (data(1, 4, 5), data(6, 4, 3)), 3 * 6 * 12),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), (data(1, 4, 5, 5), data(6, 2, 3, 3)), 25 * 6 * 18),
    "conv3d": (F.conv3d, (data(1, 2, 3, 3, 3), data(4, 2, 2, 2, 2)), 8 * 4 * 16),
    "conv_transpose2d": (F.conv_transpose2d, (data(1, 4, 5, 5), data(4, 3, 2, 2)), 25 * 4 * 12),
    "conv_tbc": (torch.conv_tbc, (data(5, 2, 4), data(3, 4, 6), data(6)), 6 * 6 * 12),
    "matmul": (torch.matmul, (data(2, 3, 4), data(2, 4, 5)), 120),
    "mm": (torch.mm, (data(3, 4), data(4, 5)), 60),
    "bmm": (torch.bmm, (data(2, 3, 4), data(2, 4, 5)), 120),
    "mv": (torch.mv, (data(3, 4), data(4)), 12),
    "dot": (torch.dot, (data(4), data(4)), 4),
    "vdot": (torch.vdot, (data(4), data(4)), 4),
    "addmm": (torch.addmm, (data(5), data(3, 4), data(4, 5)), 60),
    "addmv": (torch.addmv, (data(3), data(3, 4), data(4)), 12),
    "addr": (torch.addr, (data(3, 4), data(3), data(4)), 12),
    "baddbmm": (torch.baddbmm, (data(2, 3, 5), data(2, 3, 4), data(2, 4, 5)), 120),
    "linalg_solve": (torch.linalg.solve, (data(3, 3) + 4 * torch.eye(3), data(3, 2)), 18),
    "cholesky_solve": (torch.cholesky_solve, (data(3, 2), torch.eye(3)), 12),
    "addbmm": (torch.addbmm, (data(3, 5), data(2, 3, 4), data(2, 4, 5)), 120),
    "linalg_matmul": (torch.linalg.matmul, (data(3, 4), data(4, 5)), 60),
    "linalg_matrix_power": (lambda x: torch.linalg.matrix_power(x, 3), (data(4, 4),), 128),
    "linalg_multi_dot": (lambda *x: torch.linalg.multi_dot(x), (data(2, 3), data(3, 4), data(4, 5)), 24 + 40),
    "chain_matmul": (torch.chain_matmul, (data(2, 3), data(3, 4), data(4, 5)), 24 + 40),
    "einsum": (lambda x, y: torch.einsum("bhd,bkd->bhk", x, y), (data(2, 3, 4), data(2, 5, 4)), 120),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 2), (data(2, 3, 4), data(3, 4, 5)), 120),
    "inner": (torch.inner, (data(3, 4), data(5, 4)), 60),
    "outer": (torch.outer, (data(3), data(4)), 12),
    "ger": (torch.ger, (data(3), data(4)), 12),
    "kron": (torch.kron, (data(2, 3), data(4, 5)), 120),
    "linalg_vecdot": (torch.linalg.vecdot, (data(3, 4), data(3, 4)), 12),
    "cdist": (torch.cdist, (data(3, 4), data(5, 4)), 60),
    "bilinear": (F.bilinear, (data(2, 3), data(2, 4), data(5, 3, 4)), 2 * 5 * 12),
    "embedding": (F.embedding, (torch.tensor([1]), data(3, 4)), 0),
    "embedding_bag": (F.embedding_bag, (torch.tensor([[1, 2]]), data(3, 4)), 0),
    "scaled_dot_product_attention": (
        F.scaled_dot_product_attention,
        (data(2, 2, 3, 4), data(2, 2, 5, 4), data(2, 2, 5, 6)),
        4 * 3 * 5 * (4 + 6),
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        lambda *x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*x)[0],
        (data(2, 2, 3, 4), data(2, 2, 5, 4), data(2, 2, 5, 4)),
        4 * 3 * 5 * (4 + 4),
    ),
    "_grouped_mm": (
        lambda x, y: F.grouped_mm(*halves(x, y), offs=OFFSETS),
        (data(32, 16), data(2, 16, 16)),
        32 * 16 * 16,
    ),
    "_scaled_mm": (
        lambda x, y: torch._scaled_mm(
            x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn).t(), torch.ones(()), torch.ones(())
        ),
        (data(16, 16), data(16, 16)),
        16**3,
    ),
}


# The names of rules, where one stands for several functions.
CANONICAL = dict.fromkeys(("mm", "bmm", "linalg_matmul"), "matmul")


@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_is_known(name: str) -> None:
    function, inputs, count = PRODUCTS[name]
    (found,) = [operation for operation in operations(Calls(function), inputs) if operation.is_product]
    assert (found.name, found.multiplications) == (CANONICAL.get(name, name), count)
    factors = len(inputs) - (name in ("linear", "conv_tbc") or name.startswith(("add", "badd")))
    between = name in ("linalg_multi_dot", "chain_matmul")  # of three matrices: the second product takes the first
    assert found.inputs == found.float_inputs == factors - name.startswith("embedding") + between


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.cfloat) @ torch.ones(4, 5, dtype=torch.cfloat),
        lambda x: torch.einsum("bi,io->bo", torch.fft.fft(x), torch.ones(4, 5, dtype=torch.cfloat)),
        lambda x: F.linear(torch.complex(x, x), torch.ones(5, 4, dtype=torch.cfloat)),
    ],
)
def test_complex_products_are_known(function: Callable[..., Any]) -> None:
    (found,) = [operation for operation in operations(Calls(function), (data(3, 4),)) if operation.is_product]
    assert found.multiplications >= 60
    assert found.inputs == found.float_inputs == 2


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize(
    ("layer", "inputs", "count"),
    [
        (nn.LSTM(4, 5, 2, bidirectional=True), (data(3, 2, 4),), 6 * 2 * 20 * (4 + 5 + 10 + 5)),
        (nn.GRU(4, 5), (data(3, 2, 4),), 6 * 15 * (4 + 5)),
        (nn.RNN(4, 5), (data(3, 2, 4),), 6 * 5 * (4 + 5)),
        (nn.LSTMCell(4, 5), (data(2, 4),), 2 * 20 * (4 + 5)),
        (nn.MultiheadAttention(8, 2), (data(3, 1, 8),) * 3, 3 * 4 * 8 * 8 + 2 * 2 * 3 * 3 * 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_with_products_inside_are_counted(layer: nn.Module, inputs: tuple[Tensor, ...], count: int) -> None:
    found = unquantized(layer, inputs, products_only=True)
    assert sum(operation.multiplications for operation in found) == count


# Settings, and an older name of a resize.
NO_PRODUCTS = {"get_float32_matmul_precision", "set_float32_matmul_precision", "upsample_bilinear"}


def test_functions_of_torch_that_multiply_are_products() -> None:
    """By their names in torch, torch.linalg and torch.nn.functional, so that a new one of torch is looked at."""
    parts = re.compile("mm$|matmul|dot|conv|linear|attention|outer|inner|kron|einsum|cdist|lstm|gru|rnn")
    vendors = re.compile("_|cudnn|miopen|mkldnn|fbgemm|quantized")
    listed = {
        name
        for module in (torch, torch.linalg, F)
        for name in dir(module)
        if parts.search(name) and not vendors.match(name) and callable(getattr(module, name))
    }
    unknown = {name for name in listed if not has(name, Trait.PRODUCT) and not has(f"linalg_{name}", Trait.PRODUCT)}
    assert unknown == NO_PRODUCTS


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


def test_summary_counts_bytes_and_states() -> None:
    model = prepare(small_net(), presets.INT4_WEIGHT_ONLY)
    found = summary(model)
    float_bytes = sum(p.numel() * 4 for p in model.parameters())
    weights = sum(layer.weight.numel() for layer in (model.stem, model.branch, model.up, model.head))
    assert found.bytes_float == float_bytes
    scales = model.stem.out_channels + model.branch.out_channels + model.up.weight.shape[1] + model.head.out_features
    assert found.bytes_quantized == float_bytes - weights * 4 + weights // 2 + scales * 4
    assert all(layer.calibrated for layer in found.layers)
    assert "left in float" not in str(found)


def test_bytes_of_half_precision_and_tied_weights() -> None:
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).half()
    tied[1].weight = tied[0].weight
    found = summary(prepare(tied, presets.INT4_WEIGHT_ONLY))
    assert (found.bytes_float, found.bytes_quantized) == (128, 32 + 8 * 4)  # eight scales in float32


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


def test_values_that_only_move_stay_quantized() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.product = nn.Linear(4, 4), small_net().product

        def forward(self, x: Tensor) -> Tensor:
            y = torch.empty(4, 4)
            y[:] = self.product(x.reshape(4, 4).T.mT, x.view(4, 4).t().mT.data)
            return y

    assert unquantized(prepare(Moved(), presets.INT8), torch.ones(16)) == []


def test_switched_off_quantizers_leave_their_tensor_in_float() -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    model[0]._input_quantizer.mode = Mode.OFF
    model[0]._weight_quantizer.mode = Mode.OFF
    (left,) = unquantized(model, torch.ones(2, 4))
    assert (left.float_inputs, left.inputs) == (2, 2)


@pytest.mark.parametrize("ask", [unquantized, summary])
def test_an_example_on_which_the_model_fails_is_named_with_the_layer(ask: Callable[..., Any]) -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    with pytest.raises(ConfigError, match=r"^the example, .* \[2, 5\], failed in layer 0 \(Linear 4 -> 4"):
        ask(model, torch.ones(2, 5))


@needs_kernels  # without them `summary` sees the parts of the reference, which are functions in float
def test_functions_of_the_package_give_quantized_values() -> None:
    class ByHand(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return fake_quantize(x, "int8") @ fake_quantize(y, "int8 per_channel(1)")

    assert unquantized(ByHand(), (torch.ones(2, 4), torch.ones(4, 2)), products_only=True) == []


def test_what_is_computed_from_buffers_alone_is_no_operand() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.reciprocal().view(1, -1)

    assert [str(one) for one in unquantized(Scaled(), torch.ones(2, 4))] == ["(model): mul, 1 of 1 inputs in float"]
