"""List the quantizers of a checkpoint or an ONNX file without a model; deliver a model, and verify a file."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.cli.results import CHECKPOINT, GRAPH
from fakequant.delivery import deliver, delivery_formats, verify_delivery
from fakequant.errors import CheckpointError, VerificationError
from fakequant.export import VerifyReport, verify_onnx
from fakequant.export.capability import read, require
from fakequant.export.verify import load_exported
from fakequant.model.config import TensorConfig
from fakequant.model.engine import known_engines
from fakequant.model.presets import ALIASES, find_preset, presets
from fakequant.model.state.checkpoint import MANIFEST, load, read_manifest
from fakequant.model.weights import spec_bits
from fakequant.numerics.formats.floats import IntegerFormat

_SIDE = 4096
"""The inputs and the outputs of the layer whose bits per weight are shown for a preset."""


@dataclass(frozen=True)
class Inspection:
    """A table with one row per quantizer; the title names the file."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def inspect(path: Path) -> Inspection:
    """List the quantizers of a checkpoint folder, an output folder of `fakequant quantize` or an ONNX file."""
    if path.is_file():
        require("onnx")
        try:
            model = load_exported(path)
            record = read(model)
        except VerificationError as error:
            raise VerificationError(f"{path}: {error}") from error
        opset = max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        sites = [
            (site.quantizer or "(model)", "weight" if site.codes else "activation", site.spec, site.expressed)
            for site in record.sites
        ]
        title = f"{path}: {len(sites)} quantizers, style {record.style.value}, opset {opset}, "
        title += f"{path.stat().st_size:,} bytes, by fakequant {record.version}"
        return Inspection(title, ("quantizer", "kind", "specification", "in ONNX"), sites)
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
    """Return the graph's text that `fakequant quantize` wrote to a folder; raises CheckpointError if it is damaged."""
    candidates = [folder / GRAPH, folder.parent / GRAPH]
    path = next((candidate for candidate in candidates if folder.is_dir() and candidate.is_file()), None)
    if path is None:
        raise CheckpointError(
            f"there is no {GRAPH} in {folder}; `fakequant quantize` writes it, or capture the model in Python: "
            "print(fakequant.ir.to_text(fakequant.ir.capture(model, example)))"
        )
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; run `fakequant quantize` again") from error
    if not text.endswith("\n"):
        raise CheckpointError(f"{path} is truncated: its last line has no end; run `fakequant quantize` again")
    return text.rstrip("\n")


_FAMILIES = {"GGUF": "GGUF, for llama.cpp", "MLX": "MLX, for Apple's machines", "MX": "Microscaling (MX)"}


def preset_lines() -> list[str]:
    """The presets by family, in lines of at most 100 columns, with the engines that are known to run them.

    >>> print(*preset_lines()[:3], sep="\\n")
    preset                 bits  weights, inputs                          engines
    Integers
      INT8                 8.01  int8 channel, int8 tensor                coreai, coreml, xnnpack,
    """
    families: dict[str, list[str]] = {}
    engines = dict.fromkeys(known_engines().values())
    for name, config in presets().items():
        rule = config.rules[0]
        if rule.weight is None:
            continue
        kinds = (title for start, title in _FAMILIES.items() if name.startswith(start))
        is_integer = isinstance(rule.weight.spec.format, IntegerFormat)
        family = next(kinds, "Integers" if is_integer else "Floats and tables")
        family = "Training with quantized gradients" if rule.gradient is not None else family
        bits = spec_bits(rule.weight.spec, (_SIDE, _SIDE)).per_weight
        weight, input = _brief(rule.weight), "float" if rule.input is None else _brief(rule.input)
        what = f"{weight}, inputs, too" if input == weight else f"{weight}, {input}"
        takers = ", ".join(engine.name for engine in engines if engine.takes(name))
        start = f"  {name:19} {bits:5.3g}  {what:40} "
        lines = textwrap.wrap(takers, 100 - len(start)) or [""]
        families.setdefault(family, []).extend(
            f"{start if number == 0 else ' ' * len(start)}{line}".rstrip() for number, line in enumerate(lines)
        )
    lines = [f"{'preset':21}  bits  {'weights, inputs':40} engines"]
    for family, rows in families.items():
        lines += [family, *rows]
    others = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    return [*lines, "Other names", *textwrap.wrap(others, 100, initial_indent="  ", subsequent_indent="  ")]


def _brief(config: TensorConfig) -> str:
    """The format of a tensor, and the values that share a scale, as text.

    >>> _brief(TensorConfig("int4 per_block(-1:32,pad)"))
    'int4 block 32'
    """
    text = str(config.spec.granularity)
    sizes = "x".join(re.findall(r":(\d+)", text))
    return f"{config.spec.format} {text.removeprefix('per_').partition('(')[0]} {sizes}".rstrip()


def preset_text(name: str) -> str:
    """A text that says how a preset quantizes each kind of layer, with the scales.

    >>> print(preset_text("int4_group32"))
    INT4_GROUP32
      weights int4 per_block(-1:32,pad), inputs stay in float
      layers Embedding, EmbeddingBag: weights int8 per_channel(0), inputs stay in float
      layers MaxPool1d, MaxPool2d, MaxPool3d: stay in float
    """
    config = find_preset(name)
    lines = [config.name]
    for rule in config.rules:
        where = f"layers {', '.join(rule.layers)}: " if rule.layers else ""
        inputs = "inputs stay in float" if rule.input is None else f"inputs {rule.input}"
        parts = [f"weights {rule.weight}", inputs] if rule.weight is not None else ["stay in float"]
        parts += [f"gradients {rule.gradient}"] if rule.gradient is not None else []
        lines += textwrap.wrap(where + ", ".join(parts), 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def verify_file(
    path: Path, recipe: str | Path | None, checkpoint: Path | None, text: Path | None = None, trust: bool = False
) -> VerifyReport:
    """Verify an exported or delivered file; with a recipe also compare its weights and outputs with the model."""
    is_delivered = path.is_dir() or any(one.recognizes(path) for one in delivery_formats().values())
    if recipe is None and is_delivered:
        raise VerificationError(f"{path} is compared with its model: give the recipe of the model by --recipe")
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
