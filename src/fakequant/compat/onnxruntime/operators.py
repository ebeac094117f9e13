"""FakeQuant and FakeQuantGrad on torch tensors, computed by this package's operator."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from fakequant.compat.codes import CodeRange
from fakequant.errors import DTypeError, QParamsError, ShapeError
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams, check_scale, compute_dtype, is_concrete
from fakequant.numerics.reference import grad_input
from fakequant.numerics.spec import Arithmetic
from fakequant.ops import library


def fake_quant(
    x: Tensor, scale: float | Tensor, zero_point: float | Tensor, quant_min: int = 0, quant_max: int = 255
) -> tuple[Tensor, Tensor]:
    """com.microsoft.FakeQuant: x quantized and decoded, and the mask that `fake_quant_grad` needs.

    Differentiable: the gradient of y reaches x where the mask is set, and a scale or zero point that requires grad.

    Args:
        x: any shape; float32 as in ONNX Runtime, or float64, float16 or bfloat16.
        scale: units of x per code; a number, or a tensor of shape [] or [1].
        zero_point: the code of 0.0, a whole number; a number, or a tensor of shape [] or [1].
        quant_min: lowest code.
        quant_max: highest code; the range is one of at most 24 bits, and of two codes at least.

    Returns:
        y, of the shape and dtype of x; the mask, bool, of the shape of x.

    Raises:
        ShapeError: a scale or zero point of more than one element or one axis.
        QParamsError: a scale that is not positive and finite, a zero point that is not a whole number.
        SpecError: a range of codes that float32 does not hold, or that holds fewer than two.
        DTypeError: x is not a floating tensor.

    >>> y, mask = fake_quant(torch.tensor([0.24, -1.0, 30.0]), 0.1, 3)
    >>> y
    tensor([ 0.2000, -0.3000, 25.2000])
    >>> mask
    tensor([ True, False, False])
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    scale, zero_point = _scalar("scale", scale, x), _scalar("zero_point", zero_point, x)
    check_scale(scale, Arithmetic.DIVIDE)
    if is_concrete(zero_point) and not (code := float(zero_point.item())).is_integer():
        raise QParamsError(f"zero_point must be a whole number, the code of 0.0, got {code}")
    codes = CodeRange(operator.index(quant_min), operator.index(quant_max), PerTensor(), Arithmetic.DIVIDE)
    groups = codes.granularity.group_shape(x.shape)
    params = QParams(scale.reshape(groups), (zero_point - codes.origin).reshape(groups))
    return library.fake_quantize_with_mask(x, params, codes.spec)


def fake_quant_grad(dy: Tensor, mask: Tensor) -> Tensor:
    """com.microsoft.FakeQuantGrad: dy where the mask is set, else exactly 0; differentiable by dy.

    Args:
        dy: the gradient of y, any shape.
        mask: the bool mask from `fake_quant`, of the same shape.

    Raises:
        DTypeError: a mask that is not bool.
        ShapeError: shapes that differ.

    >>> fake_quant_grad(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, False, False]))
    tensor([1., 0., 0.])
    """
    if mask.dtype != torch.bool:
        raise DTypeError(f"the mask has dtype {mask.dtype}, expected torch.bool; give the mask of fake_quant")
    if mask.shape != dy.shape:
        raise ShapeError(f"the mask has shape {list(mask.shape)}, but dy {list(dy.shape)}; they must agree")
    return grad_input(dy, mask)


def _scalar(name: str, value: float | Tensor, x: Tensor) -> Tensor:
    """Return a parameter as a 0-d tensor in the dtype of the computation."""
    dtype = compute_dtype(x.dtype)
    given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
    if given.shape not in ((), (1,)):
        raise ShapeError(
            f"{name} has shape {list(given.shape)}, expected [] or [1]: FakeQuant is per tensor; for one value per "
            "channel use fakequant.fake_quantize"
        )
    return given.reshape(()).to(x.device, dtype)
