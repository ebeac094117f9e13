"""Quantization-aware training in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.training.steps import Training

_lightning: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


@dataclass(eq=False)
class LightningQATCallback(Training, _lightning.Callback):
    """Quantization-aware training by `Trainer.fit`, with the arguments of `fakequant.qat.Training`.

    `fit` prepares and calibrates the module before it makes the optimizers. Checkpoints hold ranges and learned scales,
    and `fit(ckpt_path=...)` gives the losses of an uninterrupted run. A teacher's distance is added to the loss from
    `training_step`.

    Args:
        module: the name of the part that `training_step` calls with a batch, as "net" for `self.net(x)`. By default the
            module itself if it has a `forward`, else its only part with parameters.

    Raises:
        ConfigError: the module does not fit; the message has a cure.
        CheckpointError: a checkpoint of other settings.

    >>> callback = QATCallback("int8", [torch.ones(2, 4)], teacher="float")
    """

    module: str | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        owner = next(cls for cls in type(pl_module).__mro__ if "forward" in vars(cls))
        part, name = pl_module, self.module
        # The base class of lightning or pytorch_lightning has a `forward` that does nothing.
        if name is None and owner.__name__ == "LightningModule":
            parts = [name for name, part in pl_module.named_children() if any(True for _ in part.parameters())]
            if len(parts) != 1:
                raise ConfigError(
                    f"{type(pl_module).__name__} has no forward, and its parts with parameters are {parts}; give the "
                    "part that training_step calls with a batch, as QATCallback(module=...)"
                )
            (name,) = parts
        if name is not None:
            part = pl_module.get_submodule(name)
        if not trainer.strategy.restore_checkpoint_after_setup:  # others shard what may not fit there
            part.to(trainer.strategy.root_device)
        self.prepare(part)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.teacher is None:
            return
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "a training_step with manual optimization calls backward before a teacher's distance is added; give "
                "teacher=None, and use fakequant.qat.Distillation in training_step"
            )
        step = pl_module.training_step

        @wraps(step)
        def taught(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if isinstance(result, Mapping):
                return {**result, "loss": self.loss(result["loss"])}
            return result if result is None else self.loss(result)

        pl_module.training_step = taught

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(*trainer.optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at(trainer.global_step / max(1, trainer.estimated_stepping_batches), trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.drop_held()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        vars(pl_module).pop("training_step", None)
        self.end(finish=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        vars(pl_module).pop("training_step", None)
        self.leave()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.state_key not in checkpoint.get("callbacks", {}):
            raise CheckpointError("the checkpoint was written without this callback; start a new training")


QATCallback = LightningQATCallback
"""The same name as the callback for transformers."""
