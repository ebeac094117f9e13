"""Quantization-aware training in the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import unwrap
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from torch import Tensor
from transformers.trainer_callback import TrainerCallback

from fakequant.errors import CheckpointError, ConfigError, warn_user
from fakequant.integrations.transformers import enable_saving
from fakequant.model.training.distillation import shifts_labels
from fakequant.model.training.steps import Training
from fakequant.model.weights import note_weights

_KEY = "fakequant.QATCallback"
"""The key of the callback's state in a checkpoint of the Trainer."""


class QATCallback(Training, TrainerCallback):
    """Quantization-aware training in the Trainer, with the arguments of `fakequant.qat.Training`.

    The Trainer's construction prepares and calibrates its model. Checkpoints hold ranges and learned scales, and a
    resumed training gives the losses of an uninterrupted one. A teacher needs a model that computes its loss itself.

    Raises:
        ConfigError: what the Trainer was given does not fit (says what to do).
        CheckpointError: a checkpoint of other settings.

    >>> callback = QATCallback("int8", [{"input_ids": torch.ones(1, 4, dtype=torch.long)}], teacher="float")
    """

    _used = True
    _loop: Sequence[FrameType] = ()
    """The frame of the Trainer's method that trains: the Trainer has no event for an error or an interrupt in it."""

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:  # pyright: ignore
        self.prepare(model)
        if hasattr(model, "hf_quantizer") or hasattr(type(model), "base_model_prefix"):
            enable_saving(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:  # pyright: ignore
        if model is not self._model:
            raise ConfigError(
                "the Trainer made another model than it had when it was created, by model_init or a wrapper; give it "
                "the model itself, or prepare in model_init and give QATCallback no configuration"
            )
        stored = state.stateful_callbacks.get(_KEY)
        if stored is not None:
            self.load_state_dict(stored)
        elif state.global_step:
            raise CheckpointError("the checkpoint was written without this callback; start a new training")
        self._loop = _loops()[-1:]
        self.begin(getattr(optimizer, "optimizer", optimizer))

    def leave_if_over(self) -> None:
        if self._loop and current_thread() is main_thread() and self._loop[0] not in _loops():
            warn_user(
                "an error ended the training of the Trainer, so that QATCallback no longer watches the model; "
                "parameters that it froze train again"
            )
            self.leave()

    def leave(self) -> None:
        super().leave()
        self._loop = ()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at(state.global_step / max(1, state.max_steps), int(state.epoch or 0))
        state.stateful_callbacks[_KEY] = self.state_dict()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._check_used()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._check_used()
        self.drop_held()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:
            note_weights(self._prepared())  # else each checkpoint would warn that the weights have moved

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end(finish=state.is_world_process_zero)

    def _with_distance(self, outputs: Any, kwargs: Any) -> Any:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is None:
            raise ConfigError(
                "the model returned no loss that the teacher's distance could join, as with label smoothing or "
                "compute_loss_func; leave these out, or train without teacher="
            )
        self._used = False
        loss = self.loss(loss, _share(self._prepared(), kwargs))
        loss.register_hook(self._note_used)
        outputs["loss"] = loss
        return outputs

    def _note_used(self, _: Any) -> None:
        self._used = True

    def _check_used(self) -> None:
        if not self._used:
            self._used = True
            raise ConfigError(
                "the Trainer trains by another loss than the model's own, so that the teacher has no part in it; "
                "leave out compute_loss or compute_loss_func, or train without teacher="
            )


def _loops() -> list[FrameType]:
    """The frames of the Trainer's methods that are running, from the innermost one on."""
    found, frame = list[FrameType](), sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            found.append(frame)
        frame = frame.f_back
    return found


def _share(model: Any, kwargs: Any) -> float | Tensor:
    """The share that a batch has in the loss of a step, where the model divides by the items of all its batches."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels", kwargs.get("labels"))
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    names = getattr(unwrap(type(model).forward), "__code__", _share.__code__).co_names
    if items is None or labels is None or "loss_function" not in names:  # others take the mean of each batch
        return 1.0
    if shifts_labels(model) and "shift_labels" not in kwargs:
        labels = labels[..., 1:]
    return labels.ne(-100).sum() / items
