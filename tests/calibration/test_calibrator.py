"""What holds for every calibrator, now and later: the tests run over the registry."""

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fakequant as fq
from fakequant import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec, choose_qparams, fake_quantize
from fakequant.calibration import Calibrator, calibrators, check_mergeable, make_calibrator, register_calibrator
from fakequant.errors import CalibrationError, ConfigError, DTypeError, FakeQuantError, ShapeError
from fakequant.nn import Quantizer
from fakequant.numerics.qparams import measure
from tests.support.bits import assert_same_bits
from tests.support.calibrators import MERGEABLE, OTHERS, assert_same_range, state_bits, watched

FORMATS = ["int8", "int8 per_tensor asymmetric", "uint8", "uint8 per_tensor symmetric", "int4", "int2", "int1"]
FORMATS += ["int8_narrow", "int[-100,37]", "float8_e4m3fn", "float8_e5m2", "int8 per_tensor multiplier"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
methods = pytest.mark.parametrize("method", calibrators())


def test_registry_names():
    assert {"entropy", "max", "moving_average", "mse", "percentile"} <= set(calibrators())
    assert "moving_average" in OTHERS
    assert calibrators() == sorted(calibrators())


@methods
def test_class_knows_its_name(method):
    assert make_calibrator(method, "int8").method == method


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("entropie", {}, "unknown calibrator 'entropie'; did you mean entropy?"),
        ("klx", {}, "unknown calibrator 'klx'; did you mean kl?"),
        ("max", {"percentile": 99}, "calibrator 'max' has no option 'percentile'; it has no options"),
        ("percentile", {"percent": 99}, "calibrator 'percentile' has no option 'percent'; did you mean percentile?"),
    ],
)
def test_unknown_names(method, options, message):
    with pytest.raises(ConfigError) as caught:
        make_calibrator(method, "int8", **options)
    assert str(caught.value) == message


def test_name_is_taken_once():
    with pytest.raises(ConfigError, match="already registered as 'max'"):
        register_calibrator("max")(type("Other", (Calibrator,), {}))
    assert make_calibrator("max", "int8").__class__.__name__ == "MaxCalibrator"


@methods
@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_range_lies_in_what_was_seen(method, spec, dtype):
    x = torch.randn(500).to(dtype)
    calibrator = watched(method, spec, x)
    found, seen = calibrator.compute_range(), measure(x, PerTensor())
    assert found.lo.dtype == found.hi.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.lo.shape == found.hi.shape == (1,)
    assert seen.lo <= found.lo <= 0 < found.hi <= seen.hi
    assert found.hi > 0.05 * seen.hi


@methods
@pytest.mark.parametrize("spec", ["int8", "uint8", "int4", "float8_e4m3fn"])
def test_values_that_are_never_negative_keep_zero(method, spec):
    found = watched(method, spec, torch.randn(1000).relu()).compute_range()
    assert_same_bits(found.lo, torch.zeros(1))
    assert found.hi > 0


@methods
@pytest.mark.parametrize("granularity", [PerChannel(0), PerChannel(1), PerChannel(0, 2), PerToken(), PerBlock({-1: 2})])
@pytest.mark.parametrize("fmt", ["int4", "uint4", "float8_e5m2"])
def test_groups_are_calibrated_alone(method, granularity, fmt):
    x = torch.randn(3, 4, 2, 6) * torch.logspace(-3, 6, 4)[:, None, None]
    x[0, 0] = 0.0
    spec = QuantSpec(fmt, granularity)
    found = watched(method, spec, x, 0.5 * x).compute_range()
    shape = granularity.group_shape(x.shape)
    assert found.lo.shape == found.hi.shape == shape
    blocks = granularity.block_shape(x.shape)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).tolist():
        group = x[tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, blocks, strict=True))]
        alone = watched(method, spec.replace(granularity=PerTensor()), group, 0.5 * group).compute_range()
        assert (found.lo[tuple(index)], found.hi[tuple(index)]) == (alone.lo.item(), alone.hi.item()), index


@methods
def test_length_of_the_batch_may_change(method):
    batches = [torch.randn(n, 3, 4, 4) for n in (1, 4, 2)]
    assert watched(method, "int8 per_channel(1)", *batches).compute_range().hi.shape == (1, 3, 1, 1)


@methods
def test_nothing_observed(method):
    calibrator = make_calibrator(method, "int8")
    calibrator.observe(torch.empty(0, 3))
    assert not calibrator.observed
    assert calibrator.state_dict() == {}
    assert calibrator.histogram() is None
    with pytest.raises(CalibrationError, match="no data was observed"):
        calibrator.compute_range()
    calibrator.observe(torch.ones(2, 3))
    calibrator.observe(torch.empty(0, 3))
    assert calibrator.observed
    assert calibrator.compute_range().hi == 1


@methods
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_dimensional(method, dtype):
    calibrator = watched(method, "int8", torch.tensor(-2.5, dtype=dtype))
    found = calibrator.compute_range()
    assert found.lo.shape == ()
    assert (found.lo, found.hi) == (-2.5, 0)


@methods
@pytest.mark.parametrize("spec", FORMATS)
def test_all_zeros(method, spec):
    found = watched(method, spec, torch.tensor([0.0, -0.0])).compute_range()
    assert_same_bits(found.lo, torch.zeros(1))
    assert_same_bits(found.hi, torch.zeros(1))


@methods
@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("value", [1e-45, 1e-40, 2.0**-126, 3.4028234663852886e38], ids=str)
def test_extreme_magnitudes(method, spec, value):
    x = torch.tensor([value, -value, 0.0])
    found = watched(method, spec, x, torch.zeros(3)).compute_range()
    assert bool(found.hi.isfinite() & found.lo.isfinite())
    assert 0 <= found.hi <= value
    assert -value <= found.lo <= 0


@methods
def test_one_value_is_kept_exactly(method):
    for value in (5.0, 0.1, 1e-30, 65504.0):
        found = watched(method, "int8", torch.full((100,), value)).compute_range()
        assert found.hi == torch.tensor(value)


@methods
def test_non_finite_batches_are_refused_whole(method):
    calibrator = watched(method, "int8", torch.ones(4))
    before = state_bits(calibrator)
    x = torch.full((2, 5), 7.0)
    x[0, 1], x[1, 1], x[1, 2], x[1, 4] = float("nan"), float("nan"), float("nan"), float("-inf")
    with pytest.raises(CalibrationError) as caught:
        calibrator.observe(x.reshape(10))
    assert str(caught.value).startswith("a batch of shape [10] contains 3 NaN and 1 inf values of 10; ")
    assert state_bits(calibrator) == before
    for dtype in DTYPES:
        for bad in ("nan", "inf", "-inf"):
            with pytest.raises(CalibrationError):
                calibrator.observe(torch.tensor([1.0, float(bad)], dtype=dtype))


@methods
def test_groups_must_stay(method):
    calibrator = watched(method, "int8 per_channel(1)", torch.ones(2, 3))
    before = state_bits(calibrator)
    with pytest.raises(ShapeError, match=r"the groups changed: scales have shape \[1, 3\].*\[1, 4\]"):
        calibrator.observe(torch.full((2, 4), 9.0))
    with pytest.raises(ShapeError, match="the groups changed"):
        calibrator.observe(torch.full((2, 3, 1), 9.0))
    assert state_bits(calibrator) == before
    with pytest.raises(DTypeError, match=r"torch\.int64"):
        calibrator.observe(torch.ones(2, 3, dtype=torch.int64))


LAYOUTS = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "strided": lambda x: torch.stack([x, -9 * x], dim=-1)[..., 0],
    "expanded": lambda x: x[:1].expand(6, -1, -1, -1),
    "flipped": lambda x: x.flip(0),
}


@methods
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)", "int8 per_channel(3,0)", "int8 per_block(1:2,3:5)"])
def test_memory_layouts(method, layout, spec):
    x = LAYOUTS[layout](torch.randn(6, 4, 3, 5))
    assert state_bits(watched(method, spec, x)) == state_bits(watched(method, spec, x.clone().contiguous()))


@methods
def test_input_stays_as_it_is(method):
    x = torch.randn(8, 4, requires_grad=True)
    copy_of_x = x.detach().clone()
    found = watched(method, "int8", x, torch.nn.Parameter(x.detach())).compute_range()
    assert_same_bits(x.detach(), copy_of_x)
    assert not found.hi.requires_grad


@methods
def test_inference_mode_leaves_plain_tensors(method):
    with torch.inference_mode():
        inside = watched(method, "uint8", torch.randn(100), torch.randn(100) * 50)
        if inside.mergeable:
            inside.merge(watched(method, "uint8", torch.randn(10)))
        found = inside.compute_range()
    assert not any(value.is_inference() for value in (*found, *inside.state_dict().values()))
    inside.observe(torch.randn(100))
    if inside.mergeable:
        inside.merge(watched(method, "uint8", torch.randn(100)))
    found.lo.add_(0.0)


@methods
@pytest.mark.parametrize("context", ["autocast", "default_dtype"])
def test_context_changes_nothing(method, context):
    x = torch.randn(200)
    expected = watched(method, "int4", x).compute_range()
    if context == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = watched(method, "int4", x).compute_range()
    else:
        torch.set_default_dtype(torch.float64)
        try:
            found = watched(method, "int4", x).compute_range()
        finally:
            torch.set_default_dtype(torch.float32)
    assert_same_range(found, expected)


@methods
def test_result_is_no_alias(method):
    calibrator = watched(method, "int8", torch.randn(100))
    first = calibrator.compute_range()
    kept = first.hi.clone()
    first.hi.mul_(100)
    for value in calibrator.state_dict().values():
        value.zero_()
    assert_same_bits(calibrator.compute_range().hi, kept)


@methods
def test_state_travels(method):
    calibrator = watched(method, "int4 per_channel(0)", torch.randn(2, 500), torch.randn(2, 10) * 100)
    twin = make_calibrator(method, "int4 per_channel(0)")
    twin.load_state_dict(calibrator.state_dict())
    assert_same_range(twin.compute_range(), calibrator.compute_range())
    more = torch.randn(2, 3) * 1000
    twin.observe(more)
    calibrator.observe(more)
    assert state_bits(twin) == state_bits(calibrator)
    twin.load_state_dict({})
    assert not twin.observed
    twin.observe(torch.ones(2, 3))
    assert twin.compute_range().hi.max() == 1


@methods
def test_bad_states(method):
    calibrator = watched(method, "int8", torch.ones(4))
    good = calibrator.state_dict()
    before = state_bits(calibrator)
    lo, hi = (next(name for name in good if name.endswith(end)) for end in ("lo", "hi"))
    for bad, message in (
        ({**good, "mean": torch.ones(1)}, "the tensors .*mean.*expected"),
        ({name: good[name] for name in good if name != lo}, f"expected .*{lo}"),
        ({**good, lo: torch.full((1,), 2.0)}, "is not a range; expected equal shapes and finite values with"),
        ({**good, hi: torch.full((1,), float("nan"))}, "is not a range; expected equal shapes and finite values with"),
        ({**good, hi: torch.ones(2)}, rf"{hi} of shape \[2\]"),
    ):
        with pytest.raises(CalibrationError, match=message):
            calibrator.load_state_dict(bad)
        assert state_bits(calibrator) == before


@methods
def test_range_serves_choose_qparams(method):
    x = torch.randn(4, 100)
    for spec in ("int8 per_channel(0)", "uint8 per_channel(0)", "float8_e4m3fn per_channel(0)"):
        found = watched(method, spec, x).compute_range()
        error = fake_quantize(x.clamp(found.lo, found.hi), spec, amax=found.amax if "uint8" not in spec else None) - x
        assert error.abs().mean() < 0.05
    assert choose_qparams(x, "int8").scale > 0


@methods
def test_errors_are_of_the_package(method):
    with pytest.raises(FakeQuantError):
        make_calibrator(method, "int9x")
    with pytest.raises(FakeQuantError):
        make_calibrator(method, "int8 per_channel(5)").observe(torch.ones(2))


mergeable_methods = pytest.mark.parametrize("method", MERGEABLE)


@mergeable_methods
def test_cuts_into_batches_change_nothing(method):
    x = torch.randn(6, 3, 4, 4)
    parts = watched(method, "int8 per_channel(1)", x[:1], x[1:5], x[5:])
    whole = watched(method, "int8 per_channel(1)", x)
    assert state_bits(parts) == state_bits(whole)


HOSTILE = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1e-3, -1.0, 1.0, 4095.0, 1e6, -3e38, 3.4028234e38])
VALUES = st.one_of(HOSTILE, st.floats(width=32, allow_nan=False, allow_infinity=False))
STREAMS = st.lists(st.lists(VALUES, max_size=5), max_size=5)


@mergeable_methods
@given(left=STREAMS, right=STREAMS, order=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_merge_equals_both_streams_in_any_order(method, left, right, order):
    known = inspect.signature(type(make_calibrator(method, "int4"))).parameters
    options = {"num_bins": 64} if "num_bins" in known else {}
    a, b, both = (make_calibrator(method, "int4", **options) for _ in range(3))
    for calibrator, stream in ((a, left), (b, right)):
        for batch in stream:
            calibrator.observe(torch.tensor(batch, dtype=torch.float32))
    before = state_bits(b)
    together = left + right
    order.shuffle(together)
    for batch in together:
        both.observe(torch.tensor(batch, dtype=torch.float32))
    a.merge(b)
    assert state_bits(a) == state_bits(both)
    assert state_bits(b) == before
    assert a.observed == both.observed == any(together)
    if a.observed:
        assert_same_range(a.compute_range(), both.compute_range())


@mergeable_methods
def test_merge_of_dtypes(method):
    streams = [torch.tensor([1e-300, 0.25], dtype=torch.float64), torch.tensor([-1e-40, 1e-42]), torch.ones(2).half()]
    one_way = watched(method, "int4", *streams)
    other_way = watched(method, "int4", streams[2])
    other_way.merge(watched(method, "int4", streams[1], streams[0]))
    assert state_bits(one_way) == state_bits(other_way)
    assert_same_range(one_way.compute_range(), other_way.compute_range())


@mergeable_methods
def test_merge_shares_no_memory(method):
    a, b = make_calibrator(method, "int8"), watched(method, "int8", torch.ones(4))
    a.merge(b)
    before = state_bits(b)
    a.observe(torch.tensor([100.0, -7.0]))
    assert state_bits(b) == before
    a.merge(a)
    assert a.compute_range().hi <= 100


@pytest.mark.parametrize("method", OTHERS)
def test_what_does_not_merge_says_so(method):
    a, b = watched(method, "int8", torch.ones(4)), watched(method, "int8", torch.zeros(4))
    before = state_bits(a)
    with pytest.raises(ConfigError, match="does not merge; its result depends on the order of the batches"):
        a.merge(b)
    assert state_bits(a) == before
    with pytest.raises(ConfigError, match=rf"ranks differ, and the method .*use one of {', '.join(MERGEABLE)}$"):
        check_mergeable(a, "ranks differ")
    for name in MERGEABLE:
        check_mergeable(make_calibrator(name, "int8"), "ranks differ")


@mergeable_methods
def test_merge_refuses_another_kind(method):
    a = watched(method, "int8", torch.ones(4))
    other = next(name for name in calibrators() if name != method)
    for b in (make_calibrator(other, "int8"), make_calibrator(method, "int4")):
        with pytest.raises(ConfigError, match="the same method and specification"):
            a.merge(b)
    c = watched(method, "int8 per_channel(0)", torch.ones(4, 2))
    with pytest.raises(ShapeError, match=r"the groups changed.*\[4, 1\].*\[3, 1\]"):
        c.merge(watched(method, "int8 per_channel(0)", torch.ones(3, 2)))


def test_a_refused_batch_leaves_the_calibrator_free(batches):
    calibrator = make_calibrator("max", "int8")
    with pytest.raises(fq.FakeQuantError, match="NaN"):
        calibrator.observe(torch.tensor([float("nan")]))
    calibrator.observe(batches[0])
    assert calibrator.observed


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(0)
    # Rising, so that ranges and bins grow again and again.
    return [torch.randn(64, 33) * 1.1**i for i in range(240)]


def in_threads(observe, batches):
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(observe, batch) for batch in batches]:
            done.result()


@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)"])
@mergeable_methods
def test_threads_lose_nothing(method, spec, batches):
    calibrator = make_calibrator(method, spec)
    in_threads(calibrator.observe, batches)
    assert state_bits(calibrator) == state_bits(watched(method, spec, *batches))


def test_threads_of_a_quantizer_lose_nothing(batches):
    quantizer = Quantizer("int8")
    quantizer.calibrator = make_calibrator("percentile", "int8")
    in_threads(quantizer.observe, batches)
    assert state_bits(quantizer.calibrator) == state_bits(watched("percentile", "int8", *batches))


@methods
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_go_on(copied, method, batches):
    one = watched(method, "uint4 per_channel(0)", *batches[:3])
    before, other = state_bits(one), copied(one)
    for batch in batches[3:6]:
        other.observe(batch)
    assert state_bits(other) == state_bits(watched(method, "uint4 per_channel(0)", *batches[:6]))
    # A shallow copy shares its tensors, as any object's does.
    assert copied is copy.copy or state_bits(one) == before
