"""Learned parameters by one operator for each direction: the reference's bits, and what autograd promises."""

import pytest
import torch
import torch.nn.utils.parametrize

import fakequant as fq
from fakequant.nn import Kind, LearnedRange, Quantizer
from fakequant.nn.ranges import LSQ
from fakequant.numerics import reference
from fakequant.ops import dispatch
from fakequant.ops.cpu.backend import load_kernels
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, hostile_gradient
from tests.support.matrix import each_format_once, full, in_turn, sweep
from tests.support.plan_cases import assert_served_if_supported, by_plan, checked

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason=f"no backend offers it: {load_kernels()}")
INT8 = fq.QuantSpec("int8")
AFFINE = fq.QuantSpec("int8", symmetric=False)


def learned(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def compare(case, granularity, arithmetic, dtype, layout):
    """The backends that served one input."""
    numbers = cases.hostile(case, granularity, arithmetic, dtype)
    spec, (scale, zero_point, *_) = case.spec(granularity.granularity, arithmetic), numbers.params
    x, served = LAYOUTS[layout](numbers.x), set()
    by_hand = zero_point is not None and zero_point.dtype == scale.dtype
    params, label = fq.QParams(scale, zero_point), f"{spec} {dtype} {layout}"
    for shape in spec.granularity.scale_shapes(x.shape):
        leaves = [x.detach().requires_grad_(), scale.detach().reshape(shape).requires_grad_()]
        given = zero_point if zero_point is None else zero_point.detach().reshape(shape).requires_grad_(by_hand)
        leaves += [given] if by_hand else []
        y = by_plan(leaves[0], spec, leaves[1], given)
        assert_same_bits(y, reference.fake_quantize(x, params, spec), label)
        for dy in (hostile_gradient(x).to(dtype), torch.ones((), dtype=dtype).expand(x.shape)):
            for of in ({0, 1, 2}, {0}, {1}, {1, 2}):
                wanted = [i for i in range(len(leaves)) if i in of]
                found = torch.autograd.grad(y, [leaves[i] for i in wanted], dy, retain_graph=True)
                right = [
                    reference.grad_input(dy, reference.passes(x, params, spec)),
                    *reference.grad_params(dy, x, params, spec, (True, True)),
                ]
                for i, gradient in zip(wanted, found, strict=True):
                    assert_same_bits(gradient, right[i].reshape(leaves[i].shape), f"{label} gradient {i}")
        served.add(dispatch.find_plan(leaves[0], spec, leaves[1], given).backend)
    return served


@each_format_once
def test_bits_are_those_of_the_reference(name, dtype):
    case, served, turn = FORMATS[name], set(), list(FORMATS).index(name)
    layouts = ("contiguous", "channels_last", "transposed", "sliced", "offset")
    for granularity in GRANULARITIES.values():
        turn += 1
        arithmetics = case.arithmetics()
        arithmetic = arithmetics[turn % len(arithmetics)]
        served |= compare(case, granularity, arithmetic, dtype, layouts[turn % len(layouts)])
    assert_served_if_supported(served, case, dtype)


def test_function_and_module_take_it(monkeypatch):
    monkeypatch.setattr("fakequant.functional._resolve", None)
    x = torch.tensor([0.3, 9.0])
    for leaf in (x, x.clone().requires_grad_()):
        scale, zero_point = learned(0.5), learned(-126.0)
        fq.fake_quantize(leaf, INT8, scale=scale).backward(torch.ones(2))
        fq.fake_quantize(leaf, AFFINE, scale=scale, zero_point=zero_point).backward(torch.ones(2))
        assert scale.grad is not None
        assert zero_point.grad is not None
        assert (leaf.grad is None) == (not leaf.requires_grad)
    quantizer = Quantizer(INT8)
    quantizer.set_range(fq.Range(torch.tensor([-1.27]), torch.tensor([1.27])))
    quantizer.learn("lsq")
    quantizer(x).backward(torch.ones(2))
    assert all(parameter.grad is not None for parameter in quantizer.parameters())


@pytest.mark.parametrize(
    ("x", "spec", "given"),
    [
        (torch.ones(2), INT8, (0.0,)),
        (torch.ones(2), INT8, (float("nan"),)),
        (torch.ones(2), AFFINE, (0.5, 0.5)),
        (torch.ones(2), AFFINE, (0.5, 128.0)),
        (torch.ones(0), INT8, (0.5,)),
        *((torch.ones(2), INT8.replace(gradient=one), (0.5,)) for one in (fq.Gradient.INPUT_RANGE, fq.Gradient.CLIP)),
    ],
    ids=str,
)
def test_refused(x, spec, given):
    scale, zero_point = (*(learned(value) for value in given), None)[:2]
    for leaf in (x, x.clone().requires_grad_()):
        assert checked(leaf, spec, scale, zero_point) is None


def both_ways(monkeypatch, found):
    """What `found()` returns with kernels, and by the reference."""
    first = found()
    monkeypatch.setattr(dispatch, "_backends", (dispatch.REFERENCE,))
    return first, found()


@pytest.mark.parametrize("shape", [(5,), (1, 5, 1)], ids=str)
@pytest.mark.parametrize("order", ["first", "second", "batched"])
def test_gradients_of_gradients_are_those_of_the_general_way(monkeypatch, order, shape):
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    scale = torch.linspace(0.005, 0.02, 5, dtype=torch.float64).reshape(shape).requires_grad_()
    zero_point = torch.full(shape, 3.0, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(3, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    leaves, spec = (x, scale, zero_point), fq.QuantSpec("int8", fq.PerChannel(1), symmetric=False)

    def found():
        y = fq.fake_quantize(x, spec, scale=scale, zero_point=zero_point)
        if order == "batched":
            return torch.autograd.grad(y, leaves, dy, is_grads_batched=True)
        first = torch.autograd.grad(y, leaves, dy[0], create_graph=order == "second")
        if order == "first":
            return first
        return torch.autograd.grad([one.pow(2).sum() for one in first], (*leaves, dy))

    for one, other in zip(*both_ways(monkeypatch, found), strict=True):
        assert_same_bits(one, other)


def test_a_gradient_twice_through_hooks():
    x, scale, seen = torch.randn(8, requires_grad=True), learned(0.05), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t.clone()):
        y = fq.fake_quantize(x, INT8, scale=scale)
    assert seen == [torch.Size([1]), x.shape, scale.shape]
    scale.register_hook(lambda gradient: gradient * 2)
    y.sum().backward(retain_graph=True)
    once = scale.grad.clone()
    wanted, _ = reference.grad_params(torch.ones(8), x, fq.QParams(scale.detach().view(1)), INT8, (True, False))
    assert_same_bits(once, 2 * wanted.view(()))
    y.sum().backward()
    assert_same_bits(scale.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.parametrize("which", ["x", "scale"])
def test_a_tensor_changed_before_the_backward_pass_is_refused(which):
    leaves = {"x": torch.randn(8, requires_grad=True), "scale": learned(0.05)}
    y = fq.fake_quantize(leaves["x"], INT8, scale=leaves["scale"])
    with torch.no_grad():
        leaves[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_without_gradients_nothing_is_recorded():
    x, scale = torch.randn(8, requires_grad=True), learned(0.05)
    wanted = reference.fake_quantize(x.detach(), fq.QParams(scale.detach().view(1)), INT8)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            y = fq.fake_quantize(x, INT8, scale=scale)
        assert not y.requires_grad
        assert_same_bits(y, wanted)


def test_autocast_leaves_dtypes():
    x, scale = torch.randn(8, requires_grad=True), learned(0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fq.fake_quantize(x, INT8, scale=scale)
    assert [t.dtype for t in (y, *torch.autograd.grad(y.sum(), (x, scale)))] == 3 * [torch.float32]


# A quantizer that learns its step


def quantizer_of(spec, method="lsq", kind=Kind.INPUT, **options):
    """A quantizer whose range is half of that of the tensors below."""
    quantizer = Quantizer(spec, kind=kind)
    x = torch.linspace(-1, 1.5, 6 * 8).view(6, 8)
    quantizer.set_qparams(fq.choose_qparams(x * 0.5, spec))
    quantizer.learn(method, **options)
    return quantizer


def generally(monkeypatch):
    monkeypatch.setattr(LSQ, "fake_quantize_in_one_call", LearnedRange.fake_quantize_in_one_call)


STEPS = [1.0, -1.0, 0.0, 1e-40, 2.0**-126, float("inf"), -float("inf"), float("nan")]


TEXTS = ["int8 {}", "int4 {} asymmetric", "float8_e4m3fn {} reciprocal", "int8 {} multiplier"]
WHERE = ["per_tensor", "per_channel(0)", "per_channel(1)", "per_token", "per_block(-1:4)"]


@sweep("format, where, dtype", full(TEXTS, WHERE, DTYPES), in_turn(full(TEXTS, WHERE), list(DTYPES)), dtype=DTYPES)
def test_a_learned_step_has_the_bits_of_the_general_way(monkeypatch, format, where, dtype):
    spec, x = fq.QuantSpec.parse(format.format(where)), torch.randn(6, 8).to(dtype)
    x[2, 3], dy = float("nan"), hostile_gradient(x).to(dtype)

    def found(quantizer, times):
        leaf, (step, *_) = x.clone().requires_grad_(), quantizer.parameters()
        with torch.no_grad():
            step.view(-1)[-1] *= times
        y = quantizer(leaf)
        quantizer.requires_grad_(False)
        frozen = quantizer(leaf)
        quantizer.requires_grad_()
        with torch.no_grad():
            return [y, *torch.autograd.grad(y, (leaf, step), dy), *torch.autograd.grad(frozen, leaf, dy), quantizer(x)]

    methods = [("lsq", True), ("lsq", False), ("lsq_plus", True)]
    cases = [(*method, kind, times) for method in methods for kind in Kind for times in STEPS]

    def each():
        return [found(quantizer_of(spec, m, kind, gradient_factor=f), times) for m, f, kind, times in cases]

    first = each()
    generally(monkeypatch)
    for case, one, other in zip(cases, first, each(), strict=True):
        for i, (actual, expected) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(actual, expected, f"{case} {i}")


@pytest.mark.parametrize("order", ["second", "batched", "of another stride"])
def test_gradients_of_a_step_where_something_watches(monkeypatch, order):
    x = torch.randn(6, 8, requires_grad=True)
    dy = torch.randn(3, 6, 8, requires_grad=True)

    def found():
        quantizer = quantizer_of("int8")
        leaves = (x, *quantizer.parameters())
        if order == "batched":
            return torch.autograd.grad(quantizer(x), leaves, dy, is_grads_batched=True)
        if order == "of another stride":
            return torch.autograd.grad(quantizer(x).sum(), leaves)
        first = torch.autograd.grad(quantizer(x), leaves, dy[0], create_graph=True)
        return torch.autograd.grad([one.pow(2).sum() for one in first], (*leaves, dy))

    first = found()
    generally(monkeypatch)
    for one, other in zip(first, found(), strict=True):
        assert_same_bits(one, other)


def test_gradients_of_a_tensor_that_a_hook_lays_otherwise():
    x, dy = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.randn(2, 3, 4, 5)
    found = []
    for pack in (lambda t: t, lambda t: t.contiguous()):
        leaves = x.detach().requires_grad_(), torch.full((3,), 0.01, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = fq.fake_quantize(leaves[0], "int8 per_channel(1)", scale=leaves[1])
        found.append(torch.autograd.grad(y, leaves, dy))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def test_a_step_may_move_before_the_backward_pass():
    quantizer, x, dy = quantizer_of("int8"), torch.randn(6, 8), torch.randn(6, 8)
    (step,) = quantizer.parameters()
    (right,) = torch.autograd.grad(quantizer(x), step, dy)
    y = quantizer(x)
    with torch.no_grad():
        step.mul_(2)
    assert_same_bits(torch.autograd.grad(y, step, dy)[0], right)


def test_an_inheriting_class_finds_its_own_scale():
    class Doubled(LSQ):
        def qparams(self, elements):
            return fq.QParams(2 * super().qparams(elements).scale)

    quantizer, x = quantizer_of("int8"), torch.randn(6, 8)
    doubled = Doubled(quantizer.spec)
    doubled.start(quantizer.qparams(x))
    quantizer.attach_learned(doubled)
    right = fq.fake_quantize(x, "int8", scale=2 * doubled.step.detach())
    assert_same_bits(quantizer(x), right)


def test_a_quantizer_asks_for_no_scale_and_zero_point(monkeypatch):
    monkeypatch.setattr(LSQ, "qparams", None)
    quantizer = quantizer_of("int8")
    quantizer(torch.ones(6, 8)).backward(torch.ones(6, 8))
    assert all(parameter.grad is not None for parameter in quantizer.parameters())


def test_wrong_bits_would_be_seen(monkeypatch):
    made = dispatch._made_plan

    def wrong(*call):
        given = made(*call)
        return given._replace(gradients=lambda *call: tuple(t if t is None else t + 1 for t in given.gradients(*call)))

    monkeypatch.setattr(dispatch, "_made_plan", wrong)
    monkeypatch.setattr(dispatch, "_known", {})
    with pytest.raises(AssertionError, match=r"gradient 0: .* elements differ"):
        compare(FORMATS["int8"], GRANULARITIES["tensor"], fq.Arithmetic.DIVIDE, torch.float32, "contiguous")


def test_a_parametrised_step_goes_the_general_way():
    class Doubled(torch.nn.Module):
        def forward(self, step):
            return 2 * step

    x = torch.randn(6, 8)
    quantizer = quantizer_of(fq.QuantSpec("int8"), "lsq", Kind.INPUT)
    torch.nn.utils.parametrize.register_parametrization(quantizer.learned, "step", Doubled(), unsafe=True)
    expected = fq.fake_quantize(x, "int8", scale=quantizer.learned.step.detach())
    assert_same_bits(quantizer(x), expected)
