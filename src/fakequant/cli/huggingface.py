"""A folder of Hugging Face instead of a recipe: its model, texts for calibration, and a measure of the model."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fakequant.cli.console import Steps
from fakequant.errors import RecipeError, first_line, nearest, not_imported
from fakequant.files import read_whole
from fakequant.model.config import Config
from fakequant.streaming import improve_folder
from fakequant.text import listed

_ROWS, _TOKENS = 8, 128
LINES = 256
"""The largest number of lines of a text for calibration."""


def folder_functions(folder: Path, text: Path | None, trust: bool | None = False) -> dict[str, Callable[..., Any]]:
    """The functions of a recipe for a folder that `save_pretrained` wrote.

    Args:
        text: a file with lines of text; the first 256 lines that are not empty are used.
        trust: whether Python files of the folder, which config.json names in `auto_map`, may run; None if the command
            has no option to allow it.

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
    """Quantize a folder a block at a time by lines of text, see `fakequant.improve_folder`."""
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
    """At most `LINES` lines of a text; empty lines are dropped first, and then the first `first` lines."""
    lines = [line for line in text.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[first : first + LINES]


def tokenizer_of(folder: Path, trust: bool | None = False) -> Any:
    """The tokenizer in a folder (without a padding token it pads by the end token); raises RecipeError if damaged."""
    from transformers import AutoTokenizer

    with reading(folder, "tokenizer", trust):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=bool(trust))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer


@contextmanager
def reading(folder: Path, what: str, trust: bool | None) -> Iterator[None]:
    """A context that turns any error of transformers while it reads a folder into a RecipeError of one line."""
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
                f"transformers cannot import the class that reads the {what} in {folder}: {not_imported(error)}"
            ) from error
        raise RecipeError(
            f"transformers cannot read the {what} in {folder}: {first_line(error):.300}; write it there by "
            f"the {what}'s save_pretrained"
        ) from error


TASKS = ("auto", "none", "perplexity", "accuracy", "cosine")
_WINDOW, _LONGEST = 256, 512


@dataclass(frozen=True)
class FolderTask:
    """The measure of a model of a folder, and its data.

    Attributes:
        label: the name of the measure; "" if nothing is measured.
        on: the data, in words.
        evaluate: returns a number for a model; larger is better.
        smaller: whether `evaluate` returns a negated figure, because a smaller figure is better.
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
        """A sentence that names the measure and its data, or says why nothing is measured; "" if a recipe measures."""
        return f"Measured: {self.label} on {self.on}." if self.on else self.why_not


def task_of(task: str, folder: Path, text: Path, trust: bool, model: Callable[[], nn.Module]) -> FolderTask:
    """The measure of the model in a folder; all errors are raised before the work.

    Args:
        task: a name in `TASKS`, or "NAME=FILE". "auto" is perplexity for a model that generates text, else cosine.
        text: the file of the lines for calibration. Without FILE, the lines after the calibration's are measured, or
            the same lines if no more follow.

    Raises:
        RecipeError: the task is unknown, or the file or the model does not fit the task. With "auto" nothing is raised:
            `why_not` has the reason.
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
            f"--task {name} is for a model that {kinds[name][1]}, but {folder} holds {listed(sorted(classes))}; "
            "--task cosine compares any model with itself in float"
        )
    if file is None and name == "accuracy":
        raise RecipeError("--task accuracy needs texts with labels: --task accuracy=FILE, CSV or JSON lines")
    given = text if file is None else file
    if not given.is_file():
        raise RecipeError(
            f"--task reads {given}, but {'this is a folder' if given.is_dir() else 'there is no such file'}"
        )
    lines, where = given.read_text("utf-8-sig", "replace").splitlines(), given.name
    if not any(line.strip() for line in lines):
        raise RecipeError(f"--task reads {given}, but the file has no line of text")
    if file is None:
        lines, where = lines_of(text, LINES), f"{where}, after the lines for calibration"
        if not lines:
            lines, where = lines_of(text), f"{text.name}, which also calibrated"
    tokenizer = tokenizer_of(folder, trust)
    content = hashlib.sha256(f"{name}\0{lines}".encode("utf-8", "replace")).hexdigest()
    if name == "perplexity":
        longest = getattr(config, "max_position_embeddings", None) or _WINDOW
        length = min(_WINDOW, longest)
        tokens = torch.tensor(tokenizer("\n".join(lines), verbose=False)["input_ids"], dtype=torch.long, device="cpu")
        if len(tokens) < length:
            raise RecipeError(
                f"{where} has {len(tokens)} tokens, but perplexity is measured on windows of {length}; give a longer "
                "text: --task perplexity=FILE"
            )
        windows = tokens[: len(tokens) // length * length].view(-1, length)[: 64 if file is None else None]
        on = f"{len(windows)} windows of {length} tokens of {where}"
        return FolderTask("perplexity", on, lambda net: -_perplexity(net, windows), True, content)
    longest = min(_LONGEST, getattr(config, "max_position_embeddings", None) or _LONGEST, tokenizer.model_max_length)
    if name == "accuracy":
        rows = _labelled(lines, where, config)
        batches = _batches(tokenizer, [one for one, _ in rows], longest, config.pad_token_id is None)
        wanted = torch.tensor([label for _, label in rows], device="cpu")
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

    return FolderTask("cosine to float32", f"the mean over {len(lines)} lines of {where}", cosine, content=content)


def _known(kind: str) -> Sequence[str]:
    """The names of the classes of transformers for a kind of model."""
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values()
    return [name for names in found for name in ([names] if isinstance(names, str) else names)]


def _classes(folder: Path, trust: bool) -> tuple[Any, set[str]]:
    """The configuration in a folder, and the classes that it names."""
    from transformers import AutoConfig

    with reading(folder, "model", trust):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        return config, {f"{one}" for one in config.architectures or ["AutoModel"]}


def _perplexity(net: nn.Module, windows: Tensor) -> float:
    """The exponential of the mean loss of all tokens except the first token of each window."""
    device, losses = next(net.parameters()).device, list[float]()
    for window in windows.to(device):
        with torch.no_grad():
            logits = net(input_ids=window[None]).logits[0, :-1].float()
        losses.append(cross_entropy(logits, window[1:]).item())
    return math.exp(min(sum(losses) / len(losses), 700.0))  # 1e304, where exp would overflow


def _batches(tokenizer: Any, texts: list[str], longest: int, alone: bool) -> list[dict[str, Tensor]]:
    """Batches of tokens with their masks; with `alone`, for a model without padding, a batch is one text."""
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
    """The first output of each text [texts, values] in float32; outputs of tokens are averaged over the mask."""

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
        raise RecipeError(f"--task accuracy is for a model with two labels or more, but this model has {count}")
    named = {name: number for number, name in config.id2label.items()}
    numbers = {f"{number}": number for number in range(count)}
    for at, row in _rows(lines, where):
        if missing := [name for name in ("text", "label") if row.get(name) is None]:
            columns = listed((f"{name}" for name in row if name), 8) or "none"
            raise RecipeError(
                f"row {at} of {where} lacks {' and '.join(missing)}; a file of labels has the columns text and label, "
                f"but this file has {columns}"
            )
        label = f"{row['label']}".strip()
        if (number := named.get(label, numbers.get(label))) is None:
            raise RecipeError(
                f"row {at} of {where} has the label {label!r:.60}, but the model knows {listed(map(repr, named), 8)}, "
                f"or their numbers 0 to {count - 1}"
            )
        found.append((f"{row['text']}", number))
    if not found:
        raise RecipeError(f"{where} has no row below its header")
    return found


def _rows(lines: list[str], where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with their numbers: JSON lines if the first row begins with {, else CSV with a header."""
    if not next(line for line in lines if line.strip()).lstrip().startswith("{"):
        try:
            yield from enumerate(csv.DictReader((f"{line}\n" for line in lines), skipinitialspace=True, strict=True), 1)
        except csv.Error as error:
            raise RecipeError(f"{where} is not CSV: {error}; give CSV with a header, or JSON lines") from error
        return
    for at, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RecipeError(f"line {at} of {where} is not JSON: {error}; each line is an object") from error
            if not isinstance(row, dict):
                raise RecipeError(f"line {at} of {where} is a {type(row).__name__}, not an object with text and label")
            yield at, row
