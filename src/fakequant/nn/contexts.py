"""Contexts in which the quantizers of a model behave otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fakequant.distributed import is_moved
from fakequant.nn.quantizer import Kind, quantizers
from fakequant.nn.weight_cache import WeightCache
from fakequant.restore import attributes_of, restore_after, state_of


@contextmanager
def fixed_ranges(model: nn.Module) -> Iterator[None]:
    """A context in which learned ranges are constants, as exporters need them; then they are learned again."""
    learned = [quantizer for quantizer in quantizers(model).values() if quantizer.learned is not None]
    with restore_after(state_of(learned)):
        for quantizer in learned:
            quantizer.stop_learning()
        yield


@contextmanager
def cached_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each weight is quantized once: for evaluation and inference.

    The first use quantizes the weight, and later ones get the same values or codes again, with the same bits. Weights,
    scales and specifications must not change inside, as within `torch.nn.utils.parametrize.cached`: a change that torch
    counts raises a `CallError` at the next use of the weight. Torch does not count what is written through
    `weight.data` or a NumPy array, nor the steps of fused optimizers.

    Where weights are sharded or offloaded, where a gradient of the weight is wanted, where a range is learned or
    rounding is stochastic, and in compiled models, weights are quantized at every call. Copies and pickles of the model
    hold no quantized weights.

    >>> layer = nn.Linear(4, 4)
    >>> layer.weight_quantizer = fq.nn.Quantizer("int8 per_channel(0)", kind=Kind.WEIGHT)
    >>> with cached_weights(layer), torch.no_grad():
    ...     first, again = (layer.weight_quantizer(layer.weight) for _ in range(2))
    >>> first.data_ptr() == again.data_ptr()
    True
    """
    # Weights that come for each call anew are other tensors each time.
    own = {} if is_moved(model) else quantizers(model)
    found = [quantizer for quantizer in own.values() if quantizer.kind is Kind.WEIGHT]
    with restore_after(attributes_of(found, "_cache")):
        for quantizer in found:
            quantizer._cache = WeightCache(quantizer)
        yield
