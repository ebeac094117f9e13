"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fakequant.calibration import calibrators
from fakequant.model.presets import presets as named_presets

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
    """An option with words that the shell completes; this does not check the value."""
    return typer.Option(help=help, autocompletion=lambda incomplete: [w for w in words if w.startswith(incomplete)])


def _written(incomplete: str) -> list[str]:
    """The formats that `deliver` writes; not imported before a shell asks, which takes 0.6 s."""
    from fakequant.delivery.format import delivery_formats

    return [name for name, one in delivery_formats().items() if one.writes and name.startswith(incomplete)]


def _engines(incomplete: str) -> list[str]:
    """The engines that `advise` knows; imported when a shell asks, too."""
    from fakequant.ptq.advising.next_step import ENGINES

    return [name for name in sorted(ENGINES) if name.startswith(incomplete)]


Format = Annotated[
    str, typer.Option(help="of fakequant.deliver; an unknown name is answered by all names", autocompletion=_written)
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
        "what to measure of a folder of Hugging Face: perplexity=TEXT, cosine=TEXT (to float32), or accuracy=FILE, "
        "CSV or JSON lines with text and label; auto takes a part of --text; none",
        *("auto", "none", "perplexity=", "accuracy=", "cosine="),
    ),
]
Target = Annotated[
    str | None,
    typer.Option(help="the engine that will run it, such as onnxruntime, vllm or llama.cpp", autocompletion=_engines),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show the traceback if the model fails on a batch")]
