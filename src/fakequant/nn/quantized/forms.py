"""The quantized class for a float layer, and the change of a layer's class."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fakequant.errors import ConfigError
from fakequant.nn.products import Product
from fakequant.nn.quantized.layers import CONVOLUTIONS, QuantizedLayer, registered
from fakequant.nn.quantizer import Quantizer

# A subclass may override these: they make, print, store and train a layer. Any other override may change results.
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
    """The quantized class for a float layer; None if there is none.

    For a class that `quantizes` registered itself, not by its name, the quantized class is the registered one. Else, as
    for a subclass that overrides no computation, a class is generated that derives from both.
    """
    form = within_wrappers(type(layer), _form)
    return form if form is not None and form.takes(layer) else None


def within_wrappers(cls: type[Any], make: Callable[[type[Any]], type[Any] | None]) -> type[Any] | None:
    """Apply `make` to the class inside torch's generated classes, and wrap the result again; None if it is None."""
    inner, wrappers = _peeled(cls)
    form = make(inner)
    for wrapper in reversed(wrappers):
        if form is None:
            return None
        # Removing a parametrization goes back to the only base, which is then the form.
        *mixins, base = wrapper.__bases__
        values = {name: value for name, value in vars(wrapper).items() if name not in ("__dict__", "__weakref__")}
        form = type(wrapper.__name__.removesuffix(base.__name__) + form.__name__, (*mixins, form), values)
    return form


def own_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer, or the class that it had before a parametrization or `fully_shard` generated another.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    >>> type(layer).__name__, own_class(layer).__name__
    ('ParametrizedLinear', 'Linear')
    """
    return _peeled(type(layer))[0]


def computed_class(layer: nn.Module) -> type[nn.Module]:
    """A float layer's class, or the registered base class if the layer's class changes no computation of it."""
    cls = own_class(layer)
    base = _base(cls)
    return cls if base is None or why_changed(cls) is not None else base


def why_changed(cls: type[nn.Module]) -> str | None:
    """The reason why a subclass of a registered layer has no quantized class; None for any other class."""
    cls = _peeled(cls)[0]
    base = _base(cls)
    if base is None or cls is base:
        return None
    if issubclass(cls, _NEVER_CALLED):
        return "its weight is read without a call of the layer"
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
    """Make a float layer an object of the class `quantized`, and store `quantizers` under their names as attributes."""
    layer._modules.update({name: quantizer for name, quantizer in quantizers.items() if quantizer is not None})
    vars(layer).update(dict.fromkeys(name for name, quantizer in quantizers.items() if quantizer is None))
    change_class(layer, quantized)


def change_class(layer: nn.Module, cls: type[Any]) -> None:
    """Change the class of a module, and bind copies of `forward` that hooks stored on the object to the new class."""
    # A bound method of the class, in the layer itself: put there by a hook, or left when a hook was removed.
    bound = [name for name in ("forward", "_old_forward") if _is_own_forward(layer, name)]
    layer.__class__ = cls
    for name in bound:
        vars(layer)[name] = MethodType(cls.forward, layer)


def class_reference(cls: type[Any]) -> tuple[Any, ...]:
    """A class for pickle: a function that can be imported, and the arguments with which it returns the class."""
    if cls in _made.values():
        return _form, cls.float_class
    return _itself, cls


def _itself(cls: type[Any]) -> type[Any]:
    return cls


def bypasses_class(layer: nn.Module) -> bool:
    """Whether calls would skip the `forward` of a new class, because the object holds another function as `forward`.

    Hooks such as accelerate's do not skip it: they call `_old_forward`, which `become` binds to the new class.
    """
    if "forward" not in vars(layer):
        return False
    return not (_is_own_forward(layer, "forward") or _is_own_forward(layer, "_old_forward"))


def _is_own_forward(layer: nn.Module, name: str) -> bool:
    method = vars(layer).get(name)
    return isinstance(method, MethodType) and method.__self__ is layer and method.__func__ is type(layer).forward


def _base(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The first class in the MRO of `cls` that is registered; None without one, or if `cls` is a quantized class."""
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


def _peeled(cls: type[nn.Module]) -> tuple[type[nn.Module], list[type[nn.Module]]]:
    """The class inside the wrapper classes that torch generated, and these wrappers, the outermost first."""
    wrappers = []
    while (inner := _wrapped(cls)) is not None:
        wrappers.append(cls)
        cls = inner
    return cls, wrappers


def _wrapped(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The class from which a generated class was derived without a change of what it computes; None for other classes.

    A parametrization generates a subclass. `fully_shard` and similar functions generate a subclass with a mixin first,
    and work by hooks. Their classes are recognized by the names of their modules, without an import of
    torch.distributed, which takes long.
    """
    if "swapped_from" in vars(cls):  # so that functions in its `forward` have quantizers, see `sites.py`
        return vars(cls)["swapped_from"][0]
    if cls.__module__ == "torch.nn.utils.parametrize" and len(cls.__bases__) == 1:
        return cls.__bases__[0]
    if len(cls.__bases__) != 2 or not cls.__name__.endswith(cls.__bases__[1].__name__):
        return None
    mixin, inner = cls.__bases__
    made = mixin.__module__.startswith("torch.distributed.") and cls.__module__.startswith("torch.distributed.")
    return inner if made and not issubclass(mixin, nn.Module) and not hasattr(mixin, "forward") else None


def _reduce(layer: QuantizedLayer, protocol: Any) -> tuple[Any, ...]:
    """What pickle and copy store of a layer: its state and its float class, which has a name that can be imported."""
    _, _, *state = object.__reduce_ex__(layer, max(int(protocol), 2))
    return (_new, (type(layer).float_class,), *state)


def _new(float_class: type[nn.Module]) -> nn.Module:
    form = _form(float_class)
    if form is None:
        raise ConfigError(
            f"{float_class.__module__}.{float_class.__qualname__} has no quantized class in this process; before "
            "unpickling, import the module that registers it by fakequant.nn.quantizes"
        )
    return form.__new__(form)


_FUNCTIONS = (
    (nn.modules.conv._ConvTransposeNd, "conv_transpose"),
    (nn.modules.conv._ConvNd, "conv"),
    (nn.Linear, "linear"),
)


def product_function(cls: type[nn.Module]) -> str | None:
    """The function that multiplies by the weight in a subclass with a changed `forward`, as "linear"; else None."""
    if why_changed(cls) is None:
        return None
    return next((function for base, function in _FUNCTIONS if issubclass(cls, base)), None)


def output_channels(layer: Any) -> int:
    """The number of output channels of a linear layer or a convolution."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def has_matrix(layer: nn.Module) -> bool:
    """Whether a linear layer or convolution has a weight [out, in / groups, ...] that is a parameter."""
    if computed_class(layer) not in (nn.Linear, *CONVOLUTIONS):
        return False
    weight = layer._parameters.get("weight")
    return weight is not None and weight.dim() > 1


def product_class(layer: nn.Module) -> type[Product]:
    """The `product_class` of the quantized class of a layer or of its first registered base; else `Product`.

    >>> product_class(nn.Linear(2, 2)), product_class(nn.Embedding(2, 2))
    (<class 'fakequant.nn.products.MatrixProduct'>, <class 'fakequant.nn.products.Product'>)
    """
    forms = (registered(base) for base in type(layer).__mro__ if issubclass(base, nn.Module))
    form = type(layer) if isinstance(layer, QuantizedLayer) else next(filter(None, forms), None)
    return Product if form is None else form.product_class
