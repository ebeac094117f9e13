"""Weights that functions read, and stacked weights, get the same steps as those of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError
from fakequant.model.presets import find_preset
from fakequant.model.weights import quantized_weights
from fakequant.ptq.judging import TAKEN_BACK, OutputJudge
from tests.support.bits import unchanged
from tests.support.functional_models import Calls

CONV = {"stride": 2, "padding": 1}
TRANSPOSED = {"stride": 2, "padding": 1, "output_padding": 1}


def net_of(call: Callable[[Any, Tensor], Tensor], **parameters: Tensor) -> Any:
    """Parameters, and a function of them and the input."""
    return Calls(call, **{name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()})


def calls(layer: Any, function: Callable[[Any, Tensor], Tensor]) -> Any:
    """A function of a layer's parameters."""
    return net_of(function, w=layer.weight, b=layer.bias)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(32, 16), lambda m, x: F.linear(x, m.w, m.b), (24, 32)),
    "linear, bias by name": (lambda: nn.Linear(32, 16), lambda m, x: F.linear(x, m.w, bias=m.b), (6, 4, 32)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3, **CONV), lambda m, x: F.conv2d(x, m.w, m.b, 2, 1), (4, 8, 7, 7)),
    "conv2d, groups": (
        lambda: nn.Conv2d(8, 12, 3, groups=4, **CONV),
        lambda m, x: F.conv2d(x, m.w, m.b, groups=4, **CONV),
        (4, 8, 7, 7),
    ),
    "conv1d": (lambda: nn.Conv1d(8, 12, 3, padding="same"), lambda m, x: F.conv1d(x, m.w, m.b, 1, "same"), (4, 8, 9)),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(8, 6, 3, **TRANSPOSED),
        lambda m, x: F.conv_transpose2d(x, m.w, m.b, **TRANSPOSED),
        (4, 8, 5, 5),
    ),
}


def config(preset: str) -> fq.Config:
    ops = ("linear", "matmul", "addmm", "conv", "conv_transpose", "embedding")
    own = find_preset(preset)
    return fq.Config("own", (*own.rules, fq.Rule("*", preset, ops=ops, optional=True)))


def improved(model: nn.Module, shape: tuple[int, ...], preset: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    batches = [
        torch.randn(shape) * torch.linspace(0.1, 3, shape[1]).reshape(-1, *[1] * (len(shape) - 2)) for _ in "abcd"
    ]
    model = fq.prepare(model.eval(), config(preset), example=batches[0])
    fq.calibrate(model, batches, progress=False)
    return model, fq.ptq.improve(
        model, batches, ["input", "ranges", "gptq", "descend", "drift", "bias"], judge=[], progress=False
    )


@pytest.mark.parametrize("preset", ["INT8", "INT4_GROUP32", "int4_weight_only"])
@pytest.mark.parametrize("case", CASES)
def test_a_weight_that_a_function_reads_gets_the_values_of_a_layers(case: str, preset: str) -> None:
    make, call, shape = CASES[case]
    torch.manual_seed(1)
    layer: Any = make()
    own, of_own = improved(nn.Sequential(calls(layer, call)), shape, preset)
    other, of_other = improved(nn.Sequential(layer), shape, preset)
    assert (of_own.before, of_own.after) == (of_other.before, of_other.after)
    assert torch.equal(own[0].w, other[0].weight)
    assert torch.equal(own[0].b, other[0].bias)
    assert of_own.layers[0].steps == of_other.layers[0].steps


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: x @ m.w, (24, 32)),
        (lambda m, x: torch.matmul(x, m.w), (6, 4, 32)),
        (lambda m, x: torch.addmm(m.b, x, m.w), (24, 32)),
        (lambda m, x: torch.mm(m.v, x.mT).mT, (24, 32)),
        (lambda m, x: m.v @ x.mT, (6, 4, 32)),
    ],
    ids=["@", "matmul", "addmm", "mm from the left", "@ from the left"],
)
def test_factors_of_matrix_products_are_chosen(
    function: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(2)
    net = net_of(function, w=torch.randn(32, 16), v=torch.randn(16, 32), b=torch.randn(16))
    model, found = improved(nn.Sequential(net), shape, "int4_weight_only")
    (row,) = [row for row in found.layers if not row.note]
    assert row.after < 0.72 * row.before
    (product,) = quantized_weights(model).values()
    assert torch.equal(product.quantizer(product.tensor), product.tensor)


def test_what_stays_at_the_nearest_values_is_listed_with_its_function() -> None:
    net = net_of(
        lambda m, x: F.conv_transpose1d(torch.bmm(F.embedding(x, m.table), m.stack), m.kernel, groups=4),
        table=torch.randn(9, 8),
        stack=torch.randn(3, 8, 8),
        kernel=torch.randn(8, 4, 1),
    )
    _, found = chosen(net, [torch.randint(0, 9, (3, 8)) for _ in range(3)])
    assert {row.layer: row.note for row in found.layers} == {
        "_sites.embedding_0": "nearest: improve has no steps for a call of embedding",
        "_sites.matmul_0": "nearest: improve has no steps for a call of matmul",
        "_sites.conv_transpose1d_0": "nearest: improve has no steps for a call of conv_transpose1d with groups",
    }


def test_choices_for_a_function_go_back_where_they_do_not_help() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(calls(nn.Linear(8, 8), lambda m, x: F.linear(x, m.w, m.b)))
    batches = [torch.randn(4, 8) * torch.tensor([9.0, 9, 9, 9, 0, 0, 0, 0]) for _ in range(2)]
    model = fq.prepare(net.eval(), config("int4_weight_only"), example=batches[0])
    fq.calibrate(model)
    # Columns of zeros may have any values: what judges has values in these alone.
    judge = [torch.randn(64, 8) * torch.tensor([0.0, 0, 0, 0, 9, 9, 9, 9])]
    with unchanged(model):
        found = fq.ptq.improve(model, batches, ["gptq", "bias"], judge=judge, progress=False)
    assert found.layers[0].note == TAKEN_BACK


def test_weights_that_a_forward_computes_have_a_row() -> None:
    w, v, last = torch.randn(3, 8, 8)
    net = net_of(lambda m, x: F.linear((x @ m.w.T) @ m.v.detach(), m.last), w=w, v=v, last=last)
    _, found = chosen(net, [torch.randn(16, 8) for _ in range(3)])
    rows = {row.layer: row.note for row in found.layers}
    computed = "nearest: forward computes the weight, several functions read it, or it is not a parameter"
    assert rows == {"_sites.matmul_0": computed, "_sites.matmul_1": computed, "_sites.linear_0": ""}


def chosen(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[nn.Module, Any]:
    model = fq.prepare(model.eval(), config("int4_weight_only"), example=batches[0])
    fq.calibrate(model)
    steps = ["ranges", "gptq", "bias"]
    return model, fq.ptq.improve(model, batches, steps, **{"judge": [], "progress": False} | options)


def test_each_weight_of_one_module_goes_back_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    both = net_of(
        lambda m, x: torch.cat([F.linear(x, m.w), F.linear(x, m.v)], -1), w=torch.randn(8, 8), v=torch.randn(8, 8)
    )
    batches = [torch.randn(32, 8) for _ in range(4)]
    model = fq.prepare(both.eval(), config("int4_weight_only"), example=batches[0])
    fq.calibrate(model)
    floats = model.w.detach().clone(), model.v.detach().clone()

    def undo_the_first(self: OutputJudge, changed: Any, state: Any) -> Any:
        first, *_ = changed
        changed[first]()
        return {first}

    monkeypatch.setattr(OutputJudge, "keep_what_helps", undo_the_first)
    found = fq.ptq.improve(model, batches, ["ranges", "gptq"], judge=[], progress=False)
    assert [row.note for row in found.layers] == [TAKEN_BACK, ""]
    assert torch.equal(model.w, floats[0])
    assert not torch.equal(model.v, floats[1])
    for own in quantized_weights(model).values():
        assert own.name == "w" or torch.equal(own.quantizer(own.tensor), own.tensor)


def test_a_function_is_as_before_after_an_error_in_a_later_layer() -> None:
    torch.manual_seed(0)
    first = net_of(lambda m, x: F.linear(x, m.inner.w, m.b), b=torch.randn(8))
    first.inner = net_of(lambda m, x: x, w=torch.randn(8, 8))
    net = nn.Sequential(first, nn.Linear(8, 8)).eval()
    batches = [torch.randn(32, 8) for _ in range(4)]
    model = fq.prepare(net, config("int4_weight_only"), example=batches[0])
    fq.calibrate(model)
    batches[3][0, 0] = torch.nan
    with unchanged(model), pytest.raises(CalibrationError, match="NaN"):
        fq.ptq.improve(model, batches, "fast", judge=[], progress=False)


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str | None]] = {
    "once": (lambda m, x: F.linear(x, m.w, m.b), None),
    "by two functions": (lambda m, x: F.linear(x, m.w, m.b) + F.linear(x, m.v, m.b), "several functions read it"),
    "outside of the function": (lambda m, x: F.linear(x, m.w, m.b) * m.b, "several functions read it"),
    "computed": (lambda m, x: F.linear(x, m.w, m.b * 2), "it is not a parameter"),
    "by addmm": (lambda m, x: torch.addmm(m.b, x, m.w), None),
    "by addmm with a factor": (lambda m, x: torch.addmm(m.b, x, m.w, beta=2), "it is not a parameter"),
}


@pytest.mark.parametrize("case", READS)
def test_a_bias_moves_where_one_function_alone_adds_it(case: str) -> None:
    function, why_not = READS[case]
    torch.manual_seed(0)
    net = net_of(function, w=torch.randn(8, 8), v=torch.randn(8, 8), b=torch.randn(8))
    bias = net.b.detach().clone()
    model, found = chosen(nn.Sequential(net), [torch.randn(32, 8) + 1 for _ in range(4)])
    remarks = {remark for row in found.layers for remark in row.remarks}
    assert (f'the step "bias" was left out: {why_not}' in remarks) == (why_not is not None)
    assert torch.equal(model[0].b, bias) == (why_not is not None)


def test_a_bias_of_a_layer_that_others_read_stays() -> None:
    net = net_of(lambda m, x: m.layer(x) - m.layer.bias * 20)
    net.layer = nn.Linear(8, 8)
    bias = net.layer.bias.detach().clone()
    model, found = chosen(net, [torch.randn(32, 8) + 1 for _ in range(4)])
    assert found.layers[0].remarks == ['the step "bias" was left out: several functions read it']
    assert torch.equal(model.layer.bias, bias)


@pytest.mark.parametrize(
    "convolve",
    [
        lambda m, x: F.conv1d(x, m.w, None, 2 if x.shape[-1] > 9 else 1),
        lambda m, x: F.conv1d(x, m.w, None, padding=1 if x.shape[-1] > 9 else 0),
        lambda m, x: F.conv1d(x, m.w, m.b if x.shape[-1] > 9 else None),
    ],
    ids=["stride", "padding", "bias"],
)
def test_convolutions_whose_options_vary_stay_at_the_nearest_values(convolve: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(net_of(convolve, w=torch.randn(8, 4, 3), b=torch.randn(8)), nn.Conv1d(8, 4, 1))
    _, found = chosen(net, [torch.randn(4, 4, size) for size in (12, 12, 9, 12)])
    notes = {row.layer: row.note for row in found.layers}
    why = "nearest: improve has no steps for a call of conv1d whose options vary"
    assert notes == {"0._sites.conv1d_0": why, "1": ""}


def test_a_product_of_two_weights_stays_and_has_two_rows() -> None:
    torch.manual_seed(0)
    net = net_of(lambda m, x: F.linear(x, m.u @ m.v), u=torch.randn(8, 4), v=torch.randn(4, 8))
    _, found = chosen(nn.Sequential(net, nn.Linear(8, 8)), [torch.randn(32, 8) for _ in range(3)])
    notes = {row.layer: row.note for row in found.layers}
    two = "nearest: improve has no steps for a call of matmul of two weights"
    assert notes["0._sites.matmul_0.input"] == notes["0._sites.matmul_0.other"] == two
    assert notes["1"] == ""


def test_weights_in_no_list_are_named_where_there_are_no_others() -> None:
    net = net_of(lambda m, x: x @ m.w.T, w=torch.randn(8, 8))
    message = r"improve can change none of the model's quantized weights \(_sites\.matmul_0\): forward computes the"
    with pytest.raises(ConfigError, match=message):
        chosen(net, [torch.randn(4, 8) for _ in range(2)])
