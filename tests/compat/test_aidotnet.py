import pytest

import fakequant as fq
from fakequant.compat.aidotnet import FakeQuantizationOp, IRType


def test_defaults_are_those_of_the_original():
    op = FakeQuantizationOp()
    assert (op.NumBits, op.Scale, op.ZeroPoint, op.Symmetric) == (8, None, 0.0, True)
    assert (op.OutputIds, op.OutputId, op.InputIds, op.OutputType, op.OutputShape) == ([], -1, [], IRType.Float32, ())
    assert op.OpType == "FakeQuantization"
    assert not op.Validate()


def test_the_forms_of_the_text():
    op = FakeQuantizationOp(OutputIds=[1], InputIds=[0], OutputShape=[32, 128])
    end = ") : Float32 [32, 128]"
    assert op.ToString() == f"t1 = FakeQuantize(t0, bits=8, scale=auto, zeroPoint=0, symmetric=True{end}"
    op.Scale, op.Symmetric, op.ZeroPoint = 0.05, False, 3.5
    assert op.ToString() == f"t1 = FakeQuantize(t0, bits=8, scale=0.0500, zeroPoint=3.5, symmetric=False{end}"
    assert str(op) == "t1 = FakeQuantization(t0) : Float32 [32, 128]"


def test_members_can_be_set():
    op = FakeQuantizationOp(4, 0.5, 2.0, False)
    op.OutputId, op.InputIds, op.OutputShape, op.OutputType = 7, [3], [2, -1], IRType.Half
    assert op.ToString() == "t7 = FakeQuantize(t3, bits=4, scale=0.5000, zeroPoint=2, symmetric=False) : Half [2, ?]"
    assert op.Validate()
    assert op.output_ids == [7]
    op.OutputShape = [2, 0]
    assert not op.Validate()


@pytest.mark.parametrize("bits", [-1, 0, 1, 32, 33])
def test_widths(bits):
    assert FakeQuantizationOp(bits, OutputIds=[1], InputIds=[0]).Validate() == (1 <= bits <= 32)


def test_it_is_one_of_our_operations():
    op = fq.compat.aidotnet.FakeQuantizationOp(4, OutputIds=[1], InputIds=[0], OutputShape=[2])
    graph = fq.ir.Graph("g")
    graph.add_input("x", IRType.Float32, (2,))
    graph.ops, graph.outputs = [op], [1]
    assert graph.validate()
    assert f"    {op.detailed()}" in str(graph)


def test_an_unknown_interface():
    with pytest.raises(AttributeError, match="nothing"):
        _ = fq.compat.nothing
