import copy
import pickle

import pytest
import torch

import fakequant as fq
from fakequant.errors import ShapeError, SpecError
from fakequant.numerics.granularity import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    Tiles,
    block_axes,
    blocked,
    blocked_groups,
    fit_tiles,
    granularities,
    parse_granularity,
)
from tests.support.cases import GRANULARITIES


@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_blocks_groups_text_and_copies(where):
    granularity = where.granularity
    assert granularity.block_shape(where.shape) == where.blocks
    assert granularity.group_shape(where.shape) == where.groups
    assert parse_granularity(str(granularity)) == granularity
    assert pickle.loads(pickle.dumps(granularity)) == copy.deepcopy(granularity) == granularity
    assert hash(copy.deepcopy(granularity)) == hash(granularity)


@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_blocked_view_puts_every_element_beside_its_group(where):
    groups = torch.arange(max(1, torch.Size(where.groups).numel())).view(where.groups)
    spread = groups
    for axis, size in enumerate(where.blocks):
        spread = spread.repeat_interleave(size, axis)
    view = blocked(spread, where.blocks)
    assert view.data_ptr() == spread.data_ptr()
    assert (view == blocked_groups(groups, where.shape, where.blocks)).all()
    axes = block_axes(where.shape, where.blocks)
    assert not axes or (view.amax(axes).reshape(where.groups) == groups).all()


@pytest.mark.parametrize("where", GRANULARITIES.values(), ids=GRANULARITIES)
def test_tiles_name_the_group_of_every_element(where):
    tiles = fit_tiles(where.shape, where.blocks)
    groups = torch.arange(max(1, torch.Size(where.groups).numel())).view(where.groups)
    spread = groups
    for axis, size in enumerate(where.blocks):
        spread = spread.repeat_interleave(size, axis)
    if tiles is None:
        assert "alternating" in str([name for name, case in GRANULARITIES.items() if case is where])
        return
    g0, b0, g1, b1 = tiles
    by_tiles = torch.arange(g0 * g1).view(g0, 1, g1, 1).expand(g0, b0, g1, b1).reshape(-1)
    assert (by_tiles == spread.reshape(-1)).all()
    assert (tiles.elements, tiles.groups) == (spread.numel(), groups.numel())


@pytest.mark.parametrize(
    ("granularity", "shape", "tiles"),
    [
        (PerTensor(), (6, 7), Tiles(1, 42, 1, 1)),
        (PerChannel(0), (6, 7), Tiles(6, 7, 1, 1)),
        (PerChannel(1), (6, 7), Tiles(1, 6, 7, 1)),
        (PerChannel(1), (2, 3, 5), Tiles(1, 2, 3, 5)),
        (PerToken(), (2, 3, 5), Tiles(6, 5, 1, 1)),
        (PerBlock({-1: 32}), (2, 64), Tiles(4, 32, 1, 1)),
        (PerBlock({0: 4, 1: 8}), (8, 24), Tiles(2, 4, 3, 8)),
    ],
    ids=str,
)
def test_tiles(granularity, shape, tiles):
    assert fit_tiles(shape, granularity.block_shape(shape)) == tiles


def test_accepted_scale_shapes():
    assert PerTensor().scale_shapes((2, 3)) == [(1, 1), (), (1,)]
    assert PerChannel(-1).scale_shapes((2, 3)) == [(1, 3), (3,)]
    assert PerChannel(0, 1).scale_shapes((2, 3, 4)) == [(2, 3, 1)]
    assert PerToken().scale_shapes((2, 3, 4)) == [(2, 3, 1), (2, 3)]
    assert PerBlock({-1: 2}).scale_shapes((2, 4)) == [(2, 2)]


@pytest.mark.parametrize(
    ("granularity", "shape", "groups"),
    [
        (PerTensor(), (0,), (1,)),
        (PerTensor(), (0, 3), (1, 1)),
        (PerChannel(1), (0, 3), (1, 3)),
        (PerChannel(0), (0, 3), (0, 1)),
        (PerToken(), (4, 0), (4, 1)),
        (PerBlock({-1: 8}), (4, 0), (4, 0)),
    ],
    ids=str,
)
def test_empty_shapes(granularity, shape, groups):
    assert granularity.group_shape(shape) == groups
    assert fq.fake_quantize(torch.empty(shape), fq.QuantSpec("int8", granularity)).shape == shape


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PerChannel(), SpecError, r"at least one axis, for example PerChannel\(0\); for none use PerTensor"),
        (lambda: PerBlock({}), SpecError, r"needs a positive block size for at least one axis, e.g. \{-1: 32\}"),
        (lambda: PerBlock({0: 0}), SpecError, r"positive block size"),
        (
            lambda: PerChannel(2).block_shape((4, 5)),
            ShapeError,
            r"per_channel\(2\) on shape \(4, 5\): axis 2 is out of range, a tensor of 2 axes has axes -2 to 1",
        ),
        (lambda: PerChannel(-3).block_shape((4, 5)), ShapeError, r"axis -3 is out of range"),
        (lambda: PerChannel(0).block_shape(()), ShapeError, r"out of range"),
        (lambda: PerChannel(0, -2).block_shape((4, 5)), ShapeError, r"an axis is named twice"),
        (lambda: PerBlock({0: 2, -2: 2}).block_shape((4, 5)), ShapeError, r"axis 0 is named twice"),
        (
            lambda: PerBlock({-1: 32}).block_shape((8, 50)),
            ShapeError,
            r"axis -1 has 50 elements, no multiple of 32; choose a block size.*smaller last block by PerBlock",
        ),
        (lambda: PerToken().block_shape(()), ShapeError, r"no last axis; use PerTensor"),
        (lambda: parse_granularity("per_chanel(0)"), SpecError, r"unknown granularity.*did you mean per_channel"),
        (lambda: parse_granularity("per_channel(x)"), SpecError, r"cannot read the granularity 'per_channel\(x\)'"),
        (lambda: parse_granularity("per_channel"), SpecError, r"cannot read the granularity"),
        (lambda: parse_granularity("per_block(32)"), SpecError, r"cannot read the granularity"),
        (lambda: parse_granularity("per_tensor(1)"), SpecError, r"per_tensor takes no arguments, got \(1\)"),
        (lambda: parse_granularity("per_token(x)"), SpecError, r"cannot read the granularity"),
        (lambda: PerToken(-1, -1), SpecError, r"takes the axes along which a scale is shared, each once"),
        (lambda: parse_granularity(""), SpecError, r"unknown granularity ''"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_axes_of_either_sign_mean_the_same():
    assert PerChannel(-2).block_shape((4, 5)) == PerChannel(0).block_shape((4, 5))
    assert PerBlock({-1: 5}).block_shape((4, 5)) == PerBlock({1: 5}).block_shape((4, 5))


def test_axes_move():
    axes = {0: 1, -1: 0}
    assert PerChannel(0, 2).remap_axes(axes) == PerChannel(1, 2)
    assert PerBlock({-1: 32, 2: 3}, pad=True).remap_axes(axes) == PerBlock({0: 32, 2: 3}, pad=True)
    assert (PerTensor().remap_axes(axes), PerToken().remap_axes(axes)) == (PerTensor(), PerToken(0))
    with pytest.raises(SpecError, match=r"names two axes .* maps to one"):
        PerBlock({0: 4, 1: 8}).remap_axes(axes)
    with pytest.raises(ShapeError, match="an axis is named twice"):
        PerChannel(0, 1).remap_axes(axes).block_shape((4, 8))


def test_names_are_listed():
    assert {str(case.granularity).partition("(")[0] for case in GRANULARITIES.values()} <= set(granularities())
