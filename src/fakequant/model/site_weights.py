"""The parameters that functions in a model's own `forward` take as weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fakequant.model.paths import join, module_at
from fakequant.model.run.recorded import Recording
from fakequant.nn.operands import LayerWeight
from fakequant.nn.sites import sites_of


def parameters_of(
    owner: nn.Module,
    parameters: Sequence[nn.Parameter],
    recording: Recording,
    call: tuple[str, str, int],
    operands: Iterable[str],
) -> dict[str, str]:
    """The operands of a call that are parameters of its owner which nothing else reads, with their paths in the owner.

    Args:
        owner: the module whose `forward` calls it.
        parameters: those of the float model, as it lists them.
        recording: of its run.
        call: owner, function and index.
        operands: the names to look at.
    """
    names = {id(parameter): name for name, parameter in owner.named_parameters(remove_duplicate=False)}
    found: dict[str, str] = {}
    for operand in operands:
        value = next(one.operands[operand] for one in recording.calls_of[call[0]] if one.site == call)
        readers = recording.consumers[value]
        alone = all(one.site == call and one.inputs.count(value) == 1 for one in readers)
        if value < len(parameters) and alone and (name := names.get(id(parameters[value]))) is not None:
            found[operand] = name
    return found


def site_weights(model: nn.Module) -> dict[str, LayerWeight]:
    """The parameters that functions alone read and quantize as weights, by the path of the quantizer."""
    return {
        join(path, f"_sites.{key}.{operand}"): LayerWeight(site, operand, *_holder(owner, name))
        for path, owner in model.named_modules()
        if (sites := sites_of(owner)) is not None
        for key, site in sites.by_key().items()
        for operand, name in site.weights.items()
        if site._modules.get(operand) is not None
    }


def _holder(owner: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, name = path.rpartition(".")
    return module_at(owner, module), name
