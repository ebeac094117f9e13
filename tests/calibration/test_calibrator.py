"""What holds for every calibrator, now and later: the tests run over the registry."""

import copy
import pickle

import pytest
import torch

from fakequant import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec, choose_qparams, fake_quantize
from fakequant.calibration import Calibrator, calibrators, make_calibrator, register_calibrator
from fakequant.errors import CalibrationError, ConfigError, DTypeError, FakeQuantError, ShapeError
from fakequant.numerics.qparams import measure
from tests.support.bits import assert_same_bits
from tests.support.calibrators import OTHERS, assert_same_range, state_bits, watched

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
@pytest.mark.parametrize("travel", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies(method, travel):
    calibrator = watched(method, "uint4 per_channel(0)", torch.randn(2, 50))
    twin = travel(calibrator)
    assert state_bits(twin) == state_bits(calibrator)
    twin.observe(torch.full((2, 1), 9.0))
    assert calibrator.compute_range().hi.max() < 9


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
        ({**good, lo: torch.full((1,), 2.0)}, "is no range; expected equal shapes and finite values with"),
        ({**good, hi: torch.full((1,), float("nan"))}, "is no range; expected equal shapes and finite values with"),
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
