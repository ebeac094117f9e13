"""How fast it is computed: one operator, several backends that all return the reference's bits.

Another package adds a backend by `register_backend`.
"""

from .backend import Backend, CallKind, KernelPlan, Kernels
from .dispatch import backends, register_backend

__all__ = ["Backend", "CallKind", "KernelPlan", "Kernels", "backends", "register_backend"]
