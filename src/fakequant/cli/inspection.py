"""List the quantizers of a checkpoint or an ONNX file without its model; deliver a model, and verify a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.cli.results import CHECKPOINT, GRAPH
from fakequant.delivery import deliver, delivery_formats, verify_delivery
from fakequant.errors import CheckpointError, VerificationError
from fakequant.export import VerifyReport, verify_onnx
from fakequant.export.capability import read
from fakequant.export.packages import require
from fakequant.export.verification.verify import load_exported
from fakequant.model.presets import ALIASES, presets
from fakequant.model.state.checkpoint import MANIFEST, load, read_manifest
from fakequant.model.weights import spec_bits

_SIDE = 4096
"""The side of the square layer for which presets count their bits."""


@dataclass(frozen=True)
class Inspection:
    """A table with one row per quantizer; the title names the file."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def inspect(path: Path) -> Inspection:
    """List the quantizers of a checkpoint folder, an output folder of `fakequant quantize` or an ONNX file.

    Raises:
        CheckpointError: the folder has no checkpoint, or a damaged one.
        VerificationError: the file is not an ONNX file that fakequant wrote.
    """
    if path.is_file():
        return _inspect_onnx(path)
    folder = next((f for f in (path, path / CHECKPOINT) if (f / MANIFEST).is_file()), path)
    if not folder.exists():
        raise CheckpointError(f"there is no file or folder {path}; give a checkpoint's folder or an ONNX file")
    manifest = read_manifest(folder)
    rows = [
        (f"{name}.{attribute}" if name else attribute, layer.type, str(quantizer.tensor), quantizer.mode.value)
        for name, layer in manifest.layers.items()
        for attribute, quantizer in layer.quantizers.items()
    ]
    tensors = manifest.tensors
    title = f"{folder}: {len(rows)} quantizers, {tensors.bytes:,} bytes in {tensors.file}"
    return Inspection(title, ("quantizer", "layer", "specification", "mode"), rows)


def graph_text(folder: Path) -> str:
    """Return the text of the graph that `fakequant quantize` wrote to a folder.

    Raises:
        CheckpointError: the graph is missing or damaged.
    """
    candidates = [folder / GRAPH, folder.parent / GRAPH]
    path = next((candidate for candidate in candidates if folder.is_dir() and candidate.is_file()), None)
    if path is None:
        raise CheckpointError(
            f"there is no {GRAPH} in {folder}; `fakequant quantize` writes it, or capture the model in Python: "
            "fakequant.ir.graph(model, example)"
        )
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; run `fakequant quantize` again") from error
    if not text.endswith("\n"):
        raise CheckpointError(f"{path} is truncated: its last line has no end; run `fakequant quantize` again")
    return text.rstrip("\n")


def _inspect_onnx(path: Path) -> Inspection:
    require("onnx")
    try:
        model = load_exported(path)
        record = read(model)
    except VerificationError as error:
        raise VerificationError(f"{path}: {error}") from error
    opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    rows = [
        (site.quantizer or "(model)", "weight" if site.codes else "activation", site.spec, site.expressed)
        for site in record.sites
    ]
    return Inspection(
        f"{path}: {len(rows)} quantizers, style {record.style.value}, opset {opset}, {path.stat().st_size:,} bytes, "
        f"by fakequant {record.version}",
        ("quantizer", "kind", "specification", "in ONNX"),
        rows,
    )


def preset_lines() -> list[str]:
    """Describe every preset in one line: name, bits per weight with its scales, what is quantized, other names.

    >>> print(*preset_lines()[:2], sep="\\n")
    preset            bits per weight  what is quantized
    INT8                         8.01  weights int8 per_channel(0), inputs int8 per_tensor; also W8A8
    """
    lines = [f"{'preset':16}  {'bits per weight':>15}  what is quantized"]
    for name, config in presets().items():
        rule = config.rules[0]
        if rule.weight is None:
            continue
        bits = spec_bits(rule.weight.spec, (_SIDE, _SIDE)).per_weight
        same = rule.input is not None and rule.input.spec == rule.weight.spec
        inputs = "inputs stay in float" if rule.input is None else f"inputs {rule.input}"
        what = f"weights and inputs {rule.input}" if same else f"weights {rule.weight}, {inputs}"
        tables = [rule.weight for rule in config.rules[1:] if rule.weight is not None]
        what += "".join(f", embeddings {weight}" for weight in tables)
        names = [alias for alias, target in ALIASES.items() if target == name]
        names += [config.name] if config.name != name else []
        lines.append(f"{name:16}  {bits:15.3g}  {what}" + (f"; also {', '.join(names)}" if names else ""))
    return lines


def verify_file(
    path: Path, recipe: str | Path | None, checkpoint: Path | None, text: Path | None = None, trust: bool = False
) -> VerifyReport:
    """Verify an exported or delivered file; with a recipe also compare its weights and outputs with the model.

    Raises:
        VerificationError: the file cannot be read, fakequant did not write it, or it needs a recipe.
        RecipeError, CheckpointError: the model cannot be rebuilt, or a delivered file is damaged.
    """
    is_delivered = path.is_dir() or any(one.recognizes(path) for one in delivery_formats().values())
    if recipe is None and is_delivered:
        raise VerificationError(f"{path} is compared with its model: give the recipe of it by --recipe")
    if recipe is None:
        return verify_onnx(path)
    loaded = load_recipe(recipe, text, trust)
    model = load(loaded.model(), checkpoint or path.parent / CHECKPOINT).eval()
    if is_delivered:
        return verify_delivery(path, model, loaded.calibration_batches())
    return verify_onnx(path, model, loaded.calibration_batches())


def deliver_model(recipe: Recipe, checkpoint: Path, out: Path, format: str) -> Path:
    """Deliver the model of a recipe with the codes of a checkpoint."""
    return deliver(load(recipe.model(), checkpoint).eval(), out, format)
