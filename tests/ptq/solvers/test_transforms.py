"""Transforms of inputs: the float function stays, and files, copies and compilers keep them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError
from fakequant.model.weights import disabled
from fakequant.nn import BlockHadamard, ChannelScale, InputTransform, ScaledHadamard
from fakequant.nn.transforms import Permutation, make_transform
from fakequant.ptq.solvers.transforms import transform
from tests.support.bits import assert_same_bits

LAYERS = {
    "linear": (nn.Linear(32, 6), (5, 32)),
    "conv1d": (nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "conv2d groups": (nn.Conv2d(8, 6, 3, groups=2, padding=1), (2, 8, 5, 5)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 5)),
}


def transformed(name: str, kind: str) -> tuple[Any, Tensor]:
    """A quantized layer whose input is transformed, and an input."""
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    model = fq.prepare(nn.Sequential(copy.deepcopy(layer)), "int8")
    x = torch.randn(shape)
    fq.calibrate(model, [x], progress=False)
    with torch.no_grad():
        own = make_transform(kind, model[0], **({"block": 16} if "hadamard" in kind else {}))
        if isinstance(own, ChannelScale | ScaledHadamard):
            own.scale.copy_(torch.rand(own.scale.shape) + 0.5)
        if isinstance(own, Permutation):
            own.order.copy_(torch.randperm(len(own.order)))
        model[0].weight.copy_(own.into_weight(model[0], model[0].weight))
    model[0].input_transform = own
    fq.calibrate(model, [x], progress=False)
    return model, x


KINDS = [(name, "channel_scale") for name in LAYERS] + [("linear", "block_hadamard"), ("linear", "scaled_hadamard")]


@pytest.mark.parametrize(("name", "kind"), [*KINDS, ("linear", "permutation")])
def test_the_float_function_stays_and_its_state_is_without_transforms(name: str, kind: str) -> None:
    model, x = transformed(name, kind)
    torch.testing.assert_close(fq.float_state_dict(model)["0.weight"], LAYERS[name][0].weight.detach())
    with disabled(model):
        torch.testing.assert_close(model(x), LAYERS[name][0](x), rtol=1e-5, atol=1e-6)
    own = model[0].quantized_input(x)
    assert_same_bits(own, model[0].input_quantizer(model[0].input_transform(x)))


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_copies_files_and_compilers_keep_it(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, x = transformed(name, kind)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(other(x), y)
    loaded = fq.load(nn.Sequential(copy.deepcopy(LAYERS[name][0])), fq.save(model, tmp_path / "saved"))
    assert_same_bits(loaded(x), y)
    exported = torch.export.export(model, (x,)).module()
    assert_same_bits(exported(x), y)
    assert_same_bits(torch.compile(model, backend="aot_eager", fullgraph=True)(x), y)
    fq.export_onnx(model, x, tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model, [x]).exact


def test_integer_execution_encodes_the_transformed_input() -> None:
    model, x = transformed("linear", "channel_scale")
    fq.set_execution(model, "integer")
    codes, params = model[0].input_quantizer.codes(model[0].input_transform(x))
    weight = model[0].quantized_weight()
    wanted = torch.nn.functional.linear(codes.float() * params.scale, weight, model[0].bias)
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)


def test_a_new_kind_is_one_class(tmp_path: Path) -> None:
    class Negated(InputTransform):
        kind = "negated"

        @classmethod
        def of(cls, layer: Any, **options: int) -> Negated:
            return cls()

        def forward(self, x: Tensor) -> Tensor:
            return -x

        def into_weight(self, layer: Any, weight: Tensor) -> Tensor:
            return -weight

    try:
        model, x = transformed("linear", "negated")
        loaded = fq.load(nn.Sequential(nn.Linear(32, 6)), fq.save(model, tmp_path))
        assert_same_bits(loaded(x), model(x))
    finally:
        del InputTransform._kinds["negated"]
    with pytest.raises(CheckpointError, match="unknown transform 'negated'"):
        fq.load(nn.Sequential(nn.Linear(32, 6)), tmp_path)


def test_what_fits_no_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks of 64 does not fit the 32 features"):
        make_transform("block_hadamard", LAYERS["linear"][0], block=64)
    with pytest.raises(ConfigError, match="blocks of 2 does not fit"):
        make_transform("block_hadamard", LAYERS["conv1d"][0], block=2)
    with pytest.raises(ConfigError, match="unknown transform 'channel_scales'; did you mean channel_scale"):
        make_transform("channel_scales", LAYERS["linear"][0])
    with pytest.raises(ConfigError, match="has no option 'blocks'"):
        make_transform("block_hadamard", LAYERS["linear"][0], blocks=2)


def outliers(size: float = 100.0) -> list[Tensor]:
    """Inputs [rows, 64] with three channels that are larger."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.ones(64)
    scale[[3, 20, 41]] = size
    return [torch.randn(64, 64, generator=generator) * scale for _ in range(4)]


def with_outliers(input: str, size: float = 100.0) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(64, 32)
    with torch.no_grad():
        net.weight[:, [3, 20, 41]] /= size  # as in trained models: what is large matters no more than the rest
    config = fq.Config("test", (fq.Rule(weight="int8 per_channel(0)", input=input),))
    model = fq.prepare(nn.Sequential(net), config)
    fq.calibrate(model, outliers(size), progress=False)
    return model


@pytest.mark.parametrize("batches", [outliers(), [torch.cat(outliers())]], ids=["four", "one"])
def test_smoothing_takes_away_what_outliers_cost(batches: list[Tensor]) -> None:
    model = with_outliers("int8")
    found = transform(model[0].products(), [[x] for x in batches], ["smooth"])
    assert isinstance(model[0].input_transform, ChannelScale)
    assert found.after < 0.01 * found.before


def test_rotations_spread_outliers() -> None:
    model = with_outliers("int4 per_token dynamic", 10.0)
    found = transform(model[0].products(), [[x] for x in outliers(10.0)], ["rotate"])
    assert isinstance(model[0].input_transform, BlockHadamard)
    assert found.after < 0.5 * found.before


def test_a_rotation_under_a_fixed_range_is_judged_by_all_inputs() -> None:
    model = with_outliers("int8", 4.0)
    found = transform(model[0].products(), [[x] for x in outliers(4.0)], ["rotate"])
    assert isinstance(model[0].input_transform, BlockHadamard)
    assert found.after < 0.8 * found.before


def heavy_tails(rows: int, seed: int) -> Tensor:
    """Inputs [rows, 128] by Student's t, with every 16th channel five times as large."""
    generator = torch.Generator().manual_seed(seed)
    normal, squares = torch.randn(rows, 128, generator=generator), torch.randn(4, rows, 128, generator=generator)
    scale = torch.ones(128)
    scale[::16] = 5.0
    return normal / squares.square().mean(0).sqrt() * scale


def error_after(steps: list[str]) -> tuple[float, type]:
    """The share of new outputs of a layer with 4-bit inputs that is lost, and the transform that was chosen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 128))
    config = fq.Config("test", (fq.Rule(weight="int4 per_channel(0)", input="int4 per_token dynamic"),))
    model = fq.prepare(copy.deepcopy(net), config)
    fq.ptq.improve(model, [heavy_tails(128, seed) for seed in range(4)], steps, progress=False)
    new = heavy_tails(2000, 9)
    with torch.no_grad():
        wanted = net(new)
        return float((model(new) - wanted).square().sum() / wanted.square().sum()), type(model[0].input_transform)


def test_transforms_are_judged_together() -> None:
    (smooth, _), (rotate, _), (both, chosen) = map(error_after, (["smooth"], ["rotate"], ["smooth", "rotate"]))
    assert chosen is ScaledHadamard
    assert rotate < 0.65 * smooth
    assert both < 0.85 * rotate


def test_what_does_not_help_is_not_done() -> None:
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 32)), "int8")
    inputs = [[torch.rand(64, 64) * 2 - 1] for _ in range(4)]
    fq.calibrate(model, [x for (x,) in inputs], progress=False)
    before = model[0].weight.clone()
    for steps in (["smooth"], ["rotate"], ["smooth", "rotate"]):
        found = transform(model[0].products(), inputs, steps)
        assert found.transform is None
        assert found.before == found.after
    assert model[0].input_transform is None
    assert_same_bits(model[0].weight, before)


class Block(nn.Module):
    """A feed-forward block whose inputs have outlier channels, with siblings that read one tensor."""

    def __init__(self, size: float = 100.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.up, self.gate, self.down = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        with torch.no_grad():
            self.norm.weight[[3, 20, 41]] *= size
            for layer in (self.up, self.gate):
                layer.weight[:, [3, 20, 41]] /= size

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(torch.nn.functional.gelu(self.gate(x)) * self.up(x))


def agreement(model: nn.Module) -> float:
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return 100 * float((model(x).argmax(-1) == Block()(x).argmax(-1)).float().mean())


def test_int8_of_a_block_with_outlier_channels_is_as_good_as_without() -> None:
    given = [torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    found = []
    for size, steps in ((1.0, None), (100.0, None), (100.0, ["smooth"]), (100.0, "fast")):
        model = fq.prepare(Block(size), "int8")
        fq.calibrate(model, given, progress=False)
        if steps is not None:
            result = fq.ptq.improve(model, given, steps, progress=False)
            assert steps != "fast" or all(layer.after < 1.2e-3 for layer in result.layers)
        found.append(agreement(model))
    plain, spoilt, smoothed, improved = found
    assert spoilt < plain - 50
    assert smoothed > spoilt + 50
    assert improved > plain - 0.5
    assert type(model.up.input_transform) is ChannelScale
    assert_same_bits(model.up.input_transform.scale, model.gate.input_transform.scale)
    assert_same_bits(model.up.input_quantizer.scale, model.gate.input_quantizer.scale)


@pytest.mark.parametrize(("step", "rows", "seed"), [("smooth", 4, 0), ("smooth", 16, 1), ("input", 8, 4)])
def test_what_a_few_batches_alone_would_win_is_not_done(step: str, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    few, new = (
        [torch.randn(rows, 16, generator=generator) for _ in range(4)],
        torch.randn(4000, 16, generator=generator),
    )
    few, new = [x * x.abs() for x in few], new * new.abs()
    torch.manual_seed(seed)
    net = nn.Linear(16, 8)
    config = fq.Config("test", (fq.Rule(weight="int8 per_channel(0)", input="int8"),))
    model = fq.prepare(nn.Sequential(copy.deepcopy(net)), config)
    fq.calibrate(model, few, "max", progress=False)
    with torch.no_grad():
        before = (model(new) - net(new)).square().sum()
        fq.ptq.improve(model, few, [step], progress=False)
        assert (model(new) - net(new)).square().sum() <= before
