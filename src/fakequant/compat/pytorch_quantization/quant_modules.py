"""Replace layer classes of torch.nn by quantized layers for models that are built later; and the switch for ONNX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fakequant.compat.pytorch_quantization import nn as quant_nn
from fakequant.restore import attributes_of, restore_after, restore_on_error

__all__ = ["deactivate", "enable_onnx_export", "initialize"]


class _quant_entry(NamedTuple):
    """A module, a name in it, and the replacement for the class with this name."""

    orig_mod: Any
    mod_name: str
    replace_mod: Any


_NAMES = (
    *("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Linear"),
    *("LSTM", "LSTMCell", "AvgPool1d", "AvgPool2d", "AvgPool3d"),
    *("AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d"),
)
_DEFAULT_QUANT_MAP = [_quant_entry(torch.nn, name, getattr(quant_nn, f"Quant{name}")) for name in _NAMES]


class QuantModuleReplacementHelper:
    """The replacements of layer classes, and the original classes."""

    def __init__(self) -> None:
        self.default_quant_map = _DEFAULT_QUANT_MAP
        self.quant_map: dict[tuple[int, str], _quant_entry] = {}
        self._originals: dict[tuple[int, str], _quant_entry] = {}

    def prepare_state(
        self, float_module_list: Iterable[str] | None = None, custom_map: Iterable[tuple[Any, str, Any]] | None = None
    ) -> None:
        """Choose the layer classes that `apply_quant_modules` replaces.

        Args:
            float_module_list: names of layers that stay float, such as "Linear".
            custom_map: further triples (module, name in it, replacement); a triple for a layer of torch.nn replaces its
                default.
        """
        kept = set(float_module_list or ())
        chosen = [entry for entry in self.default_quant_map if entry.mod_name not in kept]
        chosen += [_quant_entry(*entry) for entry in custom_map or ()]
        self.quant_map = {(id(entry.orig_mod), entry.mod_name): entry for entry in chosen}

    def apply_quant_modules(self) -> None:
        """Replace the chosen layer classes, and restore those of an earlier call that are no longer chosen."""
        for entry in self.quant_map.values():
            if not hasattr(entry.orig_mod, entry.mod_name):
                raise AttributeError(f"{entry.orig_mod} has no {entry.mod_name} to replace; nothing was replaced")
        self.restore_float_modules()
        with restore_on_error(self.restore_float_modules):
            for key, entry in self.quant_map.items():
                self._originals[key] = entry._replace(replace_mod=getattr(entry.orig_mod, entry.mod_name))
                setattr(*entry)

    def restore_float_modules(self) -> None:
        """Restore the original layer classes."""
        for entry in self._originals.values():
            setattr(*entry)
        self._originals = {}


_helper = QuantModuleReplacementHelper()


def initialize(
    float_module_list: Iterable[str] | None = None,
    custom_quant_modules: Iterable[tuple[Any, str, Any]] | None = None,
) -> None:
    """Replace layer classes of torch.nn by quantized classes, such as `torch.nn.Linear` by `QuantLinear`.

    Convolutions, transposed convolutions, linear layers, LSTMs, average and adaptive average pooling are replaced.
    Existing layers, and names that were imported from torch.nn before, do not change.

    Args:
        float_module_list: names of layers that stay, such as ["Linear"].
        custom_quant_modules: (module, name in it, replacement) triples of your own.

    >>> initialize(["Linear"])
    >>> type(torch.nn.Conv1d(1, 1, 1)).__name__, type(torch.nn.Linear(1, 1)).__name__
    ('QuantConv1d', 'Linear')
    >>> deactivate()
    >>> type(torch.nn.Conv1d(1, 1, 1)).__name__
    'Conv1d'
    """
    _helper.prepare_state(float_module_list, custom_quant_modules)
    _helper.apply_quant_modules()


def deactivate() -> None:
    """Undo `initialize`; does nothing if it was not called."""
    _helper.restore_float_modules()


@contextmanager
def enable_onnx_export() -> Iterator[None]:
    """A context in which quantizers compute as QuantizeLinear and DequantizeLinear do, for exporters.

    Inside it use `fakequant.export_onnx`, whose files can be verified bit for bit, or `torch.onnx.export`.
    """
    with restore_after(attributes_of([quant_nn.TensorQuantizer], "_enable_onnx_export")):
        quant_nn.TensorQuantizer._enable_onnx_export = True
        yield
