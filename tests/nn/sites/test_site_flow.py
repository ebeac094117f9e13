"""What a recorded run knows of the flow of data: writes through views, `out=`, branches, hooks and long chains."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ConfigError, CoverageWarning, SiteError

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore::fakequant.errors.CoverageWarning")


class Calls(nn.Module):
    def __init__(self, function: Callable[["Calls", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.small, self.large = nn.Parameter(torch.randn(3, 4)), nn.Parameter(100 * torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def prepared(function: Callable[[Calls, Tensor], Tensor], target: str, x: Tensor = X) -> nn.Module:
    return fq.prepare(Calls(function), "INT8", x, target=target)


def quantizers_of(model: nn.Module, key: str) -> set[str]:
    return next((set(site.quantizers) for site in fq.site_plan(model).sites if site.key == key), set())


def products_left(model: nn.Module) -> list[str]:
    return [str(one) for one in fq.unquantized(model, X, products_only=True)]


def scaled_columns(model: Calls, x: Tensor) -> Tensor:
    y = x.softmax(-1)
    y[:, :2].mul_(0.37)
    return y @ model.small


def test_a_write_through_a_view_ends_a_fixed_range() -> None:
    assert "input" in quantizers_of(prepared(scaled_columns, "qnn"), "matmul_0")


@pytest.mark.parametrize("part", [slice(0, 2), slice(2, 3)])
def test_a_write_beside_a_view_leaves_it(part: slice) -> None:
    def one_column(model: Calls, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        column = y[:, 2:]
        y[:, part].mul_(0.37)
        return column.expand(-1, 3) @ model.small

    overwritten = part.start == 2
    assert ("input" in quantizers_of(prepared(one_column, "qnn"), "matmul_0")) is overwritten


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 3), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.write(y)
        return y @ y.mT


WRITES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "nothing": (lambda y: None, True),
    "a part, through a view": (lambda y: y[:, :2].mul_(0.37), False),
    "all, through a view": (lambda y: y.view(-1).mul_(0.37), False),
    "a part, by an index": (lambda y: y.__setitem__((slice(None), 0), 0.37), False),
    "zeros": (lambda y: y[:, :2].copy_(torch.zeros(5, 2)), True),
    "itself": (lambda y: y[:, :2].copy_(y[:, 1:]), True),
    "in another dtype": (lambda y: y.view(torch.int32).bitwise_or_(1), False),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_written_tensor_is_quantized_if_all_of_it_is(name: str) -> None:
    write, quantized = WRITES[name]
    rules = fq.Config("results", (fq.Rule("layer", "int8"), fq.Rule("layer", output="int8")))
    model = fq.prepare(Written(write), rules)
    left = [one for one in fq.unquantized(model, X, products_only=True) if one.name == "matmul"]
    assert (left == []) is quantized


def into_empty(model: Calls, x: Tensor) -> Tensor:
    out = torch.empty(5, 4)
    torch.mm(x, model.small, out=out)
    return out


def into_nothing(model: Calls, x: Tensor) -> Tensor:
    out = torch.empty(0)
    return torch.mm(x, model.small, out=out)


@torch.no_grad()
@pytest.mark.parametrize("function", [into_empty, into_nothing])
def test_a_result_in_a_given_tensor_is_quantized(function: Callable[[Calls, Tensor], Tensor]) -> None:
    model, plain = prepared(function, "qnn"), prepared(lambda model, x: torch.mm(x, model.small), "qnn")
    for one in (model, plain):
        fq.calibrate(one, [X], progress=False)
    assert quantizers_of(model, "matmul_0") == {"input", "other", "output"}
    assert torch.equal(model(X), plain(X))


def test_what_is_written_to_is_no_operand() -> None:
    def added(model: Calls, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.add(x, 1.0, out=out)
        return out

    assert [str(one) for one in fq.unquantized(prepared(added, "xnnpack"), X)] == [
        "(model): add, 1 of 1 inputs in float"
    ]


def test_a_branch_that_reads_another_parameter_is_an_error() -> None:
    def branches(model: Calls, x: Tensor) -> Tensor:
        return x @ model.small if x.mean() < 0 else x @ model.large

    model = prepared(branches, "qnn", -X.abs())
    fq.calibrate(model, [-X.abs()], progress=False)
    model(-X.abs())
    with pytest.raises(SiteError, match="a call of matmul reads large, and the plan has s"):
        model(X.abs())


def test_a_compiled_branch_that_reads_another_parameter_is_an_error() -> None:
    def branches(model: Calls, x: Tensor) -> Tensor:
        return x @ (model.large if getattr(model, "other", False) else model.small)

    model = prepared(branches, "qnn")
    fq.calibrate(model, [X], progress=False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), model(X))
    model.other = True
    with pytest.raises(Exception, match="Observed exception"):
        compiled(X)


def test_weights_that_a_call_replaces_are_no_other_parameters() -> None:
    model = prepared(lambda model, x: x @ model.small, "qnn")
    fq.calibrate(model, [X], progress=False)
    doubled = {"small": nn.Parameter(2 * model.small.detach())}
    assert torch.func.functional_call(model, doubled, (X,)).isfinite().all()


def test_functions_that_hooks_call_take_no_quantizers_of_the_model() -> None:
    model = Calls(lambda model, x: x @ model.small)
    model.register_forward_hook(lambda _module, _args, output: output @ output.mT)
    with pytest.warns(CoverageWarning, match=r"products with \d+ % of the multiply-accumulates have inputs in fl"):
        fq.prepare(model, "INT8", X, target="openvino")
    assert products_left(model) == ["(model): matmul, 2 of 2 inputs in float"]


def test_a_maximum_has_a_fixed_range_only_if_both_operands_have() -> None:
    def largest(model: Calls, x: Tensor) -> Tensor:
        return torch.maximum(x.softmax(-1), x * 5.0) @ model.small

    def largest_of_fixed(model: Calls, x: Tensor) -> Tensor:
        return torch.maximum(x.softmax(-1), x.sigmoid()) @ model.small

    assert "input" in quantizers_of(prepared(largest, "qnn"), "matmul_0")
    assert "input" not in quantizers_of(prepared(largest_of_fixed, "qnn"), "matmul_0")


def test_a_long_chain_is_placed_without_recursion() -> None:
    def chain(model: Calls, x: Tensor) -> Tensor:
        y = x @ model.small
        for _ in range(3000):
            y = y.flip(0)
        return y

    assert "output" in quantizers_of(prepared(chain, "qnn"), "matmul_0")


def test_many_ways_to_one_product_are_walked_once() -> None:
    def ways(model: Calls, x: Tensor) -> Tensor:
        y = x @ model.small
        for _ in range(40):  # 2**40 ways
            y = torch.maximum(y, y.flip(0))
        return y @ y.mT

    assert "output" not in quantizers_of(prepared(ways, "qnn"), "matmul_0")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.calls = Block(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.block.last = False
        x = self.block(x)
        self.block.last = True
        return self.block(x)


class Block(nn.Module):
    last = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.abs()
        return x + torch.rand_like(x) if self.training and self.last else x


class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Cached(), Block()

    def forward(self, x: Tensor) -> Tensor:
        self.block.cache = None
        return self.other(self.block(self.block(x)))


class Cached(nn.Module):
    cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.cache is None else torch.cat([self.cache, x])[-len(x) :] + x
        self.cache = x
        return y + x.abs()


@pytest.mark.parametrize(
    ("model", "given", "owner", "sites"),
    [
        (Noisy, {"config": fq.Config("sums", (fq.Rule("*", input="int8", ops=("add",)),))}, "block", 0),
        (Streaming, {"config": fq.Config("sums", (fq.Rule("*", input="int8", ops=("add",)),))}, "block", 1),
        (Streaming, {"config": "int8", "target": "openvino"}, "block", 1),
    ],
)
def test_an_owner_whose_calls_differ_is_left_in_float(model: Any, given: Any, owner: str, sites: int) -> None:
    wanted = model().eval()(X)
    with pytest.warns(CoverageWarning, match=rf"^{owner} is called 2 times .*calls functions in different orders"):
        found = fq.prepare(model().eval(), example=X, **given)
    assert len(fq.site_plan(found).sites) == sites
    if sites:
        fq.calibrate(found, [X], progress=False)
    assert torch.allclose(found(X), wanted, atol=0.1)


def test_the_rule_that_an_error_offers_speaks_of_the_model_alone() -> None:
    def loop(model: Calls, x: Tensor) -> Tensor:
        for _ in range(int(x.shape[0])):
            x = x + x.abs()
        return x

    model = prepared(loop, "openvino")
    fq.calibrate(model, [X], progress=False)
    with pytest.raises(SiteError) as caught:
        model(X[:2])
    found = re.search(r"Rule\((.*?), ops=", str(caught.value))
    assert found[1] == "''"
    nested = nn.Sequential(Calls(loop))
    chosen = fq.presets.INT8.with_rule(fq.Rule("", ops=("add",), optional=True))
    assert fq.site_plan(fq.prepare(nested, chosen, X, target="openvino")).sites


def test_a_table_of_ones_own_is_a_target() -> None:
    mine = fq.Target("mine", inputs=frozenset({"matmul"}), keeps=frozenset())
    model = fq.prepare(Calls(lambda model, x: (x + x.abs()) @ model.small), "INT8", X, target=mine)
    assert [site.key for site in fq.site_plan(model).sites] == ["matmul_0"]
    with pytest.raises(ConfigError, match="the target mine names an unknown function 'matmull'; did you mean matmul"):
        fq.Target("mine", inputs=frozenset({"matmull"}), keeps=frozenset())
    with pytest.raises(ConfigError, match="unknown target 'tensort'; did you mean tensorrt"):
        fq.prepare(nn.Linear(3, 3), "INT8", X, target="tensort")
