"""What `sanitize.py` runs with sanitized kernels: every kernel, on small tensors of all kinds and lying arguments.

Values and codes are compared with the reference, as everywhere; the sanitizer looks at the rest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fakequant as fq
from fakequant.calibration import calibrators, make_calibrator
from fakequant.numerics import products as exact_products
from fakequant.numerics import reference
from fakequant.numerics.products import ConvParams, QuantizedOperand
from fakequant.ops import products
from fakequant.ops.cpu.backend import CpuBackend, load_kernels
from fakequant.ops.products import PackedWeight, convolution
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, FormatCase, GranularityCase
from tests.support.lying_calls import lying_calls

BACKEND = Calls(CpuBackend())
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 17, 31, 33, 63, 65, 127, 129, 1023, 1024, 1025]
SHAPES = (
    [(n,) for n in SIZES] + [(n, 5) for n in SIZES[:12]] + [(3, n) for n in SIZES] + [(2, 3, n, 5) for n in SIZES[:9]]
)
SPECS = [
    "int8",
    "uint8 per_channel(-1)",
    "int4 per_channel(0) reciprocal",
    "int8 per_token multiplier",
    "int16 per_tensor clip",
    "float8_e4m3fn per_channel(0)",
    "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor",
    "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
    "nf4 per_block(-1:64,pad)",
    "int8 per_tensor stochastic",
    "float8_e5m2 per_channel(-1) stochastic",
    "int8 per_tensor input_range",
]


def each_operator() -> Iterator[str]:
    """Formats, granularities, dtypes, arithmetics: with a mask, without, as codes; the gradients of all parameters."""
    for (format_name, case), (place, where), dtype in (
        (f, g, d) for f in FORMATS.items() for g in GRANULARITIES.items() for d in DTYPES.values()
    ):
        for arithmetic in case.arithmetics():
            yield f"{format_name} {place} {arithmetic.value} {dtype}"
            operate(case, where, arithmetic, dtype)


def operate(case: FormatCase, where: GranularityCase, arithmetic: fq.Arithmetic, dtype: torch.dtype) -> None:
    numbers = cases.hostile(case, where, arithmetic, dtype)
    x, params = numbers.x, numbers.params
    spec = case.spec(where.granularity, arithmetic)
    dy = cases.hostile_gradient(x)
    if BACKEND.unsupported(x, spec, codes=False) is None:
        right = reference.fake_quantize(x, params, spec)
        for way in cases.each_way():
            assert_same_bits(BACKEND.fake_quantize(x, params, spec, mask=False)[0], right, way)
            y, mask = BACKEND.fake_quantize_relu(x, params, spec, mask=True)
            assert mask is not None
            BACKEND.grad_input(dy, mask, spec, x.stride())
            for gradient in (fq.Gradient.CODE_RANGE, fq.Gradient.INPUT_RANGE, fq.Gradient.CLIP):
                y, mask = BACKEND.fake_quantize(x, params, spec.replace(gradient=gradient), mask=True)
                assert mask is not None
                assert_same_bits(y, right, way)
                BACKEND.grad_input(dy, mask, spec, x.stride())
        BACKEND.grad_params(dy, x, params, spec, (True, True))
        BACKEND.grad_params(dy, x, params, spec.replace(gradient=fq.Gradient.CLIP), (True, True))
        drawn = spec.replace(rounding=fq.Rounding.STOCHASTIC)
        if BACKEND.unsupported(x, drawn, codes=False) is None:
            BACKEND.fake_quantize(x, params._replace(seed=torch.tensor(7)), drawn, mask=True)
        for _ in cases.each_way():
            BACKEND.fake_quantize_dynamic(x.nan_to_num(), spec, mask=True)
    if BACKEND.unsupported(x, spec, codes=True) is None:
        codes = reference.quantize(x, params, spec)
        for way in cases.each_way():
            assert_same_bits(BACKEND.encode(x, params, spec).codes, codes, way)
            decoded = BACKEND.dequantize(codes, params, spec, dtype)
            assert_same_bits(decoded, reference.dequantize(codes, params, spec, dtype), way)


def each_size() -> Iterator[str]:
    """Odd sizes and layouts, through the functions that people call: forward, backward, learned, in place, dynamic."""
    for text in SPECS:
        for shape in SHAPES:
            for layout, laid in LAYOUTS.items():
                yield f"{text} {shape} {layout}"
                call(laid(torch.randn(shape)), text)


def call(x: Tensor, text: str) -> None:
    spec = fq.QuantSpec.parse(text)
    params = fq.choose_qparams(x, spec)
    given = {"scale": params.scale, "zero_point": params.zero_point}
    codes, kept = fq.quantize(x, spec, **given)
    fq.dequantize(codes, kept, spec)
    fq.fake_quantize_(x.clone(), spec, **given)
    for scale in (params.scale, params.scale.clone().requires_grad_()):
        for parameters in (given | {"scale": scale}, {}):
            wants = x.detach().requires_grad_()
            fq.fake_quantize(wants, spec, **parameters).sum().backward()


def each_calibrator() -> Iterator[str]:
    """Calibrators of all methods, several batches, merged, as tensors and by channels."""
    for method in calibrators():
        for text in ("int8", "uint8 per_channel(1)", "int4 per_channel(0)", "float4_e2m1fn", "float8_e4m3fn per_token"):
            for dtype in DTYPES.values():
                for n in (1, 7, 65, 1025):
                    yield f"{method} {text} {dtype} {n}"
                    one, other = make_calibrator(method, text), make_calibrator(method, text)
                    for width in (0.0, 1.0, 3.0, 100.0):
                        one.observe((torch.randn(4, n) * width).to(dtype))
                        other.observe((torch.randn(4, n).relu() * width).to(dtype))
                    if one.mergeable:
                        one.merge(other)
                    one.compute_range()


def each_product() -> Iterator[str]:
    """Integer products and convolutions of random sizes."""
    choose = random.Random(0)
    for i in range(400):
        outer, inner, columns = (choose.randint(1, 40) for _ in range(3))
        yield f"linear {i} {outer} {inner} {columns}"
        x = QuantizedOperand(torch.randint(0, 256, (outer, inner)).to(torch.uint8), torch.rand(1), torch.tensor(3))
        weight = QuantizedOperand(torch.randint(-128, 128, (columns, inner)).to(torch.int8), torch.rand(columns))
        products.linear(x, weight, torch.randn(columns))
    for i in range(400):
        axes = choose.randint(1, 3)
        kernel, stride, padding, dilation, more = (
            [choose.randint(low, high) for _ in range(axes)] for low, high in ((1, 4), (1, 3), (0, 3), (1, 2), (0, 12))
        )
        least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
        sizes = [a + b for a, b in zip(least, more, strict=True)]
        channels, outputs = choose.randint(1, 9), choose.randint(1, 17)
        yield f"convolution {i} {sizes} {kernel} {stride} {padding} {dilation} {channels} {outputs}"
        dtype = choose.choice((torch.int8, torch.uint8))
        info = torch.iinfo(dtype)
        codes = torch.randint(info.min, info.max + 1, (choose.randint(1, 5), channels, *sizes)).to(dtype)
        weight = torch.randint(-128, 128, (outputs, channels, *kernel)).to(torch.int8)
        places, scale = ConvParams(stride, padding, dilation, 1), torch.rand(outputs) + 0.1
        given = QuantizedOperand(codes, torch.tensor([0.013]), torch.tensor(choose.randint(0, 100)))
        bias = torch.randn(outputs) if i % 2 else None
        found = convolution(given, PackedWeight(weight, places), scale, bias)
        assert_same_bits(found, exact_products.convolution(given, QuantizedOperand(weight, scale), bias, places))


def each_lie() -> Iterator[str]:
    """Arguments that contradict each other raise."""
    for name, call_it in lying_calls():
        yield name
        try:
            call_it()
        except (RuntimeError, IndexError, NotImplementedError):
            continue
        raise AssertionError(f"taken: {name}")


def run(each: Callable[[], Iterator[str]]) -> None:
    count, case = 0, "nothing"
    try:
        for case in each():  # noqa: B007
            count += 1
    except BaseException:
        print(f"{each.__name__} at {case}", file=sys.stderr)
        raise
    print(f"  {each.__name__}: {count} cases", flush=True)


def main() -> None:
    torch.manual_seed(0)
    assert load_kernels() is None, load_kernels()
    if sys.argv[1:2] == ["fault"]:
        getattr(torch.ops.fakequant_cpu, f"fault_{sys.argv[2]}")(torch.zeros(1000))
        return
    for each in (each_lie, each_operator, each_size, each_calibrator, each_product):
        run(each)


if __name__ == "__main__":
    main()
