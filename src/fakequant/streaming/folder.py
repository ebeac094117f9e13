"""Quantize a model that does not fit into memory: a block at a time, from a folder to a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.data.digest import digest
from fakequant.data.progress import say
from fakequant.data.token_mask import Mask
from fakequant.delivery.beside import skipped
from fakequant.delivery.delivering import deliver_state, refuse_replacing, weights_in
from fakequant.delivery.folder import CONFIG, check_shard_size
from fakequant.delivery.format import DeliveryFormat, delivery_format
from fakequant.delivery.parts import parts_of, refuse
from fakequant.distributed import Together, process_number, processes_of
from fakequant.errors import ConfigError, OutputError
from fakequant.files import check_path, locked, new_folder, output_errors
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.state.snapshots import QuantizedState, snapshot
from fakequant.ptq.improving.collector import TRANSFORMS
from fakequant.ptq.improving.improve import check_same, checked_steps
from fakequant.ptq.results import Improvement
from fakequant.streaming.blocks import blocks_of
from fakequant.streaming.choosing import Blocks
from fakequant.streaming.joined import joined_state
from fakequant.streaming.source import Load, ModelSource
from fakequant.streaming.work import Work
from fakequant.text import listed

_NOT_MEASURED = (
    "the error of the model's output was not measured, because the blocks were never in memory together; errors of "
    "layers are those on the batches that chose"
)


def improve_folder(  # noqa: PLR0913  all but the first five by name
    source: str | os.PathLike[str] | nn.Module,
    target: str | os.PathLike[str],
    config: Config | str,
    batches: Iterable[Any],
    steps: str | Sequence[str] = "fast",
    *,
    format: str = "compressed-tensors",
    load: Load | None = None,
    blocks: str | None = None,
    work: str | os.PathLike[str] | None = None,
    inputs: Inputs | None = None,
    forward: Forward | None = None,
    mask: Mask | None = None,
    group: Any = None,
    max_shard_size: int = 5 * 10**9,
    progress: bool | None = None,
) -> Improvement:
    """Quantize a model larger than memory by `improve`, a block at a time, and deliver it.

    The choices are those of `prepare`, `calibrate` and `improve(..., judge=[])` on the whole model in memory, to the
    bit. Layers that run before the blocks get the nearest codes. One block is in memory at a time, with the weights
    outside of the blocks, and the hidden states before it. The same call after a kill, with a model built anew, goes on
    with the first block that is not finished; it ends with the same files.

    A block may take from earlier blocks only the output of the block before it, unchanged; the model calls each block
    once, in the order of the list. Other models are refused.

    The steps "smooth" and "rotate" are left out of "fast" and "best", because files of other programs have no place for
    the transforms that they put before inputs.

    Args:
        source: a folder that transformers loads, or a model on the meta device.
        target: the folder, or the file, that is written.
        config: a configuration, or the name of a preset.
        batches: what a data loader gives; they are kept as a list.
        steps: as for `improve`.
        format: as for `deliver`.
        load: for a model on the meta device: gives the tensors of the module at a path by their names in it, also
            buffers that `state_dict` leaves out; for "" those outside of the blocks.
        blocks: the path of the list of modules whose items are the blocks; by default the largest one.
        work: a new or empty folder for what is finished, or that of an earlier call; by default one in the target. What
            this function wrote there is removed at the end.
        inputs, forward, mask: as for `calibrate`.
        group: the processes of torch.distributed that choose together, as for `improve`; the first one writes.
        max_shard_size: as for `deliver`.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The errors of all layers, and the path of what was written.

    Raises:
        ConfigError: a model whose blocks get more of each other than hidden states, or the errors of `improve`.
        ExportError: what the format cannot hold; it is refused before the work.
        CheckpointError: the folder cannot be read, or the folder `work` holds another run or other files.
        OutputError: the target holds weights already, or cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> net = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> model, empty, batches = net(), net().to("meta"), [torch.randn(128, 64)]
    >>> with TemporaryDirectory() as folder:
    ...     found = improve_folder(
    ...         empty, folder, "int4_group32", batches, load=lambda path: model.get_submodule(path).state_dict()
    ...     )
    ...     again = read(folder, net())
    >>> found.remaining_error < 1
    True
    """
    call = "improve_folder('model', 'folder', 'int4_group128', batches)"
    processes = Together(processes_of(source if isinstance(source, nn.Module) else nn.Module(), group))
    with ExitStack() as stack, processes:  # an error of one process is raised in all
        check_path(target, call)
        check_shard_size(max_shard_size)
        chosen, chosen_steps = delivery_format(format), _without_transforms(steps)
        given = Batches(batches, "improve_folder", inputs=inputs, forward=forward, mask=mask).kept()
        out = Path(target)
        own = out.parent if chosen.suffix and out.suffix == chosen.suffix else out
        folder = own / ".unfinished" if work is None else Path(work)
        _check_places(source, out, own, folder, chosen)
        if process_number() == 0:  # one run at a time; the system lets go of the lock of one that was killed
            stack.enter_context(locked(stack.enter_context(new_folder(folder)), wait=False))
        rank = 0 if processes.group is None else processes.group.rank()
        kept, written = Work(folder, rank), None
        processes.all(None)  # nothing is written where a process refuses the folder
        kept.mark()
        if rank == 0:
            stack.callback(lambda: kept.finished or kept.remove())  # a run that was refused leaves nothing
        copies = folder / f"copies-{process_number()}"
        stack.callback(shutil.rmtree, copies, ignore_errors=True)
        opened = ModelSource.of(source, load, copies)
        prepare(opened.model, config)
        found = blocks_of(opened.model, blocks)
        _refuse_format(chosen, opened.model)
        chooser = Blocks(opened, found, given, processes)
        same = {"quantization": digest(repr(opened.model)), "steps": str(chosen_steps), "format": chosen.name}
        check_same(processes, same | dict.fromkeys(found, ""), "got other arguments")
        run = {
            "model, quantization or blocks": digest([repr(opened.model), opened.files, [*found]]),
            "weights, batches, masks or forward": chooser.begin(),
            "steps": ", ".join(chosen_steps),
        }
        kept.begin(run)
        if rank == 0 and kept.finished and progress is not False:
            say(f"{kept.finished} of {len(found)} blocks are finished by an earlier call")
        chooser.improve(kept, chosen_steps, progress)
        with opened.loaded("", opened.model, found.values()):
            layers = chooser.improve_rest(chosen_steps)
            if rank == 0:
                state = joined_state(opened, found, kept, chooser.quantized)
                others = {} if isinstance(source, nn.Module) else skipped(opened.model, Path(source))
                written = deliver_state(
                    state, opened.model, target, chosen, max_shard_size=max_shard_size, others=others
                )
        processes.all(None)
    if rank == 0:
        kept.remove()
    return Improvement(layers, notes=[_NOT_MEASURED], path=written)


def _check_places(source: Any, out: Path, target: Path, work: Path, chosen: DeliveryFormat) -> None:
    """Raise where the files would replace those that are read, or lie beside weights of another model."""
    if not isinstance(source, nn.Module) and Path(source).resolve() == target.resolve():
        raise ConfigError(f"{target} is the source, too; give another target")
    if work.resolve() == target.resolve():
        raise ConfigError(f"{work} is the target, too; give another folder as work=, or leave it out")
    with output_errors(target):
        there = sorted(target.iterdir()) if target.is_dir() else []
    if chosen.suffix:
        for path in [out] if out != target else [one for one in there if one.suffix == chosen.suffix]:
            refuse_replacing(chosen, path, [path.name])
    elif not Work.is_begun(work):  # a kill may have come while files got their names
        if left := weights_in(target):
            raise OutputError(
                f"{target} holds weights already, {listed(left)}, which programs may load instead; give an empty "
                "folder, or remove them"
            )
        refuse_replacing(chosen, target, [CONFIG])


def _without_transforms(steps: str | Sequence[str]) -> tuple[str, ...]:
    found = checked_steps(steps)
    if not isinstance(steps, str) and (given := [step for step in found if step in TRANSFORMS]):
        raise ConfigError(
            f"the step {given[0]!r} puts a transform before inputs, for which files of other programs have no place; "
            "leave it out"
        )
    return tuple(step for step in found if step not in TRANSFORMS)


def _refuse_format(chosen: DeliveryFormat, model: nn.Module) -> None:
    state = snapshot(model)
    plan = QuantizedState.of(state, state.tensors)
    refuse(chosen, model, parts_of(model, plan), plan, with_ranges=False)
