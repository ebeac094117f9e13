"""Models with fixed codes that quantizing the values of the weight again does not give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.weights import quantized_weights
from fakequant.nn.quantizer import Quantizer
from fakequant.numerics import formats
from fakequant.numerics.formats.floats import TableFormat
from fakequant.numerics.qparams import QParams
from tests.support.bits import assert_same_bits

INT16 = "int16 per_channel(0)"
"""In float16, hundreds of its codes have one value."""
NF4 = "nf4 per_block(-1:3)"
FLOAT8 = "float8_e4m3fn per_channel(0)"
"""By a scale of 2**-148, many codes of these have one value of float32."""
NEAR = "near per_channel(0) reciprocal"
"""Values an ulp apart, which a product with 1 / 1.5 mixes up: quantizing gives other values, too."""
ZEROS = "int4 per_block(-1:3) scale=float16:signed"
"""With a scale of 0, as K-quants have, so that all codes have one value."""
KINDS = [INT16, NF4, FLOAT8, NEAR, ZEROS]
KEY = "0._weight_quantizer"


@pytest.fixture(scope="module")
def near_values() -> Iterator[None]:
    """The format of `NEAR`, for a module."""
    fq.register_format(TableFormat("near", (-1.0, 0.0, *(1.0 + n * 2.0**-23 for n in range(8)))))
    yield
    del formats._registry["near"]


def fresh(spec: str = NEAR) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4)).to(torch.float16 if spec == INT16 else torch.float32)


def model_of(spec: str = NEAR) -> nn.Sequential:
    model = fq.prepare(fresh().float(), fq.Config(fq.Rule(weight=spec))).eval()
    model.to(torch.float16 if spec == INT16 else torch.float32)
    fq.calibrate(model)
    return model


def inputs(model: nn.Module, *shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 6)), dtype=next(model.parameters()).dtype)


def drawn(weight: Tensor, spec: fq.QuantSpec) -> tuple[Tensor, QParams]:
    """Codes that quantizing their values does not give, except for formats of 4 and 8 bits of integers."""
    torch.manual_seed(0)
    groups = spec.granularity.group_shape(weight.shape)
    if spec.format.has_zero_point:
        lowest, highest = int(spec.format.quant_min), int(spec.format.quant_max)
        codes = torch.randint(lowest, highest + 1, weight.shape).to(spec.format.storage)
        scale = torch.full(groups, 1e-4 if spec.scale.format is None else 2.0**-10)
        scale[0, 0] *= spec.scale.format is None
        return codes, QParams(scale)
    if str(spec.format) == "near":
        return torch.randint(10, weight.shape, dtype=torch.uint8), QParams(torch.full(groups, 1.5))
    codes, _ = fq.quantize(torch.randn(weight.shape), spec, scale=torch.ones(groups))
    return codes, QParams(torch.full(groups, 2.0**-148))


def fixed(model: nn.Module) -> tuple[Tensor, Quantizer, nn.Parameter]:
    """Fix the codes of the first weight."""
    product = next(iter(quantized_weights(model).values()))
    assert product.parameter is not None
    codes, params = drawn(product.parameter, product.quantizer.spec)
    product.fix_codes(codes, params)
    return codes, product.quantizer, product.parameter


def values(codes: Tensor, quantizer: Quantizer, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (torch.float16 if codes.dtype is torch.int16 else torch.float32)
    return fq.dequantize(codes, quantizer.qparams(codes), quantizer.spec, dtype=dtype)


def assert_fixed(model: nn.Module, codes: Tensor) -> None:
    """Assert that all ways to read the codes give these."""
    product = next(iter(quantized_weights(model).values()))
    quantizer, weight = product.quantizer, product.parameter
    assert weight is not None
    assert quantizer.holds(weight)
    found = quantizer.codes(weight)
    assert found is not None
    assert_same_bits(found[0], codes)
    assert_same_bits(next(iter(fq.snapshot(model).weights.values())).codes, codes)
    assert_same_bits(quantizer(weight).detach(), values(codes, quantizer, weight.dtype))
