"""The evaluator sees inner tensors, refuses inputs that do not fit, and names what it cannot run."""

from __future__ import annotations

import pytest
import torch

from fakequant.errors import VerificationError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fakequant.export.verification.verify import Evaluator  # noqa: E402
from tests.support.export_models import assert_tensors_are_seen, model_of  # noqa: E402


def test_inputs_inner_tensors_and_outputs_are_seen_and_the_model_stays() -> None:
    assert_tensors_are_seen(Evaluator)


def test_what_does_not_load_or_run_is_an_error() -> None:
    with pytest.raises(VerificationError, match=r"ReferenceEvaluator of onnx .* cannot load it: .*NoSuchOperator"):
        Evaluator(model_of("NoSuchOperator"))
    with pytest.raises(VerificationError, match=r"cannot run it: .*no_such_tensor"):
        Evaluator(model_of(), ["no_such_tensor"]).run({"x": torch.zeros(2)})


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(2).double(), torch.zeros(2, 1)], ids=str)
def test_inputs_that_do_not_fit_are_an_error(x: torch.Tensor) -> None:
    with pytest.raises(VerificationError, match=r"the input x is float\d\d \[.*but the file takes float32 \[2\]"):
        Evaluator(model_of()).run({"x": x})
