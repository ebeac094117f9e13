"""How the two products of a layer's backward pass are quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from fakequant.errors import ConfigError
from fakequant.numerics.spec import QuantSpec, as_spec

_AXES = {0: {-1: 0, 0: 1}, 1: {-1: 1, 0: 0}}
"""Where the axes of a specification are in an operand, by the axis that the product sums over."""


@dataclass(frozen=True)
class GradientConfig:
    """How the operands of a layer's backward products are quantized, by default by the range of the tensor itself.

    The gradient dy of the output is an operand of both: dx = dy W, a sum over outputs, and dW = dy^T x, a sum over
    tokens. In a specification axis -1 is the axis of the sum, and axis 0 the other one.

    Args:
        gradient: dy in both products; `stochastic` in its text leaves the expected gradient as it is. Infinity becomes
            NaN, so that a GradScaler sees it.
        input: x in dW, from the input before it was quantized; None: x as the forward product has it.
        weight: W in dx, from the weight before it was quantized; None: W as the forward product has it, as where it
            has square blocks.
        hadamard: the block of a Hadamard matrix with random signs, by which both operands of a product are multiplied
            along the axis of its sum before they are quantized, so that a large value is spread. It is done where
            both are quantized here: in dW with `input`, in dx with `weight`. Convolutions, which sum over positions,
            too, do without it. 0: not at all.

    Raises:
        SpecError: no specification of the gradient, or one that cannot be read.
        ConfigError: a Hadamard matrix without `input` and `weight`, or of another size than a power of two.

    >>> print(GradientConfig("float8_e5m2"))
    float8_e5m2 per_tensor
    >>> GradientConfig.parse("int8 stochastic; input=int8 per_token; hadamard=16").hadamard
    16
    """

    gradient: QuantSpec
    input: QuantSpec | None = None
    weight: QuantSpec | None = None
    hadamard: int = 0
    operands: dict[tuple[str, int], QuantSpec | None] = field(init=False, repr=False, compare=False)
    """The specifications by what they quantize, and by the axis, first or second, that the product sums over."""

    def __init__(
        self,
        gradient: QuantSpec | str,
        input: QuantSpec | str | None = None,
        weight: QuantSpec | str | None = None,
        hadamard: int = 0,
    ) -> None:
        object.__setattr__(self, "gradient", as_spec(gradient))
        for name, spec in {"input": input, "weight": weight}.items():
            object.__setattr__(self, name, None if spec is None else as_spec(spec))
        object.__setattr__(self, "hadamard", hadamard)
        if not isinstance(hadamard, int) or hadamard < 0 or hadamard == 1 or hadamard & (hadamard - 1):
            raise ConfigError(f"hadamard must be a power of two such as 16, or 0 for none, got {hadamard!r}")
        # `replace` of a specification while a compiler reads the code takes its numbers for ones that vary.
        operands = {
            (name, axis): None if spec is None else spec.regrouped(lambda one, axis=axis: one.remap_axes(_AXES[axis]))
            for name, spec in (("gradient", self.gradient), ("input", self.input), ("weight", self.weight))
            for axis in _AXES
        }
        object.__setattr__(self, "operands", operands)
        if hadamard and input is None and weight is None:
            raise ConfigError(
                "hadamard multiplies both operands of a product before they are quantized; give input= for the product "
                "that gives the weight's gradient, or weight= for that of the input's"
            )

    def __str__(self) -> str:
        named = (f"{name}={value}" for name, value in self._others())
        return "; ".join([str(self.gradient), *named])

    def __repr__(self) -> str:
        return f"GradientConfig.parse({str(self)!r})"

    def _others(self) -> Iterator[tuple[str, object]]:
        for one in [own for own in fields(self) if own.init][1:]:
            if value := getattr(self, one.name):
                yield one.name, value

    def to_text(self) -> str:
        """`str(self)`, for files; see `QuantSpec.to_text`."""
        for spec in (self.gradient, self.input, self.weight):
            if spec is not None:
                spec.to_text()
        return str(self)

    @classmethod
    def parse(cls, text: str) -> GradientConfig:
        """The configuration of a text form: the specification of the gradient, then what else there is by name.

        Raises:
            ConfigError: an unknown name, a name twice, or a block that is no number.
            SpecError: a specification that cannot be read.
        """
        gradient, *others = (part.strip() for part in text.split(";"))
        known = [one.name for one in fields(cls) if one.init][1:]
        found: dict[str, str] = {}
        for part in others:
            name, equals, value = part.partition("=")
            if not equals or name not in known or name in found:
                raise ConfigError(
                    f"cannot read {part!r} in the gradient {text!r}: after the specification of the gradient come "
                    f"{', '.join(f'{one}=' for one in known)}, each once, with ';' between them"
                )
            found[name] = value
        block = found.pop("hadamard", "0")
        if not block.isdecimal():
            raise ConfigError(f"hadamard must be a power of two such as 16, got {block!r}")
        return cls(gradient, **found, hadamard=int(block))
