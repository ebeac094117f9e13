"""Convert a model to an ONNX graph in which every quantizer is one opaque node, `fakequant::FakeQuantize`.

A second node, `fakequant::ChooseScale`, computes scales from the range of the tensor. The nodes stay opaque while torch
and onnxscript convert and optimise the graph, so these steps cannot change the result of a quantizer. `lower` replaces
the nodes when all constants are known.
"""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx import traceback

from fakequant.errors import ExportError
from fakequant.export.capability import LAST_OPSET, Dimension
from fakequant.export.constants import fold_constants
from fakequant.export.nodes import loops
from fakequant.export.placement import check, place
from fakequant.export.style import Style
from fakequant.model.run.regions import inline_regions
from fakequant.model.run.tracing import quiet, traced_program
from fakequant.nn.paths import join, module_at
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import library
from fakequant.restore import forwards_of, restore_after
from fakequant.text import module_name

if TYPE_CHECKING:
    from onnx import ModelProto

DOMAIN = "fakequant"
OPERATOR = "FakeQuantize"
SCALE_OPERATOR = "ChooseScale"
_TARGET = torch.ops.fakequant.fake_quantize.default
_SCALE_TARGET = torch.ops.fakequant.choose_scale.default
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
    with torch.no_grad(), _quiet(), _marked(model):
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
    fold_constants(program, (_TARGET, _SCALE_TARGET))
    return program


@contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """A context in which the nodes of a trace have the paths of the quantizers that made them.

    The paths that torch finds are those by which Python got to a module: a plain list is in none.
    """
    found = {path: module for path, module in model.named_modules() if path and hasattr(type(module), "quantizes")}

    def run(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({DOMAIN: path}):
            return forward(*args, **kwargs)

    with restore_after(forwards_of(found.values())), traceback.preserve_node_meta():
        for path, module in found.items():
            vars(module)["forward"] = partial(run, path, module.forward)
        yield


def module_path(model: nn.Module, path: str) -> str:
    """Return the path of a module that torch names by an expression, as in `for layer in self.layers[1:]`.

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
    refused: list[str] = []
    inputs, graph = set(program.graph_signature.user_inputs), program.graph_module.graph
    moving = _depending(graph, lambda node: node.name in inputs)
    by_bits = _depending(graph, lambda node: node.target in _BITS)
    for module in program.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        nesting = 0
        for node in module.graph.nodes:
            nesting += _NESTING.get(getattr(node.target, "__name__", ""), 0)
            if node.target is torch.ops.higher_order.flex_attention:
                refused.append(f"{module_name(_path(node))}: {_NO_FLEX}")
            if node.target not in (_TARGET, loops.TARGET):
                continue
            try:
                if module is not program.graph_module:
                    raise ExportError(
                        "lies inside control flow (torch.cond or a loop) or torch.autocast, which cannot be exported"
                    )
                if nesting:
                    raise ExportError("lies inside torch.vmap, which cannot be exported; call the layer on the batch")
                found = _site(node, moving, by_bits, style) if node.target is _TARGET else _loop_site(node, style)
                quantizers += [] if found is None else [found]
            except ExportError as error:
                refused.append(f"{module_name(_path(node))}: {error}")
    if refused:
        raise ExportError("cannot be expressed in ONNX:\n" + "\n".join(dict.fromkeys(refused)))
    return quantizers


def _site(node: fx.Node, moving: Container[fx.Node], by_bits: Container[fx.Node], style: Style) -> TracedSite:
    x, scale, _, text = node.args[:4]
    assert isinstance(x, fx.Node)
    assert isinstance(scale, fx.Node)
    assert isinstance(text, str)
    spec = QuantSpec.parse(text)
    value = x.meta["val"]
    if value.dtype == torch.float64:
        raise ExportError("quantizes a float64 tensor, but QuantizeLinear takes float32; export model.float()")
    if spec.scale.format is not None and scale in by_bits:
        raise ExportError(
            f"{spec}: the model computes scales in {spec.scale.format} from the bits of numbers, which ONNX cannot "
            "read; call fake_quantize without scale and amax, so that it uses the range of its tensor, or pass a "
            "constant scale"
        )
    constant, static = x not in moving, scale not in moving
    check(spec, style, _shape(value), constant=constant, dynamic=not static)
    placement = place(spec, style, _shape(value), _shape(scale.meta["val"]))
    return TracedSite(_path(node), spec, placement.opset(constant=constant))


def _loop_site(node: fx.Node, style: Style) -> TracedSite | None:
    """The quantizer of the hidden state in a loop; None where it has none."""
    _, hidden, *_, scale, _, text, name = node.args[:9]
    if not isinstance(text, str) or not text:
        return None
    assert isinstance(hidden, fx.Node)
    spec, shape, is_dynamic = QuantSpec.parse(text), _shape(hidden.meta["val"]), scale is None
    check(spec, style, shape, constant=False, dynamic=is_dynamic)
    groups = [shape[0], *spec.granularity.group_shape((1, int(shape[-1])))[1:]]
    groups = _shape(scale.meta["val"]) if isinstance(scale, fx.Node) else groups
    placement = place(spec, style, shape, groups)
    return TracedSite(join(_path(node), str(name)), spec, placement.opset(constant=False))


def _depending(graph: fx.Graph, is_source: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The sources among the nodes of a graph, and all nodes that depend on one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:  # in the order of the program
        if is_source(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _shape(value: torch.Tensor) -> list[Dimension]:
    return [n if isinstance(n, int) else str(n) for n in value.shape]


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return [path for path, _ in stack.values()][-1] if stack else ""


def path_of(scopes: Mapping[str, str]) -> str:
    """Return the path of the module that made an ONNX node, from the properties that torch's exporter sets."""
    names = ast.literal_eval(scopes.get(_SCOPES, "['', '']"))
    return str(names[-2])


def to_onnx(
    program: ExportedProgram,
    opset: int,
    dynamic_shapes: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> ModelProto:
    """Convert the graph to ONNX, with a node `fakequant::FakeQuantize` for every quantizer."""
    with torch.no_grad(), _quiet(), library.translated_to_onnx():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=min(opset, LAST_OPSET),
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
            custom_translation_table={
                _TARGET: _translation(),
                _SCALE_TARGET: _scale_translation(),
                loops.TARGET: loops.translation(),
            },
            verbose=False,
        )
    assert converted is not None
    model = converted.model_proto
    return model if opset <= LAST_OPSET else _convert(model, opset)


def _convert(model: ModelProto, opset: int) -> ModelProto:
    """Convert the model to an opset that torch's exporter does not write, and keep the properties of fakequant's nodes.

    Raises:
        ExportError: the installed onnx lacks the opset, or cannot convert an operator to it.
    """
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


def _translation() -> Any:
    """Return the function that torch's exporter calls for every quantizer node."""
    import onnx.defs
    from onnxscript import values

    formal = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
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
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], ""),
            ("Z", ["tensor(int32)", "tensor(float)"], ""),
        ],
        attributes=[
            onnx.defs.OpSchema.Attribute("spec", onnx.defs.OpSchema.AttrType.STRING, ""),
            onnx.defs.OpSchema.Attribute("call", onnx.defs.OpSchema.AttrType.INT, ""),
        ],
    )
    operator = values.Op(values.Opset(DOMAIN, 1), OPERATOR, schema)

    # A unique number prevents the optimiser from merging equal quantizers.
    calls = itertools.count()

    def translate(x: Any, scale: Any, zero_point: Any, spec: str) -> Any:
        inputs = (x, scale) if zero_point is None else (x, scale, zero_point)
        return operator(*inputs, spec=spec, call=next(calls))

    return translate


def _scale_translation() -> Any:
    """Return the function that torch's exporter calls for every opaque computation of scales."""
    import onnx.defs
    from onnxscript import values

    schema = onnx.defs.OpSchema(
        SCALE_OPERATOR,
        DOMAIN,
        1,
        inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
        outputs=[onnx.defs.OpSchema.FormalParameter("scale", "tensor(float)")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[onnx.defs.OpSchema.Attribute("spec", onnx.defs.OpSchema.AttrType.STRING, "")],
    )
    operator = values.Op(values.Opset(DOMAIN, 1), SCALE_OPERATOR, schema)

    def translate(x: Any, spec: str) -> Any:
        return operator(x, spec=spec)

    return translate


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the reports of torch's exporter, also those of two inputs that share a dynamic axis."""
    with quiet("torch.onnx", "onnxscript"):
        warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
        yield
