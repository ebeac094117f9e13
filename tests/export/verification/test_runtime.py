"""Looking at tensors inside a file that ONNX Runtime runs."""

from __future__ import annotations

import pytest
import torch

from fakequant.errors import VerificationError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


from fakequant.export.verification.verdict import Session  # noqa: E402
from tests.support.export_models import assert_tensors_are_seen, model_of  # noqa: E402


def test_inputs_inner_tensors_and_outputs_are_seen_and_the_model_stays() -> None:
    assert_tensors_are_seen(Session)


def test_what_does_not_load_or_run_is_an_error_with_its_message() -> None:
    with pytest.raises(VerificationError, match=r"ONNX Runtime cannot load it: .*NoSuchOperator"):
        Session(model_of("NoSuchOperator"))
    with pytest.raises(VerificationError, match="ONNX Runtime cannot load it: "):
        Session(model_of(), ["no_such_tensor"])
    with pytest.raises(VerificationError, match="ONNX Runtime cannot run it: "):
        Session(model_of()).run({"x": torch.zeros(3)})
