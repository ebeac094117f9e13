"""States of float models in prepared ones, and the other way round."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fakequant as fq
from tests.support.bits import assert_same_bits
from tests.support.models import images, small_net


def calibrated(seed=0, *, learned=False):
    model = fq.prepare(small_net(), fq.presets.INT8)
    fq.calibrate(model, [images(seed=seed)], progress=False)
    if learned:
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def better():
    model = small_net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return model


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_a_float_state_replaces_the_weights_and_keeps_the_ranges(learned):
    model, source = calibrated(learned=learned), better()
    ranges = {name: copy.deepcopy(q.state_dict()) for name, q in fq.nn.quantizers(model).items()}
    assert str(model.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    for name, quantizer in fq.nn.quantizers(model).items():
        assert list(quantizer.state_dict()) == list(ranges[name])
        assert all(torch.equal(value, ranges[name][key]) for key, value in quantizer.state_dict().items())


def test_a_float_state_loads_into_a_part_and_into_a_wrapper():
    model, source = calibrated(), better()
    model.head.load_state_dict(source.head.state_dict())
    nn.Sequential(model).load_state_dict(nn.Sequential(source).state_dict())
    assert torch.equal(model.stem.weight, source.stem.weight)


def test_a_float_state_that_lacks_a_weight_names_the_weight_alone():
    state = better().state_dict()
    del state["stem.bias"]
    with pytest.raises(RuntimeError) as caught:
        calibrated().load_state_dict(state)
    assert 'Missing key(s) in state_dict: "stem.bias".' in str(caught.value)
    assert "quantizer" not in str(caught.value)


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_state_with_some_quantizers_is_refused(learned, place):
    state = calibrated(learned=learned).state_dict()
    layer = [key.split("._")[0] for key in state if "quantizer" in key][place]
    taken = [key for key in state if key.startswith(f"{layer}._")]
    for key in taken:
        del state[key]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)") as caught:
        calibrated(learned=learned).load_state_dict(state)
    assert all(key in str(caught.value) for key in taken)


def test_states_that_are_loaded_by_several_threads_do_not_mix():
    whole, found = calibrated().state_dict(), []
    part = {key: value for key, value in whole.items() if not key.startswith("stem._")}

    def load(state, model, errors):
        for _ in range(10):
            found.append(bool(model.load_state_dict(state, strict=False).missing_keys) is errors)

    work = [(part, calibrated(), True), (better().state_dict(), calibrated(), False), (whole, calibrated(), False)]
    threads = [threading.Thread(target=load, args=args) for args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_the_state_without_quantizers_is_that_of_the_float_model(learned):
    model, plain = calibrated(learned=learned), small_net()
    state = fq.float_state_dict(model)
    assert list(state) == list(plain.state_dict())
    assert dict(state._metadata) == dict(plain.state_dict()._metadata)
    plain.load_state_dict(state)
    with fq.disabled(model):
        assert_same_bits(model(images()), plain(images()))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\)"):
        plain.load_state_dict(model.state_dict())


def test_the_state_of_a_layer_under_two_names_has_no_quantizer():
    layer = nn.Linear(4, 4)
    model = fq.prepare(nn.Sequential(layer, layer), fq.presets.INT8)
    fq.calibrate(model, [torch.ones(1, 4)])
    assert list(fq.float_state_dict(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_an_averaged_model_made_after_the_ranges_is_exact(learned, use_buffers):
    model = calibrated(learned=learned)
    average = AveragedModel(model, use_buffers=use_buffers)
    for _ in range(2):
        average.update_parameters(model)
    assert_same_bits(average(images()), model(images()))


def test_an_averaged_model_made_before_the_ranges_is_refused_and_not_wrong():
    model = fq.prepare(small_net(), fq.presets.INT8)
    average = AveragedModel(model)
    fq.calibrate(model, [images()])
    with pytest.raises((RuntimeError, ValueError)):
        average.update_parameters(model)
    with pytest.raises(fq.FakeQuantError, match="has not been calibrated"):
        average(images())
