"""Rules that name functions, the plan that they make, and what becomes of its quantizers in the other functions."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CheckpointError, ConfigError, CoverageWarning, ExportError
from fakequant.model.sites import site_plan
from fakequant.model.training import qat
from tests.support.functional_models import Calls, config, example, float_network, quantized, weight
from tests.support.vision import import_torchvision

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.arange(16.0).view(4, 4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        return x @ self.table + x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual())


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


def prepared(*rules: fq.Rule) -> nn.Module:
    return fq.prepare(model(), fq.Config("rules", rules), example=X)


def test_the_last_rule_that_matches_holds() -> None:
    made = prepared(
        fq.Rule("*", input="int8", weight="int4 per_channel(0)", ops=("add", "matmul")),
        fq.Rule("1", input="uint8", ops="add"),
        fq.Rule("0._sites.add_1", ops=("add",)),
        fq.Rule("*", input="int4", layers=("Linear",), ops=("add",), optional=True),
    )
    assert str(site_plan(made)) == (
        "0._sites.add_0: input int8 per_tensor, other int8 per_tensor\n"
        "0._sites.matmul_0: input int8 per_tensor, other int4 per_channel(-1)\n"
        "1._sites.add_0: input uint8 per_tensor, other uint8 per_tensor\n"
        "1._sites.matmul_0: input int8 per_tensor, other int4 per_channel(-1)\n"
        "1._sites.add_1: input uint8 per_tensor, other uint8 per_tensor"
    )
    assert not [name for name in fq.nn.quantizers(made) if "linear" in name]
    assert made[0]._sites.matmul_0.other.kind is fq.nn.Kind.WEIGHT


def test_rules_by_the_class_of_the_owner() -> None:
    assert "1._sites.add_0" in str(site_plan(prepared(fq.Rule("1", input="int8", ops=("add",), layers=(Residual,)))))


def test_one_rule_for_layers_does_not_reach_functions() -> None:
    made = fq.prepare(model(), "INT8", example=X)
    assert str(site_plan(made)) == "no functions have quantizers"
    assert type(made[0]) is Residual
    assert type(made[0].linear) is type(fq.prepare(nn.Linear(4, 4), "INT8"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            fq.Rule("2", input="int8", ops=("add",)),
            r"'2' with ops add matches no call .* are 0: add, 0: matmul, 1: add",
        ),
        (fq.Rule("*", input="int8", ops=("cat", "sdpa")), r"ops cat, sdpa matches no call"),
    ],
)
def test_rules_that_match_nothing_are_refused(rule: fq.Rule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(rule)


def test_unknown_functions_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no function 'sofmax' can be quantized; did you mean softmax"):
        fq.Rule("*", input="int8", ops=("sofmax",))


def test_rules_with_functions_need_an_example() -> None:
    with pytest.raises(ConfigError, match=r"rules name functions \(add\), .*example="):
        fq.prepare(model(), fq.Config("rules", (fq.Rule("*", input="int8", ops=("add",)),)))


def test_rules_are_stored_with_their_functions() -> None:
    rules = fq.Config("rules", (fq.Rule("*", input="int8", ops=("add", "sdpa")), fq.Rule("head")))
    assert fq.Config.from_dict(rules.to_dict()) == rules


def test_nothing_of_a_model_changes_that_cannot_be_prepared() -> None:
    plain = model()
    before = [(type(module), dict(vars(module))) for module in plain.modules()]
    plain.add_module("2", Calls(lambda model, x: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        fq.prepare(plain, config("add"), example=X)
    del plain[2]
    assert [(type(module), dict(vars(module))) for module in plain.modules()] == before


def test_a_run_leaves_buffers_modes_and_random_numbers() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return x + torch.rand(4) + x

    plain = Counts()
    torch.manual_seed(5)
    fq.prepare(plain, fq.Config("rules", (fq.Rule("*", input="int8", ops=("add",)),)), example=X)
    assert (float(plain.calls), plain.seen, plain.training) == (0.0, 0, True)
    expected = torch.Generator().manual_seed(5)
    assert torch.equal(torch.rand(4), torch.rand(4, generator=expected))


def test_summary_lists_sites_and_what_is_left() -> None:
    made = quantized(model(), X, rules=fq.presets.INT8.with_rule(fq.Rule("0", input="int8", ops=("add",))))
    text = str(fq.summary(made, X))
    assert "0._sites.add_0  add     int8 per_tensor, int8 per_tensor" in text
    assert "  0: matmul, 2 of 2 inputs in float" in text
    assert "  1: add, 2 of 2 inputs in float" in text
    assert "  0: add" not in text


def test_analysis_sees_sites() -> None:
    made = quantized(float_network(), example())
    names = fq.nn.quantizers(made)
    assert set(fq.layer_sqnr(made, [example()])) == set(names)
    layers = {found.layer for found in fq.sensitivity(made, [example()])}
    assert layers == {name.rpartition(".")[0] for name in names}


def test_one_site_is_calibrated_alone() -> None:
    made = fq.prepare(model(), config("add"), example=X)
    used = fq.calibrate(made, [X], pattern="0._sites.*")
    assert set(used) == {f"0._sites.add_{i}.{name}" for i in (0, 1) for name in ("input", "other")}
    with pytest.raises(fq.FakeQuantError, match=r"1\._sites\.add_0\.input has not been calibrated|0\.linear"):
        made(X)


def test_weights_of_functions_follow_their_parameters_until_calibrated() -> None:
    made = fq.prepare(
        model(), fq.Config("w", (fq.Rule("*", weight="int8 per_channel(0)", ops=("matmul",)),)), example=X
    )
    weight = made[0]._sites.matmul_0.other
    assert not weight.calibrated
    fq.calibrate(made)  # as for the weights of layers, without batches
    assert weight.scale.shape == (1, 4)
    assert torch.equal(weight.scale.flatten(), made[0].table.abs().amax(0).clamp(min=0) / 127)


@pytest.mark.parametrize("method", [None, "lsq"])
def test_saved_and_loaded(tmp_path: Path, method: str | None) -> None:
    made = quantized(float_network(), example())
    if method is not None:
        qat.set_scales(made, qat.Scales.LEARNED, method)
    made[0]._sites.add_0.input.mode = fq.nn.Mode.OFF
    fq.save(made, tmp_path)
    again = fq.load(float_network(), tmp_path)
    assert site_plan(again) == site_plan(made)
    assert torch.equal(again(example(2)), made(example(2)))
    assert {name: (q.mode, q.name) for name, q in fq.nn.quantizers(again).items()} == {
        name: (q.mode, q.name) for name, q in fq.nn.quantizers(made).items()
    }


def test_a_function_in_float64_of_a_model_in_float32_is_saved_and_loaded(tmp_path: Path) -> None:
    class Wide(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return (input.double() + super().forward(input).double()).float()

    rules = fq.Config("", (fq.Rule("*", input="int8", ops=("add",)),))
    made = fq.prepare(Wide(4, 4), rules, example=X)
    fq.calibrate(made, [X])
    fq.save(made, tmp_path)
    again = fq.load(Wide(4, 4), tmp_path)
    assert torch.equal(again(X), made(X))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    class Other(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(), Residual())
            self[0].linear = nn.Linear(4, 4)

    fq.save(quantized(model(), X, rules=fq.Config("", (fq.Rule("*", input="int8", ops=("add",)),))), tmp_path)
    with pytest.raises(CheckpointError, match=r"module 0 is a Residual, the model's is a Sequential"):
        fq.load(Other(), tmp_path)
    with pytest.raises(CheckpointError, match=r"has modules that the model lacks: 1"):
        fq.load(nn.Sequential(Residual()), tmp_path)
    manifest = tmp_path / "fakequant.json"
    manifest.write_text(manifest.read_text().replace('"add"', '"shift"'))
    with pytest.raises(CheckpointError, match=r"module 0 has quantizers of the calls shift"):
        fq.load(model(), tmp_path)


def test_training_by_finetune_learns_the_ranges_of_sites() -> None:
    made = quantized(float_network(), example())
    options = qat.Options(scales=qat.Scales.LEARNED, progress=False)
    before = {name: q.scale.clone() for name, q in fq.nn.quantizers(made).items()}
    batches = [(example(seed), torch.zeros(3, 5, 8)) for seed in range(3)]
    qat.finetune(made, batches, F.mse_loss, qat.Schedule(original_lr=0.1, original_epochs=10), options)
    after = {name: q.learned.qparams(1).scale for name, q in fq.nn.quantizers(made).items() if q.learned is not None}
    assert set(after) == set(before)
    assert [name for name in after if "_sites" in name and not torch.equal(after[name], before[name])]


def test_graphs_and_onnx_hold_the_quantizers_of_sites(tmp_path: Path) -> None:
    made = quantized(float_network(), example())
    graph = fq.ir.capture(made, (example(),))
    assert torch.equal(graph.run(example(4)), made(example(4)))
    fq.export_onnx(made, (example(),), tmp_path / "model.onnx")
    report = fq.verify_onnx(tmp_path / "model.onnx", made, [(example(4),)])
    assert report.exact
    assert {row.quantizer for row in report.rows} == set(fq.nn.quantizers(made))


def test_rules_leave_owners_without_sites_alone() -> None:
    made = prepared(fq.Rule("0", input="int8", ops=("add",)))
    assert type(made[1]) is Residual
    assert type(made) is nn.Sequential
    assert site_plan(made).shielded == ("0.linear",)


def test_copies_of_a_graph_module_would_lose_its_sites() -> None:
    traced = torch.fx.symbolic_trace(Residual())
    with pytest.raises(ConfigError, match=r"the model: a torch.fx.GraphModule .* would lose the quantizers"):
        fq.prepare(traced, fq.Config("", (fq.Rule("*", input="int8", ops=("add",)),)), example=X)


@pytest.mark.parametrize("inner", [False, True])
def test_models_that_torch_export_made_are_refused(inner: bool) -> None:
    exported = torch.export.export(Residual(), (X,)).module()
    made = nn.Sequential(nn.Linear(4, 4), exported) if inner else exported
    with pytest.raises(ConfigError, match=rf"^{'1' if inner else 'the model'} was made by torch.export, which repl"):
        fq.prepare(made, "INT8", example=X)
    if not inner:
        with pytest.raises(ConfigError, match=r"made by torch\.export"):
            fq.prepare(torch.export.unflatten(torch.export.export(Residual(), (X,))), "INT8")


def test_layers_of_a_traced_model_are_quantized_and_its_functions_named() -> None:
    with pytest.warns(
        CoverageWarning, match=r"with 50 % of the multiply-accumulates have inputs in float: matmul 50 %"
    ):
        made = fq.prepare(torch.fx.symbolic_trace(Residual()), "INT8", example=X)
    fq.calibrate(made, [X])
    assert [str(left) for left in fq.unquantized(made, X, products_only=True)] == [
        "(model): matmul, 2 of 2 inputs in float"
    ]


def test_transformers_saves_and_loads_sites(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import_torchvision()
    from transformers import BertConfig, BertModel

    from fakequant.integrations.transformers import enable_saving

    shape = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ids = torch.arange(12).view(2, 6)
    torch.manual_seed(0)
    made = fq.prepare(BertModel(shape).eval(), config(), example={"input_ids": ids})
    assert "encoder.layer.0.attention.self._sites.scaled_dot_product_attention_0.query" in fq.nn.quantizers(made)
    fq.calibrate(made, [{"input_ids": ids}])
    enable_saving(made).save_pretrained(tmp_path)
    again = BertModel.from_pretrained(tmp_path)
    assert site_plan(again) == site_plan(made)
    assert torch.equal(again(ids).last_hidden_state, made(ids).last_hidden_state)


def test_encoders_of_torch_leave_their_fast_paths() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    made: Any = quantized(layer, example(), rules=fq.Config("", (fq.Rule("*", input="int8", ops=("add",)),)))
    with torch.no_grad():
        without = made(example())
    assert torch.equal(without, made(example()).detach())
    assert not torch.equal(without, copy.deepcopy(layer)(example()))


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2) @ x, -1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("traced", [False, True])
def test_products_inside_of_scripted_modules_are_named(traced: bool) -> None:
    inner = torch.jit.trace(Scores(), (X,)) if traced else torch.jit.script(Scores())
    with pytest.warns(
        CoverageWarning, match=r"^modules of torch\.jit compute in float, and their products are in no list.*: 1\. Prep"
    ):
        made = fq.prepare(nn.Sequential(nn.Linear(4, 4), inner), "INT8", example=X)
    fq.calibrate(made, [X])
    assert made(X).shape == X.shape
    with pytest.warns(
        CoverageWarning, match=r"^modules of torch\.jit compute in float, and their products are in no list.*: 1\. Prep"
    ):
        assert fq.summary(made, X).unquantized == []
    if not traced:
        with pytest.raises(ExportError, match=r"^1 is a module of torch\.jit\.script, into which torch\.export cannot"):
            fq.ir.capture(made, X)


@torch.library.custom_op("fakequant_tests::product", mutates_args=())
def opaque_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@opaque_product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def test_operators_that_cannot_be_looked_into_are_named() -> None:
    opaque = Calls(lambda model, x: opaque_product(x, model.w), w=weight(4, 4))
    made = fq.prepare(nn.Sequential(nn.Linear(4, 4), opaque), "INT8", example=X)
    assert [str(left) for left in fq.unquantized(made, X)] == ["1: product, 1 of 1 inputs in float"]
    traced = fq.prepare(nn.Sequential(torch.fx.symbolic_trace(Scores()), nn.Linear(4, 4)), "INT8", example=X)
    assert [left.name for left in fq.unquantized(traced, X)] == ["matmul", "matmul", "softmax"]
