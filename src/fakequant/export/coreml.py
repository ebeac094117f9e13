"""Export a model as a package of Core ML for iOS 18 and macOS 15, and compare its weights; only a Mac can run it.

Source: coremltools 9.0: `constexpr_blockwise_shift_scale` for weights, `quantize` and `dequantize` for activations.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn

from fakequant.data.batches import Inputs
from fakequant.errors import ExportError
from fakequant.export.capability import require
from fakequant.export.engine_file import EngineFile, new_package
from fakequant.export.pt2e import LoweringToInt8, lowered, refuse_early
from fakequant.files import check_path
from fakequant.model.run.tracing import quiet
from fakequant.nn.wrappers import accepts_wrapped_model

_CALL = "export_coreml(model, example, 'model.mlpackage')"
_GROUP = "quantized_decomposed.dequantize_per_channel_group.default"


@accepts_wrapped_model
def export_coreml(
    model: nn.Module, example: Any, path: str | os.PathLike[str], *, inputs: Inputs | None = None
) -> EngineFile:
    """Write a calibrated model as a package of Core ML (.mlpackage), and compare every element of its weights.

    Args:
        model: a prepared and calibrated model: weights of 4 or 8 bits, and inputs of 8 bits or in float.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: the package to write, a new folder.
        inputs: which part of the example the model gets, as for `calibrate`.

    Raises:
        ExportError: for the reasons of `export_pt2e`; Core ML cannot express some quantizers; weights differ in the
            package; or coremltools is not installed. Nothing is written.
        OutputError: the path exists already, or it cannot be written; raised before any work.

    >>> export_coreml(nn.Linear(2, 2), "model.mlpackage", torch.ones(1, 2))
    Traceback (most recent call last):
    fakequant.errors.ExportError: a path is a text or a pathlib.Path, got ...
    """
    check_path(path, _CALL, ExportError)
    require("coremltools", reader="Core ML", install="coremltools==9.0")
    target = new_package(path, "Core ML", ".mlpackage")
    program = lowered(model, example, inputs, call=_CALL, multiplies=False, operators=_ToCoreML)
    if nodes := [node for node in program.graph.nodes if str(node.target) == _GROUP]:
        # coremltools reads groups of weights as torchao's operator
        require("torchao", reader="Core ML with groups of weights", install="'torchao>=0.18,<0.19'")
        import_module("torchao.quantization.quant_primitives")  # registers the operator
        ops: Any = torch.ops.torchao
        for node in nodes:
            codes, scales, points, low, high, dtype, size, _ = node.args
            node.target = ops.dequantize_affine.default
            node.args = codes, [1, size], scales, points, dtype, low, high
        program.graph_module.recompile()
    program = program.run_decompositions({})
    with quiet("coremltools"), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        tools: Any = import_module("coremltools")
        made = tools.convert(
            program,
            minimum_deployment_target=tools.target.iOS18,
            compute_precision=tools.precision.FLOAT32,
            skip_model_load=True,
        )
        function = next(iter(made._mil_program.functions.values()))
        found = {one.name: one for one in function.operations if one.op_type.startswith("constexpr")}
        specs = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
        expected = dict[str, Tensor]()  # the values of quantized weights by the names of their nodes
        for node in program.graph.nodes:
            is_weight = all(one.name in specs and one.op == "placeholder" for one in node.all_input_nodes)
            if "dequantize" in str(node.target) and is_weight:
                args = fx.map_arg(node.args, lambda one: program.state_dict[specs[one.name]])
                expected[node.name] = node.target(*args)
        for name, value in expected.items():
            if name not in found:
                raise ExportError(f"the Core ML package has no integers for the weight {name}; report a bug")
            theirs = torch.as_tensor(found[name].materialized_val_inference())
            if differing := int((theirs != value).sum()) if theirs.shape == value.shape else value.numel():
                raise ExportError(
                    f"in the Core ML package, {differing:,} elements of the weight {name} differ from the values of "
                    "the simulation, so nothing was written; report a bug"
                )
        with TemporaryDirectory(dir=target.parent) as folder:
            made.save(str(Path(folder, target.name)))
            Path(folder, target.name).rename(target)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    note = (
        f"every element of {len(expected)} weights has the value of the simulation; "
        "results were not compared, because Core ML runs on a Mac alone"
    )
    return EngineFile(target, f"Core ML by coremltools {version('coremltools')}", size, notes=(note,))


class _ToCoreML(LoweringToInt8):
    """Lowers quantizers for Core ML, which has int8 codes of activations and static ranges."""

    label = "Core ML"


refuse_early("export_coreml", _ToCoreML)
