"""Which calls of a recorded run compute with the mask of an attention, whose numbers no scale of scores can hold.

A mask adds -inf, or a number such as -10000 or the least float, where a softmax shall give 0. A range over such numbers
and the scores rounds all scores to one value.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fakequant.errors import CalibrationWarning, warn_user
from fakequant.model.paths import layer_of
from fakequant.model.recorded import EXTREME, Recording
from fakequant.nn.site_functions import SITE_FUNCTIONS
from fakequant.nn.sites import Site
from fakequant.numerics.qparams import Range
from fakequant.text import listed

_SOFTMAX = frozenset({"softmax", "log_softmax"})
_TAKES_MASK = frozenset({"scaled_dot_product_attention", "attention_function"})


def masked_calls(recording: Recording) -> set[tuple[str | None, str, int]]:
    """The calls that have numbers of a mask and whose result reaches a softmax, or an attention as its mask.

    A product on the way ends it: what it reads are no scores. Calls are named as by `Call.site`.
    """
    found = set()
    scores: set[int] = set()  # values that reach a softmax
    for call in reversed(recording.calls):
        known = SITE_FUNCTIONS.get(call.function)
        if call.function in _TAKES_MASK:
            scores.update(value for value in call.inputs if value not in call.operands.values())
        elif call.multiplications or (known is not None and known.is_product):
            continue
        elif call.function in _SOFTMAX or any(value in scores for value in call.outputs):
            scores.update(call.inputs)
            if call.extreme:
                found.add(call.site)
    return found


def warn_of_masks(model: nn.Module, ranges: Mapping[str, Range]) -> None:
    """Warn of functions whose calibrated ranges hold numbers of a mask, which the example of `prepare` did not have.

    Args:
        model: a prepared model.
        ranges: by the path of the quantizer.
    """
    low: dict[str, float] = {}
    functions: set[str] = set()
    for name, range in ranges.items():
        site = model.get_submodule(layer_of(name))
        if isinstance(site, Site) and not SITE_FUNCTIONS[site.function].is_product and range.lo.numel():
            lowest = range.lo.min().item()
            if lowest <= -EXTREME:
                low[name] = lowest
                functions.add(site.function)
    if low:
        first = next(iter(low))
        warn_user(
            f"the range of {listed(low, 1)} reaches {low[first]:.3g}, as with the numbers of an attention mask: its "
            "scale rounds all scores to one value. Give prepare(..., example=) an input with a mask, which leaves "
            f"these functions in float; or leave them in float by Rule('*', ops={(*sorted(functions),)})",
            CalibrationWarning,
        )
