"""Engines, a file each: where an engine wants quantizers, its variant of presets, its files, and its arithmetic."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):  # each registers its `Engine`
    import_module(_file.name)
