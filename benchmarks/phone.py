"""Compare the codes of `set_execution(model, "qnn")` with Qualcomm's emulation; needs onnxruntime-qnn.

    python -m benchmarks.phone random --count 100   # networks of convolutions by seed: how many codes differ
    python -m benchmarks.phone whole --bits 16      # ResNet-18 and MobileNetV2 with random weights
    python -m benchmarks.phone train                # QAT by the phone's codes beside QAT by the simulation
    python -m benchmarks.phone cost                 # the time of a forward over that in integers

Inputs are on the codes of the first quantizer: how the phone rounds floats to codes is not known. Both trainings start
from the same calibrated model and see the same batches. The file is judged on 597 digits that no training saw.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fakequant as fq
from benchmarks.digits import parts
from tests.support.qnn import CONFIGS, Residual, codes, emulated
from tests.support.vision import import_torchvision

SEEDS, EPOCHS, RATE = range(10), 12, 5e-4
KINDS = "dense", "dense", "depthwise", "point", "groups", "dilated", "sum", "max", "mean"


def network() -> nn.Module:
    """Three convolutions, one of them depthwise, and a head."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def random_network(seed: int) -> tuple[nn.Module, tuple[int, int, int, int]]:
    """Up to eight layers of kinds, sizes, biases and activations that a seed chooses, and the shape of the input."""
    choose, channels, side = random.Random(seed), 4, 32
    torch.manual_seed(seed)
    layers: list[nn.Module] = []

    def convolution(outputs: int, size: int, **options: Any) -> None:
        nonlocal channels
        layer = nn.Conv2d(channels, outputs, size, bias=choose.random() < 0.8, **options)
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=choose.choice([0.05, 0.5, 3.0]))
        if choose.random() < 0.5:
            layer.weight.data *= torch.exp(torch.randn(outputs, 1, 1, 1) * choose.choice([0.2, 0.7]))
        after = choose.choice([[nn.ReLU()], [nn.ReLU6()], [nn.ReLU(inplace=True)], []])
        layers.extend([layer, *after])
        channels = outputs

    convolution(8, 3, padding=1)
    for _ in range(choose.randint(2, 7)):
        kind, stride = choose.choice(KINDS), 1
        if side > 8 and kind in ("dense", "depthwise"):
            stride = choose.choice([1, 1, 2])
        if kind == "dense":
            size = choose.choice([1, 3, 5])
            convolution(choose.choice([8, 16, 24, 32]), size, padding=size // 2, stride=stride)
        elif kind == "depthwise":
            convolution(channels, 3, padding=1, stride=stride, groups=channels)
        elif kind == "point":
            convolution(choose.choice([8, 16, 48]), 1)
        elif kind == "groups":
            convolution(2 * channels if channels < 32 else channels, 3, padding=1, groups=4)
        elif kind == "dilated":
            convolution(16, 3, padding=2, dilation=2)
        elif kind == "sum" and channels == 8:
            layers.append(Residual())
        elif kind in ("max", "mean") and side > 8:
            layers.append((nn.MaxPool2d if kind == "max" else nn.AvgPool2d)(2))
            stride = 2
        side = (side + stride - 1) // stride
    if side <= 8 and choose.random() < 0.5:
        layers.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)])
    return nn.Sequential(*layers).eval(), (1, 4, 32, 32)


def prepared(net: nn.Module, config: Any, shape: tuple[int, ...], seed: int) -> tuple[nn.Module, Tensor]:
    """A calibrated model, and an input on the codes of its first quantizer."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(shape, generator=generator) for _ in range(4)]
    model = fq.prepare(net, config, batches[0], target="qnn")
    fq.calibrate(model, batches[:3], progress=False)
    return model, on_codes(model, batches[3])


def on_codes(model: nn.Module, x: Tensor) -> Tensor:
    """An input that the first quantizer leaves as it is."""
    first = next(one for one in fq.nn.quantizers(model).values() if one.kind is fq.nn.Kind.INPUT)
    with torch.no_grad():
        return first(x).clone()


def on_phone(model: nn.Module, x: Tensor) -> Tensor:
    """The results of the file in the emulation."""
    with tempfile.TemporaryDirectory() as folder:
        return emulated(fq.export_onnx(model, x, Path(folder) / "model.onnx").path, x)


def differing(net: nn.Module, config: Any, shape: tuple[int, ...], seed: int) -> str:
    """How many codes of the simulation, and of the phone's arithmetic here, differ from the emulation's."""
    model, x = prepared(net, config, shape, seed)
    theirs = codes(model, on_phone(model, x))
    with torch.no_grad():
        simulated = codes(model, model(x))
        ours = codes(model, fq.set_execution(model, "qnn")(x))
    left = [int((one != theirs).sum()) for one in (simulated, ours)]
    return f"{left[1]} of {theirs.numel():,} codes differ, {left[0]} of the simulation"


def whole(name: str) -> nn.Module:
    """A network of torchvision with random weights and statistics, its batch normalisations folded."""
    torch.manual_seed(0)
    net = getattr(import_torchvision().models, name)(weights=None).eval()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(layer.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.2)
    return fq.fuse_batch_norm(net, torch.randn(1, 3, 64, 64))


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


def trained(seed: int) -> str:
    """The loss and the accuracy on the phone, without training, trained by the simulation, and by the phone's codes."""
    made, judge = parts()
    torch.manual_seed(seed)
    net = network()
    train(net, made.images, made.digits, 30, 2e-3, seed)
    rows = [f"float {float((net(judge.images).argmax(1) == judge.digits).double().mean()):.4f}"]
    for execution in ("none", "simulate", "qnn"):
        twin = network()
        twin.load_state_dict(net.state_dict())
        model = fq.prepare(twin.eval(), CONFIGS["w4a8"], made.images[:1], target="qnn")
        fq.calibrate(model, [made.images[:256]], progress=False)
        if execution != "none":
            fq.set_execution(model, execution)
            train(model, made.images, made.digits, EPOCHS, RATE, seed)
            fq.set_execution(model, "simulate")
        logits = on_phone(model, on_codes(model, judge.images))
        accuracy = float((logits.argmax(1) == judge.digits).double().mean())
        rows.append(f"{execution} {float(cross_entropy(logits, judge.digits)):.4f} {accuracy:.4f}")
    return "; ".join(rows)


def cost(name: str) -> str:
    """The least CPU time of three forwards of four pictures of 96 pixels, a thread, over that in integers."""
    torch.set_num_threads(1)
    model, x = prepared(whole(name), "int8_affine", (4, 3, 96, 96), 0)
    took = {}
    for execution in ("auto", "simulate", "qnn"):
        fq.set_execution(model, execution)
        times = []
        with torch.no_grad():
            for _ in range(4):
                started = time.process_time()
                model(x)
                times.append(time.process_time() - started)
        took[execution] = min(times[1:])
    return f"{took['qnn'] / took['auto']:.1f} of integers, {took['qnn'] / took['simulate']:.1f} of the simulation"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["random", "whole", "train", "cost"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--bits", type=int, default=8, choices=[8, 16], help="of activations")
    given = parser.parse_args()
    configs = {name: config for name, config in CONFIGS.items() if name.endswith(f"a{given.bits}")}
    warnings.simplefilter("ignore")
    if given.what == "random":
        for seed in range(given.first, given.first + given.count):
            net, shape = random_network(seed)
            print(f"seed {seed}: {differing(net, [*configs.values()][seed % 2], shape, seed)}", flush=True)
    elif given.what == "train":
        for seed in SEEDS:
            print(f"seed {seed}: {trained(seed)}", flush=True)
    else:
        for name in ("resnet18", "mobilenet_v2"):
            if given.what == "cost":
                print(f"{name}: {cost(name)}", flush=True)
            for bits, config in configs.items() if given.what == "whole" else ():
                print(f"{name} {bits}: {differing(whole(name), config, (1, 3, 64, 64), 0)}", flush=True)


if __name__ == "__main__":
    main()
