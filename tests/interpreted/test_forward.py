"""Values, masks and codes by given parameters equal the reference in every bit."""

import pytest
import torch
from kernels import MASKED, assert_codes, assert_values, backend_of

import fakequant as fq
from fakequant.numerics import qparams, reference
from fakequant.ops.triton.backend import TritonBackend
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS
from tests.support.matrix import each_format_once, full, in_turn, sweep


def compare(name, dtype, each):
    """A format on every granularity, with every arithmetic and gradient; layouts and sizes of programs in turn.

    Without `each` on every sixteenth granularity, with arithmetics and gradients in turn.
    """
    case, turn = FORMATS[name], list(FORMATS).index(name) + list(DTYPES.values()).index(dtype)
    for where_name, where in GRANULARITIES.items():
        turn += 1
        if not each and turn % 16:
            continue
        arithmetics, gradients = case.arithmetics(), MASKED
        if not each:
            arithmetics, gradients = (
                [arithmetics[turn // 4 % len(arithmetics)]],
                [gradients[(turn // 4 + turn // 16) % len(gradients)]],
            )
        for arithmetic in arithmetics:
            numbers = cases.hostile(case, where, arithmetic, dtype, seed=turn)
            x = LAYOUTS[list(LAYOUTS)[turn // 4 % len(LAYOUTS)]](numbers.x)
            backend = backend_of(turn // 4, x)
            for gradient in gradients:
                spec = case.spec(where.granularity, arithmetic, gradient=gradient)
                assert backend.unsupported(x, spec, codes=False) is None
                assert_values(backend, (x, numbers.params), spec, where_name)
            if (each or turn % 48 == 0) and backend.unsupported(x, spec, codes=True) is None:
                assert_codes(backend, (x, numbers.params), spec, where_name)


@each_format_once
def test_equals_the_reference(name, dtype):
    compare(name, dtype, each=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference_in_every_combination(name, dtype):
    compare(name, dtype, each=True)


FAMILIES = ("int8", "uint8_affine", "int16", "float8_e4m3fn", "float8_e5m2fnuz", "nf4")


@sweep("name, gradient, rounding", full(FAMILIES, MASKED, fq.Rounding), in_turn(FAMILIES, MASKED, list(fq.Rounding)))
def test_every_gradient_of_every_family(name, gradient, rounding):
    """With the range that was measured, and with those that scales of several dtypes imply."""
    case, where, turn = FORMATS[name], GRANULARITIES["channel_1"], FAMILIES.index(name)
    for arithmetic in case.arithmetics():
        x, params = cases.hostile(case, where, arithmetic, torch.float32, turn).__dict__.values()
        spec = case.spec(where.granularity, arithmetic, gradient=gradient, rounding=rounding)
        params = params._replace(seed=torch.tensor(turn * 2**40 - 3))
        measured = fq.Range(-torch.rand(where.groups), torch.rand(where.groups, dtype=torch.float64))
        scales = params.scale.double(), params.scale.bfloat16()
        for given in (params, params._replace(range=measured), *(params._replace(scale=s) for s in scales)):
            assert_values(Calls(TritonBackend("cpu", 512)), (x, given), spec, f"{given.scale.dtype} {given.range}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stochastic_rounding_follows_positions(layout):
    """On every sixth granularity, each in another layout."""
    for turn, (where_name, where) in enumerate(GRANULARITIES.items()):
        if (turn + list(LAYOUTS).index(layout)) % 6:
            continue
        name = ("int8", "float8_e4m3fn", "nf4", "uint8_affine")[turn % 4]
        case, dtype = FORMATS[name], (torch.float32, torch.bfloat16, torch.float64)[turn % 3]
        arithmetic = case.arithmetics()[turn % len(case.arithmetics())]
        numbers = cases.hostile(case, where, arithmetic, dtype, turn)
        spec = case.spec(where.granularity, arithmetic, rounding=fq.Rounding.STOCHASTIC)
        params = numbers.params._replace(seed=torch.tensor(turn * 2**40 - 3))
        assert_values(backend_of(turn, numbers.x), (LAYOUTS[layout](numbers.x), params), spec, where_name)
        if turn % 3 == 0:
            assert_codes(backend_of(turn, numbers.x), (LAYOUTS[layout](numbers.x), params), spec, where_name)


# Runs shorter and longer than a program, which divide it and do not, on several planes.
RUNS = [
    (fq.PerChannel(0), (3, 129)),
    (fq.PerChannel(0), (5, 64)),
    (fq.PerChannel(0), (5, 128)),
    (fq.PerChannel(1), (2, 3, 72)),
    (fq.PerChannel(1), (2, 3, 64)),
    (fq.PerChannel(1), (3, 5, 24)),
    (fq.PerChannel(1), (3, 5, 8)),
    (fq.PerChannel(1), (7, 5, 3)),
    (fq.PerChannel(-1), (37, 4)),
    (fq.PerChannel(-1), (3, 100)),
    (fq.PerBlock({0: 4, 1: 8}), (12, 32)),
    (fq.PerBlock({0: 4, 1: 96}), (8, 192)),
    (fq.PerBlock({0: 2, 1: 1}), (8, 16)),
    (fq.PerBlock({-1: 16}), (5, 48)),
    (fq.PerBlock({-1: 24}), (5, 48)),
    (fq.PerBlock({-1: 32}, pad=True), (5, 50)),
    (fq.PerBlock({0: 8, 1: 8}, pad=True), (9, 30)),
]


@sweep("granularity, shape, block", [(*run, block) for run in RUNS for block in (8, 64)], in_turn(RUNS, [8, 64]))
def test_runs_and_programs(granularity, shape, block):
    blocks = granularity.block_shape(shape)
    groups = granularity.group_shape(shape)
    x = torch.randn(shape) * 100
    params = fq.QParams(torch.rand(groups) + 0.1, torch.randint(-128, 128, groups))
    spec = fq.QuantSpec("int8", granularity, symmetric=False, gradient=fq.Gradient.CLIP)
    assert len(blocks) == len(shape)
    assert_values(Calls(TritonBackend("cpu", block)), (x, params), spec, block)


SIZES = [1, 7, 8, 9, 63, 64, 65, 200]


@sweep(
    "size, dtype, block",
    full(SIZES, ["float32", "bfloat16"], [16, 64]),
    in_turn(SIZES, ["float32", "bfloat16"], [16, 64]),
    dtype=DTYPES,
)
def test_remainders(size, dtype, block):
    x, params = (torch.randn(size) * 50).to(dtype), fq.QParams(torch.tensor([0.3]))
    backend = Calls(TritonBackend("cpu", block))
    assert_values(backend, (x, params), fq.QuantSpec("int8"), size)
    assert_codes(backend, (x, params), fq.QuantSpec("int8"), size)


def test_positions_beyond_32_bits(monkeypatch):
    """The kernels for 2**31 elements on a small tensor."""
    monkeypatch.setattr("fakequant.ops.triton.call.LARGEST_INT32", 7)
    for where_name in ("tensor", "channel_1", "channel_last", "tiles", "block_32"):
        where = GRANULARITIES[where_name]
        numbers = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32)
        # Blocks that nothing else uses: the plans of others are kept.
        backend, spec = Calls(TritonBackend("cpu", 128)), fq.QuantSpec("int8", where.granularity)
        assert_values(backend, (numbers.x, numbers.params), spec, where_name)
        _, bits = backend.fake_quantize(numbers.x, numbers.params, spec, mask=True)
        dx = backend.grad_input(numbers.x, bits, spec, numbers.x.stride())
        passing = reference.passes(numbers.x, numbers.params, spec)
        assert_same_bits(dx, reference.grad_input(numbers.x, passing), where_name)
        found, right = backend.measure(numbers.x, where.granularity), qparams.measure(numbers.x, where.granularity)
        for got, wanted in zip(found, right, strict=True):
            assert_same_bits(got + 0.0, wanted + 0.0, where_name)
        given = numbers.x, numbers.x, numbers.params, spec, (True, False)
        assert_same_bits(backend.grad_params(*given)[0], reference.grad_params(*given)[0], where_name)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 32)], ids=str)
def test_empty(shape):
    backend = Calls(TritonBackend("cpu"))
    for granularity in (fq.PerTensor(), fq.PerChannel(0), fq.PerChannel(-1), fq.PerToken()):
        spec, x = fq.QuantSpec("int8", granularity), torch.empty(shape)
        params = fq.QParams(torch.ones(granularity.group_shape(shape)))
        assert_values(backend, (x, params), spec, granularity)
        assert_codes(backend, (x, params), spec, granularity)
        y, bits = backend.fake_quantize(x, params, spec, mask=True)
        assert backend.grad_input(y, bits, spec, x.stride()).shape == shape


@pytest.mark.parametrize("name", ["int8", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "nf4"])
def test_every_float16_and_bfloat16_pattern(name):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    case, backend = FORMATS[name], Calls(TritonBackend("cpu", 2**16))
    for dtype in (torch.float16, torch.bfloat16):
        for scale in (0.013, 1e-30):
            for arithmetic in case.arithmetics():
                numbers = patterns.view(dtype), fq.QParams(torch.tensor([scale]))
                assert_values(backend, numbers, case.spec(fq.PerTensor(), arithmetic), f"{dtype} {scale}")


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.bool], ids=str)
def test_gradient_in_any_layout(dtype):
    """Bits pass as they are: NaN with its payload, -0.0."""
    where, backend = GRANULARITIES["channel_1"], Calls(TritonBackend("cpu", 64))
    numbers = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32)
    spec = fq.QuantSpec("int8", where.granularity)
    right = reference.passes(numbers.x, numbers.params, spec)
    given = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32, seed=1).x
    for x_layout, layout in LAYOUTS.items():
        if x_layout == "expanded":
            continue
        x = layout(numbers.x)
        _, mask = backend.fake_quantize(x, numbers.params, spec, mask=True)
        assert mask.dtype == torch.uint8
        assert mask.numel() == -(-x.numel() // 8)
        assert_same_bits(backend.unpack_mask(mask, x, spec), right, x_layout)
        for dy_layout in ("contiguous", "transposed", "expanded"):
            dy = LAYOUTS[dy_layout](given.to(dtype))
            dx = backend.grad_input(dy, mask, spec, x.stride())
            assert_same_bits(dx, torch.where(right, dy, torch.zeros((), dtype=dtype)), f"x {x_layout}, dy {dy_layout}")


NO_INTEGERS = [name for name, case in FORMATS.items() if not fq.QuantSpec(case.format).format.has_zero_point]


@pytest.mark.parametrize("name", NO_INTEGERS)
def test_every_code(name):
    """Decoded, and encoded again: NaN, infinities and both zeros among them."""
    case, backend = FORMATS[name], Calls(TritonBackend("cpu", 2**16))
    fmt = fq.QuantSpec(case.format).format
    number = len(fmt.grid.table.values) if fmt.grid.table else 2**fmt.bits
    stored = torch.arange(number).to(torch.int16 if fmt.bits > 8 else torch.uint8).view(fmt.storage)
    for dtype in (torch.float32, torch.float64):
        for turn, arithmetic in enumerate(case.arithmetics()):
            spec, params = case.spec(fq.PerTensor(), arithmetic), fq.QParams(torch.tensor([0.37 if turn else 1.0]))
            right = reference.dequantize(stored, params, spec, dtype)
            assert_same_bits(backend.dequantize(stored, params, spec, dtype), right, f"{spec} {dtype}")
            assert_same_bits(backend.quantize(right, params, spec), reference.quantize(right, params, spec), spec)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_floats_in_any_layout(layout):
    padded = cases.GranularityCase(fq.PerBlock({-1: 32}, pad=True), (3, 50), (1, 50))
    for where in (padded, *(GRANULARITIES[name] for name in ("channels_alternating", "tiles", "channel_last"))):
        for name in ("float8_e4m3fn", "half", "nf4"):
            x = LAYOUTS[layout](torch.randn(where.shape) * 5)
            spec = fq.QuantSpec(FORMATS[name].format, where.granularity)
            assert_codes(Calls(TritonBackend("cpu", 512)), (x, fq.choose_qparams(x, spec)), spec, where)


def test_encode_says_whether_something_is_nan():
    backend, spec, params = Calls(TritonBackend("cpu", 64)), fq.QuantSpec("int8"), fq.QParams(torch.ones(1))
    for place in (None, 0, 63, 64, 199):
        x = torch.randn(200)
        if place is not None:
            x[place] = float("nan")
        found = backend.encode(x, params, spec)
        assert found.has_nan == (place is not None)
        assert_same_bits(found.codes, reference.quantize(x, params, spec))


def test_the_checker_can_fail():
    x, params, spec = torch.randn(100), fq.QParams(torch.tensor([0.1])), fq.QuantSpec("int8")

    class Off(Calls):
        def fake_quantize(self, x, params, spec, *, mask):
            y, bits = super().fake_quantize(x, params, spec, mask=mask)
            return y, bits ^ self.flipped

        flipped = torch.tensor([0] * 5 + [4] + [0] * 7, dtype=torch.uint8)

    class OffByOne(Calls):
        def quantize(self, x, params, spec):
            codes = super().quantize(x, params, spec)
            codes[17] += 1
            return codes

    with pytest.raises(AssertionError, match=r"mask: 1 of 100 elements differ, first at \(42,\)"):
        assert_values(Off(TritonBackend("cpu")), (x, params), spec, "")
    with pytest.raises(AssertionError, match="codes: 1 of 100 elements differ"):
        assert_codes(OffByOne(TritonBackend("cpu")), (x, params), spec, "")
