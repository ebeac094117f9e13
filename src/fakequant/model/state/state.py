"""The state of a prepared model as that of the float model."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.model.weights import give_values
from fakequant.nn.paths import join
from fakequant.nn.quantized.layers import QuantizedLayer, QuantLinear
from fakequant.nn.ranges.precise import QuantizerPart
from fakequant.nn.stored.weight import StoredWeight, with_stored
from fakequant.nn.transforms import first_weights
from fakequant.nn.wrappers import unwraps
from fakequant.offload import fetched_state


@unwraps
def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a prepared model without its quantizers: the float model loads it with `strict=True`.

    Weights with a product of low rank beside them (`fakequant.ptq.low_rank`) have it added, and transforms of inputs
    (`improve`'s "smooth" and "rotate") are taken out of weights, up to rounding.

    The other way round, a prepared model loads a state dict of the float model by `load_state_dict`, with `strict=True`
    too: its quantizers keep their ranges.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> nn.Sequential(nn.Linear(4, 4)).load_state_dict(float_state_dict(model))
    <All keys matched successfully>
    """
    check_model(model, "float_state_dict", "float_state_dict(model)")
    give_values(model)
    state = with_stored(model, fetched_state(model))
    state.update({name: own.values() for name, own in state.items() if type(own) is StoredWeight})
    added = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, QuantizerPart)}
    for name, module in model.named_modules(remove_duplicate=False):
        transform = module.input_transform if isinstance(module, QuantizedLayer) else None
        if transform is not None:
            for path in (join(name, own) for own in first_weights(module)):
                state[path] = transform.out_of_weight(module, state[path].detach())
            added.add(join(name, "_input_transform"))
        if isinstance(module, QuantLinear) and module.low_rank is not None:
            weight = state[join(name, "weight")].detach()
            state[join(name, "weight")] = weight + module.low_rank.product().to(weight.dtype)
            added.add(join(name, "_low_rank"))
    for names in (state, getattr(state, "_metadata", {})):
        for name in [name for name in names if _is_within(name, added)]:
            del names[name]
    return state


def _is_within(path: str, modules: Container[str]) -> bool:
    """Whether a path is that of one of some modules, or of what one holds."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in modules for count in range(len(parts) + 1))
