"""The form of a table that says where an engine wants quantizers; `model/sites/placement.py` reads it.

Tables hold names alone. They are made when asked for, so that a function that `register_function` adds stands in all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fakequant.errors import ConfigError, nearest
from fakequant.model.run.recorded import having
from fakequant.nn.functions import SITE_FUNCTIONS, Trait


class FixedRange(NamedTuple):
    """A range that an engine gives the result of a function, whatever the data.

    Attributes:
        low: the smallest value.
        high: the largest value, or, where it has no code, the end of the range.
        has_high: whether the largest value has a code: 255 steps of 8 bits from 0 to 1, otherwise 256.
    """

    low: float
    high: float
    has_high: bool


@dataclass(frozen=True)
class Target:
    """The placement rules of one engine, by the canonical names of functions.

    Attributes:
        name: of the engine.
        inputs: functions whose operands are quantized. Layers count by the function that they call.
        keeps: functions whose result has the scale of their input, so that they need no quantizer.
        shared: functions whose operands have one scale together.
        fixed: functions whose result has a range of its own, whatever the data.
        outputs: functions whose result is quantized where no operand of another function quantizes it.
        fused: pairs of functions that are computed as one where nothing else uses what is in between.
        identity_only: whether a sum of a product's result and a residual branch is quantized on that branch alone,
            because the engine computes it together with the product.
        moved_back: functions over which the engine moves a quantizer back to a result that nothing else reads; None if
            over all that `keeps` names.
        attention_in_parts: whether the engine computes attention as two products and a softmax, so that the
            probabilities are quantized, too.
        symmetric: whether activations must be symmetric so that all products are integer ones; False where they must be
            asymmetric, None where both are.
        folds_norms: whether the engine folds a batch normalisation into a product with a quantized weight.

    Raises:
        ConfigError: a function is unknown.

    >>> Target("mine", inputs=frozenset({"linear", "conv2d"}), keeps=frozenset({"relu"})).symmetric is None
    True
    """

    name: str
    inputs: frozenset[str]
    keeps: frozenset[str]
    shared: frozenset[str] = frozenset()
    fixed: dict[str, FixedRange] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    fused: frozenset[tuple[str, str]] = frozenset()
    identity_only: bool = False
    moved_back: frozenset[str] | None = None
    attention_in_parts: bool = False
    symmetric: bool | None = None
    folds_norms: bool = True

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {len(self.inputs)} functions with quantized operands)"

    def __post_init__(self) -> None:
        known = {*SITE_FUNCTIONS, *RECURRENT, ATTENTION_LAYER}
        for name in (*self.inputs, *self.shared, *self.fixed, *self.outputs):
            if name not in known:
                raise ConfigError(f"the target {self.name} names an unknown function {name!r}{nearest(name, [*known])}")


POOLS = frozenset(f"{kind}_pool{n}d" for kind in ("avg", "adaptive_avg") for n in (1, 2, 3))
ATTENTION = frozenset({"scaled_dot_product_attention"})
ATTENTION_LAYER = "multi_head_attention_forward"
"""What `nn.MultiheadAttention` calls: its projections, both products and the softmax in one function."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""What the recurrent layers call, for a whole sequence."""


def moves() -> frozenset[str]:
    """Functions that move or pick values."""
    return having(Trait.MOVES)


def products() -> frozenset[str]:
    """Products in one function, which all engines quantize alike."""
    return (having(Trait.PRODUCT) & frozenset(SITE_FUNCTIONS)) - having(Trait.ATTENTION) - lookups()


def lookups() -> frozenset[str]:
    """Functions that read rows of a quantized table."""
    return having(Trait.LOOKUP) & frozenset(SITE_FUNCTIONS)


def after_products(*functions: str) -> frozenset[tuple[str, str]]:
    """Pairs of every product and the functions that engines compute together with it, and of batch normalisation."""
    return frozenset((first, second) for first in (*products(), "batch_norm") for second in ("batch_norm", *functions))
