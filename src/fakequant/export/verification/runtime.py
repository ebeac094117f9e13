"""Run a file in ONNX Runtime and read any tensor inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fakequant.errors import VerificationError

if TYPE_CHECKING:
    from onnx import ModelProto


NO_BFLOAT16 = "ONNX Runtime has no bfloat16 kernels on the CPU: export the model in float32, as by model.float()"


class Watch:
    """A copy of a model with extra outputs for intermediate tensors, and the conversion of its results to torch.

    Args:
        model: the model; it is not changed.
        watched: names of intermediate tensors to return.
    """

    def __init__(self, model: ModelProto, watched: Sequence[str]) -> None:
        self.outputs = [output.name for output in model.graph.output]
        self._types = element_types(model)
        known = {*self.outputs, *(value.name for value in model.graph.input)}
        self._watched = [name for name in dict.fromkeys(watched) if name not in known]
        self.names = [*self.outputs, *(self._alias(name) for name in self._watched)]
        self.model = self._with_outputs(model)

    def tensors(self, inputs: Mapping[str, Tensor], arrays: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return inputs, outputs and watched tensors by name, from arrays in the order of `names`."""
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
        """Return the name of the output; a bfloat16 tensor is read as float32, because numpy has no bfloat16."""
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


class SessionOptions(NamedTuple):
    """Settings of a session: as text to paste, disabled optimizers, entries, and whether graphs are optimised."""

    text: str
    disabled: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    optimised: bool = True


DEFAULT = SessionOptions("SessionOptions()")
WITHOUT_OPTIMISATIONS = SessionOptions(
    "SessionOptions.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL", optimised=False
)


class Session:
    """An ONNX model in ONNX Runtime on the CPU.

    Args:
        model: the model; it is not changed.
        watched: names of intermediate tensors to return.
        chosen: the settings.

    Raises:
        VerificationError: ONNX Runtime cannot load the model, with its message.
    """

    def __init__(
        self, model: ModelProto, watched: Sequence[str] = (), chosen: SessionOptions = WITHOUT_OPTIMISATIONS
    ) -> None:
        import onnxruntime
        from onnx import TensorProto

        self._watch = Watch(model, watched)
        self.outputs = self._watch.outputs
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if chosen.optimised else levels.ORT_DISABLE_ALL
        for key, value in chosen.entries:
            options.add_session_config_entry(key, value)
        options.log_severity_level = 4
        data = self._watch.model.SerializeToString()
        try:
            self._session = onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(chosen.disabled)
            )
        except _errors() as error:
            lacking = "NOT_IMPLEMENTED" in str(error) and TensorProto.BFLOAT16 in element_types(model).values()
            reason = NO_BFLOAT16 if lacking else first_line(error)
            raise VerificationError(f"ONNX Runtime cannot load it: {reason}") from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model and return its inputs, outputs and watched tensors by name.

        Raises:
            VerificationError: the inputs do not fit the model, or ONNX Runtime fails, with its message.
        """
        try:
            arrays = self._session.run(self._watch.names, as_arrays(inputs))
        except _errors() as error:
            raise VerificationError(f"ONNX Runtime cannot run it: {first_line(error)}") from error
        return self._watch.tensors(inputs, [np.asarray(array) for array in arrays])


def as_arrays(inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Convert tensors to numpy arrays.

    Raises:
        VerificationError: a tensor is bfloat16.
    """
    if any(value.dtype == torch.bfloat16 for value in inputs.values()):
        raise VerificationError(f"numpy has no bfloat16, and {NO_BFLOAT16}")
    return {name: value.detach().cpu().contiguous().numpy() for name, value in inputs.items()}


def element_types(model: ModelProto) -> dict[str, int]:
    """Return the known element types of a graph's values by name, as in TensorProto."""
    graph = model.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return {**types, **{tensor.name: tensor.data_type for tensor in graph.initializer}}


def _errors() -> tuple[type[Exception], ...]:
    """Return the error classes of ONNX Runtime, which have no common base class."""
    state = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    values: list[Any] = list(vars(state).values())
    own = [value for value in values if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, ValueError, RuntimeError)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; other libraries append pages of context."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
