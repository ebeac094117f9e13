import itertools
import math

import torch
from torch import nn

from fakequant import ir
from fakequant.ir import Graph, IRType
from tests.support.graphs import variants
from tests.support.networks import quantized


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
