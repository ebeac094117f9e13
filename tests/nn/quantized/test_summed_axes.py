"""Scales vary along the axes that a product sums over in blocks alone; blocks of convolutions hold whole kernels."""

import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fakequant.model import presets
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config
from fakequant.model.prepare import prepare
from fakequant.model.state.checkpoint import load, save
from fakequant.model.weights import quantized_weights, weight_bits
from fakequant.nn import MatMul, QuantizedLayer, layers, quantizers, quantizes
from fakequant.nn.quantized.layers import _layers
from tests.support.bits import assert_same_bits
from tests.support.layer_cases import CASES

ALL = presets.presets()


class Functional(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (F.conv_transpose2d if self.transposed else F.conv2d)(x, self.weight)


PRODUCTS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    **{name: case for name, case in CASES.items() if not name.startswith(("Add", "Embedding", "Max", "Avg", "Adapt"))},
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (torch.randn(2, 8, 5, 5),)),
    "pointwise": (nn.Conv2d(8, 8, 1), (torch.randn(2, 8, 5, 5),)),
    "long kernel": (nn.Conv1d(2, 8, 200), (torch.randn(2, 2, 210),)),
    "LSTM": (nn.LSTM(6, 5), (torch.randn(3, 2, 6),)),
    "GRUCell": (nn.GRUCell(6, 5), (torch.randn(2, 6),)),
    "MultiheadAttention": (nn.MultiheadAttention(8, 2), (torch.randn(3, 2, 8),) * 3),
    "conv2d": (Functional(False), (torch.randn(2, 8, 5, 5),)),
    "conv_transpose2d": (Functional(True), (torch.randn(2, 8, 5, 5),)),
}


def _summed(name: str, attribute: str, axes: int) -> list[int]:
    """The axes that the product sums over; of the input of a convolution, that of the channels."""
    if "onv" in name or "wise" in name or "kernel" in name:
        transposed = "ranspose" in name
        return [1 - transposed, *range(2, axes)] if "weight" in attribute else [1]
    second = attribute == "_value_quantizer" or (name, attribute) == ("MatMul", "_other_quantizer")
    return [axes - 2 if second else axes - 1]


@pytest.mark.parametrize("name", PRODUCTS)
def test_scales_vary_along_a_sum_in_blocks_alone(name: str) -> None:
    module, inputs = PRODUCTS[name]
    for preset, config in ALL.items():
        ops = tuple(replace(rule, ops=("conv", "conv_transpose")) for rule in config.rules[:1])
        model = copy.deepcopy(module)
        prepare(model, Config(preset, ops) if isinstance(module, Functional) else config, inputs)
        seen: dict[str, tuple[int, ...]] = {}
        for path, own in quantizers(model).items():
            own.register_forward_pre_hook(lambda _, args, path=path, seen=seen: seen.update({path: args[0].shape}))
        if quantizers(model):
            calibrate(model, [inputs], "max", inputs=slice(len(inputs)))
        model(*inputs)
        assert seen or isinstance(module, MatMul)
        for path, shape in seen.items():
            blocks = quantizers(model)[path].spec.granularity.block_shape(shape)
            axes = _summed(name, path.rpartition(".")[2], len(shape))
            several = math.prod(min(blocks[axis], shape[axis]) for axis in axes) > 1
            whole = all(blocks[axis] >= shape[axis] for axis in axes)
            assert several or whole, f"{preset} {path} {shape}: blocks {blocks}"


def test_per_token_is_per_sample_where_a_kernel_has_several_positions() -> None:
    model = prepare(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)), "INT8_PER_TOKEN")
    shapes = [layer.input_quantizer.spec.granularity.group_shape((2, 4, 9, 9)) for layer in model]
    assert shapes == [(2, 1, 1, 1), (2, 1, 9, 9)]


@pytest.mark.parametrize(
    ("layer", "bits"),
    [
        (nn.Conv2d(64, 64, 3), 4 + 32 / 36),
        (nn.Conv2d(5, 8, 3), 4 + 32 / 45),  # one group of 45, not two of 32 and 13
        (nn.Conv2d(64, 64, 3, groups=64), 4 + 32 / 9),  # one scale for each output channel
        (nn.ConvTranspose2d(64, 64, 3, groups=64), 4 + 32 / 9),
        (nn.Conv1d(3, 8, 5), 4 + 32 / 15),
        (nn.Conv3d(3, 8, 3), 4 + 32 / 40.5),
        (nn.Conv2d(1, 8, (512, 1)), 5.0),  # parts of a long kernel
        (nn.Conv2d(64, 8, 1), 5.0),
        (nn.Conv1d(64, 64, 1, groups=64), None),  # a scale for every weight
        (nn.Linear(1, 64), None),
    ],
    ids=str,
)
def test_groups_of_convolutions_hold_whole_kernels(layer: nn.Module, bits: float | None, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = prepare(nn.Sequential(copy.deepcopy(layer)), "INT4_GROUP32")
    said = [str(warning.message) for warning in caught]
    if bits is None:
        assert type(model[0]) is type(layer)
        assert said[0].startswith("weights stay in float where their scales would take more room than floats: 0;")
        return
    (found,) = map(weight_bits, quantized_weights(model).values())
    assert found.per_weight == pytest.approx(bits, abs=1e-12)
    assert [text.split(" bits")[0] for text in said] == ([f"{bits:.2f}"] if bits > 5 else [])
    save(model, tmp_path, packed=True)
    loaded = load(nn.Sequential(copy.deepcopy(layer)), tmp_path)
    assert_same_bits(loaded[0].quantized_weight(), model[0].quantized_weight())


def test_blocks_of_weight_and_input_lie_along_channels_alike() -> None:
    model = prepare(nn.Sequential(nn.Conv2d(64, 64, 3)), "MXFP4")
    assert model[0].weight_quantizer.spec.granularity.block_shape((64, 64, 3, 3)) == (1, 32, 1, 1)
    assert model[0].input_quantizer.spec.granularity.block_shape((1, 64, 9, 9)) == (1, 32, 1, 1)


class Padded(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, (1, 1, 1, 1)))


class PaddedTransposed(nn.ConvTranspose1d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(F.pad(input, (1, 1)), output_size)


@pytest.mark.parametrize(("cls", "blocks"), [(Padded, (1, 4, 3, 3)), (PaddedTransposed, (11, 1, 3))])
def test_a_registered_subclass_has_the_axes_of_its_torch_layer(cls: type[Any], blocks: tuple[int, ...]) -> None:
    class Quantized(QuantizedLayer, cls):
        pass

    quantizes(cls)(Quantized)
    try:
        model = prepare(nn.Sequential(cls(64, 64, 3)), "INT4_GROUP32")
        shape = tuple(model[0].weight.shape)
        assert model[0].weight_quantizer.spec.granularity.block_shape(shape) == blocks
        assert Quantized.input_reductions == layers()[cls.__bases__[0]].input_reductions
    finally:
        del _layers[cls]
