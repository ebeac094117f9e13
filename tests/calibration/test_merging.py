"""What several calibrators saw, merged: the tests run over the registry."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakequant.calibration import calibrators, check_mergeable, make_calibrator
from fakequant.errors import ConfigError, ShapeError
from tests.support.calibrators import MERGEABLE, OTHERS, assert_same_range, state_bits, watched

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
        with pytest.raises(ConfigError, match="one method and one specification"):
            a.merge(b)
    c = watched(method, "int8 per_channel(0)", torch.ones(4, 2))
    with pytest.raises(ShapeError, match=r"the groups changed.*\[4, 1\].*\[3, 1\]"):
        c.merge(watched(method, "int8 per_channel(0)", torch.ones(3, 2)))
