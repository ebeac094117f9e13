"""What a quantizer sees that follows from no input is a constant of the file, with the bits that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import fakequant as fq
from fakequant.errors import VerificationError
from fakequant.export.trace import fold_constants, trace
from fakequant.nn.quantized.layers import QuantLinear
from tests.support.matrix import full, sweep

X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
TARGETS = (torch.ops.fakequant.fake_quantize.default, torch.ops.fakequant.choose_scale.default)


class Queries(nn.Module):
    """Learned queries, repeated for every example, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 5, 32))
        self.register_buffer("places", torch.randn(5, 32))
        self.of_queries, self.of_keys = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.of_queries(self.queries.repeat(x.shape[0], 1, 1) + self.get_buffer("places"))
        return self.of_keys(x) @ queries.transpose(1, 2)


class Shared(Queries):
    """One layer for queries and keys, so that its quantizer sees a constant and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        keys = self.of_queries(self.of_keys(x))
        return keys @ self.of_keys(self.queries.repeat(x.shape[0], 1, 1)).transpose(1, 2)


class Changed(Queries):
    """Constants that are written to: one by a constant, one by an input."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.zeros(32, 32), torch.zeros(32, 32)
        first[:5] = self.queries[0] * 2
        second[:5] = x[0, :5]
        return self.of_keys(x) @ self.of_keys(first) + self.of_queries(second)[0]


def discriminator() -> nn.Module:
    spectral = nn.utils.spectral_norm
    return nn.Sequential(spectral(nn.Linear(32, 16)), nn.LeakyReLU(0.2), spectral(nn.Linear(16, 4)))


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 16)), nn.ReLU(), nn.Linear(16, 4))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def parametrized() -> nn.Module:
    """`register_parametrization` changes a layer's class, which `prepare` leaves in float: so after it."""
    model = fq.prepare(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), "INT8")
    layer = model[0]
    assert isinstance(layer, QuantLinear)
    parametrizations.weight_norm(layer)
    return model


MADE: list[Any] = [Queries, Shared, Changed, discriminator, weight_norm, pruned, parametrized]
COMPUTED: dict[str, Callable[[], nn.Module]] = {make.__name__: make for make in MADE}


def prepared(make: Callable[[], nn.Module], preset: str) -> nn.Module:
    torch.manual_seed(0)
    model = make().eval()
    if not fq.nn.quantizers(model):
        model(X)  # hooks compute weights in the first call
        fq.prepare(model, preset)
    fq.calibrate(model, [X])
    return model


@sweep(
    "make, preset",
    full(COMPUTED, ["INT8", "INT8_PER_TOKEN"]),
    full(["Shared", "discriminator", "parametrized"], ["INT8"]),
    make=COMPUTED,
)
def test_constants_and_computed_weights_are_exact(make: Callable[[], nn.Module], preset: str, tmp_path: Path) -> None:
    model = prepared(make, preset)
    written = fq.export_onnx(model, X, tmp_path / "m.onnx")
    report = fq.verify_onnx(written.path, model)
    assert report.exact
    assert [row.quantizer for row in report.rows] == [q.quantizer for q in written.quantizers]
    assert all(row.elements for row in report.rows)
    assert fq.verify_onnx(written.path).exact
    assert not any(
        isinstance(value, torch._subclasses.FakeTensor) for m in model.modules() for value in vars(m).values()
    )


@pytest.mark.parametrize("make", [discriminator, weight_norm, pruned], ids=lambda make: make.__name__)
def test_a_computed_weight_that_changed_since_is_found(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = prepared(make, "INT8")
    fq.export_onnx(model, X, tmp_path / "m.onnx")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("0.weight"):
                parameter.view(-1)[::3].mul_(0.5)
    rows = {row.quantizer: row for row in fq.verify_onnx(tmp_path / "m.onnx", model, [X]).rows}
    assert rows["0._weight_quantizer"].differing > 0


def test_a_changed_query_is_found(tmp_path: Path) -> None:
    model = prepared(Queries, "INT8")
    fq.export_onnx(model, X, tmp_path / "m.onnx")
    with torch.no_grad():
        model.get_parameter("queries").mul_(0.5)
    rows = {row.quantizer: row for row in fq.verify_onnx(tmp_path / "m.onnx", model, [X]).rows}
    assert [name for name, row in rows.items() if row.differing] == ["of_queries._input_quantizer"]


def test_a_model_that_never_quantizes_the_constant_is_another(tmp_path: Path) -> None:
    class Without(Queries):
        def forward(self, x: Tensor) -> Tensor:
            return self.of_keys(x)[:, :, :5]

    fq.export_onnx(prepared(Queries, "INT8"), X, tmp_path / "m.onnx")
    other = prepared(Queries, "INT8")
    other.forward = Without.forward.__get__(other)
    with pytest.raises(VerificationError, match=r"of_queries\._input_quantizer was not called; pass the model"):
        fq.verify_onnx(tmp_path / "m.onnx", other)


def test_scales_of_computed_weights_are_those_of_the_weight_that_the_model_computes(tmp_path: Path) -> None:
    """`layer.weight` still holds the initial weight here: the hook runs in the first call."""
    torch.manual_seed(0)
    trained = weight_norm()
    with torch.no_grad():
        trained.get_parameter("0.weight_g").mul_(7.0)
    model = weight_norm()
    model.load_state_dict(trained.state_dict())
    fq.prepare(model.eval(), "INT8_WEIGHT_ONLY")
    fq.export_onnx(model, X, tmp_path / "m.onnx")
    assert fq.verify_onnx(tmp_path / "m.onnx", model, [X]).exact


def graph_of(forward: Callable[[nn.Module, Tensor], Tensor]) -> torch.export.ExportedProgram:
    class Model(Queries):
        pass

    setattr(Model, "forward", forward)  # noqa: B010  a method that pyright is not to know
    return torch.export.export(Model(), (X,), strict=False)


def first_arguments(program: torch.export.ExportedProgram) -> list[str]:
    fold_constants(program, TARGETS)
    return [str(node.args[0]) for node in program.graph.nodes if node.target is TARGETS[0]]


def quantized(x: Tensor) -> Tensor:
    return fq.fake_quantize(x, "int8", scale=0.1)


def test_what_is_random_or_follows_from_an_input_is_no_constant() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        written = torch.zeros(7, 32)
        view = written[1:]
        view[0] = x[0, 0]
        return (
            x + quantized(torch.rand(32)) + quantized(x * 0) + quantized(written) + quantized(self.queries.exp())[0, 0]
        )

    program = graph_of(forward)
    *varying, constant = first_arguments(program)
    assert not any("constant" in name for name in varying)
    assert constant == "fakequant_constant_0"
    found: Any = program.constants["fakequant_constant_0"]
    assert torch.equal(found, program.state_dict["queries"].exp())
    program.module()(X)  # the program still runs


def test_a_constant_is_read_before_it_is_changed_and_the_model_is_left_alone() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        counted = torch.ones(32)
        before = quantized(counted)
        counted += 1
        return x + before + quantized(counted)

    program = graph_of(forward)
    first_arguments(program)
    assert torch.equal(program.module()(X), X + quantized(torch.ones(32)) + quantized(torch.full((32,), 2.0)))


def test_a_mask_made_by_vmap_beside_a_computed_weight() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)
            self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[-2])
            mask = torch.vmap(lambda i: torch.vmap(lambda j: i >= j)(places))(places)
            return self.out(self.project(x) * mask.sum(-1, keepdim=True))

    x = torch.randn(2, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(Masked(), "INT8", x).eval()
    fq.calibrate(model, [x])
    program = trace(model, (x,), {}, None)
    assert not torch._C._are_functorch_transforms_active()
    with torch.no_grad():
        assert torch.equal(program.run_decompositions().module()(x), model(x))
