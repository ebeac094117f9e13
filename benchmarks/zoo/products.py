"""The multiply-accumulates of one call of a model, and how many of them have all factors fake-quantized."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fakequant.nn import Quantizer

# Operators that move values without changing them, or that keep zero and order: a code stays a code.
_MOVES = frozenset(
    """
    view _unsafe_view reshape permute transpose t contiguous clone detach alias expand slice select split
    split_with_sizes unbind cat stack constant_pad_nd squeeze unsqueeze relu relu_ hardtanh hardtanh_ clamp clamp_min
    max_pool2d_with_indices max_pool3d_with_indices index index_select gather flip roll repeat lift_fresh as_strided
    _to_copy unfold
    """.split()  # noqa: SIM905
)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


# Multiply-accumulates of the products that torch's own table lacks, by their arguments.
_MORE: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_grouped_mm": lambda x, weight, *_: x.numel() * weight.shape[-1],
    "grouped_mm_fallback": lambda x, weight, *_: x.numel() * weight.shape[-1],
    "mv": lambda matrix, *_: matrix.numel(),
    "dot": lambda x, *_: x.numel(),
    "_trilinear": lambda x, weight, y, *_: x.shape[0] * weight.numel(),
}
_FACTORS = {"addmm": slice(1, 3), "baddbmm": slice(1, 3), "_trilinear": slice(3)}
# What `fakequant.unquantized` may call them: by a part of the name.
_KINDS = {"conv": "convolution", "attention": "attention", "grouped": "grouped product"}
PRODUCT = "matrix product"


@dataclass
class Products:
    """What was counted.

    Attributes:
        total: multiply-accumulates of the call.
        in_float: those with a factor that is not quantized, by the path of the module, the operator and the reason.
    """

    total: int = 0
    in_float: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """The share of multiply-accumulates whose factors are all quantized; 1 where there are none."""
        return 1 - sum(self.in_float.values()) / self.total if self.total else 1.0

    def kinds(self) -> set[str]:
        """The kinds of products with factors in float."""
        return {kind_of(name) for _, name, _ in self.in_float}

    def largest(self, count: int = 8) -> list[tuple[str, str, str, float]]:
        """What has most of them: path, operator, reason, and its share of all multiply-accumulates."""
        return [(*who, macs / self.total) for who, macs in self.in_float.most_common(count)]


def kind_of(name: str) -> str:
    """The kind of a product by the name of its operator."""
    return next((kind for part, kind in _KINDS.items() if part in name), PRODUCT)


def count_products(model: nn.Module, call: Callable[[], Any]) -> Products:
    """Count the products of one call, on torch's portable paths: recurrence as matrix products, layer by layer."""
    counter = _Counter(model)
    handles = [
        register_module_forward_pre_hook(lambda module, _: counter.running.append(module)),
        register_module_forward_hook(counter.leave, always_call=True),
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False), counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
    return counter.found


class _Counter(TorchDispatchMode):
    """Sees every operator; the outputs of quantizers carry a mark, which operators that only move values pass on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found = Products()
        self.running: list[nn.Module] = []
        self.paths = {module: path for path, module in model.named_modules()}
        self.constants = {id(parameter) for parameter in model.parameters()}

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        """A module has run: what a quantizer returns is quantized."""
        self.running.pop()
        if isinstance(module, Quantizer) and isinstance(output, Tensor):
            output._is_quantized = True  # type: ignore[attr-defined]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        macs = self._macs(func, name, args, kwargs or {}, output)
        if macs:
            self.found.total += macs
            factors = args[_FACTORS.get(name, slice(3 if kind_of(name) == "attention" else 2))]
            left = [self._what(place, x) for place, x in enumerate(factors) if not _is_quantized(x)]
            if left:
                path = next((self.paths[module] for module in reversed(self.running) if module in self.paths), "")
                self.found.in_float[path, name, f"{' and '.join(left)} in float"] += macs
        elif name in _MOVES:
            inputs = [x for x in _flat(args) if x.is_floating_point()]
            if inputs and all(map(_is_quantized, inputs)):
                for x in _flat([output]):
                    x._is_quantized = True  # type: ignore[attr-defined]
        elif name == "copy_":  # how the result of an in-place function with a quantizer takes its place
            output._is_quantized = _is_quantized(args[1])
        else:  # in place, it may have written into a tensor with a mark
            for x in _flat([output]):
                x._is_quantized = False  # type: ignore[attr-defined]
        return output

    def _what(self, place: int, factor: Any) -> str:
        """A factor in words; what is computed from parameters alone counts as an input."""
        base = factor._base if isinstance(factor, Tensor) and factor._base is not None else factor
        return f"factor {place + 1} (a parameter)" if id(base) in self.constants else f"factor {place + 1}"

    @staticmethod
    def _macs(func: Any, name: str, args: Any, kwargs: Any, output: Any) -> int:
        if name in _MORE:
            return _MORE[name](*args)
        formula = flop_registry.get(func._overloadpacket)
        return 0 if formula is None else formula(*args, **kwargs, out_val=output) // 2


def _is_quantized(x: Any) -> bool:
    return getattr(x, "_is_quantized", False)


def _flat(values: Any) -> list[Tensor]:
    """The tensors among values and in their lists."""
    found = [value for value in values if isinstance(value, Tensor)]
    return found + [x for value in values if isinstance(value, (tuple, list)) for x in _flat(value)]
