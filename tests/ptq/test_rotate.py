"""Rotations of residual streams and heads: the float function stays, errors fall, and what stays says why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.data.batches import run_batch
from fakequant.errors import ConfigError
from fakequant.ptq import Rotated, rotate
from fakequant.ptq.rotation import KINDS, rotation_of
from tests.support.architectures import changed_alike, each_architecture, relative
from tests.support.bits import assert_same_bits, assert_same_state
from tests.support.decoder import HEADS, WIDTH, Decoder, decoder
from tests.support.interruption import InterruptedForward

INPUTS = fq.Config("inputs", (fq.Rule("*"), fq.Rule("*up", input="int8 per_tensor")))
"""Eight bits for the inputs of the layers that read large channels."""


def tokens() -> Tensor:
    return torch.randint(0, 19, (4, 8), generator=torch.Generator().manual_seed(1))


class Gemma(nn.Module):
    """A normalisation by the root mean square that multiplies by 1 + weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Gemma])
def test_the_float_function_stays(norm: type[nn.Module], bias: bool, kind: str) -> None:
    model, x = decoder(norm, bias=bias), tokens()
    before, weight = model(x), model.blocks[0].up.weight.detach().clone()
    found = rotate(model, x, kind=kind)
    assert [(row.what, row.width, row.note) for row in found.rows] == [
        ("residual stream", WIDTH, ""),
        ("heads", WIDTH // HEADS, ""),
        ("heads", WIDTH // HEADS, ""),
    ]
    assert relative(model(x), before) < 1e-5
    assert relative(model.blocks[0].up.weight, weight) > 0.1
    kinds = {type(module) for name, module in model.named_modules() if "norm" in name and name[-5:] != "norms"}
    assert kinds == {nn.RMSNorm if norm is nn.LayerNorm else norm}
    assert str(found).splitlines()[1].split()[-1] == "rotated"


@pytest.mark.parametrize("norm", [nn.RMSNorm, Gemma])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_normalisation_in_half_precision_is_known(norm: type[nn.Module], dtype: torch.dtype) -> None:
    model, x = decoder(norm).to(dtype), tokens()
    wanted = copy.deepcopy(model).double()(x)
    note = next(row.note for row in rotate(model, x).rows if row.what == "residual stream")
    assert note == "" or note.endswith("half precision alone may do it: try model.float()")
    assert relative(model.double()(x), wanted) < 4 * torch.finfo(dtype).eps
    rotate(wide := decoder(norm).to(dtype).float(), x)
    assert relative(wide.double()(x), wanted) < 1e-5


class Grouped(nn.Module):
    """Attention whose heads share the keys and values of two."""

    def __init__(self, way: str) -> None:
        super().__init__()
        shared = WIDTH // HEADS * 2
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, shared), nn.Linear(WIDTH, shared)
        self.out, self._way = nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self._way == "repeat_interleave":
            k, v = (part.repeat_interleave(HEADS // 2, 1) for part in (k, v))
        elif self._way == "expand":  # as in transformers
            k, v = (part[:, :, None].expand(-1, -1, HEADS // 2, -1, -1).flatten(1, 2) for part in (k, v))
        attend = nn.functional.scaled_dot_product_attention
        return self.out(attend(q, k, v, enable_gqa=self._way == "enable_gqa").transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ["repeat_interleave", "expand", "enable_gqa"])
def test_values_that_heads_share_are_rotated_into_every_head_that_reads_them(way: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Grouped(way)).eval(), torch.randn(3, 5, WIDTH)
    old, wanted = copy.deepcopy(model), model(x)
    found = rotate(model, x)
    assert [row for row in found.rows if row.what == "heads"] == [
        Rotated("heads", WIDTH // HEADS, ("0.v",), ("0.out",)),
    ]
    assert relative(model(x), wanted) < 1e-5
    pairs = [*heads_of(model[0].v, old[0].v, 0), *heads_of(model[0].out, old[0].out, 1)]
    assert len(pairs) == 2 + HEADS
    # One rotation for all: what it does to the values of a shared head, every head that reads them undoes.
    rotations = [new @ was.pinverse() for new, was in pairs]
    assert relative(rotations[0], torch.eye(WIDTH // HEADS, dtype=torch.float64)) > 0.5
    for rotation in rotations:
        torch.testing.assert_close(rotation, rotations[0], rtol=1e-5, atol=1e-5)


def heads_of(new: nn.Linear, old: nn.Linear, axis: int) -> list[tuple[Tensor, Tensor]]:
    """The weights of each head [channels of a head, others], rotated and before, float64."""
    parts = (layer.weight.detach().double().transpose(0, axis).split(WIDTH // HEADS) for layer in (new, old))
    return list(zip(*parts, strict=True))


def test_large_channels_cost_less() -> None:
    model, x = decoder(), tokens()
    wanted, errors = model(x), []
    for one in (model, copy.deepcopy(model)):
        if one is not model:
            rotate(one, x)
        quantized = fq.prepare(copy.deepcopy(one), INPUTS)
        fq.calibrate(quantized, [x], "max", progress=False)
        errors.append(relative(quantized(x), wanted))
    assert errors[1] < 0.2 * errors[0], errors


def test_the_seed_decides() -> None:
    models = [decoder() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        rotate(model, tokens(), seed=seed)
    one, same, other = [model.head.weight.detach() for model in models]
    assert_same_bits(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 12, 32, 49])
def test_a_rotation_is_orthogonal(width: int, kind: str) -> None:
    matrix = rotation_of(width, kind, torch.Generator().manual_seed(0))
    assert matrix.dtype == torch.float64
    assert float((matrix @ matrix.T - torch.eye(width)).abs().max()) < 1e-12


class Changed(Decoder):
    """A decoder whose forward pass is another one."""

    def __init__(self, call: Callable[[Decoder, Tensor], Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, tokens: Tensor) -> Any:
        return self._call(self, tokens)


def post_norm(model: Decoder, tokens: Tensor) -> Tensor:
    x = model.norm(model.tokens(tokens))
    return model.head(x + model.blocks[0].up(x).mean(-1, keepdim=True))


def gives_stream(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    x = model.blocks(model.tokens(tokens))
    return model.head(model.norm(x)), x


def two_readers(model: Decoder, tokens: Tensor) -> Tensor:
    x = model.tokens(tokens)
    return model.head(model.norm(x)) + model.head(x)


def decoder_with(change: Callable[[Decoder], object]) -> Decoder:
    model = Decoder()
    change(model)
    return model


class _Groups(nn.Module):
    """Holds vectors, and is no normalisation of rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.weight


class _Training(Decoder):
    """A head for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions))
        return torch.cat([self.head(x), self.other(x)], -1) if self.training else self.head(x)


class _Unmasked(Decoder):
    """A parameter that only other batches add."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.masked = nn.Parameter(torch.full((1, WIDTH), value))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.blocks(x + self.masked if tokens[0, 0] == 18 else x)))


STAY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "normalised values are added": (lambda: Changed(post_norm), "torch.add reads the values too"),
    "the model's output": (lambda: Changed(gives_stream), "the model's output reads the values too"),
    "two readers": (
        lambda: Changed(two_readers),
        "head, with and without a normalisation before it, reads the values too",
    ),
    "tied": (
        lambda: decoder_with(lambda model: setattr(model.head, "weight", model.tokens.weight)),
        "tokens shares a parameter; give each layer a copy",
    ),
    "no normalisation": (
        lambda: Decoder(_Groups),
        "norms.0 is neither a LayerNorm nor a normalisation by the root mean",
    ),
    "hook": (
        lambda: decoder_with(lambda model: model.head.register_forward_hook(lambda *_: None)),
        "head computes its weight, or has hooks",
    ),
    "a head that the run does not reach": (_Training, "this batch does not reach other.weight, which may read the"),
    "a parameter that the run does not read": (_Unmasked, "this batch does not reach masked, which may read the"),
    "two kinds": (
        lambda: decoder_with(lambda model: setattr(model, "norm", nn.RMSNorm(WIDTH))),
        "some of its readers subtract the mean and others do not",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_what_cannot_be_rotated_stays_and_says_why(name: str) -> None:
    torch.manual_seed(0)
    model, x = STAY[name][0](), tokens()
    before = copy.deepcopy(model.state_dict())
    row = next(row for row in rotate(model, x).rows if row.what == "residual stream")
    assert STAY[name][1] in row.note
    for place in (*row.makers, *row.readers):
        for key, value in model.state_dict().items():
            if key.startswith(place) and "attention" not in key:  # whose heads may be rotated
                assert_same_bits(value, before[key])


def test_a_parameter_of_zeros_that_the_run_does_not_read_is_no_hindrance() -> None:
    row = next(row for row in rotate(_Unmasked(0.0), tokens()).rows if row.what == "residual stream")
    assert row.note == ""


def test_a_layer_norm_that_blocks_share_is_replaced_everywhere_and_takes_scales() -> None:
    model = decoder()
    model.blocks[1].norms[0] = model.blocks[0].norms[0]
    before, x = model(tokens()), tokens()
    row = next(row for row in rotate(model, x).rows if row.what == "residual stream")
    assert row.note == ""
    assert relative(model(x), before) < 1e-5
    assert type(model.blocks[0].norms[0]) is nn.RMSNorm
    assert model.blocks[1].norms[0] is model.blocks[0].norms[0]
    assert model.norm.weight.tolist() == [1.0] * WIDTH  # into which `fold_scales` can put scales of inputs


def test_a_model_without_such_values_says_so() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(8))
    assert "nothing to rotate" in str(rotate(model, torch.randn(1, 1, 4, 4)))
    activation = Changed(lambda model, tokens: model.head(model.tokens(tokens).relu()))
    assert "nothing to rotate" in str(rotate(activation, tokens()))


@pytest.mark.parametrize("calls", range(2, 9))
def test_nothing_changes_after_an_interrupt(calls: int) -> None:
    model, x, forward = decoder(), tokens(), InterruptedForward(calls)
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    try:
        rotate(model, x, forward=forward)
    except KeyboardInterrupt:
        assert [type(module) for module in model.modules()] == kinds
        assert_same_state(model, before)
    else:
        assert forward.calls < calls


def test_what_cannot_be_checked_is_refused() -> None:
    model, x = decoder(), tokens()
    with pytest.raises(ConfigError, match=r"unknown kind 'hadamart'; did you mean hadamard"):
        rotate(model, x, kind="hadamart")
    with pytest.raises(ConfigError, match=r"rotate takes a float model; call it before fakequant.prepare"):
        rotate(fq.prepare(decoder(), "INT8"), x)
    own = torch.Generator().manual_seed(0)  # the random numbers of torch are the same in both runs
    with pytest.raises(ConfigError, match=r"two runs of the model differ by .* of the output"):
        rotate(model, x, forward=lambda model, batch: model(torch.randint(0, 19, (4, 8), generator=own)))


@each_architecture(["nn LSTM", "nn UNet", "nn TransformerEncoder"])
def test_architectures_keep_their_float_function(name: str) -> None:
    changed_alike(name, lambda model, batch: rotate(model, batch, forward=run_batch))
