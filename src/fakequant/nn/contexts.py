"""Contexts in which the quantizers of a model behave otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fakequant.nn.quantizer import Kind, quantizers
from fakequant.nn.weight_cache import WeightCache, counting_optimizer_steps
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
    """A context in which weights that have not changed are not quantized again: evaluation, gradient accumulation.

    Of layers that multiply codes, the codes and what is made of them are kept.

    Results and gradients are the same bits. A weight is quantized again after everything that leaves a trace: a step of
    any torch optimizer, operations in place (`copy_`, `load_state_dict`), another tensor or other memory in its place
    (`.data =`, `to`, `half`), another scale, zero point or specification. What is written through `weight.data`, as by
    `weight.data.copy_(average)`, or through a numpy array leaves none: do that outside of the context, or write to the
    weight itself under `torch.no_grad()`. A compiled model quantizes at every call.

    While the context lasts, every weight's quantized values and one bit per element are kept; copies and pickles of
    the model have none of it.

    >>> layer = nn.Linear(4, 4)
    >>> layer.weight_quantizer = fq.nn.Quantizer("int8 per_channel(0)", kind=Kind.WEIGHT)
    >>> with cached_weights(layer), torch.no_grad():
    ...     first, again = (layer.weight_quantizer(layer.weight) for _ in range(2))
    >>> first.data_ptr() == again.data_ptr()
    True
    """
    found = [quantizer for quantizer in quantizers(model).values() if quantizer.kind is Kind.WEIGHT]
    with counting_optimizer_steps(), restore_after(attributes_of(found, "_cache")):
        for quantizer in found:
            quantizer._cache = WeightCache()
        yield
