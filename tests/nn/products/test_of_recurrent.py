"""The products of recurrent layers and cells: rows are those of all steps, and algorithms choose the weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fakequant as fq
from fakequant.nn.quantized.recurrent import GateProduct, written_as_loops
from tests.support.bits import assert_same_bits

IN, HIDDEN, N, STEPS = 24, 16, 8, 5


class Reader(nn.Module):
    def __init__(self, cls: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = cls(IN, HIDDEN, **options)
        self.head = nn.Linear(HIDDEN * (2 if options.get("bidirectional") else 1), 3)
        self.is_cell, self.packs = isinstance(self.rnn, nn.RNNCellBase), False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_cell:
            state = None
            for step in x:
                state = self.rnn(step, state)
            return self.head(state[0] if isinstance(state, tuple) else state)
        y = self.rnn(pack_sequence([*x.unbind(1)[:-1], x[:3, -1]], enforce_sorted=False) if self.packs else x)[0]
        return self.head(y.data if isinstance(y, PackedSequence) else y)


def batches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(IN, IN, generator=generator)
    return [torch.randn(STEPS, N, IN, generator=generator) @ mixed / IN**0.5 for _ in range(count)]


def quantized(model: Reader, config: str = "int4_weight_only") -> Any:
    return fq.prepare(model.eval(), config)


CASES = {
    "lstm": (nn.LSTM, {}),
    "lstm-2-bi": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "gru-no-bias": (nn.GRU, {"bias": False}),
    "rnn": (nn.RNN, {"num_layers": 2}),
    "lstm-cell": (nn.LSTMCell, {}),
    "gru-cell": (nn.GRUCell, {}),
    "rnn-cell": (nn.RNNCell, {}),
}


def watched(model: Any, x: Tensor) -> dict[str, list[Tensor]]:
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        own.register_forward_pre_hook(
            lambda own, args, kwargs: seen.setdefault(own.name, []).append(args[0]), with_kwargs=True
        )
        for own in model.rnn.products()
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_are_the_inputs_and_the_hidden_states_before_the_steps(reverse: bool, packs: bool) -> None:
    model = quantized(Reader(nn.GRU, bidirectional=True))
    model.packs = packs
    x, suffix = batches(1)[0], "_l0_reverse" if reverse else "_l0"
    with fq.disabled(model), torch.no_grad():
        seen = watched(model, x)
        outputs = model.rnn(x)[0][..., HIDDEN if reverse else 0 :][..., :HIDDEN]
    (inputs,), (hidden,) = seen[f"weight_ih{suffix}"], seen[f"weight_hh{suffix}"]
    if packs:  # the last sequence has 3 steps
        assert inputs.shape == (1, N * STEPS - 2, IN)
        assert hidden.shape == (1, N * STEPS - 2, HIDDEN)
        assert inputs[0].sort(0).values[:, 0].sum().isclose(torch.cat([x[:, :-1].flatten(0, 1), x[:3, -1]])[:, 0].sum())
        return
    assert_same_bits(inputs, x.transpose(0, 1))
    before = torch.cat(
        [outputs[1:], torch.zeros(1, N, HIDDEN)] if reverse else [torch.zeros(1, N, HIDDEN), outputs[:-1]]
    )
    torch.testing.assert_close(hidden, before.transpose(0, 1))


@pytest.mark.parametrize("case", CASES)
def test_algorithms_choose_both_weights_and_their_biases(case: str) -> None:
    cls, options = CASES[case]
    data = batches(10)
    model = quantized(Reader(cls, **options))
    assert all(isinstance(own, GateProduct) and own.is_matrix for own in model.rnn.products())
    found = fq.ptq.improve(model, data, ["ranges", "gptq", "bias"], judge=[])
    rows = {row.layer: row for row in found.layers if row.layer.startswith("rnn")}
    assert len(rows) == len(model.rnn.products())
    assert not [row.note for row in rows.values() if row.note]
    assert all(("bias" in row.steps) == ("bias" not in options) for row in rows.values())
    assert all(own.has_fixed_codes for own in model.rnn.products())
    assert all(row.after < row.before for row in rows.values())


@pytest.mark.parametrize("config", ["int8", "int8_per_token", "mxfp8", "nvfp4"])
def test_quantized_rows_are_those_of_the_steps(config: str) -> None:
    model = quantized(Reader(nn.LSTM), config)
    x = batches(1)[0]
    fq.calibrate(model, [x])
    (product, *_), quantizer = model.rnn.products(), model.rnn._l0_input_quantizer
    rows = x.transpose(0, 1)
    steps = torch.stack([quantizer(step) for step in x], 1)
    assert_same_bits(product.quantized_inputs((rows,))[0], steps)


def test_a_dynamic_range_of_a_whole_step_is_that_of_the_step() -> None:
    config = fq.Config(
        "dynamic", (fq.Rule("*", input=fq.TensorConfig("int8 per_tensor", dynamic=True), weight="int8"),)
    )
    model = fq.prepare(Reader(nn.LSTM).eval(), config)
    x, quantizer = batches(1)[0], model.rnn._l0_input_quantizer
    x[0] *= 9
    found = model.rnn.products()[0].quantized_inputs((x.transpose(0, 1),))[0]
    assert_same_bits(found, torch.stack([quantizer(step) for step in x], 1))
    assert not torch.equal(found, quantizer(x.transpose(0, 1)))


def test_codes_go_back_where_they_do_not_help_the_output() -> None:
    model, judge = quantized(Reader(nn.LSTM)), batches(4, 1)
    shifted = [x + 5 for x in batches(4)]  # biases make good what others do not lose
    before = [own.clone() for own in model.rnn.parameters()]
    found = fq.ptq.improve(model, shifted, ["bias"], judge=judge)
    assert found.after == found.before
    assert all(row.note for row in found.layers)
    for now, own in zip(model.rnn.parameters(), before, strict=True):
        assert_same_bits(now.data, own.data)


@pytest.mark.parametrize("config", ["int8", "int8_per_token", "nvfp4", "dynamic"])
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_sequence_in_parts_has_the_bits_of_one_call(cls: Any, config: str) -> None:
    dynamic = fq.Config("dynamic", fq.Rule("*", input=fq.TensorConfig("int8 per_tensor", dynamic=True), weight="int8"))
    model = fq.prepare(Reader(cls, num_layers=2).eval(), dynamic if config == "dynamic" else config).rnn
    x = batches(1)[0]
    fq.calibrate(model, [x])
    whole, last = model(x)
    state, parts = None, []
    for steps in x.split([2, 1, 2]):
        y, state = model(steps, state)
        parts.append(y)
    assert_same_bits(torch.cat(parts).detach(), whole.detach())
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (state, last)), strict=True):
        assert_same_bits(one.detach(), other.detach())


FEW, LESS, ROWS, FOUR = 5, 6, 3, 4


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def state(layer: Any, *shape: int) -> Any:
    h = data(len(layer.all_weights), *shape, LESS)
    return (h, 2 * h) if layer.mode == "LSTM" else h


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("config", ["int8", "int8_per_token", "int8_weight_only"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}, {"nonlinearity": "relu"}],
    ids=str,
)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_loop_computes_what_the_layer_does(cls: Any, options: Any, config: str, is_given: bool) -> None:
    if cls is not nn.RNN:
        options = {key: value for key, value in options.items() if key != "nonlinearity"}
    torch.manual_seed(0)
    layer = fq.prepare(cls(FEW, LESS, **options).eval(), config)
    x = data(ROWS, FOUR, FEW) if options.get("batch_first") else data(FOUR, ROWS, FEW)
    fq.calibrate(layer, [x])
    for example, sizes in ((x, (ROWS,)), (x[0], ())):
        hx = state(layer, *sizes) if is_given else None
        expected = layer(example, hx)
        with written_as_loops(), torch.no_grad():
            actual = layer(example, hx)
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (actual, expected)), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=2e-6)
