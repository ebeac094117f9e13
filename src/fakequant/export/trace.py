"""Trace a model, and convert it to an ONNX graph in which every quantizer is one opaque node, `FakeQuantize`.

A second node, `fakequant::ChooseScale`, computes scales from the range of the tensor. The nodes stay opaque while torch
and onnxscript convert and optimise the graph, so these steps cannot change the result of a quantizer. `lower` replaces
the nodes when all constants are known.

Quantized tensors that depend on no input become constants, such as weights from a hook or a parametrization, learned
queries and position tables. Torch computes them here, with the model's bits; its exporter would fold some with numpy,
whose arithmetic differs.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import traceback
from torch.utils import _pytree as pytree

from fakequant.errors import ExportError
from fakequant.export import loops, trt
from fakequant.export.capability import (
    LAST_OPSET,
    Dimension,
    Encoding,
    ScaleLayout,
    Style,
    block_sizes,
    check_choice,
    check_spec,
    layout,
)
from fakequant.model.run.tracing import inline_regions, quiet, traced_program
from fakequant.nn.paths import join, module_at
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.restore import forwards_of, restore_after
from fakequant.text import module_name

if TYPE_CHECKING:
    from onnx import ModelProto

_UNKNOWN = object()


def fold_constants(program: ExportedProgram, targets: Container[Any]) -> None:
    """Replace the first argument of each node that calls one of `targets` by a constant, if it depends on no input.

    Parameters, buffers and random values are not replaced.
    """
    readers = {node: _source(node) for node in program.graph.nodes if node.target in targets}
    if all(source.op == "placeholder" for source in readers.values()):
        return
    values: dict[tuple[fx.Node, int], Tensor] = {}
    read: dict[fx.Node, tuple[fx.Node, int]] = {}
    for reader, value in _Known(program).values(readers):
        if readers[reader].op != "placeholder":
            # The model may write to the tensor between two readers.
            read[reader] = key = readers[reader], 0 if value.is_inference() else value._version
            values.setdefault(key, value.clone())
    constants: dict[tuple[fx.Node, int], fx.Node] = {}
    for number, (key, value) in enumerate(values.items()):
        name = f"fakequant_constant_{number}"
        first = next(node for node in program.graph.nodes if node.op == "placeholder")
        with program.graph.inserting_before(first):  # the inputs come last
            constants[key] = node = program.graph.placeholder(name)
        node.meta["val"] = key[0].meta["val"]
        spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
        program.graph_signature.input_specs.insert(0, spec)
        program.constants[name] = value
    for reader, key in read.items():
        reader.update_arg(0, constants[key])
    program.graph.eliminate_dead_code(lambda node: node.is_impure() or _is_of_transform(node))
    program.graph_module.recompile()


def known_values(program: ExportedProgram, sources: Mapping[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, Tensor]]:
    """Yield each reader whose source depends on no input, with the value of the source."""
    known, written = _Known(program), written_inputs(program.graph)
    left = dict[fx.Node, fx.Node]()
    for reader, source in sources.items():
        origin = source
        while origin.target is torch.ops.aten.detach.default:
            origin = origin.args[0]
            assert isinstance(origin, fx.Node)
        value = known.now.get(origin)
        if isinstance(value, Tensor) and origin not in written:
            yield reader, value
        else:
            left[reader] = source
    if left:
        yield from known.values(left)


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders of a graph whose memory some nodes write."""
    written = set[fx.Node]()
    base = {node: node for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        schema = getattr(getattr(node.target, "_schema", None), "arguments", ())
        for argument, value in zip(schema, node.args, strict=False):
            if argument.alias_info is not None and isinstance(value, fx.Node) and value in base:
                base[node] = base[value]
                written |= {base[value]} if argument.alias_info.is_write else set()
    return written


def _source(node: fx.Node) -> fx.Node:
    """Return the first argument of a node, before any detach."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return _source(source) if source.target is torch.ops.aten.detach.default else source


class _Known:
    """The values of a graph that depend only on parameters, buffers and numbers."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self.now: dict[fx.Node, Any] = {}
        named = {**dict(program.named_parameters()), **dict(program.named_buffers()), **program.constants}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind is not InputKind.USER_INPUT and spec.target in named:
                value = named[spec.target]
                self.now[node] = value.detach() if isinstance(value, Tensor) else value
        self._owned = _memory(self.now)

    def values(self, readers: Mapping[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, Tensor]]:
        """Yield each reader whose source is a known tensor, with the value of the source at that point."""
        for node in self._program.graph.nodes:
            value = self.now.get(readers[node]) if node in readers else None
            if isinstance(value, Tensor):
                yield node, value
            if node.op == "get_attr":
                self.now[node] = getattr(self._program.graph_module, str(node.target))
            if node.op != "call_function" or _is_of_transform(node):
                continue
            known = all(source in self.now for source in node.all_input_nodes)
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                arguments = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
                writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
                leaves = pytree.tree_leaves([arguments.get(name) for name in writes])
                sources = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
                if any(source not in self.now for source in sources):
                    return  # no later value can be known
                changed = _memory({source: self.now[source] for source in sources})
                # A write to the model's own tensors is not executed, and a write of an unknown value is not known.
                if not known or changed & self._owned:
                    self.now = {one: x for one, x in self.now.items() if not _memory({one: x}) & changed}
                    continue
            if known and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self.now[source])
                with torch.no_grad():
                    self.now[node] = cast("Callable[..., Any]", node.target)(*args, **kwargs)


def _is_of_transform(node: fx.Node) -> bool:
    """Whether a node begins or ends a `torch.vmap`, or wraps a tensor for it."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _memory(values: dict[fx.Node, Any]) -> set[int]:
    """The addresses of the storages of all tensors in nested values."""
    tensors = (leaf for leaf in pytree.tree_leaves(list(values.values())) if isinstance(leaf, Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@dataclass(frozen=True)
class QuantizerForm:
    """The encoding of a quantizer, the layout of its scales, and the block size along every axis of its tensor."""

    encoding: Encoding
    layout: ScaleLayout
    blocks: list[Dimension]

    def opset(self, *, constant: bool) -> int:
        """Return the first opset that supports the form, for constants or activations."""
        return max(self.encoding.opset(constant=constant), 0 if self.encoding.portable else self.layout.opset)


def check(
    spec: QuantSpec, style: Style, shape: Sequence[Dimension] | None, *, constant: bool, dynamic: bool
) -> Encoding:
    """Return the encoding of a quantizer if the style supports it.

    Args:
        spec: the specification.
        style: the dialect of the file.
        shape: the shape of the tensor; None if it is not known yet.
        constant: whether the tensor is a weight.
        dynamic: whether the range is computed from every tensor.

    Raises:
        ExportError: the style cannot express the quantizer; the message says why.
    """
    if style is Style.TRT:
        trt.check(spec, shape, constant=constant, dynamic=dynamic)
    if dynamic and not constant:
        check_choice(spec)
    return check_spec(spec, style)


def place(spec: QuantSpec, style: Style, shape: Sequence[Dimension], groups: Sequence[Dimension]) -> QuantizerForm:
    """Return the form of a quantizer for a tensor [shape] with scales [groups per axis].

    Raises:
        ExportError: ONNX cannot express the specification, or has no layout for the scales.

    >>> place(QuantSpec.parse("int8 per_channel(0)"), Style.PORTABLE, (8, 4), (8, 1)).layout
    ScaleLayout(axis=0, block_size=0, repeats=(), symbolic=False)
    """
    encoding = check_spec(spec, style)
    blocks = block_sizes(spec.granularity, shape)
    where = trt.place(spec, len(blocks)) if style is Style.TRT else None
    if where is None:
        where = ScaleLayout() if encoding.portable else layout(shape, groups, blocks)
    return QuantizerForm(encoding, where, blocks)


DOMAIN = "fakequant"
OPERATOR = "FakeQuantize"
SCALE_OPERATOR = "ChooseScale"
TARGET = torch.ops.fakequant.fake_quantize.default
SCALE_TARGET = torch.ops.fakequant.choose_scale.default
# torch uses these operations to compute the exponent of a number; ONNX has neither.
_BITS = (torch.ops.aten.frexp.Tensor, torch.ops.aten.view.dtype)
_SLICE = re.compile(r"slice(\([^)]*\))\.")
_SLICED = re.compile(r"(?:(?P<list>.*?)\.)?(?P<cuts>(?:slice\([^)]*\)\.)+)(?P<at>\d+)(?P<rest>.*)")
_NESTING = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}  # the nodes between which torch.vmap maps
_NO_FLEX = "flex_attention has no form there; let the model that is exported call scaled_dot_product_attention"
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class TracedSite:
    """A quantizer node in the traced graph.

    Attributes:
        path: path of the module that quantizes, "" for the model itself.
        spec: the specification.
        needs: the first opset that supports it.
    """

    path: str
    spec: QuantSpec
    needs: int


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """Trace the model as a graph of torch operations in which every quantizer is one node.

    Raises:
        torch.export's errors: the model cannot be traced.
    """
    # The paths that torch finds are those by which Python got to a module: a plain list is in none.
    quantizing = {path: module for path, module in model.named_modules() if path and hasattr(type(module), "quantizes")}

    def run(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({DOMAIN: path}):
            return forward(*args, **kwargs)

    marked = restore_after(forwards_of(quantizing.values()))
    with torch.no_grad(), _quiet(), marked, traceback.preserve_node_meta():
        for path, module in quantizing.items():
            vars(module)["forward"] = partial(run, path, module.forward)
        program = traced_program(model, args, kwargs, dynamic_shapes=_without_names(dynamic_shapes))
        inline_regions(program, gradients=False)
    parts = [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        stack = node.meta.get("nn_module_stack") or {}
        if path := (node.meta.pop("custom", None) or {}).get(DOMAIN):
            node.meta["nn_module_stack"] = {**stack, next(reversed(stack), ""): (path, "")}
            continue
        if any("slice(" in path for path, _ in stack.values()):
            node.meta["nn_module_stack"] = {
                key: (module_path(model, path), kind) for key, (path, kind) in stack.items()
            }
    fold_constants(program, (TARGET, SCALE_TARGET))
    return program


def module_path(model: nn.Module, path: str) -> str:
    """Return the path in the model for torch's path with a slice, as from `for layer in self.layers[1:]`.

    >>> module_path(nn.Sequential(nn.ModuleList([nn.ReLU(), nn.ReLU(), nn.ReLU()])), "0.slice(1, None, None).1")
    '0.2'
    """
    while (found := _SLICED.match(path)) is not None:
        owner = module_at(model, found["list"] or "")
        names = list(owner._modules)
        for cut in _SLICE.findall(found["cuts"]):
            names = names[slice(*ast.literal_eval(cut))]
        # A part of a Sequential keeps its names.
        name = found["at"] if isinstance(owner, nn.Sequential) else names[int(found["at"])]
        path = ".".join(part for part in (found["list"], name) if part) + found["rest"]
    return path


def _without_names(dynamic_shapes: Any) -> Any:
    """Replace the names of dynamic axes, which only ONNX has, by torch.export's marker for a dynamic axis."""
    if isinstance(dynamic_shapes, str):
        return torch.export.Dim.DYNAMIC
    if isinstance(dynamic_shapes, Mapping):
        return {key: _without_names(value) for key, value in dynamic_shapes.items()}
    if isinstance(dynamic_shapes, (tuple, list)):
        return type(dynamic_shapes)(_without_names(value) for value in dynamic_shapes)
    return dynamic_shapes


def sites(program: ExportedProgram, style: Style = Style.PORTABLE) -> list[TracedSite]:
    """Return all quantizers of the graph.

    Raises:
        ExportError: ONNX cannot express some of them; the message names them all with the reasons.
    """
    quantizers: list[TracedSite] = []
    inputs, graph = set(program.graph_signature.user_inputs), program.graph_module.graph
    moving = depending(graph, lambda node: node.name in inputs)
    by_bits = depending(graph, lambda node: node.target in _BITS)
    refused = [
        f"{module_name(scope_of(node))}: {_NO_FLEX}"
        for node in all_nodes(program)
        if node.target is torch.ops.higher_order.flex_attention
    ]
    for node, reason in quantizing_nodes(program):
        try:
            if reason:
                raise ExportError(reason)
            if node.target is TARGET:
                x, scale, _, text = node.args[:4]
                assert isinstance(x, fx.Node)
                assert isinstance(scale, fx.Node)
                spec, path = QuantSpec.parse(str(text)), scope_of(node)
                if x.meta["val"].dtype == torch.float64:
                    raise ExportError(
                        "quantizes a float64 tensor, but QuantizeLinear takes float32; export model.float()"
                    )
                if spec.scale.format is not None and scale in by_bits:
                    raise ExportError(
                        f"{spec}: the model computes scales in {spec.scale.format} from the bits of numbers, which "
                        "ONNX cannot read; call fake_quantize without scale and amax, so that it uses the range of its "
                        "tensor, or pass a constant scale"
                    )
                constant, dynamic = x not in moving, scale in moving
            else:  # the hidden state in a loop
                _, x, *_, scale, _, text, name = node.args[:9]
                if not text:
                    continue
                assert isinstance(x, fx.Node)
                spec, path = QuantSpec.parse(str(text)), join(scope_of(node), str(name))
                constant, dynamic = False, scale is None
            shape = _shape(x.meta["val"])
            check(spec, style, shape, constant=constant, dynamic=dynamic)
            if isinstance(scale, fx.Node):
                groups = _shape(scale.meta["val"])
            else:
                groups = [shape[0], *spec.granularity.group_shape((1, int(shape[-1])))[1:]]
            quantizers.append(TracedSite(path, spec, place(spec, style, shape, groups).opset(constant=constant)))
        except ExportError as error:
            refused.append(f"{module_name(scope_of(node))}: {error}")
    if refused:
        raise ExportError("cannot be expressed in ONNX:\n" + "\n".join(dict.fromkeys(refused)))
    return quantizers


def all_nodes(program: ExportedProgram) -> Iterator[fx.Node]:
    """The nodes of a graph and of the graphs in it."""
    parts = (part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule))
    return (node for part in parts for node in part.graph.nodes)


def quantizing_nodes(program: ExportedProgram) -> Iterator[tuple[fx.Node, str]]:
    """The nodes that quantize, each with the reason why no file can express the node, "" if a file can."""
    nesting = 0
    for node in all_nodes(program):
        nesting += _NESTING.get(getattr(node.target, "__name__", ""), 0)
        if node.target not in (TARGET, loops.TARGET):
            continue
        if node.graph is not program.graph:
            yield node, "lies inside control flow (torch.cond or a loop) or torch.autocast, which cannot be exported"
        elif nesting:
            yield node, "lies inside torch.vmap, which cannot be exported; call the layer on the batch"
        else:
            yield node, ""


def depending(graph: fx.Graph, is_source: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes of a graph for which `is_source` is true, and all nodes that depend on them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:  # in the order of the program
        if is_source(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _shape(value: torch.Tensor) -> list[Dimension]:
    return [n if isinstance(n, int) else str(n) for n in value.shape]


def scope_of(node: fx.Node) -> str:
    """The path of the module that made a node, "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()][-1] if stack else ""


def path_of(scopes: Mapping[str, str]) -> str:
    """Return the path of the module that made an ONNX node, from the properties that torch's exporter sets."""
    names = ast.literal_eval(scopes.get(_SCOPES, "['', '']"))
    return str(names[-2])


def result_names(program: ExportedProgram, taken: Collection[str], *, has_state: bool = False) -> list[str]:
    """A name for each tensor of a model's result: its keys and fields, else "output", "output_1" and so on.

    Args:
        program: the traced model.
        taken: names that another tensor has.
        has_state: whether the program returns the result together with new values of buffers.
    """
    spec = program.call_spec.out_spec
    assert spec is not None
    found: dict[str, None] = {}
    for path in _paths(spec.children_specs[0] if has_state else spec):
        parts = path if path and isinstance(path[0], str) else ("output", *(path if path != (0,) else ()))
        name = wanted = "_".join(map(str, parts))
        count = 1
        while name in found or name in taken:
            count += 1
            name = f"{wanted}_{count}"
        found[name] = None
    results = [one.arg for one in program.graph_signature.output_specs if one.kind is OutputKind.USER_OUTPUT]
    return [name for name, one in zip(found, results, strict=False) if not isinstance(one, ConstantArgument)]


def _paths(spec: pytree.TreeSpec) -> Iterator[tuple[str | int, ...]]:
    """The path to each leaf: keys of a dict, fields of a named tuple or dataclass, else indices."""
    if spec.is_leaf():
        yield ()
        return
    is_mapping = isinstance(spec.type, type) and issubclass(spec.type, Mapping)
    fields = is_dataclass(spec.type) and not is_mapping
    names = spec.context[0] if fields else getattr(spec.context, "_fields", spec.context if is_mapping else ())
    for number, child in enumerate(spec.children_specs):
        key = names[number] if number < len(names) and isinstance(names[number], str) else number
        for path in _paths(child):
            yield (key, *path)


def to_onnx(
    program: ExportedProgram,
    opset: int,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str],
) -> ModelProto:
    """Convert the graph to ONNX, with a node `fakequant::FakeQuantize` for every quantizer.

    Raises:
        ExportError: torch does not write the opset, and the installed onnx lacks it or cannot convert to it.
    """
    with torch.no_grad(), _quiet(), library.translated_to_onnx():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=min(opset, LAST_OPSET),
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            custom_translation_table=_translations(),
            verbose=False,
        )
    assert converted is not None
    outputs = converted.model.graph.outputs
    inner = {name: f"{name}_inner" for name in output_names}
    for node in converted.model.graph.all_nodes():  # torch names values by their operations, such as `mean`
        for value in node.outputs:
            value.name = inner.get(value.name or "", value.name)
    for value, name in zip(outputs, output_names, strict=True):
        value.name = name
    model = converted.model_proto
    if opset <= LAST_OPSET:
        return model
    import onnx

    if opset > (newest := onnx.defs.onnx_opset_version()):
        raise ExportError(
            f"opset {opset} is needed, but the installed onnx {onnx.__version__} ends at {newest}; update onnx, or use "
            'style="portable"'
        )
    # The converter keeps names but drops the properties with the path of the module.
    made_by = {node.output[0]: list(node.metadata_props) for node in model.graph.node if node.domain == DOMAIN}
    try:
        converted = onnx.version_converter.convert_version(model, opset)
    except RuntimeError as error:
        raise ExportError(f"onnx cannot convert the model to opset {opset}: {error}; use another style") from error
    for node in converted.graph.node:
        if node.domain == DOMAIN:
            node.metadata_props.extend(made_by[node.output[0]])
    return converted


def _translations() -> dict[Any, Any]:
    """The functions by which torch's exporter translates the nodes of fakequant."""
    import onnx.defs
    from onnxscript import values

    formal, attribute = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute
    types, optional = onnx.defs.OpSchema.AttrType, onnx.defs.OpSchema.FormalParameterOption.Optional
    spec, floats = attribute("spec", types.STRING, ""), ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    schema = onnx.defs.OpSchema(
        OPERATOR,
        DOMAIN,
        1,
        inputs=[
            formal("x", "T"),
            formal("scale", "tensor(float)"),
            formal("zero_point", "Z", param_option=optional),
        ],
        outputs=[formal("y", "T")],
        type_constraints=[("T", floats, ""), ("Z", ["tensor(int32)", "tensor(float)"], "")],
        attributes=[spec, attribute("call", types.INT, "")],
    )
    operator = values.Op(values.Opset(DOMAIN, 1), OPERATOR, schema)
    schema = onnx.defs.OpSchema(
        SCALE_OPERATOR,
        DOMAIN,
        1,
        inputs=[formal("x", "T")],
        outputs=[formal("scale", "tensor(float)")],
        type_constraints=[("T", floats, "")],
        attributes=[spec],
    )
    scale_operator = values.Op(values.Opset(DOMAIN, 1), SCALE_OPERATOR, schema)
    calls = itertools.count()  # a unique number prevents the optimiser from merging equal quantizers

    def quantizer(x: Any, scale: Any, zero_point: Any, spec: str) -> Any:
        inputs = (x, scale) if zero_point is None else (x, scale, zero_point)
        return operator(*inputs, spec=spec, call=next(calls))

    def chosen_scale(x: Any, spec: str) -> Any:
        return scale_operator(x, spec=spec)

    return {TARGET: quantizer, SCALE_TARGET: chosen_scale, loops.TARGET: loops.translation()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the reports of torch's exporter, also the warning that two inputs share a dynamic axis."""
    with quiet("torch.onnx", "onnxscript"):
        warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
        yield
