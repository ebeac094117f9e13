"""An interrupt leaves a model as it was; `tests/hostile/interrupts.py` tries more functions, at every line."""

import inspect
from collections import Counter, OrderedDict, UserDict, defaultdict
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.restore import attributes_of, restore_after, restore_on_error, stack_without, state_of
from tests.hostile.interrupts import CASES, X, calibrated
from tests.support.interruption import Case, differences, failures, lines_of, moments, state

QUICK = [
    "prepare",
    "prepare functions",
    "calibrate",
    "calibrate learned",
    "recalibrate learned",
    "bake_weights",
    "set_execution",
    "set_scales learned",
    "set_scales fixed",
    "set_scales by epoch",
    "freeze_batch_norm",
    "equalize",
    "rotate",
    "fold_scales",
    "improve",
    "set_range",
    "set_range learned",
    "learn",
    "stop_learning",
    "finetune",
    "sensitivity",
    "layer_sqnr",
    "disabled",
    "cached_weights",
    "fixed_ranges",
    "save",
    "load",
    "load without memory",
]


@pytest.mark.parametrize("name", QUICK)
def test_an_interrupt_leaves_the_model_as_it_was(name):
    case = CASES[name]
    chosen = moments(lines_of(case), each=2)
    assert failures(case, [*chosen[:: max(1, len(chosen) // 20)], *chosen[-3:]]) == []


@pytest.mark.parametrize("method", ["end", "leave"])
def test_an_interrupt_at_every_line_of_the_end_of_a_training_leaves_no_hook(method):
    case, (source, first) = CASES["finetune"], inspect.getsourcelines(getattr(fq.qat.Training, method))
    passed = enumerate(lines_of(case))
    stops = [n for n, (file, line) in passed if file.endswith("/steps.py") and first <= line < first + len(source)]
    assert len(stops) >= 6
    assert failures(case, stops) == []


def test_an_interrupt_at_every_line_of_a_call_leaves_no_mode():
    case = CASES["call functions"]
    assert failures(case, moments(lines_of(case), each=2)) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", QUICK)
def test_an_interrupt_at_every_line_leaves_the_model_as_it_was(name):
    case = CASES[name]
    assert failures(case, moments(lines_of(case), each=5)) == []


def test_the_search_for_interrupts_can_fail():
    def change(model):
        fq.nn.quantizers(model)["0._input_quantizer"].stop_learning()
        model[0].left = 1
        fq.nn.quantizers(model)

    case = Case(calibrated, change)
    found = failures(case, moments(lines_of(case), each=2))
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


@pytest.mark.parametrize("context", [restore_after, restore_on_error])
def test_restoring_that_is_interrupted_runs_again(context):
    layer, runs = nn.Linear(2, 2), []
    restore = attributes_of([layer], "training", "bias")

    def interrupted():
        runs.append(None)
        if len(runs) == 1:
            raise KeyboardInterrupt
        restore()

    def change():
        with context(interrupted):
            layer.training, layer.bias = False, None
            raise ValueError

    bias = layer.bias
    with pytest.raises(KeyboardInterrupt):
        change()
    assert layer.training
    assert layer.bias is bias
    assert len(runs) == 2


def test_functions_of_torch_that_an_interrupt_left_switched_off_are_on_again():
    restore = stack_without(torch.overrides.BaseTorchFunctionMode())
    torch._C.DisableTorchFunction().__enter__()
    assert not torch._C._is_torch_function_enabled()
    restore()
    assert torch._C._is_torch_function_enabled()


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


CALLS = {
    "prepare": lambda model: fq.prepare(model, "int8", torch.ones(2, 4)),
    "unquantized": lambda model: fq.unquantized(fq.prepare(model, "int8"), torch.ones(2, 4)),
    "summary": lambda model: fq.summary(fq.prepare(model, "int8"), torch.ones(2, 4)),
}


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_no_mode_that_counts(name, where, monkeypatch):
    """Where it came before the `__exit__` of torch's counter, the session computed under it from then on."""
    own = getattr(TorchDispatchMode, where)

    def interrupted(mode, *args):
        if where == "__enter__":
            own(mode, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TorchDispatchMode, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            CALLS[name](nn.Sequential(nn.Linear(4, 4)))
    try:
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not torch.nn.modules.module._global_forward_pre_hooks
    finally:
        torch.nn.modules.module._global_forward_pre_hooks.clear()
        torch.nn.modules.module._global_forward_hooks.clear()
        while torch._C._len_torch_dispatch_stack():
            torch._C._pop_torch_dispatch_stack(None)
