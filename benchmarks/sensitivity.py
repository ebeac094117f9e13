"""What it costs to find the layers that hurt, compared with a simulated pass for each of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fakequant as fq
from benchmarks.harness import CannotRunError, Prepared
from examples.demo import digits
from fakequant.model.run.outputs import Power, decibels
from fakequant.nn import QuantizedLayer, Quantizer
from tests.support.exactness import by_int64, by_the_reference

WHOLE_PASSES = "simulated passes"


@dataclass(frozen=True)
class OfEveryLayer:
    """`fakequant.sensitivity` of the demo's network on its training images; in one thread, as the demo runs."""

    name: str = "demo's network"
    direction: str = "sensitivity, codes multiplied"
    dtype_name: str = "float32"
    text: str = "INT8"

    @property
    def elements(self) -> int:
        return digits.load_digits()[0].images.numel()

    def _model(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(digits.SEED)
        batches = digits.load_digits()[0].images.split(128)
        model = fq.prepare(digits.Net().eval(), fq.presets.INT8)
        fq.calibrate(model, batches, progress=False)
        return fq.set_execution(model, "auto"), batches

    def differing(self) -> int:
        """Layers with another value than whole passes give by the reference, with products in int64."""
        model, batches = self._model()
        with by_the_reference(), by_int64():
            right = _by_whole_passes(copy.deepcopy(model), batches)
        found = fq.sensitivity(model, batches, progress=False)
        return sum(right[one.layer] != one.value for one in found)

    def prepare(self, against: str) -> Prepared:
        if against != WHOLE_PASSES:
            raise CannotRunError(f"{against} finds no layers")
        model, batches = self._model()
        simulated = fq.set_execution(copy.deepcopy(model), "simulate")

        @digits.one_thread()
        def ours(_: Tensor) -> None:
            fq.sensitivity(model, batches, progress=False)

        @digits.one_thread()
        def theirs(_: Tensor) -> None:
            _by_whole_passes(simulated, batches)

        return Prepared(ours, theirs, [torch.empty(0)])


@torch.no_grad()
def _by_whole_passes(model: nn.Module, batches: tuple[Tensor, ...]) -> dict[str, float]:
    """The definition: the signal-to-noise ratio in dB of the outputs, a pass for each layer."""
    with fq.disabled(model):
        exact = [model(batch) for batch in batches]
    found: dict[str, float] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            with fq.disabled(model):
                for quantizer in layer.children():
                    assert isinstance(quantizer, Quantizer)
                    quantizer.mode = fq.nn.Mode.QUANTIZE
                power = Power()
                for batch, right in zip(batches, exact, strict=True):
                    power.add(right, model(batch))
            found[name] = decibels(power.share)
    return found


SENSITIVITY = OfEveryLayer()
