"""Interfaces of other libraries, implemented with this package; each is one module or folder."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

from fakequant.errors import ConfigError, nearest

__all__ = ["install"]

INSTALLABLE = ("pytorch_quantization",)
"""The packages that `install` supports."""
_INTERFACES = (*INSTALLABLE, "aidotnet", "aten", "onnxruntime")


def __getattr__(name: str) -> ModuleType:
    """Import an interface at its first use, since most programs need none."""
    if name not in _INTERFACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def install(name: str) -> ModuleType:
    """Make `import NAME` and imports of its submodules return this package's interface.

    The modules are the same objects under both names, so classes are identical and pickled models can be loaded.

    Args:
        name: "pytorch_quantization".

    Returns:
        The package.

    Raises:
        ConfigError: an unknown name, or another package of that name is imported already.

    >>> package = install("pytorch_quantization")
    >>> import pytorch_quantization.nn
    >>> pytorch_quantization.nn.QuantLinear is package.nn.QuantLinear
    True
    """
    if name not in INSTALLABLE:
        raise ConfigError(f"there is no interface of {name!r}{nearest(name, INSTALLABLE)}")
    real = f"{__name__}.{name}"
    package = importlib.import_module(real)
    if sys.modules.get(name, package) is not package:
        raise ConfigError(f"another {name} is imported already: {sys.modules[name]!r}; call install before the import")
    for found in pkgutil.walk_packages(package.__path__, f"{real}."):
        importlib.import_module(found.name)
    for found, module in list(sys.modules.items()):
        if found == real or found.startswith(f"{real}."):
            sys.modules[name + found[len(real) :]] = module
    return package
