"""Kernels under exact scales and offsets, given and chosen by them, against the definition, in every bit."""

import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops.dispatch import choose
from fakequant.ops.kernel_params import cannot_choose
from fakequant.ops.layout import layout_of
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.lattices import ALL, LATTICES, MORE, hostile, weights
from tests.support.plan_cases import needs_kernels
from tests.support.threads import run_in_threads

TENSORS = {
    "plain": lambda: weights(16, 512),
    "hostile": hostile,
    "largest": lambda: hostile() * 1e38,
    "transposed": lambda: hostile().t().contiguous().t(),
    "with_gaps": lambda: weights(16, 1024)[:, ::2],
    "shared_memory": lambda: weights(1, 512).expand(4, 512),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*ALL, *MORE])
def test_bits_codes_and_gradients_are_those_of_the_definition(name: str, dtype: torch.dtype) -> None:
    spec = fq.QuantSpec.parse((ALL | MORE)[name])
    seed = torch.tensor(3) if spec.rounding is fq.Rounding.STOCHASTIC else None
    drawn = {} if seed is None else {"seed": seed}
    for label, make in TENSORS.items():
        x = make().to(dtype)
        params = reference.choose(x, spec)._replace(seed=seed)
        both = {"scale": params.scale, "zero_point": params.zero_point}
        expected, right_codes = reference.fake_quantize(x, params, spec), reference.quantize(x, params, spec)
        right_values = reference.dequantize(right_codes, params, spec, dtype)
        narrow = params._replace(scale=params.scale * 0.7, range=None)
        given, dy = {"scale": narrow.scale, "zero_point": narrow.zero_point}, torch.ones_like(x)
        passing = reference.grad_input(dy, reference.passes(x, narrow, spec))
        for way in cases.each_way():
            assert_same_bits(fq.fake_quantize(x, spec, **drawn), expected, f"{label} {way}")
            assert_same_bits(fq.fake_quantize(x, spec, **both, **drawn), expected, f"{label} {way}")
            codes = fq.quantize(x, spec, **both, **drawn)[0]
            assert torch.equal(codes.view(torch.uint8), right_codes.view(torch.uint8)), f"{label} {way}"
            assert_same_bits(fq.dequantize(codes, params, spec, dtype=dtype), right_values, f"{label} {way}")
            leaf = x.detach().requires_grad_()
            fq.fake_quantize(leaf, spec, **given, **drawn).backward(dy)
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, passing), f"{label} {way}"


def ties(spec: fq.QuantSpec) -> Tensor:
    """Rows [n, 512] whose scales, shared scales and offsets lie in the middle of two numbers, and beside it."""
    middles, scale, size = torch.arange(64) + 0.5, spec.scale, spec.granularity.block_shape((64, 512))[-1]
    halfs = 1 + 2.0**-10 * middles  # between two float16
    rows = [torch.zeros(64, 512) for _ in range(4)]
    parts = [(rows[:2], scale, spec.format.quant_max if spec.offset else scale.bound(spec.format))]
    parts += [(rows[2:], spec.offset, -1.0)] if spec.offset else []
    for (of_shared, of_codes), stored, bound in parts:
        whole = bound * (stored.format.farthest if stored.granularity else 1)
        of_shared[:, 0] = whole * halfs
        of_codes[:, 0] = whole
        of_codes[:, size] = bound * middles
    x = torch.cat(rows)
    return torch.cat([cases.neighbour(x, torch.full_like(x, step)) for step in (-1, 0, 1)])


@needs_kernels
@pytest.mark.parametrize("name", [name for name in LATTICES if name != "TQ2_0"])
def test_ties_of_scales_and_offsets(name: str) -> None:
    spec = fq.QuantSpec.parse(LATTICES[name])
    for dtype in (torch.float32, torch.float64):
        x = ties(spec).to(dtype)
        right = reference.fake_quantize(x, reference.choose(x, spec), spec)
        for way in cases.each_way():
            assert_same_bits(fq.fake_quantize(x, spec), right, way)


@needs_kernels
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_several_threads_give_equal_bits(name: str) -> None:
    x, spec = torch.cat([hostile(), weights(280, 512)]), fq.QuantSpec.parse(LATTICES[name])
    params = reference.choose(x, spec)
    right, passing = reference.fake_quantize(x, params, spec), reference.passes(x, params, spec).float()

    def work() -> None:
        torch.set_num_threads(2)
        leaf = x.clone().requires_grad_()
        y = fq.fake_quantize(leaf, spec)
        y.backward(torch.ones_like(y))
        assert_same_bits(y.detach(), right)
        assert_same_bits(leaf.grad, passing)

    run_in_threads(work)


@needs_kernels
@pytest.mark.parametrize("shape", [(0, 512), (3, 0), (0,)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    for name in ("Q8_0", "Q4_K", "Q6_K"):
        assert fq.fake_quantize(torch.ones(shape), ALL[name]).shape == shape


@needs_kernels
@pytest.mark.parametrize("name", LATTICES)
def test_kernels_serve_them_and_choose_their_scales(name: str) -> None:
    x, spec = weights(8, 512), fq.QuantSpec.parse(LATTICES[name])
    assert choose(x, spec).name == "cpu"
    for given in (x, x.expand(2, 8, 512), weights(8, 1024)[:, ::2]):
        layout = layout_of(spec.granularity, given.shape, given.stride())
        assert cannot_choose(spec, x.dtype, layout.group_shape, layout.group_order) is None


@needs_kernels
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("padded", "scales that share one per_block(-1:5,pad) do not follow each other in memory"),
        ("of_columns", "scales that share one per_block(0:4) do not follow each other in memory"),
        ("ue4m3_under_float16", "the kernels support integer codes of scales under a shared scale, not float8_e4m3fn"),
        ("float16_with_zero_point", "the kernels choose zero points by float32 scales only, not by those in float16"),
        ("bfloat16", "the kernels round scales up to 2**64, bfloat16 reaches 3.38953e+38"),
    ],
)
def test_scales_that_kernels_do_not_choose(name: str, reason: str) -> None:
    spec = fq.QuantSpec.parse((ALL | MORE)[name])
    assert cannot_choose(spec, torch.float32, spec.granularity.group_shape((16, 512))) == reason
