"""torch.onnx reads the sources of 500 functions of onnxscript at every export, 0.6 of 1.2 s: here once per process."""

import copy
import sys
from functools import cache
from typing import Any

_MODULE = "torch.onnx._internal.exporter._registration"


def read_torchlib_once() -> None:
    """Give every export a copy of the functions that the first one read, as soon as torch's exporter is imported."""
    registry: Any = getattr(sys.modules.get(_MODULE), "ONNXRegistry", None)
    read: Any = getattr(registry, "from_torchlib", None)
    if read is None or hasattr(read, "once"):  # another torch may have no such function
        return
    once = cache(read)

    def copied(**options: Any) -> Any:
        found = copy.copy(once(**options))
        found.functions = {name: [*functions] for name, functions in found.functions.items()}
        return found

    copied.once = once
    registry.from_torchlib = staticmethod(copied)
