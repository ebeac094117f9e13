"""bfloat16 to codes of 8 bits, where some scales are divided by and others multiplied by their reciprocal."""

import pytest
import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.cpu.backend import CpuBackend, load_kernels
from fakequant.ops.dispatch import pack_bits
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits

EVERY_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
FEW_BITS = [2.0**-133, 2.0**-126, 2.0**-7, 0.75 * 2.0**-5, 1.0, 1.5, 129.0 * 2.0**-10, 2.0**119]
CODES = [
    ("int8", None),
    ("int4", None),
    ("int8", -128),
    ("uint8", 37),
    ("uint8", 255),
    ("int16", None),
    ("int[-257,300]", 5),
]
CPU = Calls(CpuBackend())

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason="no compiled kernels")


def around(scale: torch.Tensor, steps: int) -> torch.Tensor:
    """float32 numbers and those up to so many steps beside them. [..., 2 * steps + 1]"""
    return (scale.view(torch.int32).unsqueeze(-1) + torch.arange(-steps, steps + 1, dtype=torch.int32)).view(
        torch.float32
    )


def scales_beside_ties() -> torch.Tensor:
    """Those with which an integer of 8 bits is near a middle between two codes, and up to 6 steps beside them."""
    numbers, middles = torch.arange(128.0, 256.0), torch.arange(256) + 0.5
    return around(numbers[:, None] / middles, 6)


def told_apart() -> torch.Tensor:
    """The scales where multiplication by the reciprocal gives another code than division."""
    scale = scales_beside_ties()
    x = torch.arange(128.0, 256.0)[:, None, None]
    return scale[(x / scale).round() != (x * (torch.ones(()) / scale)).round()]


def scales() -> torch.Tensor:
    """[N, 1] of float32, also one step beside the bounds of what is multiplied."""
    apart, beside = told_apart(), scales_beside_ties().flatten()
    bounds = around(torch.tensor([2.0**-100, 2.0**100]), 1).flatten()
    chosen = [apart[:: len(apart) // 24], beside[:: len(beside) // 24], torch.rand(24) * 0.1, bounds]
    return torch.cat([*chosen, torch.tensor(FEW_BITS), torch.tensor([3e-39, 1e-30, 3e38])])[:, None]


def test_some_scales_tell_the_two_apart():
    assert len(told_apart()) > 1000


@pytest.mark.parametrize(("format", "zero_point"), CODES, ids=str)
def test_every_bfloat16_has_the_code_of_its_quotient(format, zero_point):
    scale = scales()
    # Rows that end within a register, at another place each.
    x = torch.cat([EVERY_PATTERN, EVERY_PATTERN[17000:17005]]).expand(len(scale), -1).contiguous()
    spec = fq.QuantSpec(format, fq.PerChannel(0), symmetric=zero_point is None)
    params = fq.QParams(scale, None if zero_point is None else torch.full_like(scale, zero_point))
    values, codes = reference.fake_quantize(x, params, spec), reference.quantize(x, params, spec)
    mask, passed = pack_bits(reference.passes(x, params, spec)), pack_bits(reference.passes(x, params, spec) & (x > 0))
    for way in cases.each_way():
        assert_same_bits(CPU.fake_quantize(x, params, spec, mask=False)[0], values, way)
        masked = CPU.fake_quantize(x, params, spec, mask=True)
        assert_same_bits(masked[0], values, f"{way} masked")
        assert_same_bits(masked[1], mask, f"{way} mask")
        assert_same_bits(CPU.fake_quantize_relu(x, params, spec, mask=True)[1], passed, f"{way} mask of a ReLU")
        assert_same_bits(CPU.encode(x, params, spec).codes, codes, f"{way} codes")


@pytest.mark.parametrize("length", [16, 511, 512, 513])
def test_the_numbers_that_tell_apart_are_right_in_runs_of_any_length(length):
    scale = told_apart()[::50, None]
    x = ((torch.arange(256) + 0.5) * scale).bfloat16().repeat(1, 3)[:, -length:].contiguous()
    spec, params = fq.QuantSpec("uint8", fq.PerChannel(0), symmetric=False), fq.QParams(scale, torch.zeros_like(scale))
    values = reference.fake_quantize(x, params, spec)
    for way in cases.each_way():
        assert_same_bits(CPU.fake_quantize(x, params, spec, mask=False)[0], values, way)
