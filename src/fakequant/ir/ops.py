"""The rows of the table of operations; importing this module fills the table.

Of operators of torch a row is the name alone: their meta kernels know types, shapes and most restrictions. A check
refuses the others, which only torch's kernels have, and mixtures of types that no engine computes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fakequant.errors import FakeQuantError, GraphError
from fakequant.ir.fake_quantization import (
    FakeQuantizationOp,
    FakeQuantize,
    group_shape,
    parameter_faults,
    plain_quantizer,
)
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
from fakequant.numerics.qparams import compute_dtype
from fakequant.numerics.spec import QuantSpec, Rounding

RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")
"""Beginnings of the names of whole recurrent layers, which only eager torch runs."""


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
    """Parameters have the input's type, or all are Float32 where that is a half."""
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
    """Add rows, separated by commas: the name in graphs, then the operators of torch that compute it.

    Where the arguments fit several operators, the first computes. Those without a namespace are of aten.
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
    """Add a row that no operator of torch computes."""
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
    """The type of the scales [groups, axes kept] of x."""
    x = call.type("x")
    if not x.type.floating:
        raise GraphError(f"quantizes floating-point numbers, got {x}")
    try:
        return TensorType(IRType.of(compute_dtype(x.type.dtype)), group_shape(_spec_of(call), x.shape))
    except FakeQuantError as error:
        raise GraphError(str(error)) from error


def _fake_quantize(call: Call) -> list[TensorType]:
    """x of any shape; scale and zero point [groups, axes kept]."""
    spec, expected = _spec_of(call), _scale_type(call)
    if call.has("scale"):
        scale = call.type("scale")
        if scale.type is not expected.type or not expected.shape.matches(scale.shape):
            raise GraphError(f"{spec} on {call.type('x')} takes a scale of {expected}, got {scale}")
    if call.has("zero_point"):
        zero_point = call.type("zero_point")
        if spec.symmetric or not call.has("scale"):
            raise GraphError(
                f"has a zero point, which belongs to a given scale and symmetric=False, but {spec} has none"
            )
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
    """One operation that is a chain of others; its last result is the only one.

    Args:
        ops: in their order; every result but the last is read within the chain only.
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
    """The operations of a fused one, whose values are t0, t1, ...: its inputs first. Copy them before a change.

    Raises:
        GraphError: its attribute is no list of operations.
    """
    body = op.attributes.get("body")
    if not isinstance(body, (list, tuple)) or not body or not all(isinstance(part, IROp) for part in body):
        raise GraphError(f"takes a list of operations as its body, got {body!r}")
    return list(body)


def _fused(call: Call) -> list[TensorType]:
    """The types of the last operation; all are checked like those of a graph."""
    known = dict(enumerate(call.inputs))
    body = body_of(call.op)
    for op in body:
        if missing := [id for id in op.input_ids if id not in known]:
            raise GraphError(f"in its body {op} reads t{missing[0]}, which nothing makes before")
        if op.op_type == FUSED:
            raise GraphError(f"in its body is another {FUSED}: {op}")
        if found := faults(op, [known[id] for id in op.input_ids]):
            raise GraphError(f"in its body {op}: {found[0]}")
        if twice := [id for id in op.output_ids if id in known]:
            raise GraphError(f"in its body {op} makes t{twice[0]}, which is there already")
        known.update(zip(op.output_ids, op.outputs, strict=True))
    return body[-1].outputs


_add_own(
    FUSED,
    [Parameter("tensors", "List[Tensor]"), Parameter("name", "str"), Parameter("body", "List[Operation]")],
    _fused,
    draws=lambda op: not all(repeatable(part) for part in body_of(op)),
)
