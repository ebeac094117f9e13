"""The examples on which a report measures each layer alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fakequant.data.batches import Forward
from fakequant.model.modes import evaluating
from fakequant.model.run.outputs import float_tensors

VALUES = 65_536
"""Values of the model's output from which a ratio in dB is measured; fewer would leave it less certain."""
_FEWEST = 2


def first_examples(model: nn.Module, batch: Any, output: Any, run: Forward) -> tuple[Any, str]:
    """The first examples of a batch that give enough values of the output, and a sentence that says how many.

    A batch is cut only where the first dimension of all its tensors and of all outputs is the same, and where the model
    takes the smaller one and gives that many rows; else it is left whole.

    Args:
        model: a prepared model.
        batch: what the model gets.
        output: what the model gave for it.
        run: called as run(model, batch).
    """
    whole = "Each layer is measured alone on the whole first batch."
    rows, found = _rows(tree_leaves(batch)), float_tensors(output)
    if rows is None or _rows(found) != rows:
        return batch, whole
    few = max(_FEWEST, -(-VALUES * rows // max(1, sum(tensor.numel() for tensor in found))))
    if few >= rows:
        return batch, whole
    part = tree_map(lambda tensor: tensor[:few], batch)
    try:
        with evaluating(model), torch.no_grad():
            taken = _rows(float_tensors(run(model, part))) == few
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):  # the model wants its number of rows
        taken = False
    if not taken:
        return batch, whole
    return part, f"Each layer is measured alone on {few} of the {rows} examples of the first batch."


def _rows(leaves: list[Any]) -> int | None:
    """The length that all tensors have in common; None where they differ, or where something is no tensor."""
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    lengths = {len(leaf) for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None
