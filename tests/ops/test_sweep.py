"""The sweep of GPTQ in kernels has the bits of the definition.

In triton's interpreter, which test_triton.py starts, those for GPUs.
"""

import pytest
import torch

import fakequant as fq
from fakequant.numerics.spec import QuantSpec
from fakequant.ops import Backend, dispatch
from fakequant.ops.sweep import sweep
from fakequant.ptq.solvers.problem import WeightGrid
from tests.support.bits import assert_same_bits
from tests.support.kernel_comparisons import INTERPRETED, each_backend, skip_unavailable

ROWS, ALL = (40 if INTERPRETED else 300), 128
COLUMNS = 24 if INTERPRETED else 70  # no power of two
SPECS = (
    "int4 per_block(-1:32,pad)",
    "uint4 per_channel(0)",
    "int8_narrow per_tensor reciprocal",
    "int3 per_channel(0) multiplier",
    "nf4 per_block(-1:16,pad)",
    "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    "float8_e4m3fnuz per_channel(0)",
    "int4 per_block(-1:32) scale=float16:signed",
    "uint4 per_block(-1:32) scale=uint6@per_block(0:2)/float16 offset=uint6@per_block(-1:2)/float16",
)


def swept(backend: Backend, spec: QuantSpec, *, with_zeros: bool) -> list[torch.Tensor]:
    """Values, errors and what is missed."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, ALL, generator=generator)
    weight[:2], weight[2, ::3], weight[3, 1::2] = 0.0, -0.0, 1e-41
    zeros = torch.rand(ROWS, ALL, generator=generator) < 0.4 if with_zeros else None
    grid = WeightGrid(spec, fq.choose_qparams(weight, spec), weight.shape, zeros)
    order = torch.randperm(ALL, generator=generator)[:COLUMNS]
    left = weight.T[order].contiguous()
    wanted, shares = left.clone(), torch.randn(COLUMNS, COLUMNS + 5, generator=generator) / 8
    errors, missed = torch.full_like(left, torch.nan), torch.full_like(left, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_backends", (backend, dispatch.REFERENCE))
        sweep(wanted, left, shares, errors, missed, grid.of_columns(order))
    return [wanted, errors, missed]


@each_backend
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_errors_are_those_of_the_definition(backend: Backend, name: str, with_zeros: bool) -> None:
    skip_unavailable(backend)
    spec = QuantSpec.parse(name)
    found, expected = (swept(one, spec, with_zeros=with_zeros) for one in (backend, dispatch.REFERENCE))
    for one, other, what in zip(found, expected, ("values", "errors", "missed"), strict=True):
        assert_same_bits(one, other, what)
