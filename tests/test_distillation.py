"""Fine-tuning towards a float teacher."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.model.distillation import Distillation, _logits
from tests.support.bits import assert_same_bits

SCHEDULE = fq.qat.Schedule(original_lr=10.0, original_epochs=400)
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 4
BATCHES = [(X[:32], LABELS[:32]), (X[32:], LABELS[32:])]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)).eval()


def student() -> nn.Sequential:
    model = fq.prepare(net(), fq.Config("test", (fq.Rule(weight="int2 per_channel(0)"),)))
    fq.calibrate(model, [X], progress=False)
    return model


def divergence(model: nn.Module, teacher: nn.Module) -> float:
    with torch.no_grad():
        return float(
            F.kl_div(model(X).log_softmax(-1), teacher(X).log_softmax(-1), log_target=True, reduction="batchmean")
        )


def no_loss(outputs: Any, targets: Any) -> Tensor:
    return torch.zeros(())


@pytest.mark.parametrize("features", [(), ("4",)])
def test_the_model_comes_closer_to_its_teacher(features: tuple[str, ...]) -> None:
    model, teacher = student(), net()
    model[3].p = teacher[3].p = 0.0
    before, state = divergence(model, teacher), copy.deepcopy(teacher.state_dict())
    options = fq.qat.Options(freeze_batch_norm_after=0.0)
    history = fq.qat.finetune(
        model, BATCHES, no_loss, SCHEDULE, options, teacher=Distillation(teacher, weight=1.0, features=features)
    )
    assert divergence(model, teacher) < 0.7 * before
    assert history[-1] < history[0]
    for name, value in teacher.state_dict().items():
        assert_same_bits(value, state[name], name)
    assert not teacher.training
    assert not model[4]._forward_hooks
    assert not teacher[4]._forward_hooks


def test_the_loss_is_the_weighted_sum() -> None:
    model, teacher = student(), net()
    model[3].p = 0.0
    once = fq.qat.Schedule(original_lr=1e-30, original_epochs=1)
    options = fq.qat.Options(freeze_batch_norm_after=0.0)
    with torch.no_grad():
        own, wanted = model(X), teacher(X)
        kl = F.kl_div((own / 2).log_softmax(1), (wanted / 2).log_softmax(1), log_target=True, reduction="batchmean")
        right = 0.25 * F.cross_entropy(own, LABELS) + 0.75 * 4 * kl
    how = Distillation(teacher, weight=0.75, temperature=2.0)
    found = fq.qat.finetune(model, [(X, LABELS)], F.cross_entropy, once, options, teacher=how)
    torch.testing.assert_close(found[0], float(right))


def test_self_is_the_model_with_its_quantizers_off() -> None:
    found = []
    for teacher in ("self", None):
        model = student()
        statistics = copy.deepcopy(dict(model.named_buffers()))
        once = fq.qat.Schedule(original_lr=1e-30, original_epochs=1)
        options = fq.qat.Options(freeze_batch_norm_after=0.0)
        given = teacher or net()
        torch.manual_seed(3)
        found.append(fq.qat.finetune(model, BATCHES, F.cross_entropy, once, options, teacher=given))
        for name, value in model.named_buffers():  # the teacher's run does not count in the statistics
            assert_same_bits(value, statistics[name], name)
    assert found[0] == found[1]


class Returning(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.kind = nn.Linear(8, 4), kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(x)
        return self.kind(loss=F.cross_entropy(logits, LABELS if labels is None else labels), logits=logits)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_logits_are_found_beside_the_models_own_loss(kind: Any) -> None:
    model = fq.prepare(Returning(kind), "INT4_WEIGHT_ONLY")
    history = fq.qat.finetune(model, [{"x": X, "labels": LABELS}], None, fq.qat.Schedule(1.0, 20), teacher="self")
    assert history[1] < history[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": "slef"}, 'the teacher must be a module, or "self"'),
        ({"weight": 0.0}, r"weight=0.0\): must be above 0"),
        ({"temperature": 0.0}, r"temperature=0.0\): must be positive"),
        ({"features": "0"}, r"give a tuple, such as \('0',\)"),
        ({"features": ("5",)}, "the model has no module '5'"),
        ({"teacher": nn.Linear(8, 4), "features": ("0",)}, "the teacher has no module '0'"),
        ({"teacher": nn.Linear(8, 5)}, r"the logits: the model gives \[32, 4\], and its teacher \[32, 5\]"),
        ({"logits": lambda output: _logits((output, output))}, "type tuple holds 2 float tensors"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fq.qat.finetune(student(), BATCHES, F.cross_entropy, SCHEDULE, teacher=Distillation(**change))
