"""Quantizers with learned ranges, their inputs and gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from fakequant import PerBlock, PerChannel, PerTensor, PerToken, QuantSpec, Range, choose_qparams
from fakequant.nn import Kind, Quantizer

GRANULARITIES = [
    PerTensor(),
    PerChannel(0),
    PerChannel(1),
    PerToken(),
    PerBlock({-1: 4}),
    PerBlock({0: 2, 1: 4}, pad=True),
]


SYMMETRIC = [
    "int8",
    "int8_narrow",
    "int4",
    "uint4 per_tensor symmetric",
    "float8_e4m3fn",
    "float4_e2m1fn",
    "nf4",
    "int1",
]


METHODS = ["lsq", "lsq_plus", "pact", "tqt"]


def data(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def calibrated(spec: QuantSpec | str, x: Tensor, share: float = 0.5, kind: Kind = Kind.WEIGHT) -> Quantizer:
    """A quantizer whose range is a share of the range of x, so that some values saturate."""
    quantizer = Quantizer(spec, kind=kind)
    lo, hi = choose_qparams(x * share, spec).range or (x, x)
    quantizer.set_range(Range(lo, hi))
    return quantizer


def learning(method: str, spec: QuantSpec | str, x: Tensor, **options: Any) -> Quantizer:
    quantizer = calibrated(spec, x)
    quantizer.learn(method, **options)
    return quantizer


def of(quantizer: Quantizer, name: str) -> nn.Parameter:
    return getattr(quantizer.learned, name)


def at(spec: str, granularity: Any) -> QuantSpec:
    return QuantSpec.parse(spec).replace(granularity=granularity)


def gradients(quantizer: Quantizer, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    names = [name.split(".")[1] for name, _ in quantizer.named_parameters()]
    return dict(zip(names, torch.autograd.grad(quantizer(x), list(quantizer.parameters()), dy), strict=True))


X = data(6, 8)


DY = data(6, 8, seed=1)
