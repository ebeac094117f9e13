"""aimet-onnx without the packages that it imports for plots and solvers: its reader of encodings needs none of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

_OTHERS = {"bokeh", "hvplot", "jsonschema", "onnx2torch", "osqp", "pandas", "sklearn"}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _OTHERS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = MagicMock(name=spec.name)
        made.__path__, made.__spec__, made.__name__ = [], spec, spec.name
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def aimet() -> tuple[Any, Any]:
    """The modules `aimet_onnx.quantsim` and `aimet_onnx._encoding`; skips where it is not installed."""
    if find_spec("aimet_onnx") is None:
        pytest.skip("needs aimet-onnx: make engines")
    sys.meta_path.append(_StandIns())  # what is installed comes first
    import aimet_onnx._encoding as encoding  # pyright: ignore[reportMissingImports]
    import aimet_onnx.quantsim as quantsim  # pyright: ignore[reportMissingImports]

    return quantsim, encoding
