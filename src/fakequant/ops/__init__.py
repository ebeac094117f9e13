"""How fast it is computed: one operator, several backends that all return the reference's bits.

Another package adds a backend by `register_backend`.
"""

from .backend import Backend, KernelPlan, Kernels, Kind
from .dispatch import backends, register_backend

__all__ = ["Backend", "KernelPlan", "Kernels", "Kind", "backends", "register_backend"]
