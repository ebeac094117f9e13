"""The arithmetics that encode and decode by different scales: llama.cpp's rules for the inputs of products."""

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.ops.dispatch import backends
from tests.support.bits import assert_same_bits

SPECS = {32: "int8_narrow per_block(-1:32) q8_0", 256: "int8_narrow per_block(-1:256) q8_k"}


def by_numpy(x, block):
    """`quantize_row_q8_0` for AVX and `quantize_row_q8_K_ref`, as their sources have them."""
    values = x.numpy().reshape(-1, block)
    found = np.zeros_like(values)
    for row, out in zip(values, found, strict=True):
        place = np.abs(row).argmax()
        if row[place] == 0:
            continue
        if block == 32:
            amax = np.abs(row[place])
            out[:] = np.rint(row * (np.float32(127) / amax)) * np.float32(np.float16(amax / np.float32(127)))
        else:
            scale = np.float32(-127) / row[place]
            out[:] = np.minimum(127, np.rint(row * scale)) * (np.float32(1) / scale)
    return torch.from_numpy(found).reshape(x.shape) + 0.0


def inputs():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 4, 64)[:, None]
    x[3], x[4, :256], x[5] = 0, 0, 1.5  # all zero, half of a row, all of one size
    x[6] = torch.randint(-4, 5, (512,)) / 8.0  # ties
    x[7] = 2.0**-40  # float16 has no such scale
    return x


@pytest.mark.parametrize("block", SPECS)
def test_the_rules_are_those_of_the_sources(block):
    x, spec = inputs(), fq.QuantSpec.parse(SPECS[block])
    y = fq.fake_quantize(x, spec)
    assert_same_bits(y + 0.0, by_numpy(x, block))
    assert_same_bits(fq.fake_quantize(x, spec, scale=fq.choose_qparams(x, spec).scale), y)
    codes, params = fq.quantize(x, spec)
    assert_same_bits(fq.dequantize(codes, params, spec), y)
    assert codes.abs().max() == 127
    watched = torch.compile(lambda x: fq.fake_quantize(x, spec), backend="aot_eager", fullgraph=True)
    assert_same_bits(watched(x), y)


@pytest.mark.parametrize("text", SPECS.values())
def test_gradients_pass_within_the_range_and_kernels_say_why_not(text):
    x = inputs().requires_grad_()
    assert torch.autograd.grad(fq.fake_quantize(x, text).sum(), x)[0].eq(1).all()
    scale = torch.full_like(fq.choose_qparams(x.detach(), text).scale, 1e-3)
    clipped = fq.fake_quantize(x, text, scale=scale)
    passes = torch.autograd.grad(clipped.sum(), x)[0]
    assert_same_bits(passes, (x.detach().abs() * (127 / 0.128)).round().le(127).float())
    cpu = next(one for one in backends() if one.name == "cpu")
    reason = cpu.unsupported(x.detach(), fq.QuantSpec.parse(text), codes=False)
    assert reason == f"the kernels encode and decode by one scale, and {text} by two"


def test_the_largest_numbers_have_finite_values():
    x = torch.tensor([3e38, -1e30, 1.0])
    assert fq.fake_quantize(x, "int8_narrow q8_k").isfinite().all()
    assert fq.fake_quantize(x, "int8_narrow q8_0").tolist() == [127 * 65504.0, -127 * 65504.0, 0.0]


@pytest.mark.parametrize("arithmetic", ["q8_0", "q8_k"])
def test_no_scale_is_learned(arithmetic):
    quantizer = fq.nn.Quantizer(f"int8 {arithmetic}")
    quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    for method in fq.nn.learned_ranges():
        with pytest.raises(ConfigError, match="makes codes by another scale than it decodes them"):
            quantizer.learn(method)
