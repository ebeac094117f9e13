"""Weights that a model has for the time of a call alone, sharded or offloaded: every public function, over one list."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import fakequant as fq
from fakequant import ir, ptq
from fakequant.distributed import gathered
from fakequant.errors import ConfigError
from fakequant.memory import fetched, offloaded

X = torch.linspace(-1, 1, 48).view(6, 8)
BATCHES = [X, X.flip(0)]
Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture
def group() -> Iterator[Any]:
    if not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def _shards(request: pytest.FixtureRequest) -> Wrap:
    from torch.distributed.fsdp import fully_shard

    mesh = request.getfixturevalue("group")

    def wrap(model: nn.Module) -> nn.Module:
        for layer in (model[0], model[2], model[4], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        return model

    return wrap


def _root(request: pytest.FixtureRequest) -> Wrap:
    """The weights of the root stay whole after a call."""
    from torch.distributed.fsdp import fully_shard

    mesh = request.getfixturevalue("group")
    return lambda model: fully_shard(model, mesh=mesh)


def _cpu(request: pytest.FixtureRequest) -> Wrap:
    accelerate = pytest.importorskip("accelerate")
    return lambda model: accelerate.cpu_offload(model, torch.device("cpu"))


def _disk(request: pytest.FixtureRequest) -> Wrap:
    accelerate, folder = pytest.importorskip("accelerate"), request.getfixturevalue("tmp_path") / "weights"
    return lambda model: accelerate.disk_offload(model, str(folder), torch.device("cpu")) or model


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    return nn.Sequential(*layers).eval()


def cached(model: nn.Module) -> Tensor:
    with fq.nn.cached_weights(model), torch.no_grad():
        return model(X) + model(X)


def without(model: nn.Module) -> Tensor:
    with fq.disabled(model):
        return model(X)


def saved(model: nn.Module, path: Path, packed: bool = False) -> Tensor:
    return fq.load(net(), fq.save(model, path / "saved", packed=packed))(X)


def quantizer_scales(model: nn.Module) -> list[Any]:
    return [None if q.scale is None else q.scale.tolist() for q in fq.nn.quantizers(model).values()]


OF_FLOAT: dict[str, Callable[[nn.Module, Path], Any]] = {
    "prepare": lambda model, path: fq.prepare(model, "int8", X) and None,
    "target": lambda model, path: fq.prepare(model, "int8_affine", X, target="onnxruntime") and None,
    "prepare without example": lambda model, path: fq.calibrate(fq.prepare(model, "int8"), BATCHES) and model(X),
    "fuse_batch_norm": lambda model, path: fq.fuse_batch_norm(model, X)(X),
    "load": lambda model, path: fq.load(model, fq.save(ready(net()), path / "saved"))(X),
    "compare": lambda model, path: fq.compare(model, BATCHES, ["int8"]).rows[0].preset,
    "search": lambda model, path: fq.search(model, BATCHES, bits=9).choices,
    "scores": lambda model, path: ptq.scores(model, BATCHES, ["int8_weight_only"]) and None,
    "equalize": lambda model, path: ptq.equalize(model, X, "int8") and model(X),
    "rotate": lambda model, path: ptq.rotate(model, X) and None,
    "find_blocks": lambda model, path: ptq.find_blocks(model),
    "capture float": lambda model, path: ir.capture(model, X) and None,
}
OF_PREPARED: dict[str, Callable[[nn.Module, Path], Any]] = {
    "forward": lambda model, path: model(X),
    "calibrate": lambda model, path: fq.calibrate(model, BATCHES) and quantizer_scales(model),
    "calibrate weights": lambda model, path: fq.calibrate(model, pattern="*_weight_quantizer") and model(X),
    "recalibrate": lambda model, path: fq.recalibrate(model, method="max") and model(X),
    "summary": lambda model, path: str(fq.summary(model)),
    "summary with example": lambda model, path: str(fq.summary(model, X)),
    "unquantized": lambda model, path: str(fq.unquantized(model, X)),
    "sensitivity": lambda model, path: str(fq.sensitivity(model, BATCHES)),
    "layer_sqnr": lambda model, path: fq.layer_sqnr(model, BATCHES),
    "report": lambda model, path: fq.report(model, BATCHES, path / "report.html") and None,
    "save": saved,
    "save packed": lambda model, path: saved(model, path, packed=True),
    "bake_weights": lambda model, path: fq.bake_weights(model)(X),
    "fold": lambda model, path: fq.fold(model)(X),
    "export_onnx": lambda model, path: fq.export_onnx(model, X, path / "model.onnx") and None,
    "float_state_dict": lambda model, path: [gathered(x).tolist() for x in fq.float_state_dict(model).values()],
    "set_execution": lambda model, path: fq.set_execution(model, "auto")(X),
    "site_plan": lambda model, path: str(fq.site_plan(model)),
    "disabled": lambda model, path: without(model),
    "cached_weights": lambda model, path: cached(model),
    "capture": lambda model, path: ir.capture(model, X) and None,
    "histogram": lambda model, path: fq.plot.histogram(model, "0._weight_quantizer", BATCHES).get_title(),
    "channels": lambda model, path: fq.plot.channels(model, "0._weight_quantizer").get_title(),
    "improve": lambda model, path: ptq.improve(model, BATCHES) and model(X),
    "fold_scales": lambda model, path: ptq.fold_scales(model, X) and model(X),
    "reconstruct": lambda model, path: ptq.reconstruct(model, BATCHES, iterations=2) and model(X),
    "reestimate": lambda model, path: ptq.reestimate_batch_norm(model, BATCHES) and model(X),
    "learned": lambda model, path: fq.qat.set_scales(model, fq.qat.Scales.LEARNED) or model(X),
    "epoch": lambda model, path: fq.qat.set_scales(model, fq.qat.Scales.EPOCH) or model(X),
    "merge_batch_norm": lambda model, path: fq.qat.merge_batch_norm(model)(X),
    "finetune": lambda model, path: fq.qat.finetune(
        model, [(X, torch.zeros(6, 2))], nn.functional.mse_loss, fq.qat.Schedule(1.0, 10)
    ),
}


def ready(model: nn.Module, wrap: Wrap = lambda model: model) -> nn.Module:
    """Prepared after it was wrapped, as users of large models do."""
    model = fq.prepare(wrap(model), "int8")
    fq.calibrate(model, BATCHES)
    return model


def text(result: Any) -> str:
    """A result to compare: of tensors all bits."""
    result = gathered(result).detach().double().tolist() if isinstance(result, Tensor) else result
    return json.dumps(result, default=str)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [_shards, _root, _cpu, _disk], ids=["sharded", "root", "cpu", "disk"])
@pytest.mark.parametrize("name", [*OF_FLOAT, *OF_PREPARED])
def test_every_function_gives_what_it_gives_for_plain_weights_or_names_the_cause(
    name: str, kind: Callable[[pytest.FixtureRequest], Wrap], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if name in ("histogram", "channels"):
        pytest.importorskip("matplotlib")
    wrap, call = kind(request), (OF_FLOAT | OF_PREPARED)[name]
    made = [net(), wrap(net())] if name in OF_FLOAT else [ready(net()), ready(net(), wrap)]
    for folder in ("plain", "moved"):
        (tmp_path / folder).mkdir()
    expected = text(call(made[0], tmp_path / "plain"))
    try:
        found = text(call(made[1], tmp_path / "moved"))
    except ConfigError as error:
        found = str(error)
    assert found == expected or re.fullmatch(".*(sharded over processes|offloaded by hooks of Accelerate).*", found)


WORKS_OFFLOADED = [
    *("forward", "calibrate", "recalibrate", "summary", "unquantized", "sensitivity", "layer_sqnr", "report", "save"),
    *("float_state_dict", "set_execution", "disabled", "cached_weights", "histogram", "channels", "epoch"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORKS_OFFLOADED)
def test_what_reads_weights_works_where_they_are_offloaded(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    OF_PREPARED[name](model := ready(net(), _disk(request)), tmp_path)
    assert offloaded(model)[0] == "0.weight"
    assert torch.equal(fetched(model[0], "weight", model[0].weight), net()[0].weight)  # type: ignore[index]
