"""Padding tokens move neither ranges nor sums."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.data.batches import TokenMask
from fakequant.errors import CalibrationError, CalibrationWarning, ConfigError
from fakequant.nn.quantizer import quantizers
from tests.support.bits import assert_same_bits
from tests.support.transformers_models import ARCHITECTURES
from tests.support.vision import import_torchvision

LEFT = ["embeddings*", "pooler*"]  # the pooler reads the first token, which may be padding
STATIC = fq.Config("static", (fq.Rule("*", input="int8", weight="int4 per_block(-1:8,pad)"),))


def texts() -> list[dict[str, Tensor]]:
    """Batches of token ids [4, 7], padded with 0 on either side."""
    generator, found = torch.Generator().manual_seed(0), []
    for side in (False, True, False):
        ids = torch.randint(1, 32, (4, 7), generator=generator)
        mask = torch.arange(7)[None] < torch.tensor([7, 3, 5, 1])[:, None]
        mask = mask.flip(1) if side else mask
        found.append({"input_ids": ids * mask, "attention_mask": mask.long()})
    return found


def encoder(padding: float) -> nn.Module:
    """A BERT of random weights; the embedding of its padding token is `padding` times as large."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    import_torchvision()  # transformers imports it for its losses
    model: Any = ARCHITECTURES["bert"].make(num_hidden_layers=2, hidden_act="relu")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[0] *= padding
        model.embeddings.word_embeddings.weight[0, 0] += padding - 1  # one feature that no other token has as large
    return model


def calibrated(padding: float, method: str, mask: Any) -> nn.Module:
    model = fq.prepare(encoder(padding), STATIC, skip=LEFT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fq.calibrate(model, texts(), method, mask=mask, progress=False)
    return model


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of parameters, scales and zero points that differ."""
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


EMBEDDING = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize("method", ["max", "percentile", "entropy", "mse", "moving_average"])
def test_hostile_padding_moves_no_range_of_an_encoder(method: str) -> None:
    mild, hostile = (calibrated(padding, method, "attention_mask") for padding in (1.0, 1000.0))
    assert differing(mild, hostile) == [EMBEDDING]
    unmasked = calibrated(1000.0, method, None)
    assert "encoder.layer.0.attention.self.query._input_quantizer.scale" in differing(mild, unmasked)


def test_hostile_padding_moves_no_weight_of_an_encoder() -> None:
    models = []
    for padding in (1.0, 1000.0):
        model = calibrated(padding, "max", "attention_mask")
        found = fq.ptq.improve(
            model, texts(), mask=lambda batch: batch["attention_mask"].bool(), judge=[], progress=False
        )
        assert sum(not layer.note for layer in found.layers) == 12
        models.append(model)
    assert differing(*models) == [EMBEDDING]


def test_ranges_with_a_mask_are_those_of_batches_without_padding() -> None:
    model = fq.prepare(encoder(1000.0), STATIC, skip=LEFT)
    alone: list[Any] = []
    padded = texts()[::2]  # on the right: on the left positions begin later
    for batch in padded:
        for ids, counts in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
            alone.append({"input_ids": ids[counts][None]})
    fq.calibrate(model, alone, progress=False)
    other = fq.prepare(encoder(1000.0), STATIC, skip=LEFT)
    fq.calibrate(other, padded, mask="attention_mask", progress=False)
    for name, quantizer in quantizers(model).items():
        torch.testing.assert_close(quantizer.scale, other.get_submodule(name).scale, rtol=1e-5, atol=0)


class Tokens(nn.Module):
    """Features of tokens [n, tokens, 6], a convolution over them, and one row for each example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.over, self.last = nn.Linear(6, 5), nn.Conv1d(5, 5, 3, padding=1), nn.Linear(5, 2)

    def forward(self, x: Tensor, counts: Any = None) -> Tensor:
        return self.last(self.over(self.first(x).transpose(1, 2)).mean(2))


def pairs(tokens: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Five tokens: as many as the convolution has channels."""
    counts = torch.arange(tokens)[None] < torch.tensor([tokens, 2, 3])[:, None]
    return [(torch.randn(3, tokens, 6, generator=torch.Generator().manual_seed(seed)), counts) for seed in range(4)]


def test_inputs_of_other_shapes_are_taken_whole_which_is_said_once() -> None:
    model = fq.prepare(Tokens(), STATIC)
    said = "fits 1 inputs, but not 2 others, whose padding counts: over .3, 5, 5., last .3, 5.. If that matters, give"
    with pytest.warns(CalibrationWarning, match=said) as seen:
        fq.calibrate(model, pairs(), inputs=0, mask=lambda batch: batch[1], progress=False)
    assert len(seen) == 1
    whole = fq.calibrate(fq.prepare(Tokens(), STATIC), pairs(), inputs=0, progress=False)
    twin = fq.prepare(Tokens(), STATIC)
    fq.calibrate(twin, pairs(), inputs=0, progress=False)
    assert whole
    assert_same_bits(model.over.input_quantizer.scale, twin.over.input_quantizer.scale)
    assert_same_bits(model.last.input_quantizer.scale, twin.last.input_quantizer.scale)
    with pytest.warns(CalibrationWarning, match="fits 1 inputs, but not 2 others, whose padding counts: over") as seen:
        fq.ptq.improve(model, pairs(), "fast", inputs=0, mask=lambda batch: batch[1], progress=False)
    assert len(seen) == 1


LENGTHS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])


class Recurrent(nn.Module):
    """A recurrent layer, or a cell that is called step by step, on [batch, tokens, 5]."""

    def __init__(self, cls: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = cls(5, 6, **options), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Any:
        if not isinstance(self.rnn, nn.RNNCellBase):
            return self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        state = None
        for step in x.unbind(1):
            state = self.rnn(step, state)
        return state, self.head(x)


def recurrent(batches: list[Any], mask: Any, cls: Any, **options: Any) -> dict[str, Tensor]:
    model = fq.prepare(Recurrent(cls, **options).eval(), "int8")
    fq.calibrate(model, batches, "max", mask=mask, inputs=0, unseen="float")
    return {
        name: q.scale
        for name, q in quantizers(model).items()
        if "_input" in name or name.endswith("l0_hidden_quantizer")
    }


@pytest.mark.parametrize("options", [{"batch_first": True}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_steps_of_recurrent_layers_that_are_padding_move_no_range(cls: Any, options: Any) -> None:
    x = torch.randn(3, 5, 5)
    padded = torch.where(LENGTHS[..., None] == 1, x, 100.0)
    alone = [(own[:length][None],) for own, length in zip(x, LENGTHS.sum(1).tolist(), strict=True)]
    expected = recurrent(alone, None, cls, **options)
    actual = recurrent([(padded, LENGTHS)], lambda batch: batch[1], cls, **options)
    for name, scale in expected.items():
        if "head" not in name:
            torch.testing.assert_close(actual[name], scale)


def test_the_order_in_which_cells_are_called_is_not_known_which_is_said() -> None:
    batch = (torch.randn(3, 5, 5), LENGTHS)
    with pytest.warns(CalibrationWarning, match=r"fits 1 inputs, but not 2 others.*rnn \[3, 5\], rnn \[3, 6\]"):
        recurrent([batch], lambda batch: batch[1], nn.LSTMCell)


def test_rows_of_recurrent_layers_have_no_other_axis_of_tokens() -> None:
    tokens, layer = TokenMask("mask"), fq.prepare(nn.LSTM(5, 6).eval(), "int8")
    x, mask = torch.randn(3, 5, 5), LENGTHS.bool()
    assert_same_bits(tokens.select("_l0_input_quantizer", layer, x, mask), x[mask][None])
    packed = x[mask][None]
    assert tokens.select("_l0_input_quantizer", layer, packed, mask) is packed
    tokens.warn_unmasked()


def test_scales_of_channels_are_those_of_tokens_that_count() -> None:
    per_channel = fq.Config("test", (fq.Rule("first", input="int8 per_channel(2)", weight="int8"),))
    model = fq.prepare(Tokens(), per_channel)
    fq.calibrate(model, pairs(), method="max", inputs=0, mask=lambda batch: batch[1], progress=False)
    wanted = torch.stack([x[counts].abs().amax(0) for x, counts in pairs()]).amax(0) / 127
    assert_same_bits(model.first.input_quantizer.scale.flatten(), wanted)


def test_scales_of_positions_can_leave_none_out() -> None:
    by_position = fq.prepare(
        Tokens(), fq.Config("test", (fq.Rule("first", input="int8 per_channel(1)", weight="int8"),))
    )
    with pytest.raises(CalibrationError, match=r"no input begins with these axes \(the inputs are first"):
        fq.calibrate(by_position, pairs(), inputs=0, mask=lambda batch: batch[1], progress=False)


def test_a_batch_of_padding_alone_changes_nothing() -> None:
    idle = torch.full((3, 5, 6), 1e6), torch.zeros(3, 5, dtype=torch.bool)
    config = fq.Config("test", (fq.Rule("first", input="int8", weight="int4"),))
    found = []
    for batches in (pairs(), [*pairs(), idle]):
        model = fq.prepare(Tokens(), config)
        fq.calibrate(model, batches, inputs=0, mask=lambda batch: batch[1], progress=False)
        fq.ptq.improve(model, batches, "fast", inputs=0, mask=lambda batch: batch[1], progress=False)
        found.append(model)
    assert not differing(*found)


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (3, ConfigError, "mask must be a function of a batch, or a key of dict batches, got 3"),
        (
            "mask",
            ConfigError,
            "mask='mask' is a key of dict batches, but a batch is a tuple; pass a function of a batch",
        ),
        (lambda batch: batch[1].tolist(), ConfigError, "mask must give a bool tensor .* it gave a list"),
        (lambda batch: batch[1][0], ConfigError, r"it gave a Tensor of shape \[5\]"),
        (lambda batch: batch[1].float(), ConfigError, "it gave a tensor of torch.float32 with other values"),
        (lambda batch: batch[1].long() * 2, ConfigError, "it gave a tensor of torch.int64 with other values"),
        (
            lambda batch: batch[1].T,
            CalibrationError,
            r"the mask has the shape \[5, 3\], but no input begins with .* first \[3,",
        ),
    ],
)
@pytest.mark.parametrize("call", ["calibrate", "improve"])
def test_what_is_refused(call: str, mask: Any, kind: type[Exception], message: str) -> None:
    model = fq.prepare(Tokens(), STATIC)
    fq.calibrate(model, pairs(), inputs=0, progress=False)
    before = copy.deepcopy(model.state_dict())
    run: Any = fq.calibrate if call == "calibrate" else fq.ptq.improve
    with pytest.raises(kind, match=message):
        run(model, pairs(), inputs=0, mask=mask, progress=False)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name], name)


def test_a_key_that_a_batch_lacks_is_refused() -> None:
    model = fq.prepare(Tokens(), STATIC)
    batch = {"x": pairs()[0][0], "counts": pairs()[0][1]}
    with pytest.raises(ConfigError, match="but a batch is a dict with the keys x, counts; pass a function"):
        fq.calibrate(model, [batch], mask="count", progress=False)
