"""`save_pretrained`, `from_pretrained` and the Trainer of Hugging Face's transformers for quantized models.

Importing this module registers the quantization method "fakequant" with transformers. Without the import, transformers
warns that the method is unknown, and loads the float model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from inspect import unwrap
from threading import current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.trainer_callback import TrainerCallback
from transformers.utils.quantization_config import QuantizationConfigMixin

from fakequant.data.arguments import refuse_stored, refuse_unprepared
from fakequant.errors import CheckpointError, ConfigError, warn_user
from fakequant.model.state import QuantizedState, check_plan, finish_loading, restore_plan, snapshot
from fakequant.model.training.distillation import shifts_labels
from fakequant.model.training.steps import Training
from fakequant.model.weights import mark_ranges_current
from fakequant.nn.quantizer import quantizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "fakequant"
"""The name of the quantization method in `config.json`."""

Model = TypeVar("Model", bound="PreTrainedModel")


class FakeQuantConfig(QuantizationConfigMixin):
    """The `quantization_config` of a quantized model in `config.json`.

    Args:
        layers: for the path of every quantized layer, its entry in the manifest.
        tensors: for the path of every tensor of a quantizer, its dtype and shape.
        sites: the manifest entries of the functions that have quantizers.
        stale: the paths of quantizers whose scales were made for other weights, for a warning.
        quant_method: "fakequant".
    """

    def __init__(
        self,
        layers: dict[str, Any],
        tensors: dict[str, Any],
        sites: dict[str, Any] | None = None,
        stale: list[str] | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise CheckpointError(
                f"the quantization_config has unknown keys {', '.join(unknown)}: it is damaged, or a later version of "
                "fakequant wrote it; save the model again with this version"
            )
        self.quant_method = quant_method  # type: ignore[assignment]  transformers declares an enumeration
        self.layers, self.tensors, self.sites, self.stale = layers, tensors, sites, stale or []

    @classmethod
    def of(cls, model: nn.Module) -> FakeQuantConfig:
        """The configuration of a prepared model in its present state."""
        plan = snapshot(model).plan
        tensors = {
            f"{name}.{key}": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, quantizer in quantizers(model).items()
            for key, tensor in quantizer.state_dict().items()
        }
        return cls(plan["layers"], tensors, plan["sites"], plan["stale"])


class FakeQuantHfQuantizer(HfQuantizer):
    """Quantizes the layers of a model before transformers loads their tensors, and writes the configuration."""

    quantization_config: FakeQuantConfig
    state: QuantizedState
    requires_calibration = True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config, modules = self.quantization_config, dict(model.named_modules())
        plan = {"layers": config.layers, "sites": config.sites or {}, "stale": config.stale}
        state = QuantizedState.from_plan(plan, {}, source="the quantization_config")
        owners, shielded = _names_in(model, state.sites.owners), _names_in(model, dict.fromkeys(state.sites.shielded))
        self.state = replace(
            state,
            layers={name: layer for name, layer in _names_in(model, state.layers).items() if name in modules},
            sites=replace(
                state.sites,
                owners={name: owner for name, owner in owners.items() if name in modules},
                shielded=[name for name in shielded if name in modules],
            ),
            stale=list(_names_in(model, dict.fromkeys(state.stale))),
        )
        if not self.state.layers and not self.state.sites.owners:
            raise CheckpointError(
                f"the quantization_config names no layer of a {type(model).__name__}; load the class that was saved"
            )
        check_plan(model, self.state)
        restore_plan(model, self.state)
        held = quantizers(model)
        for path, described in _names_in(model, config.tensors).items():
            owner, name = path.rpartition(".")[::2]
            if owner not in held and owner.rpartition(".")[0] not in held:  # of a learned range
                continue
            try:
                module = model.get_submodule(owner)
                dtype, shape = described
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"the quantization_config is damaged at {path}: {described!r:.80}") from error
            if name not in module._parameters and name not in module._buffers:
                raise CheckpointError(
                    f"the quantization_config is damaged: {path} is not a tensor of a quantizer; save the model again"
                )
            # On the meta device, so that transformers finds and fills it.
            setattr(module, name, nn.Parameter(empty) if name in module._parameters else empty)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        absent = [
            f"{name}.{key}"
            for name, quantizer in quantizers(model).items()
            for key, tensor in quantizer.state_dict(keep_vars=True).items()
            if not getattr(tensor, "_is_hf_initialized", False)  # transformers sets this on tensors that it loaded
        ]
        if absent:
            raise CheckpointError(
                f"the files lack {len(absent)} tensors that the quantization_config names: {', '.join(absent)}; "
                "save the model again"
            )
        finish_loading(model, self.state)
        return model

    def get_state_dict_and_metadata(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Update the configuration to the present state; `save_pretrained` calls this before it writes."""
        refuse_stored(model, "save")
        self.quantization_config = FakeQuantConfig.of(model)
        model.config.quantization_config = self.quantization_config
        held, state = quantizers(model), model.state_dict()
        # A learned range that tied layers share: transformers allows its own ties alone.
        shared = [name for name in snapshot(model).shared if name.rpartition(".")[0].rpartition(".")[0] in held]
        if not shared:
            return None, {}
        state |= {name: state[name].clone() for name in shared}
        return state, {}

    # transformers gives its two abstract methods no return type, so pyright takes it for None.
    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


register_quantization_config(METHOD)(FakeQuantConfig)
register_quantizer(METHOD)(FakeQuantHfQuantizer)


def enable_saving(model: Model) -> Model:
    """Make `model.save_pretrained` also save the quantizers, for `from_pretrained` to restore the quantized model.

    Every save writes a new `quantization_config` into `config.json`. A quantized model that `from_pretrained` returned
    does not need this call.

    Args:
        model: a prepared model of transformers, which is returned.

    Raises:
        CheckpointError: the model has no quantizers, or is not from transformers.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(
    ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    ... )
    >>> ids = torch.arange(12).view(2, 6)
    >>> model = prepare(BertModel(config).eval(), presets.INT8)
    >>> used = calibrate(model, [ids])
    >>> with TemporaryDirectory() as folder:
    ...     enable_saving(model).save_pretrained(folder)
    ...     again = BertModel.from_pretrained(folder)
    >>> torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
    True
    """
    if not hasattr(model, "base_model_prefix"):  # which a wrapper of adapters passes on
        inside = [path for path, one in model.named_modules() if hasattr(one, "base_model_prefix")]
        cure = f"call it with the model of transformers in it, {inside[0]!r}, or save" if inside else "save"
        raise CheckpointError(
            f"enable_saving takes a model of transformers, but save_pretrained of a {type(model).__name__} writes "
            f"no quantizers; {cure} it by fakequant.save"
        )
    refuse_unprepared(model, CheckpointError)
    quantizer: Any = FakeQuantHfQuantizer(FakeQuantConfig.of(model))
    model.config.quantization_config = quantizer.quantization_config
    model.hf_quantizer = quantizer
    return model


def _names_in(model: PreTrainedModel, named: dict[str, Any]) -> dict[str, Any]:
    """Translate paths to this model, which may hold the base model as an attribute, or be the base model."""
    prefix, paths = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules() if name}
    if model.base_model_prefix not in paths:
        return {name.removeprefix(prefix): value for name, value in named.items()}
    return {name if name.partition(".")[0] in paths else prefix + name: value for name, value in named.items()}


def __getattr__(name: str) -> Any:
    if name != "QATCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # At first use: transformers' callbacks import peft and torchvision where these are installed.
    return import_module("fakequant.integrations.transformers").QATCallback


_KEY = "fakequant.QATCallback"
"""The key of the callback's state in a checkpoint of the Trainer."""


class QATCallback(Training, TrainerCallback):
    """Quantization-aware training in the Trainer, with the arguments of `fakequant.qat.Training`.

    The Trainer's construction prepares and calibrates its model. Checkpoints hold ranges and learned scales, and a
    resumed training gives the losses of an uninterrupted run. A teacher needs a model that computes its loss itself.

    Raises:
        ConfigError: the Trainer's model, loss or settings do not fit; the message has a cure.
        CheckpointError: a checkpoint of other settings.

    >>> callback = QATCallback("int8", [{"input_ids": torch.ones(1, 4, dtype=torch.long)}], teacher="float")
    """

    _used = True
    _loop: Sequence[FrameType] = ()
    """The frame of the Trainer's training method, to notice errors and interrupts, which have no event."""

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:  # pyright: ignore
        self.prepare(model)
        if hasattr(model, "hf_quantizer") or hasattr(type(model), "base_model_prefix"):
            enable_saving(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:  # pyright: ignore
        if model is not self._model:
            raise ConfigError(
                "the Trainer made another model after its construction, by model_init or a wrapper; give the Trainer "
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
            mark_ranges_current(self._prepared())  # else each checkpoint would warn that the weights have moved

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end(finish=state.is_world_process_zero)

    def _with_distance(self, outputs: Any, kwargs: Any) -> Any:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is None:
            raise ConfigError(
                "the model returned no loss to which the teacher's distance can be added, as with label smoothing or "
                "compute_loss_func; leave these out, or train without teacher="
            )
        self._used = False
        loss = self.loss(loss, _share(self._prepared(), kwargs))
        loss.register_hook(lambda _: setattr(self, "_used", True))
        outputs["loss"] = loss
        return outputs

    def _check_used(self) -> None:
        if not self._used:
            self._used = True
            raise ConfigError(
                "the Trainer trains by another loss than the model's own, without the teacher's distance; "
                "leave out compute_loss or compute_loss_func, or train without teacher="
            )


def _loops() -> list[FrameType]:
    """The running frames of the Trainer's methods, innermost first."""
    found, frame = list[FrameType](), sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            found.append(frame)
        frame = frame.f_back
    return found


def _share(model: Any, kwargs: Any) -> float | Tensor:
    """The share of a batch in a step's loss if the model divides the loss by the items of all batches; else 1."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels", kwargs.get("labels"))
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    names = getattr(unwrap(type(model).forward), "__code__", _share.__code__).co_names
    if items is None or labels is None or "loss_function" not in names:  # others take the mean of each batch
        return 1.0
    if shifts_labels(model) and "shift_labels" not in kwargs:
        labels = labels[..., 1:]
    return labels.ne(-100).sum() / items
