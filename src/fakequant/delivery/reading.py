"""Read a file of another program: into a prepared model that has its codes."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from fakequant.data.arguments import check_model, refuse_prepared
from fakequant.delivery.format import DeliveryFormat, format_of
from fakequant.errors import CheckpointError
from fakequant.files import check_path
from fakequant.model.state.applying import apply
from fakequant.model.state.snapshots import QuantizedState

_CALL = "read('folder', model)"


def read(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """A prepared model with the codes of a file or folder, from which analysis, `improve` and training go on.

    Args:
        path: a file or folder of a format of `fakequant.delivery.delivery_formats()`.
        model: a fresh float model of the architecture, which is changed and returned; by default one is made as the
            file says, of transformers and in eval mode.

    Raises:
        CheckpointError: no such file, an unknown format, damage, or another architecture.

    >>> from tempfile import TemporaryDirectory
    >>> model = prepare(nn.Sequential(nn.Linear(64, 64)), "fp8", skip=[])
    >>> used = calibrate(model, [torch.ones(1, 64)])
    >>> with TemporaryDirectory() as folder:
    ...     again = read(deliver(model, folder, "compressed-tensors"), nn.Sequential(nn.Linear(64, 64)))
    >>> print(again[0].weight_quantizer.spec)
    float8_e4m3fn per_channel(0)
    """
    check_path(path, _CALL, CheckpointError)
    if model is not None:
        check_model(model, "read", _CALL, CheckpointError)
        refuse_prepared(model, "read")
    source = Path(path)
    format = format_of(source)
    built = format.build(source) if model is None else model
    return apply(built, decoded(format, source, built))


def decoded(format: DeliveryFormat, path: Path, model: nn.Module) -> QuantizedState:
    """The state in a file or folder.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return format.decode(path, model)
    except CheckpointError:
        raise
    except Exception as error:  # of code that reads damaged files: any
        raise CheckpointError(
            f"{path} is no {format.name}, or it is damaged: {type(error).__name__}: {error}"
        ) from error
