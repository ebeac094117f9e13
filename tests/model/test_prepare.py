import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

import fakequant as fq
from fakequant import choose_qparams
from fakequant.calibration import calibrators
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model import presets
from fakequant.model.bake import bake_weights
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Rule
from fakequant.model.prepare import prepare
from fakequant.model.weights import disabled
from fakequant.nn import Mode, quantizers
from tests.support.copies import each_copier
from tests.support.models import SmallNet, hook_forward, images, small_net


def calibrated(config: Any = presets.INT8, method: str = "max") -> SmallNet:
    model = prepare(small_net(), config)
    calibrate(model, [images(), images(seed=2)], method)
    return model


@pytest.mark.parametrize("method", calibrators())
def test_every_method_calibrates_every_quantizer(method: str) -> None:
    model = calibrated(method=method)
    assert all(q.calibrated for q in quantizers(model).values())
    exact = small_net()(images())
    error = (model(images()) - exact).norm() / exact.norm()
    assert 0 < error < 0.2


def test_calibration_sees_the_float_model() -> None:
    """Later layers must not see the quantization error of earlier ones, nor the labels or the training mode."""
    model = prepare(small_net().train(), presets.INT4)
    calibrate(model, [(images(), torch.zeros(4))], "max")
    assert model.training
    assert model.norm.training
    assert torch.equal(model.norm.running_mean, torch.zeros(8))
    seen = []
    reference = small_net()
    reference.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    reference(images())
    quantizer = model.head._input_quantizer
    assert torch.equal(quantizer.scale, choose_qparams(seen[0], quantizer.spec).scale)


def test_weights_are_calibrated_without_batches() -> None:
    model = prepare(small_net(), presets.INT8_WEIGHT_ONLY)
    used = calibrate(model, weight_method="mse")
    assert set(used) == set(quantizers(model))
    assert all(q.calibrated for q in quantizers(model).values())


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.spare = nn.Linear(2, 2)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_unseen_quantizers_are_all_named_and_nothing_changes() -> None:
    model = prepare(TwoPaths(), presets.INT8)
    with pytest.raises(CalibrationError, match=r"2 of 3 .* saw no data: spare\._input_quantizer, idle\._input_quant"):
        calibrate(model, [torch.ones(1, 2)], "max")
    assert not any(q.calibrated for q in quantizers(model).values())
    assert all(q.mode is Mode.QUANTIZE and q.calibrator is None for q in quantizers(model).values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("method", calibrators())
def test_a_bad_batch_names_the_quantizer_and_changes_nothing(bad: float, method: str) -> None:
    model = calibrated()
    before = copy.deepcopy(model.state_dict())
    batch = images()
    batch[0, 0, 0, 0] = bad
    with pytest.raises(CalibrationError, match=r"^stem\._input_quantizer: "):
        calibrate(model, [images(), batch], method)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(q.mode is Mode.QUANTIZE for q in quantizers(model).values())


@each_copier
def test_copies_compute_the_same(copier: Callable[[nn.Module], nn.Module]) -> None:
    model = calibrated()
    assert torch.equal(copier(model)(images()), model(images()))


@pytest.mark.parametrize("name", sorted(presets.presets()))
def test_state_dict_goes_into_a_fresh_prepared_model(name: str) -> None:
    config = presets.presets()[name]
    model = calibrated(config)
    fresh = prepare(small_net(), config)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(images()), model(images()))


def test_disabled_is_the_float_model() -> None:
    model = calibrated()
    with disabled(model):
        assert torch.equal(model(images()), small_net()(images()))
    assert not torch.equal(model(images()), small_net()(images()))


@pytest.mark.parametrize(
    "config", [presets.INT8, pytest.param(presets.FP8, marks=pytest.mark.exhaustive)], ids=["INT8", "FP8"]
)
def test_compile_and_export_compute_the_same(config: Any) -> None:
    model = calibrated(config.with_rule(Rule("product")))
    expected = model(images())
    # The products themselves may be fused or reordered by the compiler, hence the tolerance of one float32 sum.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(images())
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    assert torch.equal(program.module()(images(7)), model(images(7)))
    count = sum(n.target is torch.ops.fakequant.fake_quantize.default for n in program.graph.nodes)
    assert count == len(quantizers(model))


def test_half_precision_model() -> None:
    model = calibrated().bfloat16()
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert all(q.scale.dtype == torch.float32 for q in quantizers(model).values())


def test_autocast() -> None:
    model = calibrated()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images()).shape == (4, 10)


def test_fold_refuses_a_quantizer_that_is_off() -> None:
    model = calibrated()
    with disabled(model), pytest.raises(ConfigError, match="stem: the mode of the weight quantizer is 'off'"):
        bake_weights(model)
    assert model.stem._weight_quantizer is not None


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


COMPUTED_WEIGHTS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "pruning": (
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        lambda layer: prune.remove(layer, "weight"),
    ),
    "parametrization": (
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED_WEIGHTS)
def test_fold_refuses_a_computed_weight_until_it_is_made_permanent(kind: str) -> None:
    """The next forward pass would compute the weight anew, in float."""
    compute, make_permanent = COMPUTED_WEIGHTS[kind]
    model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), presets.INT4_WEIGHT_ONLY)
    calibrate(model)
    compute(model[1])
    x = torch.ones(2, 4)
    expected = model(x)
    with pytest.raises(ConfigError, match=r"^1: the weight is computed .* make it a parameter first"):
        bake_weights(model)
    assert model[0]._weight_quantizer is not None
    assert torch.equal(model(x), expected)
    make_permanent(model[1])
    assert torch.equal(bake_weights(model)(x), expected)


def test_a_forward_that_would_bypass_the_quantizers_is_refused() -> None:
    model = small_net()
    hook_forward(model.head)
    with pytest.raises(
        ConfigError, match=r"^head: its forward was replaced, .* remove the hook, or leave the layer in"
    ):
        prepare(model, presets.INT8)
    assert quantizers(model) == {}
    prepare(model, presets.INT8.with_rule(Rule("head")))
    assert type(model.head) is nn.Linear


def test_weight_options() -> None:
    model = prepare(small_net(), presets.INT8)
    calibrate(model, [images()], "max", weight_method="percentile", weight_options={"percentile": 50.0})
    assert (model.head._weight_quantizer.scale < calibrated().head._weight_quantizer.scale).all()


def test_lazy_layers_are_told_before_the_example_runs() -> None:
    with pytest.raises(
        ConfigError, match=r"^0: its parameters have no shapes before the first call; call the model once"
    ):
        prepare(nn.Sequential(nn.LazyLinear(4)), presets.INT8, torch.ones(2, 4))


class Packed(nn.Module):
    """A layer like those of GPTQ and AWQ: integers beside scales."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(1, 4))

    def forward(self, x):
        return x @ (self.qweight * self.scales)


def with_subclass():
    layer = nn.Linear(4, 4)
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    return layer


def with_integers():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("make", "held"),
    [
        (with_subclass, "weight is a torch.TwoTensor"),
        (with_integers, "weight holds int8 codes"),
        (Packed, "qweight holds int32 codes"),
    ],
)
def test_what_another_library_quantized_is_refused(make, held):
    model = nn.Sequential(nn.Linear(4, 4), make())
    with pytest.raises(ConfigError, match=rf"^1 is quantized already, by another library: its {held}.*skip=\['1'\]"):
        fq.prepare(model, "int8")
    assert type(model[0]) is nn.Linear
    fq.prepare(model, presets.INT8.with_rule(Rule("1", optional=True)))
    assert list(fq.nn.quantizers(model)) == ["0._input_quantizer", "0._weight_quantizer"]


def test_integers_that_are_no_codes_are_not_taken_for_some():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("logit_scale", torch.ones(1))  # scales beside integers make them codes, if the rest fits
    model.register_buffer("relative_position_index", torch.ones(4, 4, dtype=torch.int32))  # no weight by its name
    model.register_buffer("weight_index", torch.ones(4, 4, dtype=torch.int64))  # indices
    model[0].register_buffer("mask", torch.ones(4, 4, dtype=torch.uint8))
    model[0].register_buffer("weight_order", torch.ones(4, 4, dtype=torch.int32))  # no scales beside it
    fq.prepare(model, "int8")
