"""More elements than 32-bit numbers count."""

import os

import pytest
import torch

import fakequant as fq
from fakequant.numerics.reference import Bins
from fakequant.ops.library import observe
from tests.support.bits import assert_same_bits

ELEMENTS = 2**31 + 1
PERIOD = 2**20
GIB = 2**30
# Input and result of two bytes an element, and what the test itself needs.
NEEDED = 4 * ELEMENTS + 2 * GIB


def available_memory() -> int:
    """Bytes that can be taken without swapping, where the system says so."""
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.exhaustive
def test_more_zeros_than_32_bits_count_are_counted():
    zeros = 2**32 + 1000
    if available_memory() < 2 * zeros + 2 * GIB:
        pytest.skip(f"needs {(2 * zeros + 2 * GIB) / GIB:.1f} GiB, {available_memory() / GIB:.1f} GiB are there")
    values = torch.zeros(1, zeros, dtype=torch.float16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # to which all fall
    try:
        counts = observe(values, Bins(torch.ones(1, dtype=torch.float64), 64)).counts
    finally:
        torch.set_num_threads(before)
    assert counts[0, 1, 0] == counts.sum() == zeros


@pytest.mark.exhaustive
def test_one_thread_counts_more_elements_than_the_root_of_64_bits():
    """The square of the number of elements is too large for int64."""
    elements = 3_100_000_000
    if available_memory() < 2 * elements + 2 * GIB:
        pytest.skip(f"needs {(2 * elements + 2 * GIB) / GIB:.1f} GiB, {available_memory() / GIB:.1f} GiB are there")
    x = torch.ones(elements, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fq.fake_quantize_(x, "int8", scale=torch.tensor(0.4))
    finally:
        torch.set_num_threads(before)
    right = torch.full((PERIOD,), 0.8).to(torch.bfloat16)
    for part in x.split(PERIOD):
        assert_same_bits(part, right[: len(part)])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("spec", "scale"), [("int8", torch.tensor(0.25)), ("float8_e4m3fn per_tensor", torch.tensor(0.25))]
)
def test_every_element_of_more_than_32_bits_can_count(spec, scale):
    if available_memory() < NEEDED:
        pytest.skip(f"needs {NEEDED / GIB:.1f} GiB of free memory, {available_memory() / GIB:.1f} GiB are there")
    period = ((torch.arange(PERIOD) % 2001 - 1000) * 0.0625).to(torch.float16)
    x = torch.empty(ELEMENTS, dtype=torch.float16)
    x[:-1].view(-1, PERIOD).copy_(period)
    x[-1] = -7.0312
    y = fq.fake_quantize(x, spec, scale=scale)
    right = fq.fake_quantize(period, spec, scale=scale)
    for part in y[:-1].view(-1, PERIOD):
        assert_same_bits(part, right)
    assert_same_bits(y[-1:], fq.fake_quantize(x[-1:], spec, scale=scale))
