"""LoRA on quantized layers, trained as merged: the layer computes with quantize(W + scaling * B A).

peft computes the adapter beside the quantized layer, and merging the adapter then changes codes, because
W + scaling * B A is quantized anew. Here training already quantizes this sum, and merging writes the same sum to the
weight, so that the codes stay those of training.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fakequant.errors import ConfigError
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.quantizer import MERGED, Kind, quantizers
from fakequant.nn.stored import StoredWeight
from fakequant.numerics.qparams import QParams
from fakequant.restore import attributes_of, restore_on_error

Model = TypeVar("Model", bound=nn.Module)
_PEFT = "peft.tuners.lora.layer"


def adapter_layers(model: nn.Module) -> list[str]:
    """Patterns that match the adapter layers of LoRA in a model, for the argument `skip` of `prepare`."""
    return sorted(
        {
            f"*.{name}.*"
            for layer in _lora_layers(model).values()
            for name in layer.adapter_layer_names
            if isinstance(held := getattr(layer, name), nn.ModuleDict) and len(held)
        }
    )


def train_merged(model: Model) -> Model:
    """Make quantized layers with LoRA or rsLoRA adapters quantize the merged weight in each call; `model` is changed.

    `merge_and_unload` of peft then keeps the trained codes and scales. Several active adapters are added one after the
    other, as peft merges them. Adapters on layers in float are not changed.

    Args:
        model: a model whose layers are quantized, and whose adapters are in float.

    Raises:
        ConfigError: an adapter has quantized layers, or cannot be merged into a weight (DoRA and other variants, input
            dropout). The message names the layer and the cure; the model stays unchanged.

    >>> train_merged(nn.Sequential(nn.Linear(2, 2)))  # without adapters nothing changes
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
    )
    """
    found = {path: layer for path, layer in _lora_layers(model).items() if isinstance(_base(layer), QuantizedLayer)}
    for path, layer in found.items():
        own = [name for name in quantizers(layer) if not name.startswith("base_layer.")]
        if own:
            raise ConfigError(
                f"{path}: the adapter has the quantizer {own[0]}, and must be in float; call fakequant.prepare before "
                "get_peft_model, or with skip=['*lora_*']"
            )
        if not hasattr(layer, "get_delta_weight"):
            raise ConfigError(
                f"{path}: a {type(layer).__name__} adapter has no weight that can be merged; leave the layer in float"
            )
        for adapter in layer.scaling:
            _check(layer, adapter, path)
    with restore_on_error(attributes_of(found.values(), "__class__")):
        for layer in found.values():
            layer.__class__ = _merged_class(type(layer))
    for layer in found.values():
        for quantizer in quantizers(_base(layer)).values():
            vars(quantizer)[MERGED] = quantizer.kind is Kind.WEIGHT
    return model


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    cls = getattr(sys.modules.get(_PEFT), "LoraLayer", None)
    return {} if cls is None else {path: one for path, one in model.named_modules() if isinstance(one, cls)}


def _base(layer: Any) -> nn.Module:
    return layer.get_base_layer()


def _check(layer: Any, adapter: str, path: str = "") -> None:
    """Raise ConfigError if an adapter cannot be merged into a weight: it is a variant such as DoRA, or has dropout."""
    place = f"{path or type(layer).__name__}: the adapter {adapter!r}"
    if adapter in layer.lora_variant:
        raise ConfigError(
            f"{place} is a {type(layer.lora_variant[adapter]).__name__}, whose merged weight is not W + scaling * B A; "
            "make the adapter without use_dora and other variants"
        )
    if any(getattr(dropout, "p", 0.0) for name, dropout in layer.lora_dropout.items() if name == adapter):
        raise ConfigError(
            f"{place} applies dropout to its input, which a merged weight cannot do; give LoraConfig lora_dropout=0.0"
        )


class _Merged:
    """Methods that replace those of peft's LoRA layers, so that the layer computes with the merged weight."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.scaling]
        if self.disable_adapters or self.merged or not active:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if kwargs.pop("adapter_names", None) is not None:
            raise ConfigError(
                "adapter_names= chooses several adapters in a batch, which have no single merged weight; call the "
                "model once for each adapter, without adapter_names="
            )

        def merged(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return functional_call(_base(self), self.merged_tensors(active), (x, *args), kwargs)

        if type(_base(self).weight) is not StoredWeight or not torch.is_grad_enabled():
            return merged(x, *args, **kwargs)
        # Else autograd would keep the merged weight in float.
        return checkpoint(merged, x, *args, use_reentrant=False, **kwargs)

    def merged_tensors(self: Any, adapters: list[str]) -> dict[str, Tensor]:
        """The weight into which the adapters are merged, and the merged bias if the layer or an adapter has a bias."""
        base: Any = _base(self)
        weight, bias = base.weight, getattr(base, "bias", None)
        # Else the product of B and A would be rounded to 16 bits in training, and not in `merge`.
        with torch.autocast(weight.device.type, enabled=False):
            for adapter in adapters:
                _check(self, adapter)
                weight = (weight + self.get_delta_weight(adapter)).to(weight.dtype)
                if self.lora_bias.get(adapter, False):
                    if bias is None:
                        raise ConfigError(
                            f"the adapter {adapter!r} has a bias (lora_bias=True), which cannot be merged into a layer "
                            "without a bias; leave lora_bias out"
                        )
                    bias = (bias + self.lora_B[adapter].bias * self.scaling[adapter]).to(bias.dtype)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def merge(self: Any, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        active = [name for name in adapter_names or self.active_adapters if name in self.scaling]
        active = [name for name in active if name not in self.merged_adapters]
        base: Any = _base(self)
        if type(base.weight) is StoredWeight:
            # The codes of the merged weight; those from before are for `unmerge`.
            bias, before = getattr(base, "bias", None), base.weight
            with torch.no_grad():
                found = self.merged_tensors(active)
                codes = base.weight_quantizer.codes(found["weight"])
                if codes is None or not all(bool(x.isfinite().all()) for x in found.values()):
                    raise ValueError(f"NaN or infinite values in the weights with {', '.join(active)} merged")
                merged = StoredWeight.of(codes[0], QParams(before.scale, before.zero_point), before.spec, before.dtype)
                if not self.merged_adapters:
                    self._before = before, None if bias is None else bias.detach().clone()
                base.put("weight", nn.Parameter(merged, requires_grad=False))
                if bias is not None:
                    bias.copy_(found["bias"])
            self.merged_adapters += active
            return
        if safe_merge and not all(bool(x.isfinite().all()) for x in self.merged_tensors(active).values()):
            raise ValueError(f"NaN or infinite values in the weights with {', '.join(active)} merged")
        super().merge(False, adapter_names)  # type: ignore[misc]  peft's own safe one rounds otherwise in 16 bits

    def unmerge(self: Any) -> None:
        base: Any = self.get_base_layer()
        if type(base.weight) is not StoredWeight or not self.merged:
            return super().unmerge()  # type: ignore[misc]
        (weight, bias), self._before = self._before, None
        base.put("weight", weight)
        if bias is not None:
            with torch.no_grad():
                base.bias.copy_(bias)
        self.merged_adapters.clear()

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = object.__reduce_ex__(self, max(int(protocol), 2))
        return (_new, (type(self).__mro__[2],), *state)


_made: dict[type[Any], type[Any]] = {}


def _merged_class(cls: type[Any]) -> type[Any]:
    if issubclass(cls, _Merged):
        return cls
    if cls not in _made:
        _made[cls] = type(cls.__name__, (_Merged, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _made[cls]


def _new(cls: type[Any]) -> Any:
    made: Any = _merged_class(cls)
    return made.__new__(made)
