"""Ranges by a value of the batch: each bin is a model that was calibrated on the batches of that bin alone."""

import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fakequant as fq
from fakequant.errors import CalibrationError, CalibrationWarning, CheckpointError, ConfigError, ExportError, ShapeError
from fakequant.model.calibrate import boundaries_of
from fakequant.nn import Kind, quantizers
from tests.support.processor import needs_exact_sums

TIMES = range(0, 1000, 50)


class Denoiser(nn.Module):
    """Its activations grow with the timestep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, timestep: Any, classes: Tensor | None = None) -> Tensor:
        time = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1, 1, 1, 1)
        return self.last(torch.relu(self.first(x)) * (1 + time / 100))


class Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        return self.model(**batch)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, decoding: bool = False) -> Tensor:
        y = self.both(x * (10 if decoding else 1))
        return self.decoder(y) if decoding else y


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(3, 2, 4, 4, generator=generator) * (1 + t / 500), "timestep": torch.tensor(t)} for t in TIMES
    ]


def calibrated(config: Any = "INT8", method: str = "max", **how: Any) -> nn.Module:
    model = fq.prepare(Denoiser(), config)
    fq.calibrate(model, batches(), method, **({"by": "timestep", "bins": 4} | how))
    return model


def one_bin(place: int, config: Any = "INT8", method: str = "max") -> nn.Module:
    model = fq.prepare(Denoiser(), config)
    fq.calibrate(model, batches()[5 * place : 5 * place + 5], method)
    return model


PER_CHANNEL = fq.Config(
    "channels",
    rules=(fq.Rule("*", input="int8 per_channel(1)", weight="int8 per_channel(0)"),),
)


@pytest.mark.parametrize("method", ["max", "mse", "percentile", "entropy"])
@pytest.mark.parametrize("config", ["INT8", "INT8_AFFINE", PER_CHANNEL], ids=["INT8", "affine", "channels"])
def test_each_bin_is_a_calibration_of_its_own(config: Any, method: str) -> None:
    model = calibrated(config, method)
    for place in range(4):
        alone = one_bin(place, config, method)
        for batch in batches()[5 * place : 5 * place + 5]:
            assert torch.equal(model(**batch), alone(**batch))


def test_rows_of_several_bins_have_their_own_ranges() -> None:
    for config in ("INT8", "INT8_AFFINE", PER_CHANNEL):
        model, times = calibrated(config), torch.tensor([0, 300, 900])
        x = batches()[0]["x"]
        y = model(x, times)
        for row, time in enumerate(times):
            assert torch.equal(y[row], model(x, time.expand(3))[row])
        # All rows of one value are one call of it.
        assert torch.equal(model(x, torch.full((3,), 300)), model(x, 300))


def test_calibration_takes_each_row_for_its_own_bin() -> None:
    model = fq.prepare(Denoiser(), "INT8")
    mixed = [
        {
            "x": torch.cat([batches()[place]["x"][:1] for place in (i, i + 5, i + 10, i + 15)]),
            "timestep": torch.tensor([TIMES[place] for place in (i, i + 5, i + 10, i + 15)]),
        }
        for i in range(5)
    ]
    fq.calibrate(model, mixed, "max", by="timestep", bins=4)
    other = fq.prepare(Denoiser(), "INT8")
    alone = [{"x": b["x"][:1], "timestep": b["timestep"]} for b in batches()]
    fq.calibrate(other, alone, "max", by="timestep", bins=4)
    assert torch.equal(model.first.input_quantizer.scale, other.first.input_quantizer.scale)
    assert model.first.input_quantizer.by_value.is_like(other.first.input_quantizer.by_value)


def test_other_values_a_length_and_a_flag() -> None:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), "INT8")
    data = [torch.randn(2, length, 4) * length for length in (2, 2, 8, 8)]
    fq.calibrate(model, data, "max", by=lambda x: x.shape[1], bins=10)
    assert len(model[0].input_quantizer.scale) == 2  # as many as there are values
    assert model[0].input_quantizer.by_value.boundaries == (5.0,)
    for length in (2, 8):
        alone = fq.prepare(deepcopy(model_in_float(model)), "INT8")
        fq.calibrate(alone, [x for x in data if x.shape[1] == length], "max")
        assert torch.equal(model(data[0][:, :length]), alone(data[0][:, :length])) or length == 8
        assert torch.equal(model(data[-1][:, :length]), alone(data[-1][:, :length]))

    flags = fq.prepare(Modes(), "INT8")
    given = [{"x": torch.randn(2, 4), "decoding": flag} for flag in (False, True, False, True)]
    with pytest.warns(CalibrationWarning, match="decoder._input_quantizer"):  # without the flag it is not called
        fq.calibrate(flags, given, "max", by="decoding")
    low, high = flags.both.input_quantizer.scale.flatten().tolist()
    assert high > 5 * low
    flags(torch.randn(2, 4))  # the default of the argument


def model_in_float(model: nn.Module) -> nn.Module:
    found = nn.Sequential(nn.Linear(4, 4))
    found.load_state_dict(fq.float_state_dict(model))
    return found


def test_a_file_and_a_copy_keep_the_ranges(tmp_path: Path) -> None:
    model = calibrated("INT8_AFFINE")
    fq.save(model, tmp_path)
    for again in (fq.load(Denoiser(), tmp_path), deepcopy(model), fq.apply(Denoiser(), fq.snapshot(model))):
        for batch in batches():
            assert torch.equal(again(**batch), model(**batch))
    other = calibrated("INT8_AFFINE", "mse")
    other.load_state_dict(model.state_dict())  # strict
    assert all(torch.equal(other(**batch), model(**batch)) for batch in batches())
    torch.save(model, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=False)(**batches()[3]), model(**batches()[3]))


def test_states_of_other_bins_are_refused() -> None:
    model = calibrated()
    for other in (one_bin(0), calibrated(bins=5)):
        with pytest.raises(RuntimeError, match="calibrated in the same way"):
            model.load_state_dict(other.state_dict())
    plain = one_bin(0)
    plain.load_state_dict(calibrated().state_dict())
    with pytest.raises(ShapeError, match="_input_quantizer has a scale"):
        plain(**batches()[0])


def test_files_of_other_programs_have_one_range(tmp_path: Path) -> None:
    model = Modes()
    model.decoder = nn.Identity()
    model = fq.prepare(model, "INT8")
    fq.calibrate(model, [{"x": torch.randn(2, 4), "decoding": flag} for flag in (False, True)], by="decoding")
    with pytest.raises(ExportError, match="follow decoding, but a file has a single range; calibrate without by="):
        fq.deliver(model, tmp_path / "out", "torchao")


def test_files_that_lie_are_refused(tmp_path: Path) -> None:
    model = calibrated()
    state = fq.snapshot(model)
    tensors = dict(state.tensors)
    tensors["first._input_quantizer.scale"] = tensors["first._input_quantizer.scale"][:3]
    with pytest.raises(CheckpointError, match="not a scale for each of 4 bins of values"):
        fq.apply(Denoiser(), fq.QuantizedState.from_plan(state.plan, tensors))
    plan = state.plan
    plan["layers"]["first"]["quantizers"]["_input_quantizer"]["by_value"]["boundaries"] = [3.0, 1.0]
    with pytest.raises(CheckpointError, match="numbers that rise"):
        fq.QuantizedState.from_plan(plan, state.tensors)


def test_the_compiled_graphs_of_one_bin_serve_all() -> None:
    import torch._dynamo

    model = calibrated()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**batches()[0]), model(**batches()[0]))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert all(torch.equal(compiled(**batch), model(**batch)) for batch in batches())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    x, times = batches()[0]["x"], torch.tensor([0, 300, 900])
    assert torch.equal(compiled(x, times), model(x, times))


@pytest.mark.parametrize("part", ["model", "wrapper", "layer"])
def test_threads_of_compiled_models_take_their_own_bins(part: str) -> None:
    import torch._dynamo

    model, given = calibrated().requires_grad_(False), batches()[::5]
    wanted = [model(**batch) for batch in given]
    torch._dynamo.reset()
    compiled: nn.Module = model
    if part == "layer":
        model.last.compile(backend="eager")
    else:
        compiled = torch.compile(Whole(model) if part == "wrapper" else model, backend="eager")
    # Not fullgraph=True: torch 2.13 counts the compiled frames of all threads in one number, and raises at random.
    with torch._dynamo.error_on_graph_break(True):
        assert all(torch.equal(compiled(**batch), y) for batch, y in zip(given, wanted, strict=True))
    wrong: list[object] = []

    def run(place: int) -> None:
        try:
            wrong.extend(place for _ in range(300) if not torch.equal(compiled(**given[place]), wanted[place]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_values_of_numpy_are_numbers_and_nan_is_none() -> None:
    model, x = calibrated(), batches()[0]["x"]
    for value in (np.int64(300), np.float32(300), np.float64(300)):
        assert torch.equal(model(x, value), model(x, 300))
    for value in (
        float("nan"),
        torch.tensor(float("nan")),
        torch.tensor([3.0, float("nan"), 900.0]),
        np.float32("nan"),
    ):
        with pytest.raises(ConfigError, match="timestep, which is NaN"):
            model(x, value)
    with pytest.raises(ConfigError, match=r"got shape \[0\]"):
        model(x[:0], torch.zeros(0))
    with pytest.raises(ConfigError, match="timestep, which is NaN"):
        fq.calibrate(
            fq.prepare(Denoiser(), "INT8"), [{"x": x, "timestep": t} for t in (3, float("nan"))], by="timestep"
        )


@pytest.mark.parametrize("config", ["INT8", "INT8_AFFINE"])
def test_onnx_computes_the_bin(tmp_path: Path, config: str) -> None:
    pytest.importorskip("onnxruntime")
    model = calibrated(config)
    given = [(batch["x"], batch["timestep"].float()) for batch in batches()]
    fq.export_onnx(model, given[0], tmp_path / "model.onnx")
    found = fq.verify_onnx(tmp_path / "model.onnx", model, given)
    assert found.exact, found
    with pytest.raises(ExportError, match="TensorRT takes constant scales; calibrate without by="):
        fq.export_onnx(model, given[0], tmp_path / "other.onnx", style="trt")


def test_other_methods_come_from_one_pass() -> None:
    model = calibrated(method="mse")
    fq.recalibrate(model, method="max")
    assert torch.equal(model.first.input_quantizer.scale, calibrated().first.input_quantizer.scale)


@needs_exact_sums()
def test_integers_compute_the_same_codes() -> None:
    model = calibrated().requires_grad_(False)
    simulated = model(**batches()[7])
    fq.set_execution(model, "integer")
    assert torch.allclose(model(**batches()[7]), simulated, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="which only simulation can do"):
        model(batches()[0]["x"], torch.tensor([0, 300, 900]))


def test_analysis_training_and_improve_work() -> None:
    model = calibrated()
    assert "int8 per_tensor by timestep in 4 bins" in str(fq.summary(model))
    assert len(fq.sensitivity(model, batches(), progress=False)) == 2
    fq.layer_sqnr(model, batches()[:2])
    found = fq.ptq.improve(model, batches(), progress=False)
    assert any('"input", "smooth", "rotate": left out for inputs with ranges by timestep' in n for n in found.notes)
    fq.ptq.reconstruct(model, batches(), ["first"], iterations=5, progress=False)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = model(batches()[0]["x"], torch.tensor([0, 300, 900])).square().mean()
    loss.backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="which cannot be learned; keep them by"):
        fq.qat.set_scales(model, fq.qat.Scales.LEARNED)


def test_improve_comes_before_ranges_by_a_value() -> None:
    model = fq.prepare(Denoiser(), "INT8")
    fq.calibrate(model, batches())
    fq.ptq.improve(model, batches(), steps=["smooth", "gptq"], judge=[], progress=False)
    fq.calibrate(model, batches(), "max", by="timestep", bins=4)
    for place in range(4):
        alone = deepcopy(model)
        fq.calibrate(alone, batches()[5 * place : 5 * place + 5], "max")
        assert not alone._forward_pre_hooks  # the hook went with the last range
        assert torch.equal(alone(**batches()[5 * place]), model(**batches()[5 * place]))


def test_parts_of_a_model_have_no_value() -> None:
    model, x = calibrated(), batches()[0]["x"]
    with pytest.raises(CalibrationError, match="known only in a call of the calibrated model"):
        model.first(x)
    with pytest.raises(RuntimeError, match="channels"):
        model(x[:, :1], 3)
    with pytest.raises(CalibrationError, match="known only in a call"):  # also after a call that failed
        model.first(x)
    whole = deepcopy(model)
    run = whole.first.forward
    whole.first.forward = lambda x: checkpoint(run, x, use_reentrant=False)
    x = x.clone().requires_grad_()
    with pytest.raises(CalibrationError, match="no checkpointed part again in backward"):
        whole(x, 3).sum().backward()


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"by": "time"}, ConfigError, "names no argument of Denoiser.forward, which takes x, timestep"),
        ({"by": 3}, ConfigError, "must be the name of an argument"),
        ({"bins": 1}, ConfigError, "at least 2"),
        ({"boundaries": [500], "bins": 2}, ConfigError, "pass only one of them"),
        ({"boundaries": [500, 500], "bins": None}, ConfigError, "that rise"),
        ({"boundaries": ["x"], "bins": None}, ConfigError, "must be numbers"),
        ({"by": None}, ConfigError, "by= is missing; pass it, as by="),
        ({"by": "x"}, ConfigError, "one for each row"),
        ({"by": lambda x, timestep: "late"}, ConfigError, "must be a number"),
        ({"by": lambda x, timestep: 1}, CalibrationError, "is 1 in all calls"),
        ({"boundaries": [500, 2000], "bins": None}, CalibrationError, "no batch has timestep from 2000 on"),
        ({"method": "moving_average", "by": "x.mean()"}, ConfigError, "names no argument"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(how: Any, error: type[Exception], match: str) -> None:
    model = fq.prepare(Denoiser(), "INT8")
    with pytest.raises(error, match=match):
        fq.calibrate(model, batches(), **({"by": "timestep", "bins": 4} | how))
    assert not model._forward_pre_hooks
    assert not any(q.calibrated for q in quantizers(model).values() if q.kind is Kind.INPUT)


def test_functions_and_weights_are_refused(tmp_path: Path) -> None:
    model = calibrated(by=lambda x, timestep: timestep)
    with pytest.raises(ConfigError, match="a file cannot store"):
        fq.save(model, tmp_path)
    weights = fq.prepare(Denoiser(), "INT8_WEIGHT_ONLY")
    with pytest.raises(ConfigError, match="no calibrated activation has a fixed range"):
        fq.calibrate(weights, batches(), by="timestep")
    quantizer = calibrated().first._weight_quantizer
    with pytest.raises(ConfigError, match="which only static quantizers of inputs can have"):
        quantizer.set_ranges(
            [fq.Range(torch.tensor([-1.0]), torch.tensor([1.0]))] * 2, model.first.input_quantizer.by_value
        )


def test_bins_hold_equally_many_values() -> None:
    values = torch.arange(1000).float()
    assert boundaries_of(values, 4) == [249.5, 499.5, 749.5]
    assert boundaries_of(torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0]), 4) == [3.0]
    near = torch.tensor([1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))])
    assert boundaries_of(near, 2) == [near[1].item()]
