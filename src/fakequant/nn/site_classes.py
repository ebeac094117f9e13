"""Subclasses for owners of sites and for the modules that owners call; `sites.py` explains owners and sites.

Vision transformers resize their table of positions in a trace even if it has the right size, so that the trace takes
images of any size. Such calls compute only with parameters, and no plan contains them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial, wraps
from types import CodeType, new_class
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fakequant.errors import ConfigError, SiteError
from fakequant.nn.quantized.forms import change_class, class_reference, within_wrappers
from fakequant.nn.sites import SITES, SiteMode, Sites, float_rule, pause, resume
from fakequant.numerics.division import is_exporting
from fakequant.text import module_name


def is_traced() -> bool:
    """Whether torch.export or torch.jit.trace records Python's calls; False under torch.compile, which reads code."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return is_exporting() or torch._C._is_tracing()


MakeMode = Callable[[Sites, nn.Module], SiteMode]
"""Makes the mode for one call of an owner's `forward`, from its sites and the owner."""


def run_traced(run: Callable[[MakeMode], Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run the `forward` of an owner in a trace, up to four times until its calls fit the plan.

    `run` calls `forward` under the mode that the argument of `run` makes. The second run does not count calls that read
    only parameters. The third run lists the calls. If these contain the planned calls in exactly one way, the fourth
    run leaves all other calls in float, such as a mask that is added only in a trace. Earlier results are not used. If
    no run fits, or a run wrote to a tensor that existed before, the SiteError of the first run is raised.
    """
    before = [*_tensors((args, kwargs)), *module.buffers()]
    versions = [x._version for x in before]
    try:
        return run(SiteMode)
    except SiteError as error:
        if [x._version for x in before] != versions:
            raise
        try:
            return run(_OfInputs)
        except SiteError:
            pass
        called: list[str] = []
        run(partial(_Listing, called))
        planned = SiteMode(cast("Sites", module._modules[SITES]), module).steps
        places = _earliest(planned, called)
        last = [len(called) - 1 - place for place in _earliest(planned[::-1], called[::-1])][::-1]
        is_unique = len(places) == len(planned) and places == last
        if not is_unique or [x._version for x in before] != versions:
            raise error from None
        return run(partial(_Aligned, places))


class _OfInputs(SiteMode):
    """A mode that does not count calls whose float tensors all come from parameters."""

    def __init__(self, sites: Sites, module: nn.Module) -> None:
        super().__init__(sites, module)
        self.alive = list[Tensor](module.parameters())  # an id belongs to a tensor as long as that lives
        self.constants = {id(x) for x in self.alive}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in _tensors((args, kwargs)) if x.is_floating_point()]  # sizes are tensors in a trace
        if not given or any(id(x) not in self.constants for x in given):
            return super().__torch_function__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        self.alive += _tensors(result)
        self.constants.update(map(id, _tensors(result)))
        return result


class _Listing(SiteMode):
    """A mode that quantizes nothing, and lists the names of the calls that the plan counts."""

    def __init__(self, called: list[str], sites: Sites, module: nn.Module) -> None:
        super().__init__(sites, module)
        self.called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := self.counted(func, args, kwargs or {})) is not None:
            self.called.append(name)
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        pass


class _Aligned(SiteMode):
    """A mode that counts and quantizes only the calls whose numbers are in `places`; other calls stay in float."""

    def __init__(self, places: Collection[int], sites: Sites, module: nn.Module) -> None:
        super().__init__(sites, module)
        self.places, self.at = places, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counted(func, args, kwargs or {}) is not None:
            self.at += 1
            if self.at - 1 not in self.places:
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _earliest(planned: Sequence[str], called: Sequence[str]) -> list[int]:
    """For each planned call, the index in `called` of the first such call after that of the planned call before."""
    places: list[int] = []
    for place, name in enumerate(called):
        if len(places) < len(planned) and planned[len(places)] == name:
            places.append(place)
    return places


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the owner that calls it does not count the calls that the function itself makes."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        outer = pause()
        if outer is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            resume(outer)

    return call


def _of_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    hidden = unseen(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hidden(*args, **kwargs)

    return call


OF_CACHE: CodeType = _of_cache(unseen).__code__  # type: ignore[attr-defined]
"""The code of the function that `hide_caches` installs, by which a recorded run recognizes calls of a cache."""


def hide_caches() -> None:
    """Hide the calls of transformers' caches from all owners; do nothing unless transformers is imported.

    A cache concatenates or copies, depending on its kind and length. `generate` writes to a cache, and the example of
    `prepare` may have none, so that these calls would come in another order than planned. Results of transformers do
    not change.
    """
    caches: Any = sys.modules.get("transformers.cache_utils")
    if caches is not None and getattr(caches.Cache.update, "__code__", None) is not OF_CACHE:
        caches.Cache.update = _of_cache(caches.Cache.update)


def add_sites(module: nn.Module, sites: Sites) -> None:
    """Make a module the owner of `sites`, and change its class. Raises ConfigError if copies would lose the sites."""
    if type(module).__reduce_ex__ is not object.__reduce_ex__ or type(module).__reduce__ is not object.__reduce__:
        if isinstance(module, torch.fx.GraphModule):
            raise ConfigError(
                f"{module_name(sites.owner)}: a torch.fx.GraphModule makes its class anew when it is copied, and "
                "would lose the quantizers of its functions; prepare the model from which it was traced, or leave the "
                f"functions in float by {float_rule(sites)}"
            )
        raise ConfigError(
            f"{module_name(sites.owner)}: copies of a {type(module).__name__} would lose the quantizers of its "
            "functions, because the class defines how it is pickled; leave its functions in float by "
            f"{float_rule(sites)}"
        )
    module._modules[SITES] = sites  # `add_module` would find those of a module inside, to which a wrapper delegates
    _change(module, _owner_class)


def remove_sites(module: nn.Module) -> None:
    """Undo `add_sites` for a module without parametrizations, whose calls stay hidden from an owner that calls it."""
    del module._modules[SITES]
    change_class(module, type(module).swapped_from[0])  # type: ignore[attr-defined]
    shield(module)


def shield(module: nn.Module) -> None:
    """Hide the function calls of a module from the owner that calls it, by changing its class in place."""
    _change(module, _shielded_class)


def is_shielded(module: nn.Module) -> bool:
    """Whether `shield` was called for a module."""
    return getattr(type(module), "swapped_from", (None, ""))[1] == "shielded"


def unshielded_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `shield`.

    >>> layer = nn.Linear(2, 2)
    >>> shield(layer)
    >>> type(layer) is nn.Linear, unshielded_class(layer) is nn.Linear
    (False, True)
    """
    return type(module).swapped_from[0] if is_shielded(module) else type(module)  # type: ignore[attr-defined]


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module; a shielded module stays shielded."""
    shielded = is_shielded(module)
    module.__class__ = cls
    if shielded:
        shield(module)


def _change(module: nn.Module, make: Callable[[type[Any]], type[Any]]) -> None:
    made = within_wrappers(type(module), make)
    assert made is not None, f"{make} makes a class of every class"
    change_class(module, made)


_made: dict[tuple[type[Any], str], type[Any]] = {}


def _owner_class(cls: type[Any]) -> type[Any]:
    hide_caches()  # here, because a model may come from a file
    inner = cls.forward

    @wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        def run(make: MakeMode) -> Any:
            mode = make(self._modules[SITES], self)
            with mode:
                result = inner(self, *args, **kwargs)
            mode.finish()
            return result

        return run_traced(run, self, args, kwargs) if is_traced() else run(SiteMode)

    # In the class, which torch's `getattr` along a path asks before a wrapper's `__getattr__` can answer from inside.
    own = property(lambda self: nn.Module.__getattr__(self, SITES))
    return _subclass(cls, "owner", unseen(forward), {SITES: own, **_without_sites(cls)})


def _without_sites(cls: type[Any]) -> dict[str, Any]:
    """Methods for the subclass of an owner, by which the owner's `forward` does not see the sites as a child."""

    def named_children(self: Any) -> Iterator[tuple[str, nn.Module]]:
        # Moving or training a model needs the sites; only the owner's `forward` does not expect them.
        depth = torch._C._len_torch_function_stack()
        mode = torch._C._get_function_stack_at(depth - 1) if depth else None
        running = isinstance(mode, SiteMode) and mode.sites is self._modules.get(SITES)
        return ((name, child) for name, child in cls.named_children(self) if not (running and name == SITES))

    methods: dict[str, Any] = {"named_children": named_children}
    if issubclass(cls, nn.ModuleDict):
        methods |= {
            "__len__": lambda self: len(_others(self)),
            "__iter__": lambda self: iter(_others(self)),
            "keys": lambda self: _others(self).keys(),
            "items": lambda self: _others(self).items(),
            "values": lambda self: _others(self).values(),
        }
    elif issubclass(cls, (nn.Sequential, nn.ModuleList)):

        def getitem(self: Any, index: Any) -> Any:
            if not isinstance(index, slice):
                return cls.__getitem__(self, index)
            chosen = list(_others(self).items())[index]
            return cls(OrderedDict(chosen)) if issubclass(cls, nn.Sequential) else cls([module for _, module in chosen])

        methods |= {
            "__len__": lambda self: len(_others(self)),
            "__iter__": lambda self: iter(_others(self).values()),
            "__getitem__": getitem,
        }
    return methods


def _others(module: nn.Module) -> dict[str, nn.Module]:
    """The children of an owner by name, without its sites."""
    return {name: child for name, child in module._modules.items() if name != SITES and child is not None}


def _shielded_class(cls: type[Any]) -> type[Any]:
    return _subclass(cls, "shielded", unseen(cls.forward))


def _subclass(
    cls: type[Any], role: str, forward: Callable[..., Any], methods: dict[str, Any] | None = None
) -> type[Any]:
    """A subclass with the same name and another `forward`; hooks of its calls are hidden from the owner, too."""
    if (cls, role) in _made:
        return _made[cls, role]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up in each call: torch.export puts a `__call__` of its own into nn.Module, which notes the path. Not by
        # the name of the class, which torch's compiler does not look into after `torch.compiler.allow_in_graph`.
        above: Any = super(made, self)
        return above.__call__(*args, **kwargs)

    values = {
        "forward": forward,
        "__call__": unseen(call),
        "__reduce_ex__": _reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "swapped_from": (cls, role),
        **(methods or {}),
    }
    made: type[Any] = new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update(values))
    return _made.setdefault((cls, role), made)


_MAKERS = {"owner": _owner_class, "shielded": _shielded_class}


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """What pickle and copy store: the state and the original class, because the subclass cannot be imported."""
    cls, role = type(module).swapped_from  # type: ignore[attr-defined]
    _, _, *state = object.__reduce_ex__(module, max(int(protocol), 2))
    return (_new, (role, *class_reference(cls)), *state)


def _new(role: str, find: Callable[..., type[Any]], *args: Any) -> nn.Module:
    made: Any = _MAKERS[role](find(*args))
    return made.__new__(made)
