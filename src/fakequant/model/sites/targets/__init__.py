"""Where engines want quantizers: one table per engine, read by `model/sites/placement.py`. Tables hold no code."""

from __future__ import annotations

from fakequant.errors import ConfigError, nearest
from fakequant.model.sites.targets.onnxruntime import ONNXRUNTIME
from fakequant.model.sites.targets.openvino import OPENVINO
from fakequant.model.sites.targets.qnn import QNN
from fakequant.model.sites.targets.table import FixedRange, Target
from fakequant.model.sites.targets.tensorrt import TENSORRT
from fakequant.model.sites.targets.xnnpack import XNNPACK

__all__ = ["FixedRange", "Target", "find_target", "targets"]

_targets = {target.name: target for target in (ONNXRUNTIME, TENSORRT, OPENVINO, QNN, XNNPACK)}


def targets() -> dict[str, Target]:
    """All targets by name.

    >>> sorted(targets())
    ['onnxruntime', 'openvino', 'qnn', 'tensorrt', 'xnnpack']
    """
    return dict(_targets)


def find_target(name: str | Target) -> Target:
    """The target of a name; a table is its own.

    Raises:
        ConfigError: there is none; the nearest are offered.
    """
    if isinstance(name, Target):
        return name
    if name not in _targets:
        raise ConfigError(f"unknown target {name!r}{nearest(str(name), sorted(_targets))}")
    return _targets[name]
