"""LoRA on quantized layers that trains as it will be merged: codes before and after the merge are equal."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision

pytest.importorskip("peft", reason="peft is not installed")
import_torchvision()

import peft  # noqa: E402

from fakequant.integrations.peft import train_merged  # noqa: E402
from fakequant.nn.stored import StoredWeight  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(16, 8, generator=GENERATOR)
IMAGES = torch.randn(4, 3, 6, 6, generator=GENERATOR)
IDS = torch.randint(0, 12, (16, 5), generator=GENERATOR)


def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def table():
    return nn.Sequential(nn.Embedding(12, 8), nn.Flatten(), nn.Linear(40, 4))


def based(make=linear, x=X, *, learned=True, dtype=torch.float32, config="int4"):
    torch.manual_seed(0)
    model = fq.prepare(make().to(dtype), config)
    x = x.to(dtype) if x.is_floating_point() else x
    fq.calibrate(model, [x], progress=False)
    if learned:
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def lora(**options):
    return peft.LoraConfig(**{"r": 2, "target_modules": ["0"], "init_lora_weights": True, **options})


def train(model, x=X, steps=4, precision=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
            y = model(x)
        (y.float() - 1).square().mean().backward()
        if step == 0:
            with torch.no_grad():  # B is zero, so that A has no gradient
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.add_(0.1 * torch.randn(parameter.shape, generator=GENERATOR).to(parameter.dtype))
        optimizer.step()
    return model.eval()


def merged_codes(model):
    """The codes that the first layer computes with now, before any merge."""
    layer = next(one for one in model.modules() if hasattr(one, "merged_tensors"))
    weight = layer.merged_tensors(layer.active_adapters)["weight"]
    return layer.get_base_layer()._weight_quantizer.codes(weight.detach())


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    ("make", "x", "options", "dtype", "precision"),
    [
        (linear, X, {}, torch.float32, None),
        (linear, X, {"use_rslora": True, "r": 4, "lora_alpha": 32}, torch.float32, None),
        (linear, X, {"lora_bias": True}, torch.float32, None),
        (linear, X, {}, torch.float32, "bf16"),
        (linear, X.bfloat16(), {}, torch.bfloat16, None),
        (convolution, IMAGES, {}, torch.float32, None),
        (table, IDS, {}, torch.float32, None),
    ],
    ids=["linear", "rslora", "bias", "autocast", "bfloat16", "convolution", "embedding"],
)
def test_merging_leaves_the_trained_codes(make, x, options, dtype, precision, safe):
    config = fq.Config("few", (fq.Rule("*", weight="int4 per_channel(0)"),)) if make is table else "int4"
    model = train_merged(peft.get_peft_model(based(make, x, dtype=dtype, config=config), lora(**options)))
    before = merged_codes(model)[0]
    train(model, x, precision=precision)
    codes, params = merged_codes(model)
    expected = model(x)
    assert not torch.equal(codes, before)  # it has trained
    merged = model.merge_and_unload(safe_merge=safe)
    assert type(merged[0]).__name__.startswith("Quant")
    after, now = merged[0]._weight_quantizer.codes(merged[0].weight.detach())
    assert torch.equal(after, codes)
    assert_same_bits(now.scale, params.scale)
    assert_same_bits(merged(x), expected)


def test_beside_the_layer_merging_changes_codes():
    """What peft does by itself, and what this is for."""
    model = train(peft.get_peft_model(based(), lora()))
    expected = model(X)
    assert not torch.equal(model.merge_and_unload()(X), expected)


def test_two_adapters_are_added_as_they_are_merged():
    model = train_merged(peft.get_peft_model(based(), lora()))
    model.add_adapter("other", lora(r=3))
    train(model)
    model.base_model.set_adapter("other")
    train(model)
    alone = model(X)
    model.base_model.set_adapter(["default", "other"])
    both = model(X)
    assert not torch.equal(both, alone)
    codes = merged_codes(model)[0]
    model.merge_adapter()
    assert_same_bits(model(X), both)
    with model.disable_adapter():
        assert not torch.equal(model(X), both)
    merged = model.merge_and_unload()
    assert torch.equal(merged[0]._weight_quantizer.codes(merged[0].weight.detach())[0], codes)


@pytest.mark.parametrize("learned", [True, False])
def test_an_adapter_carries_its_scales(learned, tmp_path):
    model = train(train_merged(peft.get_peft_model(based(learned=learned), lora())))
    model.save_pretrained(tmp_path)
    fresh = based(x=3 * X, learned=learned)
    again = train_merged(peft.PeftModel.from_pretrained(fresh, tmp_path)).eval()
    assert_same_bits(again(X), model(X))
    assert_same_bits(again.merge_and_unload()(X), model(X))


def test_copies_and_pickles_train_merged_too():
    model = train(train_merged(peft.get_peft_model(based(), lora())))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(again(X), model(X))
        assert_same_bits(again.merge_and_unload()(X), model(X))


def test_a_model_with_adapters_is_prepared_by_a_training():
    training = fq.qat.Training("int4", [X], scales=fq.qat.Scales.LEARNED)
    model = training.prepare(peft.get_peft_model(linear(), lora()))
    assert not any("lora_" in name for name in fq.nn.quantizers(model))
    train(model)
    expected = model(X)
    assert_same_bits(model.merge_and_unload()(X), expected)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"use_dora": True}, r"0: the adapter 'default' is a Dora\w+, whose merged weight is not W \+ scaling"),
        ({"lora_dropout": 0.1}, r"'default' applies dropout to its input, which a merged weight cannot do; give Lora"),
    ],
)
def test_what_no_weight_can_hold_is_refused(options, told):
    model = peft.get_peft_model(based(), lora(**options))
    with pytest.raises(ConfigError, match=told):
        train_merged(model)
    assert not any(hasattr(one, "merged_tensors") for one in model.modules())
    later = train_merged(peft.get_peft_model(based(), lora()))
    later.add_adapter("other", lora(**options))
    later.set_adapter("other")
    with pytest.raises(ConfigError, match=told.replace("0: ", "").replace("default", "other")):
        later(X)


def test_other_uses_are_refused():
    quantized = fq.prepare(peft.get_peft_model(linear(), lora()), "int8")
    with pytest.raises(ConfigError, match=r"0: the adapter has the quantizer lora_A.*skip=\['\*lora_\*'\]"):
        train_merged(quantized)
    model = train_merged(peft.get_peft_model(based(), lora()))
    model.add_adapter("other", lora())
    with pytest.raises(ConfigError, match="several adapters in a batch, which have no single merged weight"):
        model.eval()(X, adapter_names=["default"] * 8 + ["other"] * 8)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("config", ["int4", "nf4_weight_only", "gguf_q4_0"])
@pytest.mark.parametrize(
    ("make", "x", "options"),
    [(linear, X, {}), (linear, X, {"lora_bias": True}), (convolution, IMAGES, {}), (table, IDS, {})],
    ids=["linear", "bias", "convolution", "embedding"],
)
@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
def test_on_stored_codes_training_and_merging_have_the_bits_of_floats(make, x, options, config, precision, safe):
    found = []
    for store in (lambda model: model, fq.store_codes):
        base = fq.store_floats(fq.store_codes(based(make, x, learned=False, config=config)))
        model = train_merged(peft.get_peft_model(store(base), lora(**options)))
        GENERATOR.manual_seed(0)
        found.append(train(model, x, precision=precision))
    kept, stored = found
    assert type(merged_layer(stored).get_base_layer().weight) is StoredWeight
    for one, other in zip(adapters(stored), adapters(kept), strict=True):
        assert_same_bits(one, other)
    expected, codes = stored(x), merged_codes(stored)[0]
    assert_same_bits(kept(x), expected)
    merged = stored.merge_and_unload(safe_merge=safe)
    assert torch.equal(merged[0].weight.codes(), codes)
    assert_same_bits(merged(x), expected)
    assert_same_bits(kept.merge_and_unload()(x), expected)


def merged_layer(model):
    return next(one for one in model.modules() if hasattr(one, "merged_tensors"))


def adapters(model):
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def stored_lora(**options):
    return train_merged(peft.get_peft_model(fq.store_codes(based(learned=False)), lora(**options)))


def test_merged_codes_are_taken_back():
    model = stored_lora(lora_bias=True)
    with model.disable_adapter():
        before = model(X)
    expected = train(model)(X)
    model.merge_adapter()
    model.merge_adapter()  # is merged
    assert_same_bits(model(X), expected)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(again(X), expected)
        with again.disable_adapter():
            assert_same_bits(again(X), before)
    model.unmerge_adapter()
    assert_same_bits(model(X), expected)


def test_codes_of_nan_are_not_merged():
    model = train(stored_lora())
    before = merged_layer(model).get_base_layer().weight.codes()
    with torch.no_grad():
        merged_layer(model).lora_A["default"].weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite values in the weights with default merged"):
        model.merge_adapter()
    assert torch.equal(merged_layer(model).get_base_layer().weight.codes(), before)


def test_training_as_merged_keeps_no_weight_of_stored_codes():
    model, saved = stored_lora().train(), []
    size = model.base_model.model[0].get_base_layer().weight.numel()
    x = X[:2].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        model.base_model.model[0](x)
    assert all(one.numel() < size for one in saved if type(one) is not StoredWeight)


def test_beside_stored_codes_adapters_train_as_beside_floats_and_cannot_be_merged():
    found = []
    for store in (lambda model: model, fq.store_codes):
        base = fq.store_floats(fq.store_codes(based(learned=False)))
        GENERATOR.manual_seed(0)
        found.append(train(peft.get_peft_model(store(base), lora(lora_dropout=0.0))))
    kept, stored = found
    for one, other in zip(adapters(stored), adapters(kept), strict=True):
        assert_same_bits(one, other)
    expected = stored(X)
    assert_same_bits(kept(X), expected)
    for safe in (False, True):
        with pytest.raises(ConfigError, match=r"stored as codes cannot be changed .*store_floats.*train_merged"):
            stored.merge_and_unload(safe_merge=safe)
    assert_same_bits(stored(X), expected)


def test_an_adapter_that_was_trained_as_merged_says_so_when_it_is_loaded(tmp_path, recwarn):
    """Beside a quantized layer it computes something else."""
    model = train(train_merged(peft.get_peft_model(based(), lora())))
    expected = model(X)
    model.save_pretrained(tmp_path)
    with pytest.warns(fq.errors.StaleScaleWarning, match=r"trained as merged .*train_merged\(model\)"):
        loaded = peft.PeftModel.from_pretrained(based(), tmp_path).eval()
    assert not torch.equal(loaded(X), expected)
    assert_same_bits(train_merged(loaded)(X), expected)
    recwarn.clear()
    again = train_merged(peft.get_peft_model(based(), lora()))
    again.load_adapter(tmp_path, "default")
    assert_same_bits(again.eval()(X), expected)
    assert not [one for one in recwarn if "trained as merged" in str(one.message)]


def test_an_adapter_that_was_trained_beside_says_nothing(tmp_path, recwarn):
    model = train(peft.get_peft_model(based(), lora()))
    model.save_pretrained(tmp_path)
    assert_same_bits(peft.PeftModel.from_pretrained(based(), tmp_path).eval()(X), model(X))
    assert not [one for one in recwarn if "trained as merged" in str(one.message)]
