"""What is broken is named: graphs with anything in them, text that was cut, files of other graphs, strange names."""

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fakequant import ir
from fakequant.errors import GraphError, OutputError
from fakequant.ir import Graph, IROp, IRType, TensorShape, TensorType
from tests.support.bits import assert_same_bits

F32 = IRType.Float32
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
NONE: Any = None
TEXT: Any = "a"
TYPE = TensorType(F32, TensorShape((2,)))


def graph_of(*ops, outputs=(1,), constants=()):
    graph = Graph("g")
    graph.add_input("x", F32, (2,))
    for place, tensor in enumerate(constants, start=5):
        graph.add_constant(f"c{place}", tensor, place)
    graph.ops, graph.outputs = list(ops), list(outputs)
    return graph


def relu(**fields):
    op = IROp("ReLU", [1], [0], [TYPE])
    for name, value in fields.items():
        setattr(op, name, value)
    return op


deep: list = []
for _ in range(5000):
    deep = [deep]
endless: list = []
endless.append(endless)
BROKEN = {
    "list as id": graph_of(relu(output_ids=[[0]])),
    "list as input": graph_of(relu(input_ids=[[0]])),
    "true as input": graph_of(relu(input_ids=[True])),
    "fraction as id": graph_of(relu(output_ids=[1.0])),
    "attribute that is a number": graph_of(relu(attributes={1: 2})),
    "attribute with a space": graph_of(relu(attributes={"a b": 2})),
    "ref of text": graph_of(relu(attributes={"a": ir.Ref(TEXT)})),
    "negative ref": graph_of(relu(attributes={"a": ir.Ref(-1)})),
    "deep list": graph_of(relu(attributes={"a": deep})),
    "list in itself": graph_of(relu(attributes={"a": endless})),
    "long integer": graph_of(relu(attributes={"a": 10**5000})),
    "huge dimension": graph_of(relu(outputs=[TensorType(F32, TensorShape((10**30,)))])),
    "huge shape": graph_of(relu(outputs=[TensorType(F32, TensorShape((2**40, 2**40)))])),
    "no shape": graph_of(relu(outputs=[TensorType(F32, NONE)])),
    "no type": graph_of(relu(outputs=[None])),
    "type of text": graph_of(relu(outputs=[TensorType(TEXT, TensorShape((2,)))])),
    "text as operation": graph_of("ReLU"),
    "operation with a sign": graph_of(relu(op_type="Re)LU(")),
    "true as output": graph_of(relu(), outputs=[True]),
    "none as output": graph_of(relu(), outputs=[None]),
    "list as output": graph_of(relu(), outputs=[[1]]),
    "text as constant": graph_of(relu(), constants=["w"]),
    "meta": graph_of(relu(), constants=[torch.empty(2, device="meta")]),
    "sparse": graph_of(relu(), constants=[torch.eye(2).to_sparse()]),
    "conjugate": graph_of(relu(), constants=[torch.ones(2, dtype=torch.complex64).conj()]),
    "size of the meta kernel": graph_of(
        IROp("aten.ones.default", [1], [], [TensorType(F32, TensorShape((2,)))], {"size": [2**70]})
    ),
    **{f"{name} is none": graph_of(relu(**{name: None})) for name in vars(relu())},
}


@pytest.mark.parametrize("name", BROKEN)
def test_anything_in_a_graph_is_a_fault_and_no_crash(name):
    graph = BROKEN[name]
    found = graph.validate()
    assert not found
    assert all(isinstance(fault, str) and fault for fault in found.faults)
    with pytest.raises(GraphError):
        graph.check()


def test_inputs_of_anything():
    graph = graph_of(relu())
    graph.inputs[0] = NONE
    assert not graph.validate()
    graph.inputs = {0: ir.Input("x", TensorType(F32, NONE))}
    assert not graph.validate()
    graph.inputs = {TEXT: ir.Input("x", TYPE)}
    assert not graph.validate()
    graph.inputs = {0: ir.Input("\ud800", TYPE)}
    assert "UTF-8" in str(graph.validate())


def long_graph():
    """A graph whose outputs still name a value when their last character is gone."""
    graph = Graph("g")
    value = graph.add_input("x", F32, (2,))
    for _ in range(11):
        value = graph.add("Neg", value)
    graph.outputs = [value]
    return graph


def test_text_that_was_cut_anywhere_is_not_loaded(tmp_path):
    path = ir.save(long_graph(), tmp_path / "g.txt")
    whole = path.read_bytes()
    assert ir.load(path) == long_graph()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(GraphError):
            ir.load(path)


def test_missing_and_added_lines_are_found():
    lines = ir.to_text(long_graph()).splitlines()
    at = next(i for i, line in enumerate(lines) if "t11 =" in line)
    with pytest.raises(GraphError, match="says 11 operations, but has 10"):
        ir.parse("\n".join(lines[:at] + lines[at + 1 :]))
    with pytest.raises(GraphError, match="says 0 constants, but has 1"):
        ir.parse("\n".join([*lines[:4], '    t99 = constant "c" : Float32 [1] = [1.0]', *lines[4:]]))
    with pytest.raises(GraphError, match="says no number of operations"):
        ir.parse("IR Graph: g\n  Inputs:\n  Constants (0):\n  Outputs: t0")


@pytest.mark.parametrize(
    "line",
    [
        r'    t0 = "\x" : Float32 [2]',
        '    t0 = "a\tb" : Float32 [2]',
        f'    t{"1" * 5000} = "a" : Float32 [2]',
        f'    t0 = "a" : Float32 [{"1" * 5000}]',
        '  Constants (1):\n    t0 = parameter "w" : Int64 [1] = [1]',
        '  Constants (1):\n    t0 = frozen "w" : Boolean [1] = [true]',
        '  Constants (1):\n    t0 = constant "w" : Byte [1] = [300]',
        '  Constants (1):\n    t0 = constant "w" : Float32 [1] = [' + "1" * 5000 + "]",
        f"  Operations ({'1' * 5000}):",
        "  Operations (1):\n    t1 = ReLU(t0) {a=" + "[" * 5000 + " : Float32 [2]",
        "  Operations (1):\n    t1 = ReLU(t0) {a=%" + "1" * 5000 + "} : Float32 [2]",
        "  Operations (1):\n    t1 = ReLU(t²) : Float32 [2]",
        "  Outputs: t²",
    ],
    ids=lambda line: line[:40].strip(),
)
def test_lines_that_cannot_be_read(line):
    with pytest.raises(GraphError):
        ir.parse(f"IR Graph: g\n  Inputs:\n{line}\n")


NAMES = ["__metadata__", "__metadata___", "if", "graph", "code", "class", "forward", "training", "a b", "é", "²", "0.1"]
NAMES += ["quantizers.t2", "graph.weight", "layers.if.weight", "\\x", 'a"b', "a\tb", "\x00", "constants.c_a_b", "1a"]


@pytest.mark.parametrize("name", NAMES)
def test_constants_of_any_name_are_saved_loaded_and_run(name, tmp_path):
    graph = Graph("g")
    x = graph.add_input(name, F32, (8,))
    held = graph.add_constant(name, torch.arange(8.0))
    other = graph.add_constant("other", nn.Parameter(torch.ones(8)))
    y = graph.add("FakeQuantization", graph.add("Add", x, held), num_bits=8)
    graph.outputs = [graph.add("Mul", y, other)]
    loaded = ir.load(ir.save(graph, tmp_path / "g.txt"))
    assert loaded == graph
    assert ir.to_text(loaded) == ir.to_text(graph)
    given = torch.randn(8)
    assert_same_bits(loaded.run(given), graph.run(given))
    assert_same_bits(graph.to_torch()(given), graph.run(given))


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.parts = name, nn.ModuleDict({"if": nn.Linear(3, 3)})
        self.add_module(name, nn.Linear(3, 3))

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return self.get_submodule(self.name)(x)


@pytest.mark.parametrize("name", ["graph", "code", "class", "if", "quantizers"])
def test_modules_of_any_name_run(name):
    model = Named(name)
    x = torch.randn(2, 3)
    graph = ir.capture(model, x)
    assert_same_bits(graph.run(x), model(x))
    assert_same_bits(graph.compile()(x), model(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_of_every_type_are_saved(dtype, tmp_path):
    graph = Graph("g")
    tensor = torch.arange(10).reshape(2, 5).to(dtype)
    graph.outputs = [graph.add_constant("w", tensor)]
    loaded = ir.load(ir.save(graph, tmp_path / "g.txt"))
    assert torch.equal(loaded.run(), tensor)
    assert loaded.hash() == graph.hash()


def test_numbers_of_numpy_are_numbers(tmp_path):
    graph = graph_of(IROp("FakeQuantization", [1], [0], [TYPE], {"scale": np.float64(0.1)}))
    assert ir.load(ir.save(graph, tmp_path / "g.txt")).ops[0].attributes == {"scale": 0.1}


def with_weight(value):
    graph = Graph("g")
    graph.outputs = [graph.add_constant("w", torch.full((8,), value))]
    return graph


def test_files_of_one_graph_are_not_those_of_another(tmp_path):
    paths = [tmp_path / name for name in ("net.v1", "net.v2", "net", "net.txt")]
    for value, path in enumerate(paths):
        ir.save(with_weight(float(value)), path)
    for value, path in enumerate(paths):
        assert_same_bits(ir.load(path).run(), torch.full((8,), float(value)))
    with pytest.raises(OutputError, match="is for constants"):
        ir.save(with_weight(1.0), tmp_path / "net.safetensors")
    assert len(os.listdir(tmp_path)) == 8


def test_text_is_utf_8_whatever_the_locale(tmp_path):
    graph = with_weight(math.pi)
    graph.name = "Prüfung"
    path = ir.save(graph, tmp_path / "g.txt")
    assert "Prüfung".encode() in path.read_bytes()
    code = "import sys; from fakequant import ir; print(ascii(ir.load(sys.argv[1]).name))"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    made = subprocess.run([sys.executable, "-c", code, path], env=plain, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == ascii(graph.name)
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff"))
    with pytest.raises(GraphError, match="cannot read the graph"):
        ir.load(path)


def test_a_name_that_utf_8_cannot_write(tmp_path):
    graph = with_weight(1.0)
    graph.name = "a\ud800"
    assert ir.load(ir.save(graph, tmp_path / "g.txt")).name == "a\\ud800"


def test_loaded_constants_lie_where_those_of_a_model_do(tmp_path):
    graph = Graph("g")
    held = [graph.add_constant(f"w{n}", torch.randn(n)) for n in (5, 7, 9, 11)]
    graph.outputs = held
    for constant in ir.load(ir.save(graph, tmp_path / "g.txt")).constants.values():
        assert constant.tensor.data_ptr() % 64 == 0


def test_written_defaults_do_not_change_the_hash():
    made = [graph_of(IROp("FakeQuantization", [1], [0], [TYPE], attributes)) for attributes in
            ({}, {"num_bits": 8, "symmetric": True, "scale": None}, {"num_bits": 7})]  # fmt: skip
    assert made[0].hash() == made[1].hash() != made[2].hash()
