"""What the command line advises: presets side by side, and a preset for each layer under a budget."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from fakequant.cli.failures import failures_named
from fakequant.cli.recipe import Recipe
from fakequant.errors import RecipeError
from fakequant.ptq import Compared, Comparison, Ways
from fakequant.ptq import compare as compare_ways
from fakequant.ptq import search as search_mix
from fakequant.text import table


def compare(
    recipe: Recipe, ways: Ways, out: Path | None, told: Callable[[Compared], object], verbose: bool = False
) -> Comparison:
    """The ways to quantize a recipe's model, side by side; by its `evaluate` where it has one."""
    metric = recipe.evaluate if recipe.offers("evaluate") else None
    model = recipe.model()
    with failures_named(model, verbose):
        return compare_ways(model, recipe.calibration_batches(), ways, metric=metric, path=out, told=told)


def search(recipe: Recipe, choices: Sequence[str], budget: dict[str, float | None], verbose: bool = False) -> list[str]:
    """A preset for each layer under one budget of `fakequant.search`, as lines; the mix is measured.

    The last line holds the options by which `fakequant quantize` applies the mix.
    """
    has_floor = budget["floor"] is not None
    if has_floor and not recipe.offers("evaluate"):
        raise RecipeError(
            f"{recipe.path} defines no evaluate(model), which --floor speaks of; add it, or give --bits or --size"
        )
    metric = recipe.evaluate if has_floor else None
    model = recipe.model()
    with failures_named(model, verbose):
        bits, size, floor = (budget[name] for name in ("bits", "size", "floor"))
        batches = recipe.calibration_batches()
        mix = search_mix(model, batches, choices, bits=bits, size=size, metric=metric, floor=floor)
    measured = "" if mix.metric is None else f"evaluate(model) gives {mix.metric:.6g}; "
    return [
        *table(mix.choices.items()).splitlines(),
        f"{mix.bits_per_weight:.3f} bits per weight of these, {mix.size:,} bytes in all, of which "
        f"{sum(mix.in_float.values()):,} stay in float; {measured}error of the output "
        f"{mix.measured:.2e} of its energy, predicted {mix.loss:.2e}",
        shlex.join(["--float", "*", *(word for pair in mix.choices.items() for word in ("--rule", "=".join(pair)))]),
    ]
