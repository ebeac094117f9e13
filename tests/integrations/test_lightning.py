"""QATCallback in Lightning: prepared before the optimizer, resumed to the bit, taught, refused with a reason."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision

pytest.importorskip("torchmetrics", reason="torchmetrics, which lightning needs, is not installed")
import_torchvision()  # torchmetrics imports it
pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from fakequant.integrations.lightning import QATCallback  # noqa: E402

LEARNED, FIXED, EPOCH = fq.qat.Scales.LEARNED, fq.qat.Scales.FIXED, fq.qat.Scales.EPOCH
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 8, generator=GENERATOR), torch.randint(0, 4, (32,), generator=GENERATOR)
FEW_BITS = fq.Config("W2A2", (fq.Rule("*", input="int2", weight="int2 per_channel(0)"),))


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.losses, self.norms = [], []

    def compute(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.compute(batch[0]), batch[1])
        self.losses.append(loss.item())
        return {"loss": loss} if index % 2 else loss

    def validation_step(self, batch, index):
        self.log("val", nn.functional.cross_entropy(self.compute(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class WithForward(Net):
    def forward(self, x):
        return self.net(x)

    def compute(self, x):
        return self(x)


class Stop(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        if trainer.current_epoch == 1 and trainer.fit_loop.batch_idx == 2:
            raise RuntimeError("killed")


def loader(size=8):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=size)


def fit(folder, module, *callbacks, ckpt_path=None, size=8, **settings):
    kept = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    one = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, kept], default_root_dir=folder, **settings,
    )  # fmt: skip
    one.fit(module, loader(size), loader(size), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize(
    ("cls", "settings", "arguments"),
    [
        (Net, {"scales": FIXED}, {}),
        (WithForward, {"scales": LEARNED, "teacher": "float"}, {"accumulate_grad_batches": 2}),
        (
            Net,
            {"scales": LEARNED, "teacher": "self", "learn_after": 0.4, "method": "pact"},
            {"precision": "bf16-mixed"},
        ),
        (Net, {"scales": EPOCH, "freeze_batch_norm_after": 0.4}, {}),
    ],
    ids=["fixed", "learned, taught", "learned late", "each epoch"],
)
def test_a_killed_training_goes_on_to_the_bit(cls, settings, arguments, tmp_path):
    def callback():
        return QATCallback("int8", [X], **settings)

    whole = fit(tmp_path / "whole", cls(), callback(), **arguments)
    killed = cls()
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path / "killed", killed, callback(), Stop(), **arguments)
    assert "training_step" not in vars(killed)
    resumed = fit(tmp_path / "killed", cls(), callback(), ckpt_path=tmp_path / "killed" / "epoch=0.ckpt", **arguments)
    assert resumed.losses == whole.losses[4:]
    assert resumed.norms == whole.norms[-len(resumed.norms) :]
    assert len(whole.losses) == 12
    for name, value in whole.state_dict().items():
        assert_same_bits(resumed.state_dict()[name], value, name)


def test_what_happens_at_its_step(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            step = pl_module.net[0]._weight_quantizer.lsq.step.detach()
            seen.append((step.clone(), pl_module.net[1].running_mean.clone()))

    settings = {"scales": LEARNED, "learn_after": 0.5, "freeze_batch_norm_after": 0.25}
    fit(tmp_path, Net(), QATCallback("int8", [X], **settings), Watch())
    moved = [not torch.equal(now[0], before[0]) for before, now in pairwise(seen)]
    counted = [not torch.equal(now[1], before[1]) for before, now in pairwise(seen)]
    assert moved == [False] * 5 + [True] * 6  # of 12 steps; weight decay would move them before, too
    assert counted == [True] * 2 + [False] * 9


@pytest.mark.parametrize("parts", [1, 4])
def test_the_teacher_is_the_module_before_it_was_prepared(parts, tmp_path):
    """Its distance joins the loss, also where several batches make a step."""
    teacher, weight = Net().net.eval(), 0.25
    callback = QATCallback(
        FEW_BITS, [X], teacher=fq.qat.Distillation(teacher, weight=weight), freeze_batch_norm_after=0
    )
    module = fit(tmp_path, Net(), callback, size=32 // parts, accumulate_grad_batches=parts, limit_train_batches=parts)
    plain = copy.deepcopy(QATCallback(FEW_BITS, [X]).prepare(Net().net)).train()
    fq.qat.freeze_batch_norm(plain)
    outputs, distance = fq.qat.Distillation(teacher).student(plain, lambda m: m(X))
    ((1 - weight) * nn.functional.cross_entropy(outputs, Y) + weight * distance).backward()
    assert distance > 1e-3
    wanted = float(sum(p.grad.square().sum() for p in plain.parameters()))
    assert module.norms[0] == pytest.approx(wanted, rel=1e-4)


def test_the_trained_module_is_finished_once(tmp_path):
    saved = []
    callback = QATCallback("int8", [X], scales=LEARNED, finish=lambda net: saved.append(fq.save(net, tmp_path / "net")))
    module = fit(tmp_path, Net(), callback)
    assert len(saved) == 1
    assert_same_bits(fq.load(Net().net, saved[0]).eval()(X), module.net.eval()(X))
    assert not module.net._forward_pre_hooks


def test_what_does_not_fit_is_said(tmp_path):
    class Manual(Net):
        automatic_optimization = False

    class Two(Net):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(2, 2)

    class FloatTwin(WithForward):
        def compute(self, x):
            return self.net(x)

    taught = {"config": "int8", "batches": [X], "teacher": "float"}
    with pytest.raises(ConfigError, match="manual optimization"):
        fit(tmp_path, Manual(), QATCallback(**taught))
    with pytest.raises(ConfigError, match=r"parts with parameters are \['net', 'other'\]; give"):
        fit(tmp_path, Two(), QATCallback(**taught))
    with pytest.raises(ConfigError, match="without a call of the prepared model in training mode"):
        fit(tmp_path, FloatTwin(), QATCallback(**taught), num_sanity_val_steps=0)
    fit(tmp_path / "two", Two(), QATCallback(**taught, module="net"))
    checkpoint = tmp_path / "two" / "epoch=1.ckpt"
    with pytest.raises(CheckpointError, match="scales='fixed', now 'learned'"):
        fit(tmp_path, Two(), QATCallback(**taught, module="net", scales=LEARNED), ckpt_path=checkpoint)
    torch.manual_seed(1)
    other = Two()
    nn.init.zeros_(other.net[0].weight)
    with pytest.raises(CheckpointError, match=r"teacher=\['.*, now \['"):
        fit(tmp_path, other, QATCallback(**taught, module="net"), ckpt_path=checkpoint)


def test_the_older_name_of_lightning_takes_the_same_callback():
    older = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Module(older.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net().net

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    finished = []
    callback = QATCallback("int8", [X], scales=LEARNED, teacher="float", finish=finished.append)
    older.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], **off).fit(module := Module(), loader())
    assert finished == [module.net]
