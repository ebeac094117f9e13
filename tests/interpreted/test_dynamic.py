"""Quantization by the range of the tensor itself, and ranges, equal the definition in every bit."""

import logging

import pytest
import torch
from kernels import MASKED, backend_of, unpacked

import fakequant as fq
from fakequant.numerics import qparams, reference
from fakequant.numerics.scales import ScaleSpec
from fakequant.ops.triton.backend import TritonBackend
from tests.support import cases
from tests.support.backends import Calls
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, LAYOUTS
from tests.support.dynamic_cases import FORMATS, RUNS, SCALES, composed, hostile, specs
from tests.support.matrix import each_dynamic_format, full, in_turn, sweep

MEASURED = [label for label, where in RUNS.items() if where.shape and where.shape[0] <= 1000 and label != "long_token"]
MAGNITUDES, BOUNDED = [2.0**-149, 2.0**-126, 1.0, 3e38], ["int4", "uint8", "float4_e2m1fn"]


def assert_dynamic(backend, x, spec, label):
    params = composed(x, spec)
    y, bits = backend.fake_quantize_dynamic(x, spec, mask=True)
    assert_same_bits(y, reference.fake_quantize(x, params, spec), f"{label} {spec}")
    assert_same_bits(unpacked(bits, x, spec), reference.passes(x, params, spec), f"{label} {spec} mask")


def compare(name, dtype, each):
    """A format on every granularity, with every arithmetic and scale; gradients and layouts in turn.

    Without `each` on every sixteenth granularity, with arithmetics and scales in turn.
    """
    turn = FORMATS.index(name) + list(DTYPES.values()).index(dtype)
    for label, where in RUNS.items():
        if not where.shape or where.shape[0] > 1000:
            continue
        chosen = list(specs(name, where.granularity))
        turn += 1
        if not each and turn % 16:
            continue
        # Without `each` a granularity gets one specification, and all of them have their turn.
        for spec in chosen if each else [chosen[7 * (turn // 4) % len(chosen)]]:
            turn += 4 * each
            x = LAYOUTS[list(LAYOUTS)[turn // 4 % len(LAYOUTS)]](hostile(where, dtype, turn))
            assert_dynamic(backend_of(turn // 4, x), x, spec.replace(gradient=MASKED[turn // 4 % len(MASKED)]), label)


@each_dynamic_format
def test_equals_the_definition(name, dtype):
    compare(name, dtype, each=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_definition_in_every_combination(name, dtype):
    compare(name, dtype, each=True)


@sweep("amax, name", full(MAGNITUDES, BOUNDED), in_turn(MAGNITUDES, BOUNDED))
def test_one_ulp_around_every_code_boundary_of_amax(amax, name):
    """amax one number below, at and above each multiple of the format's bound and each power of two near it."""
    starts = torch.tensor([amax * f for f in (1, 1.5, 1.75, 1.875, 0.75, 6, 7, 448, 2688)], dtype=torch.float32)
    tops = torch.cat([cases.neighbour(starts, torch.full((), step)) for step in (-1, 0, 1)])
    x = torch.where(tops.isfinite(), tops, 1.0)[:, None] * torch.linspace(-1, 1, 16)
    for spec in specs(name, fq.PerBlock({-1: 16})):
        assert_dynamic(Calls(TritonBackend("cpu", 1024)), x, spec, amax)


@pytest.mark.parametrize("size", [1, 8, 17, 31, 100])
def test_a_last_block_that_is_not_full(size):
    granularity = fq.PerBlock({-1: 32}, pad=True)
    where = cases.GranularityCase(granularity, (3, size), (1, 1))
    for spec in (fq.QuantSpec("uint4", granularity), fq.QuantSpec("nf4", granularity, scale=SCALES["e8m0 ceil"])):
        assert_dynamic(Calls(TritonBackend("cpu", 256)), hostile(where, torch.float32, size), spec, size)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 32)], ids=str)
def test_smallest_shapes(shape):
    for granularity in (fq.PerTensor(), fq.PerToken(), fq.PerBlock({-1: 32}, pad=True)):
        if not shape and not isinstance(granularity, fq.PerTensor):
            continue
        for symmetric in (True, False):
            spec, backend = fq.QuantSpec("int8", granularity, symmetric=symmetric), Calls(TritonBackend("cpu"))
            for value in (0.0, 1.5, float("inf"), float("nan")) if 0 not in shape else ():
                assert_dynamic(backend, torch.full(shape, value), spec, shape)
            y, bits = backend.fake_quantize_dynamic(torch.ones(shape), spec, mask=True)
            assert (y.shape, bits.numel() > 0) == (shape, 0 not in shape)
            for got, wanted in zip(
                backend.measure(torch.ones(shape), granularity), qparams.measure(torch.ones(shape), granularity),
                strict=True,
            ):  # fmt: skip
                assert_same_bits(got, wanted)


@sweep("label, dtype", full(MEASURED, DTYPES), in_turn(MEASURED, list(DTYPES)), dtype=DTYPES)
def test_measure_equals_the_definition(label, dtype):
    where, turn = RUNS[label], MEASURED.index(label)
    name = list(LAYOUTS)[turn % len(LAYOUTS)]
    x = LAYOUTS[name](hostile(where, dtype))
    found, right = backend_of(turn, x).measure(x, where.granularity), qparams.measure(x, where.granularity)
    for got, wanted in zip(found, right, strict=True):
        # + 0.0: the sign of a bound of zero is not defined.
        assert_same_bits(got + 0.0, wanted + 0.0, f"{label} {name}")


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(fq.PerTensor(), (700,)), (fq.PerToken(), (2, 701)), (fq.PerChannel(-1), (61, 20)), (fq.PerChannel(1), (9, 5, 3))],
    ids=["tensor", "long tokens", "columns", "short runs"],
)
def test_every_element_is_measured(granularity, shape):
    """The largest and the lowest value at the ends of what programs and their steps measure."""
    size, backend = torch.Size(shape).numel(), Calls(TritonBackend("cpu", 64))
    for end in (0, 63, 64, 512, size - 1):
        x = torch.full((size,), 0.1)
        x[min(end, size - 1)] = 5.0
        x[max(min(end, size - 1) - 1, 0)] = -7.0
        x = x.view(shape)
        for got, wanted in zip(backend.measure(x, granularity), qparams.measure(x, granularity), strict=True):
            assert_same_bits(got + 0.0, wanted + 0.0, end)


def test_stochastic_rounding_in_one_pass_and_in_two():
    stochastic = fq.Rounding.STOCHASTIC
    for turn, granularity in enumerate((fq.PerToken(), fq.PerBlock({-1: 8}), fq.PerChannel(-1), fq.PerTensor())):
        x = torch.randn(5, 40)
        for layout in ("contiguous", "transposed"):
            for name in ("int4", "float8_e5m2"):
                spec, seed = fq.QuantSpec(name, granularity, rounding=stochastic), torch.tensor(2**40 + turn)
                params = composed(x, spec)._replace(seed=seed)
                y, _ = Calls(TritonBackend("cpu", 64)).fake_quantize_dynamic(
                    LAYOUTS[layout](x), spec, mask=False, seed=seed
                )
                assert_same_bits(y, reference.fake_quantize(x, params, spec), f"{spec} {layout}")


def test_what_the_kernels_do_not_serve_is_composed(caplog):
    caplog.set_level(logging.DEBUG, "fakequant.backend")
    nested = ScaleSpec("uint8", granularity=fq.PerBlock({-1: 2}))
    where = RUNS["block_32"]
    for spec, reason in (
        (fq.QuantSpec("int8", where.granularity, scale=nested), "its scales share scales per_block(-1:2)"),
        (
            fq.QuantSpec("int8", where.granularity, gradient=fq.Gradient.CLIP),
            "its gradient ends at the values of codes",
        ),
    ):
        caplog.clear()
        assert_dynamic(Calls(TritonBackend("cpu")), hostile(where, torch.float32), spec, "")
        assert reason in caplog.text


def test_the_checker_can_fail(monkeypatch):
    """A scale one unit in the last place off."""
    from fakequant.ops.triton import backend, call

    where = RUNS["block_16"]
    x, spec = hostile(where, torch.float32), fq.QuantSpec("int8", where.granularity)

    def off(spec, dtype, *, mask):
        right = call.dynamic_call_of(spec, dtype, mask=mask)
        return call.replace(right, rule=call.replace(right.rule, bound=right.rule.bound * (1 + 2.0**-23)))

    monkeypatch.setattr(backend, "dynamic_call_of", off)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_dynamic(Calls(TritonBackend("cpu")), x, spec, "")
