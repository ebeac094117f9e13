"""The matrix of architectures and steps: some of each, what a cell says, processes that hang or end, and the page."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fakequant as fq
from benchmarks.zoo import of_more
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.case import Case, WrongError
from benchmarks.zoo.child import run_step
from benchmarks.zoo.products import count_products
from benchmarks.zoo.runner import left_to_run, read_record, run_all, run_architecture, write_record
from benchmarks.zoo.steps import STEPS, NotForThisError, Step


@pytest.mark.parametrize("name", ["hf bert", "tv squeezenet1_1", "timm test_vit", "nn UNet"])
def test_architectures_build_and_run(name):
    case = Case(ARCHITECTURES[name])
    assert all(y.isfinite().all() for y in case.outputs(case.float()))


@pytest.mark.parametrize("name", [one.name for one in of_more.ARCHITECTURES])
def test_models_of_more_libraries_are_calibrated_trained_and_saved(name):
    case = Case(ARCHITECTURES[name])
    assert {letter: run_step(case, letter)["cell"] for letter in "abie"} == dict.fromkeys("abie", "+")


def test_steps_of_an_architecture():
    case = Case(ARCHITECTURES["nn UNet"])
    found = {letter: run_step(case, letter) for letter in "abcdfi"}
    assert {letter: cell["cell"] for letter, cell in found.items()} == dict.fromkeys("abcdfi", "+"), found
    assert found["c"]["note"]["share"] == 1
    assert found["d"]["note"]["dB"] > 20


def fails(case):
    raise WrongError("a: \x1b[96mred\x1b[0m /tmp/tmpab12/model.onnx", {"dB": 1.0})


def means_nothing(case):
    raise NotForThisError


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (Step("", lambda case: {"dB": 3}), {"cell": "+", "note": {"dB": 3}}),
        (Step("", fails), {"cell": "X", "error": "WrongError: a: red model.onnx", "note": {"dB": 1.0}}),
        (Step("", fails, lambda case: None), {"cell": "X"}),
        (Step("", fails, fails), {"cell": "f", "in float": "WrongError: a: red model.onnx"}),
        (Step("", means_nothing), {"cell": "."}),
    ],
    ids=["works", "fails", "works in float", "fails in float too", "means nothing"],
)
def test_what_a_cell_says(step, expected, monkeypatch):
    monkeypatch.setitem(STEPS, "a", step)
    found = run_step(Case(ARCHITECTURES["nn UNet"]), "a")
    assert {**found, **expected} == found


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head, self.plain = nn.Conv2d(1, 2, 3), nn.Linear(32, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        y = self.head(F.max_pool2d(self.stem(x).relu_(), 1).flatten(1))
        return F.scaled_dot_product_attention(*[y[None, None]] * 3)[0, 0] @ self.plain


def test_products_in_float_are_counted_by_module_and_operator():
    model, x = Products().eval(), torch.randn(2, 1, 6, 6)
    fq.calibrate(fq.prepare(model, "int8"), [x], progress=False)
    found = count_products(model, lambda: model(x))
    stem, head, attention, plain = 2 * 2 * 16 * 9, 2 * 32 * 8, 2 * 2 * 8 * 2, 2 * 8 * 8
    assert found.total == stem + head + attention + plain
    assert sorted(found.in_float.values()) == [attention, plain]
    reasons = {(path, why) for path, _, why in found.in_float}
    three = "factor 1 and factor 2 and factor 3 in float"
    assert reasons == {("", three), ("", "factor 1 and factor 2 (a parameter) in float")}
    assert found.kinds() == {"attention", "matrix product"}
    assert found.share == (stem + head) / found.total


def hang():
    time.sleep(60)


def end():
    os._exit(3)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (hang, {"cell": "T", "error": "killed after 1 s, or for want of memory", "seconds": 1}),
        (end, {"cell": "X", "error": "the process ended with 3", "seconds": 0.0}),
        (crash, {"cell": "X", "error": "the process ended with -11", "seconds": 0.0}),
    ],
)
def test_a_lost_process_costs_one_step(trouble, expected):
    def work(name, letters, cells):
        for letter in letters:
            if letter == "b":
                trouble()
            cells.send({"step": letter, "cell": "+", "seconds": 0.1})

    found = run_architecture("", "abc", 1, work)
    assert {letter: cell["cell"] for letter, cell in found.items()} == {"a": "+", "b": expected["cell"], "c": "+"}
    assert found["b"] == expected


def test_a_record_is_continued(tmp_path):
    """Cells of this commit are not run again; with --failed, none is that works."""
    record = {"machine": {}}
    cells = {"a": {"cell": "+", "seconds": 1}, "b": {"cell": "X", "error": "", "seconds": 1}}
    assert [name for name, _ in run_all({"one": "ab", "two": ""}, record, "c1", lambda *_: cells)] == ["one"]
    write_record(tmp_path / "zoo.json", record)
    record = read_record(tmp_path / "zoo.json")
    assert left_to_run(record, "one", "abc", "c1", failed=False) == "c"
    assert left_to_run(record, "one", "abc", "c2", failed=False) == "abc"
    assert left_to_run(record, "one", "abc", "c2", failed=True) == "bc"
    assert left_to_run(record, "two", "abc", "c1", failed=True) == "abc"
