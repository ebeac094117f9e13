"""Products of float8 codes on a device."""

from __future__ import annotations

import copy

import torch
from bits import assert_same_bits
from torch import Tensor, nn

import fakequant as fq
from fakequant.numerics import products as definition
from fakequant.numerics.products import Factor
from fakequant.ops import float8_products
from gpu import NotHere

_PAIRS = (
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e5m2, torch.float8_e4m3fn),
)
# Rows, inner and columns; sums of whole numbers up to 3 are below 2**13, which 14 bits hold.
_WHOLE = ((64, 128, 64), (128, 896, 256), (33, 70, 24), (17, 40, 9), (1, 256, 8))
_LONG = (64, 4096, 64)
# Of the sum of magnitudes, where four instructions of 32 products each are summed in 14 bits before float32 takes over
# (docs/execution.md): every addend, and what was summed before, loses less than 2**-12 of the largest at each.
_MOST_LOST = 4 * 33 * 2.0**-12


def products(device: str) -> str:
    """Sums of whole numbers are exact, others as near as known, and a layer has the gradients of the simulated one."""
    lost: list[float] = []
    for dtypes in _PAIRS:
        if reason := float8_products.linear_unavailable(torch.device(device), *dtypes):
            raise NotHere(reason)
        for shape in _WHOLE:
            _exact(device, dtypes, shape)
        lost.append(_lost(device, dtypes))
        assert lost[-1] <= _MOST_LOST, f"sums of {dtypes} lose {lost[-1]:.1e} of their magnitudes"
    _layer(device)
    return (
        f"{len(_WHOLE)} shapes of {len(_PAIRS)} pairs of dtypes exact, and one layer with its gradients; other sums "
        f"lose {max(lost):.1e} of their magnitudes, {max(lost) / 2.0**-24 / _LONG[1]:.2g} of what float32 may"
    )


def _whole(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float32)


def _exact(device: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    codes, others, random = _whole(1, rows, inner), _whole(2, columns, inner), torch.Generator().manual_seed(0)
    bias = torch.randn(columns, generator=random)
    scales = torch.rand(rows, 1, generator=random), torch.rand(columns, 1, generator=random)
    right = definition.scaled(codes @ others.t(), scales[0] * scales[1].reshape(-1), bias)
    x, weight = (
        Factor(c.to(dtype).to(device), scale.to(device))
        for c, dtype, scale in zip((codes, others), dtypes, scales, strict=True)
    )
    found = float8_products.linear(x, weight, bias.to(device)).cpu()
    # + 0.0: the sign of a sum that is zero depends on its order.
    assert_same_bits(found + 0.0, right + 0.0, f"{rows} x {inner} x {columns}, {dtypes}")


def _lost(device: str, dtypes: tuple[torch.dtype, ...]) -> float:
    """The largest error of sums of random products, of the sums of their magnitudes."""
    rows, inner, columns = _LONG
    random = torch.Generator().manual_seed(3)
    codes, others = (
        torch.randn(n, inner, generator=random).mul_(50.0).to(dtype)
        for n, dtype in zip((rows, columns), dtypes, strict=True)
    )
    one = torch.ones(1, device=device)
    found = float8_products.linear(Factor(codes.to(device), one), Factor(others.to(device), one), None)
    a, b = codes.double(), others.double()
    return ((found.cpu().double() - a @ b.t()).abs() / (a.abs() @ b.abs().t())).max().item()


def _layer(device: str) -> None:
    """Of whole numbers and powers of two, so that the simulated layer is exact too, in any order."""
    layer = nn.Linear(96, 40)
    layer.weight.data, layer.bias.data = _whole(4, 40, 96) / 8, _whole(5, 40)
    rule = fq.Rule("*", "float8_e4m3fn", "float8_e4m3fn per_channel(0)")
    model = fq.prepare(nn.Sequential(layer), fq.Config("float8", (rule,)))
    for quantizer, scale in zip(fq.nn.quantizer.quantizers(model).values(), (1 / 16, 1 / 8), strict=True):
        shape = (1,) if quantizer.kind is fq.nn.quantizer.Kind.INPUT else (40, 1)
        quantizer.set_qparams(fq.QParams(torch.full(shape, scale), None))
    multiplied = fq.set_execution(copy.deepcopy(model).to(device), "integer")
    right, found = (_step(net, device) for net in (model.to(device), multiplied))
    for name, one, other in zip(("y", "dx", "d_weight", "d_bias"), found, right, strict=True):
        assert_same_bits(one + 0.0, other + 0.0, f"a layer's {name}")


def _step(model: nn.Module, device: str) -> list[Tensor]:
    x = (_whole(6, 32, 96) / 16).to(device).requires_grad_()
    y = model(x)
    y.backward(_whole(7, 32, 40).to(device))
    gradients = x.grad, *(parameter.grad for parameter in model.parameters())
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]
