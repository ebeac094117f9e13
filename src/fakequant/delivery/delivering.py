"""Deliver a model: its codes, as they are, in files that another program loads."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from fakequant.data.arguments import check_model
from fakequant.delivery.beside import beside, digests, folder_of, skipped, unchanged
from fakequant.delivery.folder import check_shard_size, sharded, written_in
from fakequant.delivery.format import DeliveryFormat, delivery_format, delivery_formats
from fakequant.delivery.parts import parts_of, refuse
from fakequant.errors import ExportError, OutputError, warn_user
from fakequant.files import check_path, writable_folder
from fakequant.model.state.codecs import write_folder
from fakequant.model.state.snapshots import LazyTensor, QuantizedState, snapshot
from fakequant.nn.wrappers import unwraps
from fakequant.ptq.advising.engines import holders
from fakequant.text import listed

_CALL = "deliver(model, 'folder', 'compressed-tensors')"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


@unwraps
def deliver(model: nn.Module, folder: str | os.PathLike[str], format: str, *, max_shard_size: int = 5 * 10**9) -> Path:
    """Write a prepared model in a format that other programs load; nothing is quantized again.

    All that the format cannot hold is refused before anything is written. Files are made one tensor after the other,
    and appear when all of them are complete. A folder gets the configuration of the model, and the tokenizer and other
    small files from the folder that it was loaded from, or from the cache of Hugging Face. It replaces files of an
    earlier delivery alone.

    Args:
        model: prepared and calibrated.
        folder: where the files are written; of a format that is one file, its path may be given.
        format: "compressed-tensors", or another of `fakequant.delivery.delivery_formats()`.
        max_shard_size: the largest number of bytes of a file of tensors, as far as its largest tensor allows.

    Returns:
        The folder, or the file where the format is one: what `read` and `verify_delivery` take.

    Raises:
        ExportError: what the format cannot hold, each layer with the reason and the nearest preset that it can hold.
        CheckpointError: an unknown format, or a model that is not prepared.
        OutputError: the folder cannot be written, or holds weights that no delivery wrote, or those of another model.

    >>> from tempfile import TemporaryDirectory
    >>> net = lambda: nn.Sequential(nn.Linear(64, 64))
    >>> model, x = prepare(net(), "int4_group32"), torch.ones(64)
    >>> with TemporaryDirectory() as folder:
    ...     again = read(deliver(model, folder, "compressed-tensors"), net())
    >>> torch.equal(again(x), model(x))
    True
    """
    check_model(model, "deliver", _CALL, ExportError)
    check_path(folder, _CALL)
    check_shard_size(max_shard_size)
    chosen, state = delivery_format(format), snapshot(model)
    source = folder_of(model)
    left = {} if source is None else skipped(model, source)
    path = deliver_state(state, model, folder, chosen, max_shard_size=max_shard_size)
    if left:
        warn_user(
            f"{path} lacks {listed(left)} of {source}, which {type(model).__name__} does not load, as layers for "
            "speculative decoding; improve_folder copies them"
        )
    return path


def deliver_state(
    state: QuantizedState,
    model: nn.Module,
    folder: str | os.PathLike[str],
    chosen: DeliveryFormat,
    *,
    max_shard_size: int,
    others: Mapping[str, LazyTensor] | None = None,
) -> Path:
    """Write a state in a format, see `deliver`.

    Args:
        state: what is written.
        model: prepared as the state says; its own tensors are not read.
        folder: where the files are written.
        chosen: the format.
        max_shard_size: the largest number of bytes of a file of tensors.
        others: tensors that the model does not load, to be written as they are.
    """
    target = Path(folder)
    name = target.name if chosen.suffix and target.suffix == chosen.suffix else ""
    parts = parts_of(model, state)
    refuse(chosen, model, parts, state)
    files = dict(chosen.encode(state, model, parts))
    if others:
        with_others = chosen.with_others(files, others)
        files = files if with_others is None else dict(with_others)
        if with_others is None:
            warn_user(f"{chosen.name} files cannot hold {listed(others)}, which {type(model).__name__} does not load")
    out = writable_folder(target.parent if name else target)
    if chosen.suffix:
        files = {name or key: content for key, content in files.items()}
        write_folder(out, files, lambda: _refuse_others(chosen, out, files))
        return out / next(iter(files))
    small = beside(model)
    free, kept = unchanged(out, small.files, written_in(out) or {})
    notes = (
        [f"the folder lacks {'; and '.join(small.missing)}; put there what loads the model"] if small.missing else []
    )
    if kept:
        notes.append(
            f"{listed(kept)} in {out} stay as they are, others than those of the model; remove them to get its"
        )
    copied = {one: small.files[one] for one in free}
    files = {**copied, **sharded(files, max_shard_size, digests(copied))}
    write_folder(out, files, lambda: _refuse_others(chosen, out, {*files} - {*free}))
    if notes:
        warn_user(f"{chosen.name}: {'; '.join(notes)}")
    return out


def refuse_undeliverable(format: str, model: nn.Module) -> None:
    """Raise an ExportError if a format cannot hold a model as it is prepared; names that are none have no say."""
    chosen = delivery_formats().get(format)
    if chosen is not None:
        state = snapshot(model)
        refuse(chosen, model, parts_of(model, state), state, with_ranges=False)


holders.append(refuse_undeliverable)


def weights_in(folder: Path) -> list[str]:
    """The files of a folder that a loader may take for weights."""
    return sorted({path.name for pattern in _WEIGHTS for path in folder.glob(pattern)})


def refuse_replacing(chosen: DeliveryFormat, path: Path, names: Collection[str]) -> None:
    """Raise where a folder has files of these names, and no delivery in the format wrote them.

    Args:
        chosen: the format.
        path: of the folder, or of the file where the format is one.
        names: of the files.
    """
    folder = path.parent if chosen.suffix else path
    if (there := sorted(name for name in names if (folder / name).exists())) and not chosen.wrote(path):
        raise OutputError(
            f"cannot write to {folder}: it holds {listed(there)}, which fakequant.deliver did not write, such as the "
            "model in float; give an empty folder, or remove them"
        )


def _refuse_others(chosen: DeliveryFormat, folder: Path, names: Collection[str]) -> None:
    """Raise where a folder holds weights that a loader may take for those of this model, or files of the user."""
    if not chosen.suffix and (left := sorted({*weights_in(folder)} - {*names})):
        raise OutputError(
            f"cannot write to {folder}: it holds weights of another model, {listed(left)}, which programs may load "
            "instead; give an empty folder, or remove them"
        )
    refuse_replacing(chosen, folder / next(iter(names)) if chosen.suffix else folder, names)
