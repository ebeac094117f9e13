"""Export a model as a package of Core AI for iOS 27 and macOS 27, and run it.

Sources: coreai-torch 0.4.3, whose operators in torch its converter reads; coreai-core 1.0.0b3, which runs packages.

* A weight is `constexpr_blockwise_shift_scale` of its codes q: (q - z) * s, q * s + offset, or for a float its value
  times s. Other formats are indices into a table of their values (`lut_to_dense`), times scales.
* An activation is `quantize` and `dequantize`: clamp(rint(x / s) + z), `Arithmetic.DIVIDE`, and (q - z) * s.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from fakequant.data.batches import Inputs
from fakequant.errors import ExportError
from fakequant.export.capability import block_sizes, layout, require
from fakequant.export.engine_file import EngineFile, compared, new_package, simulated
from fakequant.export.pt2e import Lowering, lowered, refuse_early
from fakequant.export.trace import scope_of
from fakequant.files import check_path
from fakequant.model.run.tracing import quiet
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.formats import FLOAT4_E2M1FN, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT8_E8M0FNU, IntegerFormat
from fakequant.numerics.formats.floats import count_of, integers_of, of_integers, patterns_of
from fakequant.numerics.qparams import QParams
from fakequant.numerics.spec import Arithmetic, QuantSpec, Rounding
from fakequant.ops import library
from fakequant.text import listed

_CALL = "export_coreai(model, example, 'model.aimodel')"
_FLOATS = FLOAT8_E4M3FN, FLOAT8_E5M2
_STATIC = "use a static range such as INT8 and calibrate, or weights alone as in INT8_WEIGHT_ONLY"
_ACTIVATIONS = IntegerFormat.of(8), IntegerFormat.of(8, signed=False), *_FLOATS


@accepts_wrapped_model
def export_coreai(
    model: nn.Module, example: Any, path: str | os.PathLike[str], *, inputs: Inputs | None = None
) -> EngineFile:
    """Write a calibrated model as a package of Core AI (.aimodel), run it on the example, and compare the results.

    Weights are stored as the codes of the model, in any format of at most 8 bits.

    Args:
        model: a prepared and calibrated model, with integers or FP8 of 8 bits for inputs, or inputs in float.
        example: an input, a tuple of inputs, or a dict of keyword arguments; the package accepts only their shapes.
        path: the package to write, a new folder.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ExportError: for the reasons of `export_pt2e`; Core AI cannot express some quantizers, which are named; its
            converter refuses the model; the results of the package differ from the model's; or the Python packages of
            Core AI are not installed. Nothing is written.
        OutputError: the path exists already, or it cannot be written; raised before any work.

    >>> export_coreai(nn.Linear(2, 2), "model.aimodel", torch.ones(1, 2))
    Traceback (most recent call last):
    fakequant.errors.ExportError: a path is a text or a pathlib.Path, got ...
    """
    check_path(path, _CALL, ExportError)
    require("coreai_torch", "coreai", reader="Core AI", install="coreai-core==1.0.0b3 coreai-torch==0.4.3")
    target = new_package(path, "Core AI", ".aimodel")
    program = lowered(model, example, inputs, call=_CALL, multiplies=False, operators=_ToCoreAI)
    program = program.run_decompositions(import_module("coreai_torch").get_decomp_table())
    signature = program.graph_signature
    if written := {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}:
        names = listed(sorted(map(str, written.values())))
        raise ExportError(f"forward writes {names}, and the package is run without states; return such values instead")
    if any(getattr(node.meta.get("val"), "dtype", None) is torch.float64 for node in program.graph.nodes):
        raise ExportError("Core AI computes in float32 and half precision, but the model in float64; use model.float()")
    if others := [one for one in signature.user_outputs if not isinstance(one, str)]:
        raise ExportError(f"forward returns {listed(map(repr, others))} beside tensors; return only tensors")
    expected = simulated(model, program)
    with TemporaryDirectory(dir=target.parent) as folder:
        written = Path(folder, target.name)
        results = _converted_and_run(program, written)
        size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        file = EngineFile(target, f"Core AI {version('coreai-core')}", size)
        file = compared(file, expected, results, [None] * len(expected))
        written.rename(target)
    return file


class _ToCoreAI(Lowering):
    """Replaces the quantizers of a traced graph by operators of coreai-torch, in place."""

    label = "operators of Core AI"
    package = "coreai_torch._compression.custom_layers"
    namespace = "coreai"

    @classmethod
    def why_not(cls, spec: QuantSpec, *, constant: bool) -> str | None:
        fmt = spec.format
        if spec.rounding is Rounding.STOCHASTIC:
            return (
                "Core AI rounds to nearest; set quantizer.spec = quantizer.spec.replace(rounding=Rounding.NEAREST_EVEN)"
            )
        if constant:
            if spec.arithmetic not in (Arithmetic.DIVIDE, Arithmetic.RECIPROCAL):
                return f"Core AI decodes by one scale, which {spec.arithmetic} does not; use DIVIDE"
            return None if fmt.bits <= 8 else f"Core AI has weights of at most 8 bits; use INT8_WEIGHT_ONLY, not {fmt}"
        if fmt not in _ACTIVATIONS or spec.offset is not None:
            return "Core AI has int8, uint8, float8_e4m3fn and float8_e5m2 for activations; use INT8 or FP8"
        if spec.arithmetic is not Arithmetic.DIVIDE:
            return "Core AI divides by the scale; use Arithmetic.DIVIDE, or prepare with target='coreai'"
        return None

    @classmethod
    def why_not_dynamic(cls, spec: QuantSpec) -> str | None:
        return f"Core AI has constants; {_STATIC}"

    def _weight(self, node: fx.Node, spec: QuantSpec, params: QParams, weight: Tensor) -> fx.Node:
        """The node that dequantizes the codes of a weight."""
        if weight.isnan().any():
            raise ExportError("the weight holds NaN, which has no code; repair the weight")
        codes = self._codes.get(scope_of(node))
        codes = library.quantize(weight, params, spec) if codes is None else codes
        blocks = block_sizes(spec.granularity, tuple(weight.shape))
        groups = [n // int(size) if n else 1 for n, size in zip(weight.shape, blocks, strict=True)]
        if any(count * int(size) != n for count, size, n in zip(groups, blocks, weight.shape, strict=True)):
            raise ExportError(
                f"{spec}: Core AI has groups of equal length, and the tensor is {list(weight.shape)}; use per_channel, "
                "or groups whose length divides the sizes of the tensor"
            )
        scale = params.scale.detach().float().cpu().expand(groups).contiguous()
        point = params.zero_point
        point = None if point is None else point.detach().cpu().expand(groups)
        codes, fmt, zero_point, offset, stored = codes.cpu(), spec.format, None, None, None
        with node.graph.inserting_before(node):
            if isinstance(fmt, IntegerFormat):
                bits = next(bits for bits in (2, 4, 8) if bits >= fmt.bits)
                stored = getattr(torch, f"{'' if fmt.signed else 'u'}int{bits}")
                dtype = torch.int8 if fmt.signed else torch.uint8
                held = self._constant("", "coreai_codes", codes.to(dtype), node)
                if spec.offset is not None and point is not None:
                    offset = self._constant("", "coreai_offsets", -point.float(), node)
                elif point is not None:
                    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if fmt.signed else (0, (1 << bits) - 1)
                    if bool(((point < low) | (point > high)).any()):
                        raise ExportError(f"{spec}: Core AI has zero points from {low} to {high}; calibrate it again")
                    zero_point = self._constant("", "coreai_zero_points", point.to(dtype), node)
            elif fmt in _FLOATS:
                held = self._constant("", "coreai_codes", codes.view(fmt.storage), node)
            elif fmt == FLOAT4_E2M1FN and spec.scale.format == FLOAT8_E8M0FNU and codes.shape[-1] % 2 == 0:
                patterns = patterns_of(codes, fmt).to(torch.uint8)
                held = self._constant("", "coreai_codes", patterns[..., ::2] | patterns[..., 1::2] << 4, node)
                scale = scale.to(torch.float8_e8m0fnu)
            else:
                count = count_of(fmt)
                size = next(1 << bits for bits in (1, 2, 3, 4, 6, 8) if 1 << bits >= count)
                patterns = of_integers(torch.arange(count, device="cpu").to(integers_of(fmt)), fmt)
                values = torch.zeros(size, device="cpu")
                values[:count] = fmt.from_storage(patterns, torch.float32).nan_to_num(0.0, 0.0, 0.0)
                places = self._constant("", "coreai_indices", patterns_of(codes, fmt).to(torch.uint8), node)
                table = self._constant("", "coreai_lut", values.reshape(*[1] * codes.dim(), size, 1), node)
                held = self._call(node, self._ops.lut_to_dense.default, places, table, 0)
            scales = self._constant("", "coreai_scales", scale, node)
            dtype = None if stored is not None else torch.float32
            target = self._ops.constexpr_blockwise_shift_scale.default
            y = self._call(node, target, held, scales, zero_point, offset, stored, dtype)
            return self._as(node, y, node.meta["val"].dtype)

    def _activation(self, node: fx.Node, spec: QuantSpec, params: QParams) -> fx.Node:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        shape = tuple(n if isinstance(n, int) else str(n) for n in x.meta["val"].shape)
        where = layout(shape, tuple(params.scale.shape), block_sizes(spec.granularity, shape))
        if where.block_size:
            raise ExportError(f"{spec}: Core AI has no groups of activations; use per_tensor")
        sizes = () if where.axis is None else (-1,)
        scale = params.scale.detach().float().cpu().reshape(sizes).contiguous()
        point, dtype = params.zero_point, spec.format.storage
        point = None if point is None else point.detach().cpu().reshape(sizes).to(dtype)
        bits = [None if one is None else one.numpy().tobytes() for one in (scale, point)]
        key = x, spec.format, where, *bits
        with node.graph.inserting_before(node):
            if key not in self._quantized:
                axis, read = where.axis or 0, self._as(node, x, torch.float32)
                scales = self._constant("", "coreai_scales", scale, node)
                zero = None if point is None else self._constant("", "coreai_zero_points", point, node)
                codes = self._call(node, self._ops.quantize.default, read, scales, dtype, zero, None, axis)
                codes_in, values_in = (None, torch.float32) if dtype.is_floating_point else (dtype, None)
                target = self._ops.dequantize.default
                values = self._call(node, target, codes, scales, zero, None, axis, codes_in, values_in)
                self._quantized[key] = self._as(node, values, node.meta["val"].dtype)
            return self._quantized[key]

    def _as(self, node: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype is dtype else self._call(node, torch.ops.aten.to.dtype, x, dtype)

    def _finish(self) -> None:
        """Do nothing: Core AI chooses its kernels itself."""


def _converted_and_run(program: ExportedProgram, path: Path) -> list[Tensor]:
    """Write the package, and return its results for the example."""
    tools: Any = import_module("coreai_torch")
    signature = program.graph_signature
    given = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    leaves = pytree.tree_leaves(program.example_inputs)
    values = {spec.arg.name: x for spec, x in zip(given, leaves, strict=True) if isinstance(x, Tensor)}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in given:  # the converter knows no other arguments than tensors; torch.export has written these in
        if spec.arg.name not in values:
            program.graph.erase_node(placeholders[spec.arg.name])
            signature.input_specs.remove(spec)
    outputs = pytree.tree_leaves(program.graph.output_node().args[0])
    names = {node: f"output_{place}" for place, node in enumerate(outputs)}
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet("coreai"), warnings.catch_warnings(), silent[0], silent[1]:
        warnings.simplefilter("ignore")
        try:
            staged = tools.TorchConverter().add_exported_program(
                program, input_names=list(values), output_names=list(names.values())
            )
            staged.to_coreai().save_asset(path)
            with ThreadPoolExecutor(1) as thread:  # notebooks have a loop in this one
                found = thread.submit(asyncio.run, _results(path, values)).result()
        except (RuntimeError, ValueError, NotImplementedError, TypeError, LookupError, AttributeError) as error:
            raise ExportError(f"Core AI refuses the model, so nothing was written: {error}") from error
    return [found[names[node]].to(node.meta["val"].dtype) for node in outputs]


async def _results(path: Path, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    authoring: Any = import_module("coreai.authoring")
    runtime: Any = import_module("coreai.runtime")
    types: Any = import_module("ml_dtypes")
    arrays = {}
    for name, x in values.items():
        own = x.detach().cpu().contiguous()
        own = own.to(torch.int32) if own.dtype is torch.int64 else own  # as the converter takes them
        is_half = own.dtype is torch.bfloat16
        array = own.view(torch.int16).numpy().view(types.bfloat16) if is_half else own.numpy()
        arrays[name] = runtime.NDArray(array)
    # `AIModel.load` raises on Linux.
    async with authoring.AIModelAsset.load(path).executable() as loaded:
        found = await loaded.load_function("main")(arrays)
        results = {name: one.numpy().copy() for name, one in found.items()}
    halves = {name for name, one in results.items() if one.dtype == types.bfloat16}
    tensors = {name: torch.from_numpy(one.view("int16") if name in halves else one) for name, one in results.items()}
    return {name: x.view(torch.bfloat16) if name in halves else x for name, x in tensors.items()}


refuse_early("export_coreai", _ToCoreAI)
