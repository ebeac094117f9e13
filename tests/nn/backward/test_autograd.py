"""Quantized gradients under torch's own machinery: what is kept and read, autocast, transforms, second derivatives."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import fakequant as fq
from tests.support.bits import assert_same_bits

OPERANDS = "int8 per_token; input=int8 per_token; weight=int8 per_token"
FINE = "int16; input=int16; weight=int16; hadamard=16"
FORMS = {"as in the forward product": "int8 per_token", "own operands": OPERANDS, "rotated": f"{OPERANDS}; hadamard=16"}
LAYERS = {"linear": (nn.Linear(16, 8), (32, 16)), "convolution": (nn.Conv1d(16, 8, 3), (32, 16, 7))}


def prepared(layer: nn.Module, gradient: str | None) -> Any:
    return fq.prepare(nn.Sequential(copy.deepcopy(layer)), fq.Config(fq.Rule("*", "int8_per_token", gradient=gradient)))


def kept(model: nn.Module, x: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    found: list[tuple[tuple[int, ...], torch.dtype]] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return found


@pytest.mark.parametrize("gradient", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_only_what_the_wanted_gradients_need_is_kept(name: str, gradient: str) -> None:
    layer, shape = LAYERS[name]
    model, dtype = prepared(layer, gradient), torch.float32
    of_x, of_weight = (shape, dtype), (tuple(layer.weight.shape), dtype)
    assert kept(model, torch.randn(shape, requires_grad=True)) == [of_x, of_weight]
    assert kept(model, torch.randn(shape)) == [of_x]
    model.requires_grad_(False)
    assert kept(model, torch.randn(shape, requires_grad=True)) == [of_weight]


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_keeps_operands_of_the_forward_product_in_its_dtype(name: str) -> None:
    layer, shape = LAYERS[name]
    model = prepared(layer, FORMS["as in the forward product"])
    with torch.autocast("cpu", torch.bfloat16):
        assert {dtype for _, dtype in kept(model, torch.randn(shape, requires_grad=True))} == {torch.bfloat16}
        assert {dtype for _, dtype in kept(model.double(), torch.randn(shape).double())} == {torch.float64}


def test_a_backward_pass_within_autocast_gives_the_same_bits() -> None:
    model, x = prepared(nn.Linear(16, 8), FORMS["rotated"]), torch.randn(32, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x).sin().sum()
        within = torch.autograd.grad(y, [x, model[0].weight], retain_graph=True)
    for one, other in zip(within, torch.autograd.grad(y, [x, model[0].weight]), strict=True):
        assert_same_bits(one, other)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * (1 + self.calls)


@pytest.mark.parametrize("gradient", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_computed_weight_is_computed_once(name: str, gradient: str) -> None:
    layer, shape = LAYERS[name]
    model = prepared(layer, gradient)
    counted = Counted()
    nn.utils.parametrize.register_parametrization(model[0], "weight", counted, unsafe=True)
    before = counted.calls
    model(torch.randn(shape)).sum().backward()
    assert counted.calls == before + 1


@pytest.mark.parametrize("gradient", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_go_through_all_operands(name: str, gradient: str) -> None:
    """With fine formats they are those of the float layer."""
    layer, shape = LAYERS[name]
    model = prepared(layer, FINE if "input" in gradient else "int16")
    for quantizer in fq.nn.quantizers(model).values():
        quantizer.mode = fq.nn.Mode.OFF
    x = torch.randn(shape, requires_grad=True)

    def second(layer: nn.Module) -> tuple[Tensor, ...]:
        at = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x).sin().sum(), at, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), at)

    for found, right in zip(second(model), second(layer), strict=True):
        assert (found - right).norm() < 1e-2 * right.norm()


@pytest.mark.parametrize("gradient", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_transforms_of_functions(name: str, gradient: str) -> None:
    """`grad` gives the gradients of autograd, `vmap` those of one example after the other."""
    layer, shape = LAYERS[name]
    model, x = prepared(layer, gradient), torch.randn(shape)
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().sum()

    def by_autograd(x: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss(params, x), list(params.values())))

    whole = grad(loss)(params, x)
    for one, other in zip(whole.values(), by_autograd(x), strict=True):
        assert_same_bits(one, other)
    each = vmap(grad(loss), in_dims=(None, 0))(params, x[:4, None])
    for number in range(4):
        for one, other in zip(each.values(), by_autograd(x[number : number + 1]), strict=True):
            torch.testing.assert_close(one[number], other)


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_is_that_of_the_layer_without_quantized_gradients(name: str) -> None:
    layer, shape = LAYERS[name]
    model, plain, x, dx = prepared(layer, OPERANDS), prepared(layer, None), torch.randn(shape), torch.randn(shape)
    params = {key: one.detach() for key, one in model.named_parameters()}
    moved = {key: torch.randn_like(one) for key, one in params.items()}
    for given in (("x",), ("params",), ("x", "params")):
        at = [x if one == "x" else params for one in given]
        by = [dx if one == "x" else moved for one in given]

        def output(one: nn.Module, given: tuple[str, ...], *values: Any) -> Tensor:
            named = dict(zip(given, values, strict=True))
            return functional_call(one, named.get("params", params), (named.get("x", x),))

        found = (jvp(partial(output, one, given), tuple(at), tuple(by))[1] for one in (model, plain))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", LAYERS)
def test_a_trace_records_the_layer_without_quantized_gradients(name: str) -> None:
    layer, shape = LAYERS[name]
    model, x = prepared(layer, f"{OPERANDS}; hadamard=16"), torch.randn(shape)
    assert_same_bits(torch.jit.trace(model, x)(x), model(x))
    assert_same_bits(torch.export.export(model, (x,)).module()(x), model(x))


def test_a_compiler_has_nothing_to_warn_of() -> None:
    model = prepared(nn.Linear(16, 8), FORMS["rotated"])
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo detected a call to a `functools.lru_cache`")
        torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(32, 16)).sum().backward()


def test_compiled_products_are_the_same_bits() -> None:
    rule = fq.Rule("*", input="int8 per_token dynamic", gradient=OPERANDS)
    model, x, other = fq.prepare(fq.nn.MatMul(), fq.Config(rule)), torch.randn(2, 16, 24), torch.randn(2, 24, 8)
    x.requires_grad_()
    other.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    dy = torch.randn(2, 16, 8)
    for one, right in zip(
        torch.autograd.grad(compiled(x, other), (x, other), dy),
        torch.autograd.grad(model(x, other), (x, other), dy),
        strict=True,
    ):
        assert_same_bits(one, right)


def test_compiled_transforms_refuse_quantized_gradients_or_run_without_the_compiler() -> None:
    model, x = prepared(nn.Linear(16, 8), OPERANDS), torch.randn(32, 16)
    params = {name: own.detach() for name, own in model.named_parameters()}
    function = grad(lambda params: functional_call(model, params, (x,)).square().sum())
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cannot quantize gradients"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(params)
    found = torch.compile(function, backend="aot_eager")(params)
    for name, right in function(params).items():
        assert_same_bits(found[name], right)
