"""`save_pretrained` and `from_pretrained` of Hugging Face's transformers with quantized models.

Importing this module registers the quantization method "fakequant" in transformers' own registries. In a program that
does not import it, transformers warns that the method of the folder is unknown, and loads the float model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fakequant.errors import CheckpointError
from fakequant.model.checkpoint import check_layers, layer_entry, restore_layer
from fakequant.model.manifest import LayerEntry, layer_values, parse_layers
from fakequant.model.stored_ranges import check_ranges, is_wide
from fakequant.model.weights import note_weights
from fakequant.nn.fast_paths import leave_fast_paths
from fakequant.nn.layers import QuantizedLayer
from fakequant.nn.quantizer import quantizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "fakequant"
"""The name of the quantization method in `config.json`."""

Model = TypeVar("Model", bound="PreTrainedModel")


class FakeQuantConfig(QuantizationConfigMixin):
    """What `config.json` says of a quantized model.

    Args:
        layers: for every quantized layer by its path, what a checkpoint's manifest says of it.
        tensors: for every tensor of a quantizer by its path, its dtype and shape.
        quant_method: "fakequant".
    """

    def __init__(
        self, layers: dict[str, Any], tensors: dict[str, Any], quant_method: str = METHOD, **unknown: Any
    ) -> None:
        if unknown:
            raise CheckpointError(
                f"the quantization_config has unknown keys {', '.join(unknown)}: it is damaged, or of a later version "
                "of fakequant"
            )
        self.quant_method = quant_method  # type: ignore[assignment]  transformers' own are members of an enumeration
        self.layers, self.tensors = layers, tensors

    @classmethod
    def of(cls, model: nn.Module) -> FakeQuantConfig:
        """That of a prepared model as it is now."""
        layers = {
            name: layer_values(layer_entry(layer))
            for name, layer in model.named_modules()
            if isinstance(layer, QuantizedLayer)
        }
        tensors = {
            f"{name}.{key}": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, quantizer in quantizers(model).items()
            for key, tensor in quantizer.state_dict().items()
        }
        return cls(layers, tensors)


class FakeQuantHfQuantizer(HfQuantizer):
    """Makes the layers of a model quantized before transformers loads their tensors, and the configuration to save."""

    quantization_config: FakeQuantConfig
    entries: dict[str, LayerEntry]
    requires_calibration = True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        modules: dict[str, nn.Module] = dict(model.named_modules())
        names = _names_in(model, parse_layers(self.quantization_config.layers, "the quantization_config"))
        self.entries = found = {name: entry for name, entry in names.items() if name in modules}
        if not found:
            raise CheckpointError(
                f"the quantization_config names no layer of a {type(model).__name__}; load the class that was saved"
            )
        check_layers(modules, found)
        for name, entry in found.items():
            restore_layer(modules[name], entry, name)
        leave_fast_paths(model)
        for path, described in _names_in(model, self.quantization_config.tensors).items():
            if path.rpartition("._")[0] in found:
                _make_room(model, path, described)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        absent = [
            f"{name}.{key}"
            for name, quantizer in quantizers(model).items()
            for key, tensor in quantizer.state_dict(keep_vars=True).items()
            if not getattr(tensor, "_is_hf_initialized", False)  # transformers' mark of what a file gave
        ]
        if absent:
            raise CheckpointError(
                f"the files lack {len(absent)} tensors that the quantization_config names: {', '.join(absent)}; "
                "save the model again"
            )
        check_ranges(dict(model.named_modules()), self.entries, model.state_dict(), is_wide(model))
        note_weights(model)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Called by `save_pretrained` before it writes the configuration, which gets that of the model as it is now."""
        self.quantization_config = FakeQuantConfig.of(model)
        model.config.quantization_config = self.quantization_config
        return None, {}

    # The two that transformers leaves abstract have no type there, which counts as None.
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
    """From now on, `model.save_pretrained` writes what `from_pretrained` needs to give the quantized model back.

    That is a `quantization_config` in `config.json`, made anew by every save. A model that `from_pretrained` gave back
    quantized need not be passed here.

    Args:
        model: a prepared model of transformers; it is returned.

    Raises:
        CheckpointError: the model has no quantizers.

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
    if not quantizers(model):
        raise CheckpointError("the model has no quantizers; call fakequant.prepare(model, config) first")
    quantizer: Any = FakeQuantHfQuantizer(FakeQuantConfig.of(model))
    model.config.quantization_config = quantizer.quantization_config
    model.hf_quantizer = quantizer
    return model


def _names_in(model: PreTrainedModel, named: dict[str, Any]) -> dict[str, Any]:
    """Values by paths in this model: one with a head has the model without it as an attribute."""
    prefix, paths = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules() if name}
    if model.base_model_prefix not in paths:
        return {name.removeprefix(prefix): value for name, value in named.items()}
    return {name if name.partition(".")[0] in paths else prefix + name: value for name, value in named.items()}


def _make_room(model: nn.Module, path: str, described: Any) -> None:
    """Give a quantizer a tensor without memory where it has none yet, so that transformers finds and fills it."""
    owner, _, name = path.rpartition(".")
    try:
        module = model.get_submodule(owner)
        dtype, shape = described
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the quantization_config is damaged at {path}: {described!r:.80}") from error
    if name not in module._parameters and name not in module._buffers:
        raise CheckpointError(f"the quantization_config is damaged: {path} is no tensor of a quantizer")
    setattr(module, name, nn.Parameter(empty) if name in module._parameters else empty)
