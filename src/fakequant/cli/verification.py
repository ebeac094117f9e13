"""Deliver a model, and verify an exported or delivered file, from the command line."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fakequant.cli.recipe import Recipe, load_recipe
from fakequant.cli.results import CHECKPOINT
from fakequant.delivery import deliver, delivery_formats, verify_delivery
from fakequant.errors import VerificationError
from fakequant.export import VerifyReport, verify_onnx
from fakequant.model.state.checkpoint import load


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
    model = _loaded(loaded, checkpoint or path.parent / CHECKPOINT)
    if is_delivered:
        return verify_delivery(path, model, loaded.calibration_batches())
    return verify_onnx(path, model, loaded.calibration_batches())


def deliver_model(recipe: Recipe, checkpoint: Path, out: Path, format: str) -> Path:
    """Deliver the model of a recipe with the codes of a checkpoint."""
    return deliver(_loaded(recipe, checkpoint), out, format)


def _loaded(recipe: Recipe, checkpoint: Path) -> nn.Module:
    return load(recipe.model(), checkpoint).eval()
