"""What runs a model leaves it, its batches and random numbers as they were; its figures are those of fresh copies."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fakequant as fq
from fakequant.data.again import unchanged
from fakequant.data.batches import BatchError, Batches, example_arguments
from fakequant.errors import CalibrationWarning, ConfigError

Write = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and a write of choice between them that decides what comes out."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.register_buffer("state", torch.zeros(16))
        self.held, self.noted = list[Tensor](), SimpleNamespace(mean=torch.zeros(16))
        self.write = write

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        self.cache = cache
        y = self.write(self, x)
        return self.b(y.relu()) if y.shape[-1] == 16 else y


def of_buffer(net: Any, x: Tensor) -> Tensor:
    net.state.lerp_(net.a(x).mean(0), 0.5)
    return net.a(x) + net.state


def of_data(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.state.data.copy_(net.state + y.mean(0))
    net.state.numpy()[0] = 1.0
    return y + net.state


def of_parameter(net: Any, x: Tensor) -> Tensor:
    net.gain.data.mul_(0.9)
    with torch.no_grad():
        net.gain.clamp_(0.6, 1.3)
    return net.a(x) * net.gain


def of_input(net: Any, x: Tensor) -> Tensor:
    x -= 0.5
    x *= 2.0
    return net.a(x)


def of_cache(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.cache["last"] = net.cache["last"] + y.mean(0)
    net.held.append(y.mean(0))
    net.noted.mean = net.noted.mean + 0.1
    return y + net.cache["last"] + torch.stack(net.held).mean(0) + net.noted.mean


def of_noise(net: Any, x: Tensor) -> Tensor:
    noise = torch.rand(16) + random.random() + float(np.random.rand())
    return nn.functional.dropout(net.a(x), 0.2, training=True) + 0.1 * noise


WAYS = [of_buffer, of_data, of_parameter, of_input, of_cache, of_noise]


def batches(number: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(32, 8, generator=generator), "cache": {"last": torch.zeros(16)}} for _ in range(number)]


def prepared(write: Write, preset: str = "int8", given: Sequence[Any] = ()) -> Any:
    model = fq.prepare(Net(write).eval(), preset)
    random_from(0)
    fq.calibrate(model, given or batches(), progress=False)
    return model


def bits(thing: Any) -> list[bytes]:
    return [leaf.detach().numpy().tobytes() for leaf in tree_leaves(thing) if isinstance(leaf, Tensor)]


def state(model: Any, chosen: bool) -> Any:
    """What shall stay as it is; `chosen`: without what a function is there to change."""
    own = {n: t for n, t in model.state_dict().items() if n in ("gain", "state") or not (chosen or "quantizer" in n)}
    return own, vars(model.noted)


FLOAT: dict[str, Callable[..., object]] = {
    "prepare": lambda m, b, _: fq.prepare(m, "int8", b[0]),
    "prepare for a target": lambda m, b, _: fq.prepare(m, "int8", b[0], target="onnxruntime"),
    "compare": lambda m, b, _: fq.compare(m, b, fq.ptq.Ways(["INT8"], steps=[None, "fast"])),
    "search": lambda m, b, _: fq.search(m, b, ["INT8", "INT4"], bits=8.0),
    "scores": lambda m, b, _: fq.ptq.scores(m, b, ["INT8", "INT4"], progress=False),
    "advise": lambda m, b, _: fq.advise(m, b, presets=["INT8", "INT4"], progress=False),
    "equalize": lambda m, b, _: fq.ptq.equalize(m, b[0], fq.presets.INT8),
}
QUANTIZED: dict[str, Callable[..., object]] = {
    "unquantized": lambda m, b, _: fq.unquantized(m, b[0]),
    "summary": lambda m, b, _: fq.summary(m, b[0]),
    "calibrate": lambda m, b, _: fq.calibrate(m, b, progress=False),
    "sensitivity": lambda m, b, _: fq.sensitivity(m, b, progress=False),
    "layer_sqnr": lambda m, b, _: fq.layer_sqnr(m, b, progress=False),
    "improve": lambda m, b, _: fq.ptq.improve(m, b, "fast", progress=False),
    "report": lambda m, b, folder: fq.report(m, b, folder / "report.html"),
}


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("name", [*FLOAT, *QUANTIZED])
@pytest.mark.filterwarnings("ignore")
def test_a_run_changes_nothing(name: str, write: Write, tmp_path: Path) -> None:
    model = Net(write).eval() if name in FLOAT else prepared(write)
    given, chosen = batches(), name in ("improve", "equalize")
    before, numbers = copy.deepcopy((state(model, chosen), given)), random_numbers()
    (FLOAT | QUANTIZED)[name](model, given, tmp_path)
    assert (bits((state(model, chosen), given)), random_numbers()) == (bits(before), numbers)
    assert (len(model.held), "cache" in vars(model)) == (0, False)


def random_numbers() -> Any:
    """Those that come next."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def random_from(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@torch.no_grad()
def outputs(model: nn.Module, given: Sequence[Any] = ()) -> Tensor:
    """Those of a copy that goes through new batches."""
    fresh = copy.deepcopy(model)
    random_from(0)
    return torch.stack([fresh(**batch) for batch in given or batches()])


def decibels(wanted: Tensor, found: Tensor) -> float:
    return 10 * math.log10(float(wanted.square().sum() / (wanted - found).square().sum()))


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_figures_are_those_of_fresh_copies(write: Write) -> None:
    model, wanted = prepared(write), outputs(Net(write).eval())
    alone = {}
    for name in ("a", "b"):
        with fq.disabled(model):
            for quantizer in model.get_submodule(name).children():
                quantizer.mode = fq.nn.Mode.QUANTIZE
            alone[name] = decibels(wanted, outputs(model))
    random_from(0)
    found = {one.layer: one.value for one in fq.sensitivity(model, batches(), progress=False)}
    assert found == pytest.approx(alone, abs=1.0)
    random_from(0)
    (row,) = fq.compare(Net(write).eval(), batches(16), fq.ptq.Ways(["INT8"], steps=[None])).rows
    model = prepared(write, given=batches(16)[::2])  # every second batch calibrates, the others judge
    exact, quantized = (outputs(own, batches(16)[1::2]) for own in (Net(write).eval(), model))
    # The ranges of noise come from other random numbers here.
    allowed = 2.5 if write is of_noise else 1.0
    assert -10 * math.log10(row.error) == pytest.approx(decibels(exact, quantized), abs=allowed)


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_improve_helps_fresh_copies(write: Write) -> None:
    model, wanted = fq.prepare(Net(write).eval(), "int4_weight_only"), outputs(Net(write).eval())
    before = decibels(wanted, outputs(model))
    found = fq.ptq.improve(model, batches(), "fast", judge=[], progress=False)
    after = decibels(wanted, outputs(model))
    assert found.before is not None
    assert found.after is not None
    assert -10 * math.log10(found.before) == pytest.approx(before, abs=1.0)
    assert -10 * math.log10(found.after) == pytest.approx(after, abs=1.0)
    assert after > before + 0.5


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (of_buffer, "in eval mode the model changes its state in a run (cache, state). Compared"),
        (of_noise, "in eval mode the model changes its state in a run (cache) and draws random numbers. Compared"),
        (of_cache, "the model changes its state in a run (cache, "),
        (lambda net, x: net.a(x) * next(NUMBERS), "the model changes values elsewhere"),
    ],
)
def test_a_second_run_that_gives_something_else_is_said(write: Write, said: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fq.sensitivity(prepared(write), batches(), progress=False)
    (line,) = [str(one.message) for one in told if issubclass(one.category, CalibrationWarning)]
    assert line.startswith("two runs of the model on one batch differ by ")
    assert said in line


NUMBERS = itertools.count(1)


def test_a_model_that_writes_nothing_and_an_input_that_is_written_are_not_said(recwarn: Any) -> None:
    for write in (of_input, lambda net, x: net.a(x)):
        fq.sensitivity(prepared(write), batches(), progress=False)
    assert not [one for one in recwarn if issubclass(one.category, CalibrationWarning)]


@pytest.mark.parametrize(
    "write",
    [
        lambda net, x: net.a.register_buffer("added", x),
        lambda net, x: setattr(net, "a", nn.Linear(2, 2)),
        lambda net, x: setattr(net.state, "data", torch.ones(3)),
        lambda net, x: net.held.append(x) or net.held.reverse(),
    ],
)
def test_what_is_put_back(write: Any) -> None:
    net = Net(write)
    before, own = copy.deepcopy(net.state_dict()), net.a

    def interrupted() -> None:
        with unchanged(net):
            write(net, torch.ones(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (net.a, net.held) == (own, [])
    assert bits(net.state_dict()) == bits(before)


def test_a_result_that_is_what_the_model_writes_stays() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(2))

        def forward(self, x: Tensor) -> Any:
            self.sum += x
            return {"sum": self.sum, "x": x.mul_(3.0)}

    model, batch = Sums(), torch.ones(2)
    given = Batches([batch], "test").kept()
    for _ in range(2):
        found = given.run_first(model)
        assert (found["sum"].tolist(), found["x"].tolist()) == ([1.0, 1.0], [3.0, 3.0])
        assert (model.sum.tolist(), batch.tolist()) == ([0.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(8, 8), torch.ones(2, 8, device="meta")),
        (nn.Sequential(nn.Identity(), nn.Linear(8, 2)), torch.ones(3, 8, device="meta")),
        (nn.BatchNorm1d(8).eval(), torch.ones(2, 8, device="meta")),
    ],
)
def test_a_batch_on_another_device_is_named(model: nn.Module, x: Tensor) -> None:
    where = r"the batch is on meta, and the model on cpu; give batch\.to\('cpu'\)"
    with pytest.raises(BatchError, match=where):
        Batches([x], "test").kept().run_first(model)
    with pytest.raises(ConfigError, match=where):
        example_arguments(x).run(model)


@pytest.mark.parametrize("execution", ["simulate", "auto", "qnn"])
def test_quantized_layers_write_nothing_to_the_model(execution: str) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    fq.calibrate(fq.prepare(model, "int8_affine", x, target="qnn"), [x], progress=False)
    fq.set_execution(model, execution)
    with unchanged(model) as values, torch.no_grad():
        model(x)
    assert values.changed.names == []
