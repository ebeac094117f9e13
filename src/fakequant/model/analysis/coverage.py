"""What `prepare` left in float although it could be quantized: a share of the parameters, and of the products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from fakequant.model.run.traits import has
from fakequant.model.weights import quantized_weights, weights_of
from fakequant.nn.quantized.forms import own_class, quantized_class, why_changed
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.sites.sites import Site
from fakequant.nn.sites.trained import TRAINED
from fakequant.nn.sites.traits import Trait
from fakequant.text import listed, module_name


@dataclass(frozen=True)
class Operation:
    """One operation of a model that computes on float tensors.

    Attributes:
        module: path of the module that calls it, "" for the model itself.
        name: the operation, as torch names it.
        is_product: whether quantized hardware would compute it (convolutions, matrix products, attention, recurrence).
        float_inputs: how many of its float tensor inputs reach it unquantized.
        inputs: how many float tensor inputs it has.
        multiplications: the multiply-accumulates of a product; 0 where its sizes depend on data, and for tables, which
            are only read.
    """

    module: str
    name: str
    is_product: bool
    float_inputs: int
    inputs: int
    multiplications: int = 0

    @property
    def quantized(self) -> bool:
        """Whether every input is quantized."""
        return self.float_inputs == 0

    def __str__(self) -> str:
        where = self.module or "(model)"
        return f"{where}: {self.name}, {self.float_inputs} of {self.inputs} inputs in float"


class Left(NamedTuple):
    """What stays in float."""

    modules: dict[type[nn.Module], int]
    """How many of each class, those with most parameters first."""
    parameters: float
    """Their share of the model's parameters."""
    products: dict[str, float]
    """The share of operations outside of quantized layers in the model's multiply-accumulates, the largest first."""

    def __str__(self) -> str:
        parts = []
        if self.modules:
            count = sum(self.modules.values())
            named = [f"{cls.__name__} ({n}: {_why_float(cls)})" for cls, n in self.modules.items()]
            share = f"{_percent(self.parameters)} of the parameters"
            subject = f"1 module with {share} stays" if count == 1 else f"{count} modules with {share} stay"
            parts.append(f"{subject} in float: {listed(named, 6)}")
        if self.products:
            named = [f"{name} {_percent(share)}" for name, share in self.products.items()]
            share = _percent(sum(self.products.values()))
            parts.append(f"products with {share} of the multiply-accumulates have inputs in float: {listed(named, 6)}")
        advice = "fakequant.summary(model, example) lists all"
        if self.modules:
            names = tuple(dict.fromkeys(cls.__name__ for cls in self.modules))
            rule = f"Rule('*', layers={(names[0] if len(names) == 1 else names)!r})"
            ops = sorted({op for cls in self.modules for op in _functions(cls)})
            if ops:
                advice += f"; Rule('*', preset, ops={tuple(ops)!r}) quantizes such products in their own forwards"
            advice += f"; fakequant.nn.quantizes registers a quantized form, and {rule} says that float is meant"
        return f"{'; '.join(parts)} ({advice})"


def left_in_float(
    model: nn.Module,
    purposely: set[nn.Module],
    products: Sequence[Operation] = (),
    computed: Collection[nn.Parameter] = (),
) -> Left | None:
    """What of a prepared model could be quantized and is not; None if nothing.

    Layers with a quantized form that no rule takes are in float on purpose, too.

    Args:
        model: a prepared model.
        purposely: modules that a rule leaves in float.
        products: what the model computes.
        computed: parameters from which quantized weights are computed.
    """
    decided = {module for module in model.modules() if _is_decided(module)}
    meant = purposely | {part for module in decided for part in module.modules()}
    quantized = {p for module in decided if isinstance(module, QuantizedLayer) for p in module.parameters()}
    quantized |= {weight.parameter for weight in quantized_weights(model).values() if weight.parameter is not None}
    quantized.update(computed)
    sizes: Counter[type[nn.Module]] = Counter()
    counts: Counter[type[nn.Module]] = Counter()
    left: set[nn.Parameter] = set()
    for module in model.modules():
        weights = set(weights_of(module)) - quantized
        if weights and module not in meant:
            cls = own_class(module)
            counts[cls] += 1
            sizes[cls] += sum(p.numel() for p in weights)
            left |= weights
    in_float = _products_left(model, meant, products)
    if not left and not in_float:
        return None
    total = sum(p.numel() for p in model.parameters() if not isinstance(p, UninitializedParameter))
    modules = {cls: counts[cls] for cls, _ in sizes.most_common()}
    return Left(modules, sum(p.numel() for p in left) / max(total, 1), in_float)


def scripted(model: nn.Module, purposely: set[nn.Module]) -> str | None:
    """A line on modules of torch.jit, whose products no run shows; None if there are none.

    Args:
        model: a prepared model.
        purposely: modules that a rule leaves in float.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, torch.jit.ScriptModule) and module not in purposely and not inside:
            found.append(path)
    if not found:
        return None
    named = listed([module_name(path) for path in found], 6)
    return (
        f"modules of torch.jit compute in float what no run shows, and are in no count of products: {named}. Prepare "
        "the modules as they were written, and script them afterwards"
    )


def gradients_in_float(model: nn.Module) -> str | None:
    """A line on the quantized products of a prepared model whose gradients stay in float; None if there are none."""
    found = [
        f"{module_name(path)} ({module.function if isinstance(module, Site) else module.float_class.__name__})"
        for path, module in model.named_modules()
        if isinstance(module, (QuantizedLayer, Site)) and _multiplies(module) and _keeps_gradient(module)
    ]
    if not found:
        return None
    return (
        f"gradients of these products stay in float: {listed(found, 6)}. Those of linear layers, convolutions, "
        "attention, recurrent layers and experts are quantized where their rule has gradient="
    )


def _multiplies(module: QuantizedLayer | Site) -> bool:
    """Whether a layer or function multiplies two tensors, of which one or both are quantized."""
    if isinstance(module, Site):
        return has(module.function, Trait.PRODUCT)
    return bool(module.inputs) and (bool(module.products()) or module.product is not None)


def _keeps_gradient(module: QuantizedLayer | Site) -> bool:
    if module.gradient is None:
        return True
    return module.function not in TRAINED if isinstance(module, Site) else type(module).weighted_sum(module) is None


def _is_decided(module: nn.Module) -> bool:
    """Whether rules, not the lack of a quantized form, say what becomes of a module."""
    return isinstance(module, QuantizedLayer) or quantized_class(module) is not None


def _products_left(model: nn.Module, meant: set[nn.Module], found: Sequence[Operation]) -> dict[str, float]:
    modules = dict(model.named_modules(remove_duplicate=False))
    products = [operation for operation in found if operation.is_product]
    total = sum(operation.multiplications for operation in products)
    left: Counter[str] = Counter()
    for operation in products:
        parts = operation.module.split(".")
        paths = (".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
        owner = next(modules[path] for path in paths if path in modules)
        if owner not in meant and not operation.quantized and operation.multiplications:
            left[operation.name] += operation.multiplications
    return {name: count / total for name, count in left.most_common()}


def _functions(cls: type[nn.Module]) -> list[str]:
    """The name for rules of the product in the own forward of a subclass of a layer."""
    bases = (
        (nn.modules.conv._ConvTransposeNd, "conv_transpose"),
        (nn.modules.conv._ConvNd, "conv"),
        (nn.Linear, "linear"),
    )
    return [op for base, op in bases if issubclass(cls, base) and why_changed(cls) is not None][:1]


def _why_float(cls: type[nn.Module]) -> str:
    return why_changed(cls) or "no quantized form"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"
