"""The commands of `fakequant`: each reads its arguments, calls one function and prints the result."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fakequant.calibration import DEFAULT_METHOD
from fakequant.cli import advice
from fakequant.cli.failures import Commands
from fakequant.cli.options import (
    METHODS,
    PRESETS,
    Floats,
    Format,
    RecipeFile,
    Rules,
    Target,
    Task,
    TextFile,
    Trust,
    one_of,
)

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


@app.command()
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
        one_of("choose weights by the error of their layers: best, or fast, which takes less", "best", "fast"),
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


@app.command()
def init(
    recipe: Annotated[Path, typer.Argument(help="the file to write")] = Path("recipe.py"),
) -> None:
    """Write a recipe to edit; it runs as it is."""
    from fakequant.cli.recipe import write_starter

    write_starter(recipe)
    Console(soft_wrap=True).print(
        Text(f"Written: {recipe}. Edit what is marked EDIT, then: fakequant quantize {recipe} --out quantized")
    )


@app.command()
def presets() -> None:
    """List the presets: bits per weight, and what is quantized."""
    from fakequant.cli.inspection import preset_lines

    console = Console(soft_wrap=True)
    console.print(Text("\n".join(preset_lines())))
    console.print(Text("Bits per weight count the scales of a layer of 4,096 by 4,096."))


@app.command()
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
    from fakequant.text import visible

    if graph:
        Console(soft_wrap=True).print(Text(visible(graph_text(what), keep="\n")))
        return
    inspection = look(what)
    print_table(Console(), inspection.title, inspection.header, inspection.rows)


@app.command()
def report(
    first: Annotated[Path, typer.Argument(help="a folder of `fakequant quantize`, or a page of fakequant.report")],
    second: Annotated[Path | None, typer.Argument(help="another one, to set both side by side")] = None,
    out: Annotated[Path, typer.Option(help="the page to write")] = Path("report.html"),
    compare: Annotated[Path | None, typer.Option(help="rows that fakequant.compare wrote, for a curve")] = None,
) -> None:
    """Set two runs side by side on one page, or write the page of one run anew from its figures."""
    from fakequant.report import curve_of, read_results, report_pair, write_report

    if compare is not None and second is not None:
        raise typer.BadParameter("--compare is for the page of one run; leave OTHER out")
    if second is not None:
        page = report_pair(first, second, out)
    else:
        curve, measured = ([], "") if compare is None else curve_of(compare)
        found = read_results(first)
        page = write_report(out, found if not curve else replace(found, curve=curve, curve_metric=measured))
    Console(soft_wrap=True).print(Text(f"Written: {page}"))


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="a file written by export_onnx, or what `fakequant deliver` wrote")],
    recipe: Annotated[str | None, typer.Option(help="recipe of the model, to compare weights and outputs")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="checkpoint of the model; by default `checkpoint` in the folder of the file")
    ] = None,
    text: TextFile = None,
    trust: Trust = False,
) -> None:
    """Compare every quantizer of an ONNX file with fakequant bit for bit, or a delivered file with its model.

    The exit status is 1 if one differs, or if ONNX Runtime's default session loses more than quantization itself.
    A file in the style standard or trt that ONNX Runtime cannot load runs in onnx's ReferenceEvaluator. A delivered
    file needs the recipe; the programs that load it are asked where they are installed.
    """
    from fakequant.cli.verification import verify_file
    from fakequant.text import visible

    report = verify_file(file, recipe, checkpoint, text, trust)
    Console(soft_wrap=True).print(Text(visible(str(report), keep="\n")))
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def deliver(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(help="the folder to write, or the file of a format that is one")],
    checkpoint: Annotated[Path, typer.Option(help="checkpoint of the quantized model")] = Path("quantized/checkpoint"),
    format: Format = "compressed-tensors",
    text: TextFile = None,
    trust: Trust = False,
) -> None:
    """Write a quantized model in a format that other programs load, with its codes as they are."""
    from fakequant.cli.recipe import load_recipe
    from fakequant.cli.verification import deliver_model
    from fakequant.delivery.format import delivery_format

    delivery_format(format)  # refused before the model is made
    path = deliver_model(load_recipe(recipe, text, trust), checkpoint, out, format)
    words = ("fakequant", "verify", f"{path}", "--recipe", recipe, "--checkpoint", f"{checkpoint}")
    Console(soft_wrap=True).print(Text(f"Written: {path}. Compare it: {shlex.join(words)}"))


@app.command("improve-folder")
def improve_folder(  # noqa: PLR0913  the command's options
    folder: Annotated[Path, typer.Argument(help="a folder of Hugging Face, with its tokenizer")],
    out: Annotated[Path, typer.Option(help="the folder to write, or the file of a format that is one")],
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
    from fakequant.cli.huggingface.folder import improve_by_text
    from fakequant.cli.job import Job

    config = Job(folder, preset, DEFAULT_METHOD, out, floats=tuple(floats or ()), rules=tuple(rule or ())).config()
    improve_by_text(folder, out, text, config, steps, format, Console(quiet=quiet))


for _command in (advice.advise, advice.compare, advice.search):
    app.command()(_command)


@app.command()
def doctor() -> None:
    """Show the versions, the compiler, the GPU, and for each backend whether it works or why it does not."""
    from fakequant.report import environment
    from fakequant.report.terminal import print_table

    print_table(Console(), "Environment", ("what", "value"), list(environment().items()))
