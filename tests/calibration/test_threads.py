"""Several threads that show batches to one calibrator: nothing is lost."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fakequant as fq
from fakequant.calibration import calibrators, make_calibrator
from fakequant.nn import Quantizer
from tests.support.bits import assert_same_bits

THREADS, BATCHES = 8, 30
METHODS = [method for method in calibrators() if not method.startswith("example_")]
# Threads show batches in any order.
MERGEABLE = [method for method in METHODS if make_calibrator(method, "int8").mergeable]


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(0)
    # Rising, so that ranges and bins grow again and again.
    return [torch.randn(64, 33) * 1.1**i for i in range(THREADS * BATCHES)]


def observed_by_one(method, spec, batches):
    calibrator = make_calibrator(method, spec)
    for batch in batches:
        calibrator.observe(batch)
    return calibrator


def assert_same(found, right):
    states = found.state_dict(), right.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert_same_bits(states[0][name], value, name)


@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)"])
@pytest.mark.parametrize("method", MERGEABLE)
def test_threads_lose_nothing(method, spec, batches):
    calibrator = make_calibrator(method, spec)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(calibrator.observe, batch) for batch in batches]:
            done.result()
    assert_same(calibrator, observed_by_one(method, spec, batches))


def test_threads_of_a_quantizer_lose_nothing(batches):
    quantizer = Quantizer("int8")
    quantizer.calibrator = make_calibrator("percentile", "int8")
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(quantizer.observe, batch) for batch in batches]:
            done.result()
    assert_same(quantizer.calibrator, observed_by_one("percentile", "int8", batches))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_calibrators_are_copied_and_go_on(copied, method, batches):
    right = observed_by_one(method, "int8", batches[:6])
    other = copied(observed_by_one(method, "int8", batches[:3]))
    for batch in batches[3:6]:
        other.observe(batch)
    assert_same(other, right)


def test_a_refused_batch_leaves_the_calibrator_free(batches):
    calibrator = make_calibrator("max", "int8")
    with pytest.raises(fq.FakeQuantError, match="NaN"):
        calibrator.observe(torch.tensor([float("nan")]))
    calibrator.observe(batches[0])
    assert calibrator.observed
