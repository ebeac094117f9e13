"""Where engines want quantizers: one table per engine, which `model/placement.py` reads. Tables hold data, no code."""

from __future__ import annotations

from fakequant.errors import ConfigError, nearest
from fakequant.model.targets.onnxruntime import ONNXRUNTIME
from fakequant.model.targets.openvino import OPENVINO
from fakequant.model.targets.qnn import QNN
from fakequant.model.targets.table import FixedRange, Target
from fakequant.model.targets.tensorrt import TENSORRT
from fakequant.model.targets.xnnpack import XNNPACK

__all__ = ["FixedRange", "Target", "find_target", "targets"]


def targets() -> dict[str, Target]:
    """All targets by name.

    >>> sorted(targets())
    ['onnxruntime', 'openvino', 'qnn', 'tensorrt', 'xnnpack']
    """
    return {target.name: target for target in (ONNXRUNTIME, TENSORRT, OPENVINO, QNN, XNNPACK)}


def find_target(name: str) -> Target:
    """The target of a name.

    Raises:
        ConfigError: there is none; the nearest are offered.
    """
    known = targets()
    if name not in known:
        raise ConfigError(f"unknown target {name!r}{nearest(str(name), sorted(known))}")
    return known[name]
