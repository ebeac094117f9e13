"""Where the tables of engines place quantizers, on other people's architectures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.model.config import Config
from fakequant.model.placement import ATTENTION_LAYER, RECURRENT, Placement, place
from fakequant.model.run.outputs import record
from fakequant.model.sites import SitePlan, plan_sites
from fakequant.model.training import qat
from fakequant.nn.backward import Factor, matmul
from fakequant.nn.functions import SITE_FUNCTIONS
from fakequant.nn.sites import attend_in_parts
from tests.support.functional_models import example, float_network
from tests.support.placed_models import IDS, MODELS, bert
from tests.support.placements import PLACING, placement_of
from tests.support.vision import import_torchvision

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")
ALL = ["onnxruntime", "openvino", "qnn", "tensorrt", "xnnpack"]
IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def planned(
    model: nn.Module, target: str, x: Tensor, config: Config = fq.presets.INT8_AFFINE
) -> tuple[SitePlan, Placement]:
    recording = record(model.eval(), lambda: model(x))
    placement = place(model, config, recording, placement_of(target), config.resolve(model, any_module=True))
    return plan_sites(model, config, recording, placement.sites), placement


def operands(plan: SitePlan, function: str) -> set[tuple[str, ...]]:
    return {tuple(site.quantizers) for site in plan.sites if site.function == function}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ("densenet", "vit"):
        return MODELS[name]()
    return getattr(import_torchvision().models, name)()


@pytest.mark.parametrize("target", ALL)
def test_residual_sums_of_resnet(target: str) -> None:
    plan, _ = planned(build("resnet18"), target, IMAGE)
    sums = operands(plan, "add")
    outputs = 1 if target == "xnnpack" else 0  # the mean in the end is in float there, and reads a quantized result
    assert len(plan.sites) == 8 + outputs
    assert sums == ({("other",)} if target == "tensorrt" else {("input", "other")})


def test_the_identity_branch_is_found_whichever_operand_it_is() -> None:
    class Swapped(nn.Module):
        def __init__(self, *, downsample: bool) -> None:
            super().__init__()
            self.main = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
            self.norm = nn.BatchNorm2d(3)
            self.side = nn.Conv2d(3, 3, 1) if downsample else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            identity = self.side(x)
            return torch.relu(identity + self.norm(self.main(x)))

    for downsample in (False, True):
        plan, _ = planned(Swapped(downsample=downsample), "tensorrt", IMAGE)
        assert operands(plan, "add") == {("input",)}


@pytest.mark.parametrize("target", ALL)
def test_concatenations_of_densenet(target: str) -> None:
    plan, placement = planned(build("densenet"), target, IMAGE)
    joined = [site for site in plan.sites if site.function == "cat"]
    if target == "tensorrt":
        assert not joined
        return
    assert {len(site.operands) for site in joined} == {2, 3}
    for site in joined:
        inputs = [site.quantizers[name] for name in site.operands]
        groups = {quantizer.group for quantizer in inputs}
        assert groups == ({None} if target == "onnxruntime" else {f"{site.path}.input_0"})
    pools = {path: rule for path, rule in placement.layers.items() if path.endswith("pool")}
    assert {rule.input is None for rule in pools.values() if not rule.leaves_in_float} <= {False}


def test_concatenations_that_follow_one_another_share_one_scale() -> None:
    class Joins(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first = torch.cat([x, x.sin()], 1)
            other = torch.cat([x.cos(), x.tan()], 1)
            return torch.cat([first.flatten(2).transpose(1, 2).transpose(1, 2), other.flatten(2)], 1)

    plan, _ = planned(Joins(), "openvino", IMAGE)
    groups = {quantizer.group for site in plan.sites for quantizer in site.quantizers.values()}
    assert len(plan.sites) == 3
    assert len(groups) == 1
    made: Any = fq.prepare(Joins(), "INT8_AFFINE", example=IMAGE, target="openvino")
    assert len(fq.nn.quantizers(made)) == 1
    fq.calibrate(made, [IMAGE])
    assert made._sites.cat_0.input_0 is made._sites.cat_2.input_1
    assert fq.site_plan(made) == plan


@pytest.mark.parametrize(
    ("target", "probabilities"),
    [("onnxruntime", (1 / 256, 0)), ("qnn", (1 / 255, 0)), ("tensorrt", None), ("openvino", None), ("xnnpack", ...)],
)
def test_softmax_and_products_of_bert(target: str, probabilities: Any) -> None:
    plan, _ = planned(bert(), target, IDS)
    softmax = [site for site in plan.sites if site.function == "softmax"]
    products = [tuple(site.quantizers) for site in plan.sites if site.function == "matmul"]
    if probabilities is ...:  # in float altogether
        assert (softmax, products) == ([], [])
    elif probabilities is None:
        assert softmax == []
        assert products == [("input", "other")] * 2
    else:
        assert softmax[0].quantizers["output"].fixed == probabilities
        assert [names[:2] for names in products] == [("input", "other"), ("other",)]


@pytest.mark.parametrize(
    ("spec", "fixed"), [("int8", (1 / 256, -128)), ("uint8", (1 / 256, 0)), ("float8_e4m3fn", None)]
)
def test_fixed_ranges_of_other_formats(spec: str, fixed: tuple[float, int] | None) -> None:
    config = Config("own", (fq.Rule("*", input=spec, weight=spec),))
    plan, _ = planned(bert("sdpa"), "onnxruntime", IDS, config)
    attention = next(site for site in plan.sites if site.function == "scaled_dot_product_attention")
    assert list(attention.quantizers) == ["query", "key", "value", "probabilities"]
    assert attention.quantizers["probabilities"].fixed == fixed


@pytest.mark.parametrize("target", ALL)
def test_nothing_of_mobilenet_and_vit_that_keeps_scales_gets_a_quantizer(target: str) -> None:
    table = placement_of(target)
    for name in ("mobilenet_v3_small", "vit"):
        plan, placement = planned(build(name), target, IMAGE)
        assert plan.sites
        for site in plan.sites:
            allowed = table.inputs | table.outputs | set(table.fixed) | {"batch_norm", "relu", "hardswish"}
            assert site.function in allowed
            assert not {*site.quantizers} - {"output"} or site.function in table.inputs
        pools = [rule for path, rule in placement.layers.items() if path.endswith("avgpool")]
        assert {rule.input is None for rule in pools} <= {"adaptive_avg_pool2d" not in table.inputs}


def test_tables_name_known_functions() -> None:
    for target in map(placement_of, PLACING):
        named = target.inputs | target.outputs | target.shared | set(target.fixed)
        assert named <= set(SITE_FUNCTIONS) | RECURRENT | {ATTENTION_LAYER}
        assert not target.inputs & target.keeps


def test_an_addition_of_a_parameter_to_a_product_is_its_bias() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    plan, _ = planned(Biased(), "openvino", example())
    assert str(plan) == "_sites.matmul_0: input uint8 per_tensor, other int8 per_channel(-1)"


def test_rules_override_the_target() -> None:
    config = fq.presets.INT8.with_rule(
        fq.Rule("1", ops=("add",)), fq.Rule("0.attention"), fq.Rule("*", input="uint8", ops=("cat",))
    )
    made = fq.prepare(float_network(), config, example=example(), target="onnxruntime")
    text = str(fq.site_plan(made))
    assert "1._sites.add" not in text
    assert "0.attention._sites" not in text
    assert "0._sites.cat_0: input_0 uint8 per_tensor, input_1 uint8 per_tensor" in text
    assert "0._sites.add_0: input int8 per_tensor" in text


def test_fixed_ranges_stay_through_calibration_training_and_checkpoints(tmp_path: Path) -> None:
    made: Any = fq.prepare(float_network(), "INT8_AFFINE", example=example(), target="onnxruntime")
    probabilities = made[0].attention._sites.scaled_dot_product_attention_0.probabilities
    output = made[1]._sites.softmax_0.output
    used = fq.calibrate(made, [example()])
    assert not [name for name in used if name.endswith((".probabilities", "softmax_0.output"))]
    qat.set_scales(made, qat.Scales.LEARNED, "lsq")
    for quantizer in (probabilities, output):
        assert quantizer.learned is None
        assert (float(quantizer.scale), int(quantizer.zero_point)) == (1 / 256, 0)
    plan = fq.site_plan(made)
    fixed = [one.fixed for site in plan.sites for one in site.quantizers.values() if one.fixed is not None]
    assert {*fixed} == {(1 / 256, 0)}
    fq.save(made, tmp_path)
    again = fq.load(float_network(), tmp_path)
    assert fq.site_plan(again) == plan
    assert torch.equal(again(example(2)), made(example(2)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.tensor([[True, False, True, True, False]] * 4 + [[False] * 5])},
        {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5)},
        {"enable_gqa": True},
    ],
)
def test_attention_in_parts_is_torchs_within_rounding(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2 if options.get("enable_gqa") else 4, 5, 8, generator=generator, dtype=torch.float64)
    options = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in options.items()
    }
    exact = F.scaled_dot_product_attention(q, k, v, **options)
    factors = [Factor(x, x) for x in (q, k, v)]
    found = attend_in_parts(lambda *pair: matmul(None, *pair), lambda p: p, *factors, **options)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-14)


def test_attention_is_torchs_own_while_the_probabilities_are_not_quantized() -> None:
    made = fq.prepare(float_network(), "INT8_AFFINE", example=example(), target="onnxruntime")
    with fq.disabled(made):
        assert torch.equal(made(example(3)), float_network()(example(3)))
