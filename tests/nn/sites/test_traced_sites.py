"""Owners of sites that call more functions while torch traces them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import SiteError
from tests.support.functional_models import assert_same_bits


class Resizing(nn.Module):
    """Resizes its table of positions in a trace, where it has the right size; may write to its input before."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(2)
        table = self.table
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            first, others = table[:, :1], table[:, 1:]
            others = F.interpolate(others.transpose(1, 2), size=4, mode="nearest").transpose(1, 2)
            table = torch.cat([first, others], dim=1)
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + table


def prepared_resizing(writes: bool = False) -> tuple[nn.Module, Tensor]:
    x = torch.randn(2, 4, 8)
    rules = [fq.Rule("*", input="int8", ops=("cat", "add"))]
    model = fq.prepare(Resizing(writes).eval(), fq.Config("all", rules), example=x.clone())
    fq.calibrate(model, [x.clone()], progress=False)
    return model, x


def test_calls_with_parameters_alone_that_a_trace_alone_makes_are_not_counted() -> None:
    model, x = prepared_resizing()
    with torch.no_grad():
        expected = model(x)
        assert_same_bits([torch.jit.trace(model, (x,))(x)], [expected])
        program = torch.export.export(model, (x,), strict=False)
        assert_same_bits([program.module()(x)], [expected])
    program.graph.eliminate_dead_code()  # of the first try
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("fakequant.fake_quantize.default") == 4, targets


def test_a_forward_that_wrote_before_such_calls_is_refused() -> None:
    model, x = prepared_resizing(writes=True)
    with torch.no_grad(), pytest.raises(SiteError, match=r"planned: cat, add\n  called:  cat, cat \(so far\)"):
        torch.export.export(model, (x,), strict=False)


@torch.compile(backend="eager")
def compiled_part(x: Tensor) -> Tensor:
    return 1 - x


class Reflected(nn.Module):
    """Has numbers on the left, and a function that torch compiles by itself."""

    def forward(self, x: Tensor) -> Tensor:
        part = 1 - x if torch.compiler.is_compiling() else compiled_part(x)
        return part + x - 2 / x.exp()


@pytest.mark.parametrize("ops", [("add",), ("add", "sub", "div")])
def test_numbers_on_the_left_are_compiled(ops: tuple[str, ...]) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 4)
    compiled_part(x)
    model = fq.prepare(Reflected(), fq.Config("some", (fq.Rule("*", input="int8", ops=ops),)), example=x)
    fq.calibrate(model, [x], progress=False)
    assert_same_bits([torch.compile(model, backend="eager", fullgraph=True)(x)], [model(x)])


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + x
        torch._dynamo.graph_break()
        return y * x


def test_a_graph_break_within_an_owner_is_refused_or_changes_nothing() -> None:
    torch.compiler.reset()
    x = torch.randn(2, 4)
    model = fq.prepare(Breaking(), fq.Config("some", (fq.Rule("*", input="int8", ops=("add", "mul")),)), example=x)
    fq.calibrate(model, [x], progress=False)
    # Refused; not so after control flow of torch in the process, which marks code that is not compiled from then on.
    with suppress(SiteError):
        assert_same_bits([torch.compile(model, backend="eager")(x)], [model(x)])
    assert torch._C._len_torch_function_stack() == 0


class OtherPath(nn.Module):
    """Attention that calls more functions in a trace than otherwise."""

    def __init__(self, more: Callable[[Tensor], Tensor], before: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.more, self.before = nn.Linear(8, 8), nn.Linear(8, 8), more, before

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        is_traced = torch.compiler.is_compiling()
        q = self.q(x) + places
        q = self.more(q) if is_traced and self.before else q
        scores = q @ self.k(x).mT
        scores = self.more(scores) if is_traced and not self.before else scores
        return scores.softmax(-1) @ x


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 8, generator=generator), torch.randn(2, 4, 8, generator=generator)


MORE: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda scores: scores + torch.zeros(4, 4),
    "sums": lambda scores: scores + torch.zeros(1) + torch.zeros(4, 4),
    "product": lambda scores: scores @ torch.eye(4),
}


@pytest.mark.parametrize("more", [MORE["mask"], MORE["sums"]], ids=["mask", "sums"])
def test_functions_that_a_trace_alone_calls_stay_in_float(more: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, x = OtherPath(more, False).eval(), example()
    fq.prepare(model, "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    expected = model(*x)
    if more is MORE["mask"]:
        assert torch.equal(torch.export.export(model, x, strict=False).module()(*x), expected)
    path = fq.export_onnx(model, x, tmp_path / "m.onnx").path
    assert fq.verify_onnx(path, model, [x]).passed


@pytest.mark.parametrize(("more", "before"), [(MORE["product"], False), (MORE["mask"], True)], ids=["product", "sum"])
def test_calls_that_could_be_the_planned_ones_are_an_error_that_names_the_trace(
    more: Callable[[Tensor], Tensor], before: bool
) -> None:
    x = example() if not before else (torch.randn(2, 4, 4), torch.randn(2, 4, 4))
    model = OtherPath(more, before).eval()
    if before:
        model.q, model.k = nn.Linear(4, 4), nn.Linear(4, 4)
    fq.prepare(model, "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    with pytest.raises(SiteError, match=r"called: .* \(while it is traced, where forward may take another path"):
        torch.export.export(model, x, strict=False)
