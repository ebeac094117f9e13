"""The quantizing operations, and the rows of the table of operations; importing this module fills the table.

The rows of torch's operators are only names, because torch's meta kernels know types, shapes and most restrictions.
The checks in this file add two kinds of refusal: calls that torch refuses only when it really runs them, and mixtures
of types that no engine computes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from fakequant.errors import FakeQuantError, GraphError
from fakequant.ir.op import IROp, IRType, TensorShape, TensorType
from fakequant.ir.table import (
    OP_CLASSES,
    ArgumentKind,
    Call,
    OperationRow,
    Parameter,
    Rule,
    Signature,
    add_row,
    faults,
    find_overload,
    make_op,
    repeatable,
    signature_of,
)
from fakequant.numerics.formats.floats import IntegerFormat
from fakequant.numerics.granularity import PerTensor
from fakequant.numerics.qparams import QParams, compute_dtype, measure
from fakequant.numerics.spec import Gradient, QuantSpec, Rounding
from fakequant.ops import library
from fakequant.ops.graph_operators import quantize_as_node

MAX_BITS = 32
# Codes of more bits are not exact in float32, in which specifications compute.
_MAX_SPEC_BITS = 24


class FakeQuantize(nn.Module):
    """Fake-quantizes by a specification, with parameters from the caller or, without a scale, from the range of x.

    Args:
        spec: how to quantize.
        opaque: whether a compiler sees one node instead of torch operations.
        rectified: whether relu(x) is quantized, if there is a scale.
    """

    def __init__(self, spec: QuantSpec, *, opaque: bool = False, rectified: bool = False) -> None:
        super().__init__()
        self.spec, self.opaque, self.rectified = spec, opaque, rectified

    def forward(
        self, x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """x quantized [shape of x]; scale and zero point are [groups per axis]."""
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
    """Fake-quantizes to codes of up to 32 bits with real zero points, in float64; the gradient passes everywhere.

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
        """x quantized [shape of x], in its dtype."""
        values = x.detach().double()
        lowest, highest = code_range(self.num_bits, self.symmetric)
        if self.scale is not None:
            scale, zero_point = values.new_tensor(self.scale), values.new_tensor(self.zero_point)
        else:
            lo, hi = (end.reshape(()) for end in measure(values, PerTensor()))
            width = torch.maximum(-lo, hi) / max(highest, 1) if self.symmetric else (hi - lo) / (highest - lowest)
            scale = width.clamp(min=torch.finfo(torch.float32).tiny)
            by_range = (lowest - (lo / scale).round()).clamp(lowest, highest)
            zero_point = values.new_zeros(()) if self.symmetric else by_range
        codes = ((values / scale).round() + zero_point).clamp(lowest, highest)
        return _StraightThrough.apply(x, ((codes - zero_point) * scale).to(x.dtype))

    def extra_repr(self) -> str:
        return f"num_bits={self.num_bits}, scale={self.scale}, zero_point={self.zero_point}, symmetric={self.symmetric}"


class _StraightThrough(torch.autograd.Function):
    """Returns its second argument; the gradient goes to the first argument."""

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
    """The lowest and highest code for a number of bits.

    >>> code_range(8, True), code_range(8, False), code_range(1, True)
    ((-128, 127), (0, 255), (-1, 0))
    """
    return (-(1 << num_bits - 1), (1 << num_bits - 1) - 1) if symmetric else (0, (1 << num_bits) - 1)


def _attribute(name: str, default: object, doc: str) -> Any:
    """A property that reads and sets an attribute of an operation."""

    def set_to(op: IROp, value: object) -> None:
        op.attributes[name] = value

    return property(lambda op: op.attributes.get(name, default), set_to, doc=doc)


class FakeQuantizationOp(IROp):
    """Fake-quantizes per tensor to integer codes of `num_bits` bits; the gradient passes everywhere.

    With symmetric codes (signed, the full range of two's complement) 0.0 has the code 0. Asymmetric codes begin at 0.
    Up to 24 bits, and with a zero point that is a code, the result is that of `fakequant.fake_quantize` with the same
    scale and `Gradient.IDENTITY`, bit for bit; otherwise it is computed in float64.

    Args:
        num_bits: 1 to 32.
        scale: units of x per code. None: from the range of every tensor, as `fakequant.choose_qparams` does.
        zero_point: the code of 0.0, any finite number; only with a scale and asymmetric codes.
        symmetric: whether codes are symmetric, see above.
        output_id: the id of the output.
        input_id: the id of the input; None if it is set later.
        type: the type of input and output.

    Source: AiDotNet's FakeQuantizationOp. That class does not derive the zero point of an asymmetric range, so that
    negative numbers become 0.

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
    """A `FakeQuantize` with numbers as scale and zero point."""

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
    """The shape of the scales [groups per axis], with -1 where it depends on a dynamic dimension.

    Raises:
        ShapeError: the granularity does not fit the shape.
    """
    # Two lengths that all common block sizes divide: a dimension of the result that differs is dynamic.
    once = 2**12 * 3 * 5 * 7
    groups = [spec.granularity.group_shape([k * once if n == -1 else n for n in shape]) for k in (1, 2)]
    return TensorShape(a if a == b else -1 for a, b in zip(*groups, strict=True))


RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
"""The prefixes of the names of whole recurrent layers, which only eager torch runs."""


def _numbers(call: Call) -> None:
    if any(t.type is IRType.Boolean for t in call.inputs):
        raise GraphError(f"takes numbers, got {', '.join(map(str, call.inputs))}")


def _floats(call: Call) -> None:
    if not call.inputs[0].type.floating:
        raise GraphError(f"takes floating-point numbers, got {call.inputs[0]}")


def _one_type(call: Call) -> None:
    types = {t.type.value for t in call.inputs if t.type is not IRType.Index}
    if len(types) > 1:
        raise GraphError(f"takes tensors of one type, got {', '.join(sorted(types))}")


def _linear(call: Call) -> None:
    _one_type(call)
    shape = call.type("weight").shape
    if len(shape) != 2:
        raise GraphError(f"takes a weight [out, in], got {shape}")


def _convolution(call: Call) -> None:
    _one_type(call)
    dilation = call.value("dilation")
    if any(n < 1 for n in (dilation if isinstance(dilation, (list, tuple)) else [dilation])):
        raise GraphError(f"takes dilation >= 1, got {dilation}")


def _transposed_convolution(call: Call) -> None:
    _convolution(call)
    axes = len(call.type("weight").shape) - 2
    values = (call.value(name) for name in ("output_padding", "stride", "dilation"))
    lists = (value if isinstance(value, (list, tuple)) else [value] for value in values)
    # Torch refuses lists of other lengths.
    for extra, stride, dilation in zip(*(n * axes if len(n) == 1 else n for n in lists), strict=False):
        if extra >= max(stride, dilation):
            raise GraphError(f"takes output_padding below the stride {stride} or dilation {dilation}, got {extra}")


def _along(call: Call) -> None:
    dim, shape = call.value("dim"), call.inputs[0].shape
    rank = max(len(shape), 1)
    if not -rank <= dim < rank:
        raise GraphError(f"dim {dim} is out of range for shape {shape}: {-rank} to {rank - 1}")


def _softmax(call: Call) -> None:
    _along(call)
    if call.value("dtype") is None:
        _floats(call)


def _gather(call: Call) -> None:
    _along(call)
    index = call.type("index")
    if index.type not in (IRType.Int64, IRType.Int32) or len(index.shape) > 1:
        raise GraphError(f"takes an index [n] of Int64 or Int32, got {index}")


def _norm(call: Call) -> None:
    """Check that parameters have the input's type, or all are Float32 if the input is a 16-bit float."""
    _floats(call)
    type = call.inputs[0].type
    allowed = {type, IRType.Float32} if type in (IRType.Half, IRType.BFloat16) else {type}
    names = [p.name for p in call.signature.parameters[1:] if p.kind is ArgumentKind.TENSOR and call.has(p.name)]
    given = {name: call.type(name).type for name in names}
    if len(set(given.values())) > 1 or set(given.values()) - allowed:
        words = ", ".join(f"{name} is {type.value}" for name, type in given.items())
        either = " or ".join(sorted(type.value for type in allowed))
        raise GraphError(f"normalizes {type.value} with parameters of one type, {either}, but {words}")


def _batch_norm(call: Call) -> None:
    _norm(call)
    if call.value("training") and (call.has("running_mean") or call.has("running_var")):
        raise GraphError("training=true changes the running statistics, which graphs do not; use model.eval()")


def _add(
    rows: str,
    check: Callable[[Call], None] | None = None,
    *,
    rule: Rule | None = None,
    moves: bool = False,
    draws: Callable[[IROp], bool] | None = None,
) -> None:
    """Add rows, separated by commas: the name in graphs, then the torch operators that compute it.

    If the arguments fit several operators, the first computes. Names without a namespace are in aten.
    """
    for row in rows.split(","):
        name, *targets = row.split()
        overloads = (find_overload(target if target.count(".") == 2 else f"aten.{target}") for target in targets)
        add_row(OperationRow(name, tuple(map(signature_of, overloads)), check, rule, moves=moves, draws=draws))


_add("Clone clone.default contiguous.default, Detach detach.default")
_add("IsFinite isfinite.default, Cast to.dtype _to_copy.default")
_add("ReLU relu.default, Neg neg.default, Abs abs.default, Round round.default, Floor floor.default", _numbers)
_add("GELU gelu.default, SiLU silu.default, LeakyReLU leaky_relu.default, ELU elu.default", _floats)
_add("HardSwish hardswish.default, HardSigmoid hardsigmoid.default, HardTanh hardtanh.default", _floats)
_add("Sigmoid sigmoid.default, Tanh tanh.default, Exp exp.default, Log log.default, Sqrt sqrt.default")
_add("Rsqrt rsqrt.default, Erf erf.default, Sin sin.default, Cos cos.default")
_add("Add add.Tensor add.Scalar, Mul mul.Tensor mul.Scalar")
_add("Sub sub.Tensor sub.Scalar", _numbers)
_add("Div div.Tensor div.Tensor_mode div.Scalar, Pow pow.Tensor_Scalar pow.Tensor_Tensor")
_add("Maximum maximum.default, Minimum minimum.default, Clamp clamp.default")
_add("Equal eq.Scalar eq.Tensor, Less lt.Scalar lt.Tensor, Greater gt.Scalar gt.Tensor")
_add("LessEqual le.Scalar le.Tensor, GreaterEqual ge.Scalar ge.Tensor")
_add("Where where.ScalarOther where.ScalarSelf where.self, MaskedFill masked_fill.Scalar")
_add("Softmax softmax.int, LogSoftmax log_softmax.int", _softmax)
_add("Sum sum.dim_IntList sum.default, Mean mean.dim mean.default")
_add("Max amax.default max.default, Min amin.default min.default")
_add("MatMul matmul.default mm.default bmm.default", _one_type)
_add("Linear linear.default", _linear)
_add("Conv1d conv1d.default conv1d.padding, Conv2d conv2d.default conv2d.padding", _convolution)
_add("Conv3d conv3d.default conv3d.padding", _convolution)
_add("ConvTranspose1d conv_transpose1d.default, ConvTranspose2d conv_transpose2d.input", _transposed_convolution)
_add("ConvTranspose3d conv_transpose3d.input", _transposed_convolution)
_add("MaxPool1d max_pool1d.default, MaxPool2d max_pool2d.default, MaxPool3d max_pool3d.default")
_add("AvgPool1d avg_pool1d.default, AvgPool2d avg_pool2d.default, AvgPool3d avg_pool3d.default")
_add("AdaptiveAvgPool1d adaptive_avg_pool1d.default, AdaptiveAvgPool2d adaptive_avg_pool2d.default")
_add("AdaptiveAvgPool3d adaptive_avg_pool3d.default")
_add("Attention scaled_dot_product_attention.default, Embedding embedding.default")
_add("LSTMCell lstm_cell.default, GRUCell gru_cell.default", _one_type)
_add("RNNTanhCell rnn_tanh_cell.default, RNNReLUCell rnn_relu_cell.default", _one_type)
_add("LayerNorm layer_norm.default, GroupNorm group_norm.default", _norm)
_add("BatchNorm batch_norm.default", _batch_norm)
_add("Concat cat.default, Stack stack.default", _one_type)
_add("Select select.int", _along)
_add("Slice slice.Tensor, Split split_with_sizes.default split.Tensor, Unbind unbind.int")
_add("Expand expand.default, Size sym_size.int")
_add("Gather index_select.default", _gather)
_add("Reshape reshape.default, Flatten flatten.using_ints, Permute permute.default", moves=True)
_add("Transpose transpose.int t.default, Unsqueeze unsqueeze.default", moves=True)
_add("Squeeze squeeze.default squeeze.dim squeeze.dims", moves=True)
_add("Dropout dropout.default", draws=lambda op: op.attributes.get("train") is not False)


def _add_own(
    name: str,
    parameters: Sequence[Parameter],
    rule: Rule,
    *,
    target: Callable[..., Any] | None = None,
    module: Callable[[Call], nn.Module] | None = None,
    draws: Callable[[IROp], bool] | None = None,
) -> None:
    """Add a row that a module or function computes, and no operator of torch."""
    add_row(OperationRow(name, (Signature(tuple(parameters), target),), rule=rule, module=module, draws=draws))


for _name, _function in {
    "IndexAdd": operator.add,
    "IndexSub": operator.sub,
    "IndexMul": operator.mul,
    "IndexFloorDiv": operator.floordiv,
    "IndexMod": operator.mod,
    "IndexMax": torch.sym_max,
    "IndexMin": torch.sym_min,
}.items():
    _sizes = [Parameter("self", "int"), Parameter("other", "int")]
    _add_own(_name, _sizes, lambda call: [TensorType(IRType.Index, TensorShape())], target=_function)


def _spec_of(call: Call) -> QuantSpec:
    try:
        return QuantSpec.parse(call.value("spec"))
    except FakeQuantError as error:
        raise GraphError(str(error)) from error


def _scale_type(call: Call) -> TensorType:
    """The type of the scales [groups per axis] for x."""
    x = call.type("x")
    if not x.type.floating:
        raise GraphError(f"quantizes floating-point numbers, got {x}")
    try:
        return TensorType(IRType.of(compute_dtype(x.type.dtype)), group_shape(_spec_of(call), x.shape))
    except FakeQuantError as error:
        raise GraphError(str(error)) from error


def _fake_quantize(call: Call) -> list[TensorType]:
    """The type of x, if scale and zero point [groups per axis] and seed fit the specification."""
    spec, expected = _spec_of(call), _scale_type(call)
    if call.has("scale"):
        scale = call.type("scale")
        if scale.type is not expected.type or not expected.shape.matches(scale.shape):
            raise GraphError(f"{spec} on {call.type('x')} takes a scale of {expected}, got {scale}")
    if call.has("zero_point"):
        zero_point = call.type("zero_point")
        if spec.symmetric or not call.has("scale"):
            raise GraphError(f"has a zero point, but {spec} takes none; a zero point needs a scale and symmetric=False")
        if not expected.shape.matches(zero_point.shape):
            raise GraphError(f"{spec} takes a zero point of shape {expected.shape}, got {zero_point.shape}")
    random = spec.rounding is Rounding.STOCHASTIC
    if random != call.has("seed"):
        raise GraphError(f"{spec} {'takes a seed (Int64 scalar)' if random else 'rounds to nearest and takes no seed'}")
    if random and call.type("seed") != TensorType(IRType.Int64, TensorShape()):
        raise GraphError(f"takes a seed of Int64 scalar, got {call.type('seed')}")
    return [call.type("x")]


_add_own(
    "FakeQuantize",
    [
        Parameter("x", "Tensor"),
        *(Parameter(name, "Optional[Tensor]", required=False) for name in ("scale", "zero_point", "seed")),
        Parameter("spec", "str"),
    ],
    _fake_quantize,
    module=lambda call: FakeQuantize(_spec_of(call)),
)
_add("ChooseScale fakequant.choose_scale.default", rule=lambda call: [_scale_type(call)])


def _numbers_of(call: Call) -> list[Any]:
    return [call.value(name) for name in ("num_bits", "scale", "zero_point", "symmetric")]


def _fake_quantization(call: Call) -> list[TensorType]:
    if found := parameter_faults(*_numbers_of(call)):
        raise GraphError(found[0])
    if not call.inputs[0].type.floating:
        raise GraphError(f"quantizes floating-point numbers, got {call.inputs[0]}")
    return [call.inputs[0]]


OP_CLASSES["FakeQuantization"] = FakeQuantizationOp
_add_own(
    "FakeQuantization",
    [
        Parameter("x", "Tensor"),
        Parameter("num_bits", "int", False, 8),
        Parameter("scale", "Optional[float]", False),
        Parameter("zero_point", "float", False, 0.0),
        Parameter("symmetric", "bool", False, True),
    ],
    _fake_quantization,
    module=lambda call: plain_quantizer(*_numbers_of(call)),
)


FUSED = "Fused"


def fuse(ops: Sequence[IROp]) -> IROp:
    """Fuse a chain of operations into one operation, whose only result is the chain's last.

    Args:
        ops: the chain in order; no other operation may read its results, except the last.
    """
    made = {id for op in ops for id in op.output_ids}
    inputs = list(dict.fromkeys(id for op in ops for id in op.input_ids if id not in made))
    local = {id: place for place, id in enumerate(inputs)}
    body: list[IROp] = []
    for op in ops:
        read = [local[id] for id in op.input_ids]
        local.update({id: len(local) + place for place, id in enumerate(op.output_ids)})
        body.append(op.copied([local[id] for id in op.output_ids], read))
    fused = make_op(FUSED, inputs, {"name": "+".join(op.op_type for op in ops), "body": body})
    fused.output_ids, fused.outputs = list(ops[-1].output_ids), list(ops[-1].outputs)
    fused.origin = ops[0].origin
    return fused


def body_of(op: IROp) -> list[IROp]:
    """The operations in a fused operation, whose inputs are t0, t1, ...; copy an operation before a change.

    Raises:
        GraphError: the attribute `body` is not a list of operations.
    """
    body = op.attributes.get("body")
    if not isinstance(body, (list, tuple)) or not body or not all(isinstance(part, IROp) for part in body):
        raise GraphError(f"takes a list of operations as its body, got {body!r}")
    return list(body)


def _fused(call: Call) -> list[TensorType]:
    """The output types of the last operation in the body, after all operations are checked as in a graph."""
    known = dict(enumerate(call.inputs))
    body = body_of(call.op)
    for op in body:
        if missing := [id for id in op.input_ids if id not in known]:
            raise GraphError(f"its body has {op}, which reads t{missing[0]} before an operation makes it")
        if op.op_type == FUSED:
            raise GraphError(f"its body has another {FUSED}: {op}")
        if found := faults(op, [known[id] for id in op.input_ids]):
            raise GraphError(f"its body has {op}, which is not valid: {found[0]}")
        if twice := [id for id in op.output_ids if id in known]:
            raise GraphError(f"its body has {op}, which makes t{twice[0]} a second time")
        known.update(zip(op.output_ids, op.outputs, strict=True))
    return body[-1].outputs


_add_own(
    FUSED,
    [Parameter("tensors", "List[Tensor]"), Parameter("name", "str"), Parameter("body", "List[Operation]")],
    _fused,
    draws=lambda op: not all(repeatable(part) for part in body_of(op)),
)
