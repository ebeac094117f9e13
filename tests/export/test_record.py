"""The record in the file's metadata comes back as it was written."""

from __future__ import annotations

import pytest

from fakequant.errors import VerificationError

onnx = pytest.importorskip("onnx")

from fakequant.export.capability import (  # noqa: E402
    FileRecord,
    InputRecord,
    Parameters,
    SiteRecord,
    Style,
    digest,
    read,
    write,
)

SITE = SiteRecord(
    quantizer="a.b",
    spec="int8 per_tensor",
    expressed="words",
    x="x",
    y="y",
    parameters=Parameters.DYNAMIC,
    scale="s",
    zero_point=None,
    codes=None,
    groups=[1, 1],
    repeats=[],
    constants=["c"],
    digest="0",
)
RECORD = FileRecord("0.1.0", Style.STANDARD, [SITE], [InputRecord("x", [2, 3], "float32", -1.0, 1.0, "key")])


def test_round_trip_and_other_metadata_goes() -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key="other", value="x")
    write(model, RECORD)
    assert read(model) == RECORD
    assert [entry.key for entry in model.metadata_props] == ["fakequant"]


DAMAGED = [
    *("[]", "{", '{"layout": 1}', "null"),
    '{"layout": 1, "version": "", "style": "trt", "sites": [{}]}',
    '{"layout": 1, "version": "", "style": "no style", "sites": [], "inputs": []}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_record(text: str) -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key="fakequant", value=text)
    with pytest.raises(VerificationError, match="its record of quantizers is damaged"):
        read(model)


def test_digest_sees_contents_shape_and_type() -> None:
    import numpy as np

    arrays = [np.zeros(4, np.int8), np.zeros((2, 2), np.int8), np.zeros(4, np.uint8), np.ones(4, np.int8)]
    found = {digest([onnx.numpy_helper.from_array(array)]) for array in arrays}
    assert len(found) == 4
    assert digest([onnx.numpy_helper.from_array(np.zeros(4, np.int8), "another name")]) in found
