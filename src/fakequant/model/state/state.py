"""The state of a prepared model as that of the float model."""

from __future__ import annotations

from torch import Tensor, nn

from fakequant.nn.layers import QuantLinear
from fakequant.nn.paths import join
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.wrappers import unwraps
from fakequant.offload import fetched_state


@unwraps
def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a prepared model without its quantizers: the float model loads it with `strict=True`.

    Weights with a product of low rank beside them (`fakequant.ptq.low_rank`) have it added.

    The other way round, a prepared model loads a state dict of the float model by `load_state_dict`, with `strict=True`
    too: its quantizers keep their ranges.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8)
    >>> used = calibrate(model, [torch.ones(1, 4)])
    >>> nn.Sequential(nn.Linear(4, 4)).load_state_dict(float_state_dict(model))
    <All keys matched successfully>
    """
    state = fetched_state(model)
    paths = [
        f"{name}." if name else ""
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Quantizer)
    ]
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantLinear) and module.low_rank is not None:
            weight = state[join(name, "weight")].detach()
            state[join(name, "weight")] = weight + module.low_rank.product().to(weight.dtype)
            paths.append(join(name, "_low_rank."))
    metadata = getattr(state, "_metadata", {})
    for names, end in ((state, ""), (metadata, ".")):
        for name in [name for name in names if f"{name}{end}".startswith(tuple(paths))]:
            del names[name]
    return state
