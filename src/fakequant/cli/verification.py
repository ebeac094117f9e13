"""Verify an exported file from the command line."""

from __future__ import annotations

from pathlib import Path

from fakequant.cli.recipe import load_recipe
from fakequant.cli.results import CHECKPOINT
from fakequant.export import VerifyReport, verify_onnx
from fakequant.model.state.checkpoint import load


def verify_file(path: Path, recipe: str | Path | None, checkpoint: Path | None) -> VerifyReport:
    """Verify an exported file; with a recipe also compare its weights and outputs with the model.

    Raises:
        VerificationError: the file cannot be read, or fakequant did not write it.
        RecipeError, CheckpointError: the model cannot be rebuilt.
    """
    if recipe is None:
        return verify_onnx(path)
    loaded = load_recipe(recipe)
    model = load(loaded.model(), checkpoint or path.parent / CHECKPOINT)
    return verify_onnx(path, model.eval(), loaded.calibration_batches())
