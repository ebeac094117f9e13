import itertools

import pytest
import torch

import fakequant as fq
from fakequant.errors import ShapeError
from fakequant.ops.layout import layout_of
from tests.support.cases import GRANULARITIES, LAYOUTS


def groups_of(where):
    groups = torch.arange(1, max(1, torch.Size(where.groups).numel()) + 1).view(where.groups).float()
    spread = groups
    for axis, size in enumerate(where.blocks):
        spread = spread.repeat_interleave(size, axis)
    return groups, spread


@pytest.mark.parametrize("layout_name", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_memory_in_kernel_order_is_tiles_of_one_group_each(where, layout_name):
    groups, spread = groups_of(where)
    x = LAYOUTS[layout_name](spread)
    layout = layout_of(where.granularity, tuple(x.shape), x.stride())
    packed = layout.pack(x)
    run = torch.as_strided(packed, (packed.numel(),), (1,), packed.storage_offset())
    g0, b0, g1, b1 = layout.tiles
    expected = layout.pack_groups(groups, torch.float32).view(g0, 1, g1, 1).expand(g0, b0, g1, b1).reshape(-1)
    assert (run == expected).all()
    assert (layout.unpack(packed) == spread).all()


@pytest.mark.parametrize("layout_name", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_row_major_says_that_the_kernel_counts_as_the_tensor_does(where, layout_name):
    x = LAYOUTS[layout_name](torch.arange(torch.Size(where.shape).numel()).view(where.shape) + 1.0)
    layout = layout_of(where.granularity, tuple(x.shape), x.stride())
    packed = layout.pack(x)
    run = torch.as_strided(packed, (packed.numel(),), (1,), packed.storage_offset())
    assert layout.row_major == torch.equal(run, torch.arange(x.numel()) + 1.0)


def test_every_order_of_four_axes():
    shape = (2, 3, 4, 5)
    for order in itertools.permutations(range(4)):
        for axes in ((0,), (1,), (3,), (1, 2), (0, 3)):
            granularity = fq.PerChannel(*axes)
            x = torch.randn([shape[a] for a in order]).permute([order.index(a) for a in range(4)])
            assert x.shape == shape
            layout = layout_of(granularity, shape, x.stride())
            packed = layout.pack(x)
            if layout.dense:
                assert packed.data_ptr() == x.data_ptr(), "a dense tensor is not copied"
                assert torch.empty_like(packed).stride() == x.stride()
            assert (layout.unpack(packed) == x).all()


def test_channels_last_is_not_copied_and_stays_channels_last():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = layout_of(fq.PerChannel(1), tuple(x.shape), x.stride())
    assert layout.pack(x).data_ptr() == x.data_ptr()
    assert layout.tiles == (1, 40, 3, 1)
    y = fq.fake_quantize(x, fq.QuantSpec("int8", fq.PerChannel(1)))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("axes", [(0,), (1, 3), (1, 3, 5), (0, 2, 4)], ids=str)
@pytest.mark.parametrize("empty_axis", range(6))
def test_empty_axes(axes, empty_axis):
    shape = tuple(0 if axis == empty_axis else n for axis, n in enumerate((2, 3, 2, 3, 2, 3)))
    spec = fq.QuantSpec("int8", fq.PerChannel(*axes))
    assert fq.fake_quantize(torch.empty(shape), spec).shape == shape


def test_axes_of_size_one_may_have_any_stride():
    x = torch.randn(4, 1, 5)
    odd = x.as_strided((4, 1, 5), (5, 999, 1))
    spec = fq.QuantSpec("int8", fq.PerChannel(0))
    assert torch.equal(fq.fake_quantize(odd, spec), fq.fake_quantize(x, spec))


def test_parameters_of_another_shape_never_reach_a_kernel():
    layout = layout_of(fq.PerChannel(0), (4, 5), (5, 1))
    with pytest.raises(ShapeError, match=r"parameters of shape \[2, 1\] .* groups of shape \[4, 1\]"):
        layout.pack_groups(torch.ones(2, 1), torch.float32)
