"""The quantizing operations: a plain one with a number of bits, and one with any specification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fakequant.ir.op import IROp, IRType, TensorShape, TensorType
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams, compute_dtype, measure
from fakequant.numerics.spec import Gradient, QuantSpec
from fakequant.ops import library
from fakequant.ops.graph_operators import quantize_as_node

MAX_BITS = 32
# Codes of more bits are not exact in float32, in which specifications compute.
_MAX_SPEC_BITS = 24


class FakeQuantize(nn.Module):
    """Fake-quantizes as a specification says, with given parameters or, without, by the range of the tensor itself.

    Args:
        spec: how to quantize.
        opaque: whether a compiler sees one node instead of the operations that define it.
        rectified: whether the ReLU of x is quantized, by given parameters.
    """

    def __init__(self, spec: QuantSpec, *, opaque: bool = False, rectified: bool = False) -> None:
        super().__init__()
        self.spec, self.opaque, self.rectified = spec, opaque, rectified

    def forward(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """x quantized; scale and zero point [groups, axes kept]."""
        if self.rectified and scale is not None:
            return library.fake_quantize_relu(x, QParams(scale, zero_point, seed=seed), self.spec)
        learned = any(p is not None and p.requires_grad for p in (scale, zero_point))
        if self.opaque and not learned and isinstance(x, FakeTensor):
            return quantize_as_node(x, self.spec, scale, zero_point, seed=seed)
        if scale is None:
            return library.fake_quantize_dynamic(x, self.spec, seed)
        return library.quantize_by(x, self.spec, scale, zero_point, seed=seed)

    def extra_repr(self) -> str:
        return str(self.spec)


class WideFakeQuantize(nn.Module):
    """Codes of up to 32 bits and real zero points, computed in float64; the gradient passes everywhere.

    Args:
        num_bits: 1 to 32.
        scale: units of x per code; by default from the range of every tensor.
        zero_point: the code of 0.0, any real number; by default, with the scale, from the range.
        symmetric: whether codes are signed, with 0 for 0.0.
    """

    def __init__(self, num_bits: int, scale: float | None, zero_point: float, symmetric: bool) -> None:
        super().__init__()
        self.num_bits, self.scale, self.zero_point, self.symmetric = num_bits, scale, zero_point, symmetric

    def forward(self, x: Tensor) -> Tensor:
        """x quantized."""
        values = x.detach().double()
        lowest, highest = code_range(self.num_bits, self.symmetric)
        scale, zero_point = self._chosen(values, lowest, highest)
        codes = ((values / scale).round() + zero_point).clamp(lowest, highest)
        return _StraightThrough.apply(x, ((codes - zero_point) * scale).to(x.dtype))

    def _chosen(self, values: Tensor, lowest: int, highest: int) -> tuple[Tensor, Tensor]:
        if self.scale is not None:
            return values.new_tensor(self.scale), values.new_tensor(self.zero_point)
        lo, hi = (end.reshape(()) for end in measure(values, PerTensor()))
        tiny = torch.finfo(torch.float32).tiny
        if self.symmetric:
            return (torch.maximum(-lo, hi) / max(highest, 1)).clamp(min=tiny), values.new_zeros(())
        scale = ((hi - lo) / (highest - lowest)).clamp(min=tiny)
        return scale, (lowest - (lo / scale).round()).clamp(lowest, highest)

    def extra_repr(self) -> str:
        return f"num_bits={self.num_bits}, scale={self.scale}, zero_point={self.zero_point}, symmetric={self.symmetric}"


class _StraightThrough(torch.autograd.Function):
    """Returns its second argument; the gradient goes to the first."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def code_range(num_bits: int, symmetric: bool) -> tuple[int, int]:
    """The lowest and highest code.

    >>> code_range(8, True), code_range(8, False), code_range(1, True)
    ((-128, 127), (0, 255), (-1, 0))
    """
    return (-(1 << num_bits - 1), (1 << num_bits - 1) - 1) if symmetric else (0, (1 << num_bits) - 1)


def _attribute(name: str, default: object, doc: str) -> Any:
    """A property that is an attribute of an operation."""

    def set_to(op: IROp, value: object) -> None:
        op.attributes[name] = value

    return property(lambda op: op.attributes.get(name, default), set_to, doc=doc)


class FakeQuantizationOp(IROp):
    """Rounds to the values of codes of some bits per tensor; the gradient passes everywhere.

    With symmetric codes (signed, the full range of two's complement) 0.0 has the code 0. Asymmetric codes begin at 0.
    Up to 24 bits and with a whole zero point that is a code, the result is that of `fakequant.fake_quantize` with the
    same scale and `Gradient.IDENTITY`, bit for bit; beyond, it is computed in float64.

    Args:
        num_bits: 1 to 32.
        scale: units of x per code. None: by the range of every tensor, as `fakequant.choose_qparams` does.
        zero_point: the code of 0.0, which belongs to a given scale and asymmetric codes; any finite number.
        symmetric: as above.
        output_id: of the value it makes.
        input_id: of the value it reads; None if it is set later.
        type: of both.

    Source: AiDotNet's FakeQuantizationOp; there the zero point of an asymmetric range is not derived, so that negative
    numbers become 0.

    >>> op = FakeQuantizationOp(4, output_id=1, input_id=0, type=TensorType(IRType.Float32, TensorShape((32, 128))))
    >>> print(op)
    t1 = FakeQuantization(t0) : Float32 [32, 128]
    >>> print(op.detailed())
    t1 = FakeQuantization(t0) {num_bits=4, scale=none, symmetric=true, zero_point=0.0} : Float32 [32, 128]
    """

    def __init__(
        self,
        num_bits: int = 8,
        scale: float | None = None,
        zero_point: float = 0.0,
        symmetric: bool = True,
        *,
        output_id: int | None = None,
        input_id: int | None = None,
        type: TensorType | None = None,
    ) -> None:
        attributes = {"num_bits": num_bits, "scale": scale, "zero_point": zero_point, "symmetric": symmetric}
        made, read = ([] if id is None else [id] for id in (output_id, input_id))
        type = TensorType(IRType.Float32, TensorShape()) if type is None else type
        super().__init__("FakeQuantization", made, read, [type], attributes)

    num_bits: int = _attribute("num_bits", 8, "How many bits a code has.")
    scale: float | None = _attribute("scale", None, "Units of x per code; None: from the range of every tensor.")
    zero_point: float = _attribute("zero_point", 0.0, "The code of 0.0.")
    symmetric: bool = _attribute("symmetric", True, "Whether codes are signed, with 0 for 0.0.")

    def faults(self) -> list[str]:
        found = super().faults()
        if len(self.input_ids) != 1:
            found.append(f"takes 1 input, got {len(self.input_ids)}")
        return found + parameter_faults(self.num_bits, self.scale, self.zero_point, self.symmetric)


def parameter_faults(num_bits: Any, scale: Any, zero_point: Any, symmetric: Any) -> list[str]:
    """The faults in the attributes of a `FakeQuantizationOp`, one sentence each."""
    found = []
    if isinstance(num_bits, bool) or not isinstance(num_bits, int) or not 1 <= num_bits <= MAX_BITS:
        found.append(f"num_bits must be an integer from 1 to {MAX_BITS}, got {num_bits!r}")
    if not isinstance(symmetric, bool):
        found.append(f"symmetric must be true or false, got {symmetric!r}")
    if scale is not None and not (_is_number(scale) and scale > 0):
        found.append(f"scale must be a positive, finite number, or none for the tensor's range, got {scale!r}")
    if not _is_number(zero_point):
        found.append(f"zero_point must be a finite number, got {zero_point!r}")
    elif zero_point and (symmetric or scale is None):
        found.append(
            f"zero_point={zero_point!r} belongs to a given scale and symmetric=false; "
            "without a scale it follows from the range, and symmetric codes have none"
        )
    return found


def plain_quantizer(num_bits: int, scale: float | None, zero_point: float, symmetric: bool) -> nn.Module:
    """The module that computes a `FakeQuantizationOp` with these attributes."""
    lowest, highest = code_range(num_bits, symmetric)
    zero_point = float(zero_point)
    is_code = zero_point.is_integer() and lowest <= zero_point <= highest
    in_float32 = scale is None or 0 < torch.tensor(scale, dtype=torch.float32, device="cpu").item() < math.inf
    if num_bits > _MAX_SPEC_BITS or not is_code or not in_float32:
        return WideFakeQuantize(num_bits, scale, zero_point, symmetric)
    format = IntegerFormat.of(num_bits, signed=symmetric)
    spec = QuantSpec(format, symmetric=symmetric, gradient=Gradient.IDENTITY)
    return _WithNumbers(FakeQuantize(spec), scale, None if symmetric else int(zero_point))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _WithNumbers(nn.Module):
    """A `FakeQuantize` whose parameters are numbers."""

    def __init__(self, quantize: FakeQuantize, scale: float | None, zero_point: int | None) -> None:
        super().__init__()
        self.quantize, self.scale, self.zero_point = quantize, scale, zero_point

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return self.quantize(x)
        ones = [1] * x.dim()
        scale = torch.full(ones, self.scale, dtype=compute_dtype(x.dtype), device=x.device)
        if self.zero_point is None:
            return self.quantize(x, scale)
        return self.quantize(x, scale, torch.full(ones, self.zero_point, dtype=torch.int32, device=x.device))


def group_shape(spec: QuantSpec, shape: Sequence[int]) -> TensorShape:
    """The shape of the scales [groups, axes kept], -1 where it depends on a dynamic dimension.

    Raises:
        ShapeError: the granularity does not fit the shape.
    """
    # Two lengths that all common block sizes divide: a dimension of the result that differs is dynamic.
    once = 2**12 * 3 * 5 * 7
    groups = [spec.granularity.group_shape([k * once if n == -1 else n for n in shape]) for k in (1, 2)]
    return TensorShape(a if a == b else -1 for a, b in zip(*groups, strict=True))
