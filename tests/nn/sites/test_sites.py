"""Functions in a module's own `forward` compute what the same quantizers called by hand compute, in every bit."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, SiteError
from fakequant.model.sites import site_plan
from fakequant.model.training import qat
from fakequant.nn.sites import sites_of
from tests.support.copies import pickled, saved
from tests.support.functional_models import (
    Calls,
    Network,
    assert_same_bits,
    example,
    float_network,
    gradients,
    only,
    quantized,
)
from tests.support.matrix import full, sweep
from tests.support.threads import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


@pytest.fixture(scope="module")
def network() -> Network:
    return quantized(float_network(), example())


def fresh(network: Network) -> Network:
    return copy.deepcopy(network)


@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_the_plan_by_hand(network: Network, training: bool) -> None:
    ours, hand = fresh(network).train(training), fresh(network).train(training)
    for seed in (2, 3):
        x = example(seed)
        got, expected = gradients(ours, ours, x), gradients(hand, hand.by_hand, x)
        assert_same_bits(got, expected)
        assert not torch.equal(got[0], float_network()(x))
    assert_same_bits(list(ours.buffers()), list(hand.buffers()))  # of batch normalisation, which adds in training


def test_quantizers_that_are_off_leave_the_float_model(network: Network) -> None:
    plain = float_network()
    with fq.disabled(network):
        assert_same_bits(gradients(network, network, example(4)), gradients(plain, plain, example(4)))


@pytest.mark.parametrize("method", ["lsq", "lsq_plus", "pact", "tqt"])
def test_learned_ranges_get_their_gradients(network: Network, method: str) -> None:
    ours, hand = fresh(network).train(), fresh(network).train()
    for model in (ours, hand):
        qat.set_scales(model, qat.Scales.LEARNED, method)
    assert_same_bits(gradients(ours, ours, example(5)), gradients(hand, hand.by_hand, example(5)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules(reentrant: bool) -> None:
    ours = quantized(float_network(reentrant), example()).train()
    hand = quantized(float_network(), example()).train()
    assert_same_bits(gradients(ours, ours, example(6)), gradients(hand, hand.by_hand, example(6)))


@sweep("backend", full(["aot_eager", "inductor"]), [])
def test_compiled_in_one_graph(network: Network, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    by_hand = torch.compile(network.by_hand, fullgraph=True, backend=backend)
    assert torch.equal(compiled(example(7)), by_hand(example(7)))


@sweep("backend", full(["aot_eager", "inductor"]), [])
def test_compiled_training_steps(network: Network, backend: str) -> None:
    torch.compiler.reset()
    ours, hand = fresh(network).train(), fresh(network).train()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    by_hand = torch.compile(hand.by_hand, fullgraph=True, backend=backend)
    assert_same_bits(gradients(ours, compiled, example(7)), gradients(hand, by_hand, example(7)))


def test_a_compiled_graph_reads_the_scale_of_every_quantizer(network: Network) -> None:
    read: set[int] = set()

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        read.update(id(tensor) for tensor in inputs)
        return graph.forward

    torch.compiler.reset()
    block = network[0]
    compiled = torch.compile(block, fullgraph=True, backend=note)
    assert torch.equal(compiled(example(7)), block(example(7)))
    unread = [name for name, q in fq.nn.quantizers(block).items() if not {id(b) for b in q.buffers()} & read]
    assert not unread
    assert len(fq.nn.quantizers(block)) == 28


@pytest.mark.parametrize("strict", [False, True])
def test_exported(network: Network, strict: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # strict export tells that a mode is entered
        program = torch.export.export(network, (example(),), strict=strict)
    assert torch.equal(program.module()(example(8)), network(example(8)))
    called = [node for node in program.graph.nodes if "fake_quantize" in str(node.target)]
    assert len(called) == len(fq.nn.quantizers(network))


def test_copies(network: Network) -> None:
    expected = network(example(9))
    for made in (copy.deepcopy(network), pickled(network), saved(network), copy.copy(network)):
        assert torch.equal(made(example(9)), expected)
        assert site_plan(made) == site_plan(network)
        assert [type(module) for module in made.modules()] == [type(module) for module in network.modules()]


def test_classes_keep_their_names_and_signatures(network: Network) -> None:
    plain = float_network()
    for path, module in plain.named_modules():
        swapped = network.get_submodule(path)
        assert isinstance(swapped, type(module))
        if not isinstance(module, nn.Linear):
            assert type(swapped).__name__ == type(module).__name__
    assert list(torch._dynamo.utils.inspect.signature(network[0].forward).parameters) == ["x", "mask"]


def test_two_threads_at_once(network: Network) -> None:
    inputs = [example(seed, tokens=3 + seed % 3) for seed in range(8)]
    with torch.no_grad():
        expected = [network(x) for x in inputs]
    first = iter((0, 1))

    def work() -> None:
        start = next(first)
        for place in [*range(start, len(inputs), 2)] * 20:
            with torch.no_grad():
                assert torch.equal(network(inputs[place]), expected[place])

    run_in_threads(work, 2)


def test_two_threads_in_one_call_share_no_counters() -> None:
    meet = threading.Barrier(2)

    class Meeting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x + x
            meet.wait()
            return torch.relu(x) + x

    meet = threading.Barrier(1)
    model = quantized(Meeting(), torch.ones(2, 4), rules=fq.Config("add", (fq.Rule("*", input="int8", ops=("add",)),)))
    meet = threading.Barrier(2)
    results: list[Tensor] = []
    run_in_threads(lambda: results.append(model(torch.ones(2, 4))), 2)
    assert len(results) == 2


def test_scalars_integers_and_masks_are_no_operands() -> None:
    def odd(_: nn.Module, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        x = (2 + x + 1) * torch.tensor(2.0)
        y = F.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=mask)
        return y + (ids + ids).unsqueeze(-1)

    inputs = (torch.randn(2, 3, 4), torch.arange(3), torch.zeros(3, 3))
    model = quantized(Calls(odd), *inputs, rules=only("add", "sdpa"))
    assert str(site_plan(model)) == (
        "_sites.scaled_dot_product_attention_0: query int8 per_tensor, key int8 per_tensor, value int8 per_tensor"
    )


def test_a_module_used_twice_and_broadcasting() -> None:
    x, shift = torch.randn(3, 4), Calls(lambda model, x, y: x + y)
    twice = Calls(lambda model, x: model.shift(x, model.shift(x * 2, x[:1])), shift=shift)
    model = quantized(twice, x, rules=only("add"))
    site = model.shift._sites.add_0
    inner = site.input(x * 2) + site.other(x[:1])
    assert torch.equal(model(x), site.input(x) + site.other(inner))


def test_autocast() -> None:
    x = example()
    model = quantized(float_network(), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), model.by_hand(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_functions_with_sites_are_refused(reentrant: bool) -> None:
    class Checkpoints(nn.Module):
        def part(self, x: Tensor) -> Tensor:
            return x + x.sin()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=reentrant)

    model = quantized(nn.Sequential(Checkpoints()), torch.randn(4), rules=only("add")).train()
    with pytest.raises(SiteError, match=r"0 calls torch.utils.checkpoint on a function that has quantizers \(add_0\)"):
        model(torch.randn(4, requires_grad=True))
    with torch.no_grad():
        model.eval()[0].part(torch.randn(4))


def test_saved_tensor_hooks_and_no_grad_in_a_forward_are_no_checkpoint() -> None:
    def saves(_: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = x + x.sin()
        with torch.no_grad():
            y = x + x.cos()
        return x * y

    model = quantized(Calls(saves), torch.randn(4), rules=only("add")).train()
    assert model(torch.randn(4, requires_grad=True)).requires_grad


def test_hooks_of_called_modules_are_not_counted() -> None:
    x = example()
    model = quantized(float_network(), x)
    expected, seen = model(x), []

    def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(torch.softmax(args[0] + args[0], -1) @ args[0].transpose(-2, -1))

    for name in ("0.mlp", "0.norm", "1.attention", "1.attention.q", "0"):
        model.get_submodule(name).register_forward_hook(look)
    assert torch.equal(model(x), expected)
    assert len(seen) == 5


def test_methods_of_a_child_count_as_their_callers() -> None:
    class Helper(nn.Module):
        def add(self, x: Tensor) -> Tensor:
            return x + x.sin()

        def forward(self, x: Tensor) -> Tensor:
            return x + x.cos()

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper = Helper()

        def forward(self, x: Tensor) -> Tensor:
            return self.helper.add(x) + self.helper.forward(x)

    x = torch.randn(3, 4)
    model = quantized(Caller(), x, rules=only("add"))
    own, helpers = sites_of(model), sites_of(model.helper)
    first = own.add_0.input(x) + own.add_0.other(x.sin())
    second = helpers.add_0.input(x) + helpers.add_0.other(x.cos())
    assert torch.equal(model(x), own.add_1.input(first) + own.add_1.other(second))


def test_parametrized_modules_called_by_owners() -> None:
    x, linear = torch.randn(3, 4), nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    model = quantized(
        Calls(lambda model, x: x + model.linear(x), linear=linear),
        x,
        rules=fq.presets.INT8.with_rule(*only("add", "linear").rules),
    )
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    nn.utils.parametrize.remove_parametrizations(model.linear, "weight")
    assert torch.equal(model(x), expected)
    assert torch.equal(pickled(model.linear)(x), model.linear(x))


def test_a_forward_of_accelerate_in_the_module_itself_is_kept() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    x = example()
    model = float_network()
    add_hook_to_module(model[0], ModelHook())
    made = quantized(model, x)
    assert torch.equal(made(x), made.by_hand(x))


def test_forwards_that_would_bypass_the_quantizers_are_refused() -> None:
    model = float_network()
    model[1].forward = lambda x: x
    model[1].forward = lambda x: x + x
    with pytest.raises(ConfigError, match="1: its forward was replaced"):
        fq.prepare(model, only("add"), example=example())


def test_classes_that_are_allowed_in_graphs_are_traced() -> None:
    @torch.compiler.allow_in_graph  # as diffusers marks its attention
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.query(x), -1) @ x.mT @ x

    parts = {"attention": Attention(), "last": nn.Linear(8, 8)}
    net, x = Calls(lambda model, x: x + model.attention(model.last(x)), **parts), torch.randn(4, 8)
    model = fq.prepare(net.eval(), "int8", x, target="onnxruntime")
    fq.calibrate(model, [x])
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


def test_in_place_functions_change_the_tensor_for_all_who_hold_it() -> None:
    def in_place(_: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = x * 1
        alias = a
        a.add_(y)
        return alias, F.relu(a, inplace=True), a

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    model = quantized(Calls(in_place), x, y, rules=only("add", "relu"))
    alias, b, a = model(x, y)
    site = sites_of(model)
    quantized_sum = site.add_0.input(x) + site.add_0.other(y)
    assert torch.equal(a, torch.relu(site.relu_0.input(quantized_sum)))
    assert alias is a
    assert b is a


def test_in_place_results_with_quantizers_keep_what_their_backward_needs() -> None:
    """The quantized result takes the place of the operand, and not of the one that the backward of relu reads."""
    rules = (fq.Rule("*", output="int8", ops=("relu",)),)
    x, found = torch.randn(2, 4), []
    for inplace in (True, False):
        relu = Calls(lambda model, x, inplace=inplace: F.relu(x * 1, inplace=inplace) * 1)
        model = fq.prepare(relu, fq.Config("results", rules), example=x)
        fq.calibrate(model, [x], progress=False)
        given = x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        found.append([y, given.grad])
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("result", [None, "int8"])
@pytest.mark.parametrize("name", ["addmm_", "baddbmm_", "addbmm_"])
def test_products_that_are_added_in_place_overwrite_what_they_are_added_to(name: str, result: str | None) -> None:
    def adds(_: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        held = (x[0] if name == "addbmm_" else x) * 1
        return getattr(held, name)(x, y, alpha=0.5), held

    shape = (3, 3) if name == "addmm_" else (2, 3, 3)
    x, y = torch.randn(shape), torch.randn(shape)
    rules = (fq.Rule("*", input="int8", output=result, ops=(name[:-1],)),)
    model: Any = fq.prepare(Calls(adds), fq.Config("added", rules), example=(x, y))
    fq.calibrate(model, [(x, y)], inputs=slice(2), progress=False)
    given = x.clone()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            y_in_place, held = model(given, y)
            site = model._sites.by_key()[f"{name}0"]
            added = getattr(torch, name[:-1])(x[0] if name == "addbmm_" else x, site.input(x), site.other(y), alpha=0.5)
            assert_same_bits(y_in_place, added if result is None else site.output(added))
        assert held is y_in_place
        assert torch.equal(given, x)
