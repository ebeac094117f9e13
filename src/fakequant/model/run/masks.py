"""Which values of a recorded run carry the numbers of a mask, which no scale of the other numbers can hold.

A mask adds -inf, or a number such as -10000 or the least float, where a softmax shall give 0. A range over such numbers
and the scores rounds all scores to one value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from fakequant.errors import CalibrationWarning, warn_user
from fakequant.model.run.recorded import EXTREME, Recording
from fakequant.model.run.traits import has
from fakequant.nn.paths import layer_of
from fakequant.nn.sites.sites import Site
from fakequant.nn.sites.traits import Trait
from fakequant.numerics.qparams import Range
from fakequant.text import listed

_STILL_LARGE = EXTREME / 100
"""What is left of a mask behind a temperature or a factor."""


def masked_values(recording: Recording) -> set[int]:
    """The values that carry numbers of a mask, until a function has removed them.

    A value is a mask if it holds zeros and extreme numbers alone, or if a function wrote extreme numbers into another
    value. A function of such a value carries the mask on while its result has large numbers; a product does not. Scores
    with extreme numbers before a softmax, and the mask argument of an attention, are such values too.
    """
    sizes = [value.size for value in recording.values]
    found = set(recording.masks)
    for call in recording.calls:
        if call.is_product:
            continue
        carries = not found.isdisjoint(call.inputs)
        if carries or (has(call.function, Trait.FILLS) and not any(sizes[value] >= EXTREME for value in call.inputs)):
            least = _STILL_LARGE if carries else EXTREME
            found.update(value for value in call.outputs if least <= sizes[value] < math.inf)
    scores: set[int] = set()  # values that reach a softmax
    for call in reversed(recording.calls):
        if has(call.function, Trait.ATTENTION):
            scores.update(value for value in call.inputs if value not in call.factors)
        elif not call.is_product and (has(call.function, Trait.SOFTMAX) or not scores.isdisjoint(call.outputs)):
            scores.update(call.inputs)
    return found | {value for value in scores if EXTREME <= sizes[value] < math.inf}


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
        if isinstance(site, Site) and not has(site.function, Trait.PRODUCT) and range.lo.numel():
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
