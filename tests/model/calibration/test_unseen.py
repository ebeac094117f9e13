"""Layers that no calibration batch reached: what is said of them, and what becomes of them."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError, CoverageWarning
from fakequant.nn import Mode, quantizers
from tests.support.bits import assert_same_bits
from tests.support.calibrators import MERGEABLE

X = torch.linspace(-1, 1, 128).view(16, 8)


class Mixture(nn.Module):
    """Experts of which one gets nothing, one gets an empty batch; a layer that is read, and one that is idle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(8, 8)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)])
        self.idle = nn.Linear(8, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.read.weight, self.read.bias)
        return self.head(self.experts[0](x) + self.experts[1](3 * x) + self.experts[2](x[:0]).sum())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + self.experts[2](-3 * x)


@pytest.mark.parametrize("unseen", ["error", "float", "siblings"])
def test_without_batches_the_error_says_so(unseen):
    with pytest.raises(CalibrationError, match=r"^11 of 11 input quantizers saw no data, because .* no batches"):
        fq.calibrate(fq.prepare(Mixture(), "int8"), iter([]), unseen=unseen)


def test_a_mapping_is_one_batch():
    with pytest.raises(ConfigError, match=r"a mapping is one batch; give a list: \[mapping\]"):
        fq.calibrate(fq.prepare(Mixture(), "int8"), {"x": X})


def test_an_error_says_why_each_layer_saw_nothing_and_what_to_do():
    model = fq.prepare(Mixture(), "int8")
    with pytest.raises(CalibrationError) as error:
        fq.calibrate(model, [X])
    text = str(error.value)
    assert text.startswith("6 of 11 input quantizers saw no data: read._input_quantizer, experts.2.0._input_quantizer")
    assert "the weight of read is used by the model without calling the layer" in text
    assert "only empty tensors reach experts.2.0, experts.2.2" in text
    assert "no batch reaches experts.3.0, experts.3.2, idle" in text
    assert 'call fakequant.calibrate(model, batches, unseen="float") to leave the layers in float' in text
    assert 'unseen="siblings" for the ranges of the layers beside them, such as experts.0.0' in text
    rules = text[text.index("Rule(") :]
    names = ["read", "experts.2.0", "experts.2.2", "experts.3.0", "experts.3.2", "idle"]
    assert rules == ", ".join(f'Rule("{name}")' for name in names)
    pasted = fq.presets.INT8.with_rule(*eval(f"[{rules}]", {"Rule": fq.Rule}))
    model = fq.prepare(Mixture(), pasted)
    fq.calibrate(model, [X])
    assert torch.isfinite(model(X)).all()


def test_layers_left_in_float_stay_so_everywhere(tmp_path):
    model = fq.prepare(Mixture(), "int8")
    fq.set_execution(model, "auto")
    with pytest.warns(CalibrationWarning) as said:
        used = fq.calibrate(model, [X], unseen="float")
    assert len(said) == 1
    assert str(said[0].message).startswith("6 layers are left in float: the weight of read is used by the model")
    assert said[0].filename == __file__
    kept = ["experts.0.0", "experts.0.2", "experts.1.0", "experts.1.2", "head"]
    assert sorted({name.rpartition(".")[0] for name in quantizers(model)}) == kept
    assert set(used) == set(quantizers(model))
    by_rules = fq.prepare(
        Mixture(), fq.Config("rest", tuple(fq.Rule(n, input="int8", weight="int8 per_channel(0)") for n in kept))
    )
    fq.calibrate(by_rules, [X])
    fq.set_execution(by_rules, "auto")
    assert_same_bits(model(X), by_rules(X))
    assert_same_bits(fq.load(Mixture(), fq.save(model, tmp_path))(X), model(X))
    rows = {row[0]: row for row in fq.summary(model).rows()}
    assert rows["idle"][2:4] == ("float", "float")
    assert set(fq.layer_sqnr(model, [X])) == set(quantizers(model))
    fq.bake_weights(model)


@pytest.mark.parametrize("preset", ["int8_per_token", "mxfp4", "int8_weight_only"])
def test_a_weight_that_is_read_is_said_where_nothing_needs_data_too(preset):
    model = fq.prepare(Mixture(), preset)
    one, x = fq.prepare(Mixture(), preset), X
    with pytest.warns(CoverageWarning, match=r'^1 layer .*: the weight of read is used by .*Rule\("read"\)') as said:
        used = fq.calibrate(one, [x])
    assert [w.filename for w in said] == [__file__] * len(said)
    assert not any(name.startswith("read.") for name in (*quantizers(one), *used))
    assert {row[0]: row[2:4] for row in fq.summary(one).rows()}["read"] == ("float", "float")
    with pytest.warns(CalibrationWarning, match="4 layers are left in float: .* read .* experts.3.2, idle"):
        fq.calibrate(model, [X], unseen="float")
    assert not any(name.startswith(("read", "idle", "experts.3")) for name in quantizers(model))
    fq.calibrate(fq.prepare(Mixture(), preset))  # without batches nothing is known of calls


def test_a_layer_that_needs_no_data_and_is_not_reached_is_told():
    model = fq.prepare(Experts(), "int8_weight_only")
    with pytest.warns(CalibrationWarning, match=r"2 layers are never called, .* no batch reaches experts\.1\.0, exp"):
        fq.calibrate(model, [X])
    assert all(quantizer.calibrated for quantizer in quantizers(model).values())


def test_batches_run_only_until_every_layer_was_called():
    model, ran = fq.prepare(Experts(), "int8_weight_only"), []

    def forward(model, names):
        ran.append(names)
        for name in names:
            model.experts[name](X)

    fq.calibrate(model, [[0], [1, 0], [2], [0]], forward=forward)
    assert ran == [[0], [1, 0], [2]]


@pytest.mark.parametrize("method", ["max", "entropy"])
def test_siblings_lend_what_they_saw(method):
    model = fq.prepare(Experts(), "int8")
    with pytest.warns(CalibrationWarning) as said:
        used = fq.calibrate(model, [X], method, unseen="siblings")
    assert [str(one.message) for one in said] == [
        "no batch reached 2 input quantizers, which get the ranges of their siblings: "
        "experts.1.0._input_quantizer (from 2), experts.1.2._input_quantizer (from 2)"
    ]
    assert set(used) == set(quantizers(model))
    alone = fq.prepare(nn.Sequential(nn.Linear(8, 8)), "int8")
    fq.calibrate(alone, [X, -3 * X], method)
    assert_same_bits(model.experts[1][0]._input_quantizer.scale, alone[0]._input_quantizer.scale)
    fq.sensitivity(model, [X])


def test_siblings_lend_nothing_that_does_not_merge():
    model = fq.prepare(Experts(), "int8")
    with pytest.raises(ConfigError, match=rf'^unseen="siblings" merges .* use one of {", ".join(MERGEABLE)}$'):
        fq.calibrate(model, [X], "moving_average", unseen="siblings")
    assert not any(quantizer.calibrated for quantizer in quantizers(model).values())


def test_siblings_do_not_help_where_there_are_none():
    model = fq.prepare(Mixture(), "int8")
    match = r"2 of 11 input quantizers .* read.* idle"
    with warnings.catch_warnings(action="error"), pytest.raises(CalibrationError, match=match):
        fq.calibrate(model, [X], unseen="siblings")
    assert not any(quantizer.calibrated for quantizer in quantizers(model).values())


def test_a_quantizer_in_a_module_of_your_own_is_turned_off():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantizer = fq.nn.Quantizer("int8")

        def forward(self, x: Tensor) -> Tensor:
            return self.quantizer(x)

    model = fq.prepare(nn.ModuleDict({"used": nn.Linear(8, 8)}), "int8")
    model["own"] = Own()
    with pytest.warns(CalibrationWarning, match="1 layer is left in float: no batch reaches own"):
        fq.calibrate(model, [X], unseen="float", forward=lambda model, x: model["used"](x))
    assert model["own"].quantizer.mode is Mode.OFF
    assert torch.equal(model["own"](X), X)


def test_an_unknown_choice():
    with pytest.raises(ConfigError, match="unseen cannot be 'flaot'; did you mean float"):
        fq.calibrate(fq.prepare(Experts(), "int8"), [X], unseen="flaot")


class Branches(nn.Module):
    """The second input of the model, and one of the experts, get zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.experts[0](self.a(x)) + self.experts[1](self.b.bias.sum() * y[:, :4]) + self.b(y)


ZEROS = [(X, torch.zeros_like(X))] * 2


@pytest.mark.parametrize("method", ["max", "mse", "percentile", "entropy", "moving_average"])
@pytest.mark.parametrize("preset", ["int8", "int8_affine", "fp8"])
def test_inputs_that_are_always_zero_are_named_and_stay_in_float(method, preset, tmp_path):
    model = fq.prepare(Branches(), preset)
    with pytest.warns(CalibrationWarning, match=r"zero in every batch.*: b\._input_quantizer, experts\.1\._input_q"):
        used = fq.calibrate(model, ZEROS, method)
    assert "b._input_quantizer" not in used
    for layer in (model.b, model.experts[1]):
        assert layer.input_quantizer.mode is Mode.OFF
        assert layer.input_quantizer.scale is None
        assert layer.weight_quantizer.calibrated
    rows = {row.name: row.quantizers for row in fq.summary(model, ZEROS[0]).layers}
    assert rows["b"]["_input_quantizer"] == "float"
    file = fq.export_onnx(model, ZEROS[0], tmp_path / "model.onnx").path if method == "max" else None
    assert file is None or fq.verify_onnx(file, model).exact
    fq.save(model, tmp_path / "saved")
    assert_same_bits(fq.load(Branches(), tmp_path / "saved")(X, X), model(X, X))
    with warnings.catch_warnings(action="error"):
        fq.calibrate(model, [(X, X)], method)
    assert model.b.input_quantizer.mode is Mode.QUANTIZE
    assert model.b.input_quantizer.calibrated


def test_layers_with_zero_inputs_are_left_in_float_or_get_the_ranges_of_siblings():
    model = fq.prepare(Branches(), "int8")
    with pytest.warns(CalibrationWarning, match="zero in every batch"):
        fq.calibrate(model, ZEROS, unseen="float")
    assert model.b.input_quantizer is None
    assert model.b.weight_quantizer is None
    model = fq.prepare(Branches(), "int8")
    with pytest.warns(CalibrationWarning, match=r"experts\.1\._input_quantizer, which gets the range of 1 siblings"):
        fq.calibrate(model, ZEROS, unseen="siblings")
    first, second = (expert.input_quantizer for expert in model.experts)
    assert_same_bits(second.scale, first.scale)
    assert second.mode is Mode.QUANTIZE
    assert model.b.input_quantizer.mode is Mode.OFF


def test_zero_inputs_of_functions():
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y.mT

    model = fq.prepare(Sum(), fq.Config(fq.Rule("*", input="int8", ops=("matmul",))), ZEROS[0])
    with pytest.warns(CalibrationWarning, match="zero in every batch"):
        fq.calibrate(model, ZEROS)
    modes = [quantizer.mode for quantizer in quantizers(model).values()]
    assert modes == [Mode.QUANTIZE, Mode.OFF]
    assert torch.isfinite(model(X, X)).all()


def test_a_channel_of_zeros_gets_the_range_of_the_others():
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), fq.Config(fq.Rule("*", input="int8 per_channel(-1)")))
    x = X.clone()
    x[:, 3] = 0
    fq.calibrate(model, [x], "max")
    scale = model[0].input_quantizer.scale.flatten()
    assert scale[3] == scale.max()


class Reads(nn.Module):
    """Calls a layer on some batches; on those of one row it may read the layer's weight."""

    def __init__(self, use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 8)
        self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use = use

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        ids = self.table(x.argmax(-1))
        return self.out(self.use(self, x + ids) if x.shape[0] == 1 or flag else self.kv(x + ids))


READS = {
    "absorbed": ("kv", lambda m, x: torch.einsum("bd,od->bo", x, m.kv.weight)),
    "matmul": ("kv", lambda m, x: x @ m.kv.weight.T),
    "detached": ("kv", lambda m, x: F.linear(x, m.kv.weight.detach())),
    "joined": ("kv", lambda m, x: torch.cat([x, x], 1) @ torch.cat([m.kv.weight, m.kv.weight], 1).T),
    "called-too": ("kv", lambda m, x: m.kv(x) + F.linear(x, weight=m.kv.weight.float())),
    "tied-head": ("table", lambda m, x: F.linear(m.kv(x), m.table.weight)),
    "cosine-head": ("out", lambda m, x: F.linear(F.normalize(x), F.normalize(m.out.weight))),
}
GLANCES = {
    "bias": lambda m, x: m.kv(x) + m.kv.bias,
    "shape": lambda m, x: m.kv(x.to(m.kv.weight.device)) * m.kv.weight.size(1) * m.kv.weight.dim(),
    "dtype": lambda m, x: m.kv(x.to(m.kv.weight.dtype)) * m.kv.weight.shape[0],
    "to-like": lambda m, x: m.kv(x.to(m.kv.weight).type_as(m.kv.weight)),
    "zeros-like": lambda m, x: m.kv(x) + torch.zeros_like(m.kv.weight)[:1] + m.kv.weight.new_zeros(1),
}
ROWS = [X, X[:1]]


@pytest.mark.parametrize("batches", [ROWS, ROWS[::-1], [X, X, {"x": X, "flag": True}, X]])
@pytest.mark.parametrize(("layer", "use"), READS.values(), ids=READS)
def test_a_called_layer_whose_weight_is_read_too_is_told(layer, use, batches):
    model = fq.prepare(Reads(use), "int8")
    with pytest.warns(CoverageWarning) as said:
        fq.calibrate(model, batches)
    assert [str(one.message) for one in said] == [
        f"the weight of {layer} is used by the model without calling the layer; this use is in float, and calls of "
        "the layer are quantized. Call the layer there, too, or leave it in float everywhere by the rules "
        f'Rule("{layer}")'
    ]
    assert said[0].filename == __file__
    model = fq.prepare(Reads(use), fq.presets.INT8.with_rule(fq.Rule(layer)))
    with warnings.catch_warnings(action="error"):
        fq.calibrate(model, batches)


@pytest.mark.parametrize("use", GLANCES.values(), ids=GLANCES)
def test_what_does_not_use_the_weight_of_a_called_layer_is_not_told(use):
    model = fq.prepare(Reads(use), "int8")
    with warnings.catch_warnings(action="error"):
        fq.calibrate(model, ROWS)


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_a_read_that_a_function_quantizes_is_not_told(target):
    model = fq.prepare(Reads(lambda m, x: m.kv(x) + F.linear(x, m.kv.weight)), "int8", X[:1], target=target)
    with warnings.catch_warnings(action="error"):
        fq.calibrate(model, [X[:1]])
    assert "kv" not in {one.module for one in fq.unquantized(model, X[:1], products_only=True)}
    assert not any(one.name == "linear" for one in fq.unquantized(model, X[:1]))


class TrainingOnly(nn.Module):
    """Calls a part in training alone, as the posterior encoder of VITS; one layer of another, and parts of a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.posterior = nn.Sequential(nn.Linear(8, 8), *[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
        self.neck = nn.ModuleList([nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]) for _ in range(3)])
        self.pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.posterior_head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pair(self.posterior(x)) if self.training else x
        return self.posterior_head(self.neck[2][1](self.neck[1](x)))


@pytest.mark.parametrize("preset", ["int8", "int8_affine"])
def test_the_rules_of_parts_that_no_batch_reaches_are_few_and_can_be_pasted(preset):
    model = fq.prepare(TrainingOnly(), preset)
    with pytest.raises(CalibrationError, match="in float, such as layers that only training calls") as e:
        fq.calibrate(model, [X])
    rules = str(e.value)[str(e.value).index("Rule(") :]
    names = ["posterior.*", "neck.0.*", "neck.2.0", "neck.2.2", "pair.0", "pair.1"]
    assert sorted(rules.split(", ")) == sorted(f'Rule("{name}")' for name in names)
    config = getattr(fq.presets, preset.upper()).with_rule(*eval(f"[{rules}]", {"Rule": fq.Rule}))
    model = fq.prepare(TrainingOnly(), config)
    fq.calibrate(model, [X])
    kept = {name.rpartition(".")[0] for name in quantizers(model)}
    assert kept == {"neck.1.0", "neck.1.1", "neck.1.2", "neck.2.1", "posterior_head"}


class Neck(nn.Module):
    """A first block that skips what it could add, a head that training alone calls, and a layer that is read."""

    def __init__(self, skips: str) -> None:
        super().__init__()
        self.first, self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        if self.skips == "read":
            x = F.linear(x, self.first.weight)
        elif self.skips == "wide" and x.shape[0] > 16:
            x = self.first(x)
        return self.last(x)


@pytest.mark.parametrize("skips", ["head", "read", "wide"])
def test_what_the_example_of_prepare_does_not_reach_is_left_in_float(skips: str) -> None:
    model = fq.prepare(Neck(skips).eval(), "int8", X)
    with pytest.warns(CoverageWarning, match=r"left in float: .*head.*, nor did the example of prepare") as said:
        fq.calibrate(model, [X], progress=False)
    assert len([one for one in said if "left in float" in str(one.message)]) == 1
    assert [name for name, own in quantizers(model).items() if "last" not in name] == []
    assert torch.allclose(model(X), Neck(skips).eval().requires_grad_(False)(X), atol=10)


def test_what_the_example_reaches_and_no_batch_is_an_error() -> None:
    model = fq.prepare(Neck("wide").eval(), "int8", X.repeat(2, 1))
    with pytest.warns(CoverageWarning, match="head"), pytest.raises(CalibrationError, match=r"first\._input_quantizer"):
        fq.calibrate(model, [X], progress=False)
