"""What benchmarks leave out of a case to say how near to nothing it could come: the rest does the same."""

import pytest
import torch
from bits import assert_same_bits

import fakequant as fq
from benchmarks import kinds
from benchmarks.floors import CopiesBothWays, OperatorAlone, PlainCopy, ProductsAlone, _Copied
from benchmarks.training import STEPS_BY_CODES
from fakequant.nn.integer_products import LinearProduct
from fakequant.numerics import reference
from fakequant.ops.convolutions import convolution_unavailable

INT8 = kinds.INT8_TENSOR.case(4096)


def test_the_operator_alone_gives_the_same_values():
    case = OperatorAlone("alone", INT8.spec, INT8.shape)
    (x,) = case.inputs(1)
    assert_same_bits(case.run()(x), reference.fake_quantize(x, fq.QParams(case.scale()), case.spec))


def test_copies_are_copies_with_a_gradient():
    for kind in (PlainCopy, CopiesBothWays):
        case = kind("copies", INT8.spec, INT8.shape, backward=True)
        (x,) = case.inputs(1)
        (dx,) = case.run()(x)
        assert_same_bits(dx, torch.ones_like(x))
    assert_same_bits(_Copied.apply(x), x)


@pytest.mark.skipif(convolution_unavailable("cpu") is not None, reason="no integer convolutions here")
@pytest.mark.parametrize("step", STEPS_BY_CODES, ids=lambda step: step.name)
def test_products_alone_are_those_of_the_step(step, monkeypatch):
    """Of the batch whose codes are given: outputs, and the gradients of the last layer, whose input nothing changes."""
    batch = step.batches(1)[0]
    alone, plain = ProductsAlone.of(step).models()
    ours, _ = step.models()
    found, right = alone(batch), ours(batch)
    assert_same_bits(found, right)
    last = list(ours.parameters())[-2:], list(alone.parameters())[-2:]
    gradients = [torch.autograd.grad(y.square().mean(), p) for y, p in zip((right, found), last, strict=True)]
    for mine, other in zip(*gradients, strict=True):
        assert_same_bits(mine, other)
    monkeypatch.setattr(LinearProduct, "multiply", lambda *_: pytest.fail("the float model multiplies codes"))
    plain(batch)
