"""Export a model as a program of ExecuTorch for phones, and run it.

Source: ExecuTorch 1.5.1. XNNPACK computes products of int8 with sums of int32 and rescales them in float32; weights of
4 bits have scales in bfloat16 for every group.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from fakequant.data.batches import Inputs
from fakequant.errors import ExportError, nearest
from fakequant.export.capability import require
from fakequant.export.engine_file import EngineFile, compared, counted, simulated, steps_of, tensors_in
from fakequant.export.pt2e import Lowering, lowered, refuse_early
from fakequant.files import check_path, writable_file, write_whole
from fakequant.model.run.tracing import quiet
from fakequant.nn.wrappers import accepts_wrapped_model

_CALL = "export_executorch(model, example, 'model.pte')"
_BACKENDS = ("xnnpack", "portable")
_GROUP = "quantized_decomposed.dequantize_per_channel_group.default"


@accepts_wrapped_model
def export_executorch(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    inputs: Inputs | None = None,
    dynamic_shapes: Any = None,
    backend: str = "xnnpack",
    partial: bool = False,
) -> EngineFile:
    """Write a calibrated model as a program of ExecuTorch (.pte), run it on the example, and compare the results.

    Args:
        model: a prepared and calibrated model.
        example: an input, a tuple of inputs, or a dict of keyword arguments.
        path: the file to write; its folder is created if it does not exist.
        inputs: which part of the example the model gets, as for `calibrate`.
        dynamic_shapes: as for `torch.export.export`, for example ({0: Dim("batch", max=8)},); the file runs with
            lengths up to the largest.
        backend: "xnnpack" for the processors of phones, or "portable" for ExecuTorch's own kernels, which are slow.
        partial: whether to write a file even if portable kernels compute some operators instead of XNNPACK.

    Raises:
        ExportError: for the reasons of `export_pt2e`; XNNPACK does not compute some operators, which are named; the
            program's results differ from the model's; or executorch is not installed. Nothing is written.
        OutputError: the file cannot be written; raised before any work.

    >>> model = prepare(nn.Sequential(nn.Linear(64, 32)), "W4A8_EXECUTORCH")
    >>> export_executorch(model, torch.ones(1, 64), "model.pte", backend="vulkan")
    Traceback (most recent call last):
    fakequant.errors.ExportError: unknown backend 'vulkan'; ...
    """
    if backend not in _BACKENDS:
        raise ExportError(f"unknown backend {backend!r:.40}{nearest(str(backend), list(_BACKENDS))}")
    check_path(path, _CALL, ExportError)
    require("executorch", "torchao", reader="ExecuTorch", install="executorch==1.5.1")
    target = writable_file(path)
    program = lowered(model, example, inputs, dynamic_shapes, call=_CALL)
    expected, steps = simulated(model, program), steps_of(program)
    if backend == "xnnpack":
        specs = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
        named = [specs[node.args[1].name] for node in program.graph.nodes if str(node.target) == _GROUP]
        scales = {str(name): program.state_dict[str(name)] for name in named}
        if lost := [name for name, scale in scales.items() if not torch.equal(scale.bfloat16().float(), scale)]:
            raise ExportError(
                f"XNNPACK rounds scales of groups to bfloat16, but the scales of {len(lost)} weights ({lost[0]}) are "
                "float32; prepare with W4A8_EXECUTORCH, or scale=bfloat16 in the specification"
            )
    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        stack.enter_context(quiet())
        data, left = _compiled(program, backend)
        if left and backend == "xnnpack" and not partial:
            raise ExportError(
                f"XNNPACK leaves {counted(left)} to other kernels; prepare with target='executorch', quantize their "
                "inputs, or pass partial=True to write the file nevertheless"
            )
        runtime: Any = import_module("executorch.runtime")
        method = runtime.Runtime.get().load_program(data).load_method("forward")
        results = method.execute([x.contiguous() for x in tensors_in(program.example_inputs)])
    file = EngineFile(target, f"ExecuTorch {version('executorch')} ({backend})", len(data), left)
    file = compared(file, expected, results, steps)
    write_whole(target, data)
    return file


def _compiled(program: ExportedProgram, backend: str) -> tuple[bytes, dict[str, int]]:
    """The bytes of the program, and the operators that the backend leaves to other kernels, with counts."""
    exir: Any = import_module("executorch.exir")
    import_module("executorch.kernels.quantized")  # registers the kernels outside of XNNPACK
    parts = []
    if backend == "xnnpack":
        partitioner: Any = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        parts = [partitioner.XnnpackPartitioner()]
    config = exir.EdgeCompileConfig(_check_ir_validity=False)
    edge = exir.to_edge_transform_and_lower(program, partitioner=parts, compile_config=config)
    targets = [node.target for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    schemas = [getattr(target, "_schema", None) for target in targets]
    names = [
        str(getattr(schema, "name", "") or getattr(target, "__name__", target)).replace("::", ".")
        for schema, target in zip(schemas, targets, strict=True)
    ]
    left = Counter(name for name in names if name not in ("getitem", "executorch_call_delegate"))
    try:
        return bytes(edge.to_executorch().buffer), dict(left) if parts else {}
    except RuntimeError as error:
        if "out variant" not in str(error).lower():
            raise
        raise ExportError(
            f"ExecuTorch's portable kernels lack operators of the model: {str(error)[-300:]}; use backend='xnnpack' "
            "with target='executorch'"
        ) from error


refuse_early("export_executorch", Lowering)
