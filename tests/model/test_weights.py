"""Ranges of weights that are computed when the layer is called, and scales that no longer fit their weights."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError, ShapeError, StaleScaleWarning
from fakequant.model.weights import mark_ranges_current
from tests.support.bits import assert_same_bits

X = torch.linspace(-1, 1, 128).view(16, 8)
COMPUTED = {
    "weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "spectral_norm": lambda layer: nn.utils.spectral_norm(layer),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm-parametrization": lambda layer: parametrizations.weight_norm(layer),
    "spectral_norm-parametrization": lambda layer: parametrizations.spectral_norm(layer),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(compute) -> nn.Sequential:
    """Trained in float with a computed weight, from another start."""
    model = net(1)
    compute(model[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7)
        for _ in range(3):
            model(X)
    return model.eval()


def fresh(compute, preset: str) -> nn.Sequential:
    """The same model built anew and prepared, with the state of the trained one; no call has computed its weight."""
    model = fq.prepare(net(), preset)
    with warnings.catch_warnings(action="ignore"):  # that weight_norm is deprecated
        compute(model[0])
        model.load_state_dict(trained(compute).state_dict())
    return model.eval()


@pytest.mark.parametrize(
    ("preset", "batches"), [("int8", [X]), ("int8_weight_only", [X]), ("int8_weight_only", []), ("int8_per_token", [])]
)
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_a_computed_weight_is_that_of_the_call(compute, preset, batches):
    model, ran_before = fresh(compute, preset), fresh(compute, preset)
    with fq.disabled(ran_before), torch.no_grad():
        ran_before(X)
    for one in (model, ran_before):
        fq.calibrate(one, batches)
    with torch.no_grad(), fq.disabled(model):
        model(X)
    quantizer = model[0]._weight_quantizer
    wanted = fq.choose_qparams(model[0].weight, quantizer.spec)
    assert_same_bits(quantizer.scale, torch.where(wanted.range.amax > 0, wanted.scale, wanted.scale.max()))
    assert_same_bits(quantizer.scale, ran_before[0]._weight_quantizer.scale)


@pytest.mark.parametrize("scales", [fq.qat.Scales.FIXED, fq.qat.Scales.EPOCH, fq.qat.Scales.LEARNED])
def test_scales_for_training_are_those_of_the_computed_weight(scales):
    model, ran_before = (fresh(COMPUTED["spectral_norm"], "int8_weight_only") for _ in range(2))
    with fq.disabled(ran_before), torch.no_grad():
        ran_before(X)
    for one in (model, ran_before):
        fq.qat.set_scales(one, scales)
    with torch.no_grad():
        assert_same_bits(model(X), ran_before(X))


@pytest.mark.parametrize("batches", [[], [X]])
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_a_weight_is_looked_at_without_training(compute, batches, tmp_path):
    """In training mode, looking at a weight with spectral_norm would change the vectors that compute it."""
    model = fresh(compute, "int8_weight_only").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fq.calibrate(model, batches)
    fq.layer_sqnr(model, [X])
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_weight_that_an_unknown_hook_computes_needs_a_batch():
    model = fq.prepare(net(), "int8_weight_only")
    raw = nn.Parameter(model[0].weight.detach().clone())
    del model[0].weight
    model[0].raw = raw
    model[0].weight = raw.detach()
    model[0].register_forward_pre_hook(lambda layer, _: setattr(layer, "weight", 3 * layer.raw))
    with pytest.raises(CalibrationError, match=r"weight of 0 is computed when the layer is called, .* pass batches"):
        fq.calibrate(model)
    fq.calibrate(model, [X])
    quantizer = model[0]._weight_quantizer
    assert_same_bits(quantizer.scale, fq.choose_qparams(3 * raw.detach(), quantizer.spec).scale)


@pytest.mark.parametrize("method", ["max", "entropy", "mse", "percentile"])
def test_a_weight_counts_once_however_many_batches_show_it(method):
    one, three = (fq.prepare(net(), "int8") for _ in range(2))
    used = [fq.calibrate(m, [X] * n, method, weight_method=method) for m, n in ((one, 1), (three, 3))]
    name = "2._weight_quantizer"
    states = [calibrators[name].state_dict() for calibrators in used]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert_same_bits(one[2]._weight_quantizer.scale, three[2]._weight_quantizer.scale)


LATTICES = ("gguf_q4_k", "gguf_q2_k", "gguf_q6_k", "gguf_iq4_nl", "gguf_q4_0", "gguf_tq2_0")


@pytest.mark.parametrize("preset", LATTICES)
def test_scales_on_a_lattice_are_searched_by_calibrate_and_before_training(preset):
    def prepared():
        torch.manual_seed(0)
        return fq.prepare(nn.Sequential(nn.Linear(512, 8), nn.Conv2d(256, 4, 1)), preset)

    models = {name: prepared() for name in ("follows", "default", "mse", "max", "trained")}
    for name, method in (("default", None), ("mse", "hist"), ("max", "max")):
        fq.calibrate(models[name], weight_method=method)
    with pytest.raises(ConfigError, match=r"cannot be learned: .* Train with Scales\.EPOCH"):
        fq.qat.set_scales(models["trained"], fq.qat.Scales.LEARNED)
    fq.qat.set_scales(models["trained"], fq.qat.Scales.EPOCH)
    for layer in range(2):
        held = {name: model[layer].weight_quantizer for name, model in models.items()}
        weight = models["follows"][layer].weight.detach()
        errors = {name: float((q(weight) - weight).square().sum()) for name, q in held.items()}
        assert errors["follows"] == errors["max"]
        assert errors["default"] < 0.9 * errors["max"]
        for name in ("mse", "trained"):
            assert_same_bits(held[name].scale, held["default"].scale)
    assert [fq.summary(one).unsearched for one in models.values()] == [2, 0, 0, 0, 0]
    assert "2 weights have the scales of the largest values; fakequant.calibrate" in str(fq.summary(models["follows"]))


@pytest.mark.parametrize("preset", LATTICES)
def test_groups_of_zeros_get_searched_scales_of_others(preset):
    model = fq.prepare(nn.Sequential(nn.Linear(512, 4)), preset)
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[0].weight[2, 256:288] = 0.0
    quantizer = model[0].weight_quantizer
    fq.calibrate(model)
    assert quantizer.spec.scale.join(quantizer.spec.scale.split(quantizer.scale)).equal(quantizer.scale)
    has_zero = quantizer.spec.offset is None and quantizer.spec.format.has_zero
    assert bool((quantizer.scale != 0).all()) == has_zero
    assert not quantizer(model[0].weight)[model[0].weight == 0].any()


def calibrated(preset: str = "int8") -> nn.Sequential:
    model = fq.prepare(net(), preset)
    fq.calibrate(model, [X])
    return model


def test_the_weights_alone_are_calibrated_by_a_pattern():
    model = calibrated()
    before = model[0]._input_quantizer.scale.clone()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[2].weight.mul_(2)
    used = fq.calibrate(model, pattern="*_weight_quantizer")
    assert sorted(used) == ["0._weight_quantizer", "2._weight_quantizer"]
    for layer in (model[0], model[2]):
        quantizer = layer._weight_quantizer
        assert_same_bits(quantizer.scale, fq.choose_qparams(layer.weight, quantizer.spec).scale)
    assert_same_bits(model[0]._input_quantizer.scale, before)
    assert list(fq.calibrate(model, pattern="0._weight_quantizer")) == ["0._weight_quantizer"]


@pytest.mark.parametrize(
    ("preset", "factor"),
    [
        *(("int8", 1.2), ("int4_group32", 0.8), ("int8_weight_only", 1.2)),
        *(("int8", 0.8), ("int4_group32", 1.2), ("int8_weight_only", 0.8)),
    ],
)
def test_every_function_that_relies_on_a_stale_scale_says_so_once(preset, factor, tmp_path):
    uses = {
        "summary": fq.summary,
        "save": lambda model: fq.save(model, tmp_path),
        "layer_sqnr": lambda model: fq.layer_sqnr(model, [X]),
        "sensitivity": lambda model: fq.sensitivity(model, [X]),
        "bake_weights": fq.bake_weights,
        "export_onnx": lambda model: fq.export_onnx(model, X, tmp_path / "model.onnx"),
    }
    for name, use in uses.items():
        model = calibrated(preset)
        with torch.no_grad():
            model[2].weight[1] *= factor
        with pytest.warns(StaleScaleWarning) as said:
            use(model)
        assert len(said) == 1, name
        assert said[0].filename == __file__
        assert str(said[0].message) == (
            "the weight of 1 layer changed by more than 10 % or in shape since the scales were set: 2. Set the "
            'scales anew by fakequant.calibrate(model, pattern="*_weight_quantizer"), which needs no batches'
        )
        model = calibrated(preset)
        with torch.no_grad():
            model[2].weight[1] *= factor
        fq.calibrate(model, pattern="*_weight_quantizer")
        with warnings.catch_warnings(action="error"):
            use(model)


def silent(model: nn.Module) -> None:
    with warnings.catch_warnings(action="error"):
        fq.summary(model)


def test_drift_of_training_learned_scales_and_loaded_ones_are_silent():
    model = calibrated()
    with torch.no_grad():
        model[2].weight.mul_(1.09)
    silent(model)
    other = calibrated()
    with torch.no_grad():
        other[2].weight.mul_(3)
    other.load_state_dict(model.state_dict())
    silent(other)
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    with torch.no_grad():
        model[2].weight.mul_(3)
    silent(model)
    fq.qat.set_scales(model, fq.qat.Scales.EPOCH)
    silent(model)
    silent(fq.prepare(net(), "int8"))
    half = calibrated().half()
    silent(half)


def test_copies_remember_and_a_float_checkpoint_is_noticed():
    model = copy.deepcopy(calibrated())
    model.load_state_dict({name: 2 * value for name, value in net().state_dict().items()}, strict=False)
    with pytest.warns(StaleScaleWarning, match="^the weights of 2 layers changed .*: 0, 2"):
        fq.summary(model)


def test_a_loaded_model_is_watched_from_then_on(tmp_path):
    model = fq.load(net(), fq.save(calibrated(), tmp_path))
    silent(model)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.warns(StaleScaleWarning, match="since the scales were set: 2"):
        fq.summary(model)


def test_a_weight_of_another_shape_says_how_to_calibrate_it():
    model = fq.prepare(nn.Sequential(nn.Embedding(10, 4)), fq.presets.INT8_WEIGHT_ONLY)
    fq.calibrate(model)
    model[0].weight.data = torch.cat([model[0].weight.data, torch.ones(3, 4)])
    with pytest.warns(StaleScaleWarning):
        fq.summary(model)
    with pytest.raises(ShapeError, match=r"weight changed its shape .*pattern='0\._weight_quantizer'\)"):
        model(torch.arange(13))
    fq.calibrate(model, pattern="0._weight_quantizer")
    assert model(torch.arange(13)).shape == (13, 4)


def test_training_under_fixed_scales_leaves_none_stale():
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), "int8")
    batches = [(torch.ones(2, 4), torch.full((2, 2), 50.0))]
    fq.calibrate(model, batches)
    before = model[0].weight.detach().clone()
    fq.qat.finetune(model, batches, nn.functional.mse_loss, fq.qat.Schedule(original_lr=1.0, original_epochs=20))
    assert ((model[0].weight.detach() - before).abs() > 0.1 * before.abs().max()).any()
    with warnings.catch_warnings(action="error"):
        fq.summary(model)
    with torch.no_grad():
        model[0].weight *= 2
    with pytest.warns(StaleScaleWarning, match="since the scales were set: 0") as said:
        fq.summary(model)
    assert said[0].filename == __file__


@pytest.mark.parametrize(("factor", "stay"), [(1.0, True), (1.05, False)])
def test_codes_that_are_not_those_of_the_weight_are_released(factor: float, stay: bool) -> None:
    model = fq.prepare(net(), fq.Config(fq.Rule(weight="int4 per_channel(0)")))
    fq.calibrate(model)
    quantizer = model[0].weight_quantizer
    quantizer.fix_codes(torch.zeros(16, 8, dtype=torch.int8), model[0].weight)
    with torch.no_grad():
        model[0].weight.add_(factor - 1.0)
    mark_ranges_current(model)
    assert (quantizer.fixed_codes is not None) is stay
