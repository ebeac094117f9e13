"""`save_pretrained` and `from_pretrained` of transformers with quantized models."""

import json
import logging
import warnings

import pytest
import torch
from torch import nn

import fakequant as fq
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision

pytest.importorskip("transformers", reason="transformers is not installed")
import_torchvision()  # transformers imports it for its losses

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # noqa: E402

from fakequant.errors import CheckpointError  # noqa: E402
from fakequant.integrations.transformers import enable_saving  # noqa: E402
from fakequant.model.weights import quantized_weights  # noqa: E402

IDS = torch.arange(12).view(2, 6)
SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ENCODER = transformers.BertConfig(**SIZES, num_labels=3)
DECODER = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=0)


def encoder():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(ENCODER).eval()


def decoder():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(DECODER).eval()


def calibrated(make=encoder, preset="INT8", *, learned=False, dtype=torch.float32):
    model = fq.prepare(make().to(dtype), preset)
    fq.calibrate(model, [{"input_ids": IDS}], progress=False)
    if learned:
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("make", "preset", "options"),
    [
        (encoder, "INT8", {}),
        (encoder, "INT8", {"learned": True}),
        (encoder, "INT8", {"dtype": torch.bfloat16}),
        (encoder, "FP8", {"dtype": torch.float16, "learned": True}),
        (decoder, "INT8", {}),
        (decoder, "INT8_PER_TOKEN", {}),
        (decoder, "NVFP4", {}),
    ],
)
def test_a_saved_model_comes_back_with_the_same_bits(tmp_path, make, preset, options):
    model = calibrated(make, preset, **options)
    next(iter(fq.nn.quantizers(model).values())).mode = fq.nn.Mode.OFF
    fq.set_execution(model, "auto", pattern="*dense" if make is encoder else "*q_proj")
    enable_saving(model).save_pretrained(tmp_path / "one")
    auto = {encoder: transformers.AutoModelForSequenceClassification, decoder: transformers.AutoModelForCausalLM}[make]
    again = auto.from_pretrained(tmp_path / "one")
    assert_same_bits(logits(again), logits(model))
    assert str(again) == str(model)
    assert list(again.state_dict()) == list(model.state_dict())
    for (name, value), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert value.dtype == other.dtype, name
        assert torch.equal(value, other), name
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in again.named_parameters()
    }
    assert {n: m.execution for n, m in model.named_modules() if isinstance(m, fq.nn.QuantizedLayer)} == {
        n: m.execution for n, m in again.named_modules() if isinstance(m, fq.nn.QuantizedLayer)
    }


def test_what_came_back_is_saved_as_it_is_now(tmp_path):
    enable_saving(calibrated()).save_pretrained(tmp_path / "one")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "one")
    fq.calibrate(again, [{"input_ids": IDS + 3}], progress=False)
    fq.qat.set_scales(again, fq.qat.Scales.LEARNED)
    again.save_pretrained(tmp_path / "two")
    third = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "two")
    assert_same_bits(logits(third), logits(again))
    assert all(q.learned is not None for q in fq.nn.quantizers(third).values())


def test_with_and_without_a_head(tmp_path):
    model = calibrated()
    hidden = model.bert(input_ids=IDS).last_hidden_state
    enable_saving(model).save_pretrained(tmp_path / "with")
    base = transformers.AutoModel.from_pretrained(tmp_path / "with")
    assert_same_bits(base(input_ids=IDS).last_hidden_state, hidden)
    base.save_pretrained(tmp_path / "without")
    headed = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "without")
    assert_same_bits(headed.bert(input_ids=IDS).last_hidden_state, hidden)
    assert type(headed.classifier) is torch.nn.Linear  # new, and to be trained


def test_without_this_module_transformers_says_that_the_method_is_unknown(tmp_path, monkeypatch, caplog):
    enable_saving(calibrated()).save_pretrained(tmp_path)
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "fakequant")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert "Unknown quantization type, got fakequant" in caplog.text


def change_config(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values["quantization_config"])
    path.write_text(json.dumps(values))


SCALE = "bert.encoder.layer.0.output.dense._input_quantizer.scale"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(later=1), "unknown keys later"),
        (lambda c: c["tensors"].update({SCALE: ["nn", [1]]}), "damaged at " + SCALE),
        (lambda c: c["tensors"].update({SCALE: ["float32", "x"]}), "damaged at " + SCALE),
        (lambda c: c["tensors"].update({SCALE + "s": ["float32", [1]]}), "is not a tensor of a quantizer"),
        (lambda c: c.update(layers={"bert": {}}), "the quantization_config cannot be used"),
        (lambda c: c.update(layers={}), "names no layer of a BertForSequenceClassification"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path, change, text):
    enable_saving(calibrated()).save_pretrained(tmp_path)
    change_config(tmp_path, change)
    with pytest.raises(fq.FakeQuantError, match=text):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(SCALE), f"the files lack 1 tensors .*: {SCALE}; save the model again"),
        (lambda tensors: tensors[SCALE].fill_(-1), SCALE.removesuffix(".scale")),
    ],
)
def test_a_file_without_a_scale_or_with_an_odd_one_is_refused(tmp_path, change, text):
    enable_saving(calibrated()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(fq.FakeQuantError, match=text):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_float_model_is_not_saved_as_quantized():
    with pytest.raises(fq.FakeQuantError, match=r"has no quantizers; call fakequant\.prepare"):
        enable_saving(encoder())


@torch.no_grad()
def test_a_folder_remembers_that_scales_do_not_fit_the_weights(tmp_path):
    model = enable_saving(calibrated())
    model.classifier.weight *= 3
    with pytest.warns(fq.errors.StaleScaleWarning, match="scales were set: classifier"):
        model.save_pretrained(tmp_path)
    with pytest.warns(fq.errors.StaleScaleWarning, match="scales were set: classifier"):
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.warns(fq.errors.StaleScaleWarning, match="scales were set: classifier"):
        again.save_pretrained(tmp_path)
    fq.calibrate(again, pattern="*_weight_quantizer")
    with warnings.catch_warnings(action="error", category=fq.errors.StaleScaleWarning):
        again.save_pretrained(tmp_path)
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_the_best_float_weights_load_into_a_prepared_model(tmp_path):
    """As by `load_best_model_at_end` from a run in float: no key is missing."""
    encoder().save_pretrained(tmp_path)
    result = calibrated().load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert result.missing_keys == result.unexpected_keys == []


def test_fixed_codes_come_back(tmp_path):
    model = calibrated(preset="INT8_WEIGHT_ONLY")
    product = next(iter(quantized_weights(model).values()))
    codes = torch.randint(-128, 128, tuple(product.tensor.shape), dtype=torch.int8)
    product.fix_codes(codes)
    enable_saving(model).save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    found = next(iter(quantized_weights(again).values()))
    assert found.has_fixed_codes
    assert_same_bits(found.quantizer.fixed_codes, codes)
    assert_same_bits(logits(again), logits(model))


class Wrapper(nn.Module):
    """A model of another library, whose own `save_pretrained` writes no quantizers."""

    def __init__(self, inside):
        super().__init__()
        self.inside, self.config = inside, inside.config


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Wrapper(encoder()), "call it with the model of transformers in it, 'inside', or save it by fakequant"),
        (lambda: nn.Sequential(encoder()), "call it with the model of transformers in it, '0', or save it by fakeq"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "a Sequential writes no quantizers; save it by fakequant.save"),
    ],
)
def test_saving_of_what_is_no_model_of_transformers_is_refused(make, text):
    with pytest.raises(CheckpointError, match=text):
        enable_saving(fq.prepare(make(), "int8_weight_only"))
