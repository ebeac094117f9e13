"""An interrupt leaves a model as it was, or completely changed, where it does not come while a model is restored."""

import tempfile
from collections import Counter, OrderedDict, UserDict, defaultdict
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.nn import cached_weights, fixed_ranges
from fakequant.restore import state_of
from tests.support.interruption import Case, differences, failures, lines_of, state

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
TARGETS = torch.zeros(2, 2)
IMPROVED_BY = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
SOME_STEPS = ["smooth", "gptq", "drift", "bias"]
PER_TENSOR = fq.Config("tensors", (fq.Rule(input="int8", weight="int8"),))


def plain() -> nn.Module:
    torch.manual_seed(0)
    # Some modules in train mode, some in eval mode.
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[3].eval()
    return model


def prepared() -> nn.Module:
    return fq.prepare(plain(), fq.presets.INT8)


def calibrated() -> nn.Module:
    model = prepared()
    fq.calibrate(model, [X, 2 * X], "entropy", progress=False)
    return model


def learning() -> nn.Module:
    model = calibrated()
    fq.qat.set_scales(model, fq.qat.Scales.LEARNED)
    return model


def uneven() -> nn.Module:
    """A float model with channels and features of different sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[0].weight[1] *= 50
        model[1].weight[:, 1] /= 50
        model[1].weight[3] *= 50
    return model


def four_bits() -> nn.Module:
    model = fq.prepare(uneven(), fq.Config("4 bits", (fq.Rule(input="int4", weight="int4 per_channel(0)"),)))
    fq.calibrate(model, IMPROVED_BY, progress=False)
    return model


def smoothed() -> nn.Module:
    model = four_bits()
    fq.ptq.improve(model, IMPROVED_BY, ["smooth"], progress=False)
    return model


def residual() -> nn.Module:
    """A float model whose values behind the first layer can be rotated."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 2))


class Doubles(nn.Module):
    """Calls a module, and a function that gets quantizers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


def doubles() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Doubles())


def prepare_functions(model: nn.Module) -> nn.Module:
    return fq.prepare(model, fq.Config("functions", (fq.Rule(input="int8", ops=("add",)),)), example=X)


def with_functions() -> nn.Module:
    model = prepare_functions(doubles())
    fq.calibrate(model, [X], progress=False)
    return model


_range = fq.Range(torch.tensor([-3.0]), torch.tensor([1.0]))
_used = fq.calibrate(prepared(), [X / 3], "entropy", progress=False)
_schedule = fq.qat.Schedule(original_lr=0.1, original_epochs=20)
_folder = tempfile.TemporaryDirectory()
_saved = fq.save(calibrated(), Path(_folder.name) / "saved")


def finetune(model: nn.Module) -> object:
    options = fq.qat.Options(fq.qat.Scales.LEARNED, progress=False)
    return fq.qat.finetune(model, [(X, TARGETS)], nn.functional.mse_loss, _schedule, options)


def quantizer(*, learned: bool) -> nn.Module:
    made = fq.nn.Quantizer("uint8 asymmetric")
    made.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([2.0])))
    if learned:
        made.learn("lsq_plus")
    return nn.Sequential(made)


def inside(context, model: nn.Module) -> None:
    with context(model):
        pass


CASES = {
    "prepare": Case(plain, lambda m: fq.prepare(m, fq.presets.INT8), changes=True),
    "prepare functions": Case(doubles, prepare_functions, changes=True),
    "call functions": Case(with_functions, lambda m: m(X)),
    "calibrate": Case(prepared, lambda m: fq.calibrate(m, [X], progress=False), changes=True),
    "calibrate learned": Case(learning, lambda m: fq.calibrate(m, [X], progress=False), changes=True),
    "recalibrate learned": Case(learning, lambda m: fq.recalibrate(m, _used, "percentile"), changes=True),
    "set_execution": Case(calibrated, lambda m: fq.set_execution(m, "auto"), changes=True),
    "set_scales learned": Case(calibrated, lambda m: fq.qat.set_scales(m, fq.qat.Scales.LEARNED), changes=True),
    "set_scales fixed": Case(learning, lambda m: fq.qat.set_scales(m, fq.qat.Scales.FIXED), changes=True),
    "set_scales by epoch": Case(learning, lambda m: fq.qat.set_scales(m, fq.qat.Scales.EPOCH), changes=True),
    "freeze_batch_norm": Case(plain, fq.qat.freeze_batch_norm, changes=True),
    "set_range": Case(lambda: quantizer(learned=False), lambda m: m[0].set_range(_range), changes=True),
    "set_range learned": Case(lambda: quantizer(learned=True), lambda m: m[0].set_range(_range), changes=True),
    "learn": Case(lambda: quantizer(learned=False), lambda m: m[0].learn("lsq_plus"), changes=True),
    "stop_learning": Case(lambda: quantizer(learned=True), lambda m: m[0].stop_learning(), changes=True),
    "bake_weights": Case(calibrated, fq.bake_weights, changes=True),
    "load": Case(plain, lambda m: fq.load(m, _saved)),
    "load without memory": Case(lambda: plain().to("meta"), lambda m: fq.load(m, _saved)),
    "finetune": Case(calibrated, finetune, changes=True, trains=True),
    "improve": Case(four_bits, lambda m: fq.ptq.improve(m, IMPROVED_BY, SOME_STEPS, progress=False), changes=True),
    "equalize": Case(uneven, lambda m: fq.ptq.equalize(m, X, PER_TENSOR), changes=True),
    "rotate": Case(residual, lambda m: fq.ptq.rotate(m, X), changes=True),
    "fold_scales": Case(smoothed, lambda m: fq.ptq.fold_scales(m, X), changes=True),
    "sensitivity": Case(calibrated, lambda m: fq.sensitivity(m, [X], progress=False)),
    "layer_sqnr": Case(calibrated, lambda m: fq.layer_sqnr(m, [X], progress=False)),
    "disabled": Case(calibrated, lambda m: inside(fq.disabled, m)),
    "cached_weights": Case(calibrated, lambda m: inside(cached_weights, m)),
    "fixed_ranges": Case(learning, lambda m: inside(fixed_ranges, m)),
    "save": Case(calibrated, lambda m: fq.save(m, Path(_folder.name) / "again")),
}


@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_leaves_the_model_as_it_was(name):
    number = len(lines_of(CASES[name]))
    assert failures(CASES[name], [*range(0, number, max(1, number // 12))]) == []


def test_the_search_for_interrupts_can_fail():
    def change(model):
        fq.nn.quantizers(model)["0._input_quantizer"].stop_learning()
        model[0].left = 1
        fq.nn.quantizers(model)

    case = Case(calibrated, change)
    found = failures(case, range(len(lines_of(case))))
    assert found
    assert all("/0/left: in one only" in line for line in found)


class Stubborn(nn.Linear):
    """A layer that refuses eval mode."""

    def train(self, mode=True):
        if not mode:
            raise RuntimeError("always trains")
        return super().train(mode)


@pytest.mark.parametrize("measure", [fq.layer_sqnr, fq.sensitivity, fq.calibrate])
def test_a_module_that_refuses_eval_mode_leaves_all_modes(measure):
    model = nn.Sequential(calibrated(), Stubborn(2, 2))
    before = state(model)
    with pytest.raises(RuntimeError, match="always trains"):
        measure(model, [X])
    assert differences(before, state(model)) == []


def test_the_state_of_modules_comes_back():
    quantizer = fq.nn.Quantizer("int8")
    quantizer.set_range(fq.Range(torch.tensor([-1.0]), torch.tensor([1.0])))
    quantizer.learn("lsq")
    model = nn.Sequential(quantizer)
    before, step = state(model), quantizer.learned.step
    back = state_of([quantizer])
    with torch.no_grad():
        step.mul_(3)
    handle = quantizer.register_forward_hook(print)
    quantizer.stop_learning()
    quantizer.left = 1
    back()
    assert differences(before, state(model)) == []
    assert quantizer.learned.step is step
    handle.remove()
    assert differences(before, state(model)) == []


class Frozen(OrderedDict):
    """As the configuration of a model of diffusers: it can be cleared, and not filled again."""

    def update(self, *args, **kwargs):
        raise AttributeError("frozen")

    __copy__ = copy = __deepcopy__ = update


class Sealed(set):
    """A set that refuses to be copied and changed."""

    def copy(self):
        raise RuntimeError("sealed")

    __deepcopy__ = clear = update = copy


class Listed(list):
    """A list that refuses to be copied."""

    def copy(self):
        raise RuntimeError("listed")

    __deepcopy__ = copy


OWN = [Frozen(a=1), Sealed({1}), Listed([1]), MappingProxyType({"a": 1}), UserDict(a=1), frozenset({1})]
KNOWN = [{"a": 1}, {1}, OrderedDict(a=1, b=2), defaultdict(list, a=[1]), Counter(a=2)]


class Writes(nn.Module):
    """A model with an attribute, whose forward fails, or writes to the attribute if it can."""

    def __init__(self, value):
        super().__init__()
        self.layer, self.value = nn.Linear(2, 2), value

    def forward(self, x):
        if type(self.value) in map(type, KNOWN):
            self.value.clear()
            self.value.update({"seen"} if isinstance(self.value, set) else {"seen": 1})
        return self.layer(x)


@pytest.mark.parametrize("value", [*OWN, *KNOWN], ids=lambda value: type(value).__name__)
def test_attributes_of_any_class_come_back(value):
    """Those of the user's own classes may refuse to be copied, cleared or filled."""
    model, before = Writes(value), repr(value)
    with pytest.raises(ConfigError, match=r"the example, tensors of shape .* failed in layer layer"):
        fq.prepare(model, "int8", target="onnxruntime", example=torch.ones(1, 3))
    assert (type(model.layer), model.value is value, repr(value)) == (nn.Linear, True, before)
    fq.prepare(model, "int8_affine", target="onnxruntime", example=torch.ones(1, 2))
    assert (model.value is value, repr(value)) == (True, before)
    fq.calibrate(model, [torch.ones(1, 2)], progress=False)
    fq.sensitivity(model, [torch.ones(1, 2)])
    assert model.value is value
