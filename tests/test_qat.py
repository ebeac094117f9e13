import math

import pytest
import torch
from models import SmallNet, images, small_net
from torch import Tensor, nn

from fakequant.errors import ConfigError
from fakequant.model import presets
from fakequant.model.prepare import calibrate, prepare
from fakequant.model.qat import Options, Scales, Schedule, finetune, freeze_batch_norm, scheduler, set_scales
from fakequant.nn import quantizers

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


def test_learned_scales_move() -> None:
    model = calibrated()
    before = model.head._input_quantizer.scale.clone()
    finetune(model, BATCHES, nn.functional.cross_entropy, SCHEDULE, Options(scales=Scales.LEARNED))
    assert isinstance(model.head._input_quantizer.scale, nn.Parameter)
    assert not torch.equal(before, model.head._input_quantizer.scale)


def test_learning_needs_calibration() -> None:
    with pytest.raises(ConfigError, match=r"stem\._input_quantizer has no scale to learn"):
        set_scales(prepare(small_net(), presets.INT8), Scales.LEARNED)


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


def test_errors() -> None:
    with pytest.raises(ConfigError, match="needs a prepared model"):
        finetune(small_net(), BATCHES, nn.functional.cross_entropy, SCHEDULE)
    with pytest.raises(ConfigError, match="the batches were empty"):
        finetune(calibrated(), [], nn.functional.cross_entropy, SCHEDULE)
    with pytest.raises(ConfigError, match="epoch 1: the loss became nan"):
        finetune(calibrated(), BATCHES, lambda y, _: y.sum() * math.nan, SCHEDULE)


def test_batches_without_a_length() -> None:
    class Stream:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(BATCHES)

    assert len(finetune(calibrated(), Stream(), nn.functional.cross_entropy, SCHEDULE)) == 4
