"""An operation of `fakequant.ir` with the interface of AiDotNet.JitCompiler.IR."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fakequant import ir
from fakequant.ir.op import IRType, TensorShape, TensorType

__all__ = ["FakeQuantizationOp", "IRType"]


class FakeQuantizationOp(ir.FakeQuantizationOp):
    """`fakequant.ir.FakeQuantizationOp` with the settable members of AiDotNet's class.

    Differences: a scale must be positive (in AiDotNet 0 means no scale), and a zero point needs a scale and asymmetric
    codes. Without a scale asymmetric codes get the zero point of their range (in AiDotNet 0, which clips negative
    numbers).

    Args:
        NumBits: 1 to 32.
        Scale: units of x per code; None: from the range.
        ZeroPoint: the code of 0.0.
        Symmetric: whether codes are signed.
        OutputIds: id of the output.
        InputIds: id of the input.
        OutputType: type of both.
        OutputShape: shape of both.

    Source: https://github.com/ooples/AiDotNet, class FakeQuantizationOp.

    >>> op = FakeQuantizationOp(NumBits=8, Scale=0.05, OutputIds=[1], InputIds=[0], OutputShape=[32, 128])
    >>> op.Validate(), op.OpType
    (True, 'FakeQuantization')
    >>> print(op.ToString())
    t1 = FakeQuantize(t0, bits=8, scale=0.0500, zeroPoint=0, symmetric=True) : Float32 [32, 128]
    >>> op.NumBits = 33
    >>> op.Validate()
    False
    """

    def __init__(  # noqa: PLR0913  the members of the original
        self,
        NumBits: int = 8,
        Scale: float | None = None,
        ZeroPoint: float = 0.0,
        Symmetric: bool = True,
        *,
        OutputIds: Iterable[int] = (),
        InputIds: Iterable[int] = (),
        OutputType: IRType = IRType.Float32,
        OutputShape: Sequence[int] = (),
    ) -> None:
        super().__init__(NumBits, Scale, ZeroPoint, Symmetric, type=TensorType(OutputType, TensorShape(OutputShape)))
        self.output_ids, self.input_ids = list(OutputIds), list(InputIds)

    def Validate(self) -> bool:
        """Whether the operation is valid; `faults` lists the reasons if not."""
        return self.validate()

    def ToString(self) -> str:
        """The text that the original prints; with "none" for a missing input, for which the original fails."""
        scale = "auto" if self.scale is None else f"{self.scale:.4f}"
        read = f"t{self.input_ids[0]}" if self.input_ids else "none"
        words = f"bits={self.num_bits}, scale={scale}, zeroPoint={self.zero_point:g}, symmetric={self.symmetric}"
        return f"t{self.output_id} = FakeQuantize({read}, {words}) : {self.outputs[0]}"


def _alias(name: str) -> Any:
    return property(
        lambda op: getattr(op, name), lambda op, value: setattr(op, name, value), doc=f"`{name}` of `fakequant.ir`."
    )


for _theirs, _ours in {
    "NumBits": "num_bits",
    "Scale": "scale",
    "ZeroPoint": "zero_point",
    "Symmetric": "symmetric",
    "OutputIds": "output_ids",
    "OutputId": "output_id",
    "InputIds": "input_ids",
    "OutputType": "output_type",
    "OutputShape": "output_shape",
    "OpType": "op_type",
}.items():
    setattr(FakeQuantizationOp, _theirs, _alias(_ours))
