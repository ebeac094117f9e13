"""Cross-layer equalization: which layers are pairs, that the float function stays, and what it wins back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.data.batches import run_batch
from fakequant.errors import ConfigError
from fakequant.model.run.recorded import having
from fakequant.nn.functions import Trait
from fakequant.ptq import equalize
from fakequant.ptq.channel_scales import OutputCheck
from tests.support.architectures import changed_alike, each_architecture, relative
from tests.support.bits import assert_same_bits, unchanged
from tests.support.functional_models import Calls
from tests.support.interruption import InterruptedForward
from tests.support.kept import kept

TENSORS = fq.Config("tensors", (fq.Rule(input="int8", weight="int8"),))
FACTORS = torch.logspace(-1, 1, 8)[:, None, None, None]


def chain() -> nn.Sequential:
    """Convolutions with unlike channels, a depthwise one and one with groups, and linear layers behind a pool."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 12, 1, groups=2, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout()),
        *(nn.Linear(12, 7), nn.GELU(), nn.Linear(7, 2)),
    )
    with torch.no_grad():
        model[0].weight *= FACTORS
        model[2].weight /= FACTORS
    return model.eval()


def images() -> Tensor:
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def test_the_float_function_stays_and_the_quantized_one_comes_closer() -> None:
    model, x = chain(), images()
    before, parameters = model(x), list(model.parameters())
    found = equalize(model, x, TENSORS)
    assert [(pair.layer, pair.readers, pair.note) for pair in found.pairs] == [
        ("0", ("2",), ""),
        ("2", ("4",), ""),
        ("4", ("8",), ""),
    ]
    assert relative(model(x), before) < 1e-6
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert found.after < 0.1 * found.before
    ranges = [model[0].weight.abs().amax((1, 2, 3)), model[2].weight.abs().amax((1, 2, 3))]
    assert all(float(each.max() / each.min()) < 8 for each in ranges)  # 100 before
    assert str(found).splitlines()[1].split() == ["0", "2", f"{found.pairs[0].factor:.3g}", "equalized"]


def test_siblings_share_a_factor() -> None:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(6, 8), "left": nn.Linear(8, 3), "right": nn.Linear(8, 2)}
    model, x = Calls(lambda m, x: (m.left(x := m.first(x).relu()), m.right(x)), **layers), torch.randn(16, 6)
    with torch.no_grad():
        model.first.weight *= FACTORS.view(-1, 1)
        model.left.weight /= FACTORS.flatten()
        model.right.weight /= FACTORS.flatten()
    before = model(x)
    found = equalize(model, x, TENSORS)
    assert [(pair.layer, pair.readers, pair.note) for pair in found.pairs] == [("first", ("left", "right"), "")]
    assert max(map(relative, model(x), before)) < 1e-6


class Two(nn.Module):
    """Two layers, and what calls them."""

    def __init__(self, call: Callable[[nn.Module, nn.Module, Tensor], Tensor], change: str = "") -> None:
        super().__init__()
        self.first, self.second, self._call = nn.Linear(4, 4), nn.Linear(4, 4), call
        if change == "tie":
            self.second.weight = self.first.weight
        elif change == "hook":
            self.first.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.first, self.second, x)


def residual(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return (hidden := first(x).relu()) + second(hidden)


def mixing(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    """With a function that keeps scales elsewhere, and here mixes the channels."""
    return second(nn.functional.max_pool1d(first(x), 3, 1, 1))


STAY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (lambda: Two(residual), "something else than a layer reads the output or a parameter"),
    "called twice": (lambda: Two(lambda one, two, x: two(two(one(x)))), "a layer is called several times"),
    "shared weight": (lambda: Two(lambda one, two, x: two(one(x)), "tie"), "layers share a parameter"),
    "hook": (lambda: Two(lambda one, two, x: two(one(x)), "hook"), "a weight is computed, or a layer has hooks"),
    "computed weight": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
        "",
    ),
    "other channels": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(8, 1)),
        "a layer after it has other channels",
    ),
    "mixed channels": (lambda: Two(mixing), "the model's output would change by"),
}


@pytest.mark.parametrize("name", STAY)
def test_what_is_no_pair_stays_and_says_why(name: str) -> None:
    torch.manual_seed(0)
    model, x = STAY[name][0](), torch.randn(16, 4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(torch.logspace(-1, 1, weight.numel()).view_as(weight))
    why = STAY[name][1]
    with unchanged(model):
        found = equalize(model, x, TENSORS)
    assert [pair.note[: len(why)] for pair in found.pairs[:1]] == ([why] if why else [])
    assert found.after == found.before


def test_one_wrong_pair_does_not_keep_others_from_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Two(mixing)), torch.randn(16, 4)
    with torch.no_grad():
        model[0].weight *= torch.logspace(-2, 2, 4).view(-1, 1)
        model[2].first.weight /= torch.logspace(-2, 2, 4)
    before = model(x)
    found = equalize(model, x, TENSORS)
    assert [(pair.layer, not pair.note) for pair in found.pairs] == [("0", True), ("2.first", False)]
    assert relative(model(x), before) < 1e-5
    assert found.after < found.before


def test_what_does_not_help_is_not_done() -> None:
    model, x = chain(), images()
    with unchanged(model):
        found = equalize(model, x, fq.Config("channels", (fq.Rule(weight="int8 per_channel(0)"),)))
    assert found.after == found.before
    assert {pair.note[:22] for pair in found.pairs} == {"the error would become"}


def test_turns_together_stay_within_the_bound() -> None:
    """The scale of a nearly dead channel does not make its bias, and so its activations, huge."""
    model, x = chain(), images()
    with torch.no_grad():
        model[0].weight[0] *= 1e-12
        model[2].weight[1] *= 1e-12
    assert max(pair.factor for pair in equalize(model, x, TENSORS).pairs) == pytest.approx(256)


def test_nothing_changes_after_an_error() -> None:
    model = chain()
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        equalize(model, images(), TENSORS, forward=InterruptedForward(8))


def test_what_cannot_be_checked_is_refused() -> None:
    model, x = chain(), images()
    with pytest.raises(ConfigError, match=r"output of the model holds NaN or inf for this batch; pass another batch"):
        equalize(model, x * torch.inf, TENSORS)
    noisy, numbers = nn.Sequential(nn.Linear(4, 4)), itertools.count(1.0)
    with pytest.raises(ConfigError, match=r"two runs of the model differ by .* of the output"):
        equalize(noisy, x, TENSORS, forward=lambda model, batch: model(torch.full((2, 4), next(numbers))))
    with pytest.raises(ConfigError, match=r"equalize takes a float model; call it before fakequant.prepare"):
        equalize(fq.prepare(chain(), "INT8"), x, TENSORS)
    with pytest.raises(ConfigError, match=r"config quantizes no layer of the model; pass the configuration"):
        equalize(model, x, fq.Config("nothing", ()))


SCALES = having(Trait.SCALES)
CALLS: dict[str, tuple[Any, ...]] = {
    **{name: (2,) for name in SCALES if "pool" in name and not name.startswith("adaptive")},
    **{name: (1,) for name in SCALES if name.startswith("adaptive")},
    **{"dropout": (0.5, False), "to": (torch.float32,), "view": (-1,), "reshape": ((-1,),)},
    **{"permute": ((0, 2, 1),), "transpose": (0, 1)},
}


@pytest.mark.parametrize("name", sorted(SCALES))
def test_functions_between_layers_keep_scales(name: str) -> None:
    axes = int(name[-2]) if name.endswith("d") and name[-2].isdigit() else 1
    x = torch.randn(2, 3, *(4 for _ in range(axes)), generator=torch.Generator().manual_seed(0))
    function = next(f for of in (nn.functional, torch, Tensor) if (f := getattr(of, name, None)) is not None)
    args = CALLS.get(name, ())
    assert_same_bits(function(8 * x, *args), 8 * function(x.clone(), *args))  # powers of two round nothing


def test_an_output_of_another_length_is_another_output() -> None:
    class Positive(nn.Linear):
        """Gives as many values as are positive, as a detector gives what it finds."""

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y[y > 0]

    torch.manual_seed(0)
    model, x = Positive(4, 4), torch.randn(16, 4)
    check = OutputCheck(model, kept([x]))
    assert check.why_not() is None
    with torch.no_grad():
        model.bias += 1
    assert check.difference() == float("inf")
    assert check.why_not() == "the model's output would change by inf of its size"


@each_architecture(["nn LSTM", "nn GAN generator", "nn UNet", "nn TransformerEncoder"])
def test_architectures_keep_their_float_function(name: str) -> None:
    found = changed_alike(name, lambda model, batch: equalize(model, batch, TENSORS, forward=run_batch))
    assert found.after <= found.before


def test_layers_stay_where_the_batch_does_not_reach_another_reader() -> None:
    torch.manual_seed(0)
    heads = {name: nn.Conv2d(4, 2, 1) for name in ("last", "other")}  # the other one for training alone

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x).relu()
        return m.last(x) + m.other(x) if m.training else m.last(x)

    model = Calls(forward, first=nn.Conv2d(3, 4, 1), **heads).eval()
    with torch.no_grad():
        model.first.weight[1] *= 100
    found = equalize(model, torch.randn(2, 3, 5, 5), TENSORS)
    assert ["this batch does not reach other.weight" in row.note for row in found.pairs] == [True]


@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 5))])
@pytest.mark.parametrize("transform", ["rotate", "equalize"])
@pytest.mark.parametrize("width", [8, 6])
def test_modules_of_jit_beside_the_layers_are_left(make: Any, transform: str, width: int) -> None:
    """Channels stay where a weight of torch.jit has as many, because no run shows who reads it."""
    torch.manual_seed(0)
    x, part = torch.randn(4, 5), nn.Sequential(nn.Linear(5, 6), nn.ReLU())
    pair = nn.RMSNorm(width) if transform == "rotate" else nn.ReLU()
    model = nn.Sequential(make(part), nn.Linear(6, width), pair, nn.Linear(width, 4))
    with torch.no_grad():
        model[1].weight[1] *= 100
    before, inner = model(x), [p.clone() for p in part.parameters()]
    weight = model[3].weight.clone()
    found = fq.ptq.rotate(model, x) if transform == "rotate" else equalize(model, x, TENSORS)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, model[3].weight) == (width == 6)
    assert ("torch.jit does not show whether a run reads it" in str(found)) == (width == 6)
    assert all(torch.equal(one, other) for one, other in zip(inner, part.parameters(), strict=True))


def test_what_checks_the_function_multiplies_exactly_whatever_is_allowed() -> None:
    seen = list[Any]()

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision))
            return super().forward(x)

    given, before = [torch.randn(2, 4)], torch.get_float32_matmul_precision()
    model = nn.Sequential(Seeing(4, 4), nn.ReLU(), nn.Linear(4, 4))
    try:
        torch.set_float32_matmul_precision("high")
        OutputCheck(model, kept(given)).why_not()
        fq.ptq.improve(fq.prepare(model, "int4_weight_only", skip=["0"]), given, "fast", progress=False)
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert {*seen} == {("ieee", "ieee")}
    assert after == "high"
