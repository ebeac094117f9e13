"""The products of a recurrent layer or cell: its weights, multiplied with the inputs and hidden states of all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.quantizer import Quantizer
from fakequant.nn.transforms import InputTransform, first_weights
from fakequant.numerics.spec import QuantSpec

_PREFIX = "weight_"


class GateProduct(MatrixProduct):
    """A weight of all gates, of one layer in one direction, multiplied with the input or the hidden state of each step.

    Its rows are those of all steps. Hidden states are those that the layer computes while this weight is in float; of a
    cell those that its calls get.
    """

    has_steps = True
    is_result = False

    @property
    def readers(self) -> int:  # type: ignore[override]
        """Those of both directions; 0 for the inputs of inner layers and for hidden states."""
        names = first_weights(self.layer)
        return len(names) if self.name in names else 0

    @property
    def _ending(self) -> str:
        """What the names of weight and bias end with: "ih_l0_reverse" of a layer, "hh" of a cell."""
        return self.name.removeprefix(_PREFIX)

    @property
    def _seen(self) -> str:
        """What it is multiplied with: both directions see the same inputs, and each its own hidden states."""
        return self._ending.removesuffix("_reverse") if self._ending.startswith("ih") else self._ending

    @property
    def input_attribute(self) -> str:
        """The layer's attribute that holds the quantizer of the rows."""
        kind, suffix = self._ending[:2], self._ending[2:]
        return f"{suffix}_{'input' if kind == 'ih' else 'hidden'}_quantizer"

    @property
    def input_quantizer(self) -> Quantizer | None:
        return getattr(self.layer, self.input_attribute, None)

    @property
    def input_transform(self) -> InputTransform | None:
        return self.layer.input_transform if self.readers else None

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self.layer._parameters.get(f"bias_{self._ending}"), slice(None)

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return isinstance(other, GateProduct) and self.layer is other.layer and self._seen == other._seen

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(attribute: str, rows: Callable[[], Tensor]) -> None:
            if attribute == self.attribute:
                hook(self, (rows(),), {})

        return self.layer.watch(see)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rows [n, steps, columns], or [n, columns] of one step, as the steps see them."""
        (x,), quantizer, transform = inputs, self.input_quantizer, self.input_transform
        x = x if transform is None else transform(x)
        if quantizer is None or x.dim() < 3 or not quantizer.dynamic or is_by_row(quantizer.spec):
            return (self.layer.quantized(self.input_attribute, x),)
        return (torch.stack([quantizer(step) for step in x.unbind(1)], 1),)


def is_by_row(spec: QuantSpec) -> bool:
    """Whether each row of a matrix has scales of its own, so that its range depends on no other row.

    >>> is_by_row(QuantSpec.parse("int8 per_token")), is_by_row(QuantSpec.parse("int8 per_tensor"))
    (True, False)
    """
    shape: tuple[int, ...] = (2, 16_384)
    for granularity in (spec.granularity, *spec.shared_granularities):
        shape = tuple(granularity.group_shape(shape))
    return shape[0] == 2
