"""Trace a model with torch.export, and inline the subgraphs that torch.export wraps in operators."""

from __future__ import annotations

import inspect
import logging
import math
import re
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.utils import _pytree as pytree

from fakequant.data.again import Values
from fakequant.data.batches import OF_TORCH, Arguments
from fakequant.errors import CalibrationError, ConfigError, ExportError, FakeQuantError, GraphError, shown, warn_user
from fakequant.restore import restore_after, structure_of
from fakequant.text import listed, module_name

_UNKNOWN_OUTPUT = re.compile(r"Found <class '(?P<name>[^']+)'> in output")
_ASSIGNED = re.compile(r"The tensor attributes? (?P<names>.*?) (was|were) assigned during export")
_KEPT = "fake tensor in the exported program"
_CACHE = "use_cache"
"""The argument by which a decoder returns keys and values together with its result."""
_LENGTH = re.compile(r"L\['(\w+)'\]((?:\[[^\]]+\])*)\.size\(\)\[(\d+)\]")
"""A pattern of the length of an input's axis in the conditions of torch.export."""
_TRACEBACKS = "torch._subclasses.fake_tensor"
"""The logger to which torch writes the traceback of an error in tracing; it raises the error, too."""


def traced_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic_shapes: Any = None
) -> ExportedProgram:
    """Trace a model by `torch.export.export` with strict=False; a decoder that returns a cache is run without one.

    Raises:
        ExportError: the model returns something that torch.export does not know, holds a scripted module, or fails on
            the example repeated along a dynamic axis of length 1.
        torch.export's errors: the model cannot be traced.
    """
    example = separate((args, kwargs))
    longer = None  # the example, repeated along dynamic axes of length 1, which torch.export takes for static
    if dynamic_shapes is not None:
        given = inspect.signature(model.forward).bind(*example[0], **example[1]).arguments
        named = isinstance(dynamic_shapes, Mapping)
        shapes = dynamic_shapes if named else dict(zip(given, dynamic_shapes, strict=False))
        twice = {
            id(x): torch.cat([x] * 2, axis) for name in given for x, axis in _single(given[name], shapes.get(name))
        }
        longer = pytree.tree_map_only(Tensor, lambda x: twice.get(id(x), x), example) if twice else None
    try:
        return _traced(model, longer or example, dynamic_shapes)
    except CalibrationError as error:
        tensors = [id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(set(tensors)) == len(tensors):
            raise
        warn_user(f"the example has one tensor for several arguments, and the model takes no other tensors: {error}")
        own: dict[int, Tensor] = {}
        example = pytree.tree_map_only(Tensor, lambda x: own.setdefault(id(x), x.detach()), (args, kwargs))
        return _traced(model, example, dynamic_shapes)
    except FakeQuantError:
        raise
    except OF_TORCH as error:
        if longer is None:
            raise
        raise ExportError(
            "a dynamic axis of the example has length 1, so that torch.export would take it for static, and tracing "
            f"fails with the example repeated along it: {str(error).strip().partition(chr(10))[0]}. Pass an example of "
            "two samples"
        ) from error


@contextmanager
def _constants_said(model: nn.Module) -> Iterator[None]:
    """A context for a trace: it restores the model, and warns of Python values that `forward` writes to attributes."""
    forward, written = model.forward, dict[str, str]()

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = Values({"": model}, tensors=False)
        held = [(own._buffers, *item) for own in model.modules() if own is not model for item in own._buffers.items()]
        result = forward(*args, **kwargs)
        # torch.export sees the buffers that the model itself assigns, and loses those that a submodule assigns. They
        # are written in place behind all else: results and other buffers may hold a buffer's earlier value.
        assigned = [
            (buffers, name, old, new.clone())
            for buffers, name, old in held
            if old is not None and (new := buffers.get(name)) is not None and new is not old and new.shape == old.shape
        ]
        if assigned:
            result = pytree.tree_map_only(Tensor, torch.clone, result)
        for buffers, name, old, new in assigned:
            buffers[name] = old.copy_(new)
        for name, value in before.changes().values.items():
            if isinstance(value, (int, float, str)):
                written[name] = str(value)
            elif isinstance(value, (list, dict, set, deque)):
                written[name] = f"{len(value)} items"
        return result

    with restore_after(structure_of([model])):
        vars(model)["forward"] = run
        yield
    if written:
        shown = listed([f"{name} ({value})" for name, value in written.items()], 4)
        warn_user(
            f"forward writes values of Python, which are constants in the graph: {shown}. If outputs depend on one, "
            "make it a buffer, as by self.register_buffer('steps', torch.zeros(())) and self.steps.add_(1)"
        )


def _warn_of_lengths(program: ExportedProgram, model: nn.Module, example: Any) -> None:
    """Warn if a graph is right only for some lengths of dynamic axes, because `forward` tests these lengths.

    torch checks these conditions when its program runs; a graph and a file have no place for conditions.
    """
    held: Any = inspect.signature(model.forward).bind(*example[0], **example[1]).arguments
    lengths = {length for x in pytree.tree_leaves(dict(held)) if isinstance(x, Tensor) for length in x.shape}
    false = []
    for guard in dict.fromkeys(getattr(program, "_guards_code", [])):
        for length in lengths:
            tried = {length - 1, length + 1, 2 * length, 2 * length + 1}
            if any(not _holds(guard, held, {length: other}) for other in tried if other > 1):
                false.append(_LENGTH.sub(r"\1\2.shape[\3]", guard))
                break
    if false:
        warn_user(
            f"the graph is right only if {listed(false, 3, between='; ')}: forward asks for these lengths of dynamic "
            "axes. For other lengths compute with x.shape and tensors, without int(), float() and if; or leave the "
            "axis static"
        )


def _holds(guard: str, held: Any, lengths: Mapping[int, int]) -> bool:
    """Whether a guard of torch is true if each length n becomes `lengths[n]`; True if it cannot be evaluated."""

    def sized(tensor: Tensor) -> Any:
        return SimpleNamespace(size=lambda: [lengths.get(n, n) for n in tensor.shape])

    names = {"L": pytree.tree_map_only(Tensor, sized, dict(held)), "math": math, "torch": torch}
    try:
        return bool(eval(guard, names))
    except Exception:  # it asks for more than lengths
        return True


def _traced(model: nn.Module, example: Any, dynamic_shapes: Any) -> ExportedProgram:
    args, kwargs = example
    try:
        with warnings.catch_warnings(record=True) as caught, _constants_said(model):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        for one in caught:  # in place of torch's warning, what the values of attributes become that a model assigns
            if (assigned := _ASSIGNED.match(str(one.message))) is None:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            else:
                warn_user(
                    f"forward assigns {assigned['names'].replace('self.', '')}, whose present values become constants: "
                    "each run starts from these values. Register them by register_buffer, so that export_onnx makes "
                    "inputs and outputs of them, or make them arguments"
                )
        _warn_of_lengths(program, model, example)
        return program
    except TypeError as error:
        scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        if not scripted:
            raise
        raise ExportError(
            f"{module_name(scripted[0])} is a module of torch.jit.script, into which torch.export cannot look; trace "
            "the model with the module as it was written, and script it afterwards"
        ) from error
    except RuntimeError as error:
        if _KEPT in str(error):
            raise ExportError(
                "forward computes a tensor and stores it where tracing cannot see it, as by self.h.data = y; write "
                "self.h.copy_(y) to a buffer, or return the tensor"
            ) from error
        if (found := _UNKNOWN_OUTPUT.search(str(error))) is None:
            raise
        parameters = inspect.signature(model.forward).parameters
        # A model that passes keywords on takes `use_cache`, but only a result that is a cache can be left out.
        is_cache = "cache" in found["name"].lower()
        takes = (p.name == _CACHE or (is_cache and p.kind is p.VAR_KEYWORD) for p in parameters.values())
        if _CACHE in kwargs or not any(takes):
            raise ExportError(
                f"the model returns a {found['name']}, which torch.export does not know; let it return tensors, and "
                "tuples, lists and dicts of them. A decoder returns no cache if the example is a dict with "
                "use_cache=False, or if model.config.use_cache is False"
            ) from error
    warn_user(f"traced with {_CACHE}=False: torch.export does not know the {found['name']} that the model returns")
    if dynamic_shapes is not None:
        named = isinstance(dynamic_shapes, Mapping)
        shapes = dynamic_shapes if named else dict(zip(parameters, dynamic_shapes, strict=False))
        dynamic_shapes = {**shapes, _CACHE: None}
    return _traced(model, (args, {**kwargs, _CACHE: False}), dynamic_shapes)


@contextmanager
def example_named(model: nn.Module, arguments: Arguments) -> Iterator[None]:
    """A context for tracing: if the model itself fails on the example, the error names the layer and the shapes.

    Raises:
        ExportError: tracing failed, and so does a plain call of the model. Other errors are raised unchanged.
    """
    log = logging.getLogger(_TRACEBACKS)
    level = log.level
    try:
        with restore_after(lambda: log.setLevel(level)):
            log.setLevel(logging.CRITICAL)
            yield
    except FakeQuantError:
        raise
    except OF_TORCH as error:
        try:
            with torch.no_grad():
                arguments.run(model)
        except ConfigError as refused:
            raise ExportError(str(refused)) from error
        except OF_TORCH:
            pass
        raise


def separate(example: Any) -> Any:
    """The example with new tensor objects, because torch.export marks axes on the tensors that it gets.

    The new tensors share the memory of the old ones. Only a tensor that occurs a second time is copied, because
    torch.export would make one input of both.
    """
    seen: set[int] = set()

    def own(x: Tensor) -> Tensor:
        is_first = id(x) not in seen
        seen.add(id(x))
        return x.detach() if is_first else x.detach().clone()

    return pytree.tree_map_only(Tensor, own, example)


def _single(x: Any, shapes: Any) -> Iterator[tuple[Tensor, int]]:
    """The tensors in an argument that have a dynamic axis of length 1, each with the number of this axis."""
    if shapes is None or not isinstance(x, (Tensor, Mapping, list, tuple)):
        return
    kinds = (Mapping, list, tuple)
    if not isinstance(shapes, kinds if isinstance(x, Tensor) else Mapping if isinstance(x, Mapping) else kinds[1:]):
        raise ExportError(
            f"dynamic_shapes has {shown(shapes)} for an argument that is a {type(x).__name__}; give a dict of axes for "
            "each tensor, in lists and dicts like the arguments: ({0: 'batch'},); (({0: 'batch'},),) for *inputs"
        )
    items = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes)
    if isinstance(x, Tensor):
        static = (None, torch.export.Dim.STATIC)
        found = [axis for axis, dim in items if dim not in static and not isinstance(dim, int) and x.shape[axis] == 1]
        yield from ((x, axis) for axis in found)
        return
    for key, own in items:
        yield from _single(x[key], own)


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """A context that silences reports of torch's exporters about themselves: missing packages, deprecated functions.

    Args:
        names: the loggers that report only errors in the context.
    """
    logs = [logging.getLogger(name) for name in names]
    levels = [log.level for log in logs]

    def restore() -> None:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)

    with restore_after(restore), warnings.catch_warnings():
        for log in logs:
            log.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(program: ExportedProgram, *, gradients: bool) -> None:
    """Replace every subgraph that sets a gradient mode, or disables autocast, by its operations, in place.

    torch.export makes such a subgraph from a `torch.no_grad` or another mode in `forward`. In a program with gradients,
    a subgraph without gradients gets detached inputs: no gradient passes, and kernels are chosen as without gradients.
    A subgraph that enables autocast is not replaced.

    Args:
        program: the program, which is changed.
        gradients: whether the program was exported with gradients enabled; if not, the gradient modes of subgraphs have
            no effect.

    Raises:
        GraphError: `gradients` is true, and a subgraph enables gradients by `torch.enable_grad`.
    """
    renamed: dict[str, str] = {}
    while regions := [
        node
        for node in program.graph.nodes
        if (node.target is _GRADIENTS or (node.target is _AUTOCAST and not node.args[2]))
    ]:
        for node in regions:
            renamed |= _inline(program.graph_module, node, gradients)
    for spec in program.graph_signature.output_specs:
        name = spec.arg.name if isinstance(spec.arg, TensorArgument) else ""
        while name in renamed:
            name = renamed[name]
        if isinstance(spec.arg, TensorArgument):
            spec.arg = replace(spec.arg, name=name)
    if renamed:
        program.graph_module.recompile()


def _inline(module: fx.GraphModule, node: fx.Node, gradients: bool) -> dict[str, str]:
    """Replace a call of a subgraph by its operations; returns, for each result's old name, the result's new name."""
    is_mode = node.target is _GRADIENTS
    body, *inputs = cast("list[Any]", list(node.args[1 if is_mode else 4 :]))
    if is_mode and gradients and node.args[0]:
        raise GraphError("a graph cannot hold torch.enable_grad around a part of the model; compute that part outside")
    part: fx.GraphModule = getattr(module, body.target)
    graph = module.graph
    copies: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        places = [place for place in part.graph.nodes if place.op == "placeholder"]
        for place, given in zip(places, inputs, strict=True):
            known = given.meta.get("val") if isinstance(given, fx.Node) else None
            if (
                is_mode
                and gradients
                and isinstance(known, Tensor)
                and (known.is_floating_point() or known.is_complex())
            ):
                given = graph.call_function(torch.ops.aten.detach.default, (given,))
                # The same memory, so that changes in place are seen.
                given.meta = {"val": known}
            copies[place] = given
        for inner in part.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            copies[inner] = graph.node_copy(inner, lambda n: copies[n])
            if inner.op == "get_attr":
                # The whole has what a part holds, such as a part of its own, under another name where its own is taken.
                name = str(inner.target)
                held = getattr(part, name)
                while getattr(module, name, held) is not held:
                    name += "_"
                setattr(module, name, held)
                copies[inner].target = name
    # What the part returns as it got it keeps its gradient.
    results = cast("list[fx.Node]", part.graph.output_node().args[0])
    given_back = dict(zip(places, inputs, strict=True))
    renamed = {}
    for user in list(node.users):
        result = results[cast("int", user.args[1])]
        value = given_back[result] if result in given_back else copies[result]
        renamed[user.name] = value.name
        user.replace_all_uses_with(value)
        graph.erase_node(user)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)
        module.delete_submodule(str(body.target))
    return renamed
