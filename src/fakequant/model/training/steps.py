"""What happens at each step of a training with quantizers, in whatever loop or trainer it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from fakequant.data.arguments import refuse_unprepared
from fakequant.data.digest import digest
from fakequant.distributed import Together, all_processes
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.calibration.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.scale_floor import raise_scales
from fakequant.model.training.distillation import Distillation, labels_of_outputs
from fakequant.model.training.scales import Scales, batch_norms, set_scales
from fakequant.model.weights import note_weights, warn_vanished
from fakequant.nn.merged_adapters import adapter_layers, train_merged
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.restore import restore_on_error, structure_of

Model = TypeVar("Model", bound=nn.Module)


@dataclass(eq=False)
class Training:
    """A training with quantizers as parts for any loop; `QATCallback` of the trainers calls them.

    `prepare` comes before the optimizer, `at` before each step, `loss` behind the model's own loss if there is a
    teacher, and `end` after the last step. `state_dict` belongs in a checkpoint, beside those of model and optimizer.

    Args:
        config: a preset, its name, or rules; None for a model that is prepared already.
        batches: for calibration; none for a model that is calibrated or needs no data.
        calibration: further arguments of `fakequant.calibrate`, such as {"inputs": 0}. All processes of
            torch.distributed calibrate together, unless it has another "group".
        scales: when scales may move.
        method: how they are learned with `Scales.LEARNED`, and `method_options`: see `Quantizer.learn`.
        learn_after: share of the steps after which learned scales begin to move.
        freeze_batch_norm_after: share of the steps after which batch statistics are frozen; 1.0 never freezes.
        teacher: a float model, "float" for a frozen copy of the model from before `prepare`, "self" for the model with
            its quantizers off, or a `Distillation`.
        finish: called with the trained model in eval mode by `end`, in one process: to save, export or deliver it.
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
        """Prepare, calibrate and set the scales of a model, in place; before its optimizer is made.

        Raises:
            ConfigError: the model does not fit the settings (says what to do). The model is unchanged then.
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
        with restore_on_error(structure_of([model])), Together(group or None) as processes:
            if self.config is not None:
                prepare(model, self.config, skip=[*adapter_layers(model), *self.skip], rules=self.rules)
            elif self.skip or self.rules:
                raise ConfigError("skip= and rules= change a configuration; give one, or prepare the model with them")
            refuse_unprepared(model, otherwise=", or give a configuration, such as 'int8'")
            if self.config is not None or self.batches is not None:
                calibrate(model, self.batches or (), **{**self.calibration, "group": group})
            set_scales(model, self.scales, self.method, **self.method_options)
            train_merged(model)
            if self._distillation is not None:
                self._distillation.check(model)
            settings = self._settings_for(model)
            if any(other != settings for other in processes.all(settings)):
                raise ConfigError(
                    "the processes quantize other layers or in other ways; give all of them one model and the same "
                    'settings, or calibration={"group": False} where they train models of their own'
                )
        self._model, self._settings, self._asleep = model, settings, asleep
        self._freeze_others(model)
        return model

    def begin(self, *optimizers: torch.optim.Optimizer) -> None:
        """Start to watch the calls of the model; `at` does it, too.

        Args:
            optimizers: to see that they move the learned scales.

        Raises:
            ConfigError: they do not, or another training watches the model.
        """
        model = self._prepared()
        _check_optimizers(model, optimizers)
        if self._watch is not None:
            return
        hooks = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
        others = [owner for owner in hooks if isinstance(owner, Training)]
        for owner in others:
            owner.leave_if_over()
        if any(owner.watches for owner in others):
            raise ConfigError(
                "another QATCallback or Training watches this model, as after an error in a loop: call its leave(), or "
                "give the trainer one alone"
            )
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._before).remove)
            if self._distillation is not None:
                stack.callback(model.register_forward_hook(self._after, with_kwargs=True).remove)
                self._seen = stack.enter_context(self._distillation.watched(model))
            self._watch = stack.pop_all()

    def at(self, progress: float, epoch: int = 0) -> None:
        """Do what is due before a step, once or more often.

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
                "the distance from the teacher is in no loss; write loss = training.loss(loss) before loss.backward()"
            )
        self._forget()
        self._progress = progress
        if self.scales is Scales.EPOCH and epoch > self._epoch >= 0:
            set_scales(model, self.scales)
        self._epoch = epoch
        self._hold(held=progress < self.learn_after)
        self._freeze()

    def loss(self, value: Tensor, share: float | Tensor = 1.0) -> Tensor:
        """The loss of a batch with the distance from the teacher, see `Distillation`; without a teacher the same one.

        Args:
            value: the loss.
            share: of this batch in a step of several batches, where the loss has it already.

        Raises:
            ConfigError: the model was not called for it.
        """
        if self._distillation is None:
            return value
        if not self._distances:
            raise ConfigError(
                "there is a loss, but the model that the training prepared was not called in training mode for it; "
                "give Training the module that the loop calls"
            )
        distance = torch.stack(self._distances).mean() * share
        self._forget()
        return (1 - self._distillation.weight) * value + self._distillation.weight * distance

    def end(self, *, finish: bool = True) -> None:
        """End the training: the model is left in eval mode, and `finish` gets it.

        Args:
            finish: whether this process calls it.
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
        note_weights(model)  # the training has seen what the scales do to the weights
        if finish and self.finish is not None:
            self.finish(model)

    @property
    def watches(self) -> bool:
        """Whether it watches the calls of the model."""
        return self._watch is not None

    def leave_if_over(self) -> None:
        """Stop to watch the model where an error ended the loop of a trainer that has no event for it."""

    def leave(self) -> None:
        """Stop to watch the model, as after an error that ends the training."""
        if self._watch is not None:  # until it is closed: an interrupt may come in between, and this runs again
            self._watch.close()
            self._watch = None
        for parameter in self._frozen:
            parameter.requires_grad_()
        self._frozen = []
        self._hold(held=False)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the state of the model, as values for JSON."""
        teacher = self._distillation
        if teacher is not None and "teacher" not in self._settings:
            held = teacher.teacher if isinstance(teacher.teacher, nn.Module) else None
            name = teacher.teacher if held is None else digest(list(held.state_dict().items()))
            self._settings["teacher"] = [name, teacher.weight, teacher.temperature, list(teacher.features)]
        return {"settings": self._settings, "epoch": self._epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written.

        Raises:
            CheckpointError: the checkpoint was written with other settings (says which).
        """
        stored, own = state_dict["settings"], self.state_dict()["settings"]
        if other := [
            f"{key}={stored.get(key)!r:.60}, now {own.get(key)!r:.60}" for key in own if stored.get(key) != own[key]
        ]:
            raise CheckpointError(
                f"the checkpoint was trained with other settings: {'; '.join(other)}; resume with those, or start "
                "a new training from its weights"
            )
        self._epoch = int(state_dict["epoch"])

    def drop_held(self) -> None:
        """Take the gradients of scales that do not move yet from the optimizer, which may decay what has one."""
        if self._held:
            for parameter in learned_scales(self._prepared()):
                parameter.grad = None

    def _settings_for(self, model: nn.Module) -> dict[str, Any]:
        """Now, because a learned range becomes that of the checkpoint which is loaded."""
        return {
            "config": getattr(self.config, "name", self.config),
            "quantizers": digest({name: _words(one) for name, one in quantizers(model).items()}),
            "scales": self.scales.value,
            "method": self.method,
            "learn_after": self.learn_after,
            "freeze_batch_norm_after": self.freeze_batch_norm_after,
        }

    def _prepared(self) -> nn.Module:
        if self._model is None:
            raise ConfigError("the training has no model yet; call prepare(model) before the optimizer is made")
        return self._model

    def _freeze_others(self, model: nn.Module) -> None:
        """Take what is no scale from what trains, where scales are trained only; `leave` gives it back."""
        trained = {id(parameter) for parameter in learned_scales(model)}
        others = model.parameters() if self.scales is Scales.ONLY else ()
        self._frozen = [p for p in others if p.requires_grad and id(p) not in trained]
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def _freeze(self) -> None:
        trains_others = self.scales is not Scales.ONLY and self._progress < self.freeze_batch_norm_after
        if self._model is None:
            return
        for module in (*self._asleep, *(() if trains_others else batch_norms(self._model))):
            module.training = False

    def _hold(self, *, held: bool) -> None:
        """Let the gradients of learned scales be zero, or what they are."""
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
            forward = partial(_call, args, kwargs)
            labels = labels_of_outputs(model, kwargs.get("labels"), kwargs.get("shift_labels"))
            own = self._distillation.compared(outputs, self._seen)
            masks = self._distillation.masks(kwargs or args)
            self._distances.append(self._distillation.distance(model, own, forward, masks, labels))
        finally:
            self._begun = watch
        return self._with_distance(outputs, kwargs)

    def _with_distance(self, outputs: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the model returns instead; None for the same."""

    def _forget(self) -> None:
        self._distances.clear()
        self._begun.clear()
        self._seen.clear()


def _call(args: Any, kwargs: Any, model: nn.Module) -> Any:
    return model(*args, **kwargs)


def _words(quantizer: Quantizer) -> str:
    """How a quantizer quantizes and learns, without its parameters."""
    learned = quantizer.learned
    how = None if learned is None else (learned.method, learned.options())
    return f"{quantizer.spec!r}, {quantizer.kind}, dynamic={quantizer.dynamic}, {how}"


def learned_scales(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all learned ranges of a model, those that quantizers share once."""
    found = (quantizer.learned for quantizer in quantizers(model).values())
    return [parameter for learned in dict.fromkeys(found) if learned is not None for parameter in learned.parameters()]


@torch.utils.hooks.unserializable_hook
def _zeros(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)


def _check_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise where optimizers have parameters of a model, and not its learned scales."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    known = any(id(parameter) in held for parameter in model.parameters())  # else it has shards of them
    if known and any(id(parameter) not in held for parameter in learned_scales(model) if parameter.requires_grad):
        raise ConfigError(
            "the optimizer was made before the scales became parameters, and would not move them; have the trainer "
            "make the optimizer, or call prepare(model) of the callback before you make it"
        )
