"""Train a small CNN with weights of 4 bits by a phone's codes or by the simulation, and run both on the phone.

`python -m benchmarks.phone`; needs onnxruntime-qnn. The files run in the emulation of Qualcomm's HTP that it ships.
Both trainings start from the same calibrated model, see the same batches, and are judged by the loss and the accuracy
of the file on 597 digits of other writers.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fakequant as fq
from benchmarks.digits import parts
from tests.support.qnn import W4A8, emulated

SEEDS, EPOCHS, RATE = range(3), 12, 5e-4


def network() -> nn.Module:
    """Three convolutions, one of them depthwise, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float, seed: int) -> None:
    """By Adam in batches of 64."""
    generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.Adam(model.parameters(), lr=rate)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]).as_subclass(Tensor), y[rows]).backward()
            optimizer.step()
    model.eval()


def on_phone(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The loss and the accuracy of the file in the emulation."""
    first = next(one for one in fq.nn.quantizers(model).values() if one.kind is fq.nn.Kind.INPUT)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        x = first(x)  # how the phone rounds floats to codes is not known
        path = fq.export_onnx(model, x, Path(folder) / "model.onnx").path
        logits = emulated(path, x)
    return float(cross_entropy(logits, y)), float((logits.argmax(1) == y).double().mean())


def main() -> None:
    warnings.simplefilter("ignore")
    made, judge = parts()
    x, y, judge_x, judge_y = made.images, made.digits, judge.images, judge.digits
    for seed in SEEDS:
        torch.manual_seed(seed)
        net = network()
        train(net, x, y, 30, 2e-3, seed)
        rows = [f"seed {seed}: float {float((net(judge_x).argmax(1) == judge_y).double().mean()):.4f}"]
        state = net.state_dict()
        for execution in ("none", "simulate", "qnn"):
            twin = network()
            twin.load_state_dict(state)
            model = fq.prepare(twin.eval(), W4A8, x[:1], target="qnn")
            fq.calibrate(model, [x[:256]], progress=False)
            if execution != "none":
                fq.set_execution(model, execution)
                train(model, x, y, EPOCHS, RATE, seed)
                fq.set_execution(model, "simulate")
            loss, accuracy = on_phone(model, judge_x, judge_y)
            rows.append(f"{execution} {loss:.4f} {accuracy:.4f}")
        print("; ".join(rows), flush=True)


if __name__ == "__main__":
    main()
