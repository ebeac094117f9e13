"""What a quantizer does, and what it sits on."""

from enum import Enum


class Mode(Enum):
    """What a quantizer does with a tensor."""

    OFF = "off"
    """Returns it as it is."""
    OBSERVE = "observe"
    """Shows it to the calibrator and returns it as it is."""
    QUANTIZE = "quantize"
    """Fake-quantizes it."""


class Kind(Enum):
    """What a quantizer sits on, which decides where its range comes from before calibration."""

    INPUT = "input"
    """Activations: a static range must come from calibration."""
    WEIGHT = "weight"
    """A parameter: until calibration fixes the range, it is that of the parameter at each call."""
