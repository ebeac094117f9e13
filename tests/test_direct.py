"""The shortest way to a kernel gives the reference's bits, and leaves to the general way what it must not do."""

from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CallError
from fakequant.nn import Quantizer
from fakequant.numerics import reference
from fakequant.ops import direct, dispatch
from fakequant.ops.backend import Direct
from fakequant.ops.direct import fake_quantize_directly, fake_quantize_over
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES
from tests.support.direct_cases import assert_served_if_supported, hostile, needs_kernels
from tests.support.matrix import each_format

INT8 = fq.QuantSpec("int8")
AFFINE = fq.QuantSpec("int8", symmetric=False)
X = torch.tensor([[0.3, -1.0], [64.0, float("nan")]])


@pytest.fixture(autouse=True)
def _nothing_found_before(monkeypatch):
    monkeypatch.setattr(direct, "_found", {})


def compare(case, granularity, arithmetic, dtype, layout):
    """How many of the four comparisons of one input were served."""
    x, spec, params = hostile(case, granularity, arithmetic, dtype, layout)
    scale, zero_point, served = params.scale, params.zero_point, 0
    for leaf in (x, x.detach().requires_grad_()):
        y = fake_quantize_directly(leaf, spec, scale, zero_point)
        if y is None:
            continue
        assert_same_bits(y, reference.fake_quantize(x, params, spec), f"{spec} {dtype} {layout}")
        assert y.stride() == x.stride()
        served += 1
        if not leaf.requires_grad:
            continue
        for dy in (torch.randn_like(x), torch.ones((), dtype=dtype).expand(x.shape)):
            (dx,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
            wanted = reference.grad_input(dy, reference.passes(x, params, spec))
            assert_same_bits(dx, wanted, f"{spec} {dtype} {layout} dx")
            served += 1
    return served


@needs_kernels
@each_format
def test_bits_are_those_of_the_reference(name, dtype):
    case, served, turn = FORMATS[name], 0, list(FORMATS).index(name)
    layouts = ("contiguous", "channels_last", "transposed", "sliced", "offset")
    for granularity in GRANULARITIES.values():
        for arithmetic in case.arithmetics():
            turn += 1
            served += compare(case, granularity, arithmetic, dtype, layouts[turn % len(layouts)])
    assert_served_if_supported(served, case, dtype)


@needs_kernels
@pytest.mark.parametrize("granularity", ["tensor", "channel_0", "channel_last", "token", "block_32", "tiles"])
def test_dense_tensors_are_served(granularity):
    case = GRANULARITIES[granularity]
    assert (
        fake_quantize_directly(
            torch.ones(case.shape), fq.QuantSpec("int8", case.granularity), torch.ones(case.groups), None
        )
        is not None
    )


class Subclass(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Any, ...]] = {
    "a subclass": (X.as_subclass(Subclass), INT8, torch.tensor(0.5)),
    "integers": (torch.ones(2, dtype=torch.int64), INT8, torch.tensor(0.5)),
    "a sparse tensor": (X.to_sparse(), INT8, torch.tensor(0.5)),
    "a meta tensor": (X.to("meta"), INT8, torch.tensor(0.5)),
    "a tensor with gaps": (X[:, ::2], INT8, torch.tensor(0.5)),
    "a scale of another dtype": (X, INT8, torch.tensor(0.5, dtype=torch.float64)),
    "a scale with gaps": (X, fq.QuantSpec("int8", fq.PerChannel(0)), torch.ones(4)[::2]),
    "a scale of another shape": (X, INT8, torch.ones(2)),
    "scales in another order than groups": (
        torch.rand(3, 2).t(),
        fq.QuantSpec("int8", fq.PerChannel(0, 1)),
        torch.rand(2, 3) + 1,
    ),
    "a zero point of another shape": (X, AFFINE, torch.tensor(0.5), torch.ones(1)),
    "a zero point of a symmetric specification": (X, INT8, torch.tensor(0.5), torch.tensor(1.0)),
    "a zero point of another dtype": (X, AFFINE, torch.tensor(0.5), torch.tensor(1, dtype=torch.int64)),
    "stochastic rounding": (X, INT8.replace(rounding=fq.Rounding.STOCHASTIC), torch.tensor(0.5)),
    "the mask of another gradient": (
        X.clone().requires_grad_(),
        INT8.replace(gradient=fq.Gradient.INPUT_RANGE),
        torch.tensor(0.5),
    ),
    **{
        f"the scale {value}": (X, INT8, torch.tensor(value))
        for value in (0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"))
    },
    "no reciprocal": (X, INT8.replace(arithmetic=fq.Arithmetic.RECIPROCAL), torch.tensor(2.0**-128)),
    "the last scale": (X, fq.QuantSpec("int8", fq.PerChannel(0)), torch.tensor([1.0, 0.0])),
    **{
        f"the zero point {value}": (X, AFFINE, torch.tensor(0.5), torch.tensor(value))
        for value in (-129, 128, 0.5, float("nan"), -129.0)
    },
}


@needs_kernels
@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    x, spec, scale, *zero_point = REFUSED[why]
    for tensor in (x, x.detach().requires_grad_() if x.is_floating_point() else x):
        assert fake_quantize_directly(tensor, spec, scale, zero_point[0] if zero_point else None) is None


@needs_kernels
@pytest.mark.parametrize(
    ("spec", "scale", "zero_point"),
    [
        (INT8.replace(arithmetic=fq.Arithmetic.RECIPROCAL), 2.0**-128 + 2.0**-149, None),
        (INT8, 2.0**-149, None),
        (INT8, torch.finfo(torch.float32).max, None),
        (AFFINE, 0.5, torch.tensor(-128.0)),
        (AFFINE, 0.5, torch.tensor(127, dtype=torch.int32)),
    ],
)
def test_the_last_valid_parameters_are_served(spec, scale, zero_point):
    assert fake_quantize_directly(X, spec, torch.tensor(scale), zero_point) is not None


@needs_kernels
def test_nothing_is_served_while_something_watches():
    scale = torch.tensor(0.5)
    assert fake_quantize_directly(X, INT8, scale, None) is not None
    with torch.autograd.forward_ad.dual_level():
        assert fake_quantize_directly(X, INT8, scale, None) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(fake_quantize_directly(row, INT8, scale, None)) or row)(X)
    with torch.utils._python_dispatch.TorchDispatchMode():
        seen.append(fake_quantize_directly(X, INT8, scale, None))
    torch.compile(lambda x: seen.append(fake_quantize_directly(x, INT8, scale, None)) or x + 1, backend="eager")(X)
    assert seen == [None, None, None]


@needs_kernels
def test_function_and_module_take_it(monkeypatch):
    for backend in dispatch.backends():
        monkeypatch.setattr(backend, "fake_quantize", None)
    quantizer = Quantizer(AFFINE)
    quantizer.set_range(fq.Range(torch.tensor([[-1.0]]), torch.tensor([[1.5]])))
    for x in (X, X.clone().requires_grad_(), nn.Parameter(X)):
        assert fq.fake_quantize(x, "int8", scale=torch.tensor(0.5)).tolist()[0] == [0.5, -1.0]
        assert quantizer(x).shape == x.shape


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_numbers_go_the_direct_way(monkeypatch, dtype):
    x, computed = X.to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    one, three = torch.tensor(0.1, dtype=computed), torch.tensor(3, dtype=computed)
    for backend in dispatch.backends():
        monkeypatch.setattr(backend, "fake_quantize", None)
    for leaf in (x, x.clone().requires_grad_()):
        assert_same_bits(fq.fake_quantize(leaf, INT8, scale=0.1), fake_quantize_directly(x, INT8, one, None))
        for given in (
            {"scale": 0.1, "zero_point": 3},
            {"scale": one, "zero_point": 3},
            {"scale": 0.1, "zero_point": three},
        ):
            assert_same_bits(fq.fake_quantize(leaf, AFFINE, **given), fake_quantize_directly(x, AFFINE, one, three))
    expected = fake_quantize_directly(x, AFFINE, one, three)
    assert_same_bits(fq.fake_quantize_(x.clone(), AFFINE, scale=0.1, zero_point=3), expected)


@needs_kernels
def test_the_gradient_has_a_gradient():
    x = X.nan_to_num(100.0).double().requires_grad_()
    weight = torch.ones_like(x, requires_grad=True)
    (dx,) = torch.autograd.grad(
        fake_quantize_directly(x, INT8, torch.tensor(0.5).double(), None), x, weight, create_graph=True
    )
    (twice,) = torch.autograd.grad(dx.sum(), weight)
    assert twice.tolist() == [[1.0, 1.0], [0.0, 0.0]]


class Watching(torch.Tensor):
    """A subclass, of which the reference finds the gradient."""


@needs_kernels
@pytest.mark.parametrize("spec", ["int8", "int8 per_channel(1)"])
def test_a_mask_is_read_as_it_was_written_whatever_the_gradient_is(spec):
    x = (torch.arange(96.0) - 40).view(2, 3, 4, 4)
    spec, scale = fq.QuantSpec.parse(spec), torch.tensor(0.25)
    scale = scale.expand(spec.granularity.group_shape(x.shape)).contiguous()
    for given in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 3).contiguous().transpose(1, 3)):
        leaf = given.detach().requires_grad_()
        fake_quantize_directly(leaf, spec, scale, None).backward(torch.ones_like(x).as_subclass(Watching))
        right = reference.passes(x, fq.QParams(scale), spec)
        assert torch.equal(torch.as_tensor(leaf.grad).as_subclass(torch.Tensor), right.float())


def test_few_kinds_of_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST", 3)
    monkeypatch.setattr(dispatch, "_chosen", {})
    for n in range(2, 10):
        dispatch.choose(X, fq.QuantSpec.parse(f"int{n}"))
        dispatch.choose_for(X)
        assert len(dispatch._chosen) <= 3


@needs_kernels
def test_few_kinds_are_remembered(monkeypatch):
    monkeypatch.setattr(direct, "_MOST", 3)
    for n in range(1, 10):
        assert fake_quantize_directly(torch.ones(n), INT8, torch.tensor(1.0), None) is not None
        assert len(direct._found) <= 3


def test_without_kernels_nothing_is_served(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", (dispatch.REFERENCE,))
    assert fake_quantize_directly(X, INT8, torch.tensor(0.5), None) is None
    assert_same_bits(fq.fake_quantize(X, INT8, scale=torch.tensor(0.5))[0], torch.tensor([0.5, -1.0]))


def test_wrong_bits_would_be_seen(monkeypatch):
    case, granularity = FORMATS["int8"], GRANULARITIES["tensor"]
    right = Direct(*len(Direct._fields) * (None,))._replace(values=lambda x, scale, zero_point, form: x + 1)
    monkeypatch.setattr(direct, "_find", lambda *args: right)
    with pytest.raises(AssertionError, match="elements differ"):
        compare(case, granularity, fq.Arithmetic.DIVIDE, torch.float32, "contiguous")


# Over the input


def compare_over(case, granularity, arithmetic, dtype, layout):
    """How many ways of one input were served in place."""
    x, spec, params = hostile(case, granularity, arithmetic, dtype, layout)
    expected, served = reference.fake_quantize(x, params, spec), 0
    for _ in cases.each_way():
        over = x.clone(memory_format=torch.preserve_format)
        if fake_quantize_over(over, spec, params.scale, params.zero_point):
            served += 1
            assert_same_bits(over, expected, f"{spec} {dtype} {layout}")
    return served


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_over_the_input_are_those_of_the_reference(name, dtype):
    case, served, turn = FORMATS[name], 0, list(FORMATS).index(name)
    layouts = ("contiguous", "channels_last", "transposed")
    for granularity in GRANULARITIES.values():
        turn += 1
        arithmetics = case.arithmetics()
        served += compare_over(case, granularity, arithmetics[turn % len(arithmetics)], dtype, layouts[turn % 3])
    assert_served_if_supported(served, case, dtype)


@pytest.mark.parametrize("length", [1, 1023, 40_000])
@pytest.mark.parametrize(
    "given", [{"scale": 0.25}, {"scale": torch.tensor(0.25)}, {"amax": 3.0}, {}, {"scale": 0.25, "zero_point": 3}]
)
def test_every_way_to_give_parameters(given, length):
    spec = AFFINE if "zero_point" in given else INT8
    x = 9 * torch.randn(3, length)
    expected = fq.fake_quantize(x, spec, **given)
    assert fq.fake_quantize_(x, spec, **given) is x
    assert_same_bits(x, expected)
    part = x.t()[::2]
    wanted = fq.fake_quantize(part, "int4", scale=1.0)
    assert_same_bits(fq.fake_quantize_(part, "int4", scale=1.0), wanted)


def test_a_gradient_that_would_be_wrong_is_refused():
    x, weight = torch.randn(4), torch.randn(4, requires_grad=True)
    for given in ({"x": weight}, {"x": x, "scale": torch.tensor(0.1, requires_grad=True)}):
        with pytest.raises(CallError, match=r"has no gradient, and .* requires grad; call fake_quantize, or"):
            fq.fake_quantize_(**{"scale": 0.1, "spec": INT8} | given)
    with torch.no_grad():
        assert fq.fake_quantize_(weight, INT8, scale=0.1) is weight
    for scale in (0.1, torch.tensor(0.1)):
        y = x * weight
        fq.fake_quantize_(x, INT8, scale=scale)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_nothing_is_written_where_something_is_wrong():
    x = torch.randn(4)
    before = x.clone()
    for scale in (torch.tensor(0.0), torch.tensor(float("nan")), -1.0):
        with pytest.raises(fq.FakeQuantError):
            fq.fake_quantize_(x, INT8, scale=scale)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        fq.fake_quantize_(torch.ones(1).expand(4), INT8, scale=1.0)
    with pytest.raises(fq.FakeQuantError):
        fq.fake_quantize_([1.0], INT8)
    assert_same_bits(x, before)


@pytest.mark.parametrize("spec", ["int8 per_channel(0)", "uint8 per_channel(0) asymmetric"])
@pytest.mark.parametrize("storages", ["one", "numpy", "dlpack"])
def test_parameters_in_the_memory_of_x_are_read_before_it_is_written(spec, storages):
    x = torch.rand(8, 1000) + 0.01
    x[1, :8] = torch.arange(8.0)
    given = {"scale": x[2, :8]} | ({"zero_point": x[1, :8]} if "asymmetric" in spec else {})
    if storages != "one":  # others on the same memory, which begin within it
        other = {"numpy": lambda part: torch.from_numpy(part.numpy()), "dlpack": torch.from_dlpack}[storages]
        given = {name: other(value) for name, value in given.items()}
    expected = fq.fake_quantize(x, spec, **{name: value.clone() for name, value in given.items()})
    assert_same_bits(fq.fake_quantize_(x, spec, **given), expected)


def test_over_tensors_that_others_watch():
    x = torch.randn(3, 4)
    expected = fq.fake_quantize(x, INT8, scale=0.5)
    with torch.inference_mode():
        assert_same_bits(fq.fake_quantize_(x + 0.0, INT8, scale=torch.tensor(0.5)), expected)
    for over in (
        torch.vmap(lambda row: fq.fake_quantize_(row, INT8, scale=0.5)),
        torch.compile(lambda x: fq.fake_quantize_(x, INT8, scale=0.5), fullgraph=True),
    ):
        copied = x.clone()
        over(copied)
        assert_same_bits(copied, expected)


def test_a_view_that_holds_the_negatives_is_overwritten_too():
    x = torch.randn(5, 4)
    for view in (torch._neg_view(x.clone()), torch.complex(x, -x).conj().imag):
        expected = fq.fake_quantize(view.clone(), "int8", scale=0.01)
        fq.fake_quantize_(view, "int8", scale=0.01)
        assert_same_bits(view.clone(), expected)
