"""`save_pretrained`, `from_pretrained` and the Trainer of Hugging Face's transformers for quantized models.

Importing this module registers the quantization method "fakequant" with transformers. A program that does not import
it gets a warning from transformers that the method is unknown, and the float model.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fakequant.data.arguments import refuse_stored, refuse_unprepared
from fakequant.errors import CheckpointError
from fakequant.model.state import QuantizedState, check_plan, restore_plan, settle, snapshot
from fakequant.nn.quantizer import quantizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "fakequant"
"""The name of the quantization method in `config.json`."""

Model = TypeVar("Model", bound="PreTrainedModel")


class FakeQuantConfig(QuantizationConfigMixin):
    """The `quantization_config` of a quantized model in `config.json`.

    Args:
        layers: the manifest entry of every quantized layer, by path.
        tensors: dtype and shape of every tensor of a quantizer, by path.
        sites: the manifest entries of the functions that have quantizers.
        stale: the paths of quantizers whose scales were made for other weights, which a warning says.
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
        """Return the configuration of a prepared model in its present state."""
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
            owner = path.rpartition(".")[0]
            if owner in held or owner.rpartition(".")[0] in held:  # of a learned range
                _make_room(model, path, described)

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
        settle(model, self.state)
        return model

    def get_state_dict_and_metadata(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Update the configuration to the present state of the model; `save_pretrained` calls this before it writes."""
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
    """Make `model.save_pretrained` save the quantizers too, so that `from_pretrained` restores the quantized model.

    Every save writes a new `quantization_config` into `config.json`. A quantized model that `from_pretrained` returned
    does not need this call.

    Args:
        model: a prepared model of transformers, which is returned.

    Raises:
        CheckpointError: the model has no quantizers, or is none of transformers.

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
            f"enable_saving takes a model of transformers, and save_pretrained of a {type(model).__name__} writes no "
            f"quantizers; {cure} it by fakequant.save"
        )
    refuse_unprepared(model, CheckpointError)
    quantizer: Any = FakeQuantHfQuantizer(FakeQuantConfig.of(model))
    model.config.quantization_config = quantizer.quantization_config
    model.hf_quantizer = quantizer
    return model


def _names_in(model: PreTrainedModel, named: dict[str, Any]) -> dict[str, Any]:
    """Translate paths to this model: a model with a head holds the base model as an attribute."""
    prefix, paths = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules() if name}
    if model.base_model_prefix not in paths:
        return {name.removeprefix(prefix): value for name, value in named.items()}
    return {name if name.partition(".")[0] in paths else prefix + name: value for name, value in named.items()}


def _make_room(model: nn.Module, path: str, described: Any) -> None:
    """Set a missing tensor of a quantizer to one on the meta device, so that transformers finds and fills it."""
    owner, _, name = path.rpartition(".")
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
    setattr(module, name, nn.Parameter(empty) if name in module._parameters else empty)


def __getattr__(name: str) -> Any:
    if name != "QATCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # At first use: transformers' callbacks import peft and torchvision where these are installed.
    return import_module("fakequant.integrations.transformers_trainer").QATCallback
