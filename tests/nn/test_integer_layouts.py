"""Integer execution on tensors of any strides or with an axis less: as torch's own layers."""

import itertools

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.ops import products
from tests.support.bits import assert_same_bits
from tests.support.integer_models import expected, hostile, prepared

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "last axes exchanged": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "first axes exchanged": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "channels last, gaps": lambda x: (
        torch.stack([x, x], 1).flatten(1, 2).movedim(1, -1).contiguous().movedim(-1, 1)[:, ::2]
    ),
}
CONVOLUTIONS = {
    1: (lambda: nn.Conv1d(3, 8, 3), (2, 3, 9)),
    2: (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 7)),
    3: (lambda: nn.Conv3d(3, 8, 3), (2, 3, 5, 6, 4)),
}


def lying_so(matrix):
    """The same numbers with all strides that axes of one element may have."""
    yield matrix
    rows, columns = matrix.shape
    for stride in itertools.product((0, 1, 7, rows, columns), repeat=2):
        laid = torch.zeros(4096, dtype=matrix.dtype).as_strided(matrix.shape, stride)
        if (rows == 1 or stride[0] == columns) and (columns == 1 or stride[1] == 1):
            yield laid.copy_(matrix)


@pytest.mark.parametrize("dtype", products.CODES, ids=str)
def test_strides_of_axes_of_one_element_mean_nothing(dtype):
    random = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for rows, inner, columns in itertools.product((1, 3, 17), (1, 2, 16), (1, 4, 17)):
        a = torch.randint(low, high + 1, (rows, inner), generator=random, dtype=torch.int32).to(dtype)
        b = torch.randint(-128, 128, (inner, columns), generator=random, dtype=torch.int32).to(torch.int8)
        for left, right in itertools.product(lying_so(a), [*lying_so(b), *(each.t() for each in lying_so(b.t()))]):
            found = products._int_mm(left, right)
            assert torch.equal(found.long(), a.long() @ b.long()), (left.shape, left.stride(), right.stride())


@pytest.mark.parametrize("input", ["int8", "uint8"])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 4), (1, 1), (3, 1)])
def test_layers_with_one_input_or_output(inputs, outputs, input):
    model, _ = prepared(nn.Linear(inputs, outputs), input)
    for x in (hostile(12, inputs)[:7], hostile(inputs, 12).t()[:1], hostile(12, inputs)[:1]):
        assert_same_bits(model(x).detach(), expected(model[0], x).detach())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", CONVOLUTIONS)
def test_convolutions_lay_their_result_as_torch_does(axes, layout):
    make, shape = CONVOLUTIONS[axes]
    float_layer = make()
    model, simulated = prepared(make())
    x = LAYOUTS[layout](hostile(*shape).clamp(-100, 100))
    # Quantized values of a tensor with gaps lie as those of a contiguous one.
    stride = float_layer(x.contiguous() if "gaps" in layout else x).stride()
    with torch.no_grad():
        assert model(x).stride() == simulated(x).stride() == stride
        assert_same_bits(model(x), expected(model[0], x.contiguous()))


PICTURE = torch.rand(9, 8, 3, generator=torch.Generator().manual_seed(0)).permute(2, 0, 1)
WITH_AXES_OF_ONE = {
    "a picture": PICTURE[None],
    "a picture without an axis for images": PICTURE,
    "one of a batch": torch.stack([PICTURE, PICTURE]).contiguous(memory_format=torch.channels_last)[:1],
    "gray": torch.rand(2, 8, 9, 1).permute(0, 3, 1, 2),
    "a pixel": torch.rand(4, 1, 1, 3).permute(0, 3, 1, 2),
    "a column": torch.rand(2, 8, 1, 3).permute(0, 3, 1, 2),
    "a channel with a stride of 0": torch.empty_strided((2, 1, 3, 4), (12, 0, 4, 1)).fill_(0.5),
}


@pytest.mark.parametrize("x", WITH_AXES_OF_ONE.values(), ids=WITH_AXES_OF_ONE)
def test_strides_of_axes_of_one_element_decide_as_in_torch(x):
    make = lambda: nn.Conv2d(x.shape[-3], 5, 1, padding=1)  # noqa: E731
    float_layer = make()
    model, simulated = prepared(make())
    with torch.no_grad():
        y = model(x)
        assert y.stride() == simulated(x).stride() == float_layer(x).stride()
        assert_same_bits(y, expected(model[0], x.contiguous().reshape(-1, *x.shape[-3:])).reshape(y.shape))


PLACES = {
    "convolution": lambda: nn.Conv2d(16, 8, 3),
    "transposed": lambda: nn.ConvTranspose2d(16, 8, 3),
    "pooling": lambda: nn.AvgPool2d(3, stride=1),
}


@pytest.mark.parametrize("name", PLACES)
def test_one_image_without_an_axis_for_images(name):
    """A learned step gets the gradient that it gets with that axis."""
    model, _ = prepared(PLACES[name]())
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    fq.set_execution(model, "simulate")
    x, step, found = hostile(16, 9, 9).clamp(-1, 1), model[0]._input_quantizer.lsq.step, []
    for given in (x, x[None]):
        step.grad = None
        y = model(given)
        y.sum().backward()
        found.append((y.detach().reshape(y.shape[-3:]), step.grad))
    assert_same_bits(*(y for y, _ in found))
    assert_same_bits(*(gradient for _, gradient in found))


@pytest.mark.parametrize("shape", [(9, 9), (1, 1, 1, 9, 9)], ids=str)
def test_a_convolution_of_other_axes_is_refused(shape):
    model, _ = prepared(nn.Conv2d(1, 8, 3))
    with pytest.raises(RuntimeError, match=r"Expected 3D .* or 4D .* input to conv2d"):
        model(torch.ones(shape))


def test_factors_of_other_widths_are_refused_as_by_torch():
    model, _ = prepared(nn.Linear(16, 4))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.ones(3, 7))


@pytest.mark.parametrize("name", ["_input_quantizer", "_weight_quantizer"])
def test_quantizers_with_hooks_are_called(name):
    model, simulated = prepared(nn.Linear(16, 4))
    x, quantizer, seen = hostile(5, 16).clamp(-1, 1), getattr(model[0], name), []
    assert_same_bits(model(x), expected(model[0], x))
    hook = quantizer.register_forward_hook(lambda module, given, y: seen.append(y))
    assert_same_bits(model(x), simulated(x))
    assert len(seen) == 1
    assert "a quantizer has a hook" in model[0].why_simulated()
    hook.remove()
    assert_same_bits(model(x), expected(model[0], x))
    assert model[0].why_simulated() is None


def test_a_quantizer_of_another_class_is_called():
    class Zeros(fq.nn.Quantizer):
        def forward(self, x):
            return torch.zeros_like(x)

    model, _ = prepared(nn.Linear(16, 4))
    model[0]._input_quantizer.__class__ = Zeros
    assert_same_bits(model(hostile(5, 16)).detach(), model[0].bias.detach().expand(5, 4))
    assert "a forward of its own" in model[0].why_simulated()
