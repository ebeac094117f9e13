"""Plans: the bits of the reference for every kind of call, and which parameters kernels check."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CallError
from fakequant.numerics import reference
from fakequant.ops import dispatch
from fakequant.ops.backend import RELU, KernelPlan
from fakequant.ops.dispatch import find_plan
from fakequant.ops.library import fake_quantize_over
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES
from tests.support.interruption import PACKAGE
from tests.support.matrix import each_format, each_format_once
from tests.support.plan_cases import assert_served_if_supported, by_plan, checked, hostile, needs_kernels

INT8 = fq.QuantSpec("int8")
AFFINE = fq.QuantSpec("int8", symmetric=False)
X = torch.tensor([[0.3, -1.0], [64.0, float("nan")]])


@pytest.fixture(autouse=True)
def _nothing_found_before(monkeypatch):
    monkeypatch.setattr(dispatch, "_known", {})


def compare(case, granularity, arithmetic, dtype, layout):
    """The backends that served one input."""
    x, spec, params = hostile(case, granularity, arithmetic, dtype, layout)
    scale, zero_point, label = params.scale, params.zero_point, f"{spec} {dtype} {layout}"
    for leaf in (x, x.detach().requires_grad_()):
        y = by_plan(leaf, spec, scale, zero_point)
        assert_same_bits(y, reference.fake_quantize(x, params, spec), label)
        if layout != "sliced":
            assert y.stride() == x.stride(), label
        if not leaf.requires_grad:
            continue
        for dy in (torch.randn_like(x), torch.ones((), dtype=dtype).expand(x.shape)):
            (dx,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
            wanted = reference.grad_input(dy, reference.passes(x, params, spec))
            assert_same_bits(dx, wanted, f"{label} dx")
            assert dx.stride() == y.stride() or spec.gradient is fq.Gradient.IDENTITY, label
    return find_plan(x, spec, scale, zero_point).backend


@needs_kernels
@each_format
def test_bits_are_those_of_the_reference(name, dtype):
    case, served, turn = FORMATS[name], set(), list(FORMATS).index(name)
    layouts = ("contiguous", "channels_last", "transposed", "sliced", "offset")
    for granularity in GRANULARITIES.values():
        for arithmetic in case.arithmetics():
            turn += 1
            served.add(compare(case, granularity, arithmetic, dtype, layouts[turn % len(layouts)]))
    assert_served_if_supported(served, case, dtype)


@needs_kernels
@pytest.mark.parametrize("granularity", ["tensor", "channel_0", "channel_last", "token", "block_32", "tiles"])
def test_kernels_check_the_parameters_of_dense_tensors(granularity):
    case = GRANULARITIES[granularity]
    x, spec, scale = torch.ones(case.shape), fq.QuantSpec("int8", case.granularity), torch.ones(case.groups)
    assert checked(x, spec, scale) is not None


class Subclass(torch.Tensor):
    pass


UNCHECKED: dict[str, tuple[Any, ...]] = {
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
@pytest.mark.parametrize("why", UNCHECKED)
def test_unchecked_or_not_valid(why):
    x, spec, scale, *zero_point = UNCHECKED[why]
    for tensor in (x, x.detach().requires_grad_() if x.is_floating_point() else x):
        assert checked(tensor, spec, scale, zero_point[0] if zero_point else None) is None


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
    assert checked(X, spec, torch.tensor(scale), zero_point) is not None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("gradient", fq.Gradient, ids=lambda g: g.value)
def test_a_scale_of_one_number_fits_every_rank(shape, gradient):
    """As the range of a quantizer that was calibrated on tensors of another rank."""
    spec, given = AFFINE.replace(gradient=gradient), (torch.tensor(0.5), torch.tensor(3, dtype=torch.int32))
    for x in (torch.tensor(0.3), X[0], X):
        right = by_plan(x, spec, *given)
        for kind in (torch.Tensor.detach, lambda t: t.clone().requires_grad_()):
            scale, zero_point = (t.reshape(shape) for t in given)
            leaf, learned = kind(x), scale.clone().requires_grad_()
            assert_same_bits(fq.fake_quantize(leaf, spec, scale=scale, zero_point=zero_point), right)
            y = fq.fake_quantize(leaf, spec, scale=learned, zero_point=zero_point)
            assert_same_bits(y, right)
            (of_scale,) = torch.autograd.grad(y.sum(), learned)
            assert of_scale.shape == shape
            compiled = torch.vmap(lambda t, s=scale, z=zero_point: fq.fake_quantize(t, spec, scale=s, zero_point=z))
            assert_same_bits(compiled(leaf[None])[0], right)


def test_there_is_no_plan_while_something_watches():
    scale = torch.tensor(0.5)
    assert by_plan(X, INT8, scale) is not None
    with torch.autograd.forward_ad.dual_level():
        assert by_plan(X, INT8, scale) is not None
        assert by_plan(torch.autograd.forward_ad.make_dual(X, X), INT8, scale) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(by_plan(row, INT8, scale)) or row)(X)
    with torch.utils._python_dispatch.TorchDispatchMode():
        seen.append(by_plan(X, INT8, scale))
    torch.compile(lambda x: seen.append(by_plan(x, INT8, scale)) or x + 1, backend="eager")(X)
    assert seen == [None, None, None]


def counted_frames(monkeypatch, operator, call):
    """The functions of the package on the stack when an operator of the kernels is called."""
    depths = []

    def record(*given):
        frame, names = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        depths.append(names)
        return operator(*given)

    monkeypatch.setattr(dispatch, "_known", {})
    with monkeypatch.context() as patched:
        name = operator.name().split("::")[1]
        patched.setattr(getattr(torch.ops.fakequant_cpu, name), "default", record)
        call()
    monkeypatch.setattr(dispatch, "_known", {})
    assert depths, "the kernel was not called"
    return max(depths, key=len)


@needs_kernels
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("gradient", ["code_range", "identity", "input_range"])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_kernel_is_few_functions_away(monkeypatch, gradient, learned, wanted):
    ops = torch.ops.fakequant_cpu
    layer = fq.prepare(nn.Sequential(nn.Linear(8, 4)), "INT8")
    fq.calibrate(layer, [torch.randn(3, 8)], progress=False)
    x, scale = torch.randn(3, 8, requires_grad=wanted), torch.tensor(0.5, requires_grad=learned)
    spec = INT8.replace(gradient=fq.Gradient(gradient))
    with_mask = ops.fake_quantize if gradient == "input_range" else ops.checked_with_mask
    operator = with_mask if wanted and gradient != "identity" else ops.checked
    names = counted_frames(monkeypatch, operator.default, lambda: fq.fake_quantize(x, spec, scale=scale))
    assert len(names) <= 6, names
    operator = ops.checked_with_mask if wanted else ops.checked
    with torch.set_grad_enabled(wanted):
        names = counted_frames(monkeypatch, operator.default, lambda: layer(x))
    assert len(names) <= 10, names


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_parameters_that_are_numbers_are_checked_by_kernels(monkeypatch, dtype):
    x, computed = X.to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    one, three = torch.tensor(0.1, dtype=computed), torch.tensor(3, dtype=computed)
    monkeypatch.setattr("fakequant.functional._resolve", None)
    for leaf in (x, x.clone().requires_grad_()):
        assert_same_bits(fq.fake_quantize(leaf, INT8, scale=0.1), by_plan(x, INT8, one))
        for given in (
            {"scale": 0.1, "zero_point": 3},
            {"scale": one, "zero_point": 3},
            {"scale": 0.1, "zero_point": three},
        ):
            assert_same_bits(fq.fake_quantize(leaf, AFFINE, **given), by_plan(x, AFFINE, one, three))
    expected = by_plan(x, AFFINE, one, three)
    assert_same_bits(fq.fake_quantize_(x.clone(), AFFINE, scale=0.1, zero_point=3), expected)


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
        by_plan(leaf, spec, scale).backward(torch.ones_like(x).as_subclass(Watching))
        right = reference.passes(x, fq.QParams(scale), spec)
        assert torch.equal(torch.as_tensor(leaf.grad).as_subclass(torch.Tensor), right.float())


def test_few_kinds_are_remembered(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST", 3)
    for n in range(2, 10):
        dispatch.choose(X, fq.QuantSpec.parse(f"int{n}"))
        dispatch.choose_for(X)
        assert by_plan(torch.ones(n), INT8, torch.tensor(1.0)) is not None
        assert len(dispatch._known) <= 3


def test_without_kernels_the_reference_serves(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", (dispatch.REFERENCE,))
    assert checked(X, INT8, torch.tensor(0.5)) is None
    assert_same_bits(fq.fake_quantize(X, INT8, scale=torch.tensor(0.5))[0], torch.tensor([0.5, -1.0]))
    assert find_plan(X, INT8, torch.tensor(0.5), variant=RELU) is None


def test_wrong_bits_would_be_seen(monkeypatch):
    case, granularity = FORMATS["int8"], GRANULARITIES["tensor"]
    right = dispatch._made_plan
    wrong = lambda key, x: right(key, x)._replace(values=lambda x, *_: x + 1)  # noqa: E731
    monkeypatch.setattr(dispatch, "_made_plan", wrong)
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
@each_format_once
def test_bits_over_the_input_are_those_of_the_reference(name, dtype):
    case, over, turn = FORMATS[name], 0, list(FORMATS).index(name)
    layouts = ("contiguous", "channels_last", "transposed")
    for granularity in GRANULARITIES.values():
        turn += 1
        arithmetics = case.arithmetics()
        over += compare_over(case, granularity, arithmetics[turn % len(arithmetics)], dtype, layouts[turn % 3])
    assert_served_if_supported({"cpu" if over else "reference"}, case, dtype)


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


@needs_kernels
def test_a_subclass_of_a_gradient_is_not_given_to_kernels():
    def gradient(dy):
        return torch.autograd.grad(fq.fake_quantize(x, "int8", scale=0.1), x, dy)[0]

    def no_numbers(dy, mask):
        if dy.is_floating_point():
            pytest.fail("by a kernel")
        return found.grad_input(dy, mask)  # which unpacks the mask

    x = (9 * torch.randn(4, 6)).requires_grad_()
    right = gradient(torch.ones(4, 6))
    ((key, found),) = ((k, v) for k, v in dispatch._known.items() if isinstance(v, KernelPlan))
    dispatch._known[key] = found._replace(grad_input=no_numbers)
    assert_same_bits(torch.Tensor(gradient(torch.ones(4, 6).as_subclass(Subclass))), right)
    with pytest.raises(pytest.fail.Exception, match="by a kernel"):
        gradient(torch.ones(4, 6))
