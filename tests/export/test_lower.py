"""Every format and granularity that ONNX can say: ONNX Runtime gives the bits of torch, also with default options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError
from fakequant.export import export_onnx
from fakequant.nn import Quantizer
from fakequant.numerics import formats
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.export_models import Casting, Quantizers, Weights, quantizer, run
from tests.support.matrix import cases_of, full, in_turn, sweep

NOT_IN_ONNX = {"half"}
WITH_RECIPROCAL = {"int8", "uint8_affine", "odd_range_affine", "int4", "float8_e4m3fn", "float4_e2m1fn", "nf4"}
# Formats that share their path through the exporter with another one, which has all granularities.
ALIKE = {
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4"),
    *("float6_e3m2fn", "float6_e2m3fn", "three_values", "positive_values"),
    *("int8_affine", "int8_narrow", "int4", "uint4", "int1", "uint1_affine", "int16", "uint16_affine"),
    *("float8_e5m2", "256_values"),
}
FEW = ("tensor", "channel_1", "block_32", "tiles")


@dataclass(frozen=True)
class Case:
    """One quantizer of the exported file."""

    format: str
    granularity: str
    arithmetic: fq.Arithmetic
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.format}-{self.granularity}-{self.arithmetic.value}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def spec(self) -> fq.QuantSpec:
        return cases.FORMATS[self.format].spec(cases.GRANULARITIES[self.granularity].granularity, self.arithmetic)

    def numbers(self, *, weight: bool = False) -> cases.Numbers:
        numbers = cases.hostile(
            cases.FORMATS[self.format], cases.GRANULARITIES[self.granularity], self.arithmetic, self.dtype
        )
        fmt = self.spec.format
        has_nan = fmt.from_storage(fmt.to_storage(torch.tensor([float("nan")])), torch.float32).isnan().all()
        # Integers have no code for NaN: ONNX Runtime gives the lowest, torch keeps NaN. Weights are stored as codes.
        if not fmt.has_zero_point and (has_nan or not weight):
            return numbers
        return cases.Numbers(torch.where(numbers.x.isnan(), 0.0, numbers.x), numbers.params)


def spread(every: list[Case]) -> list[Case]:
    """All cases, first one of each format, with granularities and arithmetics in turn: those that run every time."""
    by_format: dict[str, list[Case]] = {}
    for case in every:
        by_format.setdefault(case.format, []).append(case)
    first = [group[5 * turn % len(group)] for turn, group in enumerate(by_format.values())]
    return [*first, *(case for case in every if case not in first)]


CASES = [
    Case(format, granularity, arithmetic)
    for format in cases.FORMATS
    for granularity in cases.GRANULARITIES
    for arithmetic in (fq.Arithmetic.DIVIDE, fq.Arithmetic.RECIPROCAL)
    if format not in NOT_IN_ONNX
    if arithmetic is fq.Arithmetic.DIVIDE or (format in WITH_RECIPROCAL and granularity in FEW)
    if format not in ALIKE or granularity in FEW
] + [
    Case(format, granularity, fq.Arithmetic.DIVIDE, dtype)
    for format in ("int8", "uint8_affine", "odd_range_affine", "float8_e4m3fn", "float6_e2m3fn", "nf4")
    for granularity in ("tensor", "channel_1")
    for dtype in (torch.float16, torch.bfloat16)
]
CASES = spread(CASES)


@pytest.fixture(scope="module", autouse=True)
def user_formats() -> Iterator[None]:
    """The formats of the cases that are not registered are, while the tests of this file run."""
    with pytest.MonkeyPatch.context() as patch:
        for case in cases.FORMATS.values():
            if isinstance(case.format, fq.Format):
                patch.setitem(formats._registry, case.format.name, case.format)
        yield


@pytest.fixture(scope="module")
def activations(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[Case, Tensor]:
    """What ONNX Runtime gives for the cases of this run, exported as one file."""
    used = [one["case"] for one in cases_of(request, test_activation_has_the_bits_of_torch)]
    numbers = [case.numbers() for case in used]
    model = Casting([quantizer(case.spec, n.params) for case, n in zip(used, numbers, strict=True)])
    model.dtypes = [case.dtype for case in used]
    xs = tuple(n.x.float() for n in numbers)
    path = tmp_path_factory.mktemp("export") / "activations.onnx"
    report = export_onnx(model, xs, path)
    assert [q.spec for q in report.quantizers] == [str(case.spec) for case in used]
    return dict(zip(used, run(path, xs), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_activation_has_the_bits_of_torch(case: Case, activations: dict[Case, Tensor]) -> None:
    numbers = case.numbers()
    expected = quantizer(case.spec, numbers.params)(numbers.x)
    assert_same_bits(activations[case].to(case.dtype), expected, case)


WEIGHTS = [
    Case(format, granularity, arithmetic, dtype)
    for format in cases.FORMATS
    for granularity in ("tensor", "channel_0", "channel_1", "channels_0_2", "block_32", "block_first_axis", "tiles")
    for arithmetic, dtype in (
        (fq.Arithmetic.DIVIDE, torch.float32),
        (fq.Arithmetic.RECIPROCAL, torch.float32),
        (fq.Arithmetic.DIVIDE, torch.float16),
    )
    if format not in NOT_IN_ONNX
    if granularity in FEW or (format not in ALIKE and arithmetic is fq.Arithmetic.DIVIDE and dtype is torch.float32)
]
WEIGHTS = spread(WEIGHTS)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[Case, Tensor]:
    used = [one["case"] for one in cases_of(request, test_folded_weight_has_the_bits_of_torch)]
    numbers = [case.numbers(weight=True) for case in used]
    model = Weights(
        [quantizer(case.spec, n.params) for case, n in zip(used, numbers, strict=True)], [n.x for n in numbers]
    )
    path = tmp_path_factory.mktemp("export") / "weights.onnx"
    report = export_onnx(model, torch.zeros(1), path)
    assert all("codes" in q.expressed for q in report.quantizers)
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(path).graph.node}
    return dict(zip(used, run(path, [torch.zeros(1)])[:-1], strict=True))


@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_folded_weight_has_the_bits_of_torch(case: Case, weights: dict[Case, Tensor]) -> None:
    numbers = case.numbers(weight=True)
    assert_same_bits(weights[case], quantizer(case.spec, numbers.params)(numbers.x).detach(), case)


# The range is taken from each tensor: text of the specification, rank of the tensor.
DYNAMIC = [
    ("int8 per_tensor", 2),
    ("uint8 per_tensor", 3),
    ("int8_narrow per_tensor", 3),
    ("int8 per_token", 2),
    ("int8 per_token", 4),
    ("uint8 per_token", 3),
    ("uint4 per_token", 3),
    ("int4 per_token", 2),
    ("int[-100,37] per_token asymmetric", 3),
    ("int16 per_token", 3),
    ("float8_e4m3fn per_token", 3),
    ("float8_e5m2 per_token", 2),
    ("int8 per_channel(0)", 3),
    ("uint8 per_channel(1)", 3),
    ("int8 per_channel(1) reciprocal", 3),
    ("int8 per_tensor reciprocal", 3),
    ("int[-100,37] per_tensor asymmetric reciprocal", 3),
    ("int8 per_block(-1:4)", 3),
    ("uint8 per_block(-1:4)", 3),
    ("float8_e4m3fn per_block(-1:8)", 3),
    ("int8_narrow per_block(-1:4)", 3),
    ("int8 per_token reciprocal", 3),
    ("int4 per_block(-1:4) reciprocal", 2),
    ("int8 per_block(1:2,2:4,pad)", 3),
    ("int8 per_block(-1:3,pad)", 2),
    ("int[-100,37] per_block(1:2,pad) asymmetric reciprocal", 3),
    ("uint4 per_block(1:2,2:3,pad)", 3),
    ("float8_e5m2fnuz per_block(-1:5,pad)", 3),
    ("float4_e2m1fn per_block(-1:3,pad)", 3),
    ("float6_e3m2fn per_tensor", 2),
    ("float8_e3m4 per_channel(1) reciprocal", 3),
    ("nf4 per_token", 3),
]


def _dynamic_input(rank: int, batch: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn([*[batch, 3, 2, 8][: rank - 1], 8], generator=generator) * 3
    flat = x.view(-1)
    flat[:4] = torch.tensor([0.0, -0.0, 1e-40, float("inf")])
    x.select(-2, 1 if rank > 1 else 0).zero_()  # a token whose range is 0
    return x


@pytest.fixture(scope="module")
def dynamic_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Quantizers([Quantizer(text, dynamic=True) for text, _ in DYNAMIC])
    path = tmp_path_factory.mktemp("export") / "dynamic.onnx"
    xs = tuple(_dynamic_input(rank, 3, 0) for _, rank in DYNAMIC)
    export_onnx(model, xs, path, dynamic_shapes=(tuple({0: "batch"} for _ in DYNAMIC),))
    return path


@pytest.mark.parametrize("batch", [2, 5])
def test_dynamic_range_has_the_bits_of_torch_at_every_batch_size(dynamic_file: Path, batch: int) -> None:
    xs = [_dynamic_input(rank, batch, seed=batch) for _, rank in DYNAMIC]
    for (text, rank), x, y in zip(DYNAMIC, xs, run(dynamic_file, xs), strict=True):
        assert_same_bits(y, fq.fake_quantize(x, text), (text, rank))


def test_blocks_along_an_axis_of_unknown_length_are_refused(tmp_path: Path) -> None:
    model = Quantizers([Quantizer("nf4 per_block(0:2,pad)", dynamic=True)])
    with pytest.raises(ExportError, match=r"quantizers\.0: an axis of symbolic length \w+ is divided into blocks of 2"):
        export_onnx(model, torch.zeros(3, 4, 8), tmp_path / "m.onnx", dynamic_shapes=(({0: "batch"},),))
    assert not list(tmp_path.iterdir())


def test_a_bound_beyond_float32_is_refused(tmp_path: Path) -> None:
    model = Quantizers([quantizer(fq.QuantSpec("int[-100,37]"), fq.QParams(torch.full((1, 1), 1e37)))])
    with pytest.raises(ExportError, match=r"quantizers\.0: the value of the code -100 exceeds float32"):
        export_onnx(model, torch.zeros(2, 2), tmp_path / "m.onnx")


def test_nan_in_a_weight_is_refused(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, float("nan")]])
    model = Weights([quantizer(fq.QuantSpec("int8"), fq.QParams(torch.ones(1, 1)))], [weight])
    with pytest.raises(ExportError, match=r"quantizers\.0: the weight holds NaN"):
        export_onnx(model, torch.zeros(1), tmp_path / "m.onnx")


def test_a_scale_given_as_a_number_needs_no_module(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(fq.fake_quantize(x, "uint8", scale=0.1, zero_point=7), "int8 per_token")

    x = torch.linspace(-3, 30, 24).view(2, 12)
    report = export_onnx(Bare(), x, tmp_path / "m.onnx")
    assert [q.quantizer for q in report.quantizers] == ["", ""]
    assert_same_bits(run(tmp_path / "m.onnx", [x])[0], Bare()(x))


def test_two_calls_of_one_quantizer_share_its_constants(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantizer = quantizer(fq.QuantSpec("int8"), fq.QParams(torch.full((1, 1), 0.1)))

        def forward(self, x: Tensor) -> Tensor:
            return self.quantizer(x) + self.quantizer(x * 2)

    export_onnx(Twice(), torch.ones(2, 2), tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx").graph
    quantizing = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert [node.name for node in quantizing] == ["quantizer/QuantizeLinear", "quantizer#2/QuantizeLinear"]
    assert len({node.output[0] for node in graph.node}) == len(graph.node)


PRESETS = ["FP8", "FP8_E5M2"]


class Attention(nn.Module):
    """Quantizers before and after operations that only move values, which optimisations move quantizers over."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.scores, self.mix, self.add = fq.nn.MatMul(), fq.nn.MatMul(), fq.nn.Add()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = self.mix(self.scores(q, k.transpose(-1, -2)).softmax(-1), v)
        return self.add(x, self.out(mixed.transpose(1, 2).flatten(2)))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.ConvTranspose2d(8, 8, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (3, 16)),
    "mlp_3d": (mlp, (2, 3, 16)),
    "cnn": (cnn, (2, 3, 16, 16)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16)),
}


def written(name: str, preset: str, folder: Path, **options: Any) -> tuple[nn.Module, Tensor, Path]:
    make, shape = MODELS[name]
    x = torch.randn(shape)
    model = fq.prepare(make().eval(), preset)
    fq.calibrate(model, [x])
    fq.export_onnx(model, x, folder / "m.onnx", **options)
    return model, x * 3, folder / "m.onnx"


@sweep("name, preset", full(MODELS, PRESETS), in_turn(MODELS, PRESETS))
def test_default_options(name: str, preset: str, tmp_path: Path) -> None:
    dynamic_shapes = ({0: "batch"},) if preset == "FP8" else None
    model, x, path = written(name, preset, tmp_path, dynamic_shapes=dynamic_shapes)
    report = fq.verify_onnx(path, model, [x])
    assert report.exact
    assert report.optimised_error is None
    # The optimisations leave out no ReLU and fuse nothing.
    assert [row.differing for row in report.optimised] == [0]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", ["standard", "trt"])
def test_other_styles_have_nothing_between(style: str, tmp_path: Path) -> None:
    import onnx

    _, _, path = written("mlp", "FP8", tmp_path, style=style)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert "Sum" not in nodes
    assert nodes.count("DequantizeLinear") == 4


def test_zeros_of_both_signs_nan_and_inf(tmp_path: Path) -> None:
    class Quantized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fq.fake_quantize(x, "float8_e4m3fn", scale=0.5)

    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-30, -1e-30, 1.0])
    fq.export_onnx(Quantized(), x, tmp_path / "m.onnx")
    report = fq.verify_onnx(tmp_path / "m.onnx", Quantized(), [x])
    assert report.exact
    assert [row.differing for row in report.optimised] == [0]


def test_a_file_that_does_not_load_says_what_does(tmp_path: Path) -> None:
    """The standard style has nothing between, and ONNX Runtime 1.31 fuses float8 into kernels that it lacks."""
    model, x, path = written("mlp", "FP8", tmp_path, style="standard")
    report = fq.verify_onnx(path, model, [x])
    assert report.exact
    if report.optimised_error is not None:
        assert report.optimised_error.startswith("ONNX Runtime cannot load it: ")
        assert report.optimised_error in str(report)
        assert "SessionOptions.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL" in str(report)


class Bounded(nn.Module):
    """A convolution and a Hardtanh, which a sum reads, too."""

    def __init__(self, bound: Callable[[Tensor], Tensor], *, twice: bool = False) -> None:
        super().__init__()
        self.first, self.bound, self.second, self.twice = nn.Conv2d(3, 8, 3), bound, nn.Conv2d(8, 8, 1), twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.bound(self.first(x))
        return self.second(x) + x if self.twice else self.second(x)


@pytest.mark.parametrize(
    ("preset", "bound", "left"),
    [
        ("int8_affine", nn.Hardtanh(-0.5, 0.7), 0),
        ("int8_affine", nn.Hardtanh(-0.1, 5.0), 0),
        ("int8_affine", nn.Hardtanh(0.0, 0.7), 0),
        ("int8_affine", nn.ReLU6(), 0),
        ("int8_affine", nn.ReLU(), 0),
        ("int8_affine", partial(torch.clamp, min=-0.1), 0),
        ("int8_affine", partial(torch.clamp, min=0), 0),  # which torch writes as Max
        ("int8_affine", partial(torch.clamp, max=0), 0),
        ("int8_affine", partial(torch.clamp, min=0.1), 1),
        ("int8_affine", lambda x: x.flatten(2).relu().unflatten(2, (6, 6)), 1),  # behind another quantizer
        ("int8_affine", lambda x: x.relu().transpose(2, 3)[:, :, 1:].unsqueeze(0).squeeze(0), 0),
        ("int8", nn.Hardtanh(), 1),  # whose codes end at -128, and those of the bound at -127
        ("int8", nn.ReLU(), 1),
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_a_clip_where_codes_end_is_left_out(
    preset: str, bound: Callable[[Tensor], Tensor], left: int, twice: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    batches = [2 * torch.randn(2, 3, 8, 8) for _ in range(3)]
    model = fq.prepare(
        Bounded(bound, twice=twice).eval(), preset, batches[0], target="qnn" if preset != "int8" else "openvino"
    )
    fq.calibrate(model, batches, progress=False)
    export_onnx(model, batches[0], path := tmp_path / "model.onnx")
    assert sum(node.op_type in ("Clip", "Max", "Min", "Relu") for node in onnx.load(path).graph.node) == left
    report = fq.verify_onnx(path, model, batches)
    assert report.exact, str(report)
