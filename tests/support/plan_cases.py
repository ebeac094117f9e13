"""Single calls by their plans."""

import pytest
import torch

import fakequant as fq
from fakequant.ops import dispatch
from fakequant.ops.backend import VALUES
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.dispatch import find_plan
from fakequant.ops.graph_operators import apply_plan
from tests.support import cases
from tests.support.cases import LAYOUTS

needs_kernels = pytest.mark.skipif(load_kernels() is not None, reason=f"no backend offers it: {load_kernels()}")


def by_plan(x, spec, scale, zero_point=None, variant=VALUES):
    """x quantized by its plan, whatever kernels check; None where there is no plan."""
    plan = find_plan(x, spec, scale, zero_point, variant)
    return None if plan is None else apply_plan(plan, x, scale, zero_point)


def checked(x, spec, scale, zero_point=None):
    """x quantized if kernels check its parameters, and find them valid."""
    plan = find_plan(x, spec, scale, zero_point)
    return apply_plan(plan, x, scale, zero_point) if plan is not None and plan.checks else None


def hostile(case, granularity, arithmetic, dtype, layout):
    """An input, its specification and its parameters."""
    numbers = cases.hostile(case, granularity, arithmetic, dtype)
    spec = case.spec(granularity.granularity, arithmetic)
    return LAYOUTS[layout](numbers.x), spec, fq.QParams(*numbers.params[:2])


def assert_served_if_supported(served, case, dtype, *, codes=False):
    """served: the names of the backends that served a format."""
    cpu = next(backend for backend in dispatch.backends() if backend.name == "cpu")
    unsupported = cpu.unsupported(torch.ones(1, dtype=dtype), fq.QuantSpec(case.format), codes=codes)
    assert served == {"cpu" if unsupported is None else "reference"}, unsupported
