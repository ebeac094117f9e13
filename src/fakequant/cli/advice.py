"""The commands that choose presets: the smallest that is good enough, many side by side, one for each layer."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fakequant.cli.failures import failures_named
from fakequant.cli.options import METHODS, PRESETS, RecipeFile, Target, Task, TextFile, Trust, Verbose, one_of
from fakequant.errors import RecipeError

if TYPE_CHECKING:
    from torch import nn

    from fakequant.cli.recipe import Recipe
    from fakequant.ptq import Advice
    from fakequant.ptq.formats.comparison import Compared


@contextmanager
def _loaded(recipe: str, text: Path | None, trust: bool, quiet: bool, task: str) -> Iterator[Recipe]:
    """The recipe, in a context that tells counts and other lines on the error stream."""
    from fakequant.cli.recipe import load_recipe
    from fakequant.data.progress import counting

    errors = Console(stderr=True, soft_wrap=True, quiet=quiet)
    with counting(lambda line: errors.print(Text(line)), bars=not quiet):
        yield load_recipe(recipe, text, trust, task)


def advise(  # noqa: PLR0913  the command's options
    recipe: RecipeFile,
    target: Target = None,
    floor: Annotated[
        float | None,
        typer.Option(
            help="what is good enough: of evaluate(model), of --task (the most for perplexity), else dB of the "
            "output's error"
        ),
    ] = None,
    preset: Annotated[list[str] | None, one_of("a preset to try; repeat the option for several", *PRESETS)] = None,
    work: Annotated[Path | None, typer.Option(help="a folder from which the same command goes on")] = None,
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone")] = False,
    verbose: Verbose = False,
) -> None:
    """Find the smallest quantized form of the recipe's model that is good enough, and how to make it.

    Ctrl-C ends the search with what was found so far.
    """
    from fakequant import advise as find_advice

    given: dict[str, Any] = {"target": target, "presets": preset, "work": work}
    with _loaded(recipe, text, trust, quiet, task) as loaded, failures_named(model := loaded.model(), verbose):
        given |= {"metric": loaded.metric, "floor": _floor(loaded, floor)}
        found = find_advice(model, loaded.calibration_batches(), progress=not quiet, **given)
    parts = [str(found), *_said(loaded, task), "", _code(found, model, loaded, text, trust, recipe, task)]
    Console(soft_wrap=True).print(Text("\n".join(parts)))
    if found.interrupted:
        raise typer.Exit(130)


def _said(recipe: Recipe, task: str) -> list[str]:
    """What was measured of a folder, or why nothing was, unless the user said so."""
    return [recipe.task.said] if recipe.task.said and task != "none" else []


def _floor(recipe: Recipe, floor: float | None) -> float | None:
    """What the metric must reach; the user gives the figure that is shown."""
    return floor if floor is None or recipe.metric is None else recipe.metric.shown(floor)


def _code(
    advice: Advice, model: nn.Module, loaded: Recipe, text: Path | None, trust: bool, recipe: str, task: str
) -> str:
    """How to make what was found: by `fakequant quantize` where this makes the same model, else in Python."""
    import copy

    from fakequant.calibration import DEFAULT_METHOD
    from fakequant.cli.settings import Job
    from fakequant.model.prepare import prepare
    from fakequant.nn.quantizer import quantizers

    way = advice.best.measured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a copy that is not kept
        job = Job(recipe, way.preset, way.method, Path("quantized"), target=advice.target or None)
        example = job.example(job.config(), model, loaded)
        placed = None if example is None else job.target
        by_command = [*quantizers(prepare(copy.deepcopy(model), way.preset, example, target=placed))]
    if by_command == advice.quantizers and not advice.folds:
        method = [] if way.method == DEFAULT_METHOD else ["--method", way.method]
        improve = ["--improve", way.steps] if way.steps else []
        words = ["--preset", way.preset.lower(), *method, *improve, *(["--target", placed] if placed else [])]
        return (
            f"To make it, with all batches:\nfakequant quantize {_shown(recipe, text, trust, task)} {shlex.join(words)}"
        )
    lacks = "folds no batch normalisations" if advice.folds else "puts quantizers elsewhere"
    given = ", ".join([repr(str(recipe)), *([] if text is None else [f"Path({str(text)!r})"])])
    return "\n".join(
        [
            f"To make it, in Python (fakequant quantize {lacks}):",
            "from pathlib import Path" if text is not None else "",
            "from fakequant.cli.recipe import load_recipe",
            f"recipe = load_recipe({given}{', trust=True' if trust else ''})",
            "model, batches = recipe.model(), [*recipe.calibration_batches()]",
            advice.call,
        ]
    ).replace("\n\n", "\n")


def _shown(recipe: str, text: Path | None, trust: bool, task: str) -> str:
    """A recipe and where it is written, as words of a command."""
    given = [recipe, *([] if text is None else ["--text", str(text)]), *(["--trust-remote-code"] if trust else [])]
    given += [] if task == "auto" else ["--task", task]
    return f"{shlex.join(given)} --out quantized"


def compare(  # noqa: PLR0913  the command's options
    recipe: RecipeFile,
    preset: Annotated[list[str] | None, one_of("a preset; repeat the option for several", *PRESETS)] = None,
    method: Annotated[list[str] | None, one_of("a method of calibration; repeat for several", *METHODS)] = None,
    improve: Annotated[
        list[str] | None, one_of("none, fast or best; repeat for several", "none", "fast", "best")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="a file of JSON lines; rows that it holds are not run again")] = None,
    plot: Annotated[Path | None, typer.Option(help="an image of the metric over bits per weight")] = None,
    over: Annotated[str, one_of("what --plot draws it over: bits or milliseconds", "bits", "milliseconds")] = "bits",
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the table alone, not rows as they come")] = False,
    verbose: Verbose = False,
) -> None:
    """Quantize the recipe's model in many ways, and print what each gives and costs, the best first."""
    from fakequant.data.progress import say
    from fakequant.ptq import Ways
    from fakequant.ptq import compare as compare_ways
    from fakequant.ptq.formats.comparison import USUAL_WAYS, check_axis, checked_picture

    check_axis(over)
    if plot is not None:
        checked_picture(plot, over)
    steps = [None if step == "none" else step for step in improve] if improve else USUAL_WAYS.steps
    ways = Ways(preset or USUAL_WAYS.presets, method or USUAL_WAYS.methods, steps)
    with _loaded(recipe, text, trust, quiet, task) as loaded, failures_named(model := loaded.model(), verbose):
        metric = loaded.metric

        def show(row: Compared) -> None:
            say(f"{row if metric is None or row.metric is None else replace(row, metric=metric.shown(row.metric))}")

        how: dict[str, Any] = {"path": out, "on_row": show, "metric": metric}
        found = compare_ways(model, loaded.calibration_batches(), ways, **how)
    Console(soft_wrap=True).print(Text("\n".join([str(found), *_said(loaded, task)])))
    if plot is not None:
        found.plot(plot, over)


def search(  # noqa: PLR0913  the command's options
    recipe: RecipeFile,
    bits: Annotated[
        float | None, typer.Option(help="the largest number of bits per quantized weight, scales included")
    ] = None,
    size: Annotated[
        float | None, typer.Option(help="the largest number of bytes of all parameters, also of those in float")
    ] = None,
    floor: Annotated[
        float | None,
        typer.Option(help="the smallest mix with at least this evaluate(model) or --task; at most, for perplexity"),
    ] = None,
    preset: Annotated[list[str] | None, one_of("a preset to choose from; repeat for several", *PRESETS)] = None,
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone, no counts")] = False,
    verbose: Verbose = False,
) -> None:
    """Find a preset for each layer under a budget: the mix with the smallest error of the model's output."""
    from fakequant.ptq import search as search_mix
    from fakequant.text import table

    choices = preset or ("INT8_WEIGHT_ONLY", "INT4_GROUP32")
    if floor is None and task not in ("auto", "none"):
        raise RecipeError(f"--task {task} is what --floor speaks of, and it was not given; add it, or leave --task out")
    with _loaded(recipe, text, trust, quiet, "none" if floor is None else task) as loaded:
        metric = None if floor is None else loaded.metric
        if floor is not None and metric is None:
            why = f"{loaded.path} defines no evaluate(model), which --floor speaks of; add it, or give --bits or --size"
            raise RecipeError(f"--floor needs a measure. {loaded.task.why_not}" if loaded.task.why_not else why)
        budget: dict[str, Any] = {"bits": bits, "size": size, "floor": _floor(loaded, floor), "metric": metric}
        with failures_named(model := loaded.model(), verbose):
            mix = search_mix(model, loaded.calibration_batches(), choices, **budget)
    measured = ""
    if metric is not None and mix.metric is not None:
        measured = f"{loaded.task.label} gives {metric.shown(mix.metric):.6g}; "
    rules = ["--float", "*", *(word for pair in mix.choices.items() for word in ("--rule", "=".join(pair)))]
    figures = (
        f"{mix.bits_per_weight:.3f} bits per weight of these, {mix.size:,} bytes in all, of which "
        f"{sum(mix.in_float.values()):,} stay in float; {measured}error of the output "
        f"{mix.measured:.2e} of its energy, predicted {mix.loss:.2e}"
    )
    command = f"fakequant quantize {_shown(recipe, text, trust, task)} {shlex.join(rules)}"
    Console(soft_wrap=True).print(Text(f"{table(mix.choices.items(), [figures])}\n{command}"))
