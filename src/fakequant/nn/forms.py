"""Which quantized class a float layer becomes, and how its class is changed."""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from fakequant.errors import ConfigError
from fakequant.nn.layers import QuantizedLayer, registered
from fakequant.nn.quantizer import Quantizer

# Of a subclass: what makes, prints, stores and trains a layer. Everything else that it overrides may change results.
_HARMLESS = frozenset(
    """
    __init__ __new__ __module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __firstlineno__ __static_attributes__ __orig_bases__ __parameters__
    __constants__ reset_parameters from_pretrained extra_repr _get_name __repr__ __str__ train eval
    __getstate__ __setstate__ state_dict load_state_dict _save_to_state_dict _load_from_state_dict _version
    _replicate_for_data_parallel
    """.split()  # noqa: SIM905
)
# nn.MultiheadAttention reads the weight of its output projection without calling it.
_NEVER_CALLED = (NonDynamicallyQuantizableLinear,)

_made: dict[type[nn.Module], type[QuantizedLayer]] = {}


def quantized_class(layer: nn.Module) -> type[QuantizedLayer] | None:
    """The class that a float layer becomes; None if it has no quantized form.

    That is what `quantizes` registered for its class. A subclass that overrides nothing that computes becomes a
    subclass of its own class and of the form of its base.
    """
    if is_parametrized(layer):
        own = type(layer)
        form = _form(own.__bases__[0])
        return None if form is None else _parametrized(form, own)
    return _form(type(layer))


def computed_class(layer: nn.Module) -> type[nn.Module]:
    """The class whose `forward` a float layer has: itself, or the registered class from which it inherits it."""
    cls = type(layer).__bases__[0] if is_parametrized(layer) else type(layer)
    base = _base(cls)
    return cls if base is None or why_changed(cls) is not None else base


def why_changed(cls: type[nn.Module]) -> str | None:
    """Why a subclass of a layer with a quantized form has none itself; None where it has, or its base has none."""
    base = _base(cls)
    if base is None or cls is base:
        return None
    if issubclass(cls, _NEVER_CALLED):
        return "its weight is read without calling it"
    if type(cls) is not type:
        return f"the metaclass {type(cls).__name__}"
    form = cast("type[QuantizedLayer]", _form(base))
    inherited = set(base.__mro__)
    changed = [
        name
        for owner in cls.__mro__
        if owner not in inherited
        for name in vars(owner)
        if name not in _HARMLESS and hasattr(form, name)
    ]
    return f"its own {changed[0]}" if changed else None


def become(layer: nn.Module, quantized: type[QuantizedLayer], quantizers: dict[str, Quantizer | None]) -> None:
    """Change a float layer's class, with its quantizers by attribute in place before."""
    # A bound method of the class, in the layer itself: put there by a hook, or left when a hook was removed.
    bound = [name for name in ("forward", "_old_forward") if _is_own_forward(layer, name)]
    layer._modules.update({name: quantizer for name, quantizer in quantizers.items() if quantizer is not None})
    vars(layer).update(dict.fromkeys(name for name, quantizer in quantizers.items() if quantizer is None))
    layer.__class__ = quantized
    for name in bound:
        vars(layer)[name] = MethodType(quantized.forward, layer)


def bypasses_class(layer: nn.Module) -> bool:
    """Whether a call of the layer would not reach the `forward` of another class that it is given.

    A hook as accelerate's is no such forward: it calls `_old_forward`, the class's own, which `become` replaces.
    """
    if "forward" not in vars(layer):
        return False
    return not (_is_own_forward(layer, "forward") or _is_own_forward(layer, "_old_forward"))


def _is_own_forward(layer: nn.Module, name: str) -> bool:
    method = vars(layer).get(name)
    return isinstance(method, MethodType) and method.__self__ is layer and method.__func__ is type(layer).forward


def _base(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The nearest class that has a quantized form of its own; None if there is none, or it is quantized already."""
    if issubclass(cls, QuantizedLayer):
        return None
    return next((base for base in cls.__mro__ if registered(base) is not None), None)


def _form(cls: type[nn.Module]) -> type[QuantizedLayer] | None:
    base = _base(cls)
    if base is None or why_changed(cls) is not None:
        return None
    form = cast("type[QuantizedLayer]", registered(base))
    if issubclass(form, cls):
        return form
    if cls not in _made:
        # A form that was registered by name comes first: the class has a `forward` that it replaces.
        bases = (form, cls) if cls is base else (cls, _form(base))
        _made[cls] = type(f"Quant{cls.__name__}", bases, {"float_class": cls, "__reduce_ex__": _reduce})  # type: ignore[assignment]
    return _made[cls]


def _parametrized(form: type[QuantizedLayer], own: type[nn.Module]) -> type[QuantizedLayer]:
    """What torch.nn.utils.parametrize makes of a quantized layer.

    It makes a class for every layer, which it takes away by going back to the only base, so that this is the form.
    """
    values = {name: value for name, value in vars(own).items() if name not in ("__dict__", "__weakref__")}
    return type(f"Parametrized{form.__name__}", (form,), values)


def _reduce(layer: QuantizedLayer, protocol: Any) -> tuple[Any, ...]:
    """What pickle and copy store: the float class, because classes that are made here have no importable name."""
    _, _, *state = object.__reduce_ex__(layer, max(int(protocol), 2))
    return (_new, (type(layer).float_class,), *state)


def _new(float_class: type[nn.Module]) -> nn.Module:
    form = _form(float_class)
    if form is None:
        raise ConfigError(
            f"{float_class.__module__}.{float_class.__qualname__} has no quantized form here; import what registers it "
            "(fakequant.nn.quantizes) before unpickling"
        )
    return form.__new__(form)
