"""One measure of how far outputs are, for all that judge by it: each output as a share of its own energy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.run.outputs import Distance, OutputDistance, Power, decibels, named_tensors, shown_place
from fakequant.ptq import Ways
from tests.support.kept import kept

ROWS = [torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@dataclass
class Found:
    boxes: Tensor
    scores: Tensor


class Detector(nn.Module):
    """Boxes in pixels and scores in 0 .. 1, in an output of some kind."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.boxes, self.scores = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 8)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        x = self.body(x).relu()
        return self.wrap(1000 * self.boxes(x), self.scores(x).sigmoid())


WRAPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda boxes, scores: (boxes, scores),
    "dict": lambda boxes, scores: {"boxes": boxes, "scores": scores},
    "dataclass": Found,
    "nested": lambda boxes, scores: [{"image": 0, "found": (boxes, scores)}],
    "a list of levels": lambda boxes, scores: [boxes, scores, 1e-3 * scores],
}
LOW = fq.presets.INT8_WEIGHT_ONLY.with_rule(fq.Rule("scores", weight="int2 per_channel(0)"))


@pytest.mark.parametrize("name", WRAPS)
def test_a_head_of_small_values_counts_as_much_as_one_of_large_values(name: str) -> None:
    """The energies of all outputs together gave 60 dB and more."""
    model = fq.prepare(Detector(WRAPS[name]), LOW)
    worst, *others = fq.sensitivity(model, ROWS)
    assert worst.layer == "scores"
    assert worst.value < 35 < 45 < others[0].value
    assert worst.worst is not None
    assert worst.worst < worst.value
    assert worst.output.endswith(("scores", "[1]", "[2]"))
    assert f"{worst.output} {worst.worst:.1f}" in repr(fq.sensitivity(model, ROWS))


@pytest.mark.parametrize("name", WRAPS)
def test_all_measures_give_the_mean_share(name: str) -> None:
    net = Detector(WRAPS[name])
    model = fq.prepare(copy.deepcopy(net), fq.presets.INT4_WEIGHT_ONLY)
    judged = OutputDistance(net, kept(ROWS[1::2])).of(model)  # by the batches that are held back
    shares, mean = judged.shares, judged.mean
    (row,) = fq.compare(net, ROWS, Ways(["INT4_WEIGHT_ONLY"], steps=[None])).rows
    assert row.error == mean
    assert row.worst == f"worst {shown_place(max(shares, key=shares.__getitem__))} {max(shares.values()):.2e}"
    scores = fq.ptq.scores(net, ROWS, ["INT4_WEIGHT_ONLY"], progress=False)
    mix = scores.allocate(bits=16)
    assert fq.ptq.verify(net, ROWS, [mix])[0].measured == mean
    assert mix.loss == pytest.approx(mean, rel=0.3)  # an estimate: by random directions, to the first order


def test_all_outputs_count() -> None:
    """One method leaves least of large values, another one of small values: the sum saw the large ones alone."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.large, self.small = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            heavy = x.clone()
            heavy[:, 0] = 1e2 * x[:, 0] * (x[:, 0].abs() > 3)
            return 1e4 * self.large(x), self.small(heavy)

    batches = [torch.randn(256, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    errors, sums = {}, {}
    for method in ("mse", "max", "percentile", "entropy"):
        model = fq.prepare(Two(), "INT8")
        fq.calibrate(model, [x for number, x in enumerate(batches) if number % 4 != 1], method)
        held = batches[1], batches[5]
        errors[method] = OutputDistance(Two(), kept(held)).of(model).mean
        power = Power()
        for x in held:
            for exact, found in zip(Two()(x), model(x), strict=True):
                power.add(exact, found)
        sums[method] = power.share

    def chosen(found: dict[str, float]) -> str:
        least = min(found, key=found.__getitem__)
        return least if found[least] < 0.9 * found["mse"] else "mse"

    assert chosen(sums) == "mse"
    assert chosen(errors) != "mse"


def test_each_call_of_a_shared_head_counts_as_a_share_of_its_own_energy() -> None:
    """The levels of a pyramid through one head: the small level is rounded to nothing, and the sum did not see it."""

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.head(x), self.head(1e-3 * x)]

    model = fq.prepare(Pyramid(), "INT8")
    fq.calibrate(model, ROWS, "max")
    found = fq.layer_sqnr(model, ROWS)["head._input_quantizer"]
    assert found == pytest.approx(10 * math.log10(2), abs=0.1)  # one of two calls is lost
    assert fq.sensitivity(model, ROWS)[0].value < 10
    one = fq.prepare(nn.Sequential(nn.Linear(16, 4)), "INT8")
    fq.calibrate(one, ROWS, "max")
    assert fq.layer_sqnr(one, ROWS)["0._input_quantizer"] > 35


@pytest.mark.parametrize(
    ("exact", "approximate", "share"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.0, math.nan], [1.1, math.nan], 0.01),
        ([1.0, -math.inf], [1.1, -math.inf], 0.01),
        ([1.0, -math.inf], [1.0, 0.0], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 0.1], 1.0),
        ([1.0, 2.0], [1.0], math.inf),
        ([3e38, 3e38], [-3e38, -3e38], 4.0),  # their difference overflows float32
        ([1e-30, 1e-30], [-1e-30, -1e-30], 4.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares(exact: list[float], approximate: list[float], share: float, dtype: torch.dtype) -> None:
    power = Power()
    power.add(torch.tensor(exact, dtype=dtype), torch.tensor(approximate, dtype=dtype))
    assert power.share == pytest.approx(share, rel=1e-5)
    assert decibels(power.share) == (math.inf if not share else pytest.approx(-10 * math.log10(share), rel=1e-5))


def test_outputs_that_come_or_go_are_infinitely_far() -> None:
    """A detector may find another number of things when it is quantized."""
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for exact, approximate in ((one, two), (two, one)):
        found = Distance()
        found.add(exact, approximate)
        assert (found.mean, found.worst) == (math.inf, "b")

    class Finds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 64)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.layer(x)
            return [y[y > 0.01], *([y] if float(y.sum()) == 0 else [])]

    model = fq.prepare(Finds(), fq.presets.INT4_WEIGHT_ONLY)
    assert [found.value for found in fq.sensitivity(model, ROWS)] == [-math.inf]


def test_keys_that_print_alike_stay_apart() -> None:
    found = named_tensors({1: torch.ones(1), "1": torch.zeros(1), "x": {"y": [torch.ones(2), torch.arange(2)]}})
    assert [shown_place(place) for place in found] == ["[1]", "1", "x.y[0]"]


@pytest.mark.parametrize(
    "outputs", [lambda y: y.cfloat(), lambda y: torch.fft.rfft(y), lambda y: torch.fft.fft(y).conj()]
)
def test_a_complex_output_has_an_error(outputs: Any) -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.own = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return outputs(self.own(x))

    batches = [torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model, exact = fq.prepare(Spectrum(), "int8"), Spectrum()
    fq.calibrate(model, batches, progress=False)
    with torch.no_grad():
        y, found = exact(batches[1]), model(batches[1])
        share = float((y - found).abs().double().square().sum() / y.abs().double().square().sum())
    assert OutputDistance(exact, kept(batches[1:2])).of(model).mean == pytest.approx(share, rel=1e-5)
    assert 20 < fq.sensitivity(model, batches, progress=False)[0].value < 80
    assert fq.ptq.improve(model, batches, "fast", progress=False).before == pytest.approx(share, rel=1e-5)
