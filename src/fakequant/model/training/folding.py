"""Batch normalisations that are folded while a model trains, as engines fold them when they load it."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.data.batches import Inputs, example_arguments
from fakequant.distributed import is_data_parallel, refuse_sharded
from fakequant.errors import ConfigError, FusionWarning, warn_user
from fakequant.model.modes import disabled
from fakequant.model.run.recorded import Recording
from fakequant.model.run.recording import record
from fakequant.model.training.fuse import FusedBatchNorm, Fusions, is_norm, left_text, replace_modules, why_other
from fakequant.nn.hooks import is_as_made
from fakequant.nn.quantized.folded import FOLDED_LAYERS, FOLDED_NORMS, FoldedLayer, FoldedNorm
from fakequant.nn.sites.classes import set_class, unshielded_class
from fakequant.nn.sites.products import OF_LAYERS
from fakequant.restore import restore_on_error, structure_of
from fakequant.text import module_name

Model = TypeVar("Model", bound=nn.Module)


def fold_batch_norm(model: Model, example: Any, *, inputs: Inputs | None = None) -> Model:
    """Have quantized layers compute with the weights that engines see while batch normalisations train, in place.

    A linear layer or convolution that a batch normalisation directly follows quantizes its weight times gamma / sigma.
    In training, statistics are those of the batch, as in the scheme of Jacob et al. 2018 and of torch.ao. With
    `freeze_batch_norm`, and in eval mode, they are the running ones. `merge_batch_norm` makes one layer of both in the
    end; it has the bits of eval mode. Parameters, buffers and their names stay until then. A `FusionWarning` says which
    normalisations are computed as before, and why.

    Args:
        model: a prepared model that is not calibrated yet, because the ranges are those of the folded weights.
        example: an input, a tuple or a dict of inputs, by whose run the pairs are found.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ConfigError: the model is not prepared, is sharded or parallel, or a layer of a pair is calibrated already.
            Nothing is changed then.

    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), presets.INT8)
    >>> x = torch.randn(2, 3, 8, 8)
    >>> used = calibrate(fold_batch_norm(model, x), [x])
    >>> model.train()(x).sum().backward()
    >>> before = model.eval()(x)
    >>> torch.equal(merge_batch_norm(model)(x), before)
    True
    """
    refuse_unprepared(model, otherwise=", or fuse_batch_norm(model, example)")
    refuse_sharded(model, "fold the batch normalisations of")
    if is_data_parallel(model):
        raise ConfigError("call fold_batch_norm before the model is wrapped in DistributedDataParallel")
    arguments = example_arguments(example, inputs)
    with disabled(model):
        recording = record(model, lambda: arguments.run(model))
    found = _pairs(model, recording)
    modules = dict(model.named_modules())
    for path in found.fused.values():
        if cast("Any", modules[path]).gradient is not None:
            raise ConfigError(
                f"{module_name(path)} quantizes its gradients, and the product with a folded weight has none that are; "
                "call fuse_batch_norm before fakequant.prepare, or leave gradient= out of its rule"
            )
        if (quantizer := cast("Any", modules[path])._weight_quantizer) is not None and quantizer.calibrated:
            raise ConfigError(
                f"{module_name(path)} is calibrated, and its range is not that of the folded weight; call "
                "fold_batch_norm between fakequant.prepare and fakequant.calibrate"
            )
    with restore_on_error(structure_of([model])):
        for norm, path in found.fused.items():
            holder, _, name = norm.rpartition(".")
            _fold(modules[path], path, modules[holder], name)
    if found.left:
        warn_user(left_text(found, "folded"), FusionWarning)
    return model


def _fold(layer: nn.Module, path: str, holder: nn.Module, name: str) -> None:
    norm = cast("nn.Module", holder._modules[name])
    set_class(norm, FOLDED_NORMS[_torch_class(norm)])
    vars(norm).update(layer=path, axes=_axes(layer))
    vars(layer)["_norm"] = (norm, holder, name)
    set_class(layer, FOLDED_LAYERS[unshielded_class(layer)])


@torch.no_grad()
def merge_batch_norm(model: Model) -> Model:
    """Make one quantized layer of each that `fold_batch_norm` found, with the bits that it has in eval mode; in place.

    The parameters are then those of the folded layer, a layer without a bias gets one, and a `FusedBatchNorm`, which
    returns its input, takes the place of the normalisation. Call it after training, and before `save` and
    `export_onnx`.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), presets.INT8_WEIGHT_ONLY)
    >>> merge_batch_norm(fold_batch_norm(model, torch.ones(2, 4)).eval())[1]
    FusedBatchNorm(into 0, inputs of 2 axes)
    """
    check_model(model, "merge_batch_norm", "merge_batch_norm(model)")
    refuse_unprepared(model)
    refuse_sharded(model, "merge the batch normalisations of")
    with restore_on_error(structure_of([model])):
        merged: dict[nn.Module, nn.Module] = {}
        for layer in [module for module in model.modules() if isinstance(module, FoldedLayer)]:
            norm = layer.norm
            own = cast("nn.Parameter", layer._parameters["weight"])
            weight, bias = (nn.Parameter(x.detach(), own.requires_grad) for x in (layer.weight, layer.bias))
            set_class(layer, layer.plain_class)
            del vars(layer)["_norm"]
            layer._parameters.update(weight=weight, bias=bias)
            merged[norm] = FusedBatchNorm.of(norm, norm.layer, norm.axes)
        replace_modules(model, merged)
    return model


def _pairs(model: nn.Module, recording: Recording) -> Fusions:
    """Which batch normalisation belongs to which quantized layer."""
    modules = dict(model.named_modules(remove_duplicate=False))
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    shared = {module for several in holders.values() if len(several) > 1 for module in several}
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, norm in model.named_modules():
        if is_norm(norm) and not isinstance(norm, FoldedNorm):
            layer = _layer_before(path, recording)
            why = _why_norm_stays(norm, path, recording) or _why_layer_stays(layer, modules, shared, recording)
            if why is None and layer is not None:
                fused[path] = layer
            else:
                left[path] = str(why)
    return Fusions(fused, left)


def _layer_before(path: str, recording: Recording) -> str | None:
    """The path of the layer whose product, and nothing else, is what a normalisation takes."""
    call = next(iter(recording.calls_of.get(path, [])), None)
    if call is None or not call.inputs:
        return None
    taken = call.inputs[0]
    producer = recording.values[taken].producer
    if producer is None or recording.calls[producer].function not in OF_LAYERS:
        return None
    return recording.calls[producer].owner


def _why_norm_stays(norm: nn.Module, path: str, recording: Recording) -> str | None:
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return f"a {type(norm).__name__} does not train: call fuse_batch_norm before fakequant.prepare"
    if _torch_class(norm) not in FOLDED_NORMS:
        return f"a {type(norm).__name__} has no folded form"
    calls = recording.calls_of.get(path, [])
    if calls and (why := why_other(norm, len(recording.values[calls[0].inputs[0]].shape))):
        return why
    if cast("nn.BatchNorm2d", norm).running_mean is None:
        return "it has no running statistics, so that each batch is normalised by its own"
    if (weight := cast("nn.BatchNorm2d", norm).weight) is not None and bool((weight == 0).any()):
        return "a gamma of it is 0, by which the product of that channel cannot be divided again"
    if not is_as_made(norm):
        return "it has hooks or a forward of its own"
    count = recording.visits[path]
    return None if count == 1 else "it is never called" if not count else f"it is called {count} times"


def _torch_class(norm: nn.Module) -> type[nn.Module]:
    """The class of torch that a batch normalisation is of."""
    return next((cls for cls in unshielded_class(norm).__mro__ if cls in FOLDED_NORMS), type(norm))


def _why_layer_stays(
    path: str | None, modules: dict[str, nn.Module], shared: set[nn.Module], recording: Recording
) -> str | None:
    layer = None if path is None else modules.get(path)
    if path is None or layer is None or unshielded_class(layer) not in FOLDED_LAYERS:
        return "its input is not the output of a quantized convolution or linear layer"
    if recording.visits[path] != 1:
        return f"the layer before it is called {recording.visits[path]} times"
    if layer._output_quantizer is not None:
        return "the output of the layer before it has a quantizer, which would come after the normalisation"
    if not is_as_made(layer):
        return "the layer before it has hooks or a forward of its own"
    if layer in shared or not _is_alone(path, recording):
        return "the output or a parameter of the layer before it is used elsewhere, too"
    output = recording.calls[_product(path, recording)].outputs[0]
    if len(recording.values[output].shape) != _axes(layer):
        return "its channels are not those of the layer before it"
    return None


def _product(path: str, recording: Recording) -> int:
    return next(call.number for call in recording.calls_of[path] if call.function in OF_LAYERS)


def _is_alone(path: str, recording: Recording) -> bool:
    """Whether one call takes the layer's product, and the layer alone its parameters."""
    product = recording.calls[_product(path, recording)]
    output = product.outputs[0]
    if output in recording.outputs or len(recording.consumers.get(output, [])) != 1:
        return False
    weights = {value for value in product.inputs if recording.values[value].constant}
    inside = f"{path}." if path else ""
    users = [call for weight in weights for call in recording.consumers[weight]]
    return all(call.owner is not None and (call.owner == path or call.owner.startswith(inside)) for call in users)


def _axes(layer: nn.Module) -> int:
    """The axes of a layer's output that has a batch normalisation over the layer's own channels."""
    return 2 + len(getattr(layer, "kernel_size", ()))
