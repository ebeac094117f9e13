"""Quantizers in models with adapters of peft: their ranges train, and are saved with the adapter."""

import copy
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

import fakequant as fq
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision

pytest.importorskip("peft", reason="peft is not installed")
import_torchvision()  # transformers, which peft imports, imports it

import peft  # noqa: E402
import transformers  # noqa: E402

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(0))
CONFIGS = {
    "lora": {"peft_type": "LORA", "r": 2, "target_modules": ["0"]},
    "whole head": {"peft_type": "LORA", "r": 2, "target_modules": ["0"], "modules_to_save": ["2"]},
    "ia3": {"peft_type": "IA3", "target_modules": ["0"], "feedforward_modules": ["0"]},
    "vera": {"peft_type": "VERA", "r": 2, "target_modules": ["0"]},
}


def network(scale=1.0, *, learned=True):
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "int8")
    fq.calibrate(model, [X * scale], progress=False)
    if learned:
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def config(name="lora"):
    return peft.get_peft_config(CONFIGS[name])


def train(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()
    for _ in range(4):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    return model.eval()


def learned_steps(model):
    return {name: p for name, p in model.named_parameters() if name.endswith(".step") and "original_module" not in name}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("learned", [True, False])
def test_scales_travel_with_the_adapter(name, learned, tmp_path):
    """Learned and calibrated ones, into a base model that was calibrated on other data."""
    model = train(peft.get_peft_model(network(learned=learned), config(name)))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(network(3.0, learned=learned), tmp_path).eval()
    assert_same_bits(again(X), model(X))


def test_scales_of_the_adapter_itself_travel_too(tmp_path):
    """The model was prepared with the adapter in it; it is prepared again, and then its scales are loaded."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model = fq.prepare(peft.get_peft_model(copy.deepcopy(base), config()), "int8")
    fq.calibrate(model, [X], progress=False)
    train(model).save_pretrained(tmp_path)
    again = fq.prepare(peft.PeftModel.from_pretrained(base, tmp_path), "int8").eval()
    again.load_adapter(tmp_path, "default")
    assert_same_bits(again(X), model(X))


@pytest.mark.parametrize("name", CONFIGS)
def test_learned_scales_go_on_training(name):
    model = peft.get_peft_model(network(), config(name))
    before = {name: step.detach().clone() for name, step in learned_steps(model).items()}
    assert len(before) == 4
    assert all(step.requires_grad for step in learned_steps(model).values())
    train(model)
    assert not any(torch.equal(step, before[name]) for name, step in learned_steps(model).items())


def test_what_froze_them_otherwise_is_said_once():
    """Prompt learning freezes every parameter, and so does a program that imports peft after `set_scales`."""
    model = network().requires_grad_(False)
    model[0].bias.requires_grad_()
    with pytest.warns(UserWarning, match=r"requires_grad=False.*set_scales\(model, Scales\.LEARNED\)") as told:
        train(model)
    assert len(told) == 1
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    assert all(step.requires_grad for step in learned_steps(model).values())


def test_a_model_that_was_prepared_before_peft_was_imported(monkeypatch):
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "peft.utils.other")
        model = network()
    saved = peft.get_peft_model_state_dict(peft.get_peft_model(model, config()))
    assert sum(name.endswith(".step") for name in saved) == 4


def test_copies_and_pickles_compute_the_same():
    model = train(peft.get_peft_model(network(), config()))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(again(X), model(X))
        assert isinstance(again.base_model.model[2].input_quantizer, fq.nn.Quantizer)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_adapters_of_convolutions_are_in_float(axes):
    made = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[3] * axes)
    base = fq.prepare(nn.Sequential(made(4, 8, 3, padding=1)), "int8_affine")
    fq.calibrate(base, [x], progress=False)
    options = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)  # peft makes layers of the same class
    model = peft.get_peft_model(copy.deepcopy(base), options)
    layer = model.base_model.model[0]
    down, up = (nn.Sequential(made(*sizes, bias=False)) for sizes in ((4, 2, 3, 1, 1), (2, 8, 1)))
    down[0].weight, up[0].weight = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    y = model(x)
    assert_same_bits(y, base(x) + up(down(x)) * layer.scaling["default"])
    y.square().sum().backward()
    assert down[0].weight.grad.any()
    assert_same_bits(pickle.loads(pickle.dumps(model))(x), y)


def test_what_peft_does_with_its_own_modules():
    """Switch off, add, delete, mix adapters in a batch, and merge: quantizers stay as they are."""
    model = peft.get_peft_model(network(), config()).eval()
    expected = model(X)
    with model.disable_adapter():
        assert_same_bits(model(X), expected)
    model.add_adapter("other", config())
    model.set_adapter("other")
    assert peft.get_model_status(model).active_adapters == ["other"]
    assert_same_bits(model(X), expected)
    assert_same_bits(model(X, adapter_names=["default"] * 8 + ["other"] * 8), expected)
    model.delete_adapter("other")
    assert not any(".other." in name for name in peft.get_peft_model_state_dict(model))
    merged = model.merge_and_unload()
    assert_same_bits(merged(X), expected)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = merged[0].input_quantizer.nonsense


def classifier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **sizes)).eval()
    fq.calibrate(fq.prepare(model, "int8"), [IDS], progress=False)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def lora():
    return peft.LoraConfig(r=2, target_modules=["query"])


def test_an_adapter_that_transformers_holds_itself(tmp_path):
    model = classifier()
    model.add_adapter(lora())
    for step in learned_steps(model).values():
        assert step.requires_grad
        step.data *= 1.5
    model.save_pretrained(tmp_path)
    again = classifier()
    again.load_adapter(tmp_path)
    assert_same_bits(again.eval()(IDS).logits, model.eval()(IDS).logits)


@pytest.mark.parametrize("preset", ["int8", "int8_weight_only"])
@pytest.mark.parametrize("method", ["mse", "moving_average"])
def test_what_modules_to_save_replaces_has_the_ranges_of_its_copy(preset, method):
    """The original is not called while the adapter is on; without the adapter it gets the same inputs."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU(), nn.Sequential(nn.Linear(8, 4)))
    plain = fq.prepare(copy.deepcopy(base), preset)
    lora = peft.LoraConfig(r=2, target_modules=["0.0"], modules_to_save=["2"])
    model = fq.prepare(peft.get_peft_model(base, lora), preset, skip=["*lora_*"]).eval()
    with warnings.catch_warnings(action="error"):
        fq.calibrate(plain, [X], method, progress=False)
        fq.calibrate(model, [X], method, progress=False)
    assert_same_bits(model(X), plain(X))
    with model.disable_adapter():
        assert_same_bits(model(X), plain(X))


def test_adapters_do_not_hold_the_fixed_codes_of_the_model(tmp_path):
    """They are as large as the model, which has them; loading an adapter leaves them."""
    base = network(learned=False)
    quantizer = base[0].weight_quantizer
    quantizer.fix_codes(torch.randint(-128, 128, (8, 8), dtype=torch.int8), base[0].weight)
    codes = quantizer.fixed_codes.clone()
    model = train(peft.get_peft_model(base, config()))
    assert_same_bits(quantizer.fixed_codes, codes)  # its weight is frozen
    model.save_pretrained(tmp_path)
    saved = peft.utils.save_and_load.load_peft_weights(str(tmp_path))
    assert any(key.endswith("_weight_quantizer.scale") for key in saved)
    assert not any("fixed_codes" in key for key in saved)
    model.load_adapter(str(tmp_path), "again")
    assert quantizer.holds(model.base_model.model[0].base_layer.weight)
