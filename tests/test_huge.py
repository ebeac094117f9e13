"""More elements than 32-bit numbers count."""

import os

import pytest
import torch
from bits import assert_same_bits

import fakequant as fq

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
