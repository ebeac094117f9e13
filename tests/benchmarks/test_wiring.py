"""The benchmark of right and wrong files: its faults are real, and its places are those that a fault leads to."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from benchmarks import wiring


@pytest.mark.parametrize("name", ["towers", "lstm", "graph", "mixer", "gru_both"])
def test_right_files_pass_and_wrong_ones_are_refused(name: str) -> None:
    model, data, batches = wiring.exported(name, "int8", None, 0)
    assert wiring.verified(data, model, batches).passed
    made = 0
    for fault in wiring.FAULTS:
        if (found := wiring.wrong(data, fault, 0)) is None:
            continue
        made += 1
        report = wiring.verified(found[0], model, batches)
        unlike = [row.quantizer for row in report.rows if not row.exact]
        unlike += [span.name for span in report.spans if not span.fits]
        assert not report.passed, fault
        assert unlike[0] in found[1], fault
    assert made >= 2
