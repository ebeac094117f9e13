"""Fine-tuning on batches that are mappings, and by the loss that the model computes itself."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from tests.support.bits import assert_same_bits
from tests.support.models import images

SCHEDULE = fq.qat.Schedule(original_lr=0.1, original_epochs=20)
X, LABELS = images(8).flatten(1), torch.arange(8) % 3


class Classifier(nn.Module):
    """A model as those of transformers: by labels it returns a loss too."""

    def __init__(self, kind=SimpleNamespace):
        super().__init__()
        self.head, self.kind, self.got = nn.Linear(64, 3), kind, []

    def forward(self, inputs, attention_mask=None, labels=None):
        self.got.append((attention_mask is not None, labels is not None))
        logits = self.head(inputs)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return self.kind(loss=loss, logits=logits)


def calibrated(model=None):
    torch.manual_seed(0)
    model = fq.prepare(Classifier() if model is None else model, fq.presets.INT8)
    fq.calibrate(model, [{"inputs": X}] if isinstance(model, Classifier) else [X], progress=False)
    return model


def by_logits(outputs, targets):
    return nn.functional.cross_entropy(outputs.logits, targets)


def batch(key="labels", kind=dict):
    return kind({"inputs": X, "attention_mask": torch.ones(8), key: LABELS})


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings_train_to_the_same_bits_as_tuples(kind):
    trained = []
    for batches in ([batch(kind=kind)], [(X, torch.ones(8), LABELS)]):
        model = calibrated()
        model.got.clear()
        history = fq.qat.finetune(model, batches, by_logits, SCHEDULE)
        assert model.got == [(True, False)] * 2  # the model does not get the targets
        trained.append((history, model.head.weight))
    assert trained[0][0] == trained[1][0]
    assert_same_bits(trained[0][1], trained[1][1])


def test_the_targets_may_have_another_key():
    model = calibrated()
    history = fq.qat.finetune(model, [batch("classes")], by_logits, SCHEDULE, targets="classes")
    assert history[1] < history[0]
    assert model.got[-1] == (True, False)


@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
def test_the_loss_of_the_model_itself(kind):
    model, other = calibrated(Classifier(kind)), calibrated()
    history = fq.qat.finetune(model, [batch()], None, SCHEDULE)
    assert model.got[-1] == (True, True)
    assert history == fq.qat.finetune(other, [batch()], by_logits, SCHEDULE)
    assert_same_bits(model.head.weight, other.head.weight)


def test_errors_say_what_is_missing():
    model, error = calibrated(), "inputs, attention_mask, classes; give the key of the targets as targets="
    with pytest.raises(ConfigError, match=f"a batch has no targets 'labels' for the loss, only {error}"):
        fq.qat.finetune(model, [batch("classes")], by_logits, SCHEDULE)
    with pytest.raises(ConfigError, match="output of type SimpleNamespace has none; give a function of outputs"):
        fq.qat.finetune(model, [{"inputs": X}], None, SCHEDULE)


def test_a_failure_leaves_the_training_modes_and_keeps_what_was_learned():
    model = calibrated(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    model[2].eval()
    before = {name: module.training for name, module in model.named_modules()}
    weight = model[0].weight.clone()
    assert set(before.values()) == {True, False}

    def stop(epoch, loss):
        raise KeyboardInterrupt

    options = fq.qat.Options(on_epoch=stop)
    with pytest.raises(KeyboardInterrupt):
        fq.qat.finetune(model, [(X, LABELS)], nn.functional.cross_entropy, SCHEDULE, options)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not torch.equal(model[0].weight, weight)
    fq.qat.finetune(model, [(X, LABELS)], nn.functional.cross_entropy, SCHEDULE)
    assert not any(module.training for module in model.modules())


def test_the_own_loss_of_a_model_needs_named_arguments():
    model = calibrated()
    with pytest.raises(ConfigError, match=r"with loss=None the model needs the targets as an argument.*dicts of arg"):
        fq.qat.finetune(model, [(X, LABELS)], None, SCHEDULE)
    by_function = calibrated()
    history = fq.qat.finetune(
        by_function, [(X, LABELS)], None, SCHEDULE, inputs=lambda items: {"inputs": items[0], "labels": items[1]}
    )
    assert history == fq.qat.finetune(calibrated(), [{"inputs": X, "labels": LABELS}], None, SCHEDULE)
