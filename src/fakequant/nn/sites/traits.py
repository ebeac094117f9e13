"""What a function does with the values of its tensors, and the text in which tables say it."""

from __future__ import annotations

from enum import Flag, auto


class Trait(Flag):
    """What a function does with the values of its tensors."""

    MOVES = auto()
    """It moves or picks values, which all engines compute on codes."""
    CODES = auto()
    """It moves, copies or cuts values: its result is quantized if its inputs are."""
    SCALES = auto()
    """f(s x) = s f(x) for s > 0, in eval mode. It may mix channels, as `mean`: callers check the model's output."""
    CHANNELS = auto()
    """With one tensor and numbers, it commutes with a rotation of channels; for some arguments alone, as `reshape`:
    callers check the model's output."""
    SUMS = auto()
    """It adds or joins tensors with the same channels."""
    FILLS = auto()
    """It writes values from elsewhere into a tensor."""
    EMPTY = auto()
    """It reads no values, and gives zeros, which every quantized format has, or nothing."""
    PRODUCT = auto()
    """An integer or low-precision unit would compute it. All others are elementwise, normalisations or reductions,
    which run in float on most engines."""
    LOOKUP = auto()
    """It reads rows of a table, and multiplies nothing."""
    ATTENTION = auto()
    """It computes two products with a softmax between, and may take a mask."""
    HEADS = auto()
    """The last axis of its result is that of the operand that it sums over along axis -2: the values of attention."""
    SOFTMAX = auto()
    """It makes weights of scores, among which may be those of a mask."""
    IDENTITY = auto()
    """In eval mode it gives the values that it takes; no exported file has it."""
    SHAPE = auto()
    """It may be asked without a read of values. A call whose result holds a tensor counts as a read."""


NO_TRAITS = Trait(0)


def read_traits(table: str) -> dict[str, Trait]:
    """The traits of functions by name, from lines of names, a bar and traits.

    >>> read_traits("relu | codes scales")
    {'relu': <Trait.CODES|SCALES: 6>}
    """
    found = dict[str, Trait]()
    for line in table.strip().splitlines():
        names, _, traits = line.partition("|")
        held = NO_TRAITS
        for trait in traits.split():
            held |= Trait[trait.upper()]
        assert found.keys().isdisjoint(names.split()), line
        found |= dict.fromkeys(names.split(), held | Trait.CODES if Trait.MOVES in held else held)
    return found
