import pytest
import torch

from fakequant.errors import GraphError
from fakequant.ir import IRType, TensorShape, TensorType


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
        (TensorType(IRType.Index, TensorShape((2,))), "Index is no tensor and has no shape"),
        (TensorType("Float32", TensorShape()), "is no IRType"),
    ],
)
def test_faults_of_types(type, fault):
    assert fault in (type.fault() or "")
