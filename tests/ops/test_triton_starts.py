"""Kernels started again by what their first start compiled; a driver stands in for a GPU's, and starts nothing."""

from importlib.util import find_spec

import pytest
import torch

import fakequant as fq
from fakequant.ops.backend import VALUES, CallKind, Extras, ParameterKind
from fakequant.ops.triton.backend import TritonBackend
from tests.support.gpu_driver import Gpu

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is for Linux")


@pytest.fixture
def gpu(monkeypatch):
    from triton.runtime import driver

    from fakequant.ops.triton import launch

    found = Gpu()
    monkeypatch.setattr(driver, "_active", found)
    for kernel in (launch.quantize_kernel, launch.mask_kernel):
        kernel.device_caches.clear()
    yield found
    for kernel in (launch.quantize_kernel, launch.mask_kernel):
        kernel.device_caches.clear()


def plan_of(x, text, scale):
    of_scale = ParameterKind(scale.dtype, scale.device, scale.shape, True)
    kind = CallKind(fq.QuantSpec.parse(text), VALUES, x.dtype, x.device, x.shape, x.stride(), of_scale, None)
    plan = TritonBackend("cpu").plan(kind)
    assert plan is not None
    return plan


def numbers(given):
    """The arguments of a start, without the metadata that triton makes for its own hooks."""
    return [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given[:5] + given[9:]]


def test_a_start_repeats_the_first_on_other_tensors(gpu):
    x, scale = torch.randn(8, 64), torch.full((8, 1), 0.1)
    plan = plan_of(x, "int8 per_channel(0)", scale)
    for _ in range(3):
        y, mask = plan.values_and_mask(x, scale, None, None)
        dx = plan.grad_input(y, mask)
    assert gpu.compiled == ["quantize_kernel", "mask_kernel"]
    assert len(gpu.started) == 6
    first, again = (numbers(given) for given in (gpu.started[0], gpu.started[-2]))
    assert [*first[:5]] == [*again[:5]] == [1, 1, 1, "stream of 0", "function 1"]
    assert again[5:9] == [x.data_ptr(), y.data_ptr(), mask.data_ptr(), None]
    assert first[8:] == again[8:]
    assert numbers(gpu.started[-1])[5:8] == [y.data_ptr(), mask.data_ptr(), dx.data_ptr()]
    assert numbers(gpu.started[1])[8:] == numbers(gpu.started[-1])[8:]


def test_pointers_that_16_does_not_divide_are_compiled_for(gpu):
    memory, scale = torch.randn(65), torch.tensor(0.1)
    plan = plan_of(memory[1:], "int8", scale)
    for x, kernels in ((memory[1:], 1), (memory[:64], 2), (memory[1:], 2), (memory[:64], 2), (memory[1:], 2)):
        plan.values(x, scale, None, None)
        assert len(gpu.compiled) == kernels
        assert x.data_ptr() in numbers(gpu.started[-1])
    functions = [given[4] for given in gpu.started]
    assert functions == ["function 1", "function 2", "function 1", "function 2", "function 1"]


def test_other_devices_dtypes_and_extras_go_the_whole_way(gpu):
    x, scale = torch.randn(64), torch.tensor(0.1)
    plan = plan_of(x, "int8 per_tensor input_range", scale)
    _, mask = plan.values_and_mask(x, scale, None, None)
    plan.grad_input(x, mask)
    gpu.current = 1  # where nothing is loaded yet
    plan.values_and_mask(x, scale, None, None)
    assert gpu.started[-1][3] == "stream of 1"
    gpu.current = 0
    plan.grad_input(torch.ones(64, dtype=torch.bool), mask)
    assert gpu.compiled == ["quantize_kernel", "mask_kernel", "quantize_kernel", "mask_kernel"]
    ends = fq.Range(torch.tensor([-1.0]), torch.tensor([1.0]))
    plan.values_and_mask(x, scale, None, Extras(ends, None))
    assert {end.data_ptr() for end in ends} <= {*numbers(gpu.started[-1])}


def test_a_profiler_is_told_of_starts(gpu, monkeypatch):
    from triton import knobs

    x, scale, told = torch.randn(64), torch.tensor(0.1), []
    plan = plan_of(x, "int8", scale)
    for _ in range(2):
        plan.values(x, scale, None, None)
    assert gpu.started[-1][7] is None
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [told.append])
    plan.values(x, scale, None, None)
    assert gpu.started[-1][7] is knobs.runtime.launch_enter_hook
