"""Layers that become quantized although their class is not in the table: subclasses, parametrized ones, hooked ones."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fakequant as fq
from fakequant.errors import ConfigError, CoverageWarning
from fakequant.model import presets
from fakequant.nn.quantized.forms import quantized_class
from fakequant.nn.quantized.layers import QuantConv2d, QuantLinear, layers
from tests.support.copies import pickled, saved
from tests.support.models import hook_forward


class Square(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.size = size

    def extra_repr(self) -> str:
        return f"size={self.size}"

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


class Squarer(Square):
    """A subclass of one."""


class Pointwise(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1, bias=False)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Square(4), nn.ReLU(), Squarer(4)).eval()


def by_torch() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    model.load_state_dict(net().state_dict())
    return model


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def calibrated(model: Any, config: Any = "int8") -> Any:
    fq.calibrate(fq.prepare(model, config), [X])
    return model


@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_a_subclass_that_inherits_all_that_computes_is_its_base(execution: str) -> None:
    model = calibrated(net())
    assert isinstance(model[0], Square)
    assert isinstance(model[2], Squarer)
    assert isinstance(model[2], QuantLinear)
    assert re.match(r"QuantSquare\(\s*size=4\s*\(_input_quantizer\): Quantizer\(int8", str(model[0]))
    assert type(model[0]).float_class is Square
    fq.set_execution(model, execution)
    expected = fq.set_execution(calibrated(by_torch()), execution)(X)
    assert torch.equal(model(X), expected)
    assert torch.equal(model[2].twice(X), model[2](model[2](X)))
    assert "Squarer  int8 per_tensor" in re.sub(" +", "  ", str(fq.summary(model))).replace("int8  per", "int8 per")


def test_all_layers_of_one_class_get_one_class() -> None:
    model = calibrated(nn.Sequential(Square(4), Square(4)))
    assert type(model[0]) is type(model[1])


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, pickled, saved])
def test_copies_are_of_the_same_class_and_compute_the_same(copier: Callable[[nn.Module], Any]) -> None:
    model = calibrated(net())
    copied = copier(model)
    assert [type(layer) for layer in copied] == [type(layer) for layer in model]
    assert torch.equal(copied(X), model(X))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle(protocol: int) -> None:
    model = calibrated(net())
    assert torch.equal(pickle.loads(pickle.dumps(model, protocol))(X), model(X))


def test_what_was_pickled_and_has_no_form_any_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(calibrated(net()))
    monkeypatch.setattr(Square, "forward", lambda self, x: x, raising=False)
    with pytest.raises(
        ConfigError, match=r"test_forms\.Square has no quantized class in this process; before unpickling, import"
    ):
        pickle.loads(data)


def test_it_is_saved_loaded_compiled_exported(tmp_path: Path) -> None:
    model = calibrated(net())
    loaded = fq.load(net(), fq.save(model, tmp_path))
    assert type(loaded[0]) is type(model[0])
    assert torch.equal(loaded(X), model(X))
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), model(X))
    fq.export_onnx(model, X, tmp_path / "model.onnx")
    assert fq.verify_onnx(tmp_path / "model.onnx", model).exact


def test_convolutions_keep_their_shape_of_input() -> None:
    layer, x = Pointwise(3), torch.randn(2, 3, 4, 4)
    same = nn.Conv2d(3, 3, 1, bias=False)
    same.load_state_dict(layer.state_dict())
    for module in (layer, same):
        fq.calibrate(fq.prepare(module, "int8"), [x])
    assert isinstance(layer, QuantConv2d)
    assert torch.equal(layer(x), same(x))
    assert torch.equal(layer(x[0]), same(x[0]))


def make(name: str, value: Any, base: type[nn.Module] = nn.Linear) -> nn.Module:
    return type("Changed", (base,), {name: value})(2, 2, *([1] if base is nn.Conv2d else []))  # type: ignore[call-arg]


CHANGED: dict[str, Callable[[], nn.Module]] = {
    "forward": lambda: make("forward", lambda self, x: x),
    "_conv_forward": lambda: make("_conv_forward", lambda self, *x: x[0], nn.Conv2d),
    "__call__": lambda: make("__call__", lambda self, x: x),
    "_call_impl": lambda: make("_call_impl", lambda self, x: x),
    "__getattr__": lambda: make("__getattr__", nn.Module.__getattr__),
    "__init_subclass__": lambda: make("__init_subclass__", classmethod(lambda cls: None)),
    "__reduce_ex__": lambda: make("__reduce_ex__", nn.Module.__reduce_ex__),
    # Names that quantized layers use themselves.
    "inputs": lambda: make("inputs", 3),
    "product": lambda: make("product", property(lambda self: 1)),
    "execution": lambda: make("execution", "fast"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_subclass_that_changes_what_is_computed_stays(name: str) -> None:
    layer = CHANGED[name]()
    model = nn.Sequential(nn.Linear(2, 2), layer)
    with pytest.warns(CoverageWarning, match=rf"Changed \(1: its own {name}\)"):
        fq.prepare(model, "int8")
    assert type(model[1]).__name__ == "Changed"


class Meta(type):
    pass


def test_other_metaclasses_stay() -> None:
    class Special(nn.Linear, metaclass=Meta):
        pass

    with pytest.warns(CoverageWarning, match=r"Special \(1: the metaclass Meta\)"):
        fq.prepare(nn.Sequential(nn.Linear(2, 2), Special(2, 2)), "int8")


def test_a_mixin_after_the_base_that_changes_calls_stays() -> None:
    class Late(nn.Module):
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)

    class Mixed(nn.Linear, Late):
        pass

    assert quantized_class(Mixed(2, 2)) is None


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def test_the_projection_that_attention_in_float_reads_stays() -> None:
    model = nn.Sequential(OwnAttention(4, 2), nn.Linear(4, 4))
    text = (
        r"OwnAttention \(1: its own forward\), "
        r"NonDynamicallyQuantizableLinear \(1: its weight is read without a call of the layer"
    )
    with pytest.warns(CoverageWarning, match=text):
        fq.prepare(model, "int8")


def test_what_is_registered_for_the_subclass_itself_comes_first() -> None:
    class Own(nn.Linear):
        pass

    assert quantized_class(Own(2, 2)).__name__ == "QuantOwn"  # type: ignore[union-attr]

    @fq.nn.quantizes(Own)
    class Registered(QuantLinear, Own):
        pass

    try:
        assert quantized_class(Own(2, 2)) is Registered
    finally:
        from fakequant.nn.quantized.layers import _layers

        del _layers[Own]


@pytest.mark.parametrize("base", sorted(layers(), key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_every_layer_of_the_table_can_be_inherited(base: type[nn.Module]) -> None:
    mine = type("Mine", (base,), {})
    layer = mine.__new__(mine)
    nn.Module.__init__(layer)
    form = quantized_class(layer)
    assert form.__mro__[1:3] == (mine, layers()[base])


@pytest.mark.parametrize(
    "lazy", [nn.LazyLinear(3), nn.LazyConv2d(3, 1), nn.LazyConvTranspose2d(3, 1)], ids=lambda m: type(m).__name__
)
def test_a_lazy_layer_is_to_be_run_first(lazy: nn.Module) -> None:
    model = nn.Sequential(lazy)
    text = r"^0: its parameters have no shapes before the first call; call the model once before prepare$"
    with pytest.raises(ConfigError, match=text):
        fq.prepare(model, "int8")
    assert fq.prepare(copy.deepcopy(model), presets.INT8.with_rule(fq.Rule("0"))) is not None
    x = torch.randn(1, 2, 2, 2)
    model(x)
    fq.calibrate(fq.prepare(model, "int8"), [x])
    assert "_weight_quantizer.scale" in str(model.state_dict().keys())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


COMPUTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("made", [net, by_torch])
def test_a_parametrized_layer_is_quantized_as_one_parametrized_later(kind: str, made: Any) -> None:
    before, after = made(), fq.prepare(made(), "int8")
    torch.manual_seed(2)
    COMPUTED[kind](before[0])
    fq.prepare(before, "int8")
    torch.manual_seed(2)
    COMPUTED[kind](after[0])
    for model in (before, after):
        fq.calibrate(model.eval(), [X])
    assert torch.equal(before(X), after(X))
    assert sorted(str(before).split()) == sorted(str(after).split())
    assert torch.equal(copy.deepcopy(before)(X), before(X))
    expected = before(X)
    parametrize.remove_parametrizations(before[0], "weight")
    assert type(before[0]) is type(fq.prepare(made(), "int8")[0])
    assert torch.equal(before(X), expected)
    fq.bake_weights(before)


def test_training_computes_a_parametrized_weight_once_a_pass() -> None:
    """A spectral norm makes a step of its power iteration whenever the weight is read."""
    models = [nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fq.prepare(models[1], "int8")
    with fq.disabled(models[1]):
        for _ in range(3):
            assert torch.equal(models[0](X), models[1](X))


def test_hooks_around_the_own_forward_stay() -> None:
    """accelerate puts them there for device maps and offloading; the test removes them, too."""
    hooks = pytest.importorskip("accelerate.hooks")
    expected = calibrated(by_torch())(X)
    model, seen = by_torch(), []

    class Seeing(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return args, kwargs

    for module in model.modules():
        hooks.add_hook_to_module(module, Seeing())
    calibrated(model)
    seen.clear()
    assert torch.equal(model(X), expected)
    assert seen == ["Sequential", "QuantLinear", "ReLU", "QuantLinear"]
    assert torch.equal(copy.deepcopy(model)(X), expected)
    hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(X), expected)


def test_offloaded_weights_are_prepared_and_calibrated() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(by_torch(), execution_device=torch.device("cpu"))
    assert model[0].weight.is_meta
    assert torch.equal(calibrated(model)(X), calibrated(by_torch())(X))
    assert model[0].weight.is_meta


def test_a_layer_that_had_hooks_is_prepared_and_loaded(tmp_path: Path) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    expected = calibrated(by_torch())
    folder = fq.save(expected, tmp_path)
    for removed in (True, False):
        prepared, loaded = by_torch(), by_torch()
        for layer in (prepared[0], loaded[0]):
            hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu", io_same_device=True))
            if removed:
                hooks.remove_hook_from_module(layer)
        assert torch.equal(calibrated(prepared)(X), expected(X))
        assert torch.equal(fq.load(loaded, folder)(X), expected(X))


def test_other_forwards_of_a_layer_are_refused(tmp_path: Path) -> None:
    model, other = by_torch(), by_torch()
    hook_forward(model[0])
    with pytest.raises(ConfigError, match=r"^0: its forward was replaced, for example by a hook, so that calls would"):
        fq.prepare(model, "int8")
    model[0].forward = other[0].forward  # the forward of another layer
    with pytest.raises(ConfigError, match=r"^0: its forward was replaced"):
        fq.prepare(model, "int8")
