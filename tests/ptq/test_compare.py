"""Ways to quantize a model, side by side."""

from __future__ import annotations

import copy
import errno
import importlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CalibrationError, ConfigError, OutputError
from fakequant.ptq import Compared, Comparison, Ways, compare
from fakequant.report import comparison_of
from tests.support.changes import CHANGES, Scaled

comparison = importlib.import_module("fakequant.ptq.trial")
WAYS = Ways(["INT8", "w4a16_g32", "NVFP4"], ["max", "mse"], [None, "fast"])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def batches() -> list[torch.Tensor]:
    return [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def test_every_way_is_a_row_the_best_first() -> None:
    found = compare(net(), batches(), WAYS)
    assert len(found.rows) == 2 * 2 + 2 + 2  # one method where no input is static
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors)
    by_way = {row.way: row for row in found.rows}
    assert by_way["INT4_GROUP32", "max", "fast"].error < 0.9 * by_way["INT4_GROUP32", "max", ""].error
    assert by_way["INT4_GROUP32", "max", ""].bits == 5.0
    assert by_way["INT4_GROUP32", "max", ""].bytes == 5 * (64 * 64 + 64 * 8) / 8
    model = fq.prepare(net(), "INT4_GROUP32")
    with torch.no_grad():
        pairs = [(model(x), net()(x)) for x in batches()[1::2]]  # those that are held back
    lost = sum(float((y - wanted).double().square().sum()) for y, wanted in pairs)
    share = lost / sum(float(wanted.double().square().sum()) for _, wanted in pairs)
    # In which order a processor sums 2,048 squares is its own.
    assert by_way["INT4_GROUP32", "max", ""].error == pytest.approx(share, rel=1e-13)
    header = "preset method steps metric error bits MB ms seconds"
    assert str(found).splitlines()[0].split() == header.split()
    assert "INT4_GROUP32" in found._repr_html_()


def test_a_metric_decides_the_order() -> None:
    def fewest_bits(model: Any) -> float:
        quantizer = getattr(model[0], "weight_quantizer", None)
        return 0.0 if quantizer is None else -float(quantizer.spec.format.bits)

    found = compare(net(), batches(), ["INT8", "MXFP4"], metric=fewest_bits)
    assert [row.preset for row in found.rows] == ["MXFP4", "MXFP4", "INT8", "INT8"]
    assert found.float_metric == 0.0
    assert "-4 (-4)" in str(found)


CALLS: list[nn.Module] = []


def metric_with_an_interrupt(model: nn.Module) -> float:
    CALLS.append(model)
    if len(CALLS) == 3:
        raise KeyboardInterrupt
    return 1.0


def test_rows_of_a_file_are_not_run_again(tmp_path: Path) -> None:
    path, metric = tmp_path / "rows.jsonl", metric_with_an_interrupt
    CALLS.clear()
    ways = Ways(["INT8", "FP8"], steps=[None])
    with pytest.raises(KeyboardInterrupt):
        compare(net(), batches(), ways, metric=metric, path=path)
    assert len(path.read_text().splitlines()) == 2
    with path.open("a") as file:
        file.write('{"preset": "FP')  # a kill in the middle of a line
    found = compare(net(), batches(), ways, metric=metric, path=path)
    assert len(CALLS) == 5  # the float model twice, INT8 once, FP8 twice
    assert len(found.rows) == 2
    assert [json.loads(line).get("preset") for line in path.read_text().splitlines()] == [None, "INT8", "FP8"]


def of_value(value: float) -> Any:
    return lambda model: value


@pytest.mark.parametrize(
    "other",
    [
        {"metric": of_value(2.0)},
        {"metric": lambda model: 1.0},
        {"metric": partial(lambda _, value: value, value=1.0)},
        {"metric": None},
        {"forward": lambda model, x: model(100 * x)},
        {"inputs": lambda x: 100 * x},
        {"batches": [100 * x for x in batches()]},
    ],
)
def test_rows_of_another_run_are_refused(other: dict[str, Any], tmp_path: Path) -> None:
    def run(told: list[Any], **given: Any) -> None:
        values = {"batches": batches(), "metric": of_value(1.0), **given}
        compare(net(), **values, ways=["INT8"], path=tmp_path / "rows.jsonl", on_row=told.append)

    run(first := [])
    run(again := [])
    assert (len(first), len(again)) == (2, 0)
    with pytest.raises(ConfigError, match=r"is no comparison, or was made with another model"):
        run([], **other)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_of_a_model_that_differs_in_no_tensor_of_its_state_are_refused(change: str, tmp_path: Path) -> None:
    path, ways, told = tmp_path / "rows.jsonl", Ways(["INT8"], steps=[None]), []
    for _ in range(2):
        compare(Scaled(net()), batches(), ways, path=path, on_row=told.append)
    assert len(told) == 1
    CHANGES[change](model := Scaled(net()))
    with pytest.raises(ConfigError, match="is no comparison, or was made with another model"):
        compare(model, batches(), ways, path=path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"preset": 1, "method": "mse", "steps": ""}', "the row.preset is 1, not a text"),
        ('{"preset": "INT8", "method": "mse", "steps": "", "bits": [8]}', r"the row.bits is \[8\], not a float"),
        ('{"preset": "INT8", "method": "mse"}', "the row lacks steps"),
        ('{"preset": "INT8", "method": "mse", "steps": "", "bits": 1' + "0" * 400 + "}", "the row.bits is 1000"),
        ("null", "the row is None, not an object"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_damaged_rows_are_refused(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    compare(net(), batches(), Ways(["INT8"], steps=[None]), path=path)
    path.write_text(path.read_text() + row + "\n")
    for read in (lambda: compare(net(), batches(), ["INT8"], path=path), lambda: comparison_of(path)):
        with pytest.raises(ConfigError, match=f"rows.jsonl is damaged in line 3: .*{message}.*; remove that line"):
            read()


@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_is_said(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first line is written, or a row."""
    path, calls = tmp_path / "rows.jsonl", []

    class Full(io.TextIOWrapper):
        def write(self, text: str) -> int:
            calls.append(text)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if str(file).endswith("rows.jsonl") and mode in ("w", "a"):
            return Full(io.FileIO(file, mode), encoding="utf-8")
        return real(file, mode, *rest, **options)

    real = io.open
    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(comparison, "open", opened, raising=False)
    with pytest.raises(OutputError, match=r"cannot write .*rows\.jsonl: No space left .*; free space"):
        compare(net(), batches(), Ways(["INT8"], steps=[None]), path=path)


def test_what_fails_is_a_row() -> None:
    model, infinite = nn.Sequential(nn.Linear(64, 8), nn.Sigmoid()), torch.zeros(1, 64)
    infinite[0, 0] = torch.inf
    found = compare(model, [*batches(), infinite], Ways(["INT8", "INT4_GROUP32"], steps=[None]))
    failed = found.rows[-1]
    assert failed.preset == "INT8"
    assert failed.failed.startswith("CalibrationError: 0._input_quantizer")
    assert failed.failed in str(found)


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = compare(net(), batches(), Ways(["INT8", "FP8"], steps=[None]))
    assert found.plot(tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    compare(net(), batches(), Ways(["INT8"], steps=[None]), path=path)
    with pytest.raises(ConfigError, match="is no comparison, or was made with another model"):
        compare(net(), batches()[:2], Ways(["INT8"], steps=[None]), path=path)
    for ways, said in (
        (["INT9"], "unknown preset 'INT9'"),
        (Ways(["INT8"], ["mxa"]), "unknown calibrator 'mxa'; did you mean max"),
        (Ways(["INT8"], steps=["fastest"]), "unknown steps 'fastest'; did you mean fast"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare(net(), batches(), ways)
    with pytest.raises(CalibrationError, match="compare needs batches"):
        compare(net(), [])
    with pytest.raises(ConfigError, match="over must be one of 'bits', 'milliseconds', got 'size'"):
        compare(net(), batches(), Ways(["INT8"], steps=[None])).curve("size")


def test_the_curve_holds_what_none_surpasses() -> None:
    rows = [
        Compared("A", "mse", "", 0.1, bits=8.0, milliseconds=1.0),
        Compared("B", "mse", "", 0.3, bits=4.0, milliseconds=3.0),
        Compared("C", "mse", "", 0.4, bits=4.5, milliseconds=2.0),
        Compared("D", "mse", "", failed="no"),
    ]
    found = Comparison(rows)
    assert [row.preset for row in found.curve()] == ["B", "A"]
    assert [row.preset for row in found.curve("milliseconds")] == ["A"]
    assert found.best.preset == "A"
    with pytest.raises(ConfigError, match="no row has a result: no"):
        _ = Comparison(rows[3:]).best


def test_rows_are_told_as_they_come_and_have_a_speed() -> None:
    told: list[Compared] = []
    found = fq.compare(net(), batches(), Ways(["INT8", "INT8"], ["KL", "max"], [None]), on_row=told.append)
    assert [row.way for row in told] == [("INT8", "entropy", ""), ("INT8", "max", "")]
    assert all(row.milliseconds > 0 for row in told)
    assert found.float_milliseconds > 0


def test_search_keeps_a_floor_with_the_fewest_bits() -> None:
    model = net()
    with torch.no_grad():
        wanted = [model(x) for x in batches()]

    def metric(quantized: Any) -> float:
        return -sum(float((quantized(x) - y).square().sum()) for x, y in zip(batches(), wanted, strict=True))

    presets = ["INT8_WEIGHT_ONLY", "INT4_GROUP32", "NVFP4_WEIGHT_ONLY"]
    curve = fq.ptq.scores(model, batches(), presets).curve()
    largest = fq.search(model, batches(), ["INT8_WEIGHT_ONLY"], bits=9, metric=None)
    assert largest.metric is None
    found = fq.search(model, batches(), presets, metric=metric, floor=-15.0)
    assert found.metric is not None
    assert found.metric >= -15.0
    smaller = [point for point in curve if point.bits < found.bits]
    for point in smaller[-1:]:
        twin = fq.prepare(copy.deepcopy(model), point.config(), rules={})
        assert metric(twin) < -15.0
    assert found.measured is not None


def test_what_search_refuses() -> None:
    with pytest.raises(ConfigError, match="exactly one budget is needed"):
        fq.search(net(), batches())
    with pytest.raises(ConfigError, match="metric= and floor= belong together"):
        fq.search(net(), batches(), floor=3.0)
    with pytest.raises(ConfigError, match=r"the floor 3: the largest mix, 8\.\d+ bits per weight, has the metric 1;"):
        fq.search(net(), batches(), metric=lambda model: 1.0, floor=3.0)
    with pytest.raises(CalibrationError, match="search needs batches"):
        fq.search(net(), [], bits=5)
    with pytest.raises(ConfigError, match=r"search takes batches, and a tensor .* give a list: \[tensor\]"):
        fq.search(net(), torch.ones(1, 64), bits=5)


def test_the_old_name_of_on_row_works_for_one_release() -> None:
    rows: list[fq.ptq.Compared] = []
    with pytest.warns(DeprecationWarning, match="told= of compare is now called on_row=, and the next release removes"):
        found = fq.compare(net(), batches(), Ways(["INT8"], steps=[None]), told=rows.append)
    assert rows == found.rows
