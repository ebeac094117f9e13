"""Models with attention through everything that follows `prepare`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.nn.quantized.attention import QuantMultiheadAttention
from tests.support.bits import assert_same_bits
from tests.support.copies import assert_compiled_alike, each_copier

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(7))
PADDED = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])
QUANTIZERS = 8  # those of self-attention


class Decodes(nn.Module):
    """An encoder and a decoder: self-attention, attention to a memory, and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"dropout": 0.1, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **options), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, **options), 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.decoder(x.flip(1), self.encoder(x), tgt_mask=mask, tgt_is_causal=True)


def quantized(config: Any = "int8") -> nn.Module:
    model = fq.prepare(Decodes().eval(), config)
    fq.calibrate(model, [X])
    return model


@pytest.fixture(scope="module")
def made() -> nn.Module:
    torch.set_num_threads(1)
    return quantized()


def test_every_attention_is_quantized(made: nn.Module) -> None:
    attentions = {name: m for name, m in made.named_modules() if isinstance(m, QuantMultiheadAttention)}
    assert list(attentions) == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    counts = [len(fq.nn.quantizers(m)) for m in attentions.values()]
    assert counts == [QUANTIZERS, QUANTIZERS, QUANTIZERS + 1]  # the memory is key and value
    assert not fq.unquantized(made, X, products_only=True)


def test_without_gradients_it_computes_the_same(made: nn.Module) -> None:
    expected = made(X).detach()
    with torch.no_grad():
        assert_same_bits(made(X), expected)
        padded = made.encoder(X, src_key_padding_mask=PADDED)
    assert_same_bits(padded, made.encoder(X, src_key_padding_mask=PADDED).detach())


@each_copier
def test_copies(made: nn.Module, copier: Any) -> None:
    assert_same_bits(copier(made)(X), made(X))


def test_checkpoints(made: nn.Module, tmp_path: Path) -> None:
    assert_same_bits(fq.load(Decodes().eval(), fq.save(made, tmp_path))(X), made(X))


def test_state_of_the_float_model(made: nn.Module) -> None:
    assert Decodes().load_state_dict(fq.float_state_dict(made))
    assert set(Decodes().state_dict()) <= set(made.state_dict())


def test_summary(made: nn.Module) -> None:
    table = str(fq.summary(made, X))
    assert "6 x int8 per_tensor" in next(line for line in table.splitlines() if "encoder.layers.0.self_attn" in line)
    assert "left in float: 0 products" in table
    weights = sum(p.numel() for p in made.parameters() if p.dim() == 2)
    others = sum(p.numel() for p in made.parameters()) - weights
    scales = sum(p.shape[0] for p in made.parameters() if p.dim() == 2)  # one of four bytes for each output channel
    assert fq.summary(made).bytes_quantized == weights + 4 * others + 4 * scales


def test_analysis(made: nn.Module) -> None:
    found = {s.layer: s.value for s in fq.sensitivity(made, [X])}
    assert 10 < found["decoder.layers.0.multihead_attn"] < 60
    ratios = fq.layer_sqnr(made, [X])
    assert set(ratios) == set(fq.nn.quantizers(made))


def test_weights_are_baked() -> None:
    model = quantized()
    expected = model(X)
    fq.bake_weights(model)
    assert_same_bits(model(X), expected)
    assert not any(name.endswith("weight_quantizer") for name in fq.nn.quantizers(model))


@pytest.mark.parametrize("learned", [False, True])
def test_training(learned: bool) -> None:
    model = quantized()
    scales = fq.qat.Scales.LEARNED if learned else fq.qat.Scales.FIXED
    options = fq.qat.Options(scales=scales)
    schedule = fq.qat.Schedule(original_lr=1.0, original_epochs=30)
    losses = fq.qat.finetune(model, [(X, X)], nn.functional.mse_loss, schedule, options)
    assert losses[-1] < losses[0]
    gradients = [name for name, p in model.named_parameters() if p.grad is None]
    assert not gradients


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs(made: nn.Module, strict: bool) -> None:
    with torch.no_grad():
        program = torch.export.export(made, (X,), strict=strict)
        assert_same_bits(program.module()(X), made(X))


def test_compiled(made: nn.Module) -> None:
    assert_compiled_alike(made, X)


def test_graphs(made: nn.Module) -> None:
    graph = fq.ir.capture(made, X)
    with torch.no_grad():
        assert_same_bits(graph.run(X), made(X))


def test_onnx(made: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    record = fq.export_onnx(made, X, tmp_path / "model.onnx")
    assert not record.left_out
    assert fq.verify_onnx(tmp_path / "model.onnx", made)


def test_bfloat16() -> None:
    model = quantized().to(torch.bfloat16)
    y = model(X.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    model = quantized()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(X)).all()


@pytest.mark.parametrize("config", ["int8_per_token", "nvfp4", "mxfp8", "int4_weight_only", "fp8"])
def test_other_presets(config: str) -> None:
    model = quantized(config)
    y = model(X)
    with fq.disabled(model):
        exact = model(X)
    assert 0 < (y - exact).abs().max() < 2.5


def test_symbolic_trace_calls_it_once(made: nn.Module) -> None:
    layer = made.encoder.layers[0].self_attn

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x, need_weights=False)[0]

    traced = torch.fx.symbolic_trace(Calls())
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_function", "output"]
    assert_same_bits(traced(X), Calls()(X))


def test_a_rule_leaves_it_in_float() -> None:
    config = fq.presets.INT8.with_rule(fq.Rule("*", layers="MultiheadAttention"))
    model = fq.prepare(Decodes(), config)
    assert not any(isinstance(m, QuantMultiheadAttention) for m in model.modules())
