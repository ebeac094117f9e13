"""Engines, a file each: their placement of quantizers, their variant of a preset, the files they load, their rules."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):  # each registers its `Engine`
    import_module(_file.name)
