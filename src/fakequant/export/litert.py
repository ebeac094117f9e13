"""Export a model as a file of LiteRT (TensorFlow Lite) with operators on int8, and run it.

Sources: litert-torch 0.10.0, whose converter turns operators between dequantize and quantize into integer operators if
a `QuantConfig` says that the graph is quantized; ai-edge-litert 2.3.0, which runs the file.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from fakequant.data.batches import Inputs
from fakequant.errors import ExportError
from fakequant.export.capability import require
from fakequant.export.engine_file import EngineFile, compared, counted, simulated, steps_of, tensors_in
from fakequant.export.pt2e import LoweringToInt8, lowered, refuse_early
from fakequant.files import check_path, writable_file, write_whole
from fakequant.model.run.tracing import quiet
from fakequant.nn.wrappers import accepts_wrapped_model
from fakequant.numerics.granularity import PerBlock, PerTensor
from fakequant.numerics.spec import QuantSpec

_CALL = "export_litert(model, example, 'model.tflite')"
_INSTALL = "litert-torch==0.10.0 litert-converter==0.5.0 ai-edge-litert==2.3.0 jax"
_ARGUMENT = re.compile(r"args_(\d+)")


@accepts_wrapped_model
def export_litert(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    inputs: Inputs | None = None,
    partial: bool = False,
) -> EngineFile:
    """Write a calibrated model as a file of LiteRT (.tflite), run it on the example, and compare the results.

    Inputs that the model quantizes first, and results that it quantizes last, are int8 in the file.

    Args:
        model: a prepared and calibrated model, with integers of 8 bits for inputs.
        example: an input, or a tuple of inputs; the file accepts only their shapes.
        path: the file to write; its folder is created if it does not exist.
        inputs: which part of the example the model gets, as for `calibrate`.
        partial: whether to write a file even if some operators compute on floats.

    Raises:
        ExportError: for the reasons of `export_pt2e`; some quantizers have not 8 bits; some operators, which are named,
            compute on floats; the results of the file differ from the model's; or the packages are not installed.
            Nothing is written.
        OutputError: the file cannot be written; raised before any work.

    >>> export_litert(nn.Linear(2, 2), "model.tflite", torch.ones(1, 2))
    Traceback (most recent call last):
    fakequant.errors.ExportError: a path is a text or a pathlib.Path, got ...
    """
    check_path(path, _CALL, ExportError)
    require("litert_torch", "ai_edge_litert", reader="LiteRT", install=_INSTALL)
    target = writable_file(path)
    program = lowered(model, example, inputs, call=_CALL, multiplies=False, operators=_ToLiteRT)
    if (program.example_inputs or ((), {}))[1]:
        raise ExportError("LiteRT takes positional arguments; give the example as a tensor or a tuple")
    expected, steps = simulated(model, program), steps_of(program)
    with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        litert: Any = import_module("litert_torch")
        configs: Any = import_module("litert_torch.quantize.quant_config")
        quantizers: Any = import_module("litert_torch.quantize.pt2e_quantizer")
        symmetric = quantizers.get_symmetric_quantization_config(is_per_channel=True)
        config = configs.QuantConfig(pt2e_quantizer=quantizers.PT2EQuantizer().set_global(symmetric))
        module = program.module()
        module.training = False  # eval() of torch's exported modules raises
        made = litert.convert(module, (program.example_inputs or ((), {}))[0], quant_config=config)
        with TemporaryDirectory() as folder:
            made.export(str(Path(folder, "model.tflite")))
            data = Path(folder, "model.tflite").read_bytes()
    schema: Any = import_module("ai_edge_litert.schema_py_generated")
    tables = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
    left = Counter[str]()
    for graph in tables.subgraphs:
        for operator in graph.operators:
            code = tables.operatorCodes[operator.opcodeIndex]
            name = names[max(code.builtinCode, code.deprecatedBuiltinCode)]
            read = [graph.tensors[place] for place in (*operator.inputs, *operator.outputs) if place >= 0]
            if name not in ("QUANTIZE", "DEQUANTIZE") and any(one.type == schema.TensorType.FLOAT32 for one in read):
                left[name] += 1
    if left and not partial:
        raise ExportError(
            f"LiteRT computes {counted(left)} on floats; prepare with target='litert', quantize their inputs, or "
            "pass partial=True to write the file nevertheless"
        )
    file = EngineFile(target, f"LiteRT {version('ai-edge-litert')} (XNNPACK)", len(data), dict(left))
    file = compared(file, expected, _run(data, program), steps)
    write_whole(target, data)
    return file


class _ToLiteRT(LoweringToInt8):
    """Lowers quantizers for LiteRT, where a weight is floats and a quantize node with scales per tensor or channel."""

    label = "LiteRT"
    float_weights = True

    @classmethod
    def why_not(cls, spec: QuantSpec, *, constant: bool) -> str | None:
        reason = super().why_not(spec, constant=constant)
        if constant and reason is None and isinstance(spec.granularity, PerBlock):
            return "weights have scales per tensor or channel, not per group; use per_channel"
        return reason or (cls.why_not_codes(spec) if isinstance(spec.granularity, PerTensor) else None)


def _run(data: bytes, program: ExportedProgram) -> list[Any]:
    runtime: Any = import_module("ai_edge_litert.interpreter")
    with contextlib.redirect_stderr(io.StringIO()):
        interpreter = runtime.Interpreter(model_content=data, num_threads=1)
        interpreter.allocate_tensors()
    values = tensors_in(program.example_inputs)
    places = interpreter.get_input_details()
    if len(places) > 1:
        places = sorted(places, key=lambda one: int((_ARGUMENT.search(one["name"]) or [0, 0])[1]))
    if len(places) != len(values):
        raise ExportError(f"LiteRT keeps {len(places)} of {len(values)} inputs; leave out inputs that no result needs")
    for place, value in zip(places, values, strict=True):
        x, (scale, point) = value.numpy(), place["quantization"]
        if place["dtype"] is np.int8 and x.dtype != np.int8:
            x = np.clip(np.rint(x / np.float32(scale)) + point, -128, 127).astype(np.int8)
        interpreter.set_tensor(place["index"], x)
    interpreter.invoke()
    results = []
    for place in interpreter.get_output_details():
        codes, (scale, point) = interpreter.get_tensor(place["index"]), place["quantization"]
        is_code = codes.dtype == np.int8
        results.append((codes.astype(np.float32) - point) * np.float32(scale) if is_code else codes.copy())
    return [torch.from_numpy(one) for one in results]


refuse_early("export_litert", _ToLiteRT)
