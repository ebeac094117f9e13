"""Types and shapes that are inferred against what torch computes, and with dynamic dimensions against static ones."""

import pytest
import torch

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import IRType, TensorShape, TensorType
from fakequant.ir.table import ROWS, bound, infer, make_op

F32 = IRType.Float32


def typed(*dims, type=F32):
    return TensorType(type, TensorShape(dims))


IMAGE, LINE = typed(2, 6, 9, 8), typed(2, 6, 9)
X, INTS, BOOLS = typed(4, 6), typed(4, 6, type=IRType.Int64), typed(4, 6, type=IRType.Boolean)
CELL = [typed(4, 6), typed(4, 5), typed(4, 5), typed(20, 6), typed(20, 5), typed(20), typed(20)]
NORM = {"training": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False, "weight": None, "bias": None}
# torch's meta kernels infer: a case for each way in which arguments are bound and in which sizes depend on sizes.
CASES = [
    ("ReLU", [X], {}),
    ("Sigmoid", [INTS], {}),
    ("Add", [X, typed(6)], {}),
    ("Div", [INTS], {"other": 0.5}),
    ("Sub", [typed(1, 6), typed(4, 1)], {"alpha": 2}),
    ("Pow", [X, X], {"overload": "aten.pow.Tensor_Tensor"}),
    ("Clamp", [INTS], {"max": 0.5}),
    ("Where", [BOOLS, X], {"other": 0.0}),
    ("Where", [BOOLS, X], {"self": 1.0}),
    ("Cast", [X], {"dtype": torch.float16}),
    ("Softmax", [X], {"dim": 0, "dtype": torch.float64}),
    ("MatMul", [typed(2, 1, 4, 6), typed(3, 6, 5)], {}),
    ("Linear", [typed(2, 3, 6), typed(5, 6), typed(5)], {}),
    ("Conv1d", [LINE, typed(4, 6, 2)], {"padding": "same"}),
    ("Conv2d", [IMAGE, typed(4, 3, 3, 2)], {"groups": 2, "stride": [2, 1], "dilation": [2, 2], "padding": [1, 0]}),
    ("ConvTranspose1d", [LINE, typed(6, 4, 3)], {"stride": [2], "output_padding": [1]}),
    ("MaxPool2d", [IMAGE], {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "ceil_mode": True}),
    ("AdaptiveAvgPool2d", [IMAGE], {"output_size": [3, 3]}),
    ("Attention", [typed(2, 3, 5, 4), typed(2, 3, 7, 4), typed(2, 3, 7, 6)], {}),
    ("Embedding", [X, typed(2, 3, type=IRType.Int64)], {}),
    ("LSTMCell", CELL, {"hx": [ir.Ref(1), ir.Ref(2)]}),
    ("BatchNorm", [X, typed(6), typed(6)], NORM),
    ("LayerNorm", [X, typed(6), typed(6)], {"normalized_shape": [6]}),
    ("GroupNorm", [IMAGE, typed(6), typed(6)], {"num_groups": 3}),
    ("Reshape", [X], {"shape": [3, -1]}),
    ("Flatten", [IMAGE], {"start_dim": 1, "end_dim": 2}),
    ("Transpose", [X], {"overload": "aten.t.default"}),
    ("Permute", [IMAGE], {"dims": [3, 0, -3, 2]}),
    ("Concat", [X, X], {"dim": -1}),
    ("Stack", [X, X], {"dim": -1}),
    ("Slice", [X], {"dim": 1, "start": 1, "end": 5, "step": 2}),
    ("Slice", [X], {"end": 2**63 - 1}),
    ("Split", [X], {"split_size": 4, "dim": 1}),
    ("Unbind", [X], {}),
    ("Expand", [typed(1, 6)], {"size": [4, -1]}),
    ("Squeeze", [typed(1, 4, 1)], {"dim": [0, 1]}),
    ("Unsqueeze", [X], {"dim": -1}),
    ("Gather", [X, typed(9, type=IRType.Int64)], {"dim": 1}),
    ("Sum", [BOOLS], {"dim": [0], "keepdim": True}),
    ("Max", [X], {"dim": [1]}),
    ("Max", [X], {"overload": "aten.max.default"}),
    ("ChooseScale", [X], {"spec": "int8 per_block(-1:2)"}),
    ("Size", [X], {"dim": 1}),
    ("aten.logcumsumexp.default", [X], {"dim": 0}),
]


def computed(op, inputs):
    """The types of what torch computes from zeros."""
    _, call = bound(op, inputs)
    args, kwargs = call.filled([torch.zeros(t.shape, dtype=t.type.dtype) for t in inputs])
    made = call.signature.target(*args, **kwargs)
    results = made if isinstance(made, (tuple, list)) else [made]
    return [
        TensorType.of(r) if isinstance(r, torch.Tensor) else TensorType(IRType.Index, TensorShape()) for r in results
    ]


@pytest.mark.parametrize(("name", "inputs", "attributes"), CASES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CASES)])
def test_what_is_inferred_is_what_torch_computes_and_dynamic_dimensions_cover_it(name, inputs, attributes):
    op = make_op(name, range(len(inputs)), attributes)
    static = infer(op, inputs)
    assert static == computed(op, inputs)
    for axis, length in enumerate(inputs[0].shape):
        if name == "Squeeze" and length == 1:
            continue  # a dynamic dimension is taken for longer than 1; a run tells if it is not
        dims = [-1 if place == axis else size for place, size in enumerate(inputs[0].shape)]
        try:
            found = infer(op, [typed(*dims, type=inputs[0].type), *inputs[1:]])
        except GraphError as error:
            # The parts of a dynamic dimension cannot be counted; two states or parts of a stack must be alike.
            assert "cannot tell" in str(error) or name in ("Stack", "LSTMCell")  # noqa: PT017 - it may pass
        else:
            assert all(f.type is s.type and f.shape.matches(s.shape) for f, s in zip(found, static, strict=True))


SIZE = TensorType(IRType.Index, TensorShape())


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "found"),
    [
        # A slice of a dynamic dimension may be shorter than it is for long ones.
        ("Slice", [typed(-1, 6)], {"end": 5}, typed(-1, 6)),
        ("Slice", [typed(-1, 6)], {"start": -3}, typed(-1, 6)),
        ("Reshape", [typed(-1, 6)], {"shape": [-1, 2, 3]}, typed(-1, 2, 3)),
        ("Flatten", [typed(-1, 6, 2)], {"start_dim": 1}, typed(-1, 12)),
        ("Squeeze", [typed(-1, 1, 6)], {}, typed(-1, 6)),
        ("Conv2d", [typed(-1, 3, -1, -1), typed(4, 3, 7, 7)], {"stride": [2, 2]}, typed(-1, 4, -1, -1)),
        # Only one length fits, or lengths that differ.
        ("Linear", [typed(-1, -1), typed(5, 6)], {}, typed(-1, -1)),
        ("Conv2d", [typed(-1, -1, -1, -1), typed(4, 3, 7, 7)], {}, typed(-1, -1, -1, -1)),
        ("LayerNorm", [typed(-1, -1)], {"normalized_shape": [4, 6]}, typed(-1, -1)),
        ("Reshape", [typed(-1, 2, 2)], {"shape": [24]}, typed(-1)),
        # Sizes: nothing tells that the second is four times the dynamic dimension.
        ("Reshape", [typed(8, -1, 32), SIZE], {"shape": [8, ir.Ref(1), 8]}, typed(-1, -1, -1)),
        ("Reshape", [typed(-1, 6), SIZE], {"shape": [ir.Ref(1), -1]}, typed(-1, -1)),
        ("Reshape", [typed(-1, 6), SIZE, SIZE], {"shape": [ir.Ref(1), ir.Ref(2), 6]}, typed(-1, -1, -1)),
        ("Expand", [typed(1, 6), SIZE], {"size": [ir.Ref(1), 6]}, typed(-1, -1)),
        ("Add", [X, SIZE], {}, typed(-1, -1)),
        ("aten.arange.default", [SIZE], {"end": ir.Ref(0)}, typed(-1, type=IRType.Int64)),
    ],
)  # fmt: skip
def test_what_dynamic_dimensions_and_sizes_give(name, inputs, attributes, found):
    assert infer(make_op(name, range(len(inputs)), attributes), inputs) == [found]


def test_the_default_type_counts():
    op = make_op("Sqrt", [0])
    assert infer(op, [INTS]) == [X]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert infer(op, [INTS]) == [typed(4, 6, type=IRType.Float64)]
    finally:
        torch.set_default_dtype(before)


def test_what_only_a_run_tells_is_declared():
    made = typed(-1, 2, type=IRType.Int64)
    op = make_op("aten.nonzero.default", [0])
    with pytest.raises(GraphError, match="only a run can tell"):
        infer(op, [X])
    op.output_ids, op.outputs = [1], [made]
    assert infer(op, [X]) == [made]


def test_each_overload_is_captured_as_its_row():
    seen = {}
    for row in ROWS.values():
        for signature in row.signatures:
            if signature.target is not None:
                assert seen.setdefault(signature.target, row.name) == row.name


def test_what_does_not_fit_is_raised_and_not_logged(capfd, caplog):
    with pytest.raises(GraphError, match="torch refuses it"):
        infer(make_op("aten.scatter_add.default", [0, 1, 2], {"dim": 0}), [X, typed(3, type=IRType.Int64), X])
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
