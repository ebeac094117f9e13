"""The step-by-step form of recurrent layers against torch's own, and quantizers against a loop written out here."""

import pytest
import torch
from torch import Tensor, nn

from fakequant import fake_quantize
from fakequant.nn.quantized.recurrent import GateQuantizers, unroll
from tests.support.bits import assert_same_bits


def plain(x: Tensor) -> Tensor:
    return x


# Sums of products run in another order in torch's layers: a few units in the last place of float64.
CLOSE = {"rtol": 0.0, "atol": 1e-14}
INPUTS = {
    "sequence": lambda: torch.randn(6, 4, 5, dtype=torch.float64),
    "one-sequence": lambda: torch.randn(6, 5, dtype=torch.float64),
    "packed": lambda: nn.utils.rnn.pack_sequence(
        [torch.randn(n, 5, dtype=torch.float64) for n in (2, 6, 3, 6)], enforce_sorted=False
    ),
    "packed-sorted": lambda: nn.utils.rnn.pack_sequence([torch.randn(n, 5, dtype=torch.float64) for n in (5, 3, 3, 1)]),
}


def states(layer, count):
    h = torch.randn(len(layer.all_weights), count, 7, dtype=torch.float64)
    h = h[:, 0] if count == 1 else h
    return (h, 2 * h) if layer.mode == "LSTM" else h


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("given", [False, True], ids=["from-zeros", "given-state"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True, "bias": False}, {"batch_first": True}],
    ids=str,
)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_without_quantization_it_is_torchs_layer(cls, options, given, kind):
    layer = cls(5, 7, **options).double()
    x = INPUTS[kind]()
    batch = {"sequence": 6 if layer.batch_first else 4, "one-sequence": 1}.get(kind, 4)
    hx = states(layer, batch) if given else None
    actual, after = unroll(layer, x, hx, [GateQuantizers(plain, plain)] * len(layer.all_weights))
    expected, expected_after = layer(x, hx)
    if isinstance(x, Tensor):
        torch.testing.assert_close(actual, expected, **CLOSE)
    else:
        torch.testing.assert_close(actual.data, expected.data, **CLOSE)
        for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            a, b = getattr(actual, field), getattr(expected, field)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    torch.testing.assert_close(after, expected_after, **CLOSE)


def test_quantizers_see_input_and_state_together_and_weights_once():
    layer = nn.LSTM(3, 2, num_layers=2)
    seen: list[tuple[str, torch.Size]] = []

    def quantizer(name):
        def quantize(x):
            seen.append((name, x.shape))
            return fake_quantize(x, "int4")

        return quantize

    pairs = [GateQuantizers(quantizer(f"x{i}"), quantizer(f"w{i}")) for i in range(2)]
    x = torch.randn(2, 4, 3)
    actual, (h_n, c_n) = unroll(layer, x, None, pairs)
    assert seen == [
        *(("w0", (8, 5)), ("x0", (4, 5)), ("x0", (4, 5))),
        *(("w1", (8, 4)), ("x1", (4, 4)), ("x1", (4, 4))),
    ]
    steps, ended = list(x), []
    for i in range(2):
        w_ih, w_hh, b_ih, b_hh = layer.all_weights[i]
        w = fake_quantize(torch.cat([w_ih, w_hh], 1), "int4")
        h = c = torch.zeros(4, 2)
        outputs = []
        for step in steps:
            joined = fake_quantize(torch.cat([step, h], 1), "int4")
            n = step.shape[1]
            gates = joined[:, :n] @ w[:, :n].t() + b_ih + (joined[:, n:] @ w[:, n:].t() + b_hh)
            into, forget, cell, out = gates.chunk(4, 1)
            c = forget.sigmoid() * c + into.sigmoid() * cell.tanh()
            h = out.sigmoid() * c.tanh()
            outputs.append(h)
        steps = outputs
        ended.append((h, c))
    # Values below 2: one step of int4 would be far larger than this.
    torch.testing.assert_close(actual, torch.stack(steps), rtol=0, atol=1e-6)
    torch.testing.assert_close(h_n, torch.stack([h for h, _ in ended]), rtol=0, atol=1e-6)
    torch.testing.assert_close(c_n, torch.stack([c for _, c in ended]), rtol=0, atol=1e-6)


def test_dropout_is_between_layers_and_in_training_only():
    layer = nn.GRU(3, 4, num_layers=2, dropout=0.5)
    pairs = [GateQuantizers(plain, plain)] * 2
    x = torch.randn(5, 2, 3)
    layer.eval()
    assert_same_bits(unroll(layer, x, None, pairs)[0], unroll(layer, x, None, pairs)[0])
    torch.testing.assert_close(unroll(layer, x, None, pairs)[0], layer(x)[0], rtol=0, atol=1e-6)
    layer.train()
    first, second = unroll(layer, x, None, pairs)[0], unroll(layer, x, None, pairs)[0]
    assert not torch.equal(first, second)


def test_gradients_are_those_of_torchs_layer():
    layer = nn.LSTM(5, 7, bidirectional=True).double()
    x = INPUTS["packed"]()

    def gradients(run):
        layer.zero_grad()
        output, (h, c) = run()
        (output.data.sin().sum() + (h * c).sum()).backward()
        return [p.grad.clone() for p in layer.parameters()]

    actual = gradients(lambda: unroll(layer, x, None, [GateQuantizers(plain, plain)] * 2))
    torch.testing.assert_close(actual, gradients(lambda: layer(x)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("x", "hx", "error"),
    [
        (torch.zeros(2, 4, 6), None, RuntimeError),
        (torch.zeros(2, 1, 4, 5), None, ValueError),
        (torch.zeros(2, 4, 5), (torch.zeros(1, 3, 7), torch.zeros(1, 3, 7)), RuntimeError),
    ],
    ids=["features", "axes", "state"],
)
def test_wrong_shapes_raise(x, hx, error):
    with pytest.raises(error):
        unroll(nn.LSTM(5, 7), x, hx, [GateQuantizers(plain, plain)])
