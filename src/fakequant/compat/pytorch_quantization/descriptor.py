"""Descriptors, which say how to quantize a tensor, in the terms of the interface."""

from __future__ import annotations

from typing import Any

import numpy as np

from .specification import NumBits, block_axes, float_format
from .utils.quant_logging import logger

__all__ = ["QuantDescriptor", "ScaledQuantDescriptor"]

_BLOCK_KEYS = ("type", "scale_bits", "scale_block_sizes")
_BLOCK_TYPES = ("static", "dynamic")


class ScaledQuantDescriptor:
    """The description of how to quantize a tensor.

    All arguments can be given by name, or in this order as later releases take them.

    Args:
        num_bits: bits of an integer code, or (exponent bits, mantissa bits) of a float such as (4, 3).
        name: what it is called when printed.
        fake_quant: whether a quantizer returns values; else codes.
        axis: the axis or axes that keep one amax per index; None for one amax in all.
        block_sizes: {axis: size} for one amax per block; may also hold "type" ("static" or "dynamic"), "scale_bits"
            (the format of the scales, as num_bits) and "scale_block_sizes" ({axis: size} over the scales).
        amax: the largest magnitude, if it is known: a float, or a list or array of them.
        learn_amax: whether training moves amax, which then begins at `amax`.
        scale_amax: what amax is multiplied with whenever it is used.
        calib_method: "max" or "histogram".
        unsigned: codes from 0 instead of on both sides of it.
        narrow_range: leave the lowest signed code out.
        dynamic: whether the range is taken from every tensor anew; true also for blocks of type "dynamic".

    Raises:
        TypeError: an unknown argument or one of a wrong type, or learn_amax with an axis.
        ValueError: a negative num_bits, or block_sizes that mean nothing or come with an axis.

    >>> desc = QuantDescriptor(num_bits=4, axis=0, unsigned=True)
    >>> print(desc)
    QuantDescriptor(unsigned 4bit fake axis=0)
    >>> desc.dict()
    {'num_bits': 4, 'name': None, 'axis': 0, 'unsigned': True}
    >>> QuantDescriptor(**desc.dict()) == desc == QuantDescriptor.from_yaml(desc.to_yaml())
    True
    """

    def __init__(self, num_bits: NumBits = 8, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        options = {**_DEFAULTS, **_by_name(args, kwargs)}
        self._num_bits = _checked_bits(num_bits)
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a string or None, not {type(name)}.")
        self._name = name
        if options["learn_amax"] and options["axis"] is not None:
            got = f"got {options['axis']!r}; leave axis out, or set learn_amax=False"
            raise TypeError(f"axis is ignored and must be None when learn_amax is true, {got}")
        self._fake_quant: bool = options["fake_quant"]
        self._axis: int | tuple[int, ...] | None = _checked_axis(options["axis"])
        self._block_sizes = _checked_blocks(options["block_sizes"])
        if self._block_sizes is not None and self._axis is not None:
            raise ValueError(f"axis must be None when block_sizes are given, got {self._axis!r}")
        self._amax = _checked_amax(options["amax"])
        self._learn_amax: bool = options["learn_amax"]
        self._scale_amax: float | None = options["scale_amax"]
        self._calib_method: str = options["calib_method"]
        self._unsigned: bool = options["unsigned"]
        self._narrow_range: bool = options["narrow_range"]
        self._dynamic: bool = options["dynamic"]

    @property
    def num_bits(self) -> NumBits:
        """Bits of an integer code, or (exponent bits, mantissa bits)."""
        return self._num_bits

    @property
    def name(self) -> str | None:
        """What it is called when printed."""
        return self._name

    @property
    def fake_quant(self) -> bool:
        """Whether a quantizer returns values; else codes."""
        return self._fake_quant

    @property
    def axis(self) -> int | tuple[int, ...] | None:
        """The axis or axes that keep one amax per index."""
        return self._axis

    @property
    def block_sizes(self) -> dict[int | str, Any] | None:
        """Block sizes by axis, and the options of blocks."""
        return self._block_sizes

    @property
    def amax(self) -> np.ndarray | None:
        """The largest magnitude, float32."""
        return self._amax

    @property
    def learn_amax(self) -> bool:
        """Whether training moves amax."""
        return self._learn_amax

    @property
    def scale_amax(self) -> float | None:
        """What amax is multiplied with."""
        return self._scale_amax

    @property
    def calib_method(self) -> str:
        """The kind of calibrator."""
        return self._calib_method

    @property
    def unsigned(self) -> bool:
        """Whether codes begin at 0."""
        return self._unsigned

    @property
    def narrow_range(self) -> bool:
        """Whether the lowest signed code is left out."""
        return self._narrow_range

    @property
    def dynamic(self) -> bool:
        """Whether the range is taken from every tensor anew."""
        return self._dynamic or (self._block_sizes is not None and self._block_sizes.get("type") == "dynamic")

    @staticmethod
    def get_block_quant_axes_and_sizes(block_sizes: dict[int | str, Any] | None) -> dict[int, int] | None:
        """The part of block_sizes that says how large a block is along which axis; None of None.

        >>> QuantDescriptor.get_block_quant_axes_and_sizes({-1: 16, "type": "dynamic", "scale_bits": (4, 3)})
        {-1: 16}
        """
        return None if block_sizes is None else block_axes(block_sizes)

    def __str__(self) -> str:
        words = [f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit", "fake" if self._fake_quant else "real"]
        words.append(f"axis={' per-tensor' if self._axis is None else self._axis}")
        if self._block_sizes is not None:
            words.append(f"block_sizes={self._block_sizes}")
        if self._amax is not None:
            words.append(f"amax={self._amax} full_range")
        if self._learn_amax:
            words.append("learn_amax")
        if self._scale_amax:
            words.append(f"scale_amax={self._scale_amax}")
        return f"{'QuantDescriptor' if self._name is None else f'{self._name}: '}({' '.join(words)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScaledQuantDescriptor):
            return NotImplemented
        mine, others = self.dict(), other.dict()
        return list(mine.items()) == list(others.items())

    __hash__ = None  # pyright: ignore[reportAssignmentType] # equal by value

    def dict(self) -> dict[str, Any]:
        """num_bits, name and all that is not the default, as plain values; the constructor takes it back."""
        values = {"num_bits": self._num_bits, "name": self._name}
        for key, default in _DEFAULTS.items():
            value = getattr(self, f"_{key}")
            if isinstance(value, np.ndarray):
                values[key] = value.tolist()
            elif value != default:
                values[key] = value
        return values

    def to_yaml(self) -> str:
        """`dict()` as YAML, tuples as lists.

        Raises:
            ModuleNotFoundError: PyYAML is not installed.

        >>> print(QuantDescriptor(num_bits=(4, 3), amax=[1.0, 2.5]).to_yaml(), end="")
        amax:
        - 1.0
        - 2.5
        name: null
        num_bits:
        - 4
        - 3
        """
        return _yaml().safe_dump(self.dict(), width=120)

    @classmethod
    def from_yaml(cls, yaml_str: str) -> ScaledQuantDescriptor:
        """The descriptor that `to_yaml`, of this package or of the original, wrote.

        Raises:
            ModuleNotFoundError: PyYAML is not installed.
            yaml.YAMLError: the text is not YAML.
            TypeError: it is no mapping, or one of other keys than the constructor's.
        """
        values = _load_yaml(yaml_str)
        if not isinstance(values, dict):
            raise TypeError(f"the YAML of a descriptor is a mapping such as 'num_bits: 8', not {values!r}")
        blocks = values.get("block_sizes") or {}
        # YAML has no tuples.
        for mapping, key in ((values, "num_bits"), (values, "axis"), (blocks, "scale_bits")):
            if isinstance(mapping.get(key), list):
                mapping[key] = tuple(mapping[key])
        return cls(**values)


_DEFAULTS: dict[str, Any] = {
    "fake_quant": True,
    "axis": None,
    "block_sizes": None,
    "amax": None,
    "learn_amax": False,
    "scale_amax": None,
    "calib_method": "max",
    "unsigned": False,
    "narrow_range": False,
    "dynamic": False,
}


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All options by name; args are in the order of `_DEFAULTS`."""
    if unknown := kwargs.keys() - _DEFAULTS.keys():
        raise TypeError(f"Unused keys: {sorted(unknown)}; known are {', '.join(_DEFAULTS)}")
    if len(args) > len(_DEFAULTS):
        raise TypeError(f"a descriptor takes at most {len(_DEFAULTS) + 2} arguments, got {len(args) + 2}")
    given = dict(zip(_DEFAULTS, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"given twice, by position and by name: {sorted(twice)}")
    return {**given, **kwargs}


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        message = "descriptors as YAML need PyYAML, not installed here; run pip install 'fakequant[compat]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return yaml


def _load_yaml(text: str) -> Any:
    yaml = _yaml()

    class Loader(yaml.SafeLoader):
        """Reads what the original writes for num_bits=(4, 3), which a safe loader refuses."""

    Loader.add_constructor("tag:yaml.org,2002:python/tuple", Loader.construct_sequence)
    return yaml.load(text, Loader)


def _checked_bits(num_bits: Any) -> NumBits:
    if isinstance(num_bits, int):
        if num_bits < 0:
            raise ValueError(f"num_bits must be > 0, not {num_bits}.")
        if num_bits == 0:
            logger.error("num_bits is 0, which leaves nothing but zeros; use it for debugging only.")
        return num_bits
    if not isinstance(num_bits, tuple):
        raise TypeError(f"num_bits must be a positive integer or a tuple of two, not {type(num_bits)}")
    float_format(num_bits)
    return num_bits


def _checked_axis(axis: Any) -> int | tuple[int, ...] | None:
    if axis is None or isinstance(axis, int):
        return axis
    if isinstance(axis, tuple | list) and all(isinstance(each, int) for each in axis):
        return tuple(axis)
    raise TypeError(f"axis must be None, an int or a tuple of ints, not {axis!r}")


def _checked_amax(amax: Any) -> np.ndarray | None:
    if amax is None:
        return None
    if not isinstance(amax, float | list | np.ndarray):
        raise TypeError(f"amax must be float, list or ndarray, not {type(amax)}")
    return np.array(amax, dtype=np.float32)


def _checked_blocks(block_sizes: Any) -> dict[int | str, Any] | None:
    if block_sizes is None:
        return None
    if not isinstance(block_sizes, dict):
        raise TypeError(f"block_sizes must be a dict such as {{-1: 32}}, not {block_sizes!r}")
    sizes = {key: value for key, value in block_sizes.items() if key not in _BLOCK_KEYS}
    if not sizes or not all(isinstance(key, int) and isinstance(size, int) and size > 0 for key, size in sizes.items()):
        raise ValueError(
            f"block_sizes {block_sizes} must map at least one axis to a positive size; other keys are "
            f"{', '.join(_BLOCK_KEYS)}"
        )
    if block_sizes.get("type", "static") not in _BLOCK_TYPES:
        raise ValueError(f"the type of block_sizes is static or dynamic, not {block_sizes['type']!r}")
    return dict(block_sizes)


QuantDescriptor = ScaledQuantDescriptor

QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
