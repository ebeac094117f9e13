"""The calls and values of a recorded run, and queries on them: see `outputs.record`.

A site is the call of a function, such as + or @, that can be quantized. Its owner is the module whose `forward` makes
the call, a visit is one call of the owner, and operands are the float tensors that the function takes.

`masked_values` finds the values with the numbers of a mask: -inf, -10000 or the least float, which are added to scores
for which a softmax must return 0. A range over the numbers of a mask and the scores rounds all scores to one value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from fakequant.errors import CalibrationWarning, warn_user
from fakequant.nn.functions import NO_TRAITS, SITE_FUNCTIONS, Trait, called_as, read_traits
from fakequant.nn.paths import layer_of
from fakequant.nn.quantized.layers import QuantizedLayer
from fakequant.nn.sites import Site, arguments_of
from fakequant.numerics.qparams import Range
from fakequant.text import listed

WITHOUT_FLOATS, OF_A_CACHE, IN_A_BRANCH = " without floats", " of a cache", " in a branch"
"""Suffixes of the names of functions, with the reason why a call cannot be a site."""
TIMES_A_NUMBER = " times a number"
"""The suffix of the names of sums with `alpha`, a factor of the second operand, in recordings of `watching`."""
QUANTIZER, FAKE_QUANTIZE = "quantizer", "fake_quantize"
"""The names of recorded calls that quantize: of a quantizer in a prepared model, and of `fake_quantize`."""
QUANTIZED = frozenset({QUANTIZER, FAKE_QUANTIZE})
EXTREME = 1e4
"""The magnitude from which on a number may belong to a mask: older models of transformers add -10000."""


@dataclass(frozen=True)
class Value:
    """One state of a tensor: a function that writes to a tensor makes a new value.

    Attributes:
        number: the number by which calls refer to the value.
        constant: whether it is a parameter, or computed only from parameters.
        shape: the shape of the tensor.
        is_float: whether it holds floats or complex numbers.
        producer: the number of the call that made it; None for parameters, inputs and other tensors that no call made.
        size: its largest magnitude, NaN if it holds NaN; 0 for constants and for tensors without floats.
    """

    number: int
    constant: bool
    shape: tuple[int, ...]
    is_float: bool
    producer: int | None
    size: float = 0.0


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a torch function.

    Attributes:
        number: the index of this call in the run.
        owner: the path of the module whose `forward` calls the function; None if a hook calls it.
        visit: the number of the owner's call, from 0, in which this call is made.
        function: the canonical name, or torch's name if it cannot be quantized; with an end such as `OF_A_CACHE`.
        index: how many calls of the function came before in the same visit.
        inputs: the numbers of the values of all tensor arguments.
        outputs: the numbers of the values of all tensors in the result, and of all tensors that the call writes to.
        operands: for each argument that could be quantized, the number of its value; else empty.
        multiplications: the multiply-accumulates of a product; 0 for other functions, and for embeddings.
        where: the places in the code, from the call up to the owner's `forward`; empty for functions that cannot be
            quantized.
        equation: for a function whose axes depend on its arguments, the `einsum` that it computes; else empty.
        factors: the numbers of the values that a product multiplies, without its bias; empty for other functions.
    """

    number: int
    owner: str | None
    visit: int
    function: str
    index: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operands: dict[str, int]
    multiplications: int = 0
    where: tuple[tuple[CodeType, int], ...] = ()
    equation: str = ""
    factors: tuple[int, ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """The inputs whose values the call uses: `zeros_like(x)` uses no values, `x.to(other)` only values of x."""
        name = self.function.partition(" ")[0]
        if name.endswith("_like") or name.startswith("new_"):
            return ()
        return self.inputs[:1] if name == "to" or name.endswith("_as") else self.inputs

    @property
    def is_product(self) -> bool:
        """Whether the call computes a product; an `einsum` of one tensor computes none."""
        return bool(self.factors)

    @property
    def site(self) -> tuple[str | None, str, int]:
        """The owner, function and index of the call, which are the same in every run and visit."""
        return self.owner, self.function, self.index


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        path: the path of the module; the first path if the module has several.
        inputs: the values of all tensor arguments of its `forward`.
        first: the function calls within it are `calls[first:last]`.
        last: see `first`.
        end: the calls of modules within it are `modules[number + 1 : end]`, where `number` is its index in `modules`.
        output: the value of its result after its hooks; None if the result is not a tensor.
        results: the values of all tensors of the result.
    """

    path: str
    inputs: tuple[int, ...]
    first: int
    last: int = 0
    end: int = 0
    output: int | None = None
    results: tuple[int, ...] = ()


class RunStep(Enum):
    """The kind of a step of a run: see `Recording.steps`."""

    CALL = auto()
    ENTER = auto()
    LEAVE = auto()


@dataclass
class Recording:
    """The calls of one run in their order, and the values that they read and make.

    Attributes:
        calls: the calls of torch functions.
        modules: the calls of modules, without quantizers, in the order of their starts.
        values: the values; the number of a value is its index.
        parameters: for each name of a parameter, the number of its value.
        threads: the paths of modules that are called in other threads.
        visits: for the path of every module, how often it was called.
        outputs: the numbers of the values that the model returns.
        kept: the numbers of the values of tensors that are still in memory when the run ends.
        buffers: the numbers of the values of buffers.
        masks: the numbers of the values that hold only zeros and elements as large as those of a mask.
    """

    calls: list[FunctionCall] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    visits: Counter[str] = field(default_factory=Counter)
    outputs: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    buffers: frozenset[int] = frozenset()
    masks: set[int] = field(default_factory=set)

    def is_constant(self, call: FunctionCall) -> bool:
        """Whether a call computes from parameters only; engines compute such a call once, and quantize the result."""
        return bool(call.outputs) and all(self.values[value].constant for value in call.outputs)

    def numbers(self, model: nn.Module) -> dict[nn.Parameter, int]:
        """For each parameter that the model had before the run: the number of its value."""
        held = model.named_parameters(remove_duplicate=False)
        return {parameter: self.parameters[name] for name, parameter in held if name in self.parameters}

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """For every module of a complete run, the paths of the modules that its `forward` calls."""
        found: dict[str, list[str]] = {}
        running: list[ModuleCall] = []
        for number, one in enumerate(self.modules):
            while running and running[-1].end <= number:
                running.pop()
            if running:
                found.setdefault(running[-1].path, []).append(one.path)
            running.append(one)
        return found

    @cached_property
    def calls_of(self) -> dict[str | None, list[FunctionCall]]:
        """For each owner, its calls in a complete run."""
        found: dict[str | None, list[FunctionCall]] = {}
        for call in self.calls:
            found.setdefault(call.owner, []).append(call)
        return found

    @cached_property
    def same(self) -> dict[tuple[str | None, str, int], list[FunctionCall]]:
        """For each `site` in a complete run, the list of its calls, which differ only by their visit."""
        found: dict[tuple[str | None, str, int], list[FunctionCall]] = {}
        for call in self.calls:
            found.setdefault(call.site, []).append(call)
        return found

    def constants(self, call: FunctionCall) -> set[str]:
        """The operands of a call that are parameters, or computed from parameters only, in all visits."""
        same = self.same[call.site]
        return {name for name in call.operands if all(self.values[one.operands[name]].constant for one in same)}

    @cached_property
    def consumers(self) -> dict[int, list[FunctionCall]]:
        """For each value of a complete run: the calls that compute something from it, each call once."""
        found: dict[int, list[FunctionCall]] = {}
        for call in self.calls:
            for value in dict.fromkeys(call.inputs if call.outputs else ()):  # others give a number, a text or a shape
                found.setdefault(value, []).append(call)
        return found

    def steps(self) -> Iterator[tuple[RunStep, Any]]:
        """The calls in their order, as (CALL, a `FunctionCall`) and (ENTER or LEAVE, a `ModuleCall`)."""
        done, running = 0, list[ModuleCall]()
        for number, module in enumerate([*self.modules, None]):
            while running and (module is None or running[-1].end <= number):
                ended = running.pop()
                yield from ((RunStep.CALL, call) for call in self.calls[done : ended.last])
                done = ended.last
                yield RunStep.LEAVE, ended
            first = len(self.calls) if module is None else module.first
            yield from ((RunStep.CALL, call) for call in self.calls[done:first])
            done = first
            if module is not None:
                yield RunStep.ENTER, module
                running.append(module)

    @cached_property
    def multiplications(self) -> Counter[str]:
        """For the path of each module: the multiply-accumulates of all calls within it in a complete run."""
        before = [0, *accumulate(call.multiplications for call in self.calls)]
        found = Counter[str]()
        for one in self.modules:
            found[one.path] += before[one.last] - before[one.first]
        return found

    def of_owner(self, owner: str) -> list[list[FunctionCall]]:
        """For each visit of an owner, a list of its calls of functions that can be quantized."""
        visits: list[list[FunctionCall]] = [[] for _ in range(self.visits[owner])]
        for call in self.calls_of.get(owner, []):
            if call.function in SITE_FUNCTIONS:
                visits[call.visit].append(call)
        return visits


def modules_called(model: nn.Module, recording: Recording) -> set[nn.Module]:
    """The modules that a run of a model calls.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)
    >>> modules_called(model, record(model, lambda: model[0](x))) == {model[0]}
    True
    """
    modules = dict(model.named_modules())
    return {modules[call.path] for call in recording.modules}


def weight_readers(model: nn.Module, recording: Recording, others: Iterable[nn.Module] = ()) -> dict[nn.Module, str]:
    """The quantized layers whose weight a run reads without calling the layer, each with the path of the reader.

    Args:
        others: float layers with one weight each, which are searched too.

    >>> from fakequant.model.run.outputs import record
    >>> class Projects(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.inner.weight)
    >>> model = prepare(nn.Sequential(Projects()), presets.INT8_WEIGHT_ONLY)
    >>> weight_readers(model, record(model, lambda: model(torch.ones(1, 4)))) == {model[0].inner: "0"}
    True
    """
    numbers = recording.numbers(model)
    modules = dict(model.named_modules())
    # Parameters alone: a parametrization would compute an unused weight, and may change its buffers.
    held = {m: [w.parameter for w in m.products()] for m in modules.values() if isinstance(m, QuantizedLayer)}
    held |= {layer: [layer._parameters.get("weight")] for layer in others}
    holders: dict[int, list[nn.Module]] = {}
    for layer, parameters in held.items():
        for parameter in parameters:
            if parameter is not None and parameter in numbers:
                holders.setdefault(numbers[parameter], []).append(layer)
    found: dict[nn.Module, str] = {}
    quantized: set[nn.Module] = set()
    running: list[str] = []
    for step, one in recording.steps():
        if step is RunStep.ENTER:
            running.append(one.path)
        elif step is RunStep.LEAVE:
            running.pop()
        else:
            # A call without a result asks for a shape or a dtype; a quantizer that observes has none.
            read = one.read if one.outputs or one.function == QUANTIZER else ()
            layers = [layer for value in read for layer in holders.get(value, ())]
            if not layers or any(modules[path] in layers for path in running):
                continue
            if one.function == QUANTIZER:  # that of a function, which takes the weight next
                quantized.update(layers)
            else:
                path = running[-1] if running else ""
                found.update((layer, path) for layer in layers if layer not in found and layer not in quantized)
    return found


def read_together(recording: Recording, paths: Iterable[str]) -> dict[str, list[str]]:
    """For each of `paths` whose module is called: all of `paths` whose modules get the same first inputs in all calls.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.ones(1, 4)
    >>> read_together(record(model, lambda: model[0](x) + model[1](x)), ["0", "1"])
    {'0': ['0', '1'], '1': ['0', '1']}
    """
    wanted, first = set(paths), dict[str, tuple[int, ...]]()
    for call in recording.modules:
        if call.path in wanted:
            first[call.path] = (*first.get(call.path, ()), *call.inputs[:1])
    groups: dict[tuple[int, ...], list[str]] = {}
    for path, values in first.items():
        groups.setdefault(values, []).append(path)
    return {path: groups[values] for path, values in first.items()}


class Unreached:
    """The weights that a run of a model does not reach: no function reads the weight, and its layer is not called.

    In another run the layer may be called, for example an expert that got no rows in this run, or a head for training.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)]), torch.ones(1, 4)
    >>> found = Unreached(model, record(model, lambda: model[1](model[0](x))))
    >>> found.why_not(8)
    'this batch does not reach 2.weight, which may read the same values; give a batch that reaches it, or remove it'
    >>> found.why_not(4) is None
    True
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        read = {value for call in recording.calls for value in call.inputs}
        leaves = [module for module in modules_called(model, recording) if next(module.children(), None) is None]
        reached = {id(p) for module in leaves for p in module.parameters()}
        reached |= {id(p) for p, number in recording.numbers(model).items() if number in read}
        hidden = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
        scripted = {id(parameter) for module in hidden for parameter in module.parameters()}
        self._scripted = {name for name, parameter in model.named_parameters() if id(parameter) in scripted}
        self._shapes = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if id(parameter) not in reached and parameter.dim() > 1 and bool(parameter.any())
        }

    def why_not(self, width: int) -> str | None:
        """Why values with `width` channels cannot be changed: the reason, or None if they can."""
        name = next((name for name, shape in self._shapes.items() if width in shape), None)
        if name is None:
            return None
        if name in self._scripted:
            return (
                f"{name} may read the same values, and torch.jit does not show whether a run reads it; change the "
                "weights first, and script the module afterwards"
            )
        return (
            f"this batch does not reach {name}, which may read the same values; give a batch that reaches it, or "
            "remove it"
        )


# Functions that cannot be sites; `nn/functions.py` has the others.
_TRAITS = read_traits("""
contiguous dropout | moves scales channels identity
flatten permute reshape to transpose view | moves scales channels
detach clone | moves channels identity
expand float half bfloat16 double getitem repeat squeeze | moves channels
type_as unflatten unsqueeze | moves channels
type | moves channels shape
max_pool1d max_pool2d max_pool3d | moves scales
t split chunk unbind get select narrow slice index_select gather roll flip pad movedim moveaxis swapaxes | moves
swapdims tensor_split ravel T mT H mH data | moves
dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout | moves identity
index unfold as_strided take_along_dim masked_select requires_grad cpu cuda | codes
atleast_1d atleast_2d atleast_3d broadcast_to broadcast_tensors view_as expand_as reshape_as | codes
clamp | codes
repeat_interleave | codes channels
copy setitem | codes fills
index_copy index_fill index_put masked_fill masked_scatter scatter slice_scatter where | fills
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d | scales
linear_cross_entropy convolution _convolution _addmm_activation | product
linalg_matrix_power matrix_power linalg_matrix_exp matrix_exp linalg_householder_product ormqr cov corrcoef | product
cdist pdist _cdist_forward _euclidean_dist _trilinear affine_grid affine_grid_generator | product
_embedding_bag | product lookup
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell | product
linalg_solve linalg_solve_triangular linalg_lstsq linalg_lu_solve lu_solve cholesky_solve triangular_solve | product
linalg_solve_ex linalg_ldl_solve linalg_tensorsolve | product
_native_multi_head_attention _transformer_encoder_layer_fwd multi_head_attention_forward | product
flex_attention | product attention
zeros zeros_like new_zeros empty empty_like new_empty zero | empty
size dim ndimension stride numel nelement is_contiguous is_floating_point is_complex element_size | shape
storage_offset get_device len | shape
""")
# Variants of products are known by their family: `_scaled_dot_product_flash_attention` is a `scaled_dot_product`.
_ATTENTION = ("scaled_dot_product", "flash_attention")
_PRODUCT_FAMILIES = (*_ATTENTION, "grouped_mm", "scaled_mm", "scaled_grouped_mm")
_PRODUCT_ENDINGS = ("mm", "matmul")


def having(trait: Trait) -> frozenset[str]:
    """The functions with a trait.

    >>> "relu" in having(Trait.SCALES)
    True
    """
    known = _TRAITS | {name: function.traits for name, function in SITE_FUNCTIONS.items()}
    return frozenset(name for name, traits in known.items() if trait in traits)


def has(name: str, trait: Trait) -> bool:
    """Whether a function, by the name that a recording gives it, has a trait.

    >>> has("transpose", Trait.CODES), has("baddbmm", Trait.PRODUCT), has("softmax", Trait.SCALES)
    (True, True, False)
    """
    name = name.partition(" ")[0]  # without the reason why the call cannot be a site
    if name in SITE_FUNCTIONS:
        return trait in SITE_FUNCTIONS[name].traits
    if trait in _TRAITS.get(name, NO_TRAITS):
        return True
    own = name.removeprefix("_")
    return trait is Trait.PRODUCT and (own.startswith(_PRODUCT_FAMILIES) or own.endswith(_PRODUCT_ENDINGS))


# Where a product's factors are among its tensors; the rest is a bias. All of them where nothing is said.
_FACTORS = {
    **dict.fromkeys(("convolution", "_grouped_mm", "grouped_mm", "_scaled_mm", "_scaled_grouped_mm"), slice(2)),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), slice(4)),
    "linear_cross_entropy": slice(2),
    "_addmm_activation": slice(1, 3),
    "flex_attention": slice(3),  # a mask is no factor
}


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floats or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def factors_of(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments of a product that are multiplied, without bias, mask and summands.

    >>> bias, matrix, vector = torch.ones(2), torch.ones(2, 3), torch.ones(3)
    >>> [list(factor.shape) for factor in factors_of(torch.addmv, "addmv", (bias, matrix, vector), {})]
    [[2, 3], [3]]
    """
    called = called_as(func)
    if called is not None:
        held = [one for one in arguments_of(called, args, kwargs).values() if isinstance(one, torch.Tensor)]
        held = [one for one in held if is_number(one) and one.dim() > 0]
        return held if len(held) >= called.function.fewest else []
    # An LSTM's state is a list, of which the products see the first tensor.
    named = [one[0] if isinstance(one, (list, tuple)) else one for one in args[_FACTORS.get(name, slice(0))]]
    tensors = [one for one in tree_leaves(named or (args, kwargs)) if isinstance(one, torch.Tensor)]
    return [tensor for tensor in tensors if is_number(tensor)]


def counted(name: str, run: Callable[[], Any], factors: Sequence[torch.Tensor]) -> tuple[Any, int]:
    """Call `run`, which computes a product; returns the product and the number of its multiply-accumulates."""
    attends = has(name, Trait.ATTENTION)
    if attends:  # flex_attention fails under torch's counter
        output = run()
    else:
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()
        with counter:
            output = run()
        if operations := counter.get_total_flops():
            return output, operations // 2
    first = output[0] if isinstance(output, (tuple, list)) else output
    outputs = first.numel()
    if attends or name.removeprefix("_").startswith(_ATTENTION):
        count = (factors[0].numel() + outputs) * factors[1].shape[-2]  # of the query and the key
    elif name in _RECURRENT:
        count = factors[0][..., 0].numel() * sum(weight.numel() for weight in factors[1:] if weight.dim() == 2)
    elif has(name, Trait.LOOKUP):
        count = 0
    else:  # by the table of sites, or a sum over the last axis of the first factor
        function = SITE_FUNCTIONS.get(name)
        axis = function.operands[0].reduction if function is not None and function.operands else -1
        of_table = None if function is None else function.multiplications
        count = outputs * factors[0].shape[axis] if of_table is None else of_table(outputs, *factors)
    return output, count


class _NoModules(ModuleTracker):
    """A tracker that adds no hooks to modules: after an interrupt at the end of counting, torch's hooks would stay."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: object) -> None: ...


_STILL_LARGE = EXTREME / 100
"""The least magnitude of a mask's numbers after a product with a factor or a temperature."""


def masked_values(recording: Recording) -> set[int]:
    """The values that carry numbers of a mask, until a function has removed them.

    A value carries a mask if it holds only zeros and extreme numbers, or if it is the result of a function that wrote
    extreme numbers into another value. If an argument of a function carries a mask, so does its result, as long as the
    result has large numbers; the result of a product does not. Scores with extreme numbers before a softmax, and the
    mask argument of an attention, also carry a mask.
    """
    sizes = [value.size for value in recording.values]
    found = set(recording.masks)
    for call in recording.calls:
        if call.is_product:
            continue
        carries = not found.isdisjoint(call.inputs)
        if carries or (has(call.function, Trait.FILLS) and not any(sizes[value] >= EXTREME for value in call.inputs)):
            least = _STILL_LARGE if carries else EXTREME
            found.update(value for value in call.outputs if least <= sizes[value] < math.inf)
    scores: set[int] = set()  # values that reach a softmax
    for call in reversed(recording.calls):
        if has(call.function, Trait.ATTENTION):
            scores.update(value for value in call.inputs if value not in call.factors)
        elif not call.is_product and (has(call.function, Trait.SOFTMAX) or not scores.isdisjoint(call.outputs)):
            scores.update(call.inputs)
    return found | {value for value in scores if EXTREME <= sizes[value] < math.inf}


def warn_of_masks(model: nn.Module, ranges: Mapping[str, Range]) -> None:
    """Warn of functions whose calibrated ranges include numbers of a mask, which the example of `prepare` lacked."""
    low: dict[str, float] = {}
    functions: set[str] = set()
    for name, range in ranges.items():
        site = model.get_submodule(layer_of(name))
        if isinstance(site, Site) and not has(site.function, Trait.PRODUCT) and range.lo.numel():
            lowest = range.lo.min().item()
            if lowest <= -EXTREME:
                low[name] = lowest
                functions.add(site.function)
    if low:
        first = next(iter(low))
        warn_user(
            f"the range of {listed(low, 1)} reaches {low[first]:.3g}, as with the numbers of an attention mask: the "
            "scale rounds all scores to one value. Give prepare(..., example=) an input with a mask, which leaves "
            f"these functions in float; or leave them in float by Rule('*', ops={(*sorted(functions),)})",
            CalibrationWarning,
        )


@dataclass
class Neighbors:
    """Some modules, the makers, and the layers that read their outputs.

    Attributes:
        readers: for each maker, the layers whose first argument is its output, directly or through functions.
        calls: how often the makers and layers are called.
        elsewhere: the makers whose output or parameter is also read or stored outside of these layers.
    """

    readers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    elsewhere: set[nn.Module] = field(default_factory=set)


def find_neighbors(
    model: nn.Module,
    recording: Recording,
    makers: Set[nn.Module],
    layers: Set[nn.Module],
    through: Set[str] | None = None,
) -> Neighbors:
    """Find the layers that read the outputs of other modules, the makers, directly or through functions such as ReLU.

    Args:
        makers: the modules whose outputs are followed.
        layers: the modules that count as readers.
        through: the functions through which outputs are followed; by default those with f(s * x) = s * f(x) for s > 0.

    >>> from fakequant.model.run.outputs import record
    >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(1, 4)
    >>> layers = {model[0], model[2]}
    >>> found = find_neighbors(model, record(model, lambda: model(x)), layers, layers)
    >>> found.readers[model[0]] == [model[2]]
    True
    """
    walk = _NeighborWalk(model, recording, makers, layers, having(Trait.SCALES) if through is None else through)
    for step, one in recording.steps():
        if step is RunStep.CALL:
            walk.call(one)
        else:
            walk.module(one, entered=step is RunStep.ENTER)
    walk.read({*recording.outputs, *recording.kept})
    return walk.found


class _NeighborWalk:
    """Goes through a run and records which modules read the outputs of makers, for `find_neighbors`."""

    def __init__(
        self, model: nn.Module, recording: Recording, makers: Set[nn.Module], layers: Set[nn.Module], through: Set[str]
    ) -> None:
        self.found = Neighbors()
        self._makers, self._layers, self._through = makers, layers, through
        self._modules = dict(model.named_modules())
        numbers: dict[nn.Parameter | None, int] = {**recording.numbers(model)}
        held = ((p, module) for module in makers | layers for p in module._parameters.values())
        self._owners = {numbers[p]: module for p, module in held if p in numbers}
        self._made: dict[int, nn.Module] = {}
        self._running: list[nn.Module] = []

    def read(self, values: Iterable[int]) -> None:
        """Record that something other than a layer reads or stores these values."""
        self.found.elsewhere.update(self._made[value] for value in values if value in self._made)

    def call(self, call: FunctionCall) -> None:
        """Record the values that a function reads; within makers and layers only parameters of other modules count."""
        owners = [self._owners[value] for value in call.read if value in self._owners]
        self.found.elsewhere.update(owner for owner in owners if owner not in self._running)
        if not self._running:
            maker = self._take(call.read, followed=call.function in self._through and len(call.outputs) == 1)
            if maker is not None:
                self._made[call.outputs[0]] = maker

    def module(self, one: ModuleCall, *, entered: bool) -> None:
        """Record the start or the end of a module's call."""
        module = self._modules[one.path]
        if module not in self._makers and module not in self._layers:
            return
        if entered:
            self.found.calls[module] += 1
            if (maker := self._take(one.inputs, followed=module in self._layers)) is not None:
                self.found.readers.setdefault(maker, []).append(module)
            self._running.append(module)
            return
        self._running.pop()
        if module in self._makers and one.output is not None:
            self._made[one.output] = module

    def _take(self, values: tuple[int, ...], *, followed: bool) -> nn.Module | None:
        """The maker of the first value if `followed`, else None; the other values are recorded as read elsewhere."""
        maker = self._made.get(values[0]) if followed and values else None
        self.read(values if maker is None else values[1:])
        return maker
