"""The quantization operator on each device: several backends, which all return the bits of `numerics/reference.py`.

Another package adds a backend by `register_backend`.
"""

from .backend import Backend, CallKind, KernelPlan, Kernels
from .dispatch import backends, register_backend

__all__ = ["Backend", "CallKind", "KernelPlan", "Kernels", "backends", "register_backend"]
