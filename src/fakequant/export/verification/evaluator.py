"""onnx's ReferenceEvaluator, for files with types or operators that ONNX Runtime lacks.

It computes every node in numpy as the ONNX standard defines it. `operators` replaces definitions that were measured to
be wrong, and adds operators that are not in the standard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fakequant.errors import VerificationError
from fakequant.export.verification.runtime import Watch, as_arrays, first_line

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

# The errors of numpy and the evaluator for unknown nodes and for values that do not fit.
_ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError, LookupError, AssertionError)


class Evaluator:
    """An ONNX model in onnx's ReferenceEvaluator.

    Args:
        model: the model; it is not changed.
        watched: names of intermediate tensors to return.

    Raises:
        VerificationError: the evaluator does not know an operator.
    """

    def __init__(self, model: ModelProto, watched: Sequence[str] = ()) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        from fakequant.export.operators import OPERATORS

        self._watch = Watch(model, watched)
        self.outputs = self._watch.outputs
        self.name = f"the ReferenceEvaluator of onnx {onnx.__version__}"
        self._inputs = {value.name: value for value in model.graph.input}
        try:
            self._evaluator = ReferenceEvaluator(self._watch.model, new_ops=list(OPERATORS))
        except _ERRORS as error:
            raise VerificationError(f"{self.name} cannot load it: {first_line(error)}") from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the model and return its inputs, outputs and watched tensors by name.

        Raises:
            VerificationError: the inputs do not fit the model, or the evaluator fails, with its message.
        """
        arrays = as_arrays(inputs)
        for name, array in arrays.items():
            _check_input(self._inputs[name], array)
        try:
            # Overflow, inf and NaN are part of the test data.
            with np.errstate(all="ignore"):
                found = self._evaluator.run(self._watch.names, arrays)
        except _ERRORS as error:
            raise VerificationError(f"{self.name} cannot run it: {first_line(error)}") from error
        return self._watch.tensors(inputs, [np.asarray(value) for value in found])


def _check_input(declared: ValueInfoProto, array: np.ndarray) -> None:
    """Check the type and shape of an input, which the evaluator does not check."""
    from onnx import helper

    kind = declared.type.tensor_type
    expected = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
    expected = expected if kind.HasField("shape") else [None] * array.ndim
    fits = len(expected) == array.ndim and all(n in (None, m) for n, m in zip(expected, array.shape, strict=True))
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if not fits or array.dtype != dtype:
        shape = ["any" if n is None else n for n in expected]
        raise VerificationError(
            f"the input {declared.name} is {array.dtype} {list(array.shape)}, but the file takes {dtype} {shape}; pass "
            "batches of the same form as the example"
        )
