"""Calls belong to their quantizers by their order: another order than planned is an error, never another scale."""

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, SiteError
from fakequant.model.sites import site_plan
from tests.support.functional_models import assert_same_bits, only, quantized

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


class Loop(nn.Module):
    """So many additions as it is told."""

    times = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + x.sin()
        return x if self.times < 5 else x @ x


@pytest.mark.parametrize(
    ("times", "called"), [(1, "add"), (3, "add, add, add (so far)"), (5, "add, add, add (so far)"), (0, "none")]
)
def test_loops_of_another_length_are_refused_with_both_sequences(times: int, called: str) -> None:
    x = torch.randn(4, 4)
    model = quantized(nn.Sequential(Loop()), x, rules=only("add"))
    model[0].times = times
    with pytest.raises(SiteError) as refused:
        model(x)
    assert "0 calls functions that have quantizers in another order" in str(refused.value)
    assert "planned: add, add\n" in str(refused.value)
    assert f"called:  {called}\n" in str(refused.value)
    model[0].times = 2
    model(x)  # the error has left nothing behind


class Branch(nn.Module):
    """Adds first or last, as told."""

    first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return torch.softmax(x + x.sin(), -1)
        return torch.softmax(x, -1) + x


def test_branches_are_refused() -> None:
    model = quantized(Branch(), torch.randn(2, 4), rules=only("add", "softmax"))
    model.first = False
    with pytest.raises(SiteError, match="planned: add, softmax\n  called:  softmax"):
        model(torch.randn(2, 4))


def test_functions_without_quantizers_may_come_as_they_like() -> None:
    model = quantized(Branch(), torch.randn(2, 4), rules=only("softmax"))
    model.first = False
    model(torch.randn(2, 4))


def test_other_operands_are_refused() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor | float) -> Tensor:
            return torch.cat([x + y])

    model = quantized(Sum(), torch.ones(4), torch.ones(4), rules=only("add", "cat"))
    with pytest.raises(SiteError, match="add has other operands than planned: float tensors are input, planned were"):
        model(torch.ones(4), 1.0)
    with pytest.raises(SiteError, match="other operands"):
        model(torch.ones(4), torch.ones(4).long())


def test_visits_with_different_sequences_are_refused_by_prepare() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor, more: bool) -> Tensor:
            return x + x + x if more else x + x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = Other()

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.other(x, True), False)

    model = Twice()
    with pytest.raises(ConfigError, match=r"other is called 2 times .*\n  add, add\n  add\n"):
        fq.prepare(model, only("add"), example=torch.ones(2))
    assert type(model.other) is Other


def test_branches_of_training_mode_in_called_modules() -> None:
    class Auxiliary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.sin()

    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.ModuleList([Auxiliary()])

        def forward(self, x: Tensor) -> Tensor:
            y = x + x.cos()
            return y * self.extra[0](y) if self.training else y

    model = quantized(Trains(), torch.randn(4), rules=fq.Config("", (fq.Rule("", input="int8", ops=("add",)),)))
    model.train()(torch.randn(4))


def test_symbolic_traces_are_refused() -> None:
    model = quantized(Loop(), torch.randn(4), rules=only("add"))
    with pytest.raises(SiteError, match=r"torch\.export"):
        torch.fx.symbolic_trace(model)


class Masks(nn.Module):
    """Adds integers before it adds floats, while an export or a trace runs, or where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.layer = False, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.always or torch.compiler.is_compiling() or torch.jit.is_tracing():
            places = torch.arange(3) + torch.zeros(1, dtype=torch.int64)
            x = x[places]
        return x + self.layer(x)


def test_calls_without_floats_are_not_counted() -> None:
    """Models of transformers compute masks in an export alone, and sizes are tensors while torch.jit traces."""
    x = torch.randn(3, 4)
    model = fq.prepare(Masks().eval(), "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    expected = model(x)
    assert_same_bits([torch.jit.trace(model, (x,))(x), torch.export.export(model, (x,)).module()(x)], [expected] * 2)
    assert_same_bits([torch.compile(model, fullgraph=True, backend="eager")(x)], [expected])
    model.always = True
    assert_same_bits([model(x)], [expected])
    other = Masks().eval()
    other.always = True
    plan = str(site_plan(fq.prepare(other, "int8", x, target="onnxruntime")))
    assert plan == str(site_plan(model))
    assert plan.startswith("_sites.add_0: ")
