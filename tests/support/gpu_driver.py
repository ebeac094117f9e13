"""A driver for Triton that stands in for a GPU's: kernels are compiled, and not started."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Gpu:
    """The driver of a GPU of compute capability 9.0 that keeps what is compiled and started."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target, self.current = GPUTarget("cuda", 90, 32), 0
        self.compiled: list[str] = []
        self.started: deque[tuple[Any, ...]] = deque(maxlen=64)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (len(self.compiled), f"function {len(self.compiled)}", 0, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> str:
        return f"stream of {device}"

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self.compiled.append(source.fn.__name__)
        return lambda *given: self.started.append(given)
