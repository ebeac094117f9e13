"""The inputs of a file: what the record says of them, and the tensors of a batch for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fakequant.data.failures import OF_TORCH
from fakequant.errors import VerificationError
from fakequant.export.graph import names_read
from fakequant.export.record import INPUT_DTYPES, InputRecord

if TYPE_CHECKING:
    from onnx import ModelProto

_SEED = 0
_BYTES_PER_RANDOM = 40
"""A float32 number, its temporary copies and an index; measured: 36."""
_MOST_BYTES = 2**30
"""The memory that random inputs may use for any file: one image of 2,000 by 2,000 needs 480 MB."""
_LOWEST, _HIGHEST = -(2**62), 2**62


def input_records(model: ModelProto, program: ExportedProgram, state: Mapping[str, str]) -> list[InputRecord]:
    """Return the inputs of the file in order, with the example's shapes and ranges, and the buffers that they are."""
    args, kwargs = program.example_inputs or ((), {})
    leaves: list[tuple[str | None, Tensor]] = [
        (key, leaf)
        for key, value in ((None, args), *kwargs.items())
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
    records = []
    for declared, (key, x) in zip(model.graph.input, leaves, strict=True):
        finite = x.detach().double()
        finite = finite[finite.isfinite()]
        low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 0.0)
        dtype = str(x.dtype).removeprefix("torch.")
        records.append(InputRecord(declared.name, list(x.shape), dtype, low, high, key, state.get(key or "")))
    return records


def arguments(records: list[InputRecord], model: nn.Module | None) -> list[InputRecord]:
    """The inputs that batches have; those of buffers are in the model, if there is one.

    Raises:
        VerificationError: the model lacks a buffer.
    """
    state = [record for record in records if record.state is not None]
    if model is None or not state:
        return records
    known = dict(model.named_buffers(remove_duplicate=False))
    if missing := [str(record.state) for record in state if record.state not in known]:
        raise VerificationError(f"the model lacks the buffers {missing}; pass the model that was exported")
    return [record for record in records if record.state is None]


def tensors_of(batch: Any, records: list[InputRecord]) -> dict[str, Tensor]:
    """Return the tensors of a batch by the file's input names; extra trailing tensors of a tuple are ignored.

    Raises:
        VerificationError: the batch has too few tensors, or lacks a name.
    """
    if isinstance(batch, Mapping):
        keys = list(dict.fromkeys(record.key for record in records))
        if missing := [key for key in keys if key not in batch]:
            raise VerificationError(
                f"a batch lacks the arguments {missing}; pass batches of the same form as the example"
            )
        batch = [batch[key] for key in keys]
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if len(leaves) < len(records):
        raise VerificationError(f"a batch has {len(leaves)} tensors, but the file has {len(records)} inputs")
    return {record.name: leaf for record, leaf in zip(records, leaves, strict=False)}


def known_arguments(batch: Any, records: list[InputRecord]) -> int | None:
    """Return how many leading items of a tuple are arguments: those before the first tensor without an input."""
    if not isinstance(batch, (tuple, list)):
        return None
    wanted = len(records)
    for index, item in enumerate(batch):
        wanted -= sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(item))
        if wanted < 0:
            return index
    return len(batch)


def random_batch(records: list[InputRecord], file_bytes: int) -> Any:
    """Draw inputs of the example's size: mostly normal numbers, with zeros of both signs, tiny numbers and outliers.

    Raises:
        VerificationError: they would need much more memory than the file.
    """
    needed = sum(math.prod(record.shape) * _BYTES_PER_RANDOM for record in records)
    if needed > max(_MOST_BYTES, 10 * file_bytes):
        raise VerificationError(
            f"random numbers in the shapes {[record.shape for record in records]} need {needed:,} bytes of memory, but "
            f"the file has only {file_bytes:,} bytes; pass batches"
        )
    generator = torch.Generator().manual_seed(_SEED)
    tensors = [_random_input(record, generator) for record in records]
    if records and all(record.key is not None for record in records):
        return {str(record.key): x for record, x in zip(records, tensors, strict=True)}
    return tuple(tensors)


def _random_input(record: InputRecord, generator: torch.Generator) -> Tensor:
    dtype = INPUT_DTYPES[record.dtype]
    if not dtype.is_floating_point:
        low, high = (min(max(int(bound), _LOWEST), _HIGHEST) for bound in (record.low, record.high))
        values = torch.randint(low, max(high, low) + 1, record.shape, generator=generator, device="cpu")
        return values.to(dtype)
    # The maximum of a few hundred normal numbers is about 3 standard deviations.
    size = max(abs(record.low), abs(record.high)) / 3 or 1.0
    x = torch.randn(record.shape, generator=generator, dtype=torch.float32, device="cpu") * size
    special = torch.tensor([0.0, -0.0, torch.finfo(dtype).tiny, 30 * size, -30 * size], dtype=x.dtype, device=x.device)
    pick = torch.randint(0, 20 * len(special), record.shape, generator=generator, device="cpu")
    return torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x).to(dtype)


def on_device_of(model: nn.Module | None, batch: Any) -> Any:
    """A batch on the device of a model's first parameter or buffer."""
    held = next((x for of in (model.parameters, model.buffers) for x in of()), None) if model is not None else None
    return batch if held is None else pytree.tree_map_only(Tensor, lambda x: x.to(held.device), batch)


def unread_inputs(model: ModelProto) -> list[str]:
    """The names of the inputs that no node of a file reads, and that are no outputs."""
    read = names_read(model.graph.node) | {value.name for value in model.graph.output}
    return [value.name for value in model.graph.input if value.name not in read]


def depends_on(run: Callable[[Any], Any], batch: Any, place: int) -> bool | None:
    """Whether the results of a model depend on the values of a tensor of a batch; None if that cannot be told.

    Args:
        run: calls the model with a batch, and leaves the model as it was.
        batch: in any form.
        place: of the tensor, among the tensors of the batch.
    """
    leaves, form = pytree.tree_flatten(batch)
    index = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][place]
    other = _changed(leaves[index])
    if torch.equal(other, leaves[index]):
        return None
    try:
        results = [
            [leaf for leaf in pytree.tree_leaves(run(pytree.tree_unflatten(copies, form))) if isinstance(leaf, Tensor)]
            for given in (leaves, [*leaves[:index], other, *leaves[index + 1 :]])
            # A forward may write into its inputs.
            for copies in [[leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]]
        ]
    except OF_TORCH:
        return None
    return any(
        a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*results, strict=False)
    )


def _changed(x: Tensor) -> Tensor:
    """Other values that a model should take: floats twice as large and more, whole numbers in another order."""
    if x.is_floating_point() or x.is_complex():
        return 2 * x + 1
    turned = ~x if x.dtype is torch.bool else x.flip([*range(x.dim())])
    return 1 - x.clamp(0, 1) if torch.equal(turned, x) else turned
