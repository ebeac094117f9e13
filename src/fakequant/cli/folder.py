"""A folder of Hugging Face in place of a recipe: its model, and lines of text for calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from fakequant.errors import RecipeError

_ROWS, _TOKENS, _LINES = 8, 128, 256


def folder_functions(folder: Path, text: Path | None) -> dict[str, Callable[..., Any]]:
    """The functions of a recipe for a folder that `save_pretrained` wrote.

    Args:
        folder: with config.json, weights and tokenizer.
        text: a file with lines of text; the first 256 that are not empty are used.

    Raises:
        RecipeError: transformers is not installed, or there is no text.
    """
    if find_spec("transformers") is None:
        raise RecipeError(f"{folder} is a folder of Hugging Face, which transformers reads: pip install transformers")
    if text is None or not text.is_file():
        came = "none was given" if text is None else f"there is no {text}"
        raise RecipeError(
            f"{folder} needs text for calibration, and {came}; give a file with lines of text by --text, or write a "
            "recipe for other inputs: fakequant init"
        )

    def model() -> nn.Module:
        import transformers

        named = json.loads((folder / "config.json").read_text()).get("architectures") or ["AutoModel"]
        found = getattr(transformers, named[0], transformers.AutoModel).from_pretrained(folder, local_files_only=True)
        if hasattr(found.config, "use_cache"):
            found.config.use_cache = False
        return found.eval()

    def calibration_batches() -> Iterator[dict[str, Any]]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        lines = [line for line in text.read_text("utf-8", "replace").splitlines() if line.strip()][:_LINES]
        for start in range(0, len(lines), _ROWS):
            some = lines[start : start + _ROWS]
            # All batches have one length, so that each fits the exported file.
            given = tokenizer(some, padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt")
            yield {name: given[name] for name in ("input_ids", "attention_mask")}

    return {"model": model, "calibration_batches": calibration_batches}
