"""Types, shapes and attributes of operations, and the text of graphs."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import Graph, IRType, TensorShape, TensorType
from fakequant.ir.op import Ref, items_to_text, to_text
from tests.support.graphs import variants
from tests.support.networks import quantized


def test_every_dtype_comes_back():
    for type in IRType:
        if type not in (IRType.Decimal, IRType.Index, IRType.Missing):
            assert IRType.of(type.dtype) is type


@pytest.mark.parametrize("type", [IRType.Decimal, IRType.Index, IRType.Missing])
def test_a_type_without_a_dtype_says_so(type):
    with pytest.raises(GraphError, match=f"{type.value} has no torch dtype; use Float32"):
        _ = type.dtype


def test_an_unknown_dtype_is_refused():
    with pytest.raises(GraphError, match=r"float8_e4m3fn cannot be in a graph; convert it to one of torch\.float32"):
        IRType.of(torch.float8_e4m3fn)


@pytest.mark.parametrize("dims", [(0,), (2, 0, 3), (-2,), (True,), (2.0,), ("a",)])
def test_a_wrong_dimension_is_named(dims):
    assert "a dimension is a positive integer, or -1 if dynamic" in (TensorShape(dims).fault() or "")


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ((3, 1), (2, 1, 5), (2, 3, 5)),
        ((), (4,), (4,)),
        ((-1,), (4,), (4,)),
        ((-1,), (1,), (-1,)),
        ((1,), (-1,), (-1,)),
        ((-1, 3), (-1, 1), (-1, 3)),
    ],
)
def test_broadcasting(a, b, both):
    assert TensorShape(a).broadcast_with(b) == both
    assert TensorShape(b).broadcast_with(a) == both


def test_shapes_that_do_not_broadcast():
    with pytest.raises(GraphError, match=r"shapes \[3\] and \[4\] do not broadcast"):
        TensorShape((3,)).broadcast_with((4,))
    assert not TensorShape((2, 3)).is_compatible_with((3, 3))


def test_what_shapes_say_of_themselves():
    assert (TensorShape().element_count, TensorShape((2, 3)).element_count, TensorShape((2, -1)).element_count) == (
        *(1, 6, -1),
    )
    assert TensorShape((2, -1)).matches((2, 7))
    assert not TensorShape((2, -1)).matches((3, 7))
    assert not TensorShape((2,)).matches((2, 1))


@pytest.mark.parametrize(
    ("type", "fault"),
    [
        (TensorType(IRType.Decimal, TensorShape()), "Decimal has no torch dtype"),
        (TensorType(IRType.Index, TensorShape((2,))), "Index is not a tensor and has no shape"),
        (TensorType("Float32", TensorShape()), "is not an IRType"),
    ],
)
def test_faults_of_types(type, fault):
    assert fault in (type.fault() or "")


def test_the_text_has_every_value_and_attribute():
    graph = Graph("two\nlines")
    x = graph.add_input('a "b"', IRType.Float32, (2, -1))
    w = graph.add_constant("w", nn.Parameter(torch.tensor([[1.0], [-0.0]])))
    a, b = graph.add_all("Split", graph.add("Add", x, w), split_sizes=[1, 1])
    graph.ops[0].origin = "layer.0"
    large = graph.add_constant("large", torch.arange(20).float())
    frozen = graph.new_id()
    graph.constants[frozen] = ir.Constant("frozen", torch.ones(1, dtype=torch.float16), True)
    graph.outputs = [b, a, large]
    digest = graph.constants[large].digest()[:32]
    assert ir.to_text(graph) == str(graph) + "\n"
    assert str(graph).splitlines() == [
        "IR Graph: two lines",
        "  Inputs:",
        r'    t0 = "a \"b\"" : Float32 [2, ?]',
        "  Constants (3):",
        '    t1 = parameter "w" : Float32 [2, 1] = [1.0, -0.0]',
        f'    t5 = constant "large" : Float32 [20] = sha256:{digest}',
        '    t6 = frozen "frozen" : Half [1] = [1.0]',
        "  Operations (2):",
        "    t2 = Add(t0, t1) : Float32 [2, ?]  # layer.0",
        "    t3, t4 = Split(t2) {split_sizes=[1, 1]} : Float32 [1, ?], Float32 [1, ?]",
        "  Outputs: t4, t3, t5",
    ]


def test_graphs_that_differ_have_other_texts():
    texts = [str(graph) for graph in variants().values()]
    assert not [pair for pair in itertools.combinations(texts, 2) if pair[0] == pair[1]]


def test_numbers_that_do_not_tell_every_bit_are_a_digest():
    graph = Graph("g")
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    tensors = (bits[:1], bits[1:], torch.tensor([math.inf]), torch.ones(1, dtype=torch.complex64))
    for place, tensor in enumerate(tensors):
        graph.add_constant(f"c{place}", tensor)
    first, second, third, fourth = str(graph).splitlines()[3:7]
    assert first.split("=")[-1].startswith(" sha256:")
    assert second.split("=")[-1] not in ("", first.split("=")[-1])
    assert third.endswith("= [inf]")
    assert " sha256:" in fourth


def test_the_text_of_a_captured_graph_says_where_operations_are_from():
    model, x = quantized("CNN", "INT8")
    text = str(ir.capture(model, x))
    assert '{spec="int8 per_channel(0)"}' in text
    assert "._weight_quantizer" in text


def test_a_name_that_utf_8_cannot_write_is_written_as_its_number():
    graph = Graph("a\ud800")
    assert str(graph).encode().startswith(b"IR Graph: a\\ud800\n")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.text(),
    st.integers(0, 99).map(Ref),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex128]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.strided, torch.channels_last]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=8)


@settings(max_examples=100, deadline=None, derandomize=True)
@example(math.nan, math.nan)
@example(0.0, -0.0)
@example([1], [True])
@example("none", None)
@example("[1]", [1])
@given(VALUES, VALUES)
def test_values_have_one_text_where_they_are_the_same(a, b):
    assert to_text(a) == to_text(copy.deepcopy(a))
    assert to_text(a) == to_text(b) if repr(a) == repr(b) else (to_text(a) != to_text(b))


def test_attributes_stand_in_the_order_of_their_names():
    assert items_to_text({"b": [1, Ref(0)], "a": 2.0}) == " {a=2.0, b=[1, %0]}"
    assert items_to_text({}) == ""


def test_other_values_are_refused():
    with pytest.raises(GraphError, match="an attribute cannot be"):
        to_text(object())
    with pytest.raises(GraphError, match="an attribute cannot have the name 'a b'"):
        items_to_text({"a b": 1})
