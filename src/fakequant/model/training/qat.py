"""Quantization-aware training with the schedule that NVIDIA advises: as parts for your own loop, and as one call.

Source: NVIDIA pytorch-quantization, user guide: about 10 % of the original epochs; the learning rate begins at 1 % of
the original learning rate and falls along half a cosine by a factor of 100; scales do not change at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fakequant.data.arguments import check_model, refuse_unprepared
from fakequant.data.batches import (
    AmbiguousBatchError,
    Inputs,
    Mask,
    device_named,
    example_arguments,
    length,
    run_batch,
    track,
)
from fakequant.distributed import is_data_parallel, refuse_offloaded, refuse_sharded
from fakequant.errors import ConfigError, FusionWarning, shown, warn_user
from fakequant.model.run.outputs import record
from fakequant.model.run.recorded import Recording
from fakequant.model.training.distillation import Distillation as Distillation
from fakequant.model.training.distillation import labels_of_outputs
from fakequant.model.training.fuse import Fusions, is_norm, left_text, replace_modules, why_other
from fakequant.model.training.steps import Scales as Scales
from fakequant.model.training.steps import Training as Training
from fakequant.model.training.steps import freeze_batch_norm as freeze_batch_norm
from fakequant.model.training.steps import learned_scales
from fakequant.model.training.steps import set_scales as set_scales
from fakequant.model.weights import disabled
from fakequant.nn.paths import join
from fakequant.nn.quantized.folded import (
    FOLDED_LAYERS,
    FOLDED_NORMS,
    FoldedLayer,
    FoldedNorm,
    FusedBatchNorm,
    is_batch_norm,
    norm_axes,
)
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import has_no_hooks, quantizers
from fakequant.nn.site_classes import remove_sites, set_class, unshielded_class
from fakequant.nn.sites import OF_LAYERS, sites_of
from fakequant.restore import attributes_of, restore_after, restore_on_error, structure_of
from fakequant.text import module_name

Model = TypeVar("Model", bound=nn.Module)


def fold_batch_norm(model: Model, example: Any, *, inputs: Inputs | None = None) -> Model:
    """Make quantized layers compute with the folded weights of an engine while batch normalisations train, in place.

    A linear layer or convolution that a batch normalisation directly follows quantizes its weight times gamma / sigma.
    In training, statistics are those of the batch, as in the scheme of Jacob et al. 2018 and of torch.ao. With
    `freeze_batch_norm`, and in eval mode, running statistics are used. At the end `merge_batch_norm` turns the layer
    and the normalisation into one layer with the bits of eval mode. Parameters, buffers and their names stay until
    then. A `FusionWarning` names the normalisations that are not folded, with the reasons.

    Args:
        model: a prepared model that is not calibrated yet, because calibration must see the folded weights.
        example: an input, a tuple or a dict of inputs; a run with it shows which normalisation follows which layer.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ConfigError: the model is not prepared, is sharded or parallel, or a layer before a normalisation is calibrated
            already. Nothing is then changed.

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
        raise ConfigError("the model is wrapped in DistributedDataParallel already; call fold_batch_norm before that")
    arguments = example_arguments(example, inputs)
    with disabled(model):
        recording = record(model, lambda: arguments.run(model))
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    shared = {module for several in holders.values() if len(several) > 1 for module in several}
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, norm in model.named_modules():
        if is_norm(norm) and not isinstance(norm, FoldedNorm):
            # The layer whose product, and nothing else, is what the normalisation takes.
            call = next(iter(recording.calls_of.get(path, [])), None)
            producer = recording.values[call.inputs[0]].producer if call is not None and call.inputs else None
            made = None if producer is None else recording.calls[producer]
            layer = None if made is None or made.function not in OF_LAYERS else made.owner
            why = _why_norm_stays(norm, path, recording) or _why_layer_stays(layer, modules, shared, recording)
            if why is None and layer is not None:
                fused[path] = layer
            else:
                left[path] = str(why)
    found = Fusions(fused, left)
    modules = dict(model.named_modules())
    for path in found.fused.values():
        if cast("Any", modules[path]).gradient is not None:
            raise ConfigError(
                f"{module_name(path)} quantizes its gradients, which a layer with a folded weight cannot do; "
                "call fuse_batch_norm before fakequant.prepare, or leave gradient= out of its rule"
            )
        if (quantizer := cast("Any", modules[path])._weight_quantizer) is not None and quantizer.calibrated:
            raise ConfigError(
                f"{module_name(path)} is calibrated, but its range does not fit the folded weight; call "
                "fold_batch_norm between fakequant.prepare and fakequant.calibrate"
            )
    with restore_on_error(structure_of([model])):
        for norm, path in found.fused.items():
            holder, _, name = norm.rpartition(".")
            layer, own = modules[path], cast("nn.Module", modules[holder]._modules[name])
            if (sites := sites_of(own)) is not None:  # an engine quantizes the result, which is the layer's from now on
                (quantizer,) = quantizers(sites).values()
                quantizer.name = join(path, "_output_quantizer")
                cast("Any", layer)._output_quantizer = quantizer
                remove_sites(own)
            set_class(own, FOLDED_NORMS[_torch_class(own)])
            vars(own).update(layer=path, axes=norm_axes(layer))
            vars(layer)["_norm"] = (own, modules[holder], name)
            set_class(layer, FOLDED_LAYERS[unshielded_class(layer)])
    if found.left:
        warn_user(left_text(found, "folded"), FusionWarning)
    return model


@torch.no_grad()
def merge_batch_norm(model: Model) -> Model:
    """Turn each layer and normalisation that `fold_batch_norm` folded into one layer, with the bits of eval mode.

    The layer then has the folded weight and a bias, and a `FusedBatchNorm`, which returns its input, takes the place of
    the normalisation. Call `merge_batch_norm` after training, and before `save` and `export_onnx`.

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


def _why_norm_stays(norm: nn.Module, path: str, recording: Recording) -> str | None:
    if not is_batch_norm(norm):
        return f"a {type(norm).__name__} does not train: call fuse_batch_norm before fakequant.prepare"
    if _torch_class(norm) not in FOLDED_NORMS:
        return f"a {type(norm).__name__} has no folded form"
    sites = sites_of(norm)
    if sites is not None and ([*quantizers(sites)] != ["batch_norm_0.output"] or is_parametrized(norm)):
        return "functions that it calls have quantizers; call fuse_batch_norm before fakequant.prepare"
    calls = recording.calls_of.get(path, [])
    if calls and (why := why_other(norm, len(recording.values[calls[0].inputs[0]].shape))):
        return why
    if cast("nn.BatchNorm2d", norm).running_mean is None:
        return "it has no running statistics, so that each batch is normalised by its own"
    if (weight := cast("nn.BatchNorm2d", norm).weight) is not None and bool((weight == 0).any()):
        return "a gamma of it is 0, by which the product of that channel cannot be divided again"
    if not has_no_hooks(norm):
        return "it has hooks or a forward of its own"
    count = recording.visits[path]
    return None if count == 1 else "it is never called" if not count else f"it is called {count} times"


def _torch_class(norm: nn.Module) -> type[nn.Module]:
    """The class of torch's batch normalisations that a module has or inherits from."""
    return next((cls for cls in unshielded_class(norm).__mro__ if cls in FOLDED_NORMS), type(norm))


def _why_layer_stays(
    path: str | None, modules: dict[str, nn.Module], shared: set[nn.Module], recording: Recording
) -> str | None:
    layer = None if path is None else modules.get(path)
    if isinstance(layer, QuantizedLayer) and unshielded_class(layer) not in FOLDED_LAYERS:
        kind = type(layer).__name__
        return f"the layer before it, a {kind}, has no folded form; call fuse_batch_norm before fakequant.prepare"
    if path is None or layer is None or unshielded_class(layer) not in FOLDED_LAYERS:
        return "its input is not the output of a quantized convolution or linear layer"
    if recording.visits[path] != 1:
        return f"the layer before it is called {recording.visits[path]} times"
    if layer._output_quantizer is not None:
        return "the output of the layer before it has a quantizer, which would come after the normalisation"
    if not has_no_hooks(layer):
        return "the layer before it has hooks or a forward of its own"
    product = next(call for call in recording.calls_of[path] if call.function in OF_LAYERS)
    output, inside = product.outputs[0], f"{path}." if path else ""
    weights = {value for value in product.inputs if recording.values[value].constant}
    owners = {call.owner for weight in weights for call in recording.consumers[weight]}
    alone = output not in recording.outputs and len(recording.consumers.get(output, [])) == 1
    alone = alone and all(owner is not None and (owner == path or owner.startswith(inside)) for owner in owners)
    if layer in shared or not alone:
        return "the output or a parameter of the layer before it is used elsewhere, too"
    if len(recording.values[output].shape) != norm_axes(layer):
        return "its channels are not those of the layer before it"
    return None


_CALL = "finetune(model, batches, loss, Schedule(original_lr=0.1, original_epochs=90))"

_SHARE = "scale_lr"
"""The key in an optimizer's group of a factor for the group's learning rate."""

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Schedule:
    """The number of epochs to fine-tune, and the learning rates.

    Args:
        original_lr: the first learning rate of the float training.
        original_epochs: the epochs of the float training.
        fraction: the share of the original epochs to fine-tune.
        start: the first learning rate, as a share of the original learning rate.
        end: the last learning rate, as a share of the first.

    >>> schedule = Schedule(original_lr=0.1, original_epochs=90)
    >>> schedule.epochs, schedule.lr(0.0), round(schedule.lr(1.0), 8)
    (9, 0.001, 1e-05)
    """

    original_lr: float
    original_epochs: float
    fraction: float = 0.1
    start: float = 0.01
    end: float = 0.01

    def __post_init__(self) -> None:
        for name in ("original_lr", "original_epochs", "fraction", "start", "end"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not float(value) > 0:
                raise ConfigError(f"Schedule({name}={value!r:.40}): must be positive, a number such as 0.1")

    @property
    def epochs(self) -> int:
        """The number of epochs to fine-tune, at least one."""
        return max(1, round(self.original_epochs * self.fraction))

    def lr(self, progress: float) -> float:
        """The learning rate at a progress from 0 to 1: the falling half of a cosine."""
        first = self.original_lr * self.start
        return first * (self.end + (1 - self.end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)


def scheduler(optimizer: Optimizer, schedule: Schedule, steps: int) -> LambdaLR:
    """A learning-rate scheduler for your own loop; call its `step()` after every optimizer step.

    Args:
        optimizer: an optimizer with lr=1.0, which the schedule multiplies.
        steps: the number of all steps of the optimizer.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> rates = scheduler(optimizer, Schedule(original_lr=0.1, original_epochs=10), steps=100)
    >>> rates.get_last_lr()
    [0.001]
    """
    return LambdaLR(optimizer, lambda step: schedule.lr(step / max(1, steps - 1)))


@dataclass(frozen=True)
class Options:
    """The options of `finetune` beside the schedule.

    Args:
        scales: when scales may move.
        method: how scales are learned with `Scales.LEARNED`: "lsq", "lsq_plus", "pact" or "tqt", see `Quantizer.learn`.
        method_options: options of the method, such as {"gradient_factor": False}.
        scale_lr: the learning rate of learned scales divided by that of all other parameters.
        freeze_batch_norm_after: the share of the epochs after which batch statistics are frozen; 1.0 never freezes.
        optimizer: a function that makes the optimizer from the parameters, with lr=1.0, which the schedule multiplies.
        on_epoch: called as on_epoch(epoch, mean loss) after every epoch; returning False ends the training.
        progress: whether to show a progress bar; by default on a terminal and in a notebook.

    >>> options = Options(scales=Scales.LEARNED, on_epoch=lambda epoch, loss: loss > 0.01)
    >>> options.method, options.freeze_batch_norm_after
    ('lsq', 0.5)
    """

    scales: Scales = Scales.FIXED
    method: str = "lsq"
    method_options: Mapping[str, Any] = field(default_factory=dict)
    scale_lr: float = 1.0
    freeze_batch_norm_after: float = 0.5
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=1.0, momentum=0.9
    )
    on_epoch: Callable[[int, float], bool | None] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if (
            isinstance(self.scale_lr, bool)
            or not isinstance(self.scale_lr, Real)
            or not 0 < float(self.scale_lr) < math.inf
        ):
            raise ConfigError(f"Options(scale_lr={self.scale_lr!r:.40}): must be positive, a number such as 0.1")


def few_bits(original_epochs: float, lr: float = 3e-3) -> tuple[Schedule, Options]:
    """The schedule and options that were best below 4 bits: Adam, learned scales, six times the original epochs.

    Adam divides steps by the size of each parameter's gradients. The fewer bits, the more this size differs between
    scales and weights, so that one learning rate of SGD does not suit both. Weights in `int2` train better after
    `calibrate(weight_method="max")`: 98.05 % of digits are right instead of 97.38 %, over three seeds.

    >>> schedule, options = few_bits(original_epochs=20)
    >>> schedule.epochs, schedule.lr(0.0), options.scales.name
    (120, 0.003, 'LEARNED')
    """
    schedule = Schedule(lr, original_epochs, fraction=6.0, start=1.0)
    return schedule, Options(scales=Scales.LEARNED, optimizer=partial(torch.optim.Adam, lr=1.0))


def finetune(  # noqa: PLR0913  all but the first five by name
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None,
    schedule: Schedule,
    options: Options | None = None,
    *,
    targets: str = "labels",
    inputs: Inputs | None = None,
    teacher: nn.Module | Literal["self"] | Distillation | None = None,
    mask: Mask | None = None,
) -> list[float]:
    """Fine-tune a calibrated model with fake quantization in its graph.

    Args:
        model: a prepared and calibrated model; it is trained in place, and is then in eval mode. After an error or an
            interrupt, the training so far stays, and every module is in its earlier mode.
        batches: tuples of inputs with the targets as the last item, or mappings of keyword arguments with the targets
            among them, as from a tokenizer of Hugging Face; iterated once per epoch. For other kinds of batches write
            your own loop around `scheduler`, `freeze_batch_norm` and `set_scales`.
        loss: called as loss(outputs, targets), for example `nn.functional.cross_entropy`. With None, the model gets the
            targets, too, and computes the loss: `outputs.loss`, or `outputs["loss"]`.
        schedule: epochs and learning rates.
        options: scales, batch normalisation, optimizer, callback.
        targets: the key of the targets in mappings.
        inputs: which part of a batch the model gets, as for `calibrate`; by default the batch without the targets.
        teacher: a float model whose outputs count as much as the targets; "self" is this model with its quantizers off;
            for other choices give a `Distillation`.
        mask: which tokens count in the distance from the teacher, see `Distillation`.

    Returns:
        The mean loss of every epoch.

    Raises:
        ConfigError: the model has no quantizers; a batch holds no targets; with loss=None, the model returned no loss;
            or the loss became NaN or infinite (the epoch is named).

    >>> model = prepare(nn.Sequential(nn.Linear(4, 1)), presets.INT8)
    >>> batches = [(torch.ones(8, 4), torch.zeros(8, 1))]
    >>> used = calibrate(model, batches)
    >>> history = finetune(model, batches, nn.functional.mse_loss, Schedule(original_lr=1.0, original_epochs=20))
    >>> len(history), history[1] < history[0]
    (2, True)
    """
    check_model(model, "finetune", _CALL)
    options = options or Options()
    for what, value, right in (
        ("a Schedule", schedule, isinstance(schedule, Schedule)),
        ("Options", options, isinstance(options, Options)),
        ("a function as loss, or None", loss, loss is None or callable(loss)),
    ):
        if not right:
            raise ConfigError(f"finetune takes {what}, got {shown(value)}; write {_CALL}")
    refuse_unprepared(model)
    refuse_offloaded(model, "fine-tune")
    distillation = teacher if isinstance(teacher, Distillation) or teacher is None else Distillation(teacher)
    if mask is not None:
        if distillation is None:
            raise ConfigError(
                "mask= leaves tokens out of the distance from a teacher, but teacher= is missing; without a teacher "
                "leave tokens out in the loss"
            )
        distillation = replace(distillation, mask=mask)
    if distillation is not None:
        distillation.check(model)
    training = Training(
        scales=options.scales,
        method=options.method,
        method_options=options.method_options,
        freeze_batch_norm_after=options.freeze_batch_norm_after,
    )
    with restore_on_error(attributes_of(model.modules(), "training")), restore_after(training.leave):
        training.prepare(model)
        optimizer = options.optimizer([p for p in model.parameters() if p.requires_grad])
        share = float(options.scale_lr)
        known = {id(parameter) for parameter in learned_scales(model)}
        for group in list(optimizer.param_groups if share != 1.0 else ()):
            # The other options stay those of their old group.
            others, own = ([p for p in group["params"] if (id(p) in known) is wanted] for wanted in (False, True))
            if not others:
                group[_SHARE] = share
            elif own:
                group["params"] = others
                optimizer.add_param_group({**group, "params": own, _SHARE: share})
        history: list[float] = []
        for epoch in range(schedule.epochs):
            model.train()
            training.at(epoch / schedule.epochs, epoch)
            measure = partial(_loss, model, loss=loss, targets=targets, inputs=inputs, distillation=distillation)
            history.append(_epoch(model, batches, measure, optimizer, (schedule, epoch, options.progress)))
            if options.on_epoch is not None and options.on_epoch(epoch, history[-1]) is False:
                break
        training.end()
    return history


def _loss(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    targets: str,
    inputs: Inputs | None,
    distillation: Distillation | None,
) -> Tensor:
    """The loss of one batch."""
    wanted = None
    if loss is not None and isinstance(batch, Mapping):
        if targets not in batch:
            raise ConfigError(
                f"a batch has no targets {targets!r} for the loss, only {', '.join(map(str, batch))}; give the key of "
                "the targets as targets="
            )
        wanted = batch[targets]
    elif loss is not None:
        if not isinstance(batch, (tuple, list)) or not batch:
            raise ConfigError(
                f"a batch is of type {type(batch).__name__}, but the loss needs targets; give tuples with the targets "
                f"as the last item, or mappings with the key {targets!r}"
            )
        wanted = batch[-1]
    forward = partial(_outputs, batch=batch, loss=loss, targets=targets, inputs=inputs)
    if distillation is None:
        outputs = forward(model)
        return _own_loss(outputs) if loss is None else loss(outputs, wanted)
    masks = distillation.masks(batch)
    labels = batch[-1] if isinstance(batch, (tuple, list)) and batch else None
    labels = batch.get(targets) if isinstance(batch, Mapping) else labels
    if loss is None and isinstance(batch, Mapping):  # the model's own loss gets them
        labels = labels_of_outputs(model, labels, batch.get("shift_labels"))
    outputs, distance = distillation.student(model, forward, masks, labels)
    value = _own_loss(outputs) if loss is None else loss(outputs, wanted)
    return (1 - distillation.weight) * value + distillation.weight * distance


def _outputs(model: nn.Module, batch: Any, *, loss: Loss | None, targets: str, inputs: Inputs | None) -> Any:
    """The outputs of a model for a batch; with `loss` None the model gets the targets, too."""
    if loss is None:
        try:
            return run_batch(model, batch, inputs=inputs)
        except AmbiguousBatchError as error:
            raise ConfigError(
                "with loss=None the model needs the targets as an argument, but a tuple does not say which item is "
                'which argument; give dicts of arguments, such as {"input_ids": ..., "labels": ...}, or as inputs= a '
                "function of a batch that returns dicts"
            ) from error
    if inputs is not None:
        return run_batch(model, batch, inputs=inputs)
    if isinstance(batch, Mapping):
        return run_batch(model, {key: x for key, x in batch.items() if key != targets})
    return run_batch(model, tuple(batch[:-1]), known=len(batch) - 1)


def _own_loss(outputs: Any) -> Tensor:
    """The loss that a model computes itself."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"loss=None takes the loss that the model returns, but its output of type {type(outputs).__name__} has "
            "none; give a function of outputs and targets as loss=, such as torch.nn.functional.cross_entropy, or "
            "dicts with all arguments from which the model computes outputs.loss"
        )
    return value


def _epoch(
    model: nn.Module,
    batches: Iterable[Any],
    measure: Callable[[Any], Tensor],
    optimizer: Optimizer,
    when: tuple[Schedule, int, bool | None],
) -> float:
    schedule, epoch, progress = when
    total = length(batches)
    losses: list[Tensor] = []
    steps = max(1, schedule.epochs * total - 1) if total else None
    for index, batch in enumerate(track(batches, f"epoch {epoch + 1}/{schedule.epochs}", total, progress)):
        # Without a length the learning rate moves once per epoch.
        done = (epoch * total + index) / steps if total and steps else epoch / max(1, schedule.epochs - 1)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(done) * group.get(_SHARE, 1.0)
        optimizer.zero_grad(set_to_none=True)
        with device_named(model, batch, f"batch {index + 1}"):
            value = measure(batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"of shape {[*value.shape]}" if isinstance(value, Tensor) else shown(value)
            raise ConfigError(f"the loss of batch {index + 1} is {what}, not a tensor of one number; return its mean")
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    if not losses:
        raise ConfigError(
            f"epoch {epoch + 1}: the batches were empty; give a list or a loader that can be iterated again"
        )
    mean = torch.stack(losses).mean().item()
    if not math.isfinite(mean):
        raise ConfigError(f"epoch {epoch + 1}: the loss became {mean}; lower Schedule.start or check the data for NaN")
    return mean
