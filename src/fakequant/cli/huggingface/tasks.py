"""How good the model of a folder of Hugging Face is: by a text, by labelled texts, or against itself in float."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fakequant.cli.huggingface.folder import LINES, lines_of, reading, tokenizer_of
from fakequant.errors import RecipeError, nearest
from fakequant.text import listed

TASKS = ("auto", "none", "perplexity", "accuracy", "cosine")
_WINDOW, _ROWS, _LONGEST = 256, 8, 512


@dataclass(frozen=True)
class FolderTask:
    """A measure of a model.

    Attributes:
        label: what is measured; "" where nothing is.
        on: the data, in words.
        evaluate: takes a model, returns a number, larger is better.
        smaller: whether `evaluate` gives the negative of a figure of which smaller is better.
        content: the data, as a digest.
        why_not: why nothing is measured.
    """

    label: str = ""
    on: str = ""
    evaluate: Callable[[nn.Module], float] | None = None
    smaller: bool = False
    content: str = ""
    why_not: str = ""

    @property
    def name(self) -> str:
        """The label in one word."""
        return self.label.partition("(")[0].partition(" ")[0].rstrip(",")

    @property
    def said(self) -> str:
        """What is measured on what, or why nothing is, as a sentence; "" for the function of a recipe."""
        return f"Measured: {self.label} on {self.on}." if self.on else self.why_not


def task_of(task: str, folder: Path, text: Path, trust: bool, model: Callable[[], nn.Module]) -> FolderTask:
    """What is measured of the model in a folder; all faults are found here, before the work.

    Args:
        task: of `TASKS`, or "NAME=FILE". "auto" is perplexity for a model that generates text, else cosine.
        folder: that `save_pretrained` wrote.
        text: the lines for calibration. Without FILE those behind the ones that calibrate, or these if there are none.
        trust: whether Python files of the folder may run.
        model: makes the float model.

    Raises:
        RecipeError: no such task, the file does not fit it, or the model does not. For "auto" `why_not` says so.
    """
    name, equals, path = task.partition("=")
    if name not in TASKS or (equals and (not path or name in TASKS[:2])):
        known = "perplexity=TEXT, accuracy=FILE, cosine=TEXT, auto and none"
        raise RecipeError(f"unknown --task {task!r}{nearest(name, TASKS)}; the tasks are {known}")
    if name == "none":
        return FolderTask(why_not="--task none was given; --task auto measures the model.")
    if name != "auto":
        return _task(name, folder, text, Path(path) if path else None, trust, model)
    try:
        generates = _classes(folder, trust)[1] & set(_known("CAUSAL_LM"))
        return _task("perplexity" if generates else "cosine", folder, text, None, trust, model)
    except RecipeError as error:
        return FolderTask(why_not=f"Not measured: {error}.")


def _task(
    name: str, folder: Path, text: Path, file: Path | None, trust: bool, model: Callable[[], nn.Module]
) -> FolderTask:
    config, classes = _classes(folder, trust)
    kinds = {"perplexity": ("CAUSAL_LM", "generates text"), "accuracy": ("SEQUENCE_CLASSIFICATION", "gives labels")}
    if name in kinds and not classes & set(_known(kinds[name][0])):
        raise RecipeError(
            f"--task {name} is for a model that {kinds[name][1]}, and {folder} holds {listed(sorted(classes))}; "
            "--task cosine compares any model with itself in float"
        )
    if file is None and name == "accuracy":
        raise RecipeError("--task accuracy needs texts with labels: --task accuracy=FILE, CSV or JSON lines")
    lines, where = _lines(text if file is None else file, file is None)
    tokenizer = tokenizer_of(folder, trust)
    content = hashlib.sha256(f"{name}\0{lines}".encode("utf-8", "replace")).hexdigest()
    if name == "perplexity":
        longest = getattr(config, "max_position_embeddings", None) or _WINDOW
        windows = _windows(tokenizer, lines, where, min(_WINDOW, longest))
        if file is None:
            windows = windows[:64]
        on = f"{len(windows)} windows of {windows.shape[1]} tokens of {where}"
        return FolderTask("perplexity", on, lambda net: -_perplexity(net, windows), True, content)
    longest = min(_LONGEST, getattr(config, "max_position_embeddings", None) or _LONGEST, tokenizer.model_max_length)
    if name == "accuracy":
        rows = _labelled(lines, where, config)
        batches = _batches(tokenizer, [one for one, _ in rows], longest, config.pad_token_id is None)
        wanted = torch.tensor([label for _, label in rows])
        return FolderTask(
            "accuracy, %",
            f"{len(rows)} rows of {where}",
            lambda net: 100 * (_outputs(net, batches).argmax(1) == wanted).double().mean().item(),
            content=content,
        )
    lines = [line for line in lines if line.strip()]
    batches, wanted = _batches(tokenizer, lines, longest, False), list[Tensor]()

    def cosine(net: nn.Module) -> float:
        if not wanted:
            wanted.append(_outputs(model().to(next(net.parameters()).device), batches))
        return cosine_similarity(_outputs(net, batches), wanted[0]).mean().item()

    return FolderTask("cosine to float32", f"{len(lines)} lines of {where}, their mean", cosine, content=content)


def _known(kind: str) -> Sequence[str]:
    """The classes of transformers for a kind of model."""
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values()
    return [name for names in found for name in ([names] if isinstance(names, str) else names)]


def _classes(folder: Path, trust: bool) -> tuple[Any, set[str]]:
    """The configuration in a folder, and the classes that it names."""
    from transformers import AutoConfig

    with reading(folder, "model", trust):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        return config, {f"{one}" for one in config.architectures or ["AutoModel"]}


def _lines(file: Path, is_text: bool) -> tuple[list[str], str]:
    """The lines of a file, and what they are called."""
    if not file.is_file():
        raise RecipeError(
            f"--task reads {file}, and {'this is a folder' if file.is_dir() else 'there is no such file'}"
        )
    lines = file.read_text("utf-8-sig", "replace").splitlines()
    if not any(line.strip() for line in lines):
        raise RecipeError(f"--task reads {file}, and it has no line of text")
    if not is_text:
        return lines, file.name
    used, rest = lines_of(file), lines_of(file, LINES)
    return (
        (rest, f"{file.name}, behind those for calibration") if rest else (used, f"{file.name}, which calibrated, too")
    )


def _windows(tokenizer: Any, lines: list[str], where: str, length: int) -> Tensor:
    """The tokens of a text (windows, length); what is left behind the last whole window is not read."""
    tokens = torch.tensor(tokenizer("\n".join(lines), verbose=False)["input_ids"], dtype=torch.long)
    if len(tokens) < length:
        raise RecipeError(
            f"{where} has {len(tokens)} tokens, and perplexity is measured on windows of {length}; give a longer text: "
            "--task perplexity=FILE"
        )
    return tokens[: len(tokens) // length * length].view(-1, length)


def _perplexity(net: nn.Module, windows: Tensor) -> float:
    """exp of the mean loss of all tokens but the first of each window."""
    device, losses = next(net.parameters()).device, list[float]()
    for window in windows.to(device):
        with torch.no_grad():
            logits = net(input_ids=window[None]).logits[0, :-1].float()
        losses.append(cross_entropy(logits, window[1:]).item())
    return math.exp(min(sum(losses) / len(losses), 700.0))  # 1e304, where exp would overflow


def _batches(tokenizer: Any, texts: list[str], longest: int, alone: bool) -> list[dict[str, Tensor]]:
    """Tokens of texts with their masks; one at a time for a model that knows no padding."""
    rows = 1 if alone else _ROWS
    return [
        {
            name: value
            for name, value in tokenizer(
                texts[at : at + rows], padding=not alone, truncation=True, max_length=longest, return_tensors="pt"
            ).items()
            if name in ("input_ids", "attention_mask")
        }
        for at in range(0, len(texts), rows)
    ]


def _outputs(net: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """The first output of each text (texts, values) in float32; that of tokens is the mean over the mask."""

    def each() -> Iterator[Tensor]:
        device = next(net.parameters()).device
        for batch in batches:
            given = {name: value.to(device) for name, value in batch.items()}
            output = net(**given)[0].float()
            if output.dim() == 3:
                mask = given["attention_mask"][:, : output.shape[1], None]
                output = (output * mask).sum(1) / mask.sum(1)
            yield output.flatten(1).cpu()

    with torch.no_grad():
        return torch.cat([*each()])


def _labelled(lines: list[str], where: str, config: Any) -> list[tuple[str, int]]:
    """The texts of a file, CSV or JSON lines, with the numbers of their labels."""
    count, found = len(config.id2label), list[tuple[str, int]]()
    if count < 2:
        raise RecipeError(f"--task accuracy is for a model with two labels or more, and this one has {count}")
    named = {name: number for number, name in config.id2label.items()}
    numbers = {f"{number}": number for number in range(count)}
    for at, row in _rows(lines, where):
        if missing := [name for name in ("text", "label") if row.get(name) is None]:
            columns = listed((f"{name}" for name in row if name), 8) or "none"
            raise RecipeError(
                f"row {at} of {where} lacks {' and '.join(missing)}; a file of labels has the columns text and label, "
                f"and this one has {columns}"
            )
        label = f"{row['label']}".strip()
        if (number := named.get(label, numbers.get(label))) is None:
            raise RecipeError(
                f"row {at} of {where} has the label {label!r:.60}, and the model knows {listed(map(repr, named), 8)}, "
                f"or their numbers 0 to {count - 1}"
            )
        found.append((f"{row['text']}", number))
    if not found:
        raise RecipeError(f"{where} has no row below its header")
    return found


def _rows(lines: list[str], where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with their numbers: JSON lines if the first one begins with {, else CSV with a header."""
    if not next(line for line in lines if line.strip()).lstrip().startswith("{"):
        try:
            yield from enumerate(csv.DictReader((f"{line}\n" for line in lines), skipinitialspace=True, strict=True), 1)
        except csv.Error as error:
            raise RecipeError(f"{where} is no CSV: {error}; give CSV with a header, or JSON lines") from error
        return
    for at, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RecipeError(f"line {at} of {where} is no JSON: {error}; each line is an object") from error
            if not isinstance(row, dict):
                raise RecipeError(f"line {at} of {where} is a {type(row).__name__}, not an object with text and label")
            yield at, row
