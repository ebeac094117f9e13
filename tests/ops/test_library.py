"""The operator under eager autograd, function transforms, forward-mode AD, compilers and exporters."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fakequant as fq
from fakequant.numerics import reference
from fakequant.ops import dispatch, library
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import DTYPES, FORMATS, GRANULARITIES, LAYOUTS, hostile_gradient
from tests.support.matrix import full, in_turn, sweep

INT8_IN_CHANNELS = fq.QuantSpec("int8", fq.PerChannel(0))


def eager(x, params, spec, dy):
    y = reference.fake_quantize(x, params, spec)
    return y, reference.grad_input(dy, reference.passes(x, params, spec))


GRADIENTS = {gradient.value: gradient for gradient in fq.Gradient}


@sweep(
    "layout, dtype, gradient",
    full(LAYOUTS, DTYPES, GRADIENTS),
    in_turn(full(LAYOUTS, DTYPES), list(GRADIENTS)),
    dtype=DTYPES,
    gradient=GRADIENTS,
)
def test_backward_is_the_references(layout, dtype, gradient):
    for name in ("int8", "uint8_affine", "float8_e4m3fn"):
        where = GRANULARITIES["channel_1"]
        numbers = cases.hostile(FORMATS[name], where, fq.Arithmetic.DIVIDE, dtype)
        spec = FORMATS[name].spec(where.granularity, fq.Arithmetic.DIVIDE, gradient=gradient)
        x = LAYOUTS[layout](numbers.x).detach().requires_grad_()
        dy = torch.randn(where.shape).to(dtype)
        y = library.fake_quantize(x, numbers.params, spec)
        (dx,) = torch.autograd.grad(y, x, dy)
        right_y, right_dx = eager(x.detach(), numbers.params, spec, dy)
        assert_same_bits(y, right_y, name)
        assert_same_bits(dx, right_dx, name)


PLACES = ["channel_1", "tiles_alternating"]


@sweep(
    "layout, dtype, gradient, where",
    full(LAYOUTS, DTYPES, GRADIENTS, PLACES),
    in_turn(full(LAYOUTS, DTYPES), list(GRADIENTS), PLACES),
    dtype=DTYPES,
    gradient=GRADIENTS,
)
def test_the_mask_beside_the_values_is_the_references(where, layout, dtype, gradient):
    where = GRANULARITIES[where]
    numbers = cases.hostile(FORMATS["uint8_affine"], where, fq.Arithmetic.DIVIDE, dtype)
    spec = FORMATS["uint8_affine"].spec(where.granularity, fq.Arithmetic.DIVIDE, gradient=gradient)
    x = LAYOUTS[layout](numbers.x)
    right = reference.fake_quantize(x, numbers.params, spec), reference.passes(x, numbers.params, spec)
    leaf = x.detach().clone().requires_grad_()
    for given in (x, leaf):
        for got, wanted in zip(library.fake_quantize_with_mask(given, numbers.params, spec), right, strict=True):
            assert_same_bits(got, wanted)
    y, _ = library.fake_quantize_with_mask(leaf, numbers.params, spec)
    dy = torch.randn_like(y)
    assert_same_bits(torch.autograd.grad(y, leaf, dy)[0], reference.grad_input(dy, right[1]))


def test_the_mask_under_vmap_and_for_padded_blocks():
    x, spec = torch.randn(3, 10) * 9, fq.QuantSpec("int4", fq.PerBlock({-1: 4}, pad=True))
    params = fq.QParams(torch.rand(3, 3) + 0.5)
    y, mask = library.fake_quantize_with_mask(x, params, spec)
    assert_same_bits(mask, reference.passes(x, params, spec))
    rows = spec.replace(granularity=fq.PerBlock({0: 4}, pad=True))
    mapped = torch.vmap(lambda row, scale: library.fake_quantize_with_mask(row, fq.QParams(scale), rows))
    for got, wanted in zip(mapped(x, params.scale), (y, mask), strict=True):
        assert_same_bits(got, wanted)


def test_the_mask_is_of_the_same_draw_as_the_values_and_the_gradient():
    x = torch.full((4096,), 127.5, requires_grad=True)
    spec = fq.QuantSpec("int8", rounding=fq.Rounding.STOCHASTIC)
    y, mask = library.fake_quantize_with_mask(x, fq.QParams(torch.ones(1)), spec)
    assert 0.4 < mask.float().mean() < 0.6
    assert_same_bits(torch.autograd.grad(y, x, torch.ones_like(x))[0], mask.float())


def saved_bytes(make):
    kept = []

    def pack(saved):
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = make()
    assert y.requires_grad
    return sum(saved.numel() * saved.element_size() for saved in kept)


@pytest.mark.parametrize("size", [4096, 1001], ids=str)
@pytest.mark.parametrize("gradient", [fq.Gradient.CODE_RANGE, fq.Gradient.INPUT_RANGE], ids=lambda g: g.value)
def test_one_bit_per_element_is_saved(size, gradient):
    x = torch.randn(size, requires_grad=True)
    spec = fq.QuantSpec("int8", gradient=gradient)
    assert saved_bytes(lambda: fq.fake_quantize(x, spec, scale=0.01)) == -(-size // 8)


def test_identity_saves_nothing():
    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda: fq.fake_quantize(x, fq.QuantSpec("int8", gradient=fq.Gradient.IDENTITY))) == 0


def test_saved_bytes_sees_what_is_saved():
    x = torch.randn(100, requires_grad=True)
    assert saved_bytes(lambda: x * x) == 800


def test_the_graph_does_not_keep_the_input_alive():
    leaf = torch.randn(64, requires_grad=True)
    x = leaf * 2.0
    reference_to_x = weakref.ref(x)
    y = fq.fake_quantize(x, "int8")
    del x
    gc.collect()
    assert reference_to_x() is None
    y.sum().backward()


def test_nothing_is_recorded_where_no_gradient_is_wanted():
    x = torch.randn(8, requires_grad=True)
    with torch.no_grad():
        assert not fq.fake_quantize(x, "int8").requires_grad
    with torch.inference_mode():
        assert fq.fake_quantize(torch.randn(8), "int8").shape == (8,)
    assert not fq.fake_quantize(x.detach(), "int8").requires_grad


def test_double_backward():
    x = torch.linspace(-2, 2, 41, requires_grad=True)
    y = fq.fake_quantize(x, "int8", scale=0.01)
    (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert_same_bits(ddx, torch.where((x >= -1.28) & (x <= 1.27), 2.0, 0.0))


def test_double_backward_of_learned_parameters():
    """The gradient of a parameter is linear in dy: its own gradient by dy is the slope of each element."""
    x, dy = torch.linspace(-2, 2, 41), torch.randn(41)
    scale, zero_point = torch.tensor([0.01], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    spec = fq.QuantSpec("int8", symmetric=False)

    def gradients(dy, **options):
        y = library.fake_quantize(x, fq.QParams(scale, zero_point), spec)
        return torch.autograd.grad(y, (scale, zero_point), dy, **options)

    leaf = dy.clone().requires_grad_()
    first = gradients(leaf, create_graph=True)
    for one, other in zip(first, gradients(dy), strict=True):
        assert_same_bits(one, other)
    codes = (x / 0.01).round() + 3
    outside = (codes < -128) | (codes > 127)
    by_scale = torch.where(outside, codes.clamp(-128, 127) - 3, codes - 3 - x / 0.01)
    by_zero_point = torch.where(outside, -0.01, 0.0)
    for gradient, slope in zip(first, (by_scale, by_zero_point), strict=True):
        (actual,) = torch.autograd.grad(gradient, leaf, retain_graph=True)
        assert_same_bits(actual + 0.0, slope + 0.0)


def test_gradients_of_scale_and_input_together():
    where = GRANULARITIES["channel_1"]
    numbers = cases.hostile(FORMATS["uint8_affine"], where, fq.Arithmetic.DIVIDE, torch.float32)
    dy = torch.randn(where.shape)
    for gradient in fq.Gradient:
        spec = fq.QuantSpec("uint8", where.granularity, gradient=gradient)
        x, scale = (t.clone().requires_grad_() for t in (numbers.x, numbers.params.scale))
        zero_point = numbers.params.zero_point.float().requires_grad_()
        params = fq.QParams(scale, zero_point)
        y = library.fake_quantize(x, params, spec)
        actual = torch.autograd.grad(y, (x, scale, zero_point), dy)
        right = [
            eager(x.detach(), params, spec, dy)[1],
            *reference.grad_params(dy, x.detach(), params, spec, (True, True)),
        ]
        for one, other in zip(actual, right, strict=True):
            assert_same_bits(one, other.detach(), gradient.value)


@pytest.mark.parametrize("scale", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_gradients_in_batches_are_quantized(scale):
    class Quantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            return fq.fake_quantize(dy, "int8", scale=scale)

    x, dys = torch.randn(3, requires_grad=True), torch.rand(2, 3)
    (found,) = torch.autograd.grad(Quantized.apply(x), x, dys, is_grads_batched=True)
    assert_same_bits(found, fq.fake_quantize(dys, "int8", scale=scale))


def test_vmap_over_inputs_and_scales():
    x, scale = torch.randn(4, 5, 6), torch.rand(4) + 0.01
    batched = torch.func.vmap(lambda t: fq.fake_quantize(t, "int8"))(x)
    assert_same_bits(batched, fq.fake_quantize(x, INT8_IN_CHANNELS))
    batched = torch.func.vmap(lambda t, s: fq.fake_quantize(t, "int8", scale=s))(x, scale)
    assert_same_bits(batched, fq.fake_quantize(x, INT8_IN_CHANNELS, scale=scale))
    codes, _ = torch.func.vmap(lambda t: fq.quantize(t, "int8"), out_dims=(0, fq.QParams(0, None, fq.Range(0, 0))))(x)
    assert_same_bits(codes, fq.quantize(x, INT8_IN_CHANNELS)[0])


@pytest.mark.parametrize("text", ["int4 per_block(-1:32,pad)", "int8 per_block(0:4,1:4,pad)", "int8 per_channel(1)"])
@pytest.mark.parametrize("shape", [(16, 10), (2, 6, 5, 7)])
def test_transforms_lay_results_as_kernels_do(shape, text):
    # A product's gradient adds in an order that depends on the strides of its factors.
    rows = torch.randn(shape)
    for x in (rows, rows.to(memory_format=torch.channels_last) if rows.dim() == 4 else rows):
        y, back = torch.func.vjp(lambda t: fq.fake_quantize(t, text), x)
        assert_same_bits(y, fq.fake_quantize(x, text))
        assert y.stride() == fq.fake_quantize(x, text).stride()
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(fq.fake_quantize(leaf, text), leaf, torch.ones_like(leaf))
        assert back(torch.ones_like(x))[0].stride() == dx.stride()


def test_func_grad_and_vmap_of_grad():
    x = torch.randn(4, 6)

    def loss(t):
        return fq.fake_quantize(t, "int8", scale=0.01).pow(2).sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert_same_bits(torch.func.grad(loss)(x), leaf.grad)
    assert_same_bits(torch.func.vmap(torch.func.grad(loss))(x), leaf.grad)
    diagonal = torch.func.hessian(loss)(x[0]).diagonal()
    assert_same_bits(diagonal, torch.where((x[0] >= -1.28) & (x[0] <= 1.27), 2.0, 0.0))


# What is given, beside x of shape [4, 5, 6], to a specification per channel.
PARAMETERS = {
    "from the range": dict,
    "as a magnitude": lambda: {"amax": torch.full((5,), 3.0)},
    "as a scale": lambda: {"scale": torch.full((5,), 0.02)},
    "learned": lambda: {"scale": torch.full((5,), 0.02, requires_grad=True)},
    "both learned": lambda: {
        "scale": torch.full((5,), 0.02, requires_grad=True),
        "zero_point": torch.full((5,), 3.0, requires_grad=True),
    },
}


def _function_of(name, gradient, layout="contiguous"):
    """A function of the leaves, which it has as a list of tensors: x, and what of the parameters is learned."""
    spec = fq.QuantSpec("int8", fq.PerChannel(1), gradient=gradient, symmetric=name != "both learned")
    where = cases.GranularityCase(spec.granularity, (4, 5, 6), (1, 5, 1))
    numbers = cases.hostile(FORMATS["int8"], where, fq.Arithmetic.DIVIDE, torch.float32)
    x, given = LAYOUTS[layout](numbers.x).detach().requires_grad_(), PARAMETERS[name]()
    learned = [key for key, value in given.items() if value.requires_grad]
    leaves = [x, *(given[key] for key in learned)]

    def function(x, *values):
        return fq.fake_quantize(x, spec, **{**given, **dict(zip(learned, values, strict=True))})

    return function, leaves


@pytest.mark.parametrize("backends", ["all", "the reference"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("gradient", fq.Gradient, ids=lambda g: g.value)
@pytest.mark.parametrize("name", PARAMETERS)
def test_batched_gradients_are_those_of_a_loop(monkeypatch, name, gradient, layout, backends):
    if backends == "the reference":
        monkeypatch.setattr(dispatch, "_backends", (dispatch.REFERENCE,))
    function, leaves = _function_of(name, gradient, layout)
    y = function(*leaves)
    dys = torch.stack([hostile_gradient(leaves[0]), torch.randn(y.shape), torch.zeros(y.shape)])
    single = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in dys]
    for create_graph in (False, True):
        options = {"retain_graph": True, "create_graph": create_graph}
        batched = torch.autograd.grad(y, leaves, dys, is_grads_batched=True, **options)
        for got, wanted in zip(batched, zip(*single, strict=True), strict=True):
            assert_same_bits(got, torch.stack(wanted), create_graph)
    mapped = torch.vmap(lambda dy: torch.autograd.grad(y, leaves, dy, retain_graph=True))(dys)
    for got, wanted in zip(mapped, zip(*single, strict=True), strict=True):
        assert_same_bits(got, torch.stack(wanted), "torch.vmap")


@pytest.mark.parametrize("name", PARAMETERS)
def test_vectorized_jacobians_and_their_gradients_are_those_of_a_loop(name):
    function, leaves = _function_of(name, fq.Gradient.CODE_RANGE)
    leaves[0] = leaves[0].detach().nan_to_num(0.0, 3.0, -3.0)[:2].clone().requires_grad_()
    results = []
    for vectorize in (False, True):
        jacobians = torch.autograd.functional.jacobian(
            lambda *leaves: function(*leaves) ** 3, tuple(leaves), create_graph=True, vectorize=vectorize
        )
        total = sum(j.double().square().sum() for j in jacobians)
        hessian = torch.autograd.functional.hessian(
            lambda x: function(x, *leaves[1:]).square().sum(), leaves[0], vectorize=vectorize
        )
        results.append((*jacobians, torch.autograd.grad(total, leaves[0])[0], hessian))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", PARAMETERS)
def test_transforms_see_how_a_gradient_depends_on_its_gradient(name):
    """Gradients are linear in what comes from above: the tangent of dx is the dx of the tangent."""
    function, leaves = _function_of(name, fq.Gradient.CODE_RANGE)
    y = function(*leaves)
    dy, tangent = torch.randn(2, *y.shape)

    def gradients(dy):
        return torch.autograd.grad(y, leaves, dy, retain_graph=True, create_graph=True)

    wanted = gradients(tangent)[0]
    assert_same_bits(torch.func.jvp(gradients, (dy,), (tangent,))[1][0], wanted)
    _, pull = torch.func.vjp(lambda dy: gradients(dy)[0], dy)
    assert_same_bits(pull(tangent)[0], wanted)
    for create_graph in (False, True):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(dy, tangent)
            (dx, *_) = torch.autograd.grad(y, leaves, dual, retain_graph=True, create_graph=create_graph)
            assert_same_bits(forward_ad.unpack_dual(dx).tangent, wanted, create_graph)


def test_forward_mode_over_the_input():
    x, tangent = torch.randn(4, 6), torch.randn(4, 6)
    params = fq.QParams(torch.tensor([[0.01]]))
    right_y, right = eager(x, params, fq.QuantSpec("int8"), tangent)
    y, jvp = torch.func.jvp(lambda t: fq.fake_quantize(t, "int8", scale=0.01), (x,), (tangent,))
    assert_same_bits(y, right_y)
    assert_same_bits(jvp, right)
    with forward_ad.dual_level():
        dual = fq.fake_quantize(forward_ad.make_dual(x, tangent), "int8", scale=0.01)
        assert_same_bits(forward_ad.unpack_dual(dual).tangent, right)


def test_forward_mode_over_the_scale_agrees_with_reverse_mode():
    x, scale = torch.randn(50).double(), torch.tensor(0.01).double()

    def total(s):
        return fq.fake_quantize(x, "int8", scale=s).sum()

    _, forward = torch.func.jvp(total, (scale,), (torch.ones_like(scale),))
    torch.testing.assert_close(forward, torch.func.grad(total)(scale), rtol=1e-12, atol=0)


def test_meta_and_fake_tensors():
    y = fq.fake_quantize(torch.empty(3, 4, device="meta"), INT8_IN_CHANNELS)
    assert (y.device.type, tuple(y.shape), y.dtype) == ("meta", (3, 4), torch.float32)
    with FakeTensorMode() as mode:
        y = fq.fake_quantize(mode.from_tensor(torch.randn(3, 4).half()), INT8_IN_CHANNELS)
    assert (tuple(y.shape), y.dtype) == ((3, 4), torch.float16)


def test_make_fx_traces_torch_operations():
    graph = make_fx(lambda t: fq.fake_quantize(t, INT8_IN_CHANNELS))(torch.randn(3, 4))
    x = torch.randn(3, 4)
    assert_same_bits(graph(x), fq.fake_quantize(x, INT8_IN_CHANNELS))


def test_autocast_changes_nothing():
    for x in (torch.randn(64), torch.randn(64).bfloat16()):
        outside = fq.fake_quantize(x, "int8")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_bits(fq.fake_quantize(x, "int8"), outside)


@pytest.mark.parametrize(
    ("scale", "zero_point", "spec"),
    [
        (torch.full((1, 1, 1), 0.01), None, "int8"),
        (torch.full((1, 5, 1), 0.01).requires_grad_(), torch.full((1, 5, 1), 3.0), "uint8 per_channel(1)"),
    ],
    ids=["per tensor", "learned, per channel"],
)
def test_opcheck(scale, zero_point, spec):
    x = torch.randn(6, 5, 4).transpose(0, 2).requires_grad_()
    torch.library.opcheck(torch.ops.fakequant.fake_quantize, (x, scale, zero_point, spec))


def test_exported_operator_has_the_eager_values_and_gradients():
    where = GRANULARITIES["channel_1"]
    for name in ("int8", "uint8_affine", "float8_e5m2"):
        numbers = cases.hostile(FORMATS[name], where, fq.Arithmetic.DIVIDE, torch.float32)
        for gradient in fq.Gradient:
            spec = FORMATS[name].spec(where.granularity, fq.Arithmetic.DIVIDE, gradient=gradient)
            x, dy = numbers.x.clone().requires_grad_(), torch.randn(where.shape)
            y = torch.ops.fakequant.fake_quantize(x, numbers.params.scale, numbers.params.zero_point, str(spec))
            (dx,) = torch.autograd.grad(y, x, dy)
            right_y, right_dx = eager(numbers.x, numbers.params, spec, dy)
            assert_same_bits(y, right_y, str(spec))
            assert_same_bits(dx, right_dx, str(spec))
