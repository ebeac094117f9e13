"""Where engines want quantizers: one table per engine, read by `model/sites/placement.py`. Tables hold names alone.

They are made when asked for, so that a function that `register_function` adds stands in all of them.
"""

from __future__ import annotations

from fakequant.errors import ConfigError, nearest
from fakequant.model.sites.targets.table import FixedRange, Target, onnxruntime, openvino, qnn, tensorrt, xnnpack

__all__ = ["FixedRange", "Target", "find_target", "targets"]

_TARGETS = {made.__name__: made for made in (onnxruntime, tensorrt, openvino, qnn, xnnpack)}


def targets() -> dict[str, Target]:
    """All targets by name.

    >>> sorted(targets())
    ['onnxruntime', 'openvino', 'qnn', 'tensorrt', 'xnnpack']
    """
    return {name: made() for name, made in _TARGETS.items()}


def find_target(name: str | Target) -> Target:
    """The target of a name; a table is its own.

    Raises:
        ConfigError: there is none; the nearest are offered.
    """
    if isinstance(name, Target):
        return name
    if name not in _TARGETS:
        raise ConfigError(f"unknown target {name!r}{nearest(str(name), sorted(_TARGETS))}")
    return _TARGETS[name]()
