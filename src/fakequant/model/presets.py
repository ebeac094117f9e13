"""Configurations that most people start from.

Weights are quantized per output channel, activations per tensor unless the name says otherwise. Max pooling stays in
float: it only picks values that the next quantizer sees anyway.
"""

from __future__ import annotations

from fakequant.errors import ConfigError, nearest
from fakequant.model.config import Config, Rule, TensorConfig

_MAX_POOLING_IN_FLOAT = Rule(layers=("MaxPool1d", "MaxPool2d", "MaxPool3d"), optional=True)


def _preset(name: str, *, weight: str, input: str | None = None, dynamic: bool = False) -> Config:
    activations = None if input is None else TensorConfig(input, dynamic)
    return Config(name, (Rule("*", activations, TensorConfig(weight)), _MAX_POOLING_IN_FLOAT))


INT8 = _preset("INT8", weight="int8 per_channel(0)", input="int8")
"""W8A8, symmetric: what TensorRT and most engines run."""

INT8_AFFINE = _preset("INT8_AFFINE", weight="int8 per_channel(0)", input="uint8")
"""W8A8 with asymmetric activations: what ONNX Runtime's and mobile CPUs' kernels run."""

INT8_PER_TOKEN = _preset("INT8_PER_TOKEN", weight="int8 per_channel(0)", input="int8 per_token", dynamic=True)
"""W8A8 with the range of every token taken anew: needs no calibration."""

INT8_WEIGHT_ONLY = _preset("INT8_WEIGHT_ONLY", weight="int8 per_channel(0)")
"""W8: activations stay in float."""

INT4 = _preset("INT4", weight="int4 per_channel(0)", input="uint4")
"""W4A4 with asymmetric activations: needs fine-tuning."""

INT4_WEIGHT_ONLY = _preset("INT4_WEIGHT_ONLY", weight="int4 per_channel(0)")
"""W4: activations stay in float."""

FP8 = _preset("FP8", weight="float8_e4m3fn per_channel(0)", input="float8_e4m3fn")
"""W8A8 in FP8 E4M3."""

FP8_E5M2 = _preset("FP8_E5M2", weight="float8_e5m2 per_channel(0)", input="float8_e5m2")
"""W8A8 in FP8 E5M2: more range, less precision."""


def presets() -> dict[str, Config]:
    """All presets by name.

    >>> sorted(presets())[:3]
    ['FP8', 'FP8_E5M2', 'INT4']
    """
    return {name: value for name, value in globals().items() if isinstance(value, Config)}


def find_preset(name: str) -> Config:
    """The preset of a name, in any case, with `-` or `_`.

    Raises:
        ConfigError: there is none; the nearest are offered.

    >>> find_preset("int8-weight-only").name
    'INT8_WEIGHT_ONLY'
    """
    known = presets()
    upper = name.upper().replace("-", "_")
    if upper not in known:
        raise ConfigError(f"unknown preset {name!r}{nearest(upper, sorted(known))}")
    return known[upper]
