"""Learned rotations: the float function stays, the quantized model's error falls, and what does not help goes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.ptq import learn_rotations
from fakequant.ptq.float_model.learned_rotations import _cayley, _LearnedTurns
from fakequant.ptq.float_model.rotate import Turned
from tests.support.architectures import relative
from tests.support.bits import assert_same_bits
from tests.support.decoder import WIDTH, decoder

A4 = fq.Config(
    "a4", (fq.Rule(layers=("Linear",), input=fq.TensorConfig("int4 per_token", dynamic=True), weight="int4"),)
)


def batches(count: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 19, (32, 8), generator=generator) for _ in range(count)]


def error(model: nn.Module, wanted: Tensor, x: Tensor) -> float:
    """That of a copy with quantizers whose ranges are those of each tensor."""
    quantized = fq.prepare(copy.deepcopy(model), A4)
    with torch.no_grad():
        return relative(quantized(x), wanted) ** 2


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_the_float_function_stays_and_new_data_cost_less_than_with_hadamard_matrices(norm: type[nn.Module]) -> None:
    model, x = decoder(norm), batches()
    new = torch.randint(0, 19, (256, 8), generator=torch.Generator().manual_seed(2))
    wanted, hadamard = model(new).detach(), copy.deepcopy(model)
    fq.ptq.rotate(hadamard, x[0])
    found = learn_rotations(model, x, A4, progress=False)
    assert found.kept == "learned"
    assert found.learned < found.rotated < found.before
    assert relative(model(new), wanted) < 1e-5
    assert error(model, wanted, new) < 0.95 * error(hadamard, wanted, new)
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_the_errors_are_those_of_the_batches_that_judge() -> None:
    model, x = decoder(), batches()
    start, wanted = copy.deepcopy(model), model(x[1]).detach()  # the second of nine
    found = learn_rotations(model, x, A4, steps=30, progress=False)
    assert found.kept == "learned"
    assert found.before == pytest.approx(error(start, wanted, x[1]), rel=1e-4)
    assert found.learned == pytest.approx(error(model, wanted, x[1]), rel=1e-4)


def test_what_does_not_help_goes_back() -> None:
    model, x = decoder(), batches(2)
    found = learn_rotations(model, x, A4, steps=4, angle=17.0, progress=False)  # turns of more than 90 degrees
    assert found.learned > found.rotated
    assert found.kept == "hadamard"
    assert "the model is with Hadamard matrices" in str(found)
    hadamard = decoder()
    fq.ptq.rotate(hadamard, x[0])
    for name, value in hadamard.state_dict().items():
        assert_same_bits(model.state_dict()[name], value)


def test_learned_rotations_that_change_the_float_function_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _LearnedTurns.run

    def skewed(self: _LearnedTurns, *args: Any) -> float:
        least = run(self, *args)
        self.best = [2 * matrix for matrix in self.best]
        return least

    monkeypatch.setattr(_LearnedTurns, "run", skewed)
    model, x = decoder(), batches()
    wanted = model(x[0]).detach()
    found = learn_rotations(model, x, A4, steps=30, progress=False)
    assert found.learned < found.rotated
    assert found.kept == "hadamard"
    assert "the model is with Hadamard matrices; learned ones go back: the model's output would change by" in str(found)
    assert relative(model(x[0]), wanted) < 1e-5


def test_a_model_that_no_rotation_helps_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(19, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-7, 8, (19, 8)))
        model[0].weight[:, 0] = 7.0
        model[2].weight.copy_(torch.eye(8))
    before = copy.deepcopy(model)
    found = learn_rotations(model, [torch.arange(19)], A4, steps=2, progress=False)
    assert found.kept == "none"
    assert "as it was: no rotation helps" in str(found)
    assert [row.note for row in found.rows] == ["no rotation helps"]
    assert [type(one) for one in model] == [type(one) for one in before]
    for name, value in before.state_dict().items():
        assert_same_bits(model.state_dict()[name], value)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_gradient_is_that_of_the_tangent(axis: int, blocks: int) -> None:
    torch.manual_seed(0)
    shape = [5, 7]
    shape[axis] = 4 * blocks
    parameter, goal = nn.Parameter(torch.randn(shape, dtype=torch.float64)), torch.randn(shape, dtype=torch.float64)
    turned = Turned(4, [(parameter, axis)])
    (parameter - goal).pow(3).sum().backward()
    tangent = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    rotation = _cayley(tangent - tangent.T)
    moved = torch.block_diag(*[rotation] * blocks)
    product = (parameter.detach().movedim(axis, -1) @ moved).movedim(-1, axis)
    (product - goal).pow(3).sum().backward()
    torch.testing.assert_close(turned.gradient(), tangent.grad)
    assert float((rotation @ rotation.T - torch.eye(4)).abs().max()) < 1e-12


def test_batches_with_labels_and_a_forward_of_the_users_own() -> None:
    x = batches(3)
    cases: list[dict[str, Any]] = [
        {"batches": [(one, one) for one in x]},
        {"batches": [{"ids": one} for one in x], "inputs": lambda one: {"tokens": one["ids"]}},
        {"batches": x, "forward": lambda model, one: model(one)},
    ]
    found = []
    for case in cases:
        model = decoder()
        learn_rotations(model, case.pop("batches"), A4, steps=3, progress=False, **case)
        found.append(model.head.weight.detach())
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_inference_mode_changes_nothing() -> None:
    x, found = batches(3), []
    for mode in (False, True):
        model = decoder()
        with torch.inference_mode(mode):
            learn_rotations(model, x, A4, steps=3, progress=False)
        found.append(model.head.weight.detach())
    assert_same_bits(found[1], found[0])


def test_half_precision_is_rounded_no_more_often_by_more_steps() -> None:
    model, x = decoder().bfloat16(), batches(2)
    wanted = decoder().double()(x[0])
    learn_rotations(model, x, A4, steps=30, progress=False)
    assert relative(model.double()(x[0]), wanted) < 0.02


def test_what_cannot_be_learned_is_refused() -> None:
    model, x = decoder(), batches(2)
    with pytest.raises(ConfigError, match="steps must be 1 or more, got 0"):
        learn_rotations(model, x, A4, steps=0)
    for wrong in (2.5, "5"):
        with pytest.raises(ConfigError, match=f"steps must be 1 or more, got {wrong!r}"):
            learn_rotations(model, x, A4, steps=wrong)  # type: ignore[arg-type]
    for wrong in (0.0, -1.0, float("nan"), "0.1"):
        with pytest.raises(ConfigError, match="angle must be positive, in radians such as"):
            learn_rotations(model, x, A4, angle=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the config quantizes no layer of the model"):
        learn_rotations(model, x, fq.Config("none", (fq.Rule("*"),)))
    assert "nothing to rotate" in str(learn_rotations(nn.Sequential(nn.Linear(8, 8)), [torch.randn(2, 8)], A4))
    assert model.head.weight.shape == (19, WIDTH)
