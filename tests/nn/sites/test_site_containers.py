"""Owners that loop over the modules that they hold: the module of their quantizers is none of these."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import SiteError
from tests.support.bits import assert_same_bits

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
RULES = fq.presets.INT8.with_rule(fq.Rule("*", input="int8", ops=("add", "cat"), optional=True))


class Dict(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        ys = [x]
        for _, layer in self.items():
            ys.append(layer(ys[-1]))
        ys += [self[name](x) for name in self]
        ys += [layer(x) for layer in self.values()]
        assert (len(self), list(self.keys())) == (2, ["a", "b"])
        return torch.cat(ys, 1)


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) + self[-1](x)


class List(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return self[-1](x) + x


class Children(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = x + layer(x)
        return x


class Values(Children):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self._modules.values():
            x = x + layer(x)
        return x


MAKERS = {
    "ModuleDict": lambda a, b: Dict({"a": a, "b": b}),
    "Sequential": Chain,
    "ModuleList": lambda a, b: List([a, b]),
    "children": Children,
}


def layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 4)


def prepared(name: str) -> nn.Module:
    model = fq.prepare(MAKERS[name](*layers()), RULES, example=X)
    fq.calibrate(model, [X])
    return model


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_loop_over_modules_meets_no_quantizers(name: str) -> None:
    model = prepared(name)
    y = model(X)
    with fq.disabled(model):
        assert_same_bits(model(X), MAKERS[name](*layers())(X))
    assert_same_bits(copy.deepcopy(model)(X), y)
    assert_same_bits(pickle.loads(pickle.dumps(model))(X), y)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("name", ["ModuleDict", "children"])
def test_graphs_of_loops(name: str) -> None:
    model = prepared(name)
    with torch.no_grad():
        y = model(X)
        assert_same_bits(torch.export.export(model, (X,), strict=True).module()(X), y)
        torch.compiler.reset()
        assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(X), y)


@pytest.mark.parametrize("name", list(MAKERS))
def test_what_changes_a_model_reaches_its_quantizers(name: str) -> None:
    model = prepared(name).train()
    assert all(quantizer.training for quantizer in fq.nn.quantizers(model).values())
    assert any("_sites" in key for key in model.state_dict())
    assert not list(model.eval().children())[-1].training


def test_slices_are_the_float_class() -> None:
    for name, cls in (("Sequential", Chain), ("ModuleList", List)):
        part = prepared(name)[1:]
        assert type(part) is cls
        assert len(part) == len(list(part)) == 1


def test_a_loop_over_all_that_is_held_is_refused() -> None:
    with pytest.raises(SiteError, match=r"calls all modules that it holds, also _sites, .* skip _sites"):
        fq.calibrate(fq.prepare(Values(*layers()), RULES, example=X), [X])


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) + x


class Delegates(Inner):
    """As peft's and Lightning's wrappers: an attribute that it lacks is that of the module inside."""

    def __init__(self):
        nn.Module.__init__(self)
        self.inner = Inner()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) * 2 + x


class AsksInsideFirst(Delegates):
    def __getattr__(self, name):
        inner = self.__dict__["_modules"]["inner"]
        return inner if name == "inner" else getattr(inner, name)


class AnswersEverything(Delegates):
    def __getattr__(self, name):
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return None


@pytest.mark.parametrize("cls", [Delegates, AsksInsideFirst, AnswersEverything])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrapper_that_delegates_attributes_owns_sites(cls, depth, tmp_path):
    def net():
        torch.manual_seed(0)
        made = cls()
        if depth == 2:
            outer = cls()
            outer.inner = made
            made = outer
        return nn.Sequential(made)

    x = torch.linspace(-1, 1, 8).view(2, 4)
    model = fq.prepare(net(), "int8", x, target="tensorrt")
    fq.calibrate(model, [x], progress=False)
    assert f"0.{'inner.' * depth}_sites.add_0" in str(fq.site_plan(model))
    assert "0._sites.add_0" in str(fq.site_plan(model))
    fq.summary(model, x)
    again = fq.load(net(), fq.save(model, tmp_path))
    assert_same_bits(again(x), model(x))
    assert_same_bits(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("cls", [Delegates, AsksInsideFirst, AnswersEverything])
def test_torch_finds_the_sites_of_a_wrapper_and_not_those_inside(cls, tmp_path):
    outer = cls()
    outer.inner = cls()
    x = torch.linspace(-1, 1, 8).view(2, 4)
    model = fq.prepare(nn.Sequential(outer), "int8", x, target="onnxruntime")
    fq.calibrate(model, [x], progress=False)
    for path, module in model.named_modules():
        assert model.get_submodule(path) is module
    state = {name: torch.full_like(value, 0.5) if "scale" in name else value for name, value in model.named_buffers()}
    given = torch.func.functional_call(copy.deepcopy(model), state, x)
    coarse = copy.deepcopy(model)
    coarse.load_state_dict({**model.state_dict(), **state})
    assert_same_bits(given, coarse(x))
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, x, path)
    report = fq.verify_onnx(path, model, [x])
    assert report.exact, report
