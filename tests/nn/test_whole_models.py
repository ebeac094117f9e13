"""Models with attention, recurrent layers or quantized results through everything that follows `prepare`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CoverageWarning, ExportError
from fakequant.nn.quantized.attention import QuantMultiheadAttention
from tests.support.bits import assert_same_bits
from tests.support.copies import each_copier

PADDED = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])
SELF_ATTENTION = 8  # its quantizers
OUTPUTS = fq.Config("outputs", fq.Rule("*", input="int8", weight="int8 per_channel(0)", output="int8"))


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


class Decodes(nn.Module):
    """An encoder and a decoder: self-attention, attention to a memory, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        options = {"dropout": 0.1, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **options), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, **options), 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.decoder(x.flip(1), self.encoder(x), tgt_mask=mask, tgt_is_causal=True)


class Tags(nn.Module):
    def __init__(self, cls: Any = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.head = cls(5, 6, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))


@dataclass
class Case:
    make: Callable[[], nn.Module]
    x: Tensor
    lr: float = 1.0
    config: Any = "int8"

    def float(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()

    def quantized(self, config: Any = None) -> nn.Module:
        model = fq.prepare(self.float(), config or self.config)
        fq.calibrate(model, [self.x], "max")
        return model


ATTENTION, RECURRENT = Case(Decodes, data(3, 5, 16)), Case(Tags, data(2, 3, 5), 10.0)  # compilers unroll the steps
RESULTS = Case(network, data(4, 3, 6, 6), config=OUTPUTS)
CASES = {"attention": ATTENTION, "recurrent": RECURRENT, "results": RESULTS}
CASES["gru"] = Case(lambda: Tags(nn.GRU), RECURRENT.x, 10.0)
X, STEPS = ATTENTION.x, data(5, 11, 5)


# Exporters take seconds for each.
@pytest.fixture(
    scope="module", params=["attention", "recurrent", "results", pytest.param("gru", marks=pytest.mark.exhaustive)]
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def made(case: Case) -> nn.Module:
    torch.set_num_threads(1)
    return case.quantized()


@pytest.fixture(autouse=True)
def _recurrent_layers_are_compiled():
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@torch.no_grad()
@each_copier
def test_copies(made: nn.Module, case: Case, copier: Any) -> None:
    assert_same_bits(copier(made)(case.x), made(case.x))


@torch.no_grad()
def test_checkpoints_and_the_state_of_the_float_model(made: nn.Module, case: Case, tmp_path: Path) -> None:
    again = fq.load(case.float(), fq.save(made, tmp_path))
    assert_same_bits(again(case.x), made(case.x))
    assert again.state_dict().keys() == made.state_dict().keys()
    assert case.float().load_state_dict(fq.float_state_dict(made))
    assert set(case.float().state_dict()) <= set(made.state_dict())


def test_analysis(made: nn.Module, case: Case) -> None:
    assert all(quantizer.calibrated for quantizer in fq.nn.quantizers(made).values())
    assert not fq.unquantized(made, case.x, products_only=True)
    assert set(fq.layer_sqnr(made, [case.x])) == set(fq.nn.quantizers(made))
    found = {row.layer: row.value for row in fq.sensitivity(made, [case.x])}
    assert {name.rpartition(".")[0] for name in fq.nn.quantizers(made)} == {*found}
    assert "decoder.layers.0.multihead_attn" not in found or 10 < found["decoder.layers.0.multihead_attn"] < 60


def test_weights_are_baked(case: Case) -> None:
    model = case.quantized()
    expected = model(case.x)
    assert_same_bits(fq.bake_weights(model)(case.x), expected)
    assert not any(name.endswith("weight_quantizer") for name in fq.nn.quantizers(model))


@pytest.mark.parametrize("scales", [fq.qat.Scales.FIXED, fq.qat.Scales.LEARNED])
def test_training(case: Case, scales: Any) -> None:
    model = case.quantized()
    options = fq.qat.Options(scales=scales)
    schedule = fq.qat.Schedule(original_lr=case.lr, original_epochs=30)
    batch = case.x, torch.zeros_like(model(case.x))
    losses = fq.qat.finetune(model, [batch], nn.functional.mse_loss, schedule, options)
    assert losses[-1] < losses[0]
    assert not [name for name, p in model.named_parameters() if p.grad is None]


@torch.no_grad()
@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs(made: nn.Module, case: Case, strict: bool) -> None:
    assert_same_bits(torch.export.export(made, (case.x,), strict=strict).module()(case.x), made(case.x))


@torch.no_grad()
def test_compiled_and_captured(made: nn.Module, case: Case) -> None:
    expected = made(case.x)
    assert_same_bits(torch.compile(made, fullgraph=True, backend="aot_eager")(case.x), expected)
    assert_same_bits(fq.ir.capture(made, case.x).run(case.x), expected)


def test_onnx(made: nn.Module, case: Case, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    record = fq.export_onnx(made, case.x, tmp_path / "model.onnx")
    assert not record.left_out
    assert case is not RESULTS or "0._output_quantizer" in [quantizer.quantizer for quantizer in record.quantizers]
    assert fq.verify_onnx(tmp_path / "model.onnx", made)


# Attention


@pytest.fixture(scope="module")
def attends() -> nn.Module:
    return ATTENTION.quantized()


def test_every_attention_is_quantized(attends: nn.Module) -> None:
    attentions = {name: m for name, m in attends.named_modules() if isinstance(m, QuantMultiheadAttention)}
    assert {name: len(fq.nn.quantizers(m)) for name, m in attentions.items()} == {
        "encoder.layers.0.self_attn": SELF_ATTENTION,
        "decoder.layers.0.self_attn": SELF_ATTENTION,
        "decoder.layers.0.multihead_attn": SELF_ATTENTION + 1,  # the memory is key and value
    }
    config = fq.presets.INT8.with_rule(fq.Rule("*", layers="MultiheadAttention"))
    model = fq.prepare(Decodes(), config)
    assert not any(isinstance(m, QuantMultiheadAttention) for m in model.modules())


def test_without_gradients_it_computes_the_same(attends: nn.Module) -> None:
    expected = attends(X).detach()
    with torch.no_grad():
        assert_same_bits(attends(X), expected)
        padded = attends.encoder(X, src_key_padding_mask=PADDED)
    assert_same_bits(padded, attends.encoder(X, src_key_padding_mask=PADDED).detach())


def test_summaries(attends: nn.Module) -> None:
    table = str(fq.summary(attends, X))
    assert "6 x int8 per_tensor" in next(line for line in table.splitlines() if "encoder.layers.0.self_attn" in line)
    assert "left in float: 0 products" in table
    weights = sum(p.numel() for p in attends.parameters() if p.dim() == 2)
    others = sum(p.numel() for p in attends.parameters()) - weights
    scales = sum(p.shape[0] for p in attends.parameters() if p.dim() == 2)  # one of four bytes for each output channel
    assert fq.summary(attends).bytes_quantized == weights + 4 * others + 4 * scales
    assert "8 x int8 per_tensor" in str(fq.summary(RECURRENT.quantized()))


def test_bfloat16() -> None:
    y = ATTENTION.quantized().to(torch.bfloat16)(X.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(ATTENTION.quantized()(X)).all()


@pytest.mark.parametrize("config", ["int8_per_token", "nvfp4", "mxfp8", "int4_weight_only", "fp8"])
def test_other_presets(config: str) -> None:
    model = ATTENTION.quantized(config)
    y = model(X)
    with fq.disabled(model):
        exact = model(X)
    assert 0 < (y - exact).abs().max() < 2.5


def test_symbolic_trace_calls_it_once(attends: nn.Module) -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = attends.encoder.layers[0].self_attn

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x, need_weights=False)[0]

    traced = torch.fx.symbolic_trace(Calls())
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_function", "output"]
    assert_same_bits(traced(X), Calls()(X))


# Recurrent layers


@pytest.mark.parametrize(
    ("cls", "config"), [(nn.LSTM, "int8"), (nn.RNN, "int8_per_token"), (nn.RNN, "int8_weight_only")]
)
def test_a_file_takes_sequences_of_all_lengths(cls: Any, config: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model, path = Case(lambda: Tags(cls), RECURRENT.x).quantized(config), tmp_path / "model.onnx"
    fq.export_onnx(model, RECURRENT.x, path, dynamic_shapes=({0: "batch", 1: "steps"},))
    assert sum(node.op_type == "Scan" for node in onnx.load(path).graph.node) == 4
    assert len(onnx.load(path).graph.node) < 80
    found = fq.verify_onnx(path, model, [STEPS, RECURRENT.x])
    assert found.exact
    assert not found.uncovered


def test_ranges_that_a_loop_cannot_hold_are_named_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    tensors = {"input": fq.TensorConfig("int8 per_tensor", dynamic=True), "weight": "int8 per_channel(0)"}
    model = fq.prepare(Tags(nn.GRU).eval(), fq.Config("dynamic", (fq.Rule("*", **tensors),)))
    reason = "because the range of its hidden state is computed from all rows of a step"
    with pytest.raises(ExportError, match=f"{reason}, which needs a fixed number of steps"):
        fq.export_onnx(model, RECURRENT.x, tmp_path / "steps.onnx", dynamic_shapes=({1: "steps"},))
    with pytest.warns(CoverageWarning, match=f"{reason}: the file has the nodes of 3 steps"):
        fq.export_onnx(model, RECURRENT.x, tmp_path / "model.onnx")


# Results


def test_results_are_those_of_the_layer_quantized() -> None:
    model, without = RESULTS.quantized(), RESULTS.quantized("int8")
    layer, plain, x = model[0], without[0], RESULTS.x
    assert layer.output_quantizer is layer._output_quantizer
    assert_same_bits(layer(x), layer.output_quantizer(plain(x)))
    largest = plain.float_class.forward(RESULTS.float()[0], x).abs().max()
    assert layer.output_quantizer.scale.item() == (largest / 127).item()
    assert all(one.output_quantizer is None for one in without if hasattr(one, "output_quantizer"))
    head = str(fq.summary(model)).splitlines()[0]
    assert head.split() == ["layer", "type", "input", "weight", "output", "execution", "state"]
    assert "output" not in str(fq.summary(without))


def test_an_output_quantizer_can_be_put_there_and_taken_away() -> None:
    model = RESULTS.quantized("int8")
    before = model(RESULTS.x)
    model[4].output_quantizer = fq.nn.Quantizer("int4", dynamic=True)
    assert_same_bits(model(RESULTS.x), fq.fake_quantize(before, "int4"))
    model[4].output_quantizer = None
    assert_same_bits(model(RESULTS.x), before)


def test_blocks_of_results_lie_along_channels() -> None:
    config = fq.Config("blocks", fq.Rule("*", layers=("Conv2d", "Linear"), output="int8 per_block(-1:2,pad)"))
    layers = [layer for layer in RESULTS.quantized(config) if hasattr(layer, "output_quantizer")]
    assert layers[0].output_quantizer.scale.shape[1] == 2
    assert layers[-1].output_quantizer.scale.shape[-1] == 3


def test_first_of_several_results() -> None:
    layer = fq.prepare(nn.MultiheadAttention(8, 2), fq.Config("outputs", fq.Rule("*", weight="int8", output="int8")))
    x = torch.randn(3, 2, 8)
    fq.calibrate(layer, [(x, x, x)], "max")
    y, weights = layer(x, x, x)
    assert_same_bits(y, layer.output_quantizer(y))
    assert weights.shape == (2, 3, 3)


def test_rules_for_results_are_stored() -> None:
    assert fq.Config.from_dict(OUTPUTS.to_dict()) == OUTPUTS
    assert not fq.Rule("*", output="int8").leaves_in_float


def test_a_symbolic_trace_quantizes_results_once() -> None:
    model, calls = RESULTS.quantized(), []
    traced = torch.fx.symbolic_trace(model)
    model[4].output_quantizer.register_forward_hook(lambda *_: calls.append(1))
    traced(RESULTS.x)
    assert calls == [1]
