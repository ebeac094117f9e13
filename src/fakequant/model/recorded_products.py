"""The products of a recorded run, and which of their factors are quantized after `prepare`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fakequant.model.functions import Operation, keeps_quantized
from fakequant.model.recording import Call, Recording
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.sites import Site, sites_of


def recorded_products(model: nn.Module, recording: Recording) -> list[Operation]:
    """All products that the forwards of a prepared model compute, from the recorded run of the float model.

    Args:
        model: the model, prepared after the run.
        recording: of the run.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    quantized: set[int] = set()  # values
    found = []
    for call in recording.calls:
        owner = modules.get(call.owner or "")
        site = None if owner is None else _site(owner, call)
        floats = [value for value in call.inputs if recording.values[value].is_float]
        if _quantizes_result(owner, site) or (
            keeps_quantized(call.function) and floats and all(value in quantized for value in floats)
        ):
            quantized.update(call.outputs)
        if call.multiplications and not recording.is_constant(call):
            factors = list(_factors(call, site))
            left = sum(value not in quantized for value, held in factors if not held)
            found.append(Operation(call.owner or "", call.function, True, left, len(factors), call.multiplications))
    return found


def quantized_parameters(model: nn.Module, recording: Recording) -> set[nn.Parameter]:
    """The parameters from which calls compute a weight that they quantize: `F.linear(x, self.base + self.a @ self.b)`.

    Args:
        model: the model, prepared after the run.
        recording: of the run.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    reached: set[int] = set()  # values
    for call in reversed(recording.calls):
        owner = modules.get(call.owner or "")
        site = None if owner is None else _site(owner, call)
        if reached.isdisjoint(call.outputs):
            held = {} if site is None else site._modules
            read = [value for name, value in call.operands.items() if isinstance(held.get(name), Quantizer)]
        else:
            read = list(call.inputs)
        reached.update(value for value in read if recording.values[value].constant)
    return {parameter for value, parameter in enumerate(model.parameters()) if value in reached}


def _site(owner: nn.Module, call: Call) -> Site | None:
    sites = sites_of(owner)
    site = None if sites is None else sites._modules.get(f"{call.function}_{call.index}")
    return site if isinstance(site, Site) else None


def _factors(call: Call, site: Site | None) -> Iterator[tuple[int, bool]]:
    """The factors of a product, and whether the call quantizes them."""
    held = {} if site is None else site._modules
    if call.operands:
        return ((value, isinstance(held.get(name), Quantizer)) for name, value in call.operands.items())
    return ((value, False) for value in call.factors)


def _quantizes_result(owner: nn.Module | None, site: Site | None) -> bool:
    holders = [(site, "output"), (owner, "_output_quantizer")]
    return any(isinstance(getattr(holder, name, None), Quantizer) for holder, name in holders)
