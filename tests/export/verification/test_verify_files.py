"""Verification of damaged, foreign and crafted files: an error, or a report that is not exact."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fakequant.errors import VerificationError
from tests.hostile.record_mutations import record_mutations

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fakequant.export import verify_onnx  # noqa: E402
from tests.support.export_files import INPUT, WEIGHT, batch, constant, exported, rewrite, two_layers  # noqa: E402


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m.onnx").write_bytes(exported())
    return tmp_path / "m.onnx"


def _foreign() -> bytes:
    make = onnx.helper
    value = [make.make_tensor_value_info(name, 1, [2]) for name in ("x", "y")]
    graph = make.make_graph([make.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    return make.make_model(graph, ir_version=10).SerializeToString()


FILES = {
    "not_onnx": (lambda data: b"this is no model", "is not an ONNX file, or is truncated"),
    "empty": (lambda data: b"", "not written by fakequant.export_onnx"),
    "of_another_tool": (lambda data: _foreign(), "not written by fakequant.export_onnx"),
    "half": (lambda data: data[: len(data) // 2], "is not an ONNX file, or is truncated"),
    "one_byte_short": (lambda data: data[:-1], "is not an ONNX file, or is truncated"),
    "damaged_record": (lambda data: data.replace(b'{"layout"', b'["layout"'), "its record of quantizers is damaged"),
    "newer_record": (lambda data: data.replace(b'{"layout": 1', b'{"layout": 9'), "has a record of layout 9"),
    "misnamed_node": (lambda data: data.replace(b"\x0eQuantizeLinear", b"\x0eQuantizeLinEar"), "is damaged: No Op"),
}


@pytest.mark.parametrize(("change", "text"), FILES.values(), ids=FILES)
def test_a_file_that_is_not_ours_or_is_damaged_is_an_error(path: Path, change: Any, text: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(VerificationError, match=text) as error:
        verify_onnx(path)
    assert str(error.value).startswith(f"{path}: ")


def test_every_shorter_file_is_an_error(path: Path) -> None:
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(VerificationError):
            verify_onnx(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="cannot be read: No such file"):
        verify_onnx(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    ("name", "text"),
    [(".", "is a folder or a device"), ("/dev/null", "is a folder or a device"), ("a\0b", "embedded null byte")],
)
def test_what_is_no_file_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(VerificationError, match=text):
        verify_onnx(tmp_path / name)


def test_damaged_bytes_are_one_line_or_no_fault(path: Path) -> None:
    """Every 23rd byte, so that names in nodes, constants and the record are hit, becomes one that UTF-8 lacks."""
    data, messages = path.read_bytes(), set()
    for place in range(0, len(data), 23):
        path.write_bytes(data[:place] + b"\xff" + data[place + 1 :])
        try:
            verify_onnx(path)
        except VerificationError as error:
            messages.add(str(error).removeprefix(f"{path}: "))
    assert "is damaged: a name in it is not UTF-8; export it again" in messages
    assert not [message for message in messages if "\n" in message]


def test_a_missing_constant_is_an_error(path: Path) -> None:
    model = onnx.load(path)
    tensor = constant(model, f"{INPUT}/scale")
    tensor.name = "renamed"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == f"{INPUT}/scale":
                node.input[index] = "renamed"
    onnx.save(model, path)
    with pytest.raises(VerificationError, match=f"the constants {INPUT}/scale are missing"):
        verify_onnx(path)


def test_a_record_without_quantizers_is_not_exact(path: Path) -> None:
    rewrite(path, lambda values: values.update(sites=[]))
    report = verify_onnx(path)
    assert not report.exact
    assert len(report.uncovered) == 6
    assert "6 nodes quantize but belong to no quantizer of the file" in str(report)


@pytest.mark.parametrize("site", range(4))
def test_every_missing_quantizer_is_found(path: Path, site: int) -> None:
    rewrite(path, lambda values: values["sites"].pop(site))
    report = verify_onnx(path)
    assert not report.exact
    assert all(row.exact for row in report.rows)
    assert len(report.uncovered) == (2 if site % 2 == 0 else 1)


def set_input(**values: Any) -> Any:
    return lambda record: record["inputs"][0].update(values)


def set_site(site: int, **values: Any) -> Any:
    return lambda record: record["sites"][site].update(values)


CRAFTED = {
    "huge_input": (set_input(shape=[100_000, 100_000]), "pass batches"),
    "beyond_axes": (set_input(shape=[2**70]), "1180591620717411303424, not a"),
    "many_axes": (set_input(shape=[1] * 100), "shape has 100 axes"),
    "negative": (set_input(shape=[-3, 8]), "shape is -3, expected 0 to"),
    "text": (set_input(shape="3 by 8"), "shape is '3 by 8', not a list"),
    "module": (set_input(dtype="nn"), "dtype is 'nn', expected one of float32"),
    "function": (set_input(dtype="load"), "dtype is 'load'"),
    "nothing": (set_input(dtype="nope"), "dtype is 'nope'"),
    "nan": (set_input(low=float("nan")), "low is nan, expected a finite number"),
    "other_input": (set_input(name="z"), "it names the inputs"),
    "repeats": (set_site(0, repeats=[0]), "repeats is 0, expected 1 to"),
    "huge_repeats": (set_site(1, repeats=[1, 2**30]), "the exported constants do not fit"),
    "negative_groups": (set_site(1, groups=[-1, 1]), "groups is -1, expected 0 to"),
    "other_groups": (set_site(1, groups=[1, 16]), "the exported constants do not fit"),
    "one_group": (set_site(1, groups=[1, 1]), "the exported constants do not fit"),
    "no_parameters": (set_site(0, parameters="elsewhere"), "parameters is 'elsewhere', which is none of"),
    "no_spec": (set_site(0, spec="int8 per_moon"), "its record of quantizers is damaged"),
    "other_spec": (set_site(0, spec="int8 per_channel(1)"), "the exported constants do not fit"),
    "unknown_scale": (set_site(0, scale="nowhere"), "the constants nowhere are missing"),
    "no_zero_point": (set_site(0, zero_point=None), "the constants None are missing"),
    "number_as_name": (set_site(0, y=3), "y is 3, not a text"),
    "no_object": (lambda record: record.update(sites=[3]), "sites[0] is 3, not an object"),
    "truth": (lambda record: record.update(layout=True), "layout is True"),
}


@pytest.mark.parametrize(("change", "text"), CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_record_is_an_error(path: Path, change: Any, text: str) -> None:
    rewrite(path, change)
    with pytest.raises(VerificationError, match=re.escape(text)):
        verify_onnx(path)


def test_a_constant_in_another_file_is_not_read(path: Path) -> None:
    model = onnx.load(path)
    tensor = constant(model, f"{WEIGHT}/codes")
    onnx.external_data_helper.set_external_data(tensor, "/etc/hostname")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(VerificationError, match=f"its constants {WEIGHT}/codes are in other files"):
        verify_onnx(path)


@pytest.mark.parametrize("name", ["If", "function"])
def test_quantizers_inside_other_graphs_are_found(path: Path, name: str) -> None:
    from fakequant.export.capability import read
    from fakequant.export.verification.verify import uncovered_nodes

    helper, model = onnx.helper, onnx.load(path)
    node = helper.make_node("QuantizeLinear", ["a", "b"], ["c"], "hidden")
    if name == "If":
        branch = helper.make_graph([node], "branch", [], [])
        model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))
    else:
        function = helper.make_function("d", "f", ["a", "b"], ["c"], [node], [helper.make_opsetid("", 20)])
        model.functions.append(function)
    assert set(uncovered_nodes(model, read(model).sites)) == {"hidden"}


def test_mutated_records_give_an_error_or_a_report(tmp_path: Path) -> None:
    for data in itertools.islice(record_mutations(0), 100):
        (tmp_path / "m.onnx").write_bytes(data)
        with contextlib.suppress(VerificationError):
            assert isinstance(verify_onnx(tmp_path / "m.onnx").exact, bool)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_file_that_a_tool_rewrote_is_named(at: int, tmp_path: Path) -> None:
    """As ONNX Runtime's optimizer does, which removes and renames tensors."""
    path = tmp_path / "m.onnx"
    path.write_bytes(exported())
    model = onnx.load(path)
    values = json.loads(model.metadata_props[0].value)["sites"]
    old = [values[0]["y"], values[1]["y"], values[2]["x"]][at]
    for node in model.graph.node:
        node.input[:] = ["renamed" if name == old else name for name in node.input]
        node.output[:] = ["renamed" if name == old else name for name in node.output]
    onnx.save(model, path)
    with pytest.raises(
        VerificationError, match=r"its record names the tensor .*, which the file lacks: a tool changed"
    ):
        verify_onnx(path, two_layers(), [batch()])
