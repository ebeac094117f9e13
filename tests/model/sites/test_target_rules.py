"""One test for each rule of the tables: what every target does with results, norms, pooling and fixed ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CoverageWarning
from fakequant.model.placement import Placement, place
from fakequant.model.run.outputs import record
from fakequant.model.sites import SitePlan, plan_sites
from fakequant.nn.quantizer import quantizers
from tests.support.placements import placement_of
from tests.support.vision import import_torchvision

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ALL = ["onnxruntime", "openvino", "qnn", "tensorrt", "xnnpack"]


def planned(model: nn.Module, target: str, *rules: fq.Rule, x: Tensor = IMAGE) -> tuple[SitePlan, Placement]:
    config = (fq.presets.INT8 if target == "tensorrt" else fq.presets.INT8_AFFINE).with_rule(*rules)
    recording = record(model.eval(), lambda: model(x))
    placement = place(model, config, recording, placement_of(target), config.resolve(model, any_module=True))
    return plan_sites(model, config, recording, placement.sites), placement


class Ends(nn.Module):
    """Three results that no other quantizer reaches: behind a ReLU that is fused, of a layer, of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)
        self.head = nn.Linear(15, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.relu(self.conv(x))).cos()
        return self.head(y) + y[..., :2]


@pytest.mark.parametrize("target", ALL)
def test_results_that_no_other_quantizer_reaches(target: str) -> None:
    plan, placement = planned(Ends(), target)
    outputs = {site.path for site in plan.sites if "output" in site.quantizers}
    assert placement.layers["conv"].output is None  # the ReLU belongs to the convolution
    if target in ("tensorrt", "openvino"):
        assert outputs == set()
    else:
        assert outputs == {"relu._sites.relu_0", "_sites.add_0"}
    assert all(rule.output is None for rule in placement.layers.values())  # the sum quantizes the result of the layer


@pytest.mark.parametrize("target", ALL)
def test_norms_and_attention_of_vit(target: str) -> None:
    model = import_torchvision().models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=10)
    plan, placement = planned(model, target)
    norms = [site for site in plan.sites if site.function == "layer_norm" and {*site.quantizers} - {"output"}]
    assert bool(norms) is (target in ("openvino", "qnn"))
    attention = placement.layers["encoder.layers.encoder_layer_0.self_attention"]
    assert (attention.output is not None) is (target in ("onnxruntime", "qnn"))
    sums = [site.quantizers for site in plan.sites if site.owner.endswith("encoder_layer_0") and site.function == "add"]
    if target == "onnxruntime":
        assert sums == []
    else:  # the first sum reads the result of the attention, which is quantized there
        assert ("input" in sums[0]) is (target in ("openvino", "tensorrt", "xnnpack"))


class Block(nn.Module):
    """A feed-forward block with its residual sum, before or behind the normalisation, on rows or matrices of them."""

    def __init__(self, *, norm_first: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.norm_first = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8), norm_first

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            return x + self.down(self.up(self.norm(x)).relu())
        return self.norm(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
@pytest.mark.parametrize("norm_first", [False, True])
def test_sums_that_normalisations_read_stay_in_float(shape: tuple[int, ...], norm_first: bool) -> None:
    made = [Block(norm_first=norm_first) for _ in range(2)]
    model = nn.Sequential(*made, nn.LayerNorm(8), nn.Linear(8, 2))
    model = fq.prepare(model, "int8_affine", torch.randn(shape), target="onnxruntime")
    assert [name for name in quantizers(model) if "add" in name] == []
    outputs = {name for name in quantizers(model) if "_output_quantizer" in name}
    ends = {"3._output_quantizer"}  # a Gemm is an integer one with a quantized result alone
    assert outputs == (ends if len(shape) > 2 else ends | {"0.down._output_quantizer", "1.down._output_quantizer"})


@pytest.mark.parametrize("read", ["product", "user"])
def test_sums_that_a_product_or_the_user_reads_are_quantized(read: str) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            total = x + x.cos()
            return self.norm(total), self.layer(total) if read == "product" else total

    model = fq.prepare(Read(), "int8_affine", torch.randn(2, 3, 8), target="onnxruntime")
    assert "_sites.add_0.other" in quantizers(model)


@pytest.mark.parametrize("target", ALL)
def test_pooling_and_fixed_ranges_of_mobilenet(target: str) -> None:
    plan, placement = planned(import_torchvision().models.mobilenet_v3_small(), target)
    assert (placement.layers["avgpool"].input is None) is (target == "xnnpack")
    gates = [
        site.quantizers["output"].fixed for site in plan.sites if site.function == "hardsigmoid" and site.quantizers
    ]
    assert gates == ([(1 / 255, 0)] * 9 if target == "qnn" else [])
    products = [tuple(site.quantizers) for site in plan.sites if site.function == "mul"]
    both = ("input", "other")
    # XNNPACK quantizes what the pooling of a gate reads, so that the product with the gate reads it quantized.
    names = {"tensorrt": set(), "qnn": {("other",)}, "xnnpack": {("input",), both}}.get(target, {both})
    assert {tuple(name for name in operands if name in both) for operands in products} == names


def test_a_fixed_range_below_zero_has_the_zero_point_of_its_ends() -> None:
    class Bounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) @ torch.sigmoid(x)

    plan, _ = planned(Bounded(), "qnn")
    fixed = {site.function: site.quantizers["output"].fixed for site in plan.sites if "output" in site.quantizers}
    assert fixed["tanh"] == (2 / 255, 128)  # codes 0 and 255 are -128 and 127 steps of 2 / 255
    assert fixed["sigmoid"] == (1 / 255, 0)


def test_what_reads_a_quantized_result_quantizes_it_no_second_time() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.head(y) + y * y.sin()

    _, placement = planned(Reads(), "onnxruntime", fq.Rule("conv"))  # in float, as is what it returns
    assert placement.layers["conv"].output is None
    assert placement.layers["head"].input is not None
    plan, placement = planned(Reads(), "onnxruntime")
    assert placement.layers["conv"].output is not None
    assert placement.layers["head"].input is None
    assert str(plan).splitlines()[0] == "_sites.mul_0: other uint8 per_tensor"


def test_no_quantizer_moves_over_a_transpose_to_a_value_that_another_layer_reads() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head, self.other = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.head(y) + self.other(y.transpose(2, 3))

    _, placement = planned(Turned(), "onnxruntime")
    assert placement.layers["conv"].output is not None


def test_a_quantizer_of_two_calls_stays_where_one_reads_what_is_not_quantized() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.head(y) + self.head(y.sin())

    _, placement = planned(Twice(), "onnxruntime")
    assert placement.layers["conv"].output is not None
    assert placement.layers["head"].input is not None


def test_a_result_is_quantized_in_front_of_a_function_that_no_kernel_fuses() -> None:
    _, placement = planned(import_torchvision().models.mobilenet_v3_small(), "onnxruntime")
    gates = [path for path, rule in placement.layers.items() if path.endswith("fc2") and rule.output is not None]
    assert len(gates) == 9


@pytest.mark.parametrize(
    ("target", "preset", "message"),
    [
        ("onnxruntime", "INT8", "only with asymmetric activations, but the configuration has int8 per_tensor; "),
        (placement_of("tensorrt"), "INT8_AFFINE", "only with symmetric activations, but the configuration has uint8 "),
    ],
    ids=["onnxruntime", "tensorrt"],
)
def test_presets_that_do_not_suit_a_target_are_told(target: Any, preset: str, message: str) -> None:
    other = {"INT8": "INT8_AFFINE", "INT8_AFFINE": "INT8"}[preset]
    with pytest.warns(CoverageWarning, match=f"computes all products on integers {message}.*presets.{other} suits "):
        fq.prepare(Ends(), preset, example=IMAGE, target=target)


def test_rules_with_an_output_reach_functions() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + x.cos()

    rules = fq.Config("outputs", fq.Rule("*", input="int8", output="uint8 per_block(-1:2,pad)", ops=("add",)))
    made: Any = fq.prepare(Sums(), rules, example=IMAGE)
    assert str(fq.site_plan(made)) == (
        "_sites.add_0: input int8 per_tensor, other int8 per_tensor, output uint8 per_block(-1:2,pad)"
    )
    fq.calibrate(made, [IMAGE])
    assert made._sites.add_0.output.scale.shape[-1] == 16


@dataclass
class Returned:
    logits: Tensor
    hidden: list[Tensor]


@pytest.mark.parametrize("target", ALL)
def test_results_that_leave_the_model_in_a_dataclass(target: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(32, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Returned:
            y = self.body(x)
            return Returned(self.head(y.relu()), [y])

    _, placement = planned(Returns(), target)
    outputs = {path for path, rule in placement.layers.items() if rule.output is not None}
    assert outputs == (set() if target in ("tensorrt", "openvino") else {"body", "head"})


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(self.query(x) @ self.key(x).mT, -1) @ x


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Attends()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


@pytest.mark.parametrize("target", ["onnxruntime", "qnn"])
def test_all_calls_of_a_block_count_where_results_are_quantized(target: str) -> None:
    plan, _ = planned(Repeats(), target)
    sites = {site.key: tuple(site.quantizers) for site in plan.sites}
    assert sites["add_0"] == ("input", "other", "output")  # the second call returns it
    assert sites["matmul_1"][:1] == ("other",)  # the softmax quantizes its result in both calls


def test_a_model_that_calls_vmap_is_planned() -> None:  # no number may be read from a tensor there
    class Maps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.vmap(lambda row: row + row.cos())(x)

    plan, _ = planned(Maps(), "onnxruntime")
    assert str(plan) == "_sites.add_0: input uint8 per_tensor, other uint8 per_tensor"


class Router(nn.Module):
    """Takes the best experts alone, as Llama 4 does: others have the score -inf."""

    unused: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.layer = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        best, which = scores.topk(1)
        gates = torch.full_like(scores, -torch.inf).scatter_(1, which, best).mT.sigmoid()
        return (self.layer(x) * gates[..., None]).sum(0)


class Gates(Router):
    """Sums of logarithms under a triangle, as xLSTM has."""

    unused = ("scores",)

    def forward(self, x: Tensor) -> Tensor:
        logs = nn.functional.logsigmoid(self.layer(x))
        sums = (logs.cumsum(0)[:, None] - logs.cumsum(0)).where(torch.ones(4, 4).tril().bool()[..., None], -torch.inf)
        gates = sums + logs
        return ((gates - gates.amax(1, keepdim=True)).exp() * x).sum(1)


class Joined(Router):
    """A place for what is not there, in a `cat` whose quantizer serves all parts, and in a maximum."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.layer(x), torch.full_like(x, -torch.inf)])
        return self.scores(torch.stack([y, y]).amax(0).clamp(-3, 3) + 1.0)


class Often(Router):
    """A layer and a sum that get inf in one of their calls."""

    unused = ("scores",)

    def forward(self, x: Tensor) -> Tensor:
        found = [one + one.relu() for one in (x, torch.log(x.relu()), self.layer(x))]
        return found[0] + found[1].clamp(-1, 1) + found[2]


class Chosen(Router):
    """Words that may not follow, behind a temperature."""

    unused = ("scores",)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y.masked_fill(y < 0, -torch.inf) / 0.7 + torch.log_softmax(x, -1)
        return y.logsumexp(-1, keepdim=True) * x + y.sigmoid() + y.relu() * x


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("cls", [Router, Gates, Joined, Often, Chosen])
def test_no_quantizer_gets_inf(cls: type[Router], target: str) -> None:
    model, x = cls(), torch.randn(4, 8)
    fq.prepare(model, "int8" if target == "tensorrt" else "int8_affine", x, target=target, skip=cls.unused)
    assert len(fq.calibrate(model, [x])) > 1
    assert torch.isfinite(model(x)).all()


UNWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "float": Tensor.float,
    "to": lambda x: x.to(torch.float32),
    "contiguous": Tensor.contiguous,
    "dropout": lambda x: nn.functional.dropout(x, training=False),
    "requires_grad_": lambda x: x.requires_grad_(False),
}


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("way", UNWRITTEN)
def test_a_function_that_returns_its_argument_changes_no_plan(way: str, target: str) -> None:
    class Block(nn.Module):
        def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.first, self.second, self.then = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), then

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.then(torch.relu(self.then(self.first(x)) + self.then(x))))

    x = torch.ones(1, 3, 4, 4)
    plans = []
    for then in (UNWRITTEN[way], lambda x: x):
        model = Block(then)
        fq.prepare(model, "int8" if target == "tensorrt" else "int8_affine", example=x, target=target)
        plans.append((str(fq.site_plan(model)), str(fq.summary(model))))
    assert plans[0] == plans[1]
