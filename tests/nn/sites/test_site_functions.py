"""The table of functions: products that it knows, operators of torch.ops, and a new function from one line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

import fakequant as fq
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import find_neighbors, has
from fakequant.model.run.recorder import name_of
from fakequant.nn.functions import (
    CALLED_AS,
    NO_TRAITS,
    SITE_FUNCTIONS,
    SiteFunction,
    SiteOperand,
    Trait,
    called_as,
    of_chain,
    of_tensordot,
    of_vecdot,
    register_function,
)
from tests.support.bits import assert_same_bits
from tests.support.placements import PLACING

pytestmark = [
    pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning"),
    pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated"),
]
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
Function = Callable[[Tensor, Tensor], Tensor]
IDS = torch.tensor([[0, 2], [3, 1]])
M, V, T = (4, 4), (4,), (2, 3, 4)
# The function, the shapes of its input and of its parameter, and the granularity of the latter.
PRODUCTS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], str]] = {
    "mv": (torch.mv, M, V, "per_tensor"),
    "mv of a matrix": (lambda x, w: w.mv(vec=x), V, M, "per_channel(0)"),
    "addmv": (lambda x, w: torch.addmv(torch.ones(4), mat=w, vec=x, alpha=2), V, M, "per_channel(-2)"),
    "addr": (lambda x, w: torch.addr(torch.ones(4), x, vec2=w, beta=3), V, V, "per_tensor"),
    "inner": (torch.inner, T, M, "per_channel(0)"),
    "dot": (lambda x, w: torch.dot(x, tensor=w), V, V, "per_tensor"),
    "vdot": (Tensor.vdot, V, V, "per_tensor"),
    "linalg_vecdot": (torch.linalg.vecdot, M, M, "per_channel(0)"),
    "linalg_vecdot along an axis": (lambda x, w: torch.linalg.vecdot(x, w, dim=0), M, M, "per_channel(0)"),
    "outer": (lambda x, w: torch.outer(x, vec2=w), V, V, "per_tensor"),
    "ger": (Tensor.ger, V, V, "per_tensor"),
    "kron": (torch.kron, M, M, "per_channel(0)"),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=1), T, M, "per_channel(1)"),
    "tensordot by axes": (lambda x, w: torch.tensordot(x, w, ([1], [1])), M, M, "per_channel(0)"),
    "linalg_multi_dot": (lambda x, w: torch.linalg.multi_dot([x, w, x]), M, M, "per_channel(1)"),
    "chain_matmul": (torch.chain_matmul, M, M, "per_channel(1)"),
    "conv_tbc": (lambda x, w: torch.conv_tbc(x, w, torch.ones(5)), (3, 2, 4), (2, 4, 5), "per_channel(2)"),
    "embedding_bag": (lambda x, w: F.embedding_bag(IDS, w) + x, V, M, "per_channel(0)"),
    "embedding_bag of torch": (
        lambda x, w: torch.embedding_bag(w, IDS.flatten(), torch.tensor([0, 2]))[0] + x,
        V,
        M,
        "per_channel(0)",
    ),
    "einsum of three": (lambda x, w: torch.einsum("ij,jk,kl->il", x, w, x), M, M, "per_channel(1)"),
    "matmul": (torch.ops.aten.mm, M, M, "per_channel(-1)"),
    "matmul of a vector": (torch.matmul, M, V, "per_tensor"),
    "addmm": (lambda x, w: torch.ops.aten.addmm_.default(torch.ones(M), x, w), M, M, "per_channel(-1)"),
    "linear": (torch.ops.aten.linear.default, T, M, "per_channel(0)"),
    "embedding": (lambda x, w: torch.ops.aten.embedding(w, IDS) + x, V, M, "per_channel(0)"),
}
UNKNOWN_TO_ONNX = {"conv_tbc"}


class Calls(nn.Module):
    def __init__(self, function: Function, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def prepared(name: str) -> tuple[Any, Tensor]:
    function, x_shape, shape, _ = PRODUCTS[name]
    x = torch.randn(x_shape, generator=torch.Generator().manual_seed(0))
    rule = fq.Rule("*", input="int8", weight="int8 per_channel(0)", ops=(name.partition(" ")[0],))
    model = fq.prepare(Calls(function, shape), fq.Config("products", (rule,)), example=x)
    fq.calibrate(model, [x], progress=False)
    return model, x


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_computed_from_quantized_operands(name: str) -> None:
    model, x = prepared(name)
    function, _, _, granularity = PRODUCTS[name]
    left = fq.unquantized(model, x, products_only=True)
    assert [(one.float_inputs, one.inputs) for one in left] == [(1, 4)] * ("multi" in name or "three" in name)
    (site,) = model._sites.by_key().values()
    by_kind = {kind: [q for q in site.children() if q.kind is kind] for kind in fq.nn.Kind}
    (weight,) = by_kind[fq.nn.Kind.WEIGHT]
    assert str(weight.spec.granularity) == granularity
    inputs = by_kind[fq.nn.Kind.INPUT]
    assert_same_bits(model(x), function(inputs[0](x) if inputs else x, weight(model.w)))


@pytest.mark.parametrize("name", sorted({*PRODUCTS} - UNKNOWN_TO_ONNX))
def test_products_are_exported_exactly(name: str, tmp_path: Path) -> None:
    model, x = prepared(name)
    fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [x]).exact


def test_an_einsum_of_one_tensor_is_no_product() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ij->ji", x) @ torch.einsum("ii->i", x)

    model = fq.prepare(Turned(), fq.presets.INT8, example=torch.ones(3, 3), target="qnn")
    assert {site.function for site in fq.site_plan(model).sites} == {"matmul"}
    left = {one.name: one.is_product for one in fq.unquantized(model, torch.ones(3, 3))}
    assert left == {"einsum": False}


def test_equations_of_calls() -> None:
    a, b = torch.ones(2, 3, 4), torch.ones(4, 3, 5)
    assert of_tensordot((), {"a": a, "b": torch.ones(3, 4), "dims": 2}) == "abc,bc->a"
    assert of_tensordot((a, b, [2, -2], [0, 1]), {}) == "abc,cbf->af"
    assert of_tensordot((a, b, torch.tensor([[1], [1]])), {}) == "abc,dbf->acdf"
    assert of_vecdot((), {"x": a, "y": torch.ones(4)}) == "abc,c->ab"
    assert of_chain(([torch.ones(2), b[0].t(), torch.ones(3)],), {}) == "a,ab,b->"


# Functions that compute products and are no sites: they stay in float, and `unquantized` lists them.
LEFT = {
    *("cdist", "cholesky_solve", "convolution", "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell"),
    *("rnn_tanh", "rnn_tanh_cell", "linalg_lstsq", "linalg_lu_solve", "linalg_matrix_power", "linalg_solve"),
    *("linalg_solve_triangular", "linear_cross_entropy", "lu_solve", "matrix_power", "multi_head_attention_forward"),
    *("triangular_solve", "hsmm", "hspmm", "saddmm", "smm", "sspaddmm"),
    *("affine_grid", "affine_grid_generator", "corrcoef", "cov", "linalg_householder_product", "linalg_ldl_solve"),
    *("linalg_matrix_exp", "linalg_solve_ex", "linalg_tensorsolve", "matrix_exp", "ormqr", "pdist"),
}


def test_every_product_of_torch_is_a_site_or_reported() -> None:
    functions = [f for room in get_overridable_functions().values() for f in room if hasattr(f, "__name__")]
    functions = [f for f in functions if f.__name__ not in ("__get__", "__set__")]
    assert {name_of(f) for f in functions if has(name_of(f), Trait.PRODUCT) and called_as(f) is None} == LEFT


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.cdist(x, w),
        lambda x, w: torch.cov(x @ w),
        lambda x, w: torch.linalg.matrix_exp(x @ w),
        lambda x, w: torch.gru_cell(x, x, torch.cat([w] * 3), torch.cat([w] * 3)),
        lambda x, w: torch.sparse.mm(x.to_sparse(), w),
        lambda x, w: F.multi_head_attention_forward(
            x, x, x, 4, 1, torch.cat([w] * 3), None, None, None, False, 0.0, w, None, need_weights=False
        )[0],
    ],
)
def test_products_that_are_no_sites_are_reported(function: Function) -> None:
    model = fq.prepare(Calls(function, M), fq.presets.INT8, example=torch.ones(M), target="onnxruntime")
    left = fq.unquantized(model, torch.randn(M), products_only=True)
    assert left
    assert all(one.float_inputs and one.multiplications for one in left)


class MadeUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        own: Any = torch.ops.fakequant_made_up
        return own.product(own.smooth(self.last(own.mover(self.first(x)))), self.w)


@pytest.fixture
def made_up() -> Iterator[None]:
    library = torch.library.Library("fakequant_made_up", "DEF")
    for definition, computed in (
        ("product(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w.t()),
        ("mover(Tensor x) -> Tensor", lambda x: x.clone()),
        ("smooth(Tensor x) -> Tensor", lambda x: x.sigmoid()),
    ):
        library.define(definition)
        library.impl(definition.partition("(")[0], computed, "CompositeImplicitAutograd")
    operands = SiteOperand("input", 0), SiteOperand("weight", 1)
    with patch.dict(SITE_FUNCTIONS), patch.dict(CALLED_AS):
        register_function(SiteFunction("my_product", operands, Trait.PRODUCT, also=("fakequant_made_up::product",)))
        keeps = Trait.MOVES | Trait.CODES | Trait.SCALES
        register_function(SiteFunction("my_mover", operands[:1], keeps, also=("fakequant_made_up::mover",)))
        register_function(SiteFunction("my_smooth", operands[:1], NO_TRAITS, also=("fakequant_made_up::smooth",)))
        yield
    library._destroy()


# The operands with quantizers: those of the product, then those of the function without traits. XNNPACK computes a few
# named products alone.
OPERANDS = {
    **dict.fromkeys(("onnxruntime", "openvino", "tensorrt"), (["input", "weight"], [])),
    "qnn": (["input", "weight", "output"], ["input"]),  # whose result is what the product reads
    **dict.fromkeys(("xnnpack", "litert", "litert_reference"), ([], [])),
}


@pytest.mark.parametrize("target", PLACING)
@pytest.mark.usefixtures("made_up")
def test_a_registered_function_has_what_its_traits_say(target: str) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(MadeUp(), fq.presets.INT8, example=x, target=target)
    fq.calibrate(model, [x], progress=False)
    held = {site.function: [*site.quantizers] for site in fq.site_plan(model).sites}
    assert tuple(held.get(name, []) for name in ("my_product", "my_smooth")) == OPERANDS[target]
    assert "my_mover" not in held
    left = {one.name: (one.is_product, one.multiplications) for one in fq.unquantized(model, x)}
    assert {one.name for one in fq.summary(model, x).unquantized or ()} == {*left}
    assert "my_mover" not in left
    assert left.get("my_product") == (None if held.get("my_product") else (True, 2 * 3 * 4))


@pytest.mark.usefixtures("made_up")
def test_a_registered_function_is_known_to_transforms_of_the_float_model() -> None:
    model, x = MadeUp(), torch.randn(2, 4)
    layers: set[nn.Module] = {model.first, model.last}
    recording = record(model, lambda: model(x))
    assert find_neighbors(model, recording, layers, layers).readers == {model.first: [model.last]}
    total = 2 * (4 * 4 + 4 * 4 + 3 * 4)
    assert sum(call.multiplications for call in recording.calls) == total
    with pytest.raises(fq.errors.ConfigError, match=r"must be an identifier that no other function has, got 'add'"):
        register_function(SiteFunction("add", (), NO_TRAITS))
