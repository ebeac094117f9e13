"""Qualcomm's QNN (HTP): every operator has quantized inputs and a quantized output.

Softmax and sigmoid give values from 0 to 1, tanh from -1 to 1. Concatenations and stacks have one scale.
"""

from __future__ import annotations

from fakequant.model.sites.targets.table import (
    ATTENTION_LAYER,
    RECURRENT,
    FixedRange,
    Target,
    after_products,
    lookups,
    moves,
)
from fakequant.nn.sites.functions import SITE_FUNCTIONS

_ZERO_TO_ONE = FixedRange(0.0, 1.0, has_high=True)


def qnn() -> Target:
    """The table of QNN."""
    keeps = moves() | {"maximum", "minimum"}
    inputs = frozenset(SITE_FUNCTIONS) - keeps - {"batch_norm", "relu", "relu6"}
    return Target(
        name="qnn",
        inputs=inputs,
        keeps=keeps,
        shared=frozenset({"cat", "stack"}),
        fixed={
            "softmax": _ZERO_TO_ONE,
            "sigmoid": _ZERO_TO_ONE,
            "hardsigmoid": _ZERO_TO_ONE,
            "tanh": FixedRange(-1.0, 1.0, has_high=True),
        },
        outputs=(inputs | RECURRENT | {ATTENTION_LAYER}) - lookups(),
        fused=after_products("relu", "relu6") | {("add", "relu")},
        attention_in_parts=True,
    )
