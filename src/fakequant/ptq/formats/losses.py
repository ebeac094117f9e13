"""What each choice costs each layer: the error that arrives in the model's output, or a loss of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.data.arguments import Metric, measured
from fakequant.data.batches import KeptBatches
from fakequant.data.progress import track
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.modes import evaluating, modes
from fakequant.model.run.outputs import Distance, Place, float_tensors, named_tensors
from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import Mode
from fakequant.ops import library
from fakequant.ptq.inputs.call import LayerCall
from fakequant.restore import attributes_of, restore_after
from fakequant.text import module_name

_PROBES = 16
"""Random directions of the output, for each batch."""


def divergence(model: nn.Module, batches: KeptBatches, axis: int | None = None) -> Metric:
    """The mean Kullback-Leibler divergence from the model's logits to those of another model.

    Args:
        model: in float, in eval mode; its first floating output holds logits.
        batches: those to compare on.
        axis: of the classes; None for the last one of up to three.

    Raises:
        ConfigError: there are no logits, or they have more axes than three and the axis is not given.
    """
    with torch.no_grad(), batches.one_pass(model):
        wanted = [_logits(batches.run(model, batch), axis) for batch in batches]

    def loss(other: nn.Module) -> float:
        with batches.one_pass(other):
            found = [_logits(batches.run(other, batch), axis) for batch in batches]
        pairs = zip(found, wanted, strict=True)
        total = sum(float(nn.functional.kl_div(own, one, log_target=True, reduction="sum")) for own, one in pairs)
        return total / max(sum(one.numel() // max(one.shape[-1 if axis is None else axis], 1) for one in wanted), 1)

    return loss


def _logits(outputs: Any, axis: int | None) -> Tensor:
    found = float_tensors(outputs)
    if not found or not found[0].dim():
        raise ConfigError('measure="kl" needs a model that gives logits [..., classes]; give a function as measure=')
    if axis is None and found[0].dim() > 3:
        raise ConfigError(
            f'measure="kl" of logits {list(found[0].shape)}: which axis has the classes? Give measure=("kl", 1) for '
            'maps [N, classes, H, W], or ("kl", -1)'
        )
    return found[0].double().log_softmax(-1 if axis is None else axis)


@torch.no_grad()
def losses_alone(
    model: nn.Module, quantized: Mapping[str, nn.Module], layers: Sequence[str], loss: Metric, progress: bool | None
) -> dict[tuple[str, str], Tensor]:
    """What quantizing one layer alone adds to a loss, by layer and choice, as errors in directions of their own.

    A layer that lowers the loss counts as 0.

    Args:
        model: in float.
        quantized: calibrated copies by choice.
        layers: names of those to try.
        loss: called as loss(model), smaller is better.
        progress: whether to show a progress bar.
    """
    with evaluating(model):
        before = measured(loss, model)
    found: dict[tuple[str, str], Tensor] = {}
    tried = [(place, layer, name) for place, layer in enumerate(layers) for name in quantized]
    for place, layer, name in track(tried, "scoring layers", len(tried), progress):
        twin, prefix = quantized[name], f"{layer}." if layer else ""
        with modes(twin, lambda path, own, prefix=prefix: own.mode if path.startswith(prefix) else Mode.OFF):
            added = measured(loss, twin) - before
        if math.isnan(added):
            raise ConfigError(f"the loss with {module_name(layer)} alone in {name} is NaN")
        found[layer, name] = torch.zeros(len(layers), dtype=torch.float64)
        found[layer, name][place] = (len(layers) * max(added, 0.0)) ** 0.5
    return found


@torch.no_grad()
def arriving_errors(
    model: nn.Module,
    layers: Mapping[str, Any],
    quantized: Mapping[str, nn.Module],
    batches: KeptBatches,
) -> dict[tuple[str, str], Tensor]:
    """The errors that arrive in random directions of the output; the mean of squares is a share of its energy.

    Several outputs give the mean of their shares.

    Raises:
        CalibrationError: an output holds NaN, or a gradient does (numbers the batch).
        ConfigError: no output depends on a layer by a gradient, or all are 0.
    """
    parts: dict[tuple[str, str], list[Tensor]] = {(layer, name): [] for layer in layers for name in quantized}
    energies = {place: energy for place, energy in _energies(model, batches).items() if energy}
    if not energies:
        raise ConfigError("every output of the model is 0, and scores are shares of its energy; give measure=")
    least = min(energies.values())
    weights = {place: (least / energy) ** 0.5 for place, energy in energies.items()}  # at most 1, for half precision
    # Without gradients of parameters, torch need not keep inputs of layers, which a model may write into.
    with batches.one_pass(model), restore_after(attributes_of(model.parameters(), "requires_grad")):
        model.requires_grad_(requires_grad=False)
        for number, batch in enumerate(batches.tracked("scoring layers")):
            _add_errors(layers, quantized, lambda b=batch: batches.run(model, b), parts, (number, weights))
            if not all(bool(values[-1].isfinite().all()) for values in parts.values()):
                raise _nan(number)
    # The mean of squares over all samples and directions times their number for one direction is the error's energy.
    share = 1 / (_PROBES * least * len(energies))
    return {key: torch.cat(values) * (len(torch.cat(values)) * share) ** 0.5 for key, values in parts.items()}


def _energies(model: nn.Module, batches: KeptBatches) -> dict[Place, float]:
    """The sum of squares of each output; values that are infinite, as those of a mask are, have no error."""
    found = Distance()
    with torch.no_grad(), batches.one_pass(model):
        for number, batch in enumerate(batches):
            outputs = named_tensors(batches.run(model, batch))
            if any(bool(y.isnan().any()) for y in outputs.values()):
                raise _nan(number)
            found.add(outputs, outputs)
    return found.energies


def _nan(number: int) -> CalibrationError:
    return CalibrationError(f"batch {number + 1}: an output or its gradient holds NaN; leave the batch out")


def _add_errors(
    layers: Mapping[str, Any],
    quantized: Mapping[str, nn.Module],
    call: Callable[[], Any],
    parts: dict[tuple[str, str], list[Tensor]],
    drawn: tuple[int, Mapping[Place, float]],
) -> None:
    """Add the errors of one batch that arrive in random directions of its outputs.

    Args:
        drawn: the seed of the directions, and the factor of those of each output.
    """
    seed, weights = drawn
    calls: list[tuple[dict[tuple[str, str], Tensor], Tensor]] = []

    def see(name: str, x: Tensor, y: Tensor) -> Tensor:
        errors = {(name, choice): _error(twin.get_submodule(name), x.detach()) for choice, twin in quantized.items()}
        y = y if y.requires_grad else y.detach().requires_grad_()  # the gradients begin at the first layers
        calls.append((errors, y))
        return y.clone()  # which the model may write into

    with _outputs_replaced(layers, see), torch.inference_mode(mode=False), torch.enable_grad():
        found = {place: y for place, y in named_tensors(call()).items() if y.requires_grad and place in weights}
        result, scales = [*found.values()], [weights[place] for place in found]
        if not result:
            raise ConfigError("no output of the model has a gradient for its layers; give measure=")
        examples = max(len(result[0]), 1) if result[0].dim() else 1  # a detector may find nothing
        random = torch.Generator().manual_seed(seed)
        for _ in range(_PROBES):
            signs = [
                (torch.randint(0, 2, y.shape, generator=random).to(y.device, y.dtype) * 2 - 1) * scale
                for y, scale in zip(result, scales, strict=True)
            ]
            outputs = [y for _, y in calls]
            gradients = torch.autograd.grad(result, outputs, signs, retain_graph=True, allow_unused=True)
            sums = {key: torch.zeros(examples, dtype=torch.float64) for key in parts}
            for (errors, _), gradient in zip(calls, gradients, strict=True):
                for key, error in errors.items() if gradient is not None else ():
                    sums[key] += _by_example((gradient * error).double(), examples)
            for key, values in sums.items():
                parts[key].append(values)


@contextmanager
def _outputs_replaced(layers: Mapping[str, Any], see: Callable[[str, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Replace what layers give by see(name, input, output)."""
    hooks = [
        layer.register_forward_hook(
            lambda _, args, kwargs, y, name=name: see(name, LayerCall(args, kwargs).first, y), with_kwargs=True
        )
        for name, layer in layers.items()
    ]
    with restore_after(lambda: [hook.remove() for hook in hooks]):
        yield


def _by_example(values: Tensor, examples: int) -> Tensor:
    """Sums over each example; one sum in the first place where the first axis does not hold the examples."""
    if not values.numel():
        return torch.zeros(examples, dtype=torch.float64)
    if values.dim() and len(values) == examples:
        return values.reshape(examples, -1).sum(1).cpu()
    return torch.cat([values.sum()[None], values.new_zeros(examples - 1)]).cpu()


@torch.no_grad()
def _error(layer: nn.Module, x: Tensor) -> Tensor:
    """What quantizing a layer changes in its output for a float input; 0 where it is not quantized."""
    if not isinstance(layer, QuantizedLayer) or layer.weight_quantizer is None:
        return torch.zeros(())
    (product,) = layer.products()
    assert isinstance(product, MatrixProduct)
    weight, quantizer = product.tensor, product.quantizer
    rounded = library.fake_quantize(weight, quantizer.qparams(weight), quantizer.spec)
    return product.product(rounded, layer.quantized_input(x)) - product.product(weight, x)
