"""Choose the weights of a model block after block, and then those of the modules after the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.data.batches import Batches, KeptBatches
from fakequant.data.digest import digest
from fakequant.data.progress import track
from fakequant.distributed import Together
from fakequant.errors import ConfigError
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.modes import disabled, evaluating
from fakequant.model.run.outputs import float_tensors
from fakequant.model.scale_floor import raise_scales
from fakequant.nn.paths import join, layer_of
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.ptq.improving.effect import Split
from fakequant.ptq.improving.improve import improved
from fakequant.ptq.results import LayerResult
from fakequant.ptq.weights import calibrated_weights
from fakequant.restore import attributes_of, restore_after
from fakequant.streaming.blocks import BlockCall, calls_of, in_place_of
from fakequant.streaming.source import ModelSource
from fakequant.streaming.work import Work
from fakequant.text import listed

_CALLER = "improve_folder"


class Blocks:
    """The blocks of a prepared model, chosen one after the other.

    Args:
        source: the model.
        blocks: by path.
        batches: of the model.
        processes: that choose together.

    Attributes:
        quantized: which blocks have quantizers.
    """

    def __init__(
        self,
        source: ModelSource,
        blocks: Mapping[str, nn.Module],
        batches: KeptBatches,
        processes: Together,
    ) -> None:
        self._source, self._blocks, self._batches = source, blocks, batches
        self._processes, self._layers = processes, list[LayerResult]()
        self._floats, self._quantized = dict[int, Tensor](), dict[int, Tensor]()
        inside = tuple(f"{path}." for path in blocks)
        self._outside = {path: q for path, q in quantizers(source.model).items() if not path.startswith(inside)}
        self.quantized = [bool(quantizers(block)) for block in blocks.values()]
        self._last = max((number for number, own in enumerate(self.quantized) if own), default=-1)
        if self._last < 0:
            raise ConfigError(f"nothing is quantized in the blocks {next(iter(blocks))} to {[*blocks][-1]}")
        if self._outside:
            self._last = len(blocks) - 1  # what comes after them needs their outputs

    def improve(self, work: Work, steps: tuple[str, ...], progress: bool | None) -> None:
        """Choose all blocks that are not finished."""
        start = min(self._processes.all(work.finished))
        if start:
            self._floats, self._quantized = work.hidden(start)
        paths, left = [*self._blocks], range(start, self._last + 1)
        for number in range(start):
            with self._source.loaded(paths[number], self._blocks[paths[number]]):
                work.check_weights(number, paths[number], _weights_of(self._blocks[paths[number]]))
        for number in track(left, "choosing blocks", len(left), progress):
            block, calls = self._blocks[paths[number]], self._calls.of_blocks[number]
            with self._source.loaded(paths[number], block), evaluating(block), torch.no_grad():
                weights = _weights_of(block)
                layers = self._improved(paths[number], block, calls, steps)
                self._processes.all(None)
                work.put_hidden(number + 1, self._floats, self._quantized)
                work.put_block(number, block if self.quantized[number] else None, layers, weights)
                for quantizer in quantizers(block).values():
                    quantizer.release_codes()  # they are in the folder
            self._processes.all(None)
            work.forget_hidden(number)
        self._layers = [layer for number in range(self._last + 1) for layer in work.layers(number)]

    def improve_rest(self, steps: tuple[str, ...]) -> list[LayerResult]:
        """Choose the weights of the modules after the blocks, which have their weights; returns the results of all."""
        model, masks = self._source.model, self._batches.masks
        if not self._outside:
            return self._layers
        wanted, given = (
            [_Rest(batch, hidden[number], masks[number]) for number, batch in self._batches.numbered.items()]
            for hidden in (self._floats, self._quantized)
        )
        mask = _mask_of(dict(enumerate(given)))

        def run(model: nn.Module, call: _Rest) -> Any:
            return call.run(model, self._batches)

        floats, quantized = (Batches(own, _CALLER, forward=run, mask=mask).kept() for own in (wanted, given))
        see = self._calls.substitute(lambda: _PRESENT.get().hidden)
        with in_place_of(model, self._blocks, see), _without_cache(model), evaluating(model), torch.no_grad():
            if _needs_ranges(self._outside.values()):
                calibrate(model, wanted, forward=run, mask=mask, group=self._processes.group or False)
            weights = calibrated_weights(model, _CALLER)
            early = {path for path in weights if layer_of(path) in self._calls.before}
            chosen = {path: own for path, own in weights.items() if path not in early}
            split = Split.of(quantized, judge=[])
            found = improved(model, chosen, split, steps, self._processes, floats=floats, progress=False)
            raise_scales(model)
        note = "nearest: it runs before the blocks"
        rows = {weights[path].row_name(path): note for path in early}
        others = [layer for layer in found.layers if layer.layer not in rows]
        return [*self._layers, *others, *(LayerResult(name, note=note) for name, note in rows.items())]

    def begin(self) -> str:
        """Find the calls of all blocks, and the hidden states before the first one.

        Returns:
            A digest of the weights outside of the blocks, the arguments of blocks, and masks.
        """
        model, paths = self._source.model, [*self._blocks]
        with self._source.loaded("", model, self._blocks.values()), evaluating(model), _without_cache(model):
            with disabled(model):
                self._calls = calls_of(model, paths, self._batches)
            early = {path: q for path, q in self._outside.items() if layer_of(path) in self._calls.before}
            if _needs_ranges(early.values()):
                names = listed(dict.fromkeys(map(layer_of, early)))
                raise ConfigError(
                    f"{names}: their inputs have static ranges and run before the "
                    "blocks; give them a dynamic range, or leave them in float"
                )
            self._floats = {number: call.hidden for number, call in self._calls.of_blocks[0].items()}
            own = calls_of(model, paths, self._batches, to_the_end=False) if early else self._calls
            self._quantized = {number: call.hidden for number, call in own.of_blocks[0].items()}
            given = [
                [call.hidden, call.mask, *tree_leaves((call.args, call.kwargs))]
                for call in self._calls.of_blocks[0].values()
            ]
            return digest([given, [x for x in model.state_dict().values() if not x.is_meta]])

    def _improved(
        self, path: str, block: nn.Module, calls: Mapping[int, BlockCall], steps: tuple[str, ...]
    ) -> list[LayerResult]:
        """What is chosen in a block; the hidden states become those after it."""
        wanted, given = _batches(calls, self._floats), _batches(calls, self._quantized)
        layers, held = list[LayerResult](), quantizers(block).values()
        if _needs_ranges(held):
            calibrate(block, [*wanted], forward=_run, mask=_mask_of(calls), group=self._processes.group or False)
        with disabled(block):
            self._floats = _outputs(path, block, wanted)
        if not held:
            self._quantized = _outputs(path, block, given)
        else:
            weights = calibrated_weights(block, _CALLER)
            split = Split.of(given, judge=[])
            found = improved(block, weights, split, steps, self._processes, floats=wanted, progress=False)
            layers = [replace(layer, layer=join(path, layer.layer)) for layer in found.layers]
            self._quantized = _given(path, given)  # its last runs had all layers chosen
        raise_scales(block)
        return layers


_PRESENT: ContextVar[Any] = ContextVar("present")
"""The call of the modules after the blocks that runs now, in this thread."""


class _Rest:
    """A call of a model whose blocks do not run.

    Args:
        batch: of the model.
        hidden: the hidden states after the last block.
        mask: the unmasked tokens.
    """

    def __init__(self, batch: Any, hidden: Tensor, mask: Tensor | None) -> None:
        self.batch, self.hidden, self.mask = batch, hidden, mask

    def run(self, model: nn.Module, batches: Batches) -> Any:
        """What the model gives."""
        token = _PRESENT.set(self)
        try:
            return batches.run(model, self.batch)
        finally:
            _PRESENT.reset(token)


def _weights_of(block: nn.Module) -> str:
    """A digest of the tensors of a block that has its weights."""
    return digest([*block.state_dict().items(), *block.named_buffers()])


def _needs_ranges(held: Iterable[Quantizer]) -> bool:
    """Whether data must give some quantizers their ranges."""
    return any(one.kind is not Kind.WEIGHT and not one.dynamic for one in held)


def _run(block: nn.Module, call: BlockCall) -> Any:
    call.output = call.run(block)
    return call.output


def _batches(calls: Mapping[int, BlockCall], hidden: Mapping[int, Tensor]) -> KeptBatches:
    """Calls of a block with hidden states as its batches."""
    own = [call.with_hidden(hidden[number]) for number, call in calls.items()]
    return Batches(own, _CALLER, forward=_run, mask=_mask_of(calls)).kept()


def _mask_of(calls: Mapping[int, Any]) -> Callable[[Any], Tensor] | None:
    return None if any(call.mask is None for call in calls.values()) else lambda call: call.mask


def _outputs(path: str, block: nn.Module, batches: KeptBatches) -> dict[int, Tensor]:
    """The hidden states that a block gives for its calls."""
    for call in batches.numbered.values():
        batches.run(block, call)
    return _given(path, batches)


def _given(path: str, batches: KeptBatches) -> dict[int, Tensor]:
    """The hidden states that the last runs of calls gave."""
    found: dict[int, Tensor] = {}
    for number, call in batches.numbered.items():
        tensors = float_tensors(call.output)
        if not tensors or tensors[0].shape != call.hidden.shape:
            raise ConfigError(f"{path} gives no hidden states of the shape that it gets; improve the model in memory")
        found[number] = tensors[0]
    return found


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A context in which a model of transformers makes no cache, into which blocks would write at each call."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "use_cache")}
    with restore_after(attributes_of(configs.values(), "use_cache")):
        for config in configs.values():
            config.use_cache = False
        yield
