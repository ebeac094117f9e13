"""ONNX Runtime: run a file and look at any tensor inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import VerificationError

if TYPE_CHECKING:
    from onnx import ModelProto


NO_BFLOAT16 = "ONNX Runtime has no bfloat16 kernels on the CPU: export the model in float32, as by model.float()"


class Watch:
    """A model with outputs for tensors inside it, and what a runtime gives for them as tensors of torch.

    Args:
        model: the model; it is not changed.
        watched: tensors inside it whose values are wanted too.
    """

    def __init__(self, model: ModelProto, watched: Sequence[str]) -> None:
        self.outputs = [output.name for output in model.graph.output]
        self._types = element_types(model)
        known = {*self.outputs, *(value.name for value in model.graph.input)}
        self._watched = [name for name in dict.fromkeys(watched) if name not in known]
        self.names = [*self.outputs, *(self._alias(name) for name in self._watched)]
        self.model = self._with_outputs(model)

    def tensors(self, inputs: Mapping[str, Tensor], arrays: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Inputs, outputs and watched tensors by name, from arrays in the order of `names`."""
        pairs = zip([*self.outputs, *self._watched], arrays, strict=True)
        results = {name: torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)) for name, array in pairs}
        for name in self._watched:
            if self._is_bfloat16(name):
                results[name] = results[name].bfloat16()
        return {**dict(inputs), **results}

    def _is_bfloat16(self, name: str) -> bool:
        from onnx import TensorProto

        return self._types.get(name) == TensorProto.BFLOAT16

    def _alias(self, name: str) -> str:
        """numpy has no bfloat16: such a tensor is watched as float32, which holds all its values."""
        return f"{name}/float32" if self._is_bfloat16(name) else name

    def _with_outputs(self, model: ModelProto) -> ModelProto:
        from onnx import ModelProto, TensorProto, helper

        copy = ModelProto()
        copy.CopyFrom(model)
        for name in self._watched:
            kind = self._types.get(name, TensorProto.FLOAT)
            if self._is_bfloat16(name):
                kind = TensorProto.FLOAT
                copy.graph.node.append(helper.make_node("Cast", [name], [self._alias(name)], to=kind))
            copy.graph.output.append(helper.make_tensor_value_info(self._alias(name), kind, None))
        return copy


class Session:
    """An ONNX model in ONNX Runtime on the CPU.

    Args:
        model: the model; it is not changed.
        watched: tensors inside it whose values are wanted too.
        optimised: whether ONNX Runtime may change the graph, as it does by default.

    Raises:
        VerificationError: ONNX Runtime cannot load it; the message is its own.
    """

    def __init__(self, model: ModelProto, watched: Sequence[str] = (), *, optimised: bool = False) -> None:
        import onnxruntime
        from onnx import TensorProto

        self._watch = Watch(model, watched)
        self.outputs = self._watch.outputs
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
        options.log_severity_level = 4
        data = self._watch.model.SerializeToString()
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except _errors() as error:
            lacking = "NOT_IMPLEMENTED" in str(error) and TensorProto.BFLOAT16 in element_types(model).values()
            reason = NO_BFLOAT16 if lacking else first_line(error)
            raise VerificationError(f"ONNX Runtime cannot load it: {reason}") from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs, outputs and watched tensors by name.

        Raises:
            VerificationError: the inputs do not fit the model, or ONNX Runtime fails; the message is its own.
        """
        try:
            arrays = self._session.run(self._watch.names, as_arrays(inputs))
        except _errors() as error:
            raise VerificationError(f"ONNX Runtime cannot run it: {first_line(error)}") from error
        return self._watch.tensors(inputs, [np.asarray(array) for array in arrays])


def as_arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors for a runtime.

    Raises:
        VerificationError: one is bfloat16.
    """
    if any(value.dtype == torch.bfloat16 for value in inputs.values()):
        raise VerificationError(f"numpy has no bfloat16, and {NO_BFLOAT16}")
    return {name: value.detach().cpu().contiguous().numpy() for name, value in inputs.items()}


def element_types(model: ModelProto) -> dict[str, int]:
    """The element types of the values of a graph that are known, as in TensorProto."""
    graph = model.graph
    found = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    return {**found, **{tensor.name: tensor.data_type for tensor in graph.initializer}}


def _errors() -> tuple[type[Exception], ...]:
    """All that ONNX Runtime raises; its errors share no class of their own."""
    state = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    values: list[Any] = list(vars(state).values())
    own = [value for value in values if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, ValueError, RuntimeError)


def first_line(error: Exception) -> str:
    """The first line of an error's message: other libraries add pages of context."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
