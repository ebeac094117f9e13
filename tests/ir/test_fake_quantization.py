import pytest
import torch

import fakequant as fq
from fakequant.ir import FakeQuantizationOp, Graph, IRType
from fakequant.ir.ops import FakeQuantize, WideFakeQuantize, group_shape
from tests.support.bits import assert_same_bits

HOSTILE = torch.tensor(
    [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-40, -3e38, 3e38, float("inf"), -float("inf"), float("nan"), 0.1, 100.0]
)


def module_of(op_type="FakeQuantization", shape=None, type=IRType.Float32, **attributes):
    graph = Graph("g")
    graph.outputs = [
        graph.add(op_type, graph.add_input("x", type, HOSTILE.shape if shape is None else shape), **attributes)
    ]
    return graph.to_torch()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5, 1e-3])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_up_to_24_bits_it_is_fake_quantize(bits, scale, symmetric, dtype):
    x = HOSTILE.to(dtype)
    zero_point = 0.0 if symmetric or scale is None else 1.0
    attributes = {"num_bits": bits, "scale": scale, "zero_point": zero_point, "symmetric": symmetric}
    y = module_of(type=IRType.of(dtype), **attributes)(x)
    given = {} if scale is None else {"scale": scale} | ({} if symmetric else {"zero_point": 1})
    assert_same_bits(y, fq.fake_quantize(x, f"{'int' if symmetric else 'uint'}{bits}", **given))


@pytest.mark.parametrize("bits", range(1, 33))
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_width_is_within_half_a_step(bits, symmetric):
    x = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    y = module_of(shape=(1001,), type=IRType.Float64, num_bits=bits, symmetric=symmetric)(x)
    step = 2.0 / (2**bits - 1) if not symmetric else 1.0 / max(2 ** (bits - 1) - 1, 1)
    inside = x <= 0 if symmetric and bits == 1 else torch.ones_like(x, dtype=torch.bool)
    assert ((y - x).abs()[inside] <= step * (1.0 if not symmetric else 0.5) + 1e-12).all()
    assert len(y.unique()) <= 2**bits


def test_an_asymmetric_range_keeps_negative_numbers():
    x = torch.tensor([-1.0, -0.5, 0.0, 2.0])
    y = module_of(shape=(4,), symmetric=False)(x)
    assert ((y - x).abs() < 0.006).all()
    assert y[2] == 0.0


def test_the_formula_beyond_24_bits():
    x = torch.tensor([0.3, -0.7, 5.0, -5.0, float("inf"), float("nan")], dtype=torch.float64)
    y = WideFakeQuantize(4, 0.5, 0.25, False)(x)
    # round(x / 0.5) + 0.25 clamped to 0..15, less 0.25, times 0.5
    assert y[:5].tolist() == [0.5, -0.125, 5.0, -0.125, 7.375]
    assert y[5].isnan()
    assert WideFakeQuantize(32, None, 0.0, True)(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert WideFakeQuantize(32, None, 0.0, False)(torch.full((3,), -2.0)).tolist() == [-2.0] * 3


@pytest.mark.parametrize("attributes", [{"num_bits": 3}, {"num_bits": 30}, {"num_bits": 3, "scale": 0.01}])
def test_the_gradient_passes_everywhere(attributes):
    x = HOSTILE.clone().requires_grad_()
    module_of(**attributes)(x).backward(torch.arange(1.0, 16.0))
    assert x.grad is not None
    assert x.grad.tolist() == list(range(1, 16))


def test_properties_are_attributes():
    op = FakeQuantizationOp(4, 0.5, 2.0, False, output_id=1, input_id=0)
    assert op.attributes == {"num_bits": 4, "scale": 0.5, "zero_point": 2.0, "symmetric": False}
    op.num_bits, op.scale, op.zero_point, op.symmetric = 6, None, 0.0, True
    assert op.attributes == {"num_bits": 6, "scale": None, "zero_point": 0.0, "symmetric": True}
    assert op.validate()
    assert str(op) == "t1 = FakeQuantization(t0) : Float32 scalar"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_bits": 0}, "num_bits must be an integer from 1 to 32, got 0"),
        ({"num_bits": 33}, "got 33"),
        ({"num_bits": 8.0}, "got 8.0"),
        ({"num_bits": True}, "got True"),
        ({"scale": 0.0}, "scale must be a positive, finite number"),
        ({"scale": -1.0}, "got -1.0"),
        ({"scale": float("inf")}, "got inf"),
        ({"zero_point": float("nan")}, "zero_point must be a finite number"),
        ({"zero_point": 1.0}, "belongs to a given scale and symmetric=false"),
        ({"symmetric": 1}, "symmetric must be true or false"),
        ({"input_ids": []}, "takes 1 input, got 0"),
        ({"input_ids": [0, 2]}, "takes 1 input, got 2"),
    ],
)
def test_what_is_wrong_is_said(change, fault):
    op = FakeQuantizationOp(output_id=1, input_id=0)
    assert op.validate()
    for name, value in change.items():
        setattr(op, name, value)
    assert not op.validate()
    assert any(fault in found for found in op.faults())


@pytest.mark.parametrize(
    ("spec", "shape", "groups"),
    [
        ("int8 per_tensor", (2, -1), (1, 1)),
        ("int8 per_channel(0)", (-1, 4), (-1, 1)),
        ("int8 per_channel(1)", (-1, 4), (1, 4)),
        ("int8 per_token", (-1, 7, 4), (-1, 7, 1)),
        ("int8 per_block(-1:32)", (-1, 64), (-1, 2)),
        ("int8 per_block(-1:32,pad)", (3, -1), (3, -1)),
    ],
)
def test_groups_of_dynamic_shapes(spec, shape, groups):
    assert group_shape(fq.QuantSpec.parse(spec), shape) == groups


def test_the_general_operation_is_the_library():
    x = torch.randn(4, 32)
    for text in ("uint8 per_channel(0)", "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor", "int4"):
        assert_same_bits(module_of("FakeQuantize", (4, 32), spec=text)(x), fq.fake_quantize(x, text))
    assert "int4" in repr(FakeQuantize(fq.QuantSpec("int4")))
