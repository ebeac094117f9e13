"""Codes by one operator, and the backward pass by two more: the reference's bits, or the general way."""

import copy
import itertools

import pytest
import torch
from bits import assert_same_bits
from cases import DTYPES, FORMATS, GRANULARITIES, hostile_gradient
from test_direct import assert_served_if_supported, hostile, needs_kernels
from torch import nn

import fakequant as fq
from fakequant.nn import integer
from fakequant.numerics import reference
from fakequant.ops import direct
from fakequant.ops.direct import encode_directly, mask_directly, values_directly

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def _nothing_found_before(monkeypatch):
    monkeypatch.setattr(direct, "_found", {})


class Subclass(torch.Tensor):
    pass


def compare_codes(x, spec, params):
    """Codes, their values, the mask and what passes it; whether they were served."""
    scale, zero_point, label = params.scale, params.zero_point, f"{spec} {x.dtype}"
    kept = encode_directly(x, spec, scale, zero_point)
    if kept is None:
        return False
    codes, passing = reference.quantize(x, params, spec), reference.passes(x, params, spec)
    assert_same_bits(kept.values, codes, label)
    assert kept.values.stride() == x.stride()
    assert kept.mask is None
    kept = encode_directly(x, spec, scale, zero_point, mask=True)
    assert_same_bits(kept.values, codes, f"{label} with a mask")
    assert (kept.mask is None) == bool(passing.all())
    dy = hostile_gradient(x).as_strided(x.shape, x.stride())
    right = reference.grad_input(dy, passing)
    with torch.no_grad():
        if kept.mask is not None:
            assert_same_bits(kept.call[0].unpack_mask(kept.mask, x, spec), passing, f"{label} mask")
            assert mask_directly(dy, kept.mask, kept.direct)
            assert_same_bits(dy, right, f"{label} masked")
        values = values_directly(kept.values, scale, zero_point, kept.direct, dy)
    assert_same_bits(values, reference.dequantize(codes, params, spec, x.dtype), f"{label} values")
    assert values.stride() == x.stride()
    assert encode_directly(x, spec.replace(gradient=fq.Gradient.CLIP), scale, zero_point, mask=True) is None
    if x.numel():
        x[(-1,) * x.dim()] = torch.nan
        assert encode_directly(x, spec, scale, zero_point) is None
    return True


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_reference(name, dtype):
    case, served = FORMATS[name], 0
    layouts = itertools.cycle(["channels_last", "transposed", "contiguous"])
    # Another layout first for every format, so that each meets each granularity.
    layouts = itertools.islice(layouts, list(FORMATS).index(name) + 1, None)
    for granularity, arithmetic in itertools.product(GRANULARITIES.values(), case.arithmetics()):
        given, spec, params = hostile(case, granularity, arithmetic, dtype, next(layouts))
        served += compare_codes(given.where(~given.isnan(), torch.ones((), dtype=dtype)), spec, params)
    assert_served_if_supported(served, case, dtype, codes=True)


@pytest.mark.parametrize("elements", [1, 7, 8, 9, 1027])
def test_a_mask_that_passes_everything_is_left_out(elements):
    x, scale = torch.zeros(elements), torch.tensor(0.1)
    assert encode_directly(x, fq.QuantSpec("int8"), scale, None, mask=True).mask is None
    for place in {0, elements // 2, elements - 1}:
        x.zero_()[place] = 100.0
        assert encode_directly(x, fq.QuantSpec("int8"), scale, None, mask=True).mask is not None, place


def test_a_subclass_of_a_gradient_is_not_given_to_kernels():
    def gradient(dy):
        return torch.autograd.grad(fq.fake_quantize(x, "int8", scale=0.1), x, dy)[0]

    x = (9 * torch.randn(4, 6)).requires_grad_()
    right = gradient(torch.ones(4, 6))
    ((key, found),) = direct._found.items()
    direct._found[key] = found._replace(grad_input=lambda *_: pytest.fail("by a kernel"))
    assert_same_bits(torch.Tensor(gradient(torch.ones(4, 6).as_subclass(Subclass))), right)
    with pytest.raises(pytest.fail.Exception, match="by a kernel"):
        gradient(torch.ones(4, 6))


@torch.no_grad()
def test_what_lies_otherwise_than_x_goes_the_general_way():
    x, scale, spec = torch.randn(4, 6) * 9, torch.tensor(0.1), fq.QuantSpec("int8")
    kept = encode_directly(x, spec, scale, None, mask=True)
    transposed = torch.randn(6, 4).t()
    before = transposed.clone()
    assert not mask_directly(transposed, kept.mask, kept.direct)
    assert not mask_directly(transposed.contiguous().half(), kept.mask, kept.direct)
    assert not mask_directly(transposed.contiguous().as_subclass(Subclass), kept.mask, kept.direct)
    assert_same_bits(transposed, before)
    assert values_directly(kept.values, scale, None, kept.direct, x.half()) is None
    assert values_directly(kept.values.t().contiguous().t(), scale, None, kept.direct, x) is None
    with torch.enable_grad():
        assert not mask_directly(x, kept.mask, kept.direct)
        assert values_directly(kept.values, scale, None, kept.direct, x) is None


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (7, 9)])
def test_without_a_mask_gradients_lie_as_x_does(shape):
    """As with one: the elements stay in their places, whatever the layout of the gradient is."""
    x = torch.rand(shape) + 0.1
    for relu in (False, True):
        kept = encode_directly(x, fq.QuantSpec("int8"), torch.tensor(0.1), None, relu=relu, mask=True)
        assert kept.mask is None
        dy = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
        right = dy.clone()
        dx = integer._masked(dy, None, kept)
        assert_same_bits(dx, right)
        assert dx.stride() == x.stride()


def quantized(*layers, like):
    model = fq.prepare(nn.Sequential(*layers), fq.presets.INT8)
    fq.calibrate(model, [2 * like], progress=False)
    return model


def gradients_by(execution, model, x, dy, **options):
    model, x = fq.set_execution(copy.deepcopy(model), execution), x.detach().requires_grad_()
    return torch.autograd.grad(model(x), [x, *model.parameters()], dy, **options)


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 1), nn.Conv2d(4, 4, 3, groups=4)], ids=str)
@pytest.mark.parametrize("relu", [True, False])
def test_axes_of_one_element_lie_as_with_a_mask(relu, layer):
    """Their strides change no element, but decide how the layers before multiply."""
    layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    x = (torch.rand(3, layer.in_channels, 4, 4) + 0.1).contiguous(memory_format=torch.channels_last)
    model = quantized(nn.ReLU() if relu else nn.Identity(), layer, like=x)
    dy = torch.randn(model(x).shape)
    strides = [
        [d.stride() for d in gradients_by("auto", model, given, dy)]
        for given in (x, x.where(x > x.mean(), -torch.ones(()) if relu else torch.full((), 100.0)))
    ]
    assert strides[0] == strides[1]
    for one, other in zip(*(gradients_by(way, model, x, dy) for way in ("auto", "simulate")), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("lowest", [0.1, -1.0])
@pytest.mark.parametrize("relu", [True, False])
def test_products_of_any_layout_get_the_gradients_of_simulated_layers(relu, lowest):
    x = (torch.rand(2, 3, 4, 5) + lowest).contiguous(memory_format=torch.channels_last)
    model = quantized(nn.ReLU() if relu else nn.Identity(), nn.Linear(5, 6), like=x)
    dy = torch.randn(2, 3, 4, 6)
    for one, other in zip(*(gradients_by(way, model, x, dy) for way in ("auto", "simulate")), strict=True):
        assert_same_bits(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_batches_of_gradients_go_the_general_way(size):
    x = torch.rand(4, 5) - 0.5
    model, batch = quantized(nn.Linear(5, 6), like=x), torch.randn(3, 4, 6)
    found = gradients_by("auto", model, size * x, batch, is_grads_batched=True)
    each = [gradients_by("auto", model, size * x, dy) for dy in batch]
    for one, others in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others))
