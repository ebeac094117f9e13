"""Quantized recurrent layers and cells: torch's bits without quantizers, and a loop written out here with them."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fakequant as fq
from fakequant.errors import CoverageWarning, ExportError
from fakequant.nn.quantized.recurrent import GateQuantizers, unroll
from tests.support.bits import assert_same_bits

IN, HIDDEN, N, STEPS = 5, 6, 4, 7
LAYERS = [nn.LSTM, nn.GRU, nn.RNN]
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]
OPTIONS = [
    {},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
    {"batch_first": True, "num_layers": 2, "dropout": 0.5},
]


def data(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INPUTS = {
    "sequence": lambda: data(N, N, IN),  # as many steps as sequences: it fits batch_first too
    "one": lambda: data(STEPS, IN),
    "packed": lambda: pack_sequence([data(n, IN, seed=n) for n in (2, 6, 3, 6)], enforce_sorted=False),
    "sorted": lambda: pack_sequence([data(n, IN, seed=n) for n in (5, 3, 3, 1)]),
}


def made(cls: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(IN, HIDDEN, **options).eval()


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [x for x in result if x is not None]
    return [x for part in result for x in tensors(part)]


def assert_same(actual: Any, expected: Any) -> None:
    for a, b in zip(tensors(actual), tensors(expected), strict=True):
        assert_same_bits(a.detach(), b.detach())


def state(layer: Any, kind: str) -> Any:
    count = len(layer.all_weights)
    h = data(count, HIDDEN) if kind == "one" else data(count, N, HIDDEN)
    return (h, 2 * h) if layer.mode == "LSTM" else h


def quantized(layer: Any, batches: Any = None, config: Any = "int8") -> Any:
    model = fq.prepare(copy.deepcopy(layer), config)
    # A packed sequence is a tuple, too.
    whole = batches is not None and isinstance(batches[0], PackedSequence)
    fq.calibrate(model, batches or [INPUTS["sequence"]()], "max", inputs=(lambda batch: (batch,)) if whole else None)
    return model


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cls", LAYERS)
def test_without_quantizers_a_layer_has_the_bits_of_torch(cls: Any, options: Any, kind: str) -> None:
    layer = made(cls, **options).train()
    model = fq.prepare(copy.deepcopy(layer), "int8")
    assert type(model).__name__ == f"Quant{cls.__name__}"
    for hx in (None, state(layer, kind)):
        with fq.disabled(model):
            torch.manual_seed(1)
            actual = model(INPUTS[kind](), hx)
            torch.manual_seed(1)
            assert_same(actual, layer(INPUTS[kind](), hx))


@pytest.mark.parametrize("cls", CELLS)
def test_without_quantizers_a_cell_has_the_bits_of_torch(cls: Any) -> None:
    cell = made(cls)
    model = fq.prepare(copy.deepcopy(cell), "int8")
    for x, h in ((data(N, IN), data(N, HIDDEN)), (data(IN), data(HIDDEN))):
        for hx in (None, (h, 2 * h) if cls is nn.LSTMCell else h):
            with fq.disabled(model):
                assert_same(model(x, hx), cell(x, hx))


class Loop:
    """A layer by its definition: its quantizers, the products, and torch's cell functions written out."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def quantized(self, attribute: str, x: Tensor) -> Tensor:
        quantizer = getattr(self.layer, attribute)
        return fq.fake_quantize(x, quantizer.spec, scale=quantizer.scale, zero_point=quantizer.zero_point)

    def direction(self, steps: list[Tensor], suffix: str) -> list[Tensor]:
        """The hidden states [n, hidden] of the steps, from zeros."""
        layer = self.layer
        w, u = (self.quantized(f"_{k}{suffix}_weight_quantizer", getattr(layer, f"weight_{k}{suffix}")) for k in KINDS)
        biases = [getattr(layer, f"bias_{k}{suffix}", None) for k in KINDS]
        h = c = steps[0].new_zeros(steps[0].shape[0], HIDDEN)
        outputs = []
        for step in steps:
            x, hidden = (
                self.quantized(f"{suffix}_input_quantizer", step),
                self.quantized(f"{suffix}_hidden_quantizer", h),
            )
            mode = getattr(layer, "mode", "")
            if mode == "LSTM":
                h, c = torch.lstm_cell(x, (hidden, c), w, u, *biases)
            else:
                h = (torch.gru_cell if mode == "GRU" else torch.rnn_tanh_cell)(x, hidden, w, u, *biases)
            outputs.append(h)
        return outputs


KINDS = ("ih", "hh")


@pytest.mark.parametrize("cls", LAYERS)
def test_every_factor_of_every_step_is_quantized(cls: Any) -> None:
    model = quantized(made(cls, num_layers=2, bidirectional=True))
    loop, steps = Loop(model), list(INPUTS["sequence"]())
    for index in range(2):
        forward = loop.direction(steps, f"_l{index}")
        backward = loop.direction(steps[::-1], f"_l{index}_reverse")[::-1]
        steps = [torch.cat(both, 1) for both in zip(forward, backward, strict=True)]
    assert_same_bits(model(INPUTS["sequence"]())[0], torch.stack(steps))


def test_ranges_are_those_of_all_steps() -> None:
    layer = made(nn.GRU)
    model = quantized(layer)
    x = INPUTS["sequence"]()
    outputs, _ = unroll(layer, x, None, [GateQuantizers(lambda x: x, lambda x: x)])
    assert model._l0_input_quantizer.scale.item() == (x.abs().max() / 127).item()
    # The last hidden state is of no product.
    assert model._l0_hidden_quantizer.scale.item() == (outputs[:-1].abs().max() / 127).item()
    assert model._hh_l0_weight_quantizer.scale.shape == (3 * HIDDEN, 1)


@pytest.mark.parametrize("cls", CELLS)
def test_cells_are_quantized(cls: Any) -> None:
    cell = made(cls)
    x, h = data(N, IN), data(N, HIDDEN)
    hx = (h, 2 * h) if cls is nn.LSTMCell else h
    model = quantized(cell, [{"input": x, "hx": hx}])
    q = [model._input_quantizer(x), model._hidden_quantizer(h)]
    w = [getattr(model, f"_{k}_weight_quantizer")(getattr(cell, f"weight_{k}")) for k in KINDS]
    reference = copy.deepcopy(cell)
    reference.weight_ih.data, reference.weight_hh.data = (weight.detach() for weight in w)
    assert_same(model(x, hx), reference(q[0], (q[1], 2 * h) if cls is nn.LSTMCell else q[1]))
    one = (h[0], 2 * h[0]) if cls is nn.LSTMCell else h[0]
    torch.testing.assert_close(tensors(model(x[0], one))[0], tensors(model(x, hx))[0][0])


def test_relu_cells_are_relu() -> None:
    model = quantized(made(nn.RNNCell, nonlinearity="relu"), [data(N, IN)])
    assert (model(data(N, IN)) >= 0).all()


def test_packed_sequences_are_quantized() -> None:
    model = quantized(made(nn.LSTM, bidirectional=True), [INPUTS["packed"]()], "int8")
    packed = INPUTS["sorted"]()
    y, (h, _) = model(packed)
    alone, (last, _) = model(packed.data[packed.batch_sizes.cumsum(0) - packed.batch_sizes])
    # Products of one row are summed in another order.
    torch.testing.assert_close(nn.utils.rnn.unpad_sequence(*nn.utils.rnn.pad_packed_sequence(y))[0], alone)
    torch.testing.assert_close(h[:, 0], last)


class Tags(nn.Module):
    def __init__(self, cls: Any = nn.LSTM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = cls(IN, HIDDEN, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


X = data(2, 3, IN)  # compilers unroll the steps


# A GRU too in the exhaustive run: each exporter takes seconds.
@pytest.fixture(scope="module", params=[nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.exhaustive)])
def tags(request: pytest.FixtureRequest) -> Tags:
    torch.set_num_threads(1)
    model = Tags(request.param).eval()
    fq.prepare(model, "int8")
    fq.calibrate(model, [X], "max")
    return model


def test_copies(tags: Tags) -> None:
    assert_same_bits(copy.deepcopy(tags)(X), tags(X))
    assert_same_bits(pickle.loads(pickle.dumps(tags))(X), tags(X))


def test_checkpoints(tags: Tags, tmp_path: Path) -> None:
    fresh = Tags(type(tags.rnn).float_class).eval()
    fresh.load_state_dict(fq.float_state_dict(tags))
    assert_same_bits(fq.load(fresh, fq.save(tags, tmp_path))(X), tags(X))


def test_summary_and_analysis(tags: Tags) -> None:
    assert "8 x int8 per_tensor" in str(fq.summary(tags))
    assert not fq.unquantized(tags, X, products_only=True)
    assert set(fq.layer_sqnr(tags, [X])) == set(fq.nn.quantizers(tags))
    assert [found.layer for found in fq.sensitivity(tags, [X])]


def test_weights_are_baked(tags: Tags) -> None:
    model = copy.deepcopy(tags)
    assert_same_bits(fq.bake_weights(model)(X), tags(X))


@pytest.mark.parametrize("scales", [fq.qat.Scales.FIXED, fq.qat.Scales.LEARNED])
def test_training(tags: Tags, scales: Any) -> None:
    model = copy.deepcopy(tags)
    target = torch.zeros(2, 3, 3)
    schedule = fq.qat.Schedule(original_lr=10.0, original_epochs=30)
    losses = fq.qat.finetune(model, [(X, target)], nn.functional.mse_loss, schedule, fq.qat.Options(scales=scales))
    assert losses[-1] < losses[0]
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_exported_programs(tags: Tags) -> None:
    with torch.no_grad():
        # Dynamo takes no subclass of torch's recurrent layers without this.
        for strict in (True, False):
            with torch._dynamo.config.patch(allow_rnn=True):
                program = torch.export.export(tags, (X,), strict=strict)
            assert_same_bits(program.module()(X), tags(X))


def test_compiled(tags: Tags) -> None:
    torch.compiler.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        assert_same_bits(torch.compile(tags, fullgraph=True, backend="aot_eager")(X), tags(X))


def test_one_layer_is_compiled_and_exported() -> None:
    torch.compiler.reset()
    model, x = quantized(made(nn.GRU)), data(2, N, IN)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        assert_same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
        assert_same(torch.export.export(model, (x,), strict=False).module()(x), model(x))


def test_graphs(tags: Tags) -> None:
    with torch.no_grad():
        assert_same_bits(fq.ir.capture(tags, X).run(X), tags(X))


def test_onnx(tags: Tags, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    record = fq.export_onnx(tags, X, tmp_path / "model.onnx")
    assert not record.left_out
    assert fq.verify_onnx(tmp_path / "model.onnx", tags)


def test_the_file_takes_sequences_of_all_lengths(tags: Tags, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "model.onnx"
    fq.export_onnx(tags, X, path, dynamic_shapes=({0: "batch", 1: "steps"},))
    assert sum(node.op_type == "Scan" for node in onnx.load(path).graph.node) == 4
    assert len(onnx.load(path).graph.node) < 60
    found = fq.verify_onnx(path, tags, [data(5, 11, IN), X])
    assert found.exact
    assert not found.uncovered


@pytest.mark.parametrize("config", ["int8_per_token", "int8_weight_only"])
def test_a_file_with_ranges_of_tokens_takes_sequences_of_all_lengths(config: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = fq.prepare(Tags(nn.RNN).eval(), config)
    fq.export_onnx(model, X, tmp_path / "model.onnx", dynamic_shapes=({0: "batch", 1: "steps"},))
    found = fq.verify_onnx(tmp_path / "model.onnx", model, [data(5, 11, IN), X])
    assert found.exact
    assert not found.uncovered


def test_ranges_that_a_loop_cannot_hold_are_named_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    config = fq.Config(
        "dynamic", (fq.Rule("*", input=fq.TensorConfig("int8 per_tensor", dynamic=True), weight="int8 per_channel(0)"),)
    )
    model = fq.prepare(Tags(nn.GRU).eval(), config)
    reason = "because the range of its hidden state is computed of whole steps"
    with pytest.raises(ExportError, match=f"{reason}, and the number of steps is dynamic"):
        fq.export_onnx(model, X, tmp_path / "steps.onnx", dynamic_shapes=({1: "steps"},))
    with pytest.warns(CoverageWarning, match=f"{reason}: the file has the nodes of 3 steps"):
        fq.export_onnx(model, X, tmp_path / "model.onnx")


def test_layers_with_projections_stay_in_float() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 6, proj_size=3))
    with pytest.warns(CoverageWarning, match=r"^1 module with 73 % of the parameters stays in float: LSTM \(1: "):
        fq.prepare(model, "int8")
    assert type(model[1]) is nn.LSTM
    assert fq.nn.quantizers(model).keys() == {"0._input_quantizer", "0._weight_quantizer"}
