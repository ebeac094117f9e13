"""Small networks for Qualcomm's HTP, and its emulation where onnxruntime-qnn is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fakequant as fq

FILE = Path(__file__).parents[1] / "vectors" / "qnn.npz"
INSTALLED = find_spec("onnxruntime_qnn") is not None


def _config(weight: str, activation: str) -> fq.Config:
    of_weight = fq.TensorConfig(fq.QuantSpec(weight, fq.PerChannel(0)))
    of_input = fq.TensorConfig(fq.QuantSpec(activation, symmetric=False))
    return fq.Config(f"{weight} {activation}", (fq.Rule("*", weight=of_weight, input=of_input),))


CONFIGS: dict[str, str | fq.Config] = {
    "w8a8": "int8_affine",
    "w4a8": _config("int4", "uint8"),
    "w8a16": _config("int8", "uint16"),
    "w4a16": _config("int4", "uint16"),
}


class Residual(nn.Module):
    """A convolution, a depthwise and a pointwise one, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.point = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.point(self.depth(self.wide(x).relu()).relu()) + x).relu()


class InPlace(Residual):
    """The same with functions that overwrite their operands."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.point(self.depth(self.wide(x).relu_()).relu_())
        y += x
        return y.relu_()


class Forks(nn.Module):
    """Clamps of sums, differences and products, whose stored results another function reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.relu() + torch.clamp(self.second(x), -0.3, 0.4)
        y = self.third(torch.clamp(x, min=-0.2))
        return (x - y.clamp(min=0)).clamp(0.1, 0.8) + (x * y).relu()


class Gates(nn.Module):
    """Products of tensors and their sigmoids, which HTP computes as one function, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.first(2 * x))
        x = x * torch.sigmoid(self.up(nn.functional.silu(self.down(x.mean((2, 3), keepdim=True)))))
        x = self.second(x)
        gate = torch.sigmoid(x)
        x = self.third(gate * x + gate)
        return x * torch.sigmoid(x).transpose(2, 3)


class Mean(nn.Module):
    """The mean of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _large_biases() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.bias, std=10.0)  # type: ignore[arg-type]
    return model


_LAYERS = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()),
    "strides": lambda: nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU6()),
    "groups": lambda: nn.Conv2d(3, 12, 3, dilation=2, groups=3),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 8, 3, stride=2), nn.ReLU()),
    "depthwise": lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, stride=2, groups=3), nn.ReLU()),
    "row": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 16, 5)),
    "chain": lambda: nn.Sequential(*(m for n in (3, 16, 16, 16) for m in (nn.Conv2d(n, 16, 3), nn.ReLU()))),
    "biases": _large_biases,
    "residual": lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Residual(), Residual()),
    "written": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(inplace=True), nn.MaxPool2d(3, 2, 1), InPlace()),
    "bounds": lambda: nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.Hardtanh(-0.5, 0.7), nn.Conv2d(16, 16, 3), nn.Hardtanh(), nn.Conv2d(16, 8, 1)),
        nn.Hardtanh(-0.1, 0.3),
    ),
    "mean": lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Mean()),
}
_LAYERS |= {
    "windows": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 16, 1)),
    "picked": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)),
        *(nn.AvgPool2d(2), nn.MaxPool2d(2, 1), nn.Conv2d(8, 8, 1)),
    ),
    "tables": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 1)
    ),
}
_LAYERS["forks"] = lambda: nn.Sequential(Forks(), nn.Conv2d(8, 8, 1))
_LAYERS["gates"] = lambda: nn.Sequential(Gates(), nn.Conv2d(8, 8, 1), nn.SiLU())
_NARROW = ("tables", "forks", "gates")
"""Networks of functions without a rule for 16 bits."""
NETWORKS = {f"{name} {bits}": (make, bits) for name, make in _LAYERS.items() for bits in ("w8a8", "w4a8")}
NEAR = {"depthwise w8a16": 1, "depthwise w4a16": 1, "mean w8a16": 2, "mean w4a16": 2}
"""By how many codes at most networks differ for whose last function no exact rule of 16 bits is known."""
NETWORKS |= {
    f"{name} {bits}": (make, bits)
    for name, make in _LAYERS.items()
    for bits in ("w8a16", "w4a16")
    if name not in _NARROW and f"{name} {bits}" not in NEAR
}
NETWORKS["linear w8a8"] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 24), nn.ReLU(), nn.Linear(24, 8)), "w8a8"
NETWORKS["rows w8a8"] = lambda: nn.Linear(16, 24), "w8a8"
for _bits in ("w8a8", "w8a16"):
    NETWORKS[f"head {_bits}"] = (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        _bits,
    )
    NETWORKS[f"tokens {_bits}"] = (
        lambda: nn.Sequential(
            *(nn.Flatten(2), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU6()),
            *(nn.Flatten(), nn.Linear(48, 8)),
        ),
        _bits,
    )
NETWORKS["linear w8a16"] = NETWORKS["linear w8a8"][0], "w8a16"


def ranges_of(model: nn.Module) -> Tensor:
    """Scale and zero point of every quantizer of an activation, in their order, float64 [quantizers, 2]."""
    found = [q for q in fq.nn.quantizers(model).values() if q.kind is fq.nn.Kind.INPUT]
    return torch.tensor(
        [[float(p) for p in (q.scale, q.zero_point) if p is not None] for q in found], dtype=torch.float64
    )


def calibrated(name: str, ranges: Tensor | None = None) -> tuple[nn.Module, Tensor]:
    """A network that is ready, by itself or with recorded ranges, and an input on the codes of its first layer."""
    layers, bits = name.split()
    make = NETWORKS[name][0] if name in NETWORKS else _LAYERS[layers]
    torch.manual_seed(len(name))
    batches = [torch.randn(1, 3, 16, 16) for _ in range(3)]
    model = fq.prepare(make().eval(), CONFIGS[bits], batches[0], target="qnn")
    fq.calibrate(model, batches, progress=False)
    activations = [q for q in fq.nn.quantizers(model).values() if q.kind is fq.nn.Kind.INPUT]
    if ranges is not None:  # those of another processor differ in their last bits
        for quantizer, (scale, zero_point) in zip(activations, ranges.tolist(), strict=True):
            points = torch.full_like(quantizer.zero_point, int(zero_point))  # type: ignore[arg-type]
            scales = torch.full_like(quantizer.scale, scale)  # type: ignore[arg-type]
            quantizer.set_qparams(fq.QParams(scales, points))
    with torch.no_grad():
        return model, activations[0](torch.randn(1, 3, 16, 16)).clone()


def codes(model: nn.Module, output: Tensor) -> Tensor:
    """The codes of an output, which engines turn into values by other roundings."""
    last = [q for q in fq.nn.quantizers(model).values() if q.kind is fq.nn.Kind.INPUT][-1]
    assert last.scale is not None
    return (torch.round(output.detach().double() / last.scale.double()) + (last.zero_point or 0)).to(torch.int32)


def emulated(path: Path, x: Tensor) -> Tensor:
    """The output of an ONNX file on the emulation of HTP, where no node may run elsewhere.

    HTP stores the right codes, but in vectors and matrices of more than 2,048 elements the values that it returns are
    those of the next code for every fourth code.
    """
    import onnxruntime
    import onnxruntime_qnn  # type: ignore[import-not-found]

    name = "QNNExecutionProvider"
    if not any(device.ep_name == name for device in onnxruntime.get_ep_devices()):
        onnxruntime.register_execution_provider_library(name, onnxruntime_qnn.get_library_path())
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == name]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(devices[:1], {"backend_path": onnxruntime_qnn.get_qnn_htp_path()})
    session = onnxruntime.InferenceSession(str(path), options)
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(np.asarray(output))
