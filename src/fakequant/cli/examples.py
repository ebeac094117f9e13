"""The example by which a recipe's model is traced, the graph, and the batches that fit the exported file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fakequant.cli.results import ONNX
from fakequant.data.batches import run_batch
from fakequant.errors import first_line
from fakequant.files import write_whole
from fakequant.ir import capture, to_text
from fakequant.model.weights import evaluating


def example_of(model: nn.Module, batch: Any) -> Any:
    """Return the arguments that a model takes from a batch: a tuple, or a dict of keyword arguments."""
    seen: list[Any] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs or args), with_kwargs=True, prepend=True
    )
    try:
        with evaluating(model), torch.no_grad():
            run_batch(model, batch)
    finally:
        hook.remove()
    return seen[0]


def dynamic_batch(example: Any) -> Any:
    """Return the `dynamic_shapes` for `export_onnx` that allow any batch size, or None if the batch axis is unclear.

    Axis 0 of a tensor is the batch axis if it is as long as axis 0 of the first tensor. It is unclear for an example
    with one sample, because torch.export treats a length of 1 as a constant.

    >>> dynamic_batch((torch.ones(4, 3), torch.ones(7)))
    ({0: 'batch'}, None)
    """
    sizes = [leaf.shape[0] for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or sizes[0] < 2:
        return None

    def axes(leaf: Any) -> dict[int, str] | None:
        return {0: "batch"} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == sizes[0] else None

    return tree_map(axes, example)


def fitting(batches: Iterable[Any], example: Any, dynamic_shapes: Any) -> Iterator[Any]:
    """Yield the batches that fit the exported model: the example's shapes, and any batch size if that is dynamic.

    >>> batches = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 5)]
    >>> [len(batch) for batch in fitting(batches, (torch.ones(2, 3),), None)]
    [2]
    """
    kept = slice(0 if dynamic_shapes is None else 1, None)
    shapes = [leaf.shape[kept] for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    for batch in batches:
        arguments = {key: batch[key] for key in example} if isinstance(example, dict) else batch
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if [tensor.shape[kept] for tensor in tensors[: len(shapes)]] == shapes:
            yield batch


def write_graph(model: nn.Module, example: Any, path: Path) -> list[str]:
    """Write a model's graph as text; returns a line for the report."""
    try:
        with evaluating(model):
            graph = capture(model, example)
    except Exception as error:  # of torch.export, which meets every model of a user
        return [f"The graph is missing, because the model could not be captured: {first_line(error)}"]
    write_whole(path, to_text(graph).encode())
    return [f"{path.name} lists every operation of the graph; Netron shows that of {ONNX}."]
