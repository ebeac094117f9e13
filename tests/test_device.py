"""Every public function that takes a model, on a made-up device whose rules are CUDA's: see tests/support/device."""

import inspect
import shutil

import pytest
import torch

import fakequant as fq
from tests.support import device as made_up
from tests.support.device import stories
from tests.support.device.stories import FUNCTIONS, MODELS, ON_THE_CPU, STORIES

OTHER_PROGRAMS = {"export_coreai", "export_coreml", "export_executorch", "export_litert"}
"""They need programs that are not installed here; they export the program of `export_pt2e`, or weights."""


@pytest.fixture(scope="module")
def device():
    """A process that has the device: once registered, it would stay for all tests."""
    if shutil.which("g++") is None:
        pytest.skip("the device is built with g++")
    with made_up.worker() as process:
        process.submit(stories.with_ieee_products).result()
        yield process


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_device_gives_the_bits_of_the_cpu(kind, story, device):
    found = device.submit(stories.differences, story, kind).result()
    if (kind, story) == ("attention", "trained_in_half"):
        assert found  # autocast computes a softmax in float32 on accelerators, in bfloat16 on a CPU
        return
    assert not found or device.submit(stories.differ_in_float, story, kind).result(), found


def test_every_function_that_takes_a_model_has_a_story():
    rooms = (fq, ""), (fq.ptq, "ptq.")
    functions = {prefix + name: getattr(room, name) for room, prefix in rooms for name in room.__all__}
    taking = {
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), None) == "model"
    }
    assert taking - FUNCTIONS == OTHER_PROGRAMS


@pytest.mark.parametrize("function", ON_THE_CPU)
def test_a_batch_on_another_device_is_named(function, device, tmp_path):
    text = device.submit(stories.refusal, function).result()
    assert "the batch is on cpu, and the model on made_up:0; give batch.to('made_up:0')" in text


def test_the_default_device_holds_in_all_threads(device):
    assert device.submit(stories.by_default).result() == [True, True]


def test_all_threads_run_on_the_stream_of_the_caller(device):
    assert device.submit(stories.launched_by_default).result() == 0


def test_a_model_that_draws_leaves_the_random_numbers_of_the_device(device):
    before, after = device.submit(stories.drawn, made_up.NAME).result()
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", ["linear", "convolutions"])
def test_a_second_device_gives_the_bits_of_the_first(kind, device):
    y, devices = device.submit(stories.on_the_second, kind).result()
    assert devices == {"made_up:1"}
    net, batches = stories.prepared(kind, "cpu")
    fq.ptq.improve(net, batches, "best", progress=False)
    assert torch.equal(stories.evaluated(net, batches[0]), y)


@pytest.mark.parametrize("kind", ["linear", "convolutions", "llama"])
def test_transforms_are_checked_without_tf32(kind, device):
    assert device.submit(stories.with_tf32, kind).result() == []


@pytest.mark.parametrize("method", ["mse", "max", "moving_average", "percentile", "entropy"])
@pytest.mark.parametrize("kind", ["linear", "convolutions", "block", "llama"])
def test_calibrate_waits_once_for_a_batch(kind, method, device):
    assert device.submit(stories.waits_by_batch, kind, method).result() <= 1


def test_a_batch_with_nan_is_named_as_on_the_cpu(device):
    text = device.submit(stories.refused_values, "linear", made_up.NAME).result()
    assert text == stories.refused_values("linear", "cpu")
    assert "32 NaN and 0 inf values of 1024" in text
    assert text.endswith("True")


def test_a_column_takes_few_launches_of_improve(device):
    assert device.submit(stories.launches_by_column).result() <= 0.2  # 10 where each was chosen by launches of its own


def test_improve_holds_few_times_a_wide_head(device):
    assert device.submit(stories.peak_of_a_head).result() <= 4  # 23 where all outputs were chosen at once
