"""The products of an attention that multiply rows with weights: its first projections, and the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fakequant.nn.products.product import MatrixProduct
from fakequant.nn.quantizer import Quantizer

_INPUTS = ("query", "key", "value")
_READS = {"in_proj_weight": (0, 1, 2), "q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,)}


class _Projection(MatrixProduct):
    readers = 0

    @property
    def input_transform(self) -> None:
        return None

    def makes_same_rows(self, other: MatrixProduct) -> bool:
        return self is other


class InProjection(_Projection):
    """The weight that makes query, key and value of an attention, or one of the three."""

    is_result = False

    @property
    def reads(self) -> tuple[int, ...]:  # type: ignore[override]
        return _READS[self.name]

    @property
    def input_quantizer(self) -> Quantizer | None:
        layer = self.layer
        others = layer._key_input_quantizer, layer._value_input_quantizer
        return layer._input_quantizer if len(self.reads) == len(_INPUTS) and others == (None, None) else None

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        first, last, width = self.reads[0], self.reads[-1] + 1, self.layer.embed_dim
        return self.layer._parameters.get("in_proj_bias"), slice(first * width, last * width)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {**dict(zip(_INPUTS, args, strict=False)), **kwargs}
            inputs = {name: given[name] for name in _INPUTS}
            hook(self, (inputs[_INPUTS[self.reads[0]]],), inputs)

        return self.layer.register_forward_pre_hook(see, with_kwargs=with_kwargs)

    def inputs(self, call: Any) -> tuple[Tensor, ...]:
        return tuple(call.kwargs[name] for name in _INPUTS)

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        query, key, value = inputs
        return [one.value for one in self.layer._quantized_inputs(query, key, value)]


class OutProjection(_Projection):
    """The weight of an attention's last projection, whose input is made inside of the attention's call."""

    @property
    def is_result(self) -> bool:  # type: ignore[override]
        return self.layer.batch_first  # else its rows have another order

    @property
    def input_quantizer(self) -> Quantizer | None:
        return self.layer._out_proj_input_quantizer

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self.layer.out_proj._parameters.get("bias"), slice(None)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        return self.layer.watch(lambda x: hook(self, (x.transpose(0, 1),), {}))

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        x = inputs[0].transpose(0, 1)  # the attention quantizes one matrix, whose rows have this order
        y = self.layer.quantized("_out_proj_input_quantizer", x.reshape(-1, x.shape[-1]))
        return (y.view(x.shape).transpose(0, 1),)
