"""The paths of quantizers in a model, and patterns that match paths."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from fakequant.errors import ConfigError, shown


def join(layer: str, attribute: str) -> str:
    """The path of an attribute of a layer; an empty `layer` means the model, an empty `attribute` the layer itself.

    >>> join("blocks.0", "_input_quantizer"), join("", "weight"), join("blocks.0", "")
    ('blocks.0._input_quantizer', 'weight', 'blocks.0')
    """
    return f"{layer}.{attribute}" if layer and attribute else layer or attribute


def layer_of(quantizer: str) -> str:
    """The path of the layer that a quantizer belongs to.

    >>> layer_of("blocks.0._input_quantizer")
    'blocks.0'
    """
    return quantizer.rpartition(".")[0]


def matches(path: str, pattern: str) -> bool:
    """Whether a path matches a pattern of fnmatch; raises ConfigError if the pattern is not a text.

    >>> matches("blocks.0", "blocks.*"), matches("blocks.0", "blocks")
    (True, False)
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"a pattern is one text, such as 'head' or 'blocks.*', got {shown(pattern)}")
    return fnmatchcase(path, pattern)


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at an existing path of a model; the model itself for "".

    The path is read from `_modules`: `get_submodule` calls `__getattr__`, by which wrappers return modules inside them.

    >>> module_at(nn.Sequential(nn.ReLU()), "0")
    ReLU()
    """
    for name in path.split(".") if path else ():
        model = model._modules[name] or model
    return model
