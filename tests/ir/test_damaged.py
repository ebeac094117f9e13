"""What is broken is named: graphs with anything in them, strange names, what no graph holds."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import GraphError
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


NAMES = ["__metadata__", "__metadata___", "if", "graph", "code", "class", "forward", "training", "a b", "é", "²", "0.1"]
NAMES += ["quantizers.t2", "graph.weight", "layers.if.weight", "\\x", 'a"b', "a\tb", "\x00", "constants.c_a_b", "1a"]


@pytest.mark.parametrize("name", NAMES)
def test_constants_of_any_name_are_run(name):
    graph = Graph("g")
    x = graph.add_input(name, F32, (8,))
    held = graph.add_constant(name, torch.arange(8.0))
    other = graph.add_constant("other", nn.Parameter(torch.ones(8)))
    y = graph.add("FakeQuantization", graph.add("Add", x, held), num_bits=8)
    graph.outputs = [graph.add("Mul", y, other)]
    given = torch.randn(8)
    expected = fq.fake_quantize(given + torch.arange(8.0), fq.QuantSpec("int8", gradient="identity"))
    assert_same_bits(graph.run(given), expected)
    assert_same_bits(graph.to_torch()(given), expected)


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
def test_constants_of_every_type_are_printed_and_run(dtype):
    graph = Graph("g")
    tensor = torch.arange(10).reshape(2, 5).to(dtype)
    graph.outputs = [graph.add_constant("w", tensor)]
    assert torch.equal(graph.run(), tensor)
    assert str(graph) == str(graph.copy())


def test_numbers_of_numpy_are_numbers():
    op = IROp("FakeQuantization", [1], [0], [TYPE], {"scale": np.float64(0.1)})
    assert op.detailed() == "t1 = FakeQuantization(t0) {scale=0.1} : Float32 [2]"


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("aten.zeros.default", {"size": [2], "device": torch.device("meta")}, "meta, which has no memory"),
        ("aten.zeros.default", {"size": [2], "layout": torch.sparse_coo}, "layout torch.sparse_coo"),
        ("aten.add.Tensr", {}, r"torch has no operator 'aten\.add\.Tensr'; its names are such as aten\.add\.Tensor"),
        ("fakequant_cpu.mask_gradient.default", {}, "does not check its arguments"),
    ],
)
def test_operators_that_graphs_do_not_hold(op_type, attributes, message):
    with pytest.raises(GraphError, match=message):
        graph_of(IROp(op_type, [1], [], [TYPE], attributes)).check()
