"""Parts of a training with quantizers that any loop or trainer can call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from fakequant.data.arguments import check_model, refuse_stored, refuse_unprepared
from fakequant.data.digest import digest
from fakequant.distributed import Ranks, all_processes, gathered, is_data_parallel, parallel_group, refuse_sharded
from fakequant.errors import CheckpointError, ConfigError, shown
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.training.distillation import Distillation, labels_of_outputs
from fakequant.model.weights import (
    fresh_weight,
    give_range,
    mark_range_current,
    mark_ranges_current,
    quantized_weights,
    raise_scales,
    share_learned,
    warn_of_zeros,
    warn_vanished,
)
from fakequant.nn.merged_adapters import adapter_layers, train_merged
from fakequant.nn.quantized.folded import is_batch_norm
from fakequant.nn.quantizer import Kind, Quantizer, quantizers
from fakequant.ops import library
from fakequant.restore import restore_on_error, state_of_parts, structure_of


class Scales(Enum):
    """When scales may move during fine-tuning."""

    FIXED = "fixed"
    """Never: scales of the calibration stay, as NVIDIA advises; learned scales are fixed at their present values."""
    EPOCH = "epoch"
    """Scales of weights are computed from the weights at the start of every epoch. The first epoch starts with the
    codes that `fakequant.ptq` chose."""
    LEARNED = "learned"
    """At every step, by gradient: LSQ or another method, see `Quantizer.learn`. The gradient of a scale comes from the
    rounding error: a frozen weight that already has the values of its codes gives the scale no gradient."""
    ONLY = "only"
    """Like LEARNED, but the codes of weights, for example from `fakequant.ptq.reconstruct`, are fixed: the gradients of
    scales take them as constants. `finetune` and `Training` then train only scales, and end with fixed scales."""


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch normalisations of a model."""
    return [module for module in model.modules() if is_batch_norm(module)]


def freeze_batch_norm(model: nn.Module) -> None:
    """Put batch normalisations in eval mode, so that statistics stay; `model.train()` does not change this mode.

    `del norm.train` lets `model.train()` change the mode of a normalisation again.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> freeze_batch_norm(model)
    >>> model.train()[1].training
    False
    """
    check_model(model, "freeze_batch_norm", "freeze_batch_norm(model)")
    found = batch_norms(model)
    with restore_on_error(structure_of(found)):
        for module in found:
            module.eval()
            vars(module)["train"] = partial(_stay, module)


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """The `train` of a frozen normalisation, which stays in eval mode; modules inside of it get `mode`."""
    for module in norm.children():
        module.train(mode)
    return norm


def set_scales(model: nn.Module, scales: Scales, method: str = "lsq", **options: Any) -> None:
    """Set when the scales of a model's quantizers may move; missing static scales of weights are set now.

    Args:
        scales: when scales may move.
        method: how scales are learned with LEARNED; see `Quantizer.learn`. Dynamic quantizers learn nothing.
        options: options of the method.

    Raises:
        ConfigError: the model has no quantizers; with LEARNED or ONLY, a quantizer has no range, or the method does not
            support its specification; or with LEARNED, the model is already wrapped in DistributedDataParallel or
            sharded by fully_shard. Nothing is then changed.

    >>> model = prepare(nn.Sequential(nn.Linear(4, 4)), presets.INT8_WEIGHT_ONLY)
    >>> set_scales(model, Scales.LEARNED, "lsq")
    >>> model[0]._weight_quantizer.learned.method
    'lsq'
    """
    check_model(model, "set_scales", "set_scales(model, Scales.LEARNED)")
    if not isinstance(scales, Scales):
        raise ConfigError(f"set_scales takes a member of Scales, such as Scales.LEARNED, got {shown(scales)}")
    refuse_unprepared(model)
    warn_vanished(model)
    coded = quantized_weights(model).values() if scales is Scales.ONLY else ()
    parameters = (weight.parameter for weight in coded)
    touched = [*quantizers(model).values(), *(parameter for parameter in parameters if parameter is not None)]
    with restore_on_error(state_of_parts(model, touched)):
        static = [q for q in quantizers(model).values() if not (q.dynamic or q.pinned)]
        learn = scales in (Scales.LEARNED, Scales.ONLY)
        if learn and not all(quantizer.learned for quantizer in static):
            # Gradients of new parameters must be summed over the processes that train the model. Layers that are
            # shared out sum those of what is whole in each process.
            if parallel_group(model) is None:
                refuse_sharded(model, "call set_scales(LEARNED) on")
            refuse_stored(model, "call set_scales(LEARNED) on")
            if is_data_parallel(model):
                raise ConfigError(
                    "learned scales are parameters, but DistributedDataParallel knows only the parameters that the "
                    "model had when it was wrapped; call set_scales(LEARNED) on the model before you wrap it"
                )
        for quantizer in quantizers(model).values():
            if not learn or quantizer.keeps_codes is not (scales is Scales.ONLY and quantizer.kind is Kind.WEIGHT):
                quantizer.stop_learning()
        _fix_weight_ranges(model, anew=scales is Scales.EPOCH)
        if learn:
            fixed = _fix_codes(model) if scales is Scales.ONLY else []
            for quantizer in static:
                if quantizer.calibrated or quantizer.kind is Kind.INPUT:  # others have zero weights
                    quantizer.learn(method, **options)
            for quantizer in fixed:
                quantizer.keep_codes()
            warn_of_zeros(model, quantizers(model))
            if scales is Scales.ONLY and not static:
                raise ConfigError(
                    "Scales.ONLY has nothing to train: all ranges are dynamic or fixed by an engine; prepare weights "
                    "with static ranges"
                )
        share_learned(model)


def _fix_codes(model: nn.Module) -> list[Quantizer]:
    """Fix the present codes of all static weights, and return their quantizers."""
    found = []
    for name, weight in quantized_weights(model).items():
        quantizer = weight.quantizer
        if quantizer.dynamic or quantizer.pinned or not quantizer.calibrated:
            continue
        tensor = fresh_weight(weight, name)
        if not weight.has_fixed_codes:
            encoded = quantizer.encoded(tensor)
            if encoded is None:
                raise ConfigError(f"the weight of {name} holds NaN, which has no code; repair the weight")
            weight.fix_codes(encoded[0])
        found.append(quantizer)
    return found


def _fix_weight_ranges(model: nn.Module, *, anew: bool) -> None:
    """Set the static ranges of weights without a range, or with `anew` of all weights, from the present weights."""
    for name, weight in quantized_weights(model).items():
        quantizer = weight.quantizer
        if quantizer.dynamic or quantizer.is_zero_weight:
            continue
        quantizer.holds(weight.tensor)  # a weight whose codes stayed until now gets their values
        if anew and not weight.has_fixed_codes:  # codes that were chosen are where training starts
            quantizer.reset()
        if not quantizer.calibrated:
            give_range(weight, library.measure(gathered(fresh_weight(weight, name)), quantizer.spec.granularity))
            mark_range_current(weight)


Model = TypeVar("Model", bound=nn.Module)


@dataclass(eq=False)
class Training:
    """The parts of a training with quantizers, for any loop; the trainers' `QATCallback` calls these parts.

    Call `prepare` before the optimizer is made, `at` before each step, `loss` after the model's own loss if there is a
    teacher, and `end` after the last step. Store `state_dict` in a checkpoint, beside those of model and optimizer.

    Args:
        config: a preset, its name, or rules; None for a model that is prepared already.
        batches: the batches for calibration; None for a model that is calibrated or needs no data.
        calibration: further arguments of `fakequant.calibrate`, such as {"inputs": 0}. All processes of
            torch.distributed calibrate together, unless these arguments have another "group".
        scales: when scales may move.
        method, method_options: how scales are learned with `Scales.LEARNED`, see `Quantizer.learn`.
        learn_after: the share of the steps after which learned scales begin to move.
        freeze_batch_norm_after: the share of the steps after which batch statistics are frozen; 1.0 never freezes.
        teacher: a float model, "float" for a frozen copy of the model from before `prepare`, "self" for the model with
            its quantizers off, or a `Distillation`.
        finish: a function that `end` calls with the trained model in eval mode, in one process: to save or export it.
        skip, rules: as for `fakequant.prepare`; they change the configuration.

    >>> training = Training("int8", [torch.ones(2, 4)], scales=Scales.LEARNED, teacher="float")
    >>> model = training.prepare(nn.Sequential(nn.Linear(4, 1)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     training.at(step / 3)
    ...     training.loss(model(torch.ones(2, 4)).square().mean()).backward()
    ...     optimizer.step()
    >>> training.end()
    """

    config: Config | str | None = None
    batches: Iterable[Any] | None = field(default=None, repr=False)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    scales: Scales = Scales.FIXED
    method: str = "lsq"
    method_options: Mapping[str, Any] = field(default_factory=dict)
    learn_after: float = 0.0
    freeze_batch_norm_after: float = 0.5
    teacher: nn.Module | Literal["self", "float"] | Distillation | None = field(default=None, repr=False)
    finish: Callable[[Any], object] | None = None
    skip: Sequence[str] = ()
    rules: Mapping[str, Config | str] | None = None

    def __post_init__(self) -> None:
        given = self.teacher
        self._distillation = given if isinstance(given, Distillation) else None
        if given is not None and given != "float" and self._distillation is None:
            self._distillation = Distillation(given)  # type: ignore[arg-type]
        self._model: nn.Module | None = None
        self._watch: ExitStack | None = None
        self._settings: dict[str, Any] = {}
        self._progress, self._epoch = 0.0, -1
        self._held: list[Any] = []
        self._asleep: list[nn.Module] = []  # modules that the user put in eval mode within a model in training mode
        self._frozen: list[nn.Parameter] = []
        self._distances: list[Tensor] = []
        self._begun: list[int] = []
        self._seen: dict[str, Tensor] = {}
        self._calls = 0

    def prepare(self, model: Model) -> Model:
        """Prepare a model, calibrate it and set its scales, in place; call this before the optimizer is made.

        Raises:
            ConfigError: the model does not fit the settings; the message has a cure. The model is then unchanged.
        """
        if model is self._model:
            return model
        asleep = [module for module in model.modules() if model.training and not module.training]
        if self.teacher == "float":
            if quantizers(model):
                raise ConfigError(
                    'the model is prepared already, so that teacher="float" has no float model to copy; give a copy '
                    "from before fakequant.prepare as teacher=, or the configuration to Training"
                )
            self._distillation = Distillation(copy.deepcopy(model).requires_grad_(False))
        group = self.calibration.get("group", all_processes())
        with restore_on_error(structure_of([model])), Ranks(group or None) as processes:
            if self.config is not None:
                prepare(model, self.config, skip=[*adapter_layers(model), *self.skip], rules=self.rules)
            elif self.skip or self.rules:
                raise ConfigError(
                    "skip= and rules= change a configuration, but config= is missing; pass config=, or prepare the "
                    "model with skip= and rules="
                )
            refuse_unprepared(model, otherwise=", or give a configuration, such as 'int8'")
            if self.config is not None or self.batches is not None:
                calibrate(model, self.batches or (), **{**self.calibration, "group": group})
            set_scales(model, self.scales, self.method, **self.method_options)
            train_merged(model)
            if self._distillation is not None:
                self._distillation.check(model)
            words = {}  # how quantizers quantize and learn, without their parameters
            for name, one in quantizers(model).items():
                how = None if one.learned is None else (one.learned.method, one.learned.options())
                words[name] = f"{one.spec!r}, {one.kind}, dynamic={one.dynamic}, {how}"
            settings = {  # now, because a learned range becomes that of the checkpoint which is loaded
                "config": getattr(self.config, "name", self.config),
                "quantizers": digest(words),
                "scales": self.scales.value,
                "method": self.method,
                "learn_after": self.learn_after,
                "freeze_batch_norm_after": self.freeze_batch_norm_after,
            }
            if any(other != settings for other in processes.all(settings)):
                raise ConfigError(
                    "the processes quantize different layers, or quantize them in different ways; use the same model "
                    'and settings in all processes, or calibration={"group": False} if they train different models'
                )
        self._model, self._settings, self._asleep = model, settings, asleep
        trained = {id(parameter) for parameter in learned_scales(model)}
        others = model.parameters() if self.scales is Scales.ONLY else ()
        self._frozen = [p for p in others if p.requires_grad and id(p) not in trained]
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        return model

    def begin(self, *optimizers: torch.optim.Optimizer) -> None:
        """Begin to watch the calls of the model; `at` does so, too.

        Args:
            optimizers: the optimizers, which must hold the learned scales.

        Raises:
            ConfigError: the optimizers lack learned scales, or another training watches the model.
        """
        model = self._prepared()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        known = any(id(parameter) in held for parameter in model.parameters())  # else it has shards of them
        if known and any(id(parameter) not in held for parameter in learned_scales(model) if parameter.requires_grad):
            raise ConfigError(
                "the optimizer was made before the scales became parameters, and would not move the scales; let the "
                "trainer make the optimizer, or call prepare(model) of the callback before you make the optimizer"
            )
        if self._watch is not None:
            return
        hooks = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
        others = [owner for owner in hooks if isinstance(owner, Training)]
        for owner in others:
            owner.leave_if_over()
        if any(owner.watches for owner in others):
            raise ConfigError(
                "another QATCallback or Training watches this model, perhaps after an error in a loop: call its "
                "leave(), or give the trainer a single callback"
            )
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._before).remove)
            if self._distillation is not None:
                stack.callback(model.register_forward_hook(self._after, with_kwargs=True).remove)
                self._seen = stack.enter_context(self._distillation.watched(model))
            self._watch = stack.pop_all()

    def at(self, progress: float, epoch: int = 0) -> None:
        """Call this before each step, once or more often: it lets scales move or not, and freezes batch normalisations.

        Args:
            progress: the share of the optimizer's steps that are done.
            epoch: the number of the epoch, from 0.

        Raises:
            ConfigError: `loss` was not called for the last step, although there is a teacher.
        """
        self.begin()
        model = self._prepared()
        if self._distances:
            self._forget()
            raise ConfigError(
                "the loss of the last step lacks the distance from the teacher; write loss = training.loss(loss) "
                "before loss.backward()"
            )
        self._forget()
        self._progress = progress
        if self.scales is Scales.EPOCH and epoch > self._epoch >= 0:
            set_scales(model, self.scales)
        self._epoch = epoch
        self._hold(held=progress < self.learn_after)
        self._freeze()

    def loss(self, value: Tensor, share: float | Tensor = 1.0) -> Tensor:
        """The loss of a batch with the distance from the teacher included (see `Distillation`), or without one `value`.

        Args:
            value: the loss of the model.
            share: the share of this batch in a step of several batches, if `value` is already multiplied by this share.

        Raises:
            ConfigError: the model was not called for this loss.
        """
        if self._distillation is None:
            return value
        if not self._distances:
            raise ConfigError(
                "the loss was computed without a call of the prepared model in training mode; give Training the module "
                "that the loop calls"
            )
        distance = torch.stack(self._distances).mean() * share
        self._forget()
        return (1 - self._distillation.weight) * value + self._distillation.weight * distance

    def end(self, *, finish: bool = True) -> None:
        """End the training: put the model in eval mode, and call `self.finish` with it.

        Args:
            finish: whether this process calls `self.finish`, if there is one.
        """
        if self._watch is None:
            return
        model = self._prepared()
        self.leave()
        model.eval()
        warn_vanished(model)
        if self.scales is Scales.ONLY:
            set_scales(model, Scales.FIXED)
        raise_scales(model)
        mark_ranges_current(model)  # the training has seen what the scales do to the weights
        if finish and self.finish is not None:
            self.finish(model)

    @property
    def watches(self) -> bool:
        """Whether the training watches the calls of the model."""
        return self._watch is not None

    def leave_if_over(self) -> None:
        """Does nothing here; a callback stops watching if an error ended the loop of a trainer without error events."""

    def leave(self) -> None:
        """Stop watching the model, for example after an error that ends the training."""
        if self._watch is not None:  # until it is closed: an interrupt may come in between, and this runs again
            self._watch.close()
            self._watch = None
        for parameter in self._frozen:
            parameter.requires_grad_()
        self._frozen = []
        self._hold(held=False)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """The settings and the epoch, as values for JSON, for a checkpoint beside the state of the model."""
        teacher = self._distillation
        if teacher is not None and "teacher" not in self._settings:
            held = teacher.teacher if isinstance(teacher.teacher, nn.Module) else None
            name = teacher.teacher if held is None else digest(list(held.state_dict().items()))
            self._settings["teacher"] = [name, teacher.weight, teacher.temperature, list(teacher.features)]
        return {"settings": self._settings, "epoch": self._epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the epoch of a checkpoint.

        Raises:
            CheckpointError: the checkpoint was written with other settings, which are named.
        """
        stored, own = state_dict["settings"], self.state_dict()["settings"]
        if other := [
            f"{key}={stored.get(key)!r:.60}, now {own.get(key)!r:.60}" for key in own if stored.get(key) != own[key]
        ]:
            raise CheckpointError(
                f"the checkpoint was trained with other settings: {'; '.join(other)}; resume with its settings, or "
                "start a new training from its weights"
            )
        self._epoch = int(state_dict["epoch"])

    def drop_held(self) -> None:
        """Set gradients to None for scales that do not move yet, so that the optimizer does not decay the scales."""
        if self._held:
            for parameter in learned_scales(self._prepared()):
                parameter.grad = None

    def _prepared(self) -> nn.Module:
        if self._model is None:
            raise ConfigError("the training has no model yet; call prepare(model) before the optimizer is made")
        return self._model

    def _freeze(self) -> None:
        trains_others = self.scales is not Scales.ONLY and self._progress < self.freeze_batch_norm_after
        if self._model is None:
            return
        for module in (*self._asleep, *(() if trains_others else batch_norms(self._model))):
            module.training = False

    def _hold(self, *, held: bool) -> None:
        """With `held`, add hooks that set the gradients of learned scales to zero; without, remove these hooks."""
        # Not `requires_grad`: DistributedDataParallel waits for the gradients of all that it was made with.
        if held and not self._held:
            self._held = [parameter.register_hook(_zeros) for parameter in learned_scales(self._prepared())]
        elif not held:
            for handle in self._held:
                handle.remove()
            self._held = []

    def _before(self, model: nn.Module, _: Any) -> None:
        self.leave_if_over()
        if not self.watches:
            return
        self._begun.append(self._calls)
        if model.training:  # trainers call `model.train()` behind the last event before a step
            self._freeze()

    def _after(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        # A wrapper of Lightning calls the model around the call that its user wrote.
        inner = self._calls != self._begun.pop()
        if inner or not (model.training and torch.is_grad_enabled()):
            return None
        assert self._distillation is not None
        self._calls += 1
        watch, self._begun = self._begun, [-1]  # the teacher may be this model
        try:
            labels = labels_of_outputs(model, kwargs.get("labels"), kwargs.get("shift_labels"))
            own = self._distillation.compared(outputs, self._seen)
            masks = self._distillation.masks(kwargs or args)
            distance = self._distillation.distance(model, own, lambda one: one(*args, **kwargs), masks, labels)
            self._distances.append(distance)
        finally:
            self._begun = watch
        return self._with_distance(outputs, kwargs)

    def _with_distance(self, outputs: Any, kwargs: Mapping[str, Any]) -> Any:
        """None here, so that outputs stay; a callback returns outputs that include the distance from the teacher."""

    def _forget(self) -> None:
        self._distances.clear()
        self._begun.clear()
        self._seen.clear()


def learned_scales(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all learned ranges of a model; a range that several quantizers share is listed once."""
    found = (quantizer.learned for quantizer in quantizers(model).values())
    return [parameter for learned in dict.fromkeys(found) if learned is not None for parameter in learned.parameters()]


@torch.utils.hooks.unserializable_hook
def _zeros(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)
