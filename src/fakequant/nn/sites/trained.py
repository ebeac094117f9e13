"""Functions as products of factors, whose backward products can be quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fakequant.nn.backward.products import Factor, LinearSum, matmul, multiplied
from fakequant.nn.backward.trained import Backward
from fakequant.nn.sites.attention_parts import attend_in_parts

Factors = Mapping[str, Factor]
_FACTORS = "query", "key", "value"


def attend(
    probabilities: Callable[[Tensor], Tensor],
    how: Backward | None,
    factors: Factors,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """`scaled_dot_product_attention` in two products and a softmax between them, for the arguments of a call."""
    others = {name: value for name, value in kwargs.items() if name not in _FACTORS}
    query, key, value = (factors[name] for name in _FACTORS)
    given: Any = args[len(_FACTORS) :]
    return attend_in_parts(partial(matmul, how), probabilities, query, key, value, *given, **others)


def _linear(how: Backward | None, factors: Factors, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return multiplied(LinearSum(), how, factors["input"], factors["weight"], bias)


TRAINED: dict[str, Callable[..., Tensor]] = {
    "linear": _linear,
    "matmul": lambda how, factors, *_: matmul(how, factors["input"], factors["other"]),
    "scaled_dot_product_attention": partial(attend, lambda x: x),
}
"""What computes a function of how its backward products are quantized, of the factors by name, and of all arguments;
attention in visible parts."""
