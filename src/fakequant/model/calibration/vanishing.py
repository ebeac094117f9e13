"""What a scale rounds to nothing: operands and channels whose values are all below half of its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fakequant.errors import CalibrationWarning, warn_user
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.sites.sites import Site
from fakequant.numerics.formats.integers import IntegerFormat
from fakequant.text import listed

_JOINS = ("cat", "stack", "add")
"""Functions whose operands have one scale in the result."""


class _Vanishing(NamedTuple):
    quantizers: tuple[Quantizer, ...]
    largest: Tensor


class Vanishing:
    """The largest values of what has one scale together with others, over the batches of a calibration.

    These are the operands of functions, and the channels of what the model itself gets.

    Args:
        model: that is calibrated.
        inputs: its input quantizers that get a range, by path.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Quantizer]) -> None:
        self._sites = {path: site for path, site in model.named_modules() if isinstance(site, Site)}
        self._layers: list[tuple[str, Quantizer, int]] = []
        for name, quantizer in inputs.items():
            layer, attribute = model.get_submodule(layer_of(name)), name.rpartition(".")[2]
            operand = layer.operands(layer).get(attribute) if isinstance(layer, QuantizedLayer) else None
            if operand is not None:
                self._layers.append((name, quantizer, operand.reduction))
        self._given, self._found = set[int](), dict[str, _Vanishing]()

    def enter(self, batch: Any) -> None:
        """Note a batch before the model gets it."""
        given = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        self._given = {leaf.data_ptr() for leaf in given if _is_plain(leaf)}

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """A context in which calls are seen."""
        handles = [
            site.watch(lambda values, *_, p=path, s=site: self._see_site(p, s, values))
            for path, site in self._sites.items()
        ]
        handles += [own.register_forward_pre_hook(self._hook(name, own, axis)) for name, own, axis in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see_site(self, path: str, site: Any, values: Mapping[str, Tensor]) -> None:
        names = ("output",) if site.function in _JOINS else ()
        for name, x in values.items():
            own = tuple(q for key in (name, *names) if isinstance(q := site._modules.get(key), Quantizer))
            if own and isinstance(x, Tensor) and _is_plain(x) and not isinstance(x, nn.Parameter):
                self._add(f"{name} of {path}", own, x.detach().abs().amax().reshape(1))

    def _hook(self, name: str, own: Quantizer, axis: int) -> Any:
        return lambda _, args: self._see(name, own, args[0], axis)

    def _see(self, name: str, quantizer: Quantizer, x: Tensor, axis: int) -> None:
        if x.dim() > 1 and _is_plain(x) and x.data_ptr() in self._given:
            self._add(layer_of(name), (quantizer,), x.detach().abs().movedim(axis, -1).flatten(0, -2).amax(0))

    def _add(self, what: str, quantizers: tuple[Quantizer, ...], largest: Tensor) -> None:
        before = self._found.get(what)
        if before is not None and before.largest.shape == largest.shape:
            largest = torch.maximum(before.largest, largest)
        self._found[what] = _Vanishing(quantizers, largest.float())

    def warn(self) -> None:
        """Say what the scales that were chosen round to nothing."""
        lost = []
        for what, (quantizers, largest) in self._found.items():
            step = max((_step(own) for own in quantizers), default=0.0)
            small = (largest > 0) & (largest < step / 2)
            if not bool(small.any()):
                continue
            most = float(largest[small].max())
            numbers = small.nonzero().flatten().tolist()
            where = (
                what if len(largest) == 1 else f"channel {listed([str(n) for n in numbers], 4)} of the input of {what}"
            )
            lost.append(f"{where} (largest {most:.3g}, step {step:.3g})")
        if lost:
            warn_user(
                f"all values are below half a step of their scale, and become 0: {listed(lost, 4)}. Scale them in "
                "the model, quantize them apart from the large ones, or leave the function or layer in float by a rule",
                CalibrationWarning,
            )


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has values here; those of transforms of torch.func and of several processes have none."""
    is_wrapped = torch._C._are_functorch_transforms_active() or is_traceable_wrapper_subclass(x)
    return not (is_wrapped or x.is_meta or x.is_nested) and x.numel() > 0


def _step(quantizer: Quantizer) -> float:
    """The step of a quantizer with one fixed scale of integers; 0 for others, whose smallest values are finer."""
    if not isinstance(quantizer.spec.format, IntegerFormat) or quantizer.scale is None or quantizer.scale.numel() != 1:
        return 0.0
    return float(quantizer.scale.abs())
