"""Quantized recurrent layers and cells: torch's bits without quantizers, and a loop written out here with them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fakequant as fq
from fakequant.errors import CoverageWarning
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


def test_one_layer_is_compiled_and_exported() -> None:
    torch.compiler.reset()
    model, x = quantized(made(nn.GRU)), data(2, N, IN)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        assert_same(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
        assert_same(torch.export.export(model, (x,), strict=False).module()(x), model(x))


def test_layers_with_projections_stay_in_float() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 6, proj_size=3))
    with pytest.warns(CoverageWarning, match=r"^1 module with 73 % of the parameters stays in float: LSTM \(1: "):
        fq.prepare(model, "int8")
    assert type(model[1]) is nn.LSTM
    assert fq.nn.quantizers(model).keys() == {"0._input_quantizer", "0._weight_quantizer"}
