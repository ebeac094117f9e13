import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fakequant import Config, FloatFormat, Rule, Specials
from fakequant.errors import CheckpointError, OutputError, SpecError
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.prepare import prepare
from fakequant.model.state.checkpoint import load, save
from fakequant.model.training.qat import Scales, set_scales
from fakequant.nn import Mode, learned_ranges, quantizers
from tests.support.checkpoints import assert_as_before, state_of
from tests.support.models import SmallNet, hook_forward, images, small_net, tied


def saved(folder: Path, config: Any = presets.INT8) -> SmallNet:
    model = prepare(small_net(), config)
    calibrate(model, [images()])
    save(model, folder)
    return model


@pytest.mark.parametrize("name", sorted(presets.presets()))
def test_round_trip_into_a_fresh_model(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, presets.presets()[name])
    fresh = small_net()
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    restored = load(fresh, tmp_path)
    assert torch.equal(restored(images()), model(images()))
    assert repr(restored) == repr(model)


def test_learned_scales_modes_and_shared_weights(tmp_path: Path) -> None:
    x = torch.tensor([[0, 5, 3]])
    model: Any = prepare(tied(), presets.INT8)
    calibrate(model, [x])
    model[1]._input_quantizer.learn("lsq", gradient_factor=False)
    model[0]._weight_quantizer.mode = Mode.OFF
    save(model, tmp_path)
    restored: Any = load(tied(), tmp_path)
    assert torch.equal(restored(x), model(x))
    learned = restored[1]._input_quantizer.learned
    assert learned is not None
    assert (learned.method, learned.options()) == ("lsq", {"gradient_factor": False})
    assert repr(restored) == repr(model)
    assert restored[0]._weight_quantizer.mode is Mode.OFF
    assert restored[1].weight is restored[0].weight


@pytest.mark.parametrize("method", learned_ranges())
def test_learned_ranges_come_back_with_method_and_parameters(method: str, tmp_path: Path) -> None:
    by_method = {"lsq": presets.INT8_AFFINE, "lsq_plus": presets.INT8_AFFINE, "pact": presets.INT8, "tqt": presets.INT8}
    model = prepare(small_net(), by_method.get(method, Config(Rule("*", input="int8", weight="int8"))))
    calibrate(model, [images()])
    set_scales(model, Scales.LEARNED, method)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{method}." in name:
                parameter.mul_(1.1)
    save(model, tmp_path)
    restored = load(small_net(), tmp_path)
    assert torch.equal(restored(images()), model(images()))
    assert repr(restored) == repr(model)
    assert {n for n, _ in restored.named_parameters()} == {n for n, _ in model.named_parameters()}


def test_an_uncalibrated_model_stays_uncalibrated(tmp_path: Path) -> None:
    save(prepare(small_net(), presets.INT8), tmp_path)
    assert not any(q.calibrated for q in quantizers(load(small_net(), tmp_path)).values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-9], "is truncated or damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its SHA-256 is not the recorded"),
    ],
)
def test_damage_is_found_and_the_model_is_untouched(change: Any, text: str, tmp_path: Path) -> None:
    saved(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(change(path.read_bytes()))
    fresh = small_net()
    with pytest.raises(CheckpointError, match=text):
        load(fresh, tmp_path)
    assert quantizers(fresh) == {}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(small_net(), tmp_path / "nowhere")


def test_another_architecture(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="layers that the model lacks: stem, "):
        load(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    other = small_net()
    other.head = nn.Conv2d(1, 1, 1)  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="layer head is a Linear, the model's is a Conv2d"):
        load(other, tmp_path)
    wider = small_net()
    wider.head = nn.Linear(8 * 16, 11)
    before = state_of(wider)
    with pytest.raises(CheckpointError, match=r"does not fit the model: (?s:.)*head\.weight"):
        load(wider, tmp_path)
    assert_as_before(wider, before)


def test_a_forward_that_would_bypass_the_quantizers_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    fresh = small_net()
    hook_forward(fresh.head)
    with pytest.raises(CheckpointError, match=r"the forward of the model's layer head was replaced, .* before load"):
        load(fresh, tmp_path)
    assert quantizers(fresh) == {}


def test_a_prepared_model_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path)
    with pytest.raises(CheckpointError, match="already prepared"):
        load(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"no quantizers; call fakequant\.prepare.* or save a float model"):
        save(small_net(), tmp_path)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "make", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=["weight", "spectral"]
)
def test_parametrized_layers_are_saved_and_loaded(
    tmp_path: Path, make: Callable[[nn.Module], nn.Module], training: bool
) -> None:
    def parametrized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = small_net()
        make(model.head)
        return model.train(training)

    model = prepare(parametrized(0), presets.INT8)
    calibrate(model, [images()])
    again = load(parametrized(1), save(model, tmp_path))
    assert again.training is training
    assert torch.equal(again.eval()(images()), model.eval()(images()))


def test_a_layer_that_was_parametrized_later_is_saved_and_loaded(tmp_path: Path) -> None:
    model = saved(tmp_path / "before")
    parametrize.register_parametrization(model.head, "weight", nn.Tanh())
    fresh = small_net()
    parametrize.register_parametrization(fresh.head, "weight", nn.Tanh())
    assert torch.equal(load(fresh, save(model, tmp_path / "model"))(images()), model(images()))


def test_missing_safetensors_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path)
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    needed = r"^checkpoints need safetensors, .* pip install 'fakequant\[checkpoint\]'$"
    with pytest.raises(CheckpointError, match=needed):
        save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    fresh = small_net()
    with pytest.raises(CheckpointError, match=needed):
        load(fresh, tmp_path)
    assert quantizers(fresh) == {}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(OutputError, match=r"cannot write to .*file; choose another folder|cannot write to .*file"):
        save(prepare(small_net(), presets.INT8), blocked / "inside")


def test_an_unregistered_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for label in ("private_e3m4", "float8_e4m3"):
        model = prepare(small_net(), presets.INT8_WEIGHT_ONLY)
        fmt = FloatFormat(label, 3, 4, Specials.NONE)
        model.stem._weight_quantizer.spec = model.stem._weight_quantizer.spec.replace(format=fmt)
        with pytest.raises(SpecError, match=r"make its format known by fakequant\.register_format"):
            save(model, tmp_path / label)
        assert list((tmp_path / label).iterdir()) == []


def test_a_class_of_the_same_name_without_a_quantized_form_is_refused_before_anything_changes(tmp_path):
    save(prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "INT8_WEIGHT_ONLY"), tmp_path)
    other = type("Linear", (nn.Linear,), {"forward": lambda self, x: x})
    model = nn.Sequential(nn.Linear(4, 4), other(4, 4))
    with pytest.raises(CheckpointError, match=r"layer 1 is a .*Linear, which has no quantized form; import the"):
        load(model, tmp_path)
    assert type(model[0]) is nn.Linear
