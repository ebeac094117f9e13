"""Fix the scale of the tensor for inputs whose blocks have dynamic scales, as servers do."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model
from fakequant.data.batches import Batches, Forward, Inputs
from fakequant.errors import CalibrationError
from fakequant.model.modes import evaluating
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.nn.ranges.global_scale import may_be_fixed
from fakequant.nn.wrappers import unwraps
from fakequant.restore import restore_on_error, state_of
from fakequant.text import listed

Model = TypeVar("Model", bound=nn.Module)


@unwraps
def fix_global_scales(
    model: Model, batches: Iterable[Any], *, inputs: Inputs | None = None, forward: Forward | None = None
) -> Model:
    """Fix the scale of the tensor for the NVFP4 inputs of a prepared model, in place; the model is returned.

    The preset `NVFP4` chooses this scale for each input anew. Files of compressed-tensors have 1 / the scale for each
    layer, by the largest magnitude in some batches: 448 * 6 / amax. The scales of blocks stay dynamic. Larger inputs
    are clamped.

    Args:
        model: prepared, with dynamic inputs under one scale of the tensor.
        batches: examples of inputs.
        inputs: the part of a batch that is the model's input, as for `calibrate`.
        forward: how the model is called with a batch, as for `calibrate`.

    Raises:
        CalibrationError: the model has no such inputs, or no batch has values other than 0 for one, by name; the model
            is unchanged then.

    >>> model = prepare(nn.Sequential(nn.Linear(32, 32)), "nvfp4", skip=[])
    >>> fix_global_scales(model, [torch.full((1, 32), 2.0)])[0].input_quantizer.global_scale
    tensor([1344.])
    """
    check_model(model, "fix_global_scales", "fix_global_scales(model, batches)", CalibrationError)
    given = Batches(batches, "fix_global_scales", inputs=inputs, forward=forward)
    found = {
        name: one
        for name, one in quantizers(model).items()
        if one.kind is Kind.INPUT and one.dynamic and one.quantizes and may_be_fixed(one.spec)
    }
    if not found:
        raise CalibrationError("the model has no dynamic inputs under one scale of the tensor, as the preset NVFP4 has")
    largest: dict[str, Tensor] = {}
    with ExitStack() as hooks, evaluating(model), torch.no_grad():
        for name, one in found.items():
            hooks.callback(one.register_forward_pre_hook(partial(_see, largest, name)).remove)
        for batch in given:
            given.run(model, batch)
    if left := [name for name in found if not bool(largest.get(name, torch.zeros(())) > 0)]:
        raise CalibrationError(f"no batch has values other than 0 for {listed(left)}; give batches that reach them")
    with restore_on_error(state_of(found.values())):
        for name, one in found.items():
            one.fix_global_scale(_most(one) / largest[name].reshape(1))
    return model


def _see(largest: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args[0].numel():
        amax = args[0].detach().abs().amax().float()
        largest[name] = torch.maximum(amax, largest[name]) if name in largest else amax


def _most(quantizer: Quantizer) -> float:
    """The largest value of a block in units of the scale of the tensor."""
    fmt = quantizer.spec.scale.format
    assert fmt is not None, "see `may_be_fixed`"
    return fmt.quant_max * quantizer.spec.scale.bound(quantizer.spec.format)
