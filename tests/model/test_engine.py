"""An engine is a value that `prepare`, `advise`, `set_execution` and `deliver` read."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError, CoverageWarning, ExportError
from fakequant.model.config import TensorConfig
from fakequant.nn import Device, quantizers


class Tagger(nn.Module):
    """A table, whose weight the head shares, and a product between them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 16, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)).relu())


def specs(model: nn.Module) -> dict[str, str]:
    return {name: str(one.spec) for name, one in quantizers(model).items()}


@pytest.mark.parametrize(
    ("preset", "of_input"),
    [
        ("int8_per_token", "int8 per_token reciprocal"),
        ("w8a8_dynamic", "int8 per_token reciprocal"),
        ("mxfp4", "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:even"),
        ("mxfp8", "float8_e4m3fn per_block(-1:32,pad) scale=float8_e8m0fnu:even_fp4"),
        ("fp8", "float8_e4m3fn per_tensor"),
    ],
)
def test_a_server_computes_its_variant(preset: str, of_input: str) -> None:
    with pytest.warns(CoverageWarning, match="^for vllm, .*table stays in float, because it holds no quantized"):
        model = fq.prepare(Tagger(), preset, target="sglang")
    names = ("_input_quantizer", "_weight_quantizer")
    assert set(specs(model)) == {f"{layer}.{one}" for layer in ("body", "head") for one in names}
    assert specs(model)["body._input_quantizer"] == of_input
    weight = specs(fq.prepare(Tagger(), preset))["body._weight_quantizer"]
    assert specs(model)["body._weight_quantizer"] == weight


def lines_of(preset: Any, target: Any, **how: Any) -> list[str]:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), torch.ones(2, 256)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fq.prepare(net, preset, x, target=target, **how)
    return [str(one.message) for one in said if "gain" in str(one.message) or "suits" in str(one.message)]


@pytest.mark.parametrize(
    ("preset", "target", "known"),
    [
        ("int8_weight_only", "xnnpack", "It takes INT8, INT8_AFFINE, W4A8_EXECUTORCH: docs/engines/executorch.md."),
        ("fp8", "qnn", "It takes INT8_AFFINE: docs/engines/qnn.md."),
        (fq.presets.FP8_E5M2, "coreai", "docs/engines/coreai.md."),
        ("mxfp4", "sglang", "It takes W8A8_DYNAMIC, FP8_DYNAMIC, INT4_GROUP128: docs/engines/vllm.md."),
    ],
)
def test_a_preset_by_which_an_engine_is_not_known_to_gain_is_said_in_a_line(
    preset: Any, target: str, known: str
) -> None:
    (line,) = lines_of(preset, target)
    assert line.startswith("It is not known that ")
    assert line.endswith(known)


def test_a_line_names_presets_of_rules_and_no_preset_that_becomes_a_known_one() -> None:
    (line,) = lines_of("int8", "qnn", rules={"2": "mxfp8"})
    assert "qnn gains by MXFP8. " in line
    (line,) = lines_of("int8", "onnxruntime")
    assert line.endswith("presets.INT8_AFFINE suits onnxruntime")
    own = fq.Config([fq.Rule(weight="int8 per_tensor")])
    unknown = fq.Engine("unknown", "not run")
    for preset, target in (("int8", "qnn"), ("int8_per_token", "vllm"), (own, "qnn"), ("fp8", unknown)):
        assert lines_of(preset, target) == []


def test_a_head_with_the_weight_of_a_table_follows_it() -> None:
    with pytest.warns(
        CoverageWarning, match="head and table stay|table and head stay|table, head stay|head, table stay"
    ):
        model = fq.prepare(Tagger(tied=True), "int8_weight_only", target="vllm")
    assert set(specs(model)) == {"body._weight_quantizer"}


@pytest.mark.parametrize("preset", ["int8", "int8_affine"])
def test_activations_of_phones_are_unsigned(preset: str) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8)), preset, torch.ones(1, 8), target="qnn")
    assert specs(model) == {
        "0._input_quantizer": "uint8 per_tensor",
        "0._weight_quantizer": "int8 per_channel(0)",
        "0._output_quantizer": "uint8 per_tensor",
    }


@pytest.mark.parametrize(
    ("preset", "target", "message"),
    [
        ("gguf_q4_k", "vllm", "vllm cannot load GGUF_Q4_K: .*the nearest preset that it holds is INT4_GROUP32"),
        ("int8", "torchao", "torchao cannot load INT8: .*INT8_WEIGHT_ONLY"),
        ("int8_affine", "tensorrt", "tensorrt cannot load INT8_AFFINE: .*use a symmetric specification"),
    ],
)
def test_what_an_engine_cannot_load_is_refused_before_the_work(preset: str, target: str, message: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        fq.prepare(net, preset, torch.ones(1, 64), target=target)
    assert not quantizers(net)
    assert type(net[0]) is nn.Linear


def test_servers_fix_the_global_scale_of_inputs(tmp_path: Path) -> None:
    """The query, the key and the value read one tensor, and get one scale."""
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64)), "nvfp4", target="vllm")
    with pytest.raises(CalibrationError, match="calibrate needs batches"):
        fq.calibrate(model)
    with pytest.raises(ExportError, match=r"its input has no range yet; call fakequant\.calibrate"):
        fq.deliver(model, tmp_path / "early", target="vllm")
    x = torch.randn(8, 64)
    fq.calibrate(model, iter([x, 3 * x]), progress=False)
    quantizer = quantizers(model)["0._input_quantizer"]
    assert quantizer.global_scale is not None
    assert torch.equal(quantizer.global_scale, 448 * 6 / (3 * x).abs().amax().reshape(1))
    fq.deliver(model, tmp_path / "served", target="vllm")
    plain = fq.prepare(nn.Sequential(nn.Linear(64, 64)), "nvfp4")
    fq.calibrate(plain, [x], progress=False)
    assert quantizers(plain)["0._input_quantizer"].global_scale is None


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown target 'vlm'.*vllm"):
        fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8", target="vlm")
    with pytest.raises(ConfigError, match=r"register_engine takes a fakequant\.Engine, got 'mine'"):
        fq.register_engine("mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="this engine can only be simulated"):
        fq.set_execution(fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8"), "vllm")


def coarse(field: str, config: TensorConfig) -> TensorConfig:
    """4 bits in place of 8 for weights."""
    return TensorConfig("int4 per_channel(0)") if field == "weight" else config


def truncated(parts: Any, to: Any) -> Tensor:
    """Codes rounded down."""
    return torch.floor((parts.sums * parts.of_input * parts.of_weight + parts.bias) / to.scale) + to.zero_point


MINE = fq.Engine(
    "mine",
    "invented",
    kinds=(("INT8",),),
    files="compressed-tensors",
    variant=coarse,
    device=Device("mine", {"product": truncated}, "a test"),
    placement=lambda: fq.Target("mine", frozenset({"linear"}), frozenset(), outputs=frozenset({"linear"})),
    aliases=("ours",),
)


def test_an_invented_engine_is_one_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fakequant.model.engine._engines", {**fq.known_engines()})
    fq.register_engine(MINE)
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    with pytest.warns(CoverageWarning, match="for mine, weights are int4 per_channel"):
        model = fq.prepare(nn.Sequential(nn.Linear(32, 32)), "int8", x, target="ours")
    fq.calibrate(model, [x], progress=False)
    simulated = model(x)
    stored = fq.set_execution(model, "ours")(x)
    steps = ((simulated - stored) / quantizers(model)["0._output_quantizer"].scale).round()
    assert steps.unique().tolist() == [0, 1]
    advice = fq.advise(nn.Sequential(nn.Linear(32, 32)), [x, x + 1], target="mine", floor=-100)
    assert advice.best.measured.preset == "INT8"
    fq.set_execution(model, "simulate")


def test_files_follow_from_the_engine(tmp_path: Path) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(64, 64)), "int4_group32", target="vllm")
    path = fq.deliver(model, tmp_path / "served", target="vllm")
    assert fq.delivery.verify_delivery(path, model).passed
    with pytest.raises(ConfigError, match=r"qnn .*call fakequant\.export_onnx.*style='portable'"):
        fq.deliver(model, tmp_path / "phone", target="qnn")
    both: list[dict[str, Any]] = [{}, {"format": "gguf", "target": "vllm"}]
    for given in both:
        with pytest.raises(ConfigError, match=r"give a format, .* or the engine in its place"):
            fq.deliver(model, tmp_path / "none", **given)


@pytest.mark.parametrize(
    ("preset", "target"),
    [("gguf_q4_k", "litert"), ("nvfp4", "coreml"), ("fp8", "executorch"), ("nf4_weight_only", "executorch")],
)
def test_exporters_refuse_before_the_work(preset: str, target: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    with pytest.raises(ConfigError, match=f"cannot load {preset.upper()}: cannot be expressed in"):
        fq.prepare(net, preset, torch.ones(2, 64), target=target)
    assert not quantizers(net)


def test_ranges_of_every_token_have_no_place_behind_a_layer() -> None:
    """An engine that quantizes results has fixed ranges for them."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = fq.prepare(net, "w4a8_executorch", torch.ones(2, 64), target="executorch")
    assert [name for name in quantizers(model) if "output" in name] == []


def test_a_phone_is_not_said_to_compute_what_it_does_not() -> None:
    signed = fq.prepare(nn.Sequential(nn.Linear(8, 8)), "int8")
    fq.calibrate(signed, [torch.randn(4, 8)], progress=False)
    with pytest.warns(CoverageWarning, match="the device has unsigned codes of activations, not int8 per_tensor"):
        fq.set_execution(signed, "qnn")
    early = fq.prepare(nn.Sequential(nn.Linear(8, 8)), "int8_affine", torch.ones(1, 8), target="qnn")
    with pytest.warns(CoverageWarning, match=r"it has no range yet: call fakequant\.calibrate"):
        fq.set_execution(early, "qnn")


def test_files_do_not_keep_a_device(tmp_path: Path) -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(8, 8)), "int8_affine", torch.ones(1, 8), target="qnn")
    fq.calibrate(model, [torch.randn(4, 8)], progress=False)
    with pytest.warns(UserWarning, match="files do not keep the execution 'qnn'"):
        fq.save(fq.set_execution(model, "qnn"), tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": None}, "variant takes a function"),
        ({"placement": fq.Target("x", frozenset(), frozenset())}, "placement takes a function that makes a Target"),
        ({"kinds": ("INT8",)}, "kinds takes tuples of names"),
        ({"packages": "acme"}, "packages takes names of distributions"),
        ({"device": "qnn"}, r"device takes a fakequant\.nn\.Device"),
    ],
)
def test_an_engine_says_what_is_wrong_with_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"an engine's {message}"):
        fq.Engine("mine", "not run", **change)


def test_names_of_engines_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakequant.model.engine._engines", {**fq.known_engines()})
    fq.register_engine(replace(MINE, aliases=("ours",)))
    fq.register_engine(replace(MINE, aliases=()))
    assert "ours" not in fq.known_engines()
    for wrong in (replace(MINE, aliases=("mlx",)), replace(MINE, name="sglang", aliases=())):
        with pytest.raises(ConfigError, match=r"(mlx|sglang) already names another engine"):
            fq.register_engine(wrong)
    assert "mine" in fq.known_engines()
    fq.register_engine(fq.Engine("bare", "not run"))
    with pytest.raises(ConfigError, match="the engine bare has no presets"):
        fq.advise(nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 4)] * 2, target="bare")
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "int8")
    for wrong in (["qnn"], "Qnn", fq.known_engines()["mlx"]):
        with pytest.raises(ConfigError, match="execution must be one of"):
            fq.set_execution(model, wrong)  # type: ignore[arg-type]
