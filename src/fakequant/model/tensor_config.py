"""How one tensor of a layer is quantized."""

from __future__ import annotations

from dataclasses import dataclass

from fakequant.nn.operands import NO_KERNEL, Kernel
from fakequant.numerics.spec import QuantSpec, as_spec

_NO_AXIS = 1 << 30  # of no tensor


@dataclass(frozen=True)
class TensorConfig:
    """How one tensor of a layer is quantized: a specification, and whether its range is taken from every tensor anew.

    >>> print(TensorConfig("int8 per_token", dynamic=True))
    int8 per_token dynamic
    """

    spec: QuantSpec
    dynamic: bool = False

    def __init__(self, spec: QuantSpec | str, dynamic: bool = False) -> None:
        object.__setattr__(self, "spec", as_spec(spec))
        object.__setattr__(self, "dynamic", dynamic)

    def __str__(self) -> str:
        return f"{self.spec}{' dynamic' if self.dynamic else ''}"

    def __repr__(self) -> str:
        return f"TensorConfig({str(self.spec)!r}{', dynamic=True' if self.dynamic else ''})"

    def placed(self, axes: dict[int, int], kernel: Kernel = NO_KERNEL) -> TensorConfig:
        """The same with the axes that it names by their role moved to where a tensor has them.

        Args:
            axes: of the tensor, by those that a rule names.
            kernel: that the product sums over, too.
        """
        given = self.spec.granularity
        granularity = given.remap_axes(axes)
        if kernel.window and given.remap_axes({-1: _NO_AXIS}) != given:  # other axes than -1 are meant literally
            granularity = granularity.over_window(axes[-1], kernel.window, kernel.length)
        spec = self.spec.regrouped(lambda one: one.remap_axes(axes)).replace(granularity=granularity)
        return TensorConfig(spec, self.dynamic)

    def for_each(self) -> TensorConfig:
        """The same for each of the tensors that are stacked along a first axis; other axes are counted from the end."""
        return TensorConfig(self.spec.regrouped(lambda one: one.for_each()), self.dynamic)

    def to_text(self) -> str:
        """`str(self)`, for files; see `QuantSpec.to_text`."""
        self.spec.to_text()
        return str(self)

    @classmethod
    def parse(cls, text: str) -> TensorConfig:
        """The configuration of a text form."""
        words = text.split()
        return cls(" ".join(word for word in words if word != "dynamic"), dynamic="dynamic" in words)
