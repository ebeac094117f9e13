"""Learned parameters by one operator for each direction: the reference's bits, and what autograd promises."""

import cases
import pytest
import torch
from bits import assert_same_bits
from cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, hostile_gradient

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops import direct, dispatch, library
from fakequant.ops.cpu.backend import load_kernels
from fakequant.ops.direct import fake_quantize_directly

pytestmark = pytest.mark.skipif(load_kernels() is not None, reason=f"no backend offers it: {load_kernels()}")
INT8 = fq.QuantSpec("int8")
AFFINE = fq.QuantSpec("int8", symmetric=False)


def learned(value: float) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True)


def compare(case, granularity, arithmetic, dtype, layout):
    """How many of the comparisons of one input were served."""
    numbers = cases.hostile(case, granularity, arithmetic, dtype)
    spec, (scale, zero_point, *_) = case.spec(granularity.granularity, arithmetic), numbers.params
    x, served = LAYOUTS[layout](numbers.x), 0
    by_hand = zero_point is not None and zero_point.dtype == scale.dtype
    params, label = fq.QParams(scale, zero_point), f"{spec} {dtype} {layout}"
    for shape in spec.granularity.scale_shapes(x.shape):
        leaves = [x.detach().requires_grad_(), scale.detach().reshape(shape).requires_grad_()]
        given = zero_point if zero_point is None else zero_point.detach().reshape(shape).requires_grad_(by_hand)
        leaves += [given] if by_hand else []
        y = fake_quantize_directly(leaves[0], spec, leaves[1], given)
        if y is None:
            continue
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
        served += 1
    return served


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_the_reference(name, dtype):
    case, served, turn = FORMATS[name], 0, list(FORMATS).index(name)
    layouts = ("contiguous", "channels_last", "transposed", "sliced", "offset")
    for granularity in GRANULARITIES.values():
        turn += 1
        arithmetics = case.arithmetics()
        arithmetic = arithmetics[turn % len(arithmetics)]
        served += compare(case, granularity, arithmetic, dtype, layouts[turn % len(layouts)])
    cpu = next(backend for backend in dispatch.backends() if backend.name == "cpu")
    unsupported = cpu.unsupported(torch.ones(1, dtype=dtype), fq.QuantSpec(case.format), codes=False)
    assert (served > 0) == (unsupported is None), unsupported


def test_function_and_module_take_it(monkeypatch):
    monkeypatch.setattr(library, "choose", None)
    x = torch.tensor([0.3, 9.0])
    for leaf in (x, x.clone().requires_grad_()):
        scale, zero_point = learned(0.5), learned(-126.0)
        fq.fake_quantize(leaf, INT8, scale=scale).backward(torch.ones(2))
        fq.fake_quantize(leaf, AFFINE, scale=scale, zero_point=zero_point).backward(torch.ones(2))
        assert scale.grad is not None
        assert zero_point.grad is not None
        assert (leaf.grad is None) == (not leaf.requires_grad)
    quantizer = fq.nn.Quantizer(INT8)
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
        *((torch.ones(2), INT8.replace(gradient=one), (0.5,)) for one in fq.Gradient if one is not INT8.gradient),
    ],
    ids=str,
)
def test_refused(x, spec, given):
    scale, zero_point = (*(learned(value) for value in given), None)[:2]
    for leaf in (x, x.clone().requires_grad_()):
        assert fake_quantize_directly(leaf, spec, scale, zero_point) is None


def test_a_learned_scale_after_a_relu_is_refused():
    assert fake_quantize_directly(torch.ones(2), INT8, torch.tensor(0.5), None, relu=True) is not None
    assert fake_quantize_directly(torch.ones(2), INT8, learned(0.5), None, relu=True) is None


def both_ways(monkeypatch, found):
    """What `found()` returns with the shortest way and without it."""
    first = found()
    monkeypatch.setattr("fakequant.functional.fake_quantize_directly", lambda *call: None)
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


def test_wrong_bits_would_be_seen(monkeypatch):
    found = direct._find

    def wrong(*call):
        given = found(*call)
        return given._replace(gradients=lambda *call: tuple(t if t is None else t + 1 for t in given.gradients(*call)))

    monkeypatch.setattr(direct, "_find", wrong)
    monkeypatch.setattr(direct, "_found", {})
    with pytest.raises(AssertionError, match=r"gradient 0: .* elements differ"):
        compare(FORMATS["int8"], GRANULARITIES["tensor"], fq.Arithmetic.DIVIDE, torch.float32, "contiguous")
