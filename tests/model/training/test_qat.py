import copy
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import qat
from fakequant.errors import ConfigError, StaleScaleWarning
from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.model.training.qat import (
    Options,
    Scales,
    Schedule,
    Training,
    finetune,
    freeze_batch_norm,
    scheduler,
    set_scales,
)
from fakequant.nn import quantizers
from tests.support.models import SmallNet, images, small_net

BATCHES = [(images(8, seed), torch.arange(8) % 10) for seed in range(3)]
SCHEDULE = Schedule(original_lr=0.5, original_epochs=40)


def calibrated(config: object = presets.INT4) -> SmallNet:
    model = prepare(small_net(), config)  # type: ignore[arg-type]
    calibrate(model, BATCHES)
    return model


def test_schedule_is_the_advised_one() -> None:
    schedule = Schedule(original_lr=0.1, original_epochs=100)
    assert schedule.epochs == 10
    assert schedule.lr(0) == pytest.approx(0.001)
    assert schedule.lr(0.5) == pytest.approx(0.001 * 0.505)
    assert schedule.lr(1) == pytest.approx(0.00001)
    assert Schedule(original_lr=1, original_epochs=2).epochs == 1


@pytest.mark.parametrize("field", ["original_lr", "original_epochs", "fraction", "start", "end"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan], ids=str)
def test_schedule_refuses_what_is_not_positive(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"Schedule\({field}={value}\): must be positive"):
        Schedule(**{"original_lr": 1.0, "original_epochs": 1.0, field: value})


def test_finetune_lowers_the_loss_and_keeps_scales() -> None:
    model = calibrated()
    scales = {name: q.scale.clone() for name, q in quantizers(model).items()}
    history = finetune(model, BATCHES, nn.functional.cross_entropy, SCHEDULE)
    assert len(history) == 4
    assert history[-1] < history[0]
    assert all(torch.equal(scales[name], q.scale) for name, q in quantizers(model).items())
    assert not model.training


def test_the_weight_scales_move_once_an_epoch() -> None:
    model = calibrated()
    seen = []

    def on_epoch(_: int, __: float) -> None:
        seen.append(model.head._weight_quantizer.scale.clone())

    finetune(model, BATCHES, nn.functional.cross_entropy, SCHEDULE, Options(scales=Scales.EPOCH, on_epoch=on_epoch))
    assert not torch.equal(seen[0], seen[-1])


STATIC_W4A8 = Config(
    "W4A8",
    (Rule("*", input=TensorConfig("uint8 per_tensor symmetric"), weight=TensorConfig("int4 per_block(-1:3,pad)")),),
)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("lsq", presets.INT4),
        ("lsq_plus", presets.INT4),
        ("lsq", presets.FP8),
        ("pact", presets.INT8),
        ("pact", STATIC_W4A8),
        ("tqt", presets.FP8),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_learned_ranges_move_and_lower_the_loss(method: str, config: Config) -> None:
    model = calibrated(config)
    options = Options(
        scales=Scales.LEARNED,
        method=method,
        on_epoch=lambda *_: before.append({n: p.detach().clone() for n, p in model.named_parameters()}),
    )
    before: list[dict[str, Tensor]] = []
    history = finetune(model, BATCHES, nn.functional.cross_entropy, SCHEDULE, options)
    assert history[-1] < history[0]
    moved = [name for name, value in before[0].items() if f".{method}." in name and not value.equal(before[-1][name])]
    assert any("_input_quantizer" in name for name in moved)
    assert any("_weight_quantizer" in name for name in moved)
    assert all(q.learned is not None and q.learned.method == method for q in quantizers(model).values())


@pytest.mark.parametrize("kind", ["sgd", "adamw", "own groups"])
def test_scales_have_their_own_learning_rate(kind: str) -> None:
    def plain(rates: list[float], groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        named = [{"params": group, "lr": lr} for group, lr in zip(groups, rates, strict=True)]
        return torch.optim.SGD(named, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(named, weight_decay=0.1)

    def own(parameters: Any) -> torch.optim.Optimizer:
        if kind != "own groups":
            return plain([1.0], [[*parameters]])
        scales = [p for p in parameters if p.dim() != 1]
        made.append(plain([1.0, 1.0], [scales, [p for p in parameters if p.dim() == 1]]))
        return made[0]

    made: list[torch.optim.Optimizer] = []
    ours, theirs = calibrated(), calibrated()
    options = Options(scales=Scales.LEARNED, scale_lr=0.25, optimizer=own, freeze_batch_norm_after=1.0)
    finetune(ours, BATCHES, nn.functional.cross_entropy, SCHEDULE, options)
    if made:
        stored = made[0].state_dict()["param_groups"]
        assert sum(group.get("scale_lr") == 0.25 for group in stored) == len(stored) - 2 > 0

    set_scales(theirs, Scales.LEARNED)
    named = dict(theirs.named_parameters())
    scales = [p for name, p in named.items() if "lsq" in name]
    optimizer = plain([1.0, 0.25], [[p for name, p in named.items() if "lsq" not in name], scales])
    steps = SCHEDULE.epochs * len(BATCHES)
    for step in range(steps):
        theirs.train()
        for group, share in zip(optimizer.param_groups, (1.0, 0.25), strict=True):
            group["lr"] = SCHEDULE.lr(step / (steps - 1)) * share
        optimizer.zero_grad()
        x, y = BATCHES[step % len(BATCHES)]
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    trained = dict(ours.named_parameters())
    assert scales
    assert all(torch.equal(trained[name], p) for name, p in named.items())


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "fast", True], ids=str)
def test_a_learning_rate_of_scales_is_a_positive_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Options\(scale_lr=.*must be positive"):
        Options(scale_lr=value)


def test_options_of_the_method_arrive() -> None:
    model = calibrated()
    set_scales(model, Scales.LEARNED, "lsq", gradient_factor=False)
    learned = model.head._input_quantizer.learned
    assert learned is not None
    assert learned.options() == {"gradient_factor": False}


@pytest.mark.parametrize(
    ("model", "method", "text"),
    [
        (lambda: prepare(small_net(), presets.INT8), "lsq", r"stem\._input_quantizer has no range to learn"),
        (lambda: calibrated(presets.INT4), "tqt", r"stem\._input_quantizer: uint4 per_tensor has a zero point, which"),
        (lambda: calibrated(presets.NVFP4_WEIGHT_ONLY), "lsq", r"stem\._weight_quantizer: .* has scales in float8_e4"),
        (lambda: calibrated(presets.INT4), "lqs", r"stem\._input_quantizer: unknown method 'lqs' .*did you mean lsq"),
    ],
    ids=["not-calibrated", "asymmetric", "scale-format", "unknown"],
)
def test_what_cannot_be_learned_is_named_and_nothing_is(model: Any, method: str, text: str) -> None:
    prepared = model()
    with pytest.raises(ConfigError, match=text):
        set_scales(prepared, Scales.LEARNED, method)
    assert all(q.learned is None for q in quantizers(prepared).values())


@pytest.mark.parametrize("scales", [Scales.FIXED, Scales.EPOCH], ids=lambda s: s.value)
def test_other_policies_end_the_learning(scales: Scales) -> None:
    model = calibrated()
    set_scales(model, Scales.LEARNED, "lsq_plus")
    with torch.no_grad():
        model.head._input_quantizer.learned.step.mul_(2)
    expected = model.head._input_quantizer(torch.ones(2, 3)).detach()
    set_scales(model, scales)
    assert all(q.learned is None and q.calibrated for q in quantizers(model).values())
    assert torch.equal(model.head._input_quantizer(torch.ones(2, 3)), expected)


def test_dynamic_quantizers_learn_nothing() -> None:
    model = calibrated(presets.INT8_PER_TOKEN)
    set_scales(model, Scales.LEARNED)
    assert model.head._input_quantizer.learned is None
    assert model.head._weight_quantizer.learned is not None


def test_batch_norm_freezes_at_its_time() -> None:
    model = calibrated()
    means: list[Tensor] = []
    finetune(
        model,
        BATCHES,
        nn.functional.cross_entropy,
        SCHEDULE,
        Options(freeze_batch_norm_after=0.5, on_epoch=lambda *_: means.append(model.norm.running_mean.clone())),
    )
    assert not torch.equal(means[0], means[1])
    assert torch.equal(means[1], means[2])
    model.train()
    freeze_batch_norm(model)
    assert model.training
    assert not model.norm.training


def test_the_callback_can_end_the_training() -> None:
    history = finetune(calibrated(), BATCHES, nn.functional.cross_entropy, SCHEDULE, Options(on_epoch=lambda *_: False))
    assert len(history) == 1


def test_parts_for_an_own_loop() -> None:
    model = calibrated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = scheduler(optimizer, SCHEDULE, steps=5)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        steps.step()
    assert rates[0] == pytest.approx(SCHEDULE.lr(0))
    assert rates[-1] == pytest.approx(SCHEDULE.lr(1))
    assert rates == sorted(rates, reverse=True)


def test_a_training_leaves_layers_in_float_and_quantizes_others_otherwise() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    Training("int8_weight_only", skip=["0"], rules={"1": "int4_weight_only"}).prepare(model)
    assert {name: one.spec.format.name for name, one in quantizers(model).items()} == {
        "1._weight_quantizer": "int4",
        "2._weight_quantizer": "int8",
    }


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    with pytest.raises(ConfigError, match="epoch 1: the loss became nan"):
        finetune(calibrated(), BATCHES, lambda y, _: y.sum() * math.nan, SCHEDULE)


def test_batches_without_a_length() -> None:
    class Stream:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(BATCHES)

    assert len(finetune(calibrated(), Stream(), nn.functional.cross_entropy, SCHEDULE)) == 4


def test_a_frozen_weight_with_chosen_codes_moves_no_scale() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 16), torch.randn(32, 4)
    model = prepare(nn.Linear(16, 4), Config("test", (Rule(weight=TensorConfig("int2_midrise per_channel(0)")),)))
    calibrate(model, [x], progress=False)
    (quantizer,) = quantizers(model).values()
    codes = quantizer.codes(model.weight)
    assert codes is not None
    quantizer.fix_codes(codes[0], model.weight)
    set_scales(model, Scales.LEARNED)
    (step,) = (one for name, one in model.named_parameters() if name.endswith("step"))
    nn.functional.mse_loss(model(x), y).backward()
    assert step.grad is not None
    assert float(step.grad.abs().max()) < 1e-6 * float(model.weight.grad.abs().max())
    with torch.no_grad():
        model.weight.mul_(1.1)
    step.grad = None
    nn.functional.mse_loss(model(x), y).backward()
    assert float(step.grad.abs().max()) > 1e-3


@pytest.mark.parametrize("scales", [qat.Scales.LEARNED, qat.Scales.ONLY])
def test_scales_that_training_drives_below_zero_are_named(scales: qat.Scales) -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), "int4_weight_only")
    fq.calibrate(model, [], progress=False)
    batches = [(torch.randn(8, 16), torch.arange(8) % 4)] * 4

    def train(rate: float, twin: nn.Module) -> None:
        schedule = qat.Schedule(original_lr=rate, original_epochs=1, fraction=1.0, start=1.0)
        options = qat.Options(scales=scales, optimizer=torch.optim.SGD, progress=False)
        qat.finetune(twin, batches, lambda out, y: nn.functional.cross_entropy(out, y), schedule, options)

    with warnings.catch_warnings(action="error", category=StaleScaleWarning):
        train(1e-4, copy.deepcopy(model))
    with pytest.warns(StaleScaleWarning, match=r"scales to zero: \d+ of \d+ in \d\._weight.*scale_lr=0\.1"):
        train(100.0, model)


def test_scales_alone_leave_the_statistics_of_a_batch_normalisation() -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), "int4_weight_only")
    fq.calibrate(model, [], progress=False)
    before, step = model[1].running_mean.clone(), model[0]._weight_quantizer.scale.clone()
    batches = [(torch.randn(8, 16) + 3.0, torch.arange(8) % 4)] * 4
    options = qat.Options(scales=qat.Scales.ONLY, freeze_batch_norm_after=1.0, progress=False)
    schedule = qat.Schedule(original_lr=0.01, original_epochs=1, fraction=1.0, start=1.0)
    qat.finetune(model, batches, lambda out, y: nn.functional.cross_entropy(out, y), schedule, options)
    assert torch.equal(model[1].running_mean, before)
    assert not torch.equal(model[0]._weight_quantizer.scale, step)


def test_modules_that_the_user_put_in_eval_mode_stay_there() -> None:
    """A detector's backbone: its normalisations are frozen by `eval`, in a model that trains."""
    for name in ("norm", "head"):
        model = calibrated().train()
        frozen = model.get_submodule(name).eval()
        seen: list[bool] = []
        frozen.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.training))
        before = model.norm.running_mean.clone()
        finetune(model, BATCHES, nn.functional.cross_entropy, SCHEDULE, Options(freeze_batch_norm_after=1.0))
        assert not any(seen)
        assert torch.equal(before, model.norm.running_mean) is (name == "norm")


def test_a_training_loop_of_its_own_keeps_them_too() -> None:
    model = calibrated().train()
    model.norm.eval()
    training = fq.qat.Training(freeze_batch_norm_after=1.0)
    training.prepare(model)
    before = model.norm.running_mean.clone()
    for step in range(2):
        model.train()  # as trainers do before each step
        training.at(step / 2)
        model(BATCHES[0][0])
    assert torch.equal(before, model.norm.running_mean)


@pytest.mark.parametrize("change", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_frozen_batch_norms_stay_frozen_when_the_model_trains(change: Callable[[nn.Module], Any]) -> None:
    model = calibrated()
    freeze_batch_norm(model)
    model = change(model)
    before = model.norm.running_mean.clone()
    model.train()(BATCHES[0][0])
    assert model.training
    assert torch.equal(before, model.norm.running_mean)
    del model.norm.train
    model.train()(BATCHES[0][0])
    assert not torch.equal(before, model.norm.running_mean)


@pytest.mark.parametrize("look", ["summary", "save", "export", "fix"])
def test_learned_steps_below_zero_in_any_loop_are_said(look: str, tmp_path: Path) -> None:
    model = calibrated()
    set_scales(model, Scales.LEARNED)
    with torch.no_grad():
        model.head._weight_quantizer.learned.step[0] = -1e-3
    looks: dict[str, Callable[[], object]] = {
        "summary": lambda: fq.summary(model),
        "save": lambda: fq.save(model, tmp_path / "saved"),
        "export": lambda: fq.export_onnx(model, BATCHES[0][0], tmp_path / "model.onnx"),
        "fix": lambda: set_scales(model, Scales.FIXED),
    }
    with pytest.warns(StaleScaleWarning, match=r"drove learned scales to zero: 1 of \d+ in head\._weight_quantizer"):
        looks[look]()
