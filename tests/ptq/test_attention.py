"""`improve` on the projections of `torch.nn.MultiheadAttention`, which its layer computes from several weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import files
from fakequant.model.weights import quantized_weights
from fakequant.nn.backward import Factor
from fakequant.ptq.improvement import STEPS
from tests.support.attends import WIDTH, Attends
from tests.support.bits import assert_same_bits, assert_same_state, unchanged
from tests.support.kept import error_left
from tests.support.weight_specs import WEIGHTS


class Encoder(nn.TransformerEncoderLayer):
    """A layer of torch's transformer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(12, 4, 32, batch_first=True, norm_first=True)


CASES: dict[str, Any] = {
    "self": Attends,
    "length first": lambda: Attends(batch_first=False),
    "key is value": lambda: Attends("abb"),
    "all differ": lambda: Attends("abc", bias=False),
    "widths differ": lambda: Attends("abc", kdim=10, vdim=6),
    "extra keys": lambda: Attends(add_bias_kv=True, add_zero_attn=True),
    "masked": lambda: Attends(
        call={"attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "need_weights": False, "is_causal": True}
    ),
    "encoder": Encoder,
}
CASES["query is key"] = lambda: _QueryIsKey("aad")


class _QueryIsKey(Attends):
    """The value is another tensor of the same length."""

    def forward(self, x: Tensor) -> Tensor:
        a, d = (self.makes[name](x).tanh() for name in "ad")
        return self.last(self.attention(a, a, value=d, need_weights=False)[0])


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(12, 12, generator=generator)
    return [torch.randn(6, 7, 12, generator=generator) @ mix / 3 for _ in range(5)]


def prepared(case: str, weight: Any = "int3 per_channel(0)", values: Any = "int8") -> nn.Module:
    model = fq.prepare(CASES[case]().eval(), fq.Config("test", (fq.Rule(weight=weight, input=values),)))
    if values is not None:
        fq.calibrate(model, batches(), progress=False)
    return model


@pytest.mark.parametrize("values", ["int8", None])
@pytest.mark.parametrize("case", CASES)
def test_an_attention_loses_less(case: str, values: Any) -> None:
    config, rows = fq.Config("test", (fq.Rule(weight="int3 per_channel(0)", input=values),)), dict[str, Any]()

    def work(model: nn.Module) -> None:
        rows.update((row.layer, row) for row in fq.ptq.improve(model, batches(), progress=False).layers)

    assert error_left(CASES[case]().eval(), config, batches(), work) < 0.75
    name = "self_attn" if case == "encoder" else "attention"
    parts = ["q_proj", "k_proj", "v_proj"] if case == "widths differ" else ["in_proj"]
    for part in [*parts, "out_proj"]:
        row = rows[f"{name}.{part}"]
        assert not row.note
        assert row.after < row.before
        assert not {"smooth", "rotate"} & {step for step, left in row.steps.items() if left != 1.0}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("case", ["self", "key is value", "widths differ"])
def test_an_attention_keeps_its_codes(case: str, weight: str, tmp_path: Path) -> None:
    model = prepared(case, WEIGHTS[weight])
    found = fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)
    assert all(row.after <= row.before for row in found.layers)
    for held in quantized_weights(model).values():
        assert_same_bits(held.quantizer(held.tensor), held.tensor)
    x = batches()[0]
    with torch.no_grad():
        y = model(x)
        assert_same_bits(fq.load(CASES[case]().eval(), fq.save(model, tmp_path / "saved"))(x), y)


@pytest.mark.parametrize("weight", ["int3 per_tensor", "int3 per_channel(0)"])
def test_the_loss_is_that_of_the_products(weight: str) -> None:
    """Without quantized inputs and drift it is that of the outputs; blocks of other inputs count by their means."""
    torch.manual_seed(0)
    layer, (q, k) = (
        nn.MultiheadAttention(WIDTH, 2, batch_first=True).eval(),
        (torch.randn(64, n, WIDTH) for n in (5, 9)),
    )
    model = fq.prepare(layer, fq.Config("test", (fq.Rule(weight=weight),)))
    whole = model.in_proj_weight.detach().clone()
    rounded = model._in_proj_weight_quantizer(whole)
    found = fq.ptq.improve(model, [(q, k, k)], ["gptq"], forward=lambda model, batch: model(*batch), progress=False)
    row = next(row for row in found.layers if row.layer == "in_proj")
    assert row.after < row.before

    def loss(values: Tensor) -> float:
        errors = ((whole - values).chunk(3)[place] for place in range(3))
        return sum(float((x @ e.T).square().sum(-1).mean()) for x, e in zip((q, k, k), errors, strict=True))

    ratio = loss(model.in_proj_weight.detach()) / loss(rounded)
    torch.testing.assert_close(ratio, row.after / row.before, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 6}])
def test_biases_of_projections_make_good_their_mean_errors(widths: dict[str, int]) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **widths).eval()
    given = [torch.randn(4, 5, width) + 1 for width in (WIDTH, layer.kdim, layer.vdim)]
    factors = [Factor(x, x) for x in given]
    model = fq.prepare(layer, fq.Config("test", (fq.Rule(weight="int3 per_channel(0)"),)))
    with torch.no_grad():
        with fq.disabled(model):
            wanted = model._projected(*factors)
        fq.ptq.improve(model, [given], ["bias"], forward=lambda model, batch: model(*batch), progress=False)
        for y, z in zip(model._projected(*factors), wanted, strict=True):
            assert (y - z).abs().max() > 0.05
            torch.testing.assert_close((y - z).mean((0, 1)), torch.zeros(WIDTH), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("case", ["self", "masked"])
def test_only_positions_that_count_choose_the_projections(case: str) -> None:
    """Tokens that the mask leaves out change no weight."""
    one, other = prepared(case, values=None), prepared(case, values=None)
    mask = torch.arange(7) < 5
    counts = mask.expand(6, 7)
    for model, filler in ((one, 0.0), (other, 50.0)):
        if case == "self":  # with the causal mask no token sees a later one
            model.call = {"key_padding_mask": ~counts}
        given = [torch.where(mask[:, None], x, filler) for x in batches()]
        fq.ptq.improve(model, given, "fast", mask=lambda _: counts, progress=False)
    assert_same_state(one, other)


@pytest.mark.parametrize("case", ["self", "key is value", "widths differ"])
def test_an_ended_run_of_an_attention_goes_on(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    whole, model = prepared(case), prepared(case)
    rows = fq.ptq.improve(whole, batches(), progress=False)
    weights = len([row for row in rows.layers if not row.note])
    for stop in range(1, weights + 1):
        replaced, renames = os.replace, list[Any]()

        def cut_off(*names: Any, renames: list[Any] = renames, replaced: Any = replaced) -> None:
            renames.append(names)
            if len(renames) == 2:
                raise KeyboardInterrupt
            replaced(*names)

        if stop < weights:
            with monkeypatch.context() as patch:
                patch.setattr(files.os, "replace", cut_off)
                with unchanged(model), pytest.raises(KeyboardInterrupt):
                    fq.ptq.improve(model, batches(), checkpoint=tmp_path, progress=False)
            assert not model.attention._watching
            assert not model.attention._forward_pre_hooks
    found = fq.ptq.improve(model, batches(), checkpoint=tmp_path, progress=False)
    assert_same_state(model, whole)
    assert str(found) == str(rows)


def _last_inputs(model: nn.Module) -> list[Tensor]:
    """What the last projection of the attention gets."""
    seen = list[Tensor]()
    handle = model.attention.watch(seen.append)
    with torch.no_grad():
        for x in batches():
            model(x)
    handle.remove()
    return seen


@pytest.mark.parametrize("steps", [["gptq", "drift"], ["gptq", "drift", "bias"]])
@pytest.mark.parametrize("case", ["widths differ", "all differ"])
def test_the_drift_of_a_projection_is_that_of_the_float_model(case: str, steps: list[str]) -> None:
    """The error counts against the float model, whose first projections and their biases stay as they are."""
    model, plain = prepared(case, values=None), CASES[case]().eval()
    float_model = fq.prepare(plain, fq.Config("none", (fq.Rule(weight="int3 per_channel(0)"),)))
    with fq.disabled(float_model):
        wanted = _last_inputs(float_model)
    weight = float_model.attention.out_proj.weight
    found = fq.ptq.improve(model, batches(), steps, judge=[], progress=False)
    outputs = [x @ weight.T for x in wanted]
    chosen = [x @ model.attention.out_proj.weight.T for x in _last_inputs(model)]
    errors = torch.cat([(y - z).flatten(0, -2) for y, z in zip(chosen, outputs, strict=True)]).double()
    if "bias" in steps and model.attention.out_proj.bias is not None:
        errors -= errors.mean(0)
    row = next(row for row in found.layers if row.layer == "attention.out_proj")
    share = errors.square().sum() / torch.cat([y.flatten(0, -2) for y in outputs]).double().square().sum()
    torch.testing.assert_close(share.item(), row.after, rtol=1e-3, atol=0.0)


def test_steps_that_need_a_transform_leave_the_projections() -> None:
    model = prepared("self", "int4 per_channel(0)", "int4")
    found = fq.ptq.improve(model, batches(), [step for step in STEPS if step != "adaround"], progress=False)
    rows = {row.layer: row for row in found.layers}
    for part in ("in_proj", "out_proj"):
        assert not {"smooth", "rotate"} & {*rows[f"attention.{part}"].steps}, "what was not tried has no error"
        assert rows[f"attention.{part}"].steps["input"] <= 1.0


def test_a_computed_weight_of_an_attention_stays() -> None:
    layer = nn.MultiheadAttention(8, 2)
    nn.utils.parametrizations.weight_norm(layer, "in_proj_weight")
    model = fq.prepare(layer, fq.Config("test", (fq.Rule(weight="int4 per_channel(0)"),)))
    x = torch.randn(5, 3, 8)
    found = fq.ptq.improve(model, [(x, x, x)], forward=lambda model, batch: model(*batch), progress=False)
    assert {row.layer: row.note for row in found.layers} == {
        "in_proj": "nearest: its weight is computed",
        "out_proj": "",
    }
