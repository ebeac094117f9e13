"""Sensitivity that computes only what a quantized layer changes: the numbers of whole passes, bit for bit."""

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fakequant as fq
from examples.demo.digits import Net
from examples.demo.text import Transformer
from fakequant.model.run.outputs import Power, decibels
from fakequant.model.sensitivity import ReusedOutputs
from fakequant.nn import Add, Mode, QuantizedLayer
from tests.support.bits import assert_same_bits
from tests.support.models import images, small_net


class InPlace(nn.Module):
    """Residuals, operations in place, a layer that is called twice, one output of two, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.twice, self.add, self.head = nn.Conv2d(4, 4, 1), Add(), nn.Linear(4, 3)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(input=x)))
        y = F.relu_(self.twice(self.twice(x)))
        y = self.add(y, x).mul_(0.5)
        words, _ = self.lstm(y.flatten(2).mT)
        return {"a": self.head(words[:, -1]), "b": y.mean()}


def digits():
    return Net(), [torch.rand(5, 1, 8, 8) for _ in range(3)]


def text():
    return Transformer(), [torch.randint(0, 32, (2, 12)) for _ in range(2)]


MODELS = {
    "small": lambda: (small_net(), [images(), images(seed=5)]),
    "in place": lambda: (InPlace(), [torch.randn(2, 3, 6, 6) for _ in range(3)]),
    "digits": digits,
    "text": text,
    "one layer": lambda: (nn.Sequential(nn.Linear(4, 4))[0], [(torch.randn(3, 4), "label")]),
}


def calibrated(name, execution):
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    fq.prepare(model.eval(), "INT8")
    fq.calibrate(model, batches, progress=False)
    return fq.set_execution(model, execution), batches


def tensors(output):
    return output if isinstance(output, dict) else {"": output}


@torch.no_grad()
def by_whole_passes(model, batches):
    """What `sensitivity` says, by the definition: a pass for each layer and batch."""
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        powers = defaultdict(Power)
        for batch in batches:
            x = batch[0] if isinstance(batch, tuple) else batch
            with fq.disabled(model):
                exact = {key: y.clone() for key, y in tensors(model(x)).items()}
                for quantizer in layer.children():
                    quantizer.mode = Mode.QUANTIZE
                for key, approximate in tensors(model(x)).items():
                    powers[key].add(exact[key], approximate)
        found[name] = decibels(sum(power.share for power in powers.values()) / len(powers))
    return found


@pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_sensitivity_is_that_of_whole_passes(name, execution):
    model, batches = calibrated(name, execution)
    wanted = by_whole_passes(model, batches)
    assert {s.layer: s.value for s in fq.sensitivity(model, batches)} == wanted
    assert not [module for module in model.modules() if "forward" in module.__dict__]


def test_only_what_changed_is_computed(monkeypatch):
    model, batches = calibrated("digits", "simulate")
    calls, convolve = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *given, **options: calls.append(1) or convolve(*given, **options))
    fq.sensitivity(model, batches)
    # In float all four; quantized, each of them and those after it.
    assert len(calls) == len(batches) * (4 + 4 + 3 + 2 + 1) + 4  # and the first batch once more


@pytest.mark.parametrize("x", [torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])], ids=["zero", "nan"])
def test_equal_inputs_are_equal_bits(x):
    model = nn.Sequential(nn.Identity())
    kept = ReusedOutputs(model)
    with kept.record():
        y = model(x)
    for other, known in ((x.clone(), True), (-x, False), (x.double(), False), (x.expand(3, 2), False)):
        with kept.reuse():
            assert (model(other) is y) is known


def test_what_was_written_to_is_not_given_out():
    model = nn.Sequential(nn.Linear(3, 3))
    x, kept = torch.randn(2, 3), ReusedOutputs(model)
    with torch.no_grad():
        with kept.record():
            y = model(x)
        wanted = y.clone()
        y.zero_()
        with kept.reuse():
            assert_same_bits(model(x), wanted)


def test_modules_of_others_always_compute():
    class Counts(nn.Linear):
        def forward(self, input):
            calls.append(1)
            return super().forward(input)

    calls, model, x = [], nn.Sequential(Counts(3, 3)), torch.randn(2, 3)
    kept = ReusedOutputs(model)
    with kept.record():
        model(x)
    with kept.reuse():
        model(x)
    assert len(calls) == 2
