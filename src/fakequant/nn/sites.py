"""Quantizers for functions that a module's `forward` calls: `+`, `@`, `cat`, softmax, attention.

A site is a call of a function whose operands or result are quantized; the module whose `forward` makes the call is the
owner of the site. The owner's class is replaced by a subclass that enters a `TorchFunctionMode` during `forward`. The
mode counts calls of the functions that have quantizers, and quantizes their operands and results. Modules that an owner
calls get a subclass that removes the mode while they run, so that a mode sees only the calls of its owner. No function
of torch is replaced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from fakequant.errors import SiteError
from fakequant.nn.backward import Backward, Factor, LinearSum, Trained, is_trained, matmul, multiplied
from fakequant.nn.functions import CALLED_AS, SITE_FUNCTIONS, CalledAs, arguments_of, called_as, places_of
from fakequant.nn.integer import Watched
from fakequant.nn.paths import layer_of, module_at
from fakequant.nn.products import MatrixProduct, Product, TransposedWindowProduct, TurnedProduct, WindowProduct
from fakequant.nn.quantizer import Mode, Quantizer
from fakequant.text import module_name


def attend_in_parts(  # noqa: PLR0913  as torch's
    multiply: Callable[[Factor, Factor], Tensor],
    probabilities: Callable[[Tensor], Tensor],
    query: Factor,
    key: Factor,
    value: Factor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` in three operations (product, softmax, product), equal within rounding.

    Args:
        multiply: multiplies two factors, as `matmul` does.
        probabilities: quantizes the result of the softmax [..., queries, keys], before dropout.
        query: [..., heads, queries, features].
        key: [..., heads, keys, features].
        value: [..., heads, keys, width].
        attn_mask: bool, True where a query sees a key; or floats that are added to the scores.
        dropout_p: the probability with which a weight is dropped.
        is_causal: whether a query sees only its own and earlier keys.
        scale: the factor of the scores; by default 1 / sqrt(features).
        enable_gqa: whether several heads of the query share a head of key and value.

    >>> from fakequant.nn.backward import matmul
    >>> q, k, v = torch.randn(3, 2, 4, 5, 8)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> factors = [Factor(x, x) for x in (q, k, v)]
    >>> found = attend_in_parts(lambda *pair: matmul(None, *pair), lambda p: p, *factors, is_causal=True)
    >>> torch.allclose(found, exact, atol=1e-6)
    True
    """
    *_, heads, _, features = query.value.shape
    if enable_gqa:
        key, value = (one.map(lambda own: own.repeat_interleave(heads // own.shape[-3], -3)) for one in (key, value))
    scores = multiply(query, key.map(lambda own: own.mT)) * (1 / math.sqrt(features) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
        # A query that sees no key gets zeros, as from torch.
        sees_none = (masked == -math.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(masked, dim=-1).masked_fill(sees_none, 0.0)
    else:
        weights = torch.softmax(scores, dim=-1)
    factor = Factor(probabilities(weights), weights)
    if dropout_p:
        kept = F.dropout(torch.ones_like(weights), dropout_p)
        factor = factor.map(lambda own: own * kept)
    return multiply(factor, value)


Factors = Mapping[str, Factor]
_FACTORS = "query", "key", "value"


def attend(
    probabilities: Callable[[Tensor], Tensor],
    how: Backward | None,
    factors: Factors,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """`scaled_dot_product_attention` as two products with a softmax between, for the arguments of a call."""
    others = {name: value for name, value in kwargs.items() if name not in _FACTORS}
    query, key, value = (factors[name] for name in _FACTORS)
    given: Any = args[len(_FACTORS) :]
    return attend_in_parts(partial(matmul, how), probabilities, query, key, value, *given, **others)


def silu_in_parts(
    sigmoids: Callable[[Tensor], Tensor], how: Backward | None, factors: Factors, args: Sequence[Any], kwargs: Any
) -> Tensor:
    """`F.silu` as the product of a tensor and its sigmoid, for the arguments of a call."""
    x = factors["input"].value
    return x * sigmoids(torch.sigmoid(x))


IN_PARTS: dict[str, Callable[..., Tensor]] = {"probabilities": attend, "sigmoid": silu_in_parts}
"""Implementations of functions as several operations, by the name of the quantizer between the operations; arguments
are the quantizer, a `Backward`, the factors by name, and all arguments of the call."""


TRAINED: dict[str, Callable[..., Tensor]] = {
    "linear": lambda how, factors, args, kwargs: multiplied(
        *(LinearSum(), how, factors["input"], factors["weight"]), args[2] if len(args) > 2 else kwargs.get("bias")
    ),
    "matmul": lambda how, factors, *_: matmul(how, factors["input"], factors["other"]),
    "scaled_dot_product_attention": partial(attend, lambda x: x),
}
"""Implementations of functions with quantized backward products; arguments are a `Backward`, the factors by name, and
all arguments of the call. Attention is two products."""


_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]  a room of torch without type stubs

SITES = "_sites"
"""The attribute of an owner, a module whose `forward` calls functions with quantizers, that holds its `Sites`."""


class Site(Watched, Trained):
    """A module with the quantizers of a function call: one for each quantized operand, and `output` for the result.

    A site may also have a quantizer inside its function, such as `probabilities` of attention. Unless this quantizer
    is off, the function is computed as several operations, see `IN_PARTS`. Functions that `watch` registers get the
    operands by name, then all arguments, before they are quantized.

    Attributes:
        function: the canonical name.
        operands: the arguments that are float tensors in the planned call.
        weights: the operands that are parameters which no other call reads, with their paths in the owner.
    """

    def __init__(
        self,
        function: str,
        operands: tuple[str, ...],
        quantizers: dict[str, Quantizer],
        weights: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.function = function
        self.operands = operands
        self.weights = weights or {}
        for name, quantizer in quantizers.items():
            self.add_module(name, quantizer)

    def _check_parameters(self, mode: SiteMode, places: Sequence[tuple[str, Any, Any]]) -> None:
        """Raise SiteError if a call reads another parameter than planned, because the scales do not fit it."""
        for name, holder, key in places:
            path = self.weights.get(name)
            if path is not None and isinstance(found := holder[key], nn.Parameter):
                inner, _, attribute = path.rpartition(".")
                planned = mode.module.get_submodule(inner)._parameters.get(attribute)
                if planned is not None and planned is not found:
                    named = mode.module.named_parameters()
                    own = next((name for name, one in named if one is found), "another parameter")
                    raise SiteError(
                        f"{module_name(mode.sites.owner)}: a call of {self.function} reads {own}, and the plan has "
                        f"{path} for this call, whose scales do not fit {own}. Two branches that call the same "
                        "functions in the same order cause this: move each branch into a separate module, or leave "
                        "the function in float by a rule"
                    )

    def call(self, mode: SiteMode, called: CalledAs, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function with quantized operands, inside the `forward` of an owner, and return its result."""
        args, kwargs = list(args), dict(kwargs)
        out = kwargs.pop("out", None)
        places = [place for place in places_of(called, args, kwargs) if is_operand(place[1][place[2]])]
        names = tuple([name for name, _, _ in places])
        if names != self.operands:
            raise SiteError(
                f"{module_name(mode.sites.owner)}: a call of {self.function} has other operands than planned: float "
                f"tensors are {', '.join(names) or 'none'}, planned were {', '.join(self.operands)}. Run the model as "
                "with the example that was given to fakequant.prepare, or prepare it with an example that takes this "
                "path"
            )
        self._check_parameters(mode, places)
        if self.is_watched:
            self.show({name: holder[key] for name, holder, key in places}, tuple(args), dict(kwargs))
        written = _first(args, kwargs) if called.writes(args, kwargs) else None
        before = [holder[key] for _, holder, key in places]
        for name, holder, key in places:
            quantizer = self._modules.get(name)
            if isinstance(quantizer, Quantizer):
                x = holder[key]
                if x is written and torch.is_grad_enabled() and quantizer.mode is Mode.QUANTIZE:
                    x = x.clone()  # the backward of a learned range needs the values that are overwritten here
                holder[key] = quantizer(x)
        computed = TRAINED.get(self.function) if is_trained(self.gradient) else None
        for name, in_parts in IN_PARTS.items():
            between = self._modules.get(name)
            if isinstance(between, Quantizer) and between.mode is not Mode.OFF:
                computed = partial(in_parts, between)
        output = self._modules.get("output")
        # A result in the place of the operand would be overwritten below, and its backward needs it.
        replaced = isinstance(output, Quantizer) and torch.is_grad_enabled() and output.mode is Mode.QUANTIZE
        if written is not None and (replaced or computed is not None or _first(args, kwargs) is not written):
            func = called.without_writing(func, args, kwargs)
            for _, holder, key in places:  # the backward needs the operand, too
                if holder[key] is written and torch.is_grad_enabled():
                    holder[key] = written.clone()
        if computed is None:
            result = func(*args, **kwargs)
        else:
            factors = {name: Factor(holder[key], x) for (name, holder, key), x in zip(places, before, strict=True)}
            result = computed(self.backward_of(), factors, args, kwargs)
        if isinstance(output, Quantizer):
            result = output(result)
        if out is not None:
            written = out if out.shape == result.shape else out.resize_(result.shape)
        if written is not None and result is not written:
            result = written.copy_(result)
        return result


class Sites(nn.Module):
    """A module that holds the sites of one owner, the module whose `forward` calls their functions.

    Attributes:
        owner: the path of the module, for messages.
        steps: the name of the function of each numbered call, in the order of calls in one `forward`.
        keys: a name for every step, also for steps without a site, such as "add_0" for the first addition.
        training_keys: the names of the calls in training mode, where a call that eval mode does not make has no number,
            such as "add_"; None if training makes the same calls.
    """

    def __init__(
        self, owner: str, steps: tuple[str, ...], sites: dict[str, Site], training_keys: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.owner = owner
        self.steps = steps
        self.keys = site_keys(steps)
        self.training_keys = training_keys
        self.training_steps = steps if training_keys is None else functions_of(training_keys)
        self.counted = frozenset((*steps, *self.training_steps))
        for name, site in sites.items():
            self.add_module(name, site)

    def by_key(self) -> dict[str, Site]:
        """The sites, by key such as "add_0"."""
        return {key: site for key, site in self._modules.items() if isinstance(site, Site)}

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise SiteError, because only a loop over all submodules of the owner calls this module."""
        raise SiteError(
            f"{module_name(self.owner)} calls all modules that it holds, also {SITES}, which holds quantizers; let its "
            f"forward skip {SITES}, or leave its functions in float by {float_rule(self)}"
        )


def site_key(function: str, index: int) -> str:
    """The key of a site: the function's name, and `index`, the count of earlier calls of this function."""
    return f"{function}_{index}"


def site_keys(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of a sequence of calls: the function's name, and the count of earlier calls of this function.

    >>> site_keys(("add", "softmax", "add"))
    ('add_0', 'softmax_0', 'add_1')
    """
    return tuple(site_key(name, steps[:place].count(name)) for place, name in enumerate(steps))


def functions_of(keys: Iterable[str]) -> tuple[str, ...]:
    """The names of functions in the keys of sites, without the counts.

    >>> functions_of(("add_0", "layer_norm_1", "add_"))
    ('add', 'layer_norm', 'add')
    """
    return tuple(key.rpartition("_")[0] for key in keys)


def is_operand(value: object) -> bool:
    """Whether a site can quantize an argument: a float tensor with at least one axis."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _first(args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place function overwrites; it is not always an operand, as in `addmm_`."""
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def takes_floats(args: Any, kwargs: Any) -> bool:
    """Whether a float tensor is among the arguments of a call, or in lists or tuples among them.

    Calls without a float tensor are not counted: sizes are tensors of integers while torch.jit traces, and models
    compute masks of integers only in an export.
    """
    for value in (*args, *kwargs.values()):
        values = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(one, Tensor) and one.is_floating_point() for one in values):
            return True
    return False


def operands_of(called: CalledAs, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The arguments of a call that a site can quantize, by name."""
    return {name: value for name, value in arguments_of(called, args, kwargs).items() if is_operand(value)}


_WHOLE: WeakSet[Sites] = WeakSet()
"""The sites whose owner has made all planned calls in some `forward`."""


class SiteMode(TorchFunctionMode):
    """Counts and quantizes the calls in one `forward` of an owner; each `forward` makes a new mode, for threads."""

    def __init__(self, sites: Sites, module: nn.Module) -> None:
        super().__init__()
        self.sites = sites
        self.module = module
        other = sites.training_keys if module.training else None
        self.keys = sites.keys if other is None else other
        self.steps = sites.steps if other is None else sites.training_steps
        self.place = 0
        self.context = None if torch.compiler.is_compiling() else _context()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = called_as(func)
        if kwargs is None:
            kwargs = {}
        if called is None or self.counted(func, args, kwargs) is None:
            # torch's compiler cannot trace the method under any mode: it calls `super()`.
            return (torch.unflatten if func is Tensor.unflatten else func)(*args, **kwargs)
        sites, place = self.sites, self.place
        if place >= len(self.steps) or self.steps[place] != called.function.name:
            raise SiteError(_other_calls(self, (*self.steps[:place], called.function.name), unfinished=True))
        self.place = place + 1
        site: Any = sites._modules.get(self.keys[place])
        if site is None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and self.context != _context():
            self._refuse_recomputed()
        return site.call(self, called, func, args, kwargs)

    def counted(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """The name of the function if the owner's sites count this call; else None."""
        called = called_as(func)
        is_counted = called is not None and called.function.name in self.sites.counted and takes_floats(args, kwargs)
        return called.function.name if called is not None and is_counted else None

    def __enter__(self) -> SiteMode:
        resume(self)
        return self

    def __exit__(self, *_: object) -> None:
        pause()

    def finish(self) -> None:
        """Raise SiteError if `forward` made fewer calls than planned, unless `forward` clearly returned early.

        Before `forward` has made all planned calls once, an early return raises, too.
        """
        if torch.compiler.is_compiling():
            is_whole = self.place == len(self.steps)
        elif is_whole := self.place == len(self.steps):
            _WHOLE.add(self.sites)
        elif self.sites in _WHOLE and not is_fx_tracing():
            place = len(self.steps)
            for index in reversed(range(self.place)):  # the last calls that the made ones may be
                place = max(one for one in range(place) if self.steps[one] == self.steps[index])
                if place != index:
                    break
            is_whole = not self.place or not place
        if not is_whole:
            raise SiteError(_other_calls(self, self.steps[: self.place]))

    def _refuse_recomputed(self) -> None:
        """Raise SiteError if `forward` checkpoints a function: backward recomputes it outside of `forward`."""
        sites = self.sites
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_locals.get("mode") is not self:
            if frame.f_globals is vars(checkpointing):
                raise SiteError(
                    f"{module_name(sites.owner)} calls torch.utils.checkpoint on a function that has quantizers "
                    f"({', '.join(sites._modules)}); the backward pass would compute the function again without "
                    "quantizers. Move the "
                    "function into a module, and checkpoint the module, or leave these calls in float by "
                    f"{float_rule(sites)}"
                )
            frame = frame.f_back


def _context() -> tuple[bool, Any]:
    """The grad mode and the saved-tensor hooks, which differ when activation checkpointing recomputes in backward."""
    return torch.is_grad_enabled(), _autograd._top_saved_tensors_default_hooks(False)


def _unchecked(change: Callable[..., Any], *args: Any) -> Any:
    """Call `change`, which pushes or pops a mode; a second call undoes the change before the model's call ends.

    torch.compile refuses changes of state from inside a checkpointed block, unless it is told to allow them.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(change, *args)
    return change(*args)


def pause() -> SiteMode | None:
    """Remove the mode of the calling owner from the stack and return it; None if there is none."""
    depth = torch._C._len_torch_function_stack()
    if depth and isinstance(torch._C._get_function_stack_at(depth - 1), SiteMode):
        return _unchecked(torch._C._pop_torch_function_stack)
    return None


def resume(mode: SiteMode) -> None:
    """Push the mode of an owner, which `pause` returned, onto the stack again."""
    _unchecked(torch._C._push_on_torch_function_stack, mode)


def attention_function(query: Tensor, key: Tensor, value: Tensor, run: Callable[..., Any]) -> Any:
    """The result of `run(query, key, value)`, which the owner's sites count as a single call of attention.

    It is for attention that calls no function of torch, or a function that torch cannot look into.
    """
    mode = pause()
    if mode is not None:  # not by torch, whose way to a mode the compiler cannot trace
        try:
            return mode.__torch_function__(attention_function, (), (query, key, value, run))
        finally:
            resume(mode)
    factors = query, key, value
    if not torch.compiler.is_compiling() and has_torch_function(factors):
        return handle_torch_function(attention_function, factors, *factors, run)
    return run(*factors)


CALLED_AS[attention_function] = CalledAs(
    SITE_FUNCTIONS["attention_function"], SITE_FUNCTIONS["attention_function"].operands
)


def sites_of(module: nn.Module) -> Sites | None:
    """The sites of an owner; None if the module has none."""
    sites = None if isinstance(module, torch.jit.ScriptModule) else module._modules.get(SITES)
    return sites if isinstance(sites, Sites) else None


def float_rule(sites: Sites) -> str:
    """The text of the rule that leaves the functions of an owner in float."""
    ops = ", ".join(repr(name) for name in sorted(sites.counted))
    return f"Rule({sites.owner!r}, ops=({ops},))"


_TRACED = " (while it is traced, where forward may take another path: torch.compiler.is_compiling() is true)"


def _other_calls(mode: SiteMode, came: tuple[str, ...], *, unfinished: bool = False) -> str:
    sites, is_traced = mode.sites, torch.compiler.is_compiling() or torch._C._is_tracing()
    return (
        f"{module_name(sites.owner)} calls functions that have quantizers in another order than planned.\n"
        f"  planned: {', '.join(mode.steps) or 'none'}{'' if mode.keys is sites.keys else ' (in training mode)'}\n"
        f"  called:  {', '.join(came) or 'none'}{' (so far)' if unfinished else ''}{_TRACED if is_traced else ''}\n"
        "Quantizers belong to calls by their order, so that none would fit. Run the model as with the example that was "
        "given to fakequant.prepare, or prepare it with an example that takes this path; move a branch, or a loop "
        f"whose length changes, into a separate module; or leave the functions in float by {float_rule(sites)}"
        f"{'' if came else '. torch.fx.symbolic_trace shows no calls: use torch.export'}"
    )


_FIRST_OPTION = 3  # of a convolution, after input, weight and bias


class SiteProduct(Product):
    """The weight of a function call; subclasses are for functions that multiply by a matrix."""

    @property
    def kind(self) -> str:
        return f"call of {self.layer.function}"

    @property
    def channels(self) -> int:
        operands = SITE_FUNCTIONS[self.layer.function].operands
        return next((own.channels for own in operands if own.name == self.attribute), 0)

    def row_name(self, path: str) -> str:
        return layer_of(path) if len(self.layer.weights) == 1 else path


class _Linear(SiteProduct, MatrixProduct):
    """The product of a function's input [..., in] with the function's other operand, a weight [out, in]."""

    readers = 0
    is_result = False
    varies = False
    """Whether options such as strides differ between calls, so that calls make different rows."""
    _bias: nn.Parameter | None = None
    _options: tuple[Any, ...] | None = None

    @property
    def is_matrix(self) -> bool:
        return self.tensor.dim() == 2 and len(self.layer.weights) == 1 and not self.varies

    @property
    def kind(self) -> str:
        if self.varies:
            return f"{super().kind} whose options vary"
        return super().kind if len(self.layer.weights) == 1 else f"{super().kind} of two weights"

    @property
    def bias(self) -> tuple[nn.Parameter | None, slice]:
        return self._bias, slice(None)

    @property
    def input_transform(self) -> None:
        return None

    @property
    def _input(self) -> str:
        return next(name for name in self.layer.operands if name != self.attribute)

    @property
    def input_quantizer(self) -> Quantizer | None:
        return self.layer._modules.get(self._input)

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> Any:
        def see(operands: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            self.note(args, kwargs)
            hook(self, (operands[self._input],), {})

        return self.layer.watch(see)

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Store the bias and the options of a call, and whether they differ from those of the last call."""
        bias = self.added(args, kwargs)
        self._bias = bias if isinstance(bias, nn.Parameter) else None
        self.why_no_bias = None if self._bias is bias else "it is not a parameter"
        options = (self._bias, *self.options(args, kwargs).items())
        self.varies = self.varies or self._options not in (None, options)
        self._options = options

    def added(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The bias of a call; None without a bias."""
        return args[2] if len(args) > 2 else kwargs.get("bias")

    def options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call, such as its stride, which decide how the input becomes rows."""
        return {}

    def quantized_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        quantizer = self.input_quantizer
        return tuple(inputs) if quantizer is None else (quantizer(inputs[0]),)


class _MatMul(_Linear, TurnedProduct):
    """input @ weight, with a weight [in, out]; `addmm` adds a bias, which may be scaled by `beta`."""

    def added(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.layer.function != "addmm":
            return None
        bias = args[0] if args else kwargs.get("input")
        factors = (*args[3:], *(kwargs[name] for name in ("beta", "alpha") if name in kwargs))
        return bias if all(factor == 1 for factor in factors) else (bias, *factors)


class _LeftMatMul(_Linear):
    """weight @ input, with a weight [out, in]; the columns of the input are the rows of the product."""

    added = _MatMul.added

    def with_axis(self, x: Tensor) -> Tensor:
        return x[:, None] if x.dim() == 1 else x

    def rows(self, x: Tensor) -> Tensor:
        return super().rows(self.with_axis(x).mT)

    def multiplied(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight @ x

    def channels_last(self, y: Tensor) -> Tensor:
        return y.mT


class _Convolution(_Linear, WindowProduct):
    """A convolution by calls of a function such as `conv2d`, with stride, padding, dilation and groups as arguments."""

    forms: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    names = ("stride", "padding", "dilation", "groups")
    _geometry: Any = None

    @property
    def is_matrix(self) -> bool:
        return len(self.layer.weights) == 1 and not self.varies

    @property
    def geometry(self) -> Any:
        return self._geometry

    def options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = dict(zip(self.names, args[_FIRST_OPTION:], strict=False))
        return given | {name: kwargs[name] for name in self.names if name in kwargs}

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().note(args, kwargs)
        given = self.options(args, kwargs)
        first, second, *kernel = self.tensor.shape
        channels = self.in_and_out(first, second, given.get("groups", 1))
        form = self.forms[len(kernel) - 1]
        self._geometry = form(*channels, tuple(kernel), **given, bias=False, device="meta")

    @staticmethod
    def in_and_out(first: int, second: int, groups: int) -> tuple[int, int]:
        """The counts of input and output channels, from the first two lengths of the weight and the groups."""
        return second * groups, first


class _TransposedConvolution(_Convolution, TransposedWindowProduct):
    """A transposed convolution that is computed by a call of a function, such as `conv_transpose2d`."""

    forms: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    names = ("stride", "padding", "output_padding", "groups", "dilation")

    @property
    def is_matrix(self) -> bool:
        return super().is_matrix and (self._geometry is None or self.groups == 1)

    @property
    def kind(self) -> str:
        with_groups = self._geometry is not None and self.groups > 1
        return f"{super().kind} with groups" if with_groups else super().kind

    @staticmethod
    def in_and_out(first: int, second: int, groups: int) -> tuple[int, int]:
        return first, second * groups


_CLASSES: dict[tuple[str, str], type[Product]] = {
    ("linear", "weight"): _Linear,
    **{(name, "other"): _MatMul for name in ("matmul", "addmm")},
    **{(name, "input"): _LeftMatMul for name in ("matmul", "addmm")},
    **{(f"conv{n}d", "weight"): _Convolution for n in (1, 2, 3)},
    **{(f"conv_transpose{n}d", "weight"): _TransposedConvolution for n in (1, 2, 3)},
}
"""Product classes by function and operand; a weight of any other function is rounded to nearest by all algorithms."""
OF_LAYERS = frozenset(function for function, operand in _CLASSES if operand == "weight")
"""The functions that linear layers and (transposed) convolutions call."""


def site_products(owner: nn.Module) -> dict[str, Product]:
    """The products with weights that functions in the `forward` of `owner` read, by the paths of their quantizers."""
    found: dict[str, Product] = {}
    sites = sites_of(owner)
    for key, site in sites.by_key().items() if sites is not None else ():
        for operand, path in site.weights.items():
            if site._modules.get(operand) is not None:
                inner, _, name = path.rpartition(".")
                product = _CLASSES.get((site.function, operand), SiteProduct)
                found[f"{SITES}.{key}.{operand}"] = product(site, operand, module_at(owner, inner), name)
    return found
