"""The backend in the interpreter, and the comparison of all that it computes with the reference."""

import torch

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.layout import layout_of
from fakequant.ops.triton.backend import TritonBackend
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits

MASKED = [gradient for gradient in fq.Gradient if gradient is not fq.Gradient.IDENTITY]
MOST_PROGRAMS = 8


def backend_of(turn, x):
    """With programs of more elements than most cases have, or of few, so that runs are cut and programs begin in them.

    A program takes the interpreter 10 ms, however few its elements are.
    """
    block = (512, 64, 512, 16)[turn % 4]
    while block * MOST_PROGRAMS < x.numel():
        block *= 2
    return Calls(TritonBackend("cpu", block))


def unpacked(bits, x, spec):
    """The mask, as a tensor like x: found by torch alone."""
    layout = layout_of(spec.granularity, x.shape, x.stride())
    flags = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    packed = layout.pack(torch.zeros_like(x))
    order = sorted(range(packed.dim()), key=lambda a: -packed.stride(a))
    flat = flags.view(-1)[: packed.numel()].bool()
    in_memory = flat.view([packed.shape[a] for a in order]).permute([order.index(a) for a in range(packed.dim())])
    return layout.unpack(in_memory.contiguous() if not layout.dense else in_memory)


def assert_values(backend, numbers, spec, label):
    """Values and mask of one gradient."""
    x, params = numbers
    y, bits = backend.fake_quantize(x, params, spec, mask=True)
    assert_same_bits(y, reference.fake_quantize(x, params, spec), f"{label} {spec}")
    assert_same_bits(unpacked(bits, x, spec), reference.passes(x, params, spec), f"{label} {spec} mask")


def assert_codes(backend, numbers, spec, label):
    """Codes, and their values."""
    x, params = numbers
    codes = reference.quantize(x, params, spec)
    assert_same_bits(backend.quantize(x, params, spec), codes, f"{label} {spec} codes")
    decoded = backend.dequantize(codes, params, spec, x.dtype)
    assert_same_bits(decoded, reference.dequantize(codes, params, spec, x.dtype), f"{label} {spec} decoded")
