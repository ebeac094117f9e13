"""The arithmetic of engines, an engine a file: how a device stores the results of functions as codes."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):  # each registers its `Device`
    import_module(_file.name)
