"""Engines, a file each: where they want quantizers, what they compute of a preset, what they load and how they run."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):  # each registers its `Engine`
    import_module(_file.name)
