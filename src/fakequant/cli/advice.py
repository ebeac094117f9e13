"""What the command line advises: presets side by side, and a preset for each layer under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fakequant.cli.recipe import load_recipe
from fakequant.ptq import Comparison, Ways, allocation
from fakequant.ptq import compare as compare_ways


def compare(recipe: Path, ways: Ways, out: Path | None) -> Comparison:
    """The ways to quantize a recipe's model, side by side; by its `evaluate` where it has one."""
    given = load_recipe(recipe)
    metric = given.evaluate if given.offers("evaluate") else None
    return compare_ways(given.model(), given.calibration_batches(), ways, metric=metric, path=out)


def search(recipe: Path, choices: Sequence[str], bits: float) -> list[str]:
    """A preset for each layer with at most so many bits per weight, as lines; the mix is measured."""
    given = load_recipe(recipe)
    model, batches = given.model(), list(given.calibration_batches())
    scored = allocation.scores(model, batches, choices)
    mix = allocation.verify(model, batches, [scored.allocate(bits=bits)])[0]
    width = max(map(len, mix.choices))
    return [
        *(f"{layer.ljust(width)}  {choice}" for layer, choice in mix.choices.items()),
        f"{mix.bits_per_weight:.3f} bits per weight; error of the output {mix.measured:.2e} of its energy, "
        f"predicted {mix.loss:.2e}",
        f"in a recipe or in Python: fakequant.prepare(model, fakequant.Config('mixed', ()), rules={dict(mix.choices)})",
    ]
