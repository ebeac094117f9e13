"""docs/training.md runs, and a loop of Accelerate resumes to the bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError
from tests.support import pages
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 8, generator=GENERATOR), torch.randint(0, 4, (64,), generator=GENERATOR)
LEARNED, FIXED = fq.qat.Scales.LEARNED, fq.qat.Scales.FIXED


@pytest.fixture(autouse=True)
def _no_state():
    """Accelerate keeps its settings in the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def test_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("torchmetrics", reason="torchmetrics, which lightning needs, is not installed")
    import_torchvision()
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    names = {"lightning": lightning, "Module": Module, "x": X, "y": Y, "torch": torch, "__name__": "__page__"}
    names["loader"] = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
    names["quiet"] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    for block in pages.blocks(PAGE.read_text()):
        assert pages.printed(block.code, names, PAGE, block.line) == block.expected
    assert (tmp_path / "int8-net" / "fakequant.json").is_file()


def loop(folder, settings, *, steps=8, resume=False, precision="no"):
    """Steps of a loop with Accelerate, from a saved state or from the start; it ends as a killed one does."""
    torch.manual_seed(1)
    training = fq.qat.Training("int8", [X[:32]], **settings)
    model = training.prepare(network())
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(training)
    if resume:
        accelerator.load_state(str(folder))
    found = []
    for step in range(4 if resume else 0, steps):
        if step == 4 and not resume:
            accelerator.save_state(str(folder))
        model.train()
        training.at(step / 8, step // 4)
        batch = slice(step % 4 * 16, step % 4 * 16 + 16)
        loss = training.loss(nn.functional.cross_entropy(model(X[batch]), Y[batch]))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model.state_dict()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "settings", [{"scales": FIXED, "teacher": "self"}, {"scales": LEARNED, "teacher": "float", "learn_after": 0.6}]
)
def test_a_loop_of_accelerate_goes_on_to_the_bit(settings, precision, tmp_path):
    whole, state = loop(tmp_path / "whole", settings, precision=precision)
    loop(tmp_path / "killed", settings, steps=6, precision=precision)
    resumed, again = loop(tmp_path / "killed", settings, resume=True, precision=precision)
    assert resumed == whole[4:]
    for name, value in state.items():
        assert_same_bits(again[name], value, name)
    with pytest.raises(CheckpointError, match=r"other settings: freeze_batch_norm_after=0\.5, now 0\.8"):
        loop(tmp_path / "killed", {**settings, "freeze_batch_norm_after": 0.8}, resume=True, precision=precision)


def test_a_loop_that_leaves_the_teacher_out_is_told():
    training = fq.qat.Training("int8", [X], teacher="float")
    with pytest.raises(ConfigError, match=r"call prepare\(model\) before the optimizer is made"):
        training.at(0.0)
    model = training.prepare(network())
    training.at(0.0)
    model(X).sum().backward()
    with pytest.raises(ConfigError, match=r"lacks the distance from the teacher; write loss = training\.loss"):
        training.at(0.5)
    with pytest.raises(ConfigError, match="without a call of the prepared model in training mode"):
        training.loss(model.eval()(X).sum())
