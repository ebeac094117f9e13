"""The commands of `fakequant`: each reads its arguments, calls one function and prints the result."""

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

from fakequant.calibration import DEFAULT_METHOD, calibrators
from fakequant.cli.console import Commands, failures_named, show
from fakequant.errors import RecipeError
from fakequant.model.presets import presets as named_presets
from fakequant.text import fitted, visible

if TYPE_CHECKING:
    from torch import nn

    from fakequant.cli.recipe import Recipe
    from fakequant.ptq import Advice
    from fakequant.ptq.trial import Compared

RecipeFile = Annotated[
    str,
    typer.Argument(
        help="a Python file that defines model() and calibration_batches(), package.module:function, or a folder of "
        "Hugging Face"
    ),
]
TextFile = Annotated[Path | None, typer.Option(help="lines of text for calibration, for a folder of Hugging Face")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="run Python files of a folder of Hugging Face")]

PRESETS, METHODS = tuple(name.lower() for name in named_presets()), tuple(calibrators())


def one_of(help: str, *words: str) -> Any:
    """An option with words that the shell completes; other words are allowed, too."""
    return typer.Option(help=help, autocompletion=lambda incomplete: [w for w in words if w.startswith(incomplete)])


def _written(incomplete: str) -> list[str]:
    """The formats that `deliver` writes, for a shell's completion; imported here, because that takes 0.6 s."""
    from fakequant.delivery.format import delivery_formats

    return [name for name, one in delivery_formats().items() if one.writes and name.startswith(incomplete)]


def _engines(incomplete: str) -> list[str]:
    """The known engines, for a shell's completion; imported here as in `_written`."""
    from fakequant.model.engine import known_engines

    return [name for name in sorted(known_engines()) if name.startswith(incomplete)]


Format = Annotated[
    str,
    typer.Option(
        help="a format of fakequant.deliver; the error for an unknown name lists all", autocompletion=_written
    ),
]
Floats = Annotated[
    list[str] | None, typer.Option("--float", help="a pattern of layers that stay in float; repeat for several")
]
Rules = Annotated[
    list[str] | None, typer.Option(help="PATTERN=PRESET: another preset for some layers; repeat for several")
]
Task = Annotated[
    str,
    one_of(
        "the measure for a folder of Hugging Face: perplexity=TEXT, cosine=TEXT (against float32), accuracy=FILE (CSV "
        "or JSON lines with text and label), auto (by lines of --text) or none",
        *("auto", "none", "perplexity=", "accuracy=", "cosine="),
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="the engine that will run the model, such as onnxruntime, vllm or llama.cpp", autocompletion=_engines
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show the traceback if the model fails on a batch")]


@contextmanager
def _loaded(recipe: str, text: Path | None, trust: bool, quiet: bool, task: str) -> Iterator[Recipe]:
    """A context that yields the recipe, in which counts and other lines are printed on the error stream."""
    from fakequant.cli.recipe import load_recipe
    from fakequant.data.batches import counting

    errors = Console(stderr=True, soft_wrap=True, quiet=quiet)
    with counting(lambda line: errors.print(Text(fitted(line))), bars=not quiet):
        yield load_recipe(recipe, text, trust, task)


def advise(  # noqa: PLR0913  the command's options
    recipe: RecipeFile,
    target: Target = None,
    floor: Annotated[
        float | None,
        typer.Option(
            help="the least result of evaluate(model) or --task that is good enough (perplexity: the most); without "
            "both, the output's signal-to-error ratio in dB"
        ),
    ] = None,
    preset: Annotated[list[str] | None, one_of("a preset to try; repeat the option for several", *PRESETS)] = None,
    work: Annotated[
        Path | None, typer.Option(help="a folder for the results, from which the same command goes on")
    ] = None,
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone")] = False,
    verbose: Verbose = False,
) -> None:
    """Find the smallest quantized form of the recipe's model that is good enough, and how to make it.

    Ctrl-C ends the search, and the best result so far is printed.
    """
    from fakequant import advise as find_advice

    given: dict[str, Any] = {"target": target, "presets": preset, "work": work}
    with _loaded(recipe, text, trust, quiet, task) as loaded, failures_named(model := loaded.model(), verbose):
        given |= {"metric": loaded.metric, "floor": _floor(loaded, floor)}
        found = find_advice(model, loaded.calibration_batches(), progress=not quiet, **given)
    show("\n".join([str(found), *_said(loaded, task), ""]))
    show(_code(found, model, loaded, text, trust, recipe, task), whole=True)
    if found.interrupted:
        raise typer.Exit(130)


def _said(recipe: Recipe, task: str) -> list[str]:
    """A list with a sentence on the measure of a folder; [] for a recipe, or if the user asked for no measure."""
    return [recipe.task.said] if recipe.task.said and task != "none" else []


def _floor(recipe: Recipe, floor: float | None) -> float | None:
    """The floor of the metric, from the figure that the user gives: a perplexity is negated."""
    return floor if floor is None or recipe.metric is None else recipe.metric.shown(floor)


def _code(
    advice: Advice, model: nn.Module, loaded: Recipe, text: Path | None, trust: bool, recipe: str, task: str
) -> str:
    """The code that makes the advised model: `fakequant quantize` if it makes the same model, else Python."""
    import copy

    from fakequant.cli.job import Job
    from fakequant.model.prepare import prepare
    from fakequant.nn.quantizer import quantizers

    way = advice.best.measured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a copy that is not kept
        how: dict[str, Any] = {"improve": way.steps or None, "target": advice.target or None, "task": task}
        job = Job(recipe, way.preset.lower(), way.method, Path("quantized"), text=text, trust=trust, **how)
        config = job.config()
        example, placed = job.example(config, model, loaded), job.target_for(config)
        by_command = [*quantizers(prepare(copy.deepcopy(model), way.preset, example, target=placed))]
    if by_command == advice.quantizers and not advice.folds:
        return f"To make it, with all batches:\n{replace(job, target=placed).command()}"
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


def compare(  # noqa: PLR0913  the command's options
    recipe: RecipeFile,
    preset: Annotated[list[str] | None, one_of("a preset; repeat the option for several", *PRESETS)] = None,
    method: Annotated[list[str] | None, one_of("a method of calibration; repeat for several", *METHODS)] = None,
    improve: Annotated[
        list[str] | None, one_of("none, fast or best; repeat for several", "none", "fast", "best")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="a file of JSON lines; rows that it holds are not run again")] = None,
    plot: Annotated[Path | None, typer.Option(help="an image of the metric over bits per weight")] = None,
    over: Annotated[
        str, one_of("the horizontal axis of --plot: bits or milliseconds", "bits", "milliseconds")
    ] = "bits",
    target: Target = None,
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the table alone, not rows as they come")] = False,
    verbose: Verbose = False,
) -> None:
    """Quantize the recipe's model in many ways, and print the error and the cost of each, the best first."""
    from fakequant.data.batches import say
    from fakequant.ptq import Ways
    from fakequant.ptq import compare as compare_ways
    from fakequant.ptq.comparison import USUAL_WAYS, check_axis, checked_picture, presets_for

    check_axis(over)
    if plot is not None:
        checked_picture(plot, over)
    steps = [None if step == "none" else step for step in improve] if improve else USUAL_WAYS.steps
    ways = Ways(preset or presets_for(target), method or USUAL_WAYS.methods, steps)
    with _loaded(recipe, text, trust, quiet, task) as loaded, failures_named(model := loaded.model(), verbose):
        metric = loaded.metric

        def show_row(row: Compared) -> None:
            say(f"{row if metric is None or row.metric is None else replace(row, metric=metric.shown(row.metric))}")

        how: dict[str, Any] = {"path": out, "on_row": show_row, "metric": metric, "target": target}
        found = compare_ways(model, loaded.calibration_batches(), ways, **how)
    show("\n".join([str(found), *_said(loaded, task)]))
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
        typer.Option(help="take the smallest mix with at least this evaluate(model) or --task (perplexity: at most)"),
    ] = None,
    preset: Annotated[list[str] | None, one_of("a preset to choose from; repeat for several", *PRESETS)] = None,
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone, no counts")] = False,
    verbose: Verbose = False,
) -> None:
    """Find a preset for each layer under a budget: the mix with the smallest error of the model's output."""
    from fakequant.cli.job import Job
    from fakequant.ptq import search as search_mix
    from fakequant.text import table

    choices = preset or ("INT8_WEIGHT_ONLY", "INT4_GROUP32")
    if floor is None and task not in ("auto", "none"):
        raise RecipeError(f"--task {task} is the measure of --floor, which is missing; add --floor, or omit --task")
    with _loaded(recipe, text, trust, quiet, "none" if floor is None else task) as loaded:
        metric = None if floor is None else loaded.metric
        if floor is not None and metric is None:
            why = f"{loaded.path} defines no evaluate(model), which --floor needs; add it, or give --bits or --size"
            raise RecipeError(f"--floor needs a measure. {loaded.task.why_not}" if loaded.task.why_not else why)
        budget: dict[str, Any] = {"bits": bits, "size": size, "floor": _floor(loaded, floor), "metric": metric}
        with failures_named(model := loaded.model(), verbose):
            mix = search_mix(model, loaded.calibration_batches(), choices, **budget)
    measured = ""
    if metric is not None and mix.metric is not None:
        measured = f"{loaded.task.label} gives {metric.shown(mix.metric):.6g}; "
    rules = tuple(map("=".join, mix.choices.items()))
    how: dict[str, Any] = {"floats": ("*",), "rules": rules, "text": text, "trust": trust, "task": task}
    command = Job(recipe, "int8", DEFAULT_METHOD, Path("quantized"), **how).command()
    figures = (
        f"{mix.bits_per_weight:.3f} bits per weight of these, {mix.size:,} bytes in all, of which "
        f"{sum(mix.in_float.values()):,} stay in float; {measured}error of the output "
        f"{mix.measured:.2e} of its energy, predicted {mix.loss:.2e}"
    )
    show(table(mix.choices.items(), [figures]))
    show(command, whole=True)


_START, _CHOOSE = "Start", "Choose presets"
_QUANTIZE, _CHECK = "Quantize and write", "Check and show"
"""The sections of `fakequant --help`."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    # Any exception that arises outside of the recipe is a bug here: the full traceback helps to find it.
    pretty_exceptions_enable=False,
    help="Fake quantization for PyTorch: calibrate, fine-tune, export to ONNX, verify, report.",
)


def _version(asked: bool) -> None:
    if asked:
        from fakequant.version import __version__

        Console().print(Text(f"fakequant {__version__}"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None: ...


@app.command(rich_help_panel=_QUANTIZE)
def quantize(  # noqa: PLR0913  the command's options
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(help="folder for checkpoint, graph.txt, model.onnx and report.html")],
    preset: Annotated[str, one_of("configuration, such as int8, fp8 or int4_weight_only", *PRESETS)] = "int8",
    method: Annotated[str, one_of("calibrator of the activations", *METHODS)] = DEFAULT_METHOD,
    train: Annotated[bool, typer.Option(help="fine-tune with the recipe's train(model), if it is defined")] = True,
    compare: Annotated[bool, typer.Option(help="calibrate with the other methods too, for the report")] = False,
    static: Annotated[bool, typer.Option(help="export for the size of the first batch only")] = False,
    style: Annotated[
        str, one_of("dialect of the ONNX file: portable, standard or trt", "portable", "standard", "trt")
    ] = "portable",
    execution: Annotated[
        str,
        one_of("how layers compute while they are measured: simulate, auto or integer", "simulate", "auto", "integer"),
    ] = "simulate",
    unseen: Annotated[
        str,
        one_of("how to treat layers that no batch reaches: error, float or siblings", "error", "float", "siblings"),
    ] = "error",
    improve: Annotated[
        str | None,
        one_of("choose weights by the error of their layers: fast, or best, which takes more time", "best", "fast"),
    ] = None,
    floats: Floats = None,
    rule: Rules = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="store codes instead of float weights in the checkpoint, which is smaller")
    ] = False,
    text: TextFile = None,
    trust: Trust = False,
    task: Task = "auto",
    target: Target = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the results of another recipe, and start anew")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print errors only")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="print tables of layers, and tracebacks of failing batches")
    ] = False,
) -> None:
    """Quantize the model of a recipe: calibrate, improve, fine-tune, save, export, verify and report.

    The same command goes on after the last step of a run that was interrupted.
    """
    from fakequant.cli.job import Job, run

    kind: dict[str, Any] = {"static": static, "style": style, "execution": execution, "unseen": unseen}
    kind |= {
        "improve": improve,
        "floats": tuple(floats or ()),
        "rules": tuple(rule or ()),
        "packed": packed,
        "trust": trust,
        "task": task,
        "target": target,
    }
    job = Job(recipe, preset, method, out, train, compare, verbose=verbose, text=text, overwrite=overwrite, **kind)
    run(job, Console(quiet=quiet))


@app.command(rich_help_panel=_START)
def init(
    recipe: Annotated[Path, typer.Argument(help="the file to write")] = Path("recipe.py"),
) -> None:
    """Write a recipe to edit; it runs as it is."""
    from fakequant.cli.recipe import write_starter

    write_starter(recipe)
    show(f"Written: {recipe}. Edit what is marked EDIT, then:")
    show(f"fakequant quantize {recipe} --out quantized", whole=True)


@app.command(rich_help_panel=_START)
def presets(name: Annotated[str | None, typer.Argument(help="the preset to show in full")] = None) -> None:
    """List the presets by family: bits per weight, what is quantized, and which engines run it."""
    from fakequant.cli.inspection import preset_lines, preset_text

    if name is not None:
        show(preset_text(name))
        return
    show("\n".join(preset_lines()))
    show("Bits count the scales of a layer of 4,096 by 4,096. `fakequant presets NAME` shows all of one.")


@app.command(rich_help_panel=_CHECK)
def inspect(
    what: Annotated[Path, typer.Argument(help="a checkpoint folder, its parent folder, or an ONNX file")],
    graph: Annotated[
        bool, typer.Option("--graph", help="show the graph of the model instead, with every operation")
    ] = False,
) -> None:
    """Show which tensors of a checkpoint or an exported ONNX file are quantized, and how."""
    from fakequant.cli.inspection import graph_text
    from fakequant.cli.inspection import inspect as look
    from fakequant.report.terminal import print_table

    if graph:  # whose lines are statements
        show(visible(graph_text(what), keep="\n"), whole=True)
        return
    inspection = look(what)
    print_table(Console(), inspection.title, inspection.header, inspection.rows)


@app.command(rich_help_panel=_CHECK)
def report(
    first: Annotated[Path, typer.Argument(help="a folder of `fakequant quantize`, or a page of fakequant.report")],
    second: Annotated[Path | None, typer.Argument(help="another folder or page, to show both side by side")] = None,
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    compare: Annotated[Path | None, typer.Option(help="rows that fakequant.compare wrote, for a curve")] = None,
) -> None:
    """Show two runs side by side on one page, or write the page of a run anew from its figures."""
    from fakequant.report import comparison_of, read_results, report_pair, write_report

    if compare is not None and second is not None:
        raise typer.BadParameter(
            "--compare adds a curve to the page of a single run; leave out --compare or the second run"
        )
    if second is not None:
        page = report_pair(first, second, out)
    else:
        curve = None if compare is None else comparison_of(compare)
        found = read_results(first)
        page = write_report(out, found if curve is None else replace(found, curve=curve))
    show(f"Written: {page}")


@app.command(rich_help_panel=_CHECK)
def verify(
    file: Annotated[Path, typer.Argument(help="a file of export_onnx, or a file or folder of `fakequant deliver`")],
    recipe: Annotated[str | None, typer.Option(help="recipe of the model, to compare weights and outputs")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="checkpoint of the model; by default `checkpoint` in the folder of the file")
    ] = None,
    text: TextFile = None,
    trust: Trust = False,
) -> None:
    """Compare every quantizer of an ONNX file with fakequant bit for bit, or a delivered file with its model.

    The exit status is 1 if a quantizer differs, or ONNX Runtime's default session loses more than quantization itself.
    A file in the style standard or trt that ONNX Runtime cannot load runs in onnx's ReferenceEvaluator. A delivered
    file needs the recipe; the installed programs that load it also run it.
    """
    from fakequant.cli.inspection import verify_file

    report = verify_file(file, recipe, checkpoint, text, trust)
    show(visible(str(report), keep="\n"))
    if not report.passed:
        raise typer.Exit(1)


@app.command(rich_help_panel=_QUANTIZE)
def deliver(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(help="the folder to write, or the file for a format of one file")],
    checkpoint: Annotated[Path, typer.Option(help="checkpoint of the quantized model")] = Path("quantized/checkpoint"),
    format: Format | None = None,
    target: Target = None,
    text: TextFile = None,
    trust: Trust = False,
) -> None:
    """Write a quantized model in a format that other programs load, with unchanged codes.

    Without --format, the format is the one that --target loads, or compressed-tensors.
    """
    from fakequant.cli.inspection import deliver_model
    from fakequant.cli.recipe import load_recipe
    from fakequant.delivery.delivering import format_for
    from fakequant.delivery.format import delivery_format

    format = format_for(format if format or target else "compressed-tensors", target)
    delivery_format(format)  # refused before the model is made
    path = deliver_model(load_recipe(recipe, text, trust), checkpoint, out, format)
    words = ("fakequant", "verify", f"{path}", "--recipe", recipe, "--checkpoint", f"{checkpoint}")
    show(f"Written: {path}. Compare it:")
    show(shlex.join(words), whole=True)


@app.command("improve-folder", rich_help_panel=_QUANTIZE)
def improve_folder(  # noqa: PLR0913  the command's options
    folder: Annotated[Path, typer.Argument(help="a folder of Hugging Face, with its tokenizer")],
    out: Annotated[Path, typer.Option(help="the folder to write, or the file for a format of one file")],
    text: TextFile = None,
    preset: Annotated[str, one_of("such as int4_group128 or nvfp4_weight_only", *PRESETS)] = "int4_group128",
    steps: Annotated[str, one_of("fast, or best, which takes more time", "fast", "best")] = "fast",
    format: Format = "compressed-tensors",
    floats: Floats = None,
    rule: Rules = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print errors only")] = False,
) -> None:
    """Quantize a model larger than memory: choose its weights a block at a time, and write it as `deliver` does.

    The same command goes on after the last finished block of a run that was interrupted.
    """
    from fakequant.cli.huggingface import improve_by_text
    from fakequant.cli.job import Job

    config = Job(folder, preset, DEFAULT_METHOD, out, floats=tuple(floats or ()), rules=tuple(rule or ())).config()
    improve_by_text(folder, out, text, config, steps, format, Console(quiet=quiet))


for _command in (advise, compare, search):
    app.command(rich_help_panel=_CHOOSE)(_command)


@app.command(rich_help_panel=_START)
def doctor() -> None:
    """Show the versions, the compiler, the GPU, and for each backend whether it works or why it does not."""
    from fakequant.report import environment
    from fakequant.report.terminal import print_table

    print_table(Console(), "Environment", ("what", "value"), list(environment().items()))
