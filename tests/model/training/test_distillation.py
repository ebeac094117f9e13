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
from fakequant.model.training.distillation import Distillation
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
        ({"keep": True}, "this teacher changes in training; give a float model"),
        ({"weight": 0.0}, r"weight=0.0\): must be above 0"),
        ({"temperature": 0.0}, r"temperature=0.0\): must be positive"),
        ({"features": "0"}, r"must be a tuple, as \('0',\)"),
        ({"features": ("5",)}, "the model has no module '5'"),
        ({"teacher": nn.Linear(8, 4), "features": ("0",)}, "the teacher has no module '0'"),
        ({"teacher": nn.Linear(8, 5)}, r"the logits: shape \[32, 4\] in the model, but \[32, 5\] in its teacher"),
        (
            {"logits": lambda output: Distillation(nn.Identity()).compared((output, output), {})[0]},
            "type tuple holds 2 float tensors",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fq.qat.finetune(student(), BATCHES, F.cross_entropy, SCHEDULE, teacher=Distillation(**change))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(self.inner(self.table(ids)).relu())}


TOKENS = torch.randint(1, 9, (3, 6), generator=torch.Generator().manual_seed(0))
TAGS = torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(1))


def padded(padding: int, left_out_by: str) -> Any:
    """A batch with padding behind its tokens, or before them."""
    mask = F.pad(torch.ones_like(TOKENS), (0, padding))
    ids, tags = F.pad(TOKENS, (0, padding)), F.pad(TAGS, (0, padding), value=-100)
    if left_out_by == "labels of a tuple":
        return ids, tags
    if left_out_by == "labels":
        return {"ids": ids, "labels": tags}
    if left_out_by == "attention_mask":
        return {"ids": ids, "attention_mask": mask, "labels": tags.clamp(min=0)}
    return {"ids": ids, "keep": mask.bool(), "labels": tags.clamp(min=0)}


@pytest.mark.parametrize("features", [(), ("inner",), ("inner", "head")])
@pytest.mark.parametrize("left_out_by", ["labels", "labels of a tuple", "attention_mask", "mask=", "a function"])
def test_padding_trains_nothing(left_out_by: str, features: tuple[str, ...]) -> None:
    """With 24 tokens of padding beside 6, the distance and the weights were others."""
    found = []
    for padding in (0, 2, 24):
        model = fq.prepare(Tagger(), fq.Config("test", (fq.Rule("inner", weight="int2 per_channel(0)"),)))
        batch = padded(padding, left_out_by)
        mask = {"mask=": "keep", "a function": lambda batch: batch["keep"]}.get(left_out_by)
        inputs = 0 if isinstance(batch, tuple) else lambda batch: batch["ids"]
        teacher = Distillation(Tagger(), weight=1.0, features=features)
        schedule = fq.qat.Schedule(original_lr=1.0, original_epochs=20)
        history = fq.qat.finetune(model, [batch], no_loss, schedule, inputs=inputs, teacher=teacher, mask=mask)
        found.append((history, model.inner.weight.detach()))
    assert found[0][0][0] > 0
    for history, weight in found[1:]:
        assert history == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(weight, found[0][1])


def test_a_batch_of_nothing_but_padding_trains_nothing() -> None:
    model = fq.prepare(Tagger(), "INT4_WEIGHT_ONLY")
    before = copy.deepcopy(model.state_dict())
    batch = {"ids": TOKENS, "labels": torch.full_like(TAGS, -100)}
    schedule = fq.qat.Schedule(original_lr=1.0, original_epochs=20)
    teacher = Distillation(Tagger(), weight=1.0)
    assert fq.qat.finetune(model, [batch], no_loss, schedule, teacher=teacher) == [0.0, 0.0]
    assert_same_bits(model.inner.weight, before["inner.weight"])


def test_a_mask_that_fits_nothing_is_refused() -> None:
    model, schedule = fq.prepare(Tagger(), "INT4_WEIGHT_ONLY"), fq.qat.Schedule(1.0, 10)
    batch = {"ids": TOKENS, "labels": TAGS}
    with pytest.raises(ConfigError, match=r"shape \[3, 5\], but no compared tensor begins with these axes: \[3, 6\]"):
        fq.qat.finetune(model, [batch], no_loss, schedule, teacher="self", mask=lambda _: torch.ones(3, 5).bool())
    with pytest.raises(ConfigError, match=r"teacher= is missing"):
        fq.qat.finetune(model, [batch], no_loss, schedule, mask="keep")
    with pytest.raises(ConfigError, match=r"mask must be a function of a batch, or a key"):
        Distillation(mask=3)  # pyright: ignore[reportArgumentType]


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.runs = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.net(x)


def test_what_a_teacher_gave_is_kept_to_the_bit() -> None:
    found, epochs = [], fq.qat.Schedule(original_lr=10.0, original_epochs=30)
    for keep in (False, True):
        model, teacher = student(), Counted()
        torch.manual_seed(3)
        history = fq.qat.finetune(
            model, BATCHES, F.cross_entropy, epochs, teacher=Distillation(teacher, weight=0.7, keep=keep)
        )
        found.append((history, model.state_dict()))
        assert teacher.runs == (2 if keep else 6)
    (history, wanted), (kept, state) = found
    assert kept == history
    for name, value in wanted.items():
        assert_same_bits(state[name], value, name)


def test_other_batches_and_a_changed_teacher_are_computed() -> None:
    teacher = Counted()
    one = Distillation(teacher, keep=True)

    def asked(x: Tensor) -> float:
        return float(one.student(student(), lambda model: model(x))[1])

    first = asked(X)
    assert asked(X.clone()) == first
    assert teacher.runs == 1
    assert asked(X[:32]) != first
    with torch.no_grad():
        teacher.net[4].weight.mul_(2.0)
    assert asked(X) != first
    teacher.net[1].running_mean.add_(1.0)  # type: ignore[operator]
    asked(X)
    assert teacher.runs == 4


def test_kept_features_are_those_of_their_batch() -> None:
    teacher = net()
    kept, anew = (Distillation(teacher, features=("0", "4"), keep=keep) for keep in (True, False))
    for x in (X[:8], X[8:16], X[:8]):
        values = [float(one.student(student(), lambda model, x=x: model(x))[1]) for one in (kept, anew)]
        assert values[0] == values[1]


class Same(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x[:]


def test_kept_outputs_are_no_views_of_a_batch_that_is_written() -> None:
    kept, anew = (Distillation(Same(), keep=keep) for keep in (True, False))
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    batch = x.clone()
    first = float(kept.student(model, lambda own: own(batch))[1])
    batch.add_(torch.randn(8, 4))  # a loader that fills one buffer
    for one in (kept, anew):
        assert float(one.student(model, lambda own: own(x))[1]) == first


def test_autocast_and_what_a_step_makes_of_outputs_are_those_of_the_teacher() -> None:
    teacher, model = Counted(), student()
    kept, anew = (Distillation(teacher, keep=keep) for keep in (True, False))

    def cast(own: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own(X)

    for forward in (lambda own: own(X), cast, lambda own: own(X), cast):
        values = [float(one.student(model, forward)[1]) for one in (kept, anew)]
        assert values[0] == values[1]
    assert len(kept._kept) == 2


def test_much_that_never_comes_again_is_said_once(monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    monkeypatch.setattr("fakequant.model.training.distillation._MUCH", 3000)
    shuffled, model = Distillation(net(), keep=True), student()
    again = Distillation(net(), keep=True)
    for number in range(8):
        for one, x in ((shuffled, X + number), (again, X + max(number - 1, 0))):
            one.student(model, lambda own, x=x: own(x))
    said = [str(own.message) for own in recwarn if "keep=True" in str(own.message)]
    assert len(said) == 1
    assert "but no batch came again yet; if the loader shuffles" in said[0]


MAPS = torch.randn(4, 5, 3, 6, generator=torch.Generator().manual_seed(1))
"""Logits [N, classes, H, W]."""


def distance(own: Tensor, wanted: Tensor, labels: Any = None, **options: Any) -> float:
    """What a model that gives `own` loses to a teacher that gives `wanted`."""
    model, teacher = (nn.Identity() for _ in range(2))
    forward = lambda module: wanted if module is teacher else own  # noqa: E731
    return float(Distillation(teacher, **options).student(model, forward, (), labels)[1])


def along(axis: int, own: Tensor, wanted: Tensor, counted: Tensor | None = None) -> float:
    own, wanted = own.log_softmax(axis), wanted.log_softmax(axis)
    each = F.kl_div(own, wanted, reduction="none", log_target=True).sum(axis)
    return float((each if counted is None else each[counted]).mean())


@pytest.mark.parametrize(
    ("logits", "labels", "axis"),
    [
        (MAPS, MAPS.argmax(1), 1),  # segmentation
        (MAPS[..., 0], MAPS[..., 0].argmax(1), 1),  # [N, classes, T], as of a temporal convolution
        (MAPS[..., 0].mT, MAPS[..., 0].argmax(1), -1),  # tokens
        (MAPS[..., 0].mT, None, -1),
        (MAPS[:, :, 0, 0], MAPS[:, :, 0, 0].argmax(1), -1),
        (MAPS, MAPS.softmax(1), 1),  # shares of classes
        (MAPS[..., 0].mT, MAPS[..., 0].mT.softmax(-1), -1),
    ],
)
def test_labels_say_which_axis_has_the_classes(logits: Tensor, labels: Any, axis: int) -> None:
    """The softmax was taken over the columns of an image."""
    other = logits.clone()
    other.select(axis, 0).add_(5)
    assert distance(other, logits, labels) == pytest.approx(along(axis, other, logits), rel=1e-5)


@pytest.mark.parametrize("ignored", [-100, 255, 5])
def test_labels_that_are_no_class_do_not_count(ignored: int) -> None:
    labels, other = MAPS.argmax(1), MAPS.flip(0)
    labels[:2] = ignored
    counted = torch.arange(4) > 1
    expected = along(1, other[counted], MAPS[counted])
    assert distance(other, MAPS, labels) == pytest.approx(expected, rel=1e-5)


def test_an_unknown_axis_and_a_regression_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not show which axis of the logits \[4, 5, 3, 6\] has the classes"):
        distance(MAPS, MAPS)
    square = torch.randn(2, 4, 4)
    with pytest.raises(ConfigError, match=r"which axis of the logits \[2, 4, 4\]"):
        distance(square, square, square.argmax(1))
    assert distance(MAPS, MAPS, axis=1) == 0
    with pytest.raises(ConfigError, match=r"targets of shape \[4, 5\] are not probabilities of classes"):
        distance(MAPS[:, :, 0, 0], MAPS[:, :, 0, 1], MAPS[:, :, 0, 0])
    assert distance(MAPS[:, :, 0, 0], MAPS[:, :, 0, 0], MAPS[:, :, 0, 0], axis=-1) == 0
    ages = torch.tensor([1, 2, 3, 4])
    for own, labels in (
        (MAPS[:, :1, 0, 0], ages),
        (MAPS[:, :1, 0, 0], ages / 7),
        (MAPS[:, :3, 0, 0], ages[:, None].expand(4, 3)),
    ):
        with pytest.raises(ConfigError, match="are not probabilities of classes"):
            distance(own, own, labels)
