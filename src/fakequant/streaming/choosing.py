"""Choose the weights of a model block after block, and then the weights of the modules after the blocks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fakequant.data.batches import Batches, Forward, HeldOut, Inputs, KeptBatches, Mask, say, track
from fakequant.data.digest import digest
from fakequant.delivery.delivering import deliver_state, parts_of, refuse, refuse_replacing, skipped, weights_in
from fakequant.delivery.folder import CONFIG, check_shard_size, class_of
from fakequant.delivery.format import DeliveryFormat, delivery_format
from fakequant.distributed import Ranks, process_number, processes_of
from fakequant.errors import CheckpointError, ConfigError, OutputError
from fakequant.files import check_path, locked, new_folder, output_errors
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.run.outputs import float_tensors
from fakequant.model.state.plan import OwnerEntry, Plan, SiteQuantizerEntry, SitesEntry
from fakequant.model.state.snapshots import LazyTensor, LazyTensors, Made, QuantizedState, lazy, snapshot
from fakequant.model.state.weight_codes import WeightCodes
from fakequant.model.weights import disabled, evaluating, raise_scales
from fakequant.nn.paths import join, layer_of
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.ptq.improvement import check_same, checked_steps, improved
from fakequant.ptq.judging import Improvement, LayerResult
from fakequant.ptq.solvers.transforms import TRANSFORMS
from fakequant.ptq.weights import calibrated_weights
from fakequant.restore import attributes_of, restore_after, set_to
from fakequant.streaming.blocks import BlockCall, Work, blocks_of, calls_of, in_place_of
from fakequant.text import listed, module_name

_CURE = "give a model on the meta device with load="
Load = Callable[[str], Mapping[str, Tensor]]
"""Returns the tensors of the module at a path by name; for "", the tensors outside of the blocks are enough."""


class ModelSource:
    """A float model on the meta device, and where its weights come from.

    Args:
        device: the device for the weights; None: they stay where `load` has them.
        files: the size and the time of change of each file of weights, by the file's name.
    """

    def __init__(
        self,
        model: nn.Module,
        load: Load,
        device: torch.device | None = None,
        files: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.model, self._load, self._device, self.files = model, load, device, files or {}
        self._read: dict[str, Future[Mapping[str, Tensor]]] = {}

    @classmethod
    def of(cls, source: Any, load: Load | None, copies: Path, device: torch.device | None = None) -> ModelSource:
        """The source of a folder, or of a model on the meta device with `load`; raises ConfigError for others."""
        if isinstance(source, nn.Module):
            if load is None or not all(parameter.is_meta for parameter in source.parameters()):
                raise ConfigError(
                    "improve_folder takes a folder; or a model with all parameters on the meta device, and load=, a "
                    "function that returns the tensors of a block; improve a model in memory by fakequant.ptq.improve"
                )
            return cls(source, load, device)
        model, load, files = _opened(Path(source), copies)
        return cls(model, load, device, files)

    @contextmanager
    def loaded(self, path: str, module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[None]:
        """A context in which a module has its weights; the inner modules `without` stay empty."""
        parts, skipped = dict(module.named_modules(remove_duplicate=False)), {*without}
        inside = tuple(f"{name}." for name, part in parts.items() if part in skipped)
        places: dict[int, tuple[Tensor, _Places]] = {}  # of each tensor without values, or on another device
        for name, part in parts.items():
            if f"{name}.".startswith(inside) or isinstance(part, Quantizer):
                continue
            for held in part._parameters, part._buffers:
                for own, tensor in held.items():
                    if tensor is not None and (tensor.is_meta or self._device not in (None, tensor.device)):
                        places.setdefault(id(tensor), (tensor, []))[1].append((join(name, own), held, own))
        given = self._given(path)
        filled = [
            (shared, tensor, _filled(path, shared, tensor, given, self._device)) for tensor, shared in places.values()
        ]
        try:
            for shared, _, values in filled:
                for _, held, own in shared:
                    held[own] = values
            yield
        finally:
            for shared, tensor, _ in filled:
                for _, held, own in shared:
                    held[own] = tensor

    @contextmanager
    def reading(self, path: str, module: nn.Module) -> Iterator[None]:
        """A context in which a thread reads the tensors that `loaded` will put on the device, into CPU memory.

        Without a device, nothing is read.
        """
        if self._device is None:
            yield
            return
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        names, default = [name for name, tensor in tensors if tensor.is_meta], torch.get_default_device()

        def read() -> Mapping[str, Tensor]:
            with nullcontext() if default.type == "cpu" else default:  # as in the thread of the caller
                given = self._now(path)
                with _named_errors(path):
                    return {name: given[name].detach().to("cpu", copy=True) for name in names if name in given}

        with ThreadPoolExecutor(1) as thread:
            self._read[path] = thread.submit(copy_context().run, read)
            yield

    def tensor(self, path: str, name: str) -> Tensor:
        """A tensor of the module at a path, by its name in the module."""
        with _named_errors(path):
            return self._given(path)[name]

    def _given(self, path: str) -> Mapping[str, Tensor]:
        return self._read.pop(path).result() if path in self._read else self._now(path)

    def _now(self, path: str) -> Mapping[str, Tensor]:
        with _named_errors(path):
            given = self._load(path)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"load({path!r}) gave a {type(given).__name__}; it must give tensors by name")
        return given


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """A context in which errors while a module is loaded, such as a missing shard, name the module."""
    try:
        yield
    except Exception as error:  # of the user's function, or of files: any
        raise CheckpointError(
            f"the tensors of {module_name(path)} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


_Places = list[tuple[str, dict[str, Any], str]]
"""The places of a tensor in a module, several if it is tied: its name, the dict that holds it, its key in the dict."""


def _filled(
    path: str, shared: _Places, tensor: Tensor, given: Mapping[str, Tensor], device: torch.device | None
) -> Tensor:
    """A tensor's values on a device; for a tied tensor, one of its names in `given` is enough."""
    if not tensor.is_meta:
        return tensor.to(device)
    names = [name for name, *_ in shared]
    name = next((name for name in names if name in given), None)
    if name is None:
        raise CheckpointError(f"{module_name(path)} has no values for {listed(names)}; give them by the files or load=")
    with _named_errors(path):
        values = given[name].detach()
    if values.shape != tensor.shape:
        raise CheckpointError(
            f"{join(path, name)} has the shape {[*values.shape]}, but the model expects {[*tensor.shape]}"
        )
    values = values.to(device, tensor.dtype, copy=True)  # choosing writes into it
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _opened(path: Path, copies: Path) -> tuple[nn.Module, Load, dict[str, tuple[int, int]]]:
    """The model of a folder without weights, a function that loads the weights, and the sizes and times of files."""
    cls = class_of(path, _CURE)
    try:
        from accelerate.hooks import remove_hook_from_module
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} is opened by Accelerate, which is not installed; run pip install accelerate, or {_CURE}"
        ) from error
    try:
        model = cls.from_pretrained(path, dtype="auto", device_map={"": "disk"}, offload_folder=copies)
    except Exception as error:  # of transformers, safetensors or Accelerate: any
        raise CheckpointError(f"{path} cannot be opened by transformers: {type(error).__name__}: {error}") from error
    kept = {
        join(name, own): (hook.weights_map, own)
        for name, module in model.named_modules()
        if getattr(hook := vars(module).get("_hf_hook"), "weights_map", None) is not None
        for own in (*module._parameters, *module._buffers)
    }
    remove_hook_from_module(model, recurse=True)

    def load(path: str) -> Mapping[str, Tensor]:
        start = f"{path}." if path else ""
        return Made(
            {
                name.removeprefix(start): partial(weights.__getitem__, own)
                for name, (weights, own) in kept.items()
                if name.startswith(start) and own in weights
            }
        )

    stats = {one.name: one.stat() for one in sorted(path.glob("*.safetensors"))}
    return model.eval(), load, {name: (one.st_size, one.st_mtime_ns) for name, one in stats.items()}


def joined_state(
    source: ModelSource, blocks: Mapping[str, nn.Module], work: Work, quantized: Sequence[bool]
) -> QuantizedState:
    """The state of a prepared model; the modules outside of its blocks must have their weights.

    Blocks that are `quantized` come from `work`, the others from the source.
    """
    state = snapshot(source.model)
    inside = tuple(f"{path}." for path in blocks)
    tensors = {name: lazy(state.tensors, name) for name in state.tensors if not name.startswith(inside)}
    weights: dict[str, Callable[[], WeightCodes]] = {
        name: lambda name=name: state.weights[name] for name in state.weights if not name.startswith(inside)
    }
    outside = Plan(
        layers={name: entry for name, entry in state.layers.items() if not f"{name}.".startswith(inside)},
        sites=SitesEntry(
            {name: entry for name, entry in state.sites.owners.items() if not f"{name}.".startswith(inside)},
            [name for name in state.sites.shielded if not f"{name}.".startswith(inside)],
        ),
        stale=[name for name in state.stale if not name.startswith(inside)],
    )
    plans = [outside]
    for number, (path, block) in enumerate(blocks.items()):
        own = block.state_dict()
        if not quantized[number]:
            tensors |= {
                join(path, key): LazyTensor.of(x, lambda path=path, key=key, x=x: source.tensor(path, key).to(x.dtype))
                for key, x in own.items()
            }
            continue
        held = work.state(number)
        plans.append(_placed(held, path))
        for key, x in held.tensors.items():
            tensors[join(path, key)] = LazyTensor.of(x, lambda number=number, key=key: work.state(number).tensors[key])
        for name in held.weights:
            tensors[join(path, name)] = LazyTensor.of(
                own[name], lambda number=number, name=name: work.state(number).weights[name].values()
            )

            def coded(number: int = number, name: str = name, path: str = path) -> WeightCodes:
                weight = work.state(number).weights[name]
                return replace(weight, quantizers=tuple(join(path, one) for one in weight.quantizers))

            weights[join(path, name)] = coded
    plan = Plan(
        shared=state.shared,
        versions=state.versions,
        layers={name: entry for one in plans for name, entry in one.layers.items()},
        sites=SitesEntry(
            {name: entry for one in plans for name, entry in one.sites.owners.items()},
            [name for one in plans for name in one.sites.shielded],
        ),
        stale=[name for one in plans for name in one.stale],
    )
    names = {name: name for name in [*source.model.state_dict()] if name in tensors}  # in the order of the model
    ordered = {name: tensors[name] for name in (*names, *(name for name in tensors if name not in names))}
    return QuantizedState.of(plan, LazyTensors(ordered), Made(weights))


def _placed(plan: Plan, path: str) -> Plan:
    """The plan of a module as a part of a model's plan: its paths are put below `path`."""

    def placed(entry: SiteQuantizerEntry) -> SiteQuantizerEntry:
        return entry if entry.group is None else replace(entry, group=join(path, entry.group))

    owners: dict[str, OwnerEntry] = {}
    for name, owner in plan.sites.owners.items():
        placed_sites = {
            key: replace(site, quantizers={own: placed(entry) for own, entry in site.quantizers.items()})
            for key, site in owner.sites.items()
        }
        owners[join(path, name)] = replace(owner, sites=placed_sites)
    return Plan(
        layers={join(path, name): entry for name, entry in plan.layers.items()},
        sites=SitesEntry(owners, [join(path, name) for name in plan.sites.shielded]),
        stale=[join(path, name) for name in plan.stale],
    )


_CALLER = "improve_folder"


class Blocks:
    """The blocks of a prepared model, which are improved one by one; `quantized` says which have quantizers."""

    def __init__(
        self,
        source: ModelSource,
        blocks: Mapping[str, nn.Module],
        batches: KeptBatches,
        processes: Ranks,
    ) -> None:
        self._source, self._blocks, self._batches = source, blocks, batches
        self._processes, self._layers = processes, list[LayerResult]()
        self._floats, self._quantized = dict[int, Tensor](), dict[int, Tensor]()
        inside = tuple(f"{path}." for path in blocks)
        self._outside = {path: q for path, q in quantizers(source.model).items() if not path.startswith(inside)}
        self.quantized = [bool(quantizers(block)) for block in blocks.values()]
        self._last = max((number for number, own in enumerate(self.quantized) if own), default=-1)
        if self._last < 0:
            paths = [*blocks]
            raise ConfigError(f"nothing is quantized in the blocks {paths[0]} to {paths[-1]}; change the config")
        if self._outside:
            self._last = len(blocks) - 1  # the modules after the blocks need the outputs of all

    def improve(self, work: Work, steps: tuple[str, ...], progress: bool | None) -> None:
        """Choose the weights of all blocks that are not finished."""
        start = min(self._processes.all(work.finished))
        if start:
            device = next(iter(self._floats.values())).device
            self._floats, self._quantized = tree_map_only(Tensor, lambda x: x.to(device), work.hidden(start))
        paths, left = [*self._blocks], range(start, self._last + 1)
        for number in range(start):
            with self._source.loaded(paths[number], self._blocks[paths[number]]):
                work.check_weights(number, paths[number], _weights_of(self._blocks[paths[number]]))
        for number in track(left, "choosing blocks", len(left), progress):
            path, calls = paths[number], self._calls.of_blocks[number]
            block, later = self._blocks[path], paths[number + 1 : self._last + 1]
            following = self._source.reading(later[0], self._blocks[later[0]]) if later else nullcontext()
            with self._source.loaded(path, block), following, evaluating(block), torch.no_grad():
                weights = _weights_of(block)
                wanted, given = _batches(calls, self._floats), _batches(calls, self._quantized)
                floats = _batches(calls, {at: self._floats[at] for at in self._quantized})
                layers, held = list[LayerResult](), quantizers(block).values()
                if _needs_ranges(held):
                    calibrate(
                        block, [*wanted], forward=_run, mask=_mask_of(calls), group=self._processes.group or False
                    )
                with disabled(block):
                    self._floats = _outputs(path, block, wanted, self._floats)
                if not held:
                    self._quantized = _outputs(path, block, given, self._quantized)
                else:
                    calibrated = calibrated_weights(block, _CALLER)
                    held_out = HeldOut(given, given, given.part([]))  # none judges
                    found = improved(block, calibrated, held_out, steps, self._processes, floats=floats, progress=False)
                    layers = [replace(layer, layer=join(path, layer.layer)) for layer in found.layers]
                    # `improved` ran the batches with all layers chosen.
                    self._quantized = _given(path, given, self._quantized)
                raise_scales(block)
                self._processes.all(None)
                work.put_hidden(number + 1, self._floats, self._quantized)
                work.put_block(number, block if self.quantized[number] else None, layers, weights)
                for quantizer in quantizers(block).values():
                    quantizer.release_codes()  # the codes are in the folder
            self._processes.all(None)
            work.forget_hidden(number)
        self._layers = [layer for number in range(self._last + 1) for layer in work.layers(number)]

    def improve_rest(self, steps: tuple[str, ...]) -> list[LayerResult]:
        """Choose the weights of the modules after the blocks, which must be loaded; returns results of all layers."""
        model, masks = self._source.model, self._batches.masks
        if not self._outside:
            return self._layers
        floats = {at: self._floats[at] for at in self._quantized}
        wanted, given, twins = (
            [_Rest(self._batches.numbered[at], hidden[at], masks[at]) for at in sorted(hidden)]
            for hidden in (self._floats, self._quantized, floats)
        )
        mask = _mask_of(dict(enumerate(wanted)))

        def run(model: nn.Module, call: _Rest) -> Any:
            with set_to(_PRESENT, call):
                return self._batches.run(model, call.batch)

        without, quantized = (Batches(own, _CALLER, forward=run, mask=mask).kept() for own in (twins, given))
        see = self._calls.substitute(lambda: _PRESENT.get().hidden)
        with in_place_of(model, self._blocks, see), _without_cache(model), evaluating(model), torch.no_grad():
            if _needs_ranges(self._outside.values()):
                calibrate(model, wanted, forward=run, mask=mask, group=self._processes.group or False)
            weights = calibrated_weights(model, _CALLER)
            early = {path for path in weights if layer_of(path) in self._calls.before}
            chosen = {path: own for path, own in weights.items() if path not in early}
            held_out = HeldOut(quantized, quantized, quantized.part([]))  # none judges
            found = improved(model, chosen, held_out, steps, self._processes, floats=without, progress=False)
            raise_scales(model)
        note = "nearest: it runs before the blocks"
        rows = {weights[path].row_name(path): note for path in early}
        others = [layer for layer in found.layers if layer.layer not in rows]
        return [*self._layers, *others, *(LayerResult(name, note=note) for name, note in rows.items())]

    def begin(self) -> str:
        """Find the calls of all blocks, and the hidden states before the first block.

        Returns a digest of the weights outside of the blocks, the arguments of blocks, and masks.
        """
        model, paths = self._source.model, [*self._blocks]
        with self._source.loaded("", model, self._blocks.values()), evaluating(model), _without_cache(model):
            with disabled(model):
                self._calls = calls_of(model, paths, self._batches)
            early = {path: q for path, q in self._outside.items() if layer_of(path) in self._calls.before}
            if _needs_ranges(early.values()):
                names = listed(dict.fromkeys(map(layer_of, early)))
                raise ConfigError(
                    f"{names} run before the blocks, and their inputs have static ranges; give these inputs "
                    "dynamic ranges, or leave the layers in float"
                )
            self._floats = {number: call.hidden for number, call in self._calls.of_blocks[0].items()}
            own = calls_of(model, paths, self._batches, to_the_end=False) if early else self._calls
            # A repeated batch counts once, as for `improve`; ranges of inputs count all.
            self._quantized = {number: own.of_blocks[0][number].hidden for number in self._batches.firsts()}
            given = [
                [call.hidden, call.mask, *tree_leaves((call.args, call.kwargs))]
                for call in self._calls.of_blocks[0].values()
            ]
            return digest([given, [x for x in model.state_dict().values() if not x.is_meta]])


_PRESENT: ContextVar[Any] = ContextVar("present")
"""The call of the modules after the blocks that runs in this thread."""


@dataclass(eq=False)
class _Rest:
    """A call of the modules after the blocks: the batch, the last block's hidden states, and the mask."""

    batch: Any
    hidden: Tensor
    mask: Tensor | None


def _weights_of(block: nn.Module) -> str:
    """A digest of the tensors of a loaded block."""
    return digest([*block.state_dict().items(), *block.named_buffers()])


def _needs_ranges(held: Iterable[Quantizer]) -> bool:
    """Whether one of these quantizers gets its range by calibration."""
    return any(one.kind is not Kind.WEIGHT and not one.dynamic for one in held)


def _run(block: nn.Module, call: BlockCall) -> Any:
    call.output = call.run(block)
    return call.output


def _batches(calls: Mapping[int, BlockCall], hidden: Mapping[int, Tensor]) -> KeptBatches:
    """The calls of a block, with other hidden states, as batches."""
    own = [calls[number].with_hidden(hidden[number]) for number in sorted(hidden)]
    return Batches(own, _CALLER, forward=_run, mask=_mask_of(calls)).kept()


def _mask_of(calls: Mapping[int, Any]) -> Callable[[Any], Tensor] | None:
    return None if any(call.mask is None for call in calls.values()) else lambda call: call.mask


def _outputs(path: str, block: nn.Module, batches: KeptBatches, hidden: Iterable[int]) -> dict[int, Tensor]:
    """The hidden states that a block returns for its calls, by the number of the batch, which `hidden` has."""
    for call in batches.numbered.values():
        batches.run(block, call)
    return _given(path, batches, hidden)


def _given(path: str, batches: KeptBatches, hidden: Iterable[int]) -> dict[int, Tensor]:
    """The hidden states that the last run of each call returned, by the number of the batch, which `hidden` has."""
    found: dict[int, Tensor] = {}
    for number, call in zip(sorted(hidden), batches.numbered.values(), strict=True):
        tensors = float_tensors(call.output)
        if not tensors or tensors[0].shape != call.hidden.shape:
            raise ConfigError(f"{path} returns no hidden states of the shape of its input; improve the model in memory")
        found[number] = tensors[0]
    return found


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A context in which a model of transformers makes no cache, because blocks would write to it at each call."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "use_cache")}
    with restore_after(attributes_of(configs.values(), "use_cache")):
        for config in configs.values():
            config.use_cache = False
        yield


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
    device: str | torch.device | None = None,
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

    The weights are, to the bit, those of `prepare`, `calibrate` and `improve(..., judge=[])` on the whole model in
    memory. Layers that run before the blocks get the nearest codes. One block is in memory at a time, with the weights
    outside of the blocks, and the hidden states before it. After a kill, the same call with a model built anew goes on
    with the first block that is not finished, and ends with the same files.

    The model must call each block once, in the order of the list. Of earlier blocks' results, a block may get only the
    output of the block before it, unchanged. Other models are refused.

    "fast" and "best" do not include the steps "smooth" and "rotate", because files of other programs have no place for
    the transforms that these steps put before inputs.

    Args:
        source: a folder that transformers loads, or a model on the meta device.
        target: the path of the folder, or of the single file, to write.
        config: a configuration, or the name of a preset.
        batches: the batches of a data loader; all are stored in a list.
        steps: as for `improve`.
        format: as for `deliver`.
        load: for a model on the meta device, a function that returns the tensors of the module at a path, by their
            names in the module, with buffers that `state_dict` omits; for "" the tensors outside of the blocks.
        device: the device of blocks, batches and hidden states while a block is chosen, such as "cuda"; by default they
            stay where the folder, `load` and the batches have them: on the CPU. With a device, a thread reads the next
            block meanwhile.
        blocks: the path of the list of modules whose items are the blocks; by default the list with most parameters.
        work: a new or empty folder for finished blocks, or the folder of an earlier call; by default a folder in the
            target. At the end this function removes its files from the folder.
        inputs, forward, mask: as for `calibrate`.
        group: the processes of torch.distributed that choose together, as for `improve`; the first process writes.
        max_shard_size: as for `deliver`.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    Returns:
        The errors of all layers, and the path of the folder or file that was written.

    Raises:
        ConfigError: a block gets more from another block than hidden states; or for the reasons of `improve`.
        ExportError: the format cannot hold some layers; raised before the work.
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
    processes = Ranks(processes_of(source if isinstance(source, nn.Module) else nn.Module(), group))
    with ExitStack() as stack, processes:  # an error of one process is raised in all
        check_path(target, call)
        check_shard_size(max_shard_size)
        chosen, checked = delivery_format(format), checked_steps(steps)
        if not isinstance(steps, str) and (transforms := [step for step in checked if step in TRANSFORMS]):
            raise ConfigError(
                f"the step {transforms[0]!r} puts a transform before inputs, for which files of other programs have no "
                "place; leave the step out"
            )
        chosen_steps = tuple(step for step in checked if step not in TRANSFORMS)
        place = None if device is None else _device(device)
        if place is not None:
            batches = tree_map_only(Tensor, lambda x: x.to(place), [*batches])
        given = Batches(batches, "improve_folder", inputs=inputs, forward=forward, mask=mask, progress=progress).kept()
        out = Path(target)
        own = out.parent if chosen.suffix and out.suffix == chosen.suffix else out
        folder = own / ".unfinished" if work is None else Path(work)
        _check_places(source, out, own, folder, chosen)
        if process_number() == 0:  # one run at a time; the system releases the lock of a killed process
            stack.enter_context(locked(stack.enter_context(new_folder(folder)), wait=False))
        rank = 0 if processes.group is None else processes.group.rank()
        kept, written = Work(folder, rank), None
        processes.all(None)  # nothing is written where a process refuses the folder
        kept.mark()
        if rank == 0:
            stack.callback(lambda: kept.finished or kept.remove())  # a run that was refused leaves nothing
        copies = folder / f"copies-{process_number()}"
        stack.callback(shutil.rmtree, copies, ignore_errors=True)
        opened = ModelSource.of(source, load, copies, place)
        prepare(opened.model, config)
        found = blocks_of(opened.model, blocks)
        state = snapshot(opened.model)
        plan = QuantizedState.of(state, state.tensors)
        refuse(chosen, opened.model, parts_of(opened.model, plan), plan, with_ranges=False)
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
                    state,
                    opened.model,
                    target,
                    chosen,
                    max_shard_size=max_shard_size,
                    others=others,
                    progress=progress,
                )
        processes.all(None)
    if rank == 0:
        kept.remove()
    return Improvement(layers, notes=[_NOT_MEASURED], path=written)


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a device, such as 'cuda': {error}") from error


def _check_places(source: Any, out: Path, target: Path, work: Path, chosen: DeliveryFormat) -> None:
    """Raise an error if the written files would replace the source, or lie beside weights of another model."""
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
