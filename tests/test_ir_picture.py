import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from fakequant import ir
from fakequant.ir import Graph, IRType
from tests.support.networks import NETWORKS, quantized


@pytest.mark.parametrize("network", NETWORKS)
def test_pictures_show_every_operation(network):
    model, x = quantized(network, "INT8")
    graph = ir.capture(model, x)
    boxes = len(graph.inputs) + len(graph.ops) + len(graph.outputs)
    image = ir.to_svg(graph)
    ET.fromstring(image)
    assert image.count("<rect") == boxes
    quantizers = sum(op.op_type == "FakeQuantize" for op in graph.ops)
    assert image.count("#e6b800") == quantizers
    dot = graph.to_dot()
    assert len(re.findall(r"^  n\d+ \[", dot, re.MULTILINE)) == boxes
    assert dot.count("fillcolor=gold") == quantizers
    assert image.count("<line") == dot.count(" -> ") > len(graph.ops)


def test_boxes_do_not_overlap():
    model, x = quantized("transformer", "NVFP4")
    image = ET.fromstring(ir.to_svg(ir.capture(model, x)))
    rows = {}
    for box in image.iter("rect"):
        rows.setdefault(box.get("y"), []).append((float(box.get("x")), float(box.get("width"))))
    assert len(rows) > 10
    for boxes in rows.values():
        boxes.sort()
        assert all(a + wide <= b for (a, wide), (b, _) in pairwise(boxes))
        assert boxes[0][0] >= 0
        assert boxes[-1][0] + boxes[-1][1] <= float(image.get("width"))


def test_names_are_escaped():
    graph = Graph('a "b" <c>')
    graph.outputs = [graph.add("ReLU", graph.add_input('x<y> "z"', IRType.Float32, (2,)))]
    assert "x&lt;y&gt;" in ir.to_svg(graph)
    ET.fromstring(ir.to_svg(graph))
    assert r"x<y> \"z\"" in graph.to_dot()


def picture(title="é"):
    graph = Graph(title)
    graph.outputs = [graph.add("ReLU", graph.add_input(title, IRType.Float32, (2,)))]
    return graph


def test_letters_are_themselves():
    assert 'label="é\\nFloat32 [2]"' in ir.to_dot(picture())
    assert ">é<" in ir.to_svg(picture())


@pytest.mark.parametrize("title", ["a\x00b", "a\x1b[0m", "a\ud800", "<&>", 'a"b', "a\\"])
def test_pictures_of_any_name_are_xml(title):
    ET.fromstring(ir.to_svg(picture(title)))
    ir.to_dot(picture(title)).encode()


def test_an_empty_graph_is_an_empty_picture():
    ET.fromstring(ir.to_svg(Graph()))
    assert ir.to_dot(Graph()).startswith("digraph")


def test_types_are_read_once(monkeypatch):
    graph = picture()
    graph.outputs *= 50
    calls = []
    types = Graph.types
    monkeypatch.setattr(Graph, "types", lambda self: calls.append(1) or types(self))
    ir.to_svg(graph)
    assert len(calls) == 1
