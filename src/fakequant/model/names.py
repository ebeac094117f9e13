"""The names of presets, also those of other libraries."""

from __future__ import annotations

from typing import Any

from fakequant.errors import ConfigError, nearest

NAMED: dict[str, Any] = {}
"""The presets by name; `fakequant.model.presets` fills it, because a rule takes a preset by its name."""

ALIASES = {
    "W8A8": "INT8",
    "W8A16": "INT8_WEIGHT_ONLY",
    "INT8WO": "INT8_WEIGHT_ONLY",
    "W4A4": "INT4",
    "W4A16": "INT4_GROUP128",
    "W4A16_G32": "INT4_GROUP32",
    "W4A16_G64": "INT4_GROUP64",
    "W4A16_G128": "INT4_GROUP128",
    "FP8_E4M3": "FP8",
    "NVFP4A16": "NVFP4_WEIGHT_ONLY",
    "NF4": "NF4_WEIGHT_ONLY",
}
"""What other libraries call these presets."""


def find_preset(name: str) -> Any:
    """The preset of a name or of another library's name for it, in any case, with `-` or `_`.

    Raises:
        ConfigError: there is none; the nearest are offered.

    >>> find_preset("int8-weight-only").name
    'INT8_WEIGHT_ONLY'
    >>> find_preset("w4a16").name
    'INT4_GROUP128'
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"a preset is given by its name, such as 'int8', got {name!r:.80}; or make a fakequant.Config"
        )
    upper = name.upper().replace("-", "_")
    upper = ALIASES.get(upper, upper)
    if upper not in NAMED:
        raise ConfigError(f"unknown preset {name!r}{nearest(upper, sorted([*NAMED, *ALIASES]))}")
    return NAMED[upper]
