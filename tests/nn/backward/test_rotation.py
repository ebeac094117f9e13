"""Rotation of operands: an orthogonal matrix, along either axis, and one node of a compiled graph."""

import pytest
import torch
from torch import Tensor

from fakequant.nn.backward import rotated
from tests.support.bits import assert_same_bits

SHAPES = [(37, 6), (32, 16), (5, 40, 3), (40, 5, 2, 3), (0, 6)]


def test_a_hadamard_matrix_changes_no_sum() -> None:
    dy, x = torch.randint(-8, 9, (37, 4)).float(), torch.randint(-8, 9, (37, 6)).float()
    assert_same_bits(rotated(dy, 16).T @ rotated(x, 16), dy.T @ x)
    assert_same_bits(rotated(dy, 4).T @ rotated(x, 4), dy.T @ x)
    first = torch.zeros(16, 1)
    first[3] = 16.0
    assert rotated(first, 16).abs().unique().tolist() == [4.0]
    signs = torch.stack([rotated(torch.eye(16)[:, [row]], 16)[0, 0] for row in range(16)]).sign()
    assert 4 <= int((signs < 0).sum()) <= 12


def whole(*shape: int) -> Tensor:
    """Numbers whose sums are exact in any order."""
    return torch.randint(-8, 9, shape).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [4, 16])
def test_both_axes_are_rotated_alike(shape: tuple[int, ...], block: int) -> None:
    x = whole(*shape)
    assert_same_bits(rotated(x.transpose(0, 1).contiguous(), block, 1), rotated(x, block).transpose(0, 1))


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_node_of_a_compiled_graph_is_what_it_declares(shape: tuple[int, ...], axis: int) -> None:
    for x in (whole(*shape), whole(*shape[::-1]).permute(*range(len(shape) - 1, -1, -1)), whole(*shape).half()):
        node = torch.ops.fakequant.rotate
        torch.library.opcheck(node.default, (x, 4, axis), test_utils=("test_schema", "test_faketensor"))
        assert_same_bits(node(x, 4, axis), rotated(x, 4, axis))


def test_a_compiled_rotation_serves_batches_of_any_size() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rotated, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (8, 37, 50):
        for axis in (0, 1):
            x = whole(rows, 12)
            assert_same_bits(compiled(x, 16, axis), rotated(x, 16, axis))
