"""Compares the short eager path with the reference."""

import pytest
import torch

import fakequant as fq
from fakequant.ops import dispatch
from fakequant.ops.cpu.backend import load_kernels
from tests.support import cases
from tests.support.cases import LAYOUTS

needs_kernels = pytest.mark.skipif(load_kernels() is not None, reason=f"no backend offers it: {load_kernels()}")


def hostile(case, granularity, arithmetic, dtype, layout):
    """An input, its specification and its parameters."""
    numbers = cases.hostile(case, granularity, arithmetic, dtype)
    spec = case.spec(granularity.granularity, arithmetic)
    return LAYOUTS[layout](numbers.x), spec, fq.QParams(*numbers.params[:2])


def assert_served_if_supported(served, case, dtype, *, codes=False):
    cpu = next(backend for backend in dispatch.backends() if backend.name == "cpu")
    unsupported = cpu.unsupported(torch.ones(1, dtype=dtype), fq.QuantSpec(case.format), codes=codes)
    assert (served > 0) == (unsupported is None), unsupported
