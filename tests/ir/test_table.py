"""Types and shapes that are inferred against what torch computes, and with dynamic dimensions against static ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakequant import ir
from fakequant.errors import GraphError
from fakequant.ir import IRType, TensorShape, TensorType
from fakequant.ir.table import ROWS, bound, find_row, infer, make_op

F32 = IRType.Float32


def typed(*dims, type=F32):
    return TensorType(type, TensorShape(dims))


IMAGE, LINE, VOLUME = typed(2, 6, 9, 8), typed(2, 6, 9), typed(2, 6, 9, 8, 7)
X, INTS, BOOLS = typed(4, 6), typed(4, 6, type=IRType.Int64), typed(4, 6, type=IRType.Boolean)
STATS = [typed(6)] * 4
NORM = {"training": False, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
CELL = [typed(4, 6), typed(4, 5), typed(4, 5), typed(20, 6), typed(20, 5), typed(20), typed(20)]
UNARY = ("ReLU", "Neg", "Abs", "Round", "Floor", "Clone", "Detach", "GELU", "SiLU", "LeakyReLU", "ELU")
UNARY += ("HardSwish", "HardSigmoid", "HardTanh")
COMPARISONS = ("Equal", "Less", "Greater", "LessEqual", "GreaterEqual")
REAL = ["Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Rsqrt", "Erf", "Sin", "Cos"]
# name: inputs and attributes, several for one operation
CASES = {
    **{name: [([X], {})] for name in UNARY},
    **{name: [([X], {}), ([INTS], {}), ([typed(3, type=IRType.Half)], {})] for name in REAL},
    **{
        name: [([X, X], {}), ([X, typed(6)], {}), ([X], {"other": 2}), ([INTS, X], {}), ([INTS], {"other": 0.5}),
               ([typed(4, 1, type=IRType.Half), typed()], {})]
        for name in ("Add", "Mul", "Div")
    },
    "Sub": [([X, X], {}), ([typed(1, 6), typed(4, 1)], {}), ([X], {"other": 1, "alpha": 2})],
    "Pow": [([X], {"exponent": 2}), ([X, X], {"overload": "aten.pow.Tensor_Tensor"}), ([INTS], {"exponent": 0.5})],
    **{name: [([X, typed(6)], {}), ([INTS, X], {})] for name in ("Maximum", "Minimum")},
    **{name: [([X, X], {}), ([INTS], {"other": 1})] for name in COMPARISONS},
    "IsFinite": [([X], {})],
    "Clamp": [([X], {"min": 0.0}), ([INTS], {"max": 0.5}), ([INTS], {"min": 0, "max": 3})],
    "Where": [([BOOLS, X, typed(6)], {}), ([BOOLS, X], {"other": 0.0}), ([BOOLS, X], {"self": 1.0})],
    "MaskedFill": [([X, BOOLS], {"value": float("-inf")}), ([X, typed(6, type=IRType.Boolean)], {"value": 0})],
    "Cast": [([X], {"dtype": torch.float16}), ([INTS], {"dtype": torch.bool})],
    **{name: [([X], {"dim": -1}), ([X], {"dim": 0, "dtype": torch.float64})] for name in ("Softmax", "LogSoftmax")},
    "Dropout": [([X], {"p": 0.5, "train": False})],
    "MatMul": [([X, typed(6, 3)], {}), ([typed(6), typed(6)], {}), ([typed(6), typed(6, 2)], {}), ([X, typed(6)], {}),
               ([typed(2, 1, 4, 6), typed(3, 6, 5)], {})],
    "Linear": [([X, typed(5, 6)], {}), ([typed(2, 3, 6), typed(5, 6), typed(5)], {}), ([typed(6), typed(5, 6)], {})],
    "Conv1d": [([LINE, typed(4, 6, 3), typed(4)], {"padding": [1]}), ([LINE, typed(4, 6, 2)], {"padding": "same"})],
    "Conv2d": [([IMAGE, typed(4, 3, 3, 2)], {"groups": 2, "stride": [2, 1], "dilation": [2, 2], "padding": [1, 0]}),
               ([typed(6, 9, 8), typed(4, 6, 3, 3), typed(4)], {}), ([IMAGE, typed(4, 6, 3, 3)], {"padding": "valid"})],
    "Conv3d": [([VOLUME, typed(4, 6, 3, 3, 3)], {"stride": [2, 2, 2]})],
    "ConvTranspose1d": [([LINE, typed(6, 4, 3)], {"stride": [2], "output_padding": [1]})],
    "ConvTranspose2d": [([IMAGE, typed(6, 2, 2, 2), typed(4)], {"groups": 2, "stride": [2, 2], "padding": [1, 0]})],
    "ConvTranspose3d": [([VOLUME, typed(6, 4, 2, 2, 2)], {"dilation": [2, 1, 1]})],
    "MaxPool1d": [([LINE], {"kernel_size": [2]})],
    "MaxPool2d": [([IMAGE], {"kernel_size": [2, 2]}),
                  ([IMAGE], {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "ceil_mode": True})],
    "MaxPool3d": [([VOLUME], {"kernel_size": [2, 2, 2]})],
    "AvgPool1d": [([LINE], {"kernel_size": [3], "stride": [2], "padding": [1]})],
    "AvgPool2d": [([IMAGE], {"kernel_size": [2, 2], "ceil_mode": True})],
    "AvgPool3d": [([VOLUME], {"kernel_size": [2, 2, 2]})],
    **{f"AdaptiveAvgPool{n}d": [([(LINE, IMAGE, VOLUME)[n - 1]], {"output_size": [3] * n})] for n in (1, 2, 3)},
    "Attention": [([typed(2, 3, 5, 4), typed(2, 3, 7, 4), typed(2, 3, 7, 6)], {})],
    "Embedding": [([X, typed(2, 3, type=IRType.Int64)], {})],
    "LSTMCell": [(CELL, {"hx": [ir.Ref(1), ir.Ref(2)]})],
    "GRUCell": [([typed(4, 6), typed(4, 5), typed(15, 6), typed(15, 5)], {})],
    "RNNTanhCell": [([typed(4, 6), typed(4, 5), typed(5, 6), typed(5, 5)], {})],
    "RNNReLUCell": [([typed(4, 6), typed(4, 5), typed(5, 6), typed(5, 5)], {})],
    "BatchNorm": [([IMAGE, *STATS], NORM), ([X, *STATS[2:]], NORM | {"weight": None, "bias": None})],
    "LayerNorm": [([X, typed(6), typed(6)], {"normalized_shape": [6]}), ([X], {"normalized_shape": [4, 6]})],
    "GroupNorm": [([IMAGE, typed(6), typed(6)], {"num_groups": 3})],
    "Reshape": [([X], {"shape": [2, 12]}), ([X], {"shape": [3, -1]}), ([X], {"shape": [24]})],
    "Flatten": [([IMAGE], {"start_dim": 1}), ([IMAGE], {"start_dim": 1, "end_dim": 2}), ([typed()], {})],
    "Transpose": [([X], {"dim0": 0, "dim1": -1}), ([X], {"overload": "aten.t.default"})],
    "Permute": [([IMAGE], {"dims": [3, 0, -3, 2]})],
    "Concat": [([X, typed(3, 6)], {}), ([X, X], {"dim": -1})],
    "Stack": [([X, X], {"dim": -1}), ([typed(), typed()], {})],
    "Slice": [([X], {"dim": 1, "start": 1, "end": 5, "step": 2}), ([X], {"start": -3}), ([X], {"end": 2**63 - 1})],
    "Select": [([X], {"dim": 1, "index": -2})],
    "Split": [([X], {"split_sizes": [1, 3]}), ([X], {"split_size": 4, "dim": 1})],
    "Unbind": [([X], {}), ([X], {"dim": 1})],
    "Expand": [([typed(1, 6)], {"size": [4, -1]}), ([X], {"size": [2, 4, 6]})],
    "Squeeze": [([typed(1, 4, 1)], {}), ([typed(1, 4, 1)], {"dim": 2}), ([typed(1, 4, 1)], {"dim": [0, 1]})],
    "Unsqueeze": [([X], {"dim": 0}), ([X], {"dim": -1})],
    "Gather": [([X, typed(9, type=IRType.Int64)], {"dim": 1})],
    "Sum": [([X], {"dim": [1]}), ([INTS], {}), ([BOOLS], {"dim": [0], "keepdim": True}),
            ([X], {"dtype": torch.float64})],
    "Mean": [([X], {"dim": [0, 1]}), ([X], {}), ([INTS], {"dtype": torch.float32})],
    "Max": [([X], {"dim": [1]}), ([X], {"overload": "aten.max.default"})],
    "Min": [([X], {}), ([X], {"dim": [0], "keepdim": True})],
    "ChooseScale": [([X], {"spec": "int8 per_channel(0)"}), ([X], {"spec": "int8 per_block(-1:2)"})],
    "Size": [([X], {"dim": 1})],
}  # fmt: skip
# What no operator of torch computes.
WITHOUT_OPERATOR = {"FakeQuantize", "FakeQuantization", "Fused"} | {name for name in ROWS if name.startswith("Index")}
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]


def test_every_row_has_a_case():
    assert set(ROWS) - WITHOUT_OPERATOR == set(CASES)
    assert len(ROWS) >= 40


def computed(op, inputs):
    """The types of what torch computes from zeros."""
    _, call = bound(op, inputs)
    args, kwargs = call.filled([torch.zeros(t.shape, dtype=t.type.dtype) for t in inputs])
    made = call.signature.target(*args, **kwargs)
    results = made if isinstance(made, (tuple, list)) else [made]
    return [
        TensorType.of(r) if isinstance(r, torch.Tensor) else TensorType(IRType.Index, TensorShape()) for r in results
    ]


@pytest.mark.parametrize(("name", "inputs", "attributes"), ALL, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(ALL)])
def test_what_is_inferred_is_what_torch_computes(name, inputs, attributes):
    op = make_op(name, range(len(inputs)), attributes)
    assert infer(op, inputs) == computed(op, inputs)


@pytest.mark.parametrize(("name", "inputs", "attributes"), ALL, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(ALL)])
def test_a_dynamic_dimension_gives_what_the_static_one_does(name, inputs, attributes):
    """Each dimension of the first input dynamic: it is refused, or its result covers the static one."""
    static = infer(make_op(name, range(len(inputs)), attributes), inputs)
    for axis in range(len(inputs[0].shape)):
        dims = list(inputs[0].shape)
        if name == "Squeeze" and dims[axis] == 1:
            continue  # a dynamic dimension is taken for longer than 1; a run tells if it is not
        dims[axis] = -1
        given = [typed(*dims, type=inputs[0].type), *inputs[1:]]
        try:
            found = infer(make_op(name, range(len(inputs)), attributes), given)
        except GraphError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            # The parts of a dynamic dimension cannot be counted; two states or parts of a stack must be alike.
            assert "cannot tell" in refused or name in ("Stack", "LSTMCell")
            continue
        assert all(f.type is s.type and f.shape.matches(s.shape) for f, s in zip(found, static, strict=True))


TYPES = (F32, F32, IRType.Half, IRType.Int64, IRType.Boolean)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(ALL), st.data())
def test_what_is_accepted_torch_computes(case, data):
    """Whatever shapes, types and numbers come, they are refused with a reason, or torch computes what was inferred."""
    name, inputs, attributes = case
    place = data.draw(st.integers(0, len(inputs) - 1))
    dims, type = inputs[place].shape, inputs[place].type
    if data.draw(st.booleans()):
        dims = data.draw(st.lists(st.sampled_from([1, 2, 4, 6, 9]), max_size=5))
    else:
        type = data.draw(st.sampled_from(TYPES))
    numbers = [key for key, value in attributes.items() if is_number(value)]
    if numbers and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(numbers))
        attributes = attributes | {key: data.draw(st.integers(-4, 4))}
    given = [typed(*dims, type=type) if i == place else t for i, t in enumerate(inputs)]
    op = make_op(name, range(len(given)), attributes)
    try:
        found = infer(op, given)
    except GraphError:
        return
    if any(0 in t.shape for t in found):
        return  # no graph declares it
    try:
        made = computed(op, given)
    except (NotImplementedError, RuntimeError) as error:
        made = str(error)
    # Which types have a kernel depends on the device, and the sign of an exponent is a value.
    assert made == found or any(words in made for words in ("not implemented for", "negative integer powers"))


def is_number(value):
    return isinstance(value, int) and not isinstance(value, bool)


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
    with pytest.raises(GraphError, match="makes what only a run can tell"):
        infer(op, [X])
    op.output_ids, op.outputs = [1], [made]
    assert infer(op, [X]) == [made]


def test_an_operator_without_a_row_is_torchs_own():
    row = find_row("aten.logcumsumexp.default")
    assert row.rule is None
    assert infer(make_op("aten.logcumsumexp.default", [0], {"dim": 0}), [X]) == [X]


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
