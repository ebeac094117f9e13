"""The content of a safetensors file, one tensor at a time; the bytes are those that the package safetensors writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fakequant.errors import CheckpointError
from fakequant.model.state.snapshots import LazyTensor


def require_safetensors() -> Any:
    """The package safetensors, or an error that says how to get it."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        message = "checkpoints need safetensors, not installed here; run pip install 'fakequant[checkpoint]'"
        raise CheckpointError(message) from error
    return safetensors


def size_of(tensor: Tensor | LazyTensor) -> int:
    """The number of bytes that a tensor takes in a file."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def file_content(
    tensors: Mapping[str, Tensor | LazyTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file of tensors, in parts; a lazy tensor is made when its part is asked for.

    Args:
        tensors: by name.
        metadata: texts for the header of the file.

    Raises:
        CheckpointError: a lazy tensor of another shape or dtype than was stated.

    >>> data = b"".join(file_content({"x": LazyTensor((2,), torch.uint8, lambda: torch.ones(2, dtype=torch.uint8))}))
    >>> len(data), data[-2:]
    (66, b'\\x01\\x01')
    """
    # The names of dtypes and the order of tensors, which lies by dtype, are those of the same tensors without values.
    empty = {name: torch.empty(0, dtype=one.dtype) for name, one in tensors.items()}
    outline = require_safetensors().torch.save(empty, None if metadata is None else dict(metadata))
    header: dict[str, Any] = json.loads(outline[8 : 8 + int.from_bytes(outline[:8], "little")])
    if metadata:  # in the given order: the package's is another one each time
        header["__metadata__"] = dict(metadata)
    start = 0
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        entry, end = header[name], start + size_of(tensors[name])
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield _bytes_of(name, tensors[name])


def _bytes_of(name: str, stated: Tensor | LazyTensor) -> memoryview:
    tensor = stated.make() if isinstance(stated, LazyTensor) else stated
    if tensor.shape != tuple(stated.shape) or tensor.dtype is not stated.dtype:
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype} and shape {list(tensor.shape)}, but {stated.dtype} and shape "
            f"{list(stated.shape)} were stated"
        )
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return (torch.view_as_real(whole) if whole.is_complex() else whole).view(torch.uint8).numpy().data
