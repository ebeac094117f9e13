"""A folder of Hugging Face in place of a recipe: its model, and lines of text for calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fakequant.cli.steps import Steps
from fakequant.errors import RecipeError, first_line, not_imported
from fakequant.files import read_whole
from fakequant.model.config import Config
from fakequant.streaming import improve_folder

_ROWS, _TOKENS = 8, 128
LINES = 256
"""How many lines of a text calibrate."""


def folder_functions(folder: Path, text: Path | None, trust: bool | None = False) -> dict[str, Callable[..., Any]]:
    """The functions of a recipe for a folder that `save_pretrained` wrote.

    Args:
        folder: with config.json, weights and tokenizer.
        text: a file with lines of text; the first 256 that are not empty are used.
        trust: whether Python files of the folder, which config.json names in `auto_map`, may run; None where a command
            has no such option.

    Raises:
        RecipeError: transformers is not installed, or there is no text.
    """
    if find_spec("transformers") is None:
        raise RecipeError(f"{folder} is a folder of Hugging Face, which transformers reads: pip install transformers")
    came = "none was given" if text is None else f"{text} is a folder" if text.is_dir() else f"there is no {text}"
    lines = list[str]()
    if text is not None and text.exists() and not text.is_dir():
        came, lines = f"{text} has no line", lines_of(text)
    if not lines:
        raise RecipeError(
            f"{folder} needs text for calibration, and {came}; give a file with lines of text by --text, or write a "
            "recipe for other inputs: fakequant init"
        )

    def model() -> nn.Module:
        import transformers

        with reading(folder, "model", trust):
            values = json.loads(read_whole(folder / "config.json"))
            named = (values.get("architectures") or [None])[0] if isinstance(values, dict) else None
            kind = getattr(transformers, named, None) if isinstance(named, str) else None
            own = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
            reader: Any = kind if own else transformers.AutoModel
            found = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=bool(trust))
        if hasattr(found.config, "use_cache"):
            found.config.use_cache = False
        return found.eval()

    def calibration_batches() -> Iterator[dict[str, Any]]:
        tokenizer = tokenizer_of(folder, trust)
        for start in range(0, len(lines), _ROWS):
            some = lines[start : start + _ROWS]
            # All batches have one length, so that each fits the exported file.
            with reading(folder, "tokenizer", trust):
                given = tokenizer(some, padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt")
                batch = {name: given[name] for name in ("input_ids", "attention_mask")}
            yield batch

    return {"model": model, "calibration_batches": calibration_batches}


def improve_by_text(
    folder: Path, out: Path, text: Path | None, config: Config, steps: str, format: str, console: Console
) -> None:
    """Quantize a folder a block at a time by lines of text, see `fakequant.improve_folder`.

    Args:
        folder, text: as for `folder_functions`.
        out: the folder, or the file, that is written.
        config, steps, format: as for `fakequant.improve_folder`.
        console: gets the progress and the result.

    Raises:
        RecipeError: it is no such folder, or there is no text.
        KeyboardInterrupt: with a message that says how to go on.
        The errors of `fakequant.improve_folder`.
    """
    if not (folder / "config.json").is_file():
        raise RecipeError(f"{folder} has no config.json; give a folder that save_pretrained of Hugging Face wrote")
    batches, line = [*folder_functions(folder, text, None)["calibration_batches"]()], Steps(console, 1)
    try:
        with line.step("choosing weights a block at a time"):
            found = improve_folder(folder, out, config, batches, steps, format=format, mask="attention_mask")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted: {out} is not written; the same command goes on with the first block that is not finished"
        ) from None
    line.note("\n".join([*found.conclusions, f"Written: {found.path}. Read it: fakequant.read({str(found.path)!r})"]))


def lines_of(text: Path, first: int = 0) -> list[str]:
    """At most `LINES` lines of a text that are not empty, from one on."""
    lines = [line for line in text.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[first : first + LINES]


def tokenizer_of(folder: Path, trust: bool | None = False) -> Any:
    """The tokenizer in a folder, which pads by the end of a text where it has no padding.

    Raises:
        RecipeError: it cannot be read.
    """
    from transformers import AutoTokenizer

    with reading(folder, "tokenizer", trust):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=bool(trust))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer


@contextmanager
def reading(folder: Path, what: str, trust: bool | None) -> Iterator[None]:
    """Turn what transformers raises for a folder, of many kinds, into one line.

    Raises:
        RecipeError: the folder is damaged, or needs code of its own.
    """
    try:
        yield
    except Exception as error:  # files that are damaged, tokenizers and code of the folder raise any kind
        if "trust_remote_code" in str(error):
            cure = (
                "call fakequant.improve_folder with batches of your own"
                if trust is None
                else "read them, and allow them by --trust-remote-code"
            )
            raise RecipeError(
                f"the {what} in {folder} is computed by Python files of that folder (auto_map), which do not run; "
                f"{cure}"
            ) from error
        if isinstance(error, ImportError):
            raise RecipeError(
                f"transformers cannot import what reads the {what} in {folder}: {not_imported(error)}"
            ) from error
        raise RecipeError(
            f"transformers cannot read the {what} in {folder}: {first_line(error):.300}; write it there by "
            f"the {what}'s save_pretrained"
        ) from error
