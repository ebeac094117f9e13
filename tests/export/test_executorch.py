"""Programs of ExecuTorch, run by its portable kernels and by XNNPACK; most tests are skipped without executorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fakequant as fq
from fakequant.errors import ExportError, OutputError
from fakequant.export import executorch as module
from fakequant.export import pt2e
from tests.support.mobile import ASYMMETRIC, Block, Cnn, FlatFork, InPlace, Pooled, PooledFork, calibrated

W8A8 = ["INT8_AFFINE", "INT8"]


@pytest.fixture
def engine() -> None:
    pytest.importorskip("executorch", reason="needs executorch: make engines")


def prepared(net: nn.Module, config: Any, x: Tensor, target: str | None = "xnnpack") -> nn.Module:
    options: dict[str, Any] = {"target": target} if target else {}
    model = fq.prepare(net.eval(), config, x, **options)
    fq.calibrate(model, [x, x / 2], progress=False)
    return model


def seeded(make: Any, *shape: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return make(), torch.randn(*shape)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("preset", W8A8)
def test_portable_kernels_compute_the_codes_of_the_simulation(preset: str, tmp_path: Path) -> None:
    net, x = seeded(Cnn, 4, 3, 16, 16)
    file = fq.export_executorch(prepared(net, preset, x), x, tmp_path / "m.pte", backend="portable")
    assert (file.outputs[0].elements, file.outputs[0].differing) == (40, 0)
    assert file.bytes == (tmp_path / "m.pte").stat().st_size


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("preset", W8A8)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Cnn, (4, 3, 16, 16)),
        (lambda: nn.Sequential(Block(), Block()), (2, 8, 12, 12)),
        *((one, (2, 3, 16, 16)) for one in (Pooled, PooledFork, FlatFork, InPlace)),
    ],
    ids=["cnn", "blocks", "pooled", "pooled fork", "flat fork", "in place"],
)
def test_xnnpack_computes_all_and_is_one_step_away(make: Any, shape: Any, preset: str, tmp_path: Path) -> None:
    net, x = seeded(make, *shape)
    file = fq.export_executorch(prepared(net, preset, x), x, tmp_path / "m.pte")
    assert file.left == {}
    assert file.outputs[0].steps is not None
    assert file.outputs[0].steps <= 1.001
    assert file.outputs[0].share <= 0.02


class Fork(nn.Module):
    """One tensor that a convolution and a sum read, each with a quantizer of equal range."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.relu(self.a(x) + x)


@pytest.mark.usefixtures("engine")
def test_two_quantizers_of_one_tensor_are_one_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = seeded(Fork, 1, 3, 8, 8)
    model = prepared(net, ASYMMETRIC, x)
    file = fq.export_executorch(model, x, tmp_path / "m.pte")
    assert (file.left, file.outputs[0].differing) == ({}, 0)

    class Forgetful(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            return False

    make = pt2e.Lowering.__init__

    def apart(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._quantized = Forgetful()

    monkeypatch.setattr(pt2e.Lowering, "__init__", apart)
    with pytest.raises(ExportError, match=r"leaves .*convolution"):
        fq.export_executorch(model, x, tmp_path / "other.pte")
    with pytest.raises(ExportError, match="computes something else than the model, so nothing was written"):
        fq.export_executorch(model, x, tmp_path / "other.pte", partial=True)
    assert not (tmp_path / "other.pte").exists()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_linear_layers_of_language_models(name: str, tmp_path: Path) -> None:
    model, x = calibrated(name, "W4A8_EXECUTORCH")
    file = fq.export_executorch(model, x, tmp_path / "m.pte", partial=True)
    assert file.outputs[0].sqnr >= 130
    assert not any("quantize" in left or "linear" in left or "mm" in left for left in file.left)


@pytest.mark.usefixtures("engine")
def test_groups_under_float32_scales_are_refused_by_name(tmp_path: Path) -> None:
    net, x = seeded(lambda: nn.Sequential(nn.Linear(64, 32)), 4, 64)
    spec = fq.TensorConfig("int8 per_token asymmetric reciprocal", dynamic=True)
    config = fq.Config("g", (fq.Rule("*", weight=fq.TensorConfig("int4 per_block(-1:32)"), input=spec),))
    with pytest.raises(ExportError, match=r"0\._weight_quantizer\.scales\) are float32.*scale=bfloat16"):
        fq.export_executorch(prepared(net, config, x, None), x, tmp_path / "m.pte")


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).mean((2, 3)))


@pytest.mark.usefixtures("engine")
def test_what_xnnpack_leaves_is_named(tmp_path: Path) -> None:
    net, x = seeded(Mean, 2, 3, 8, 8)
    model = prepared(net, ASYMMETRIC, x)
    with pytest.raises(ExportError, match=r"XNNPACK leaves aten\.mean to other kernels; .*partial=True"):
        fq.export_executorch(model, x, tmp_path / "m.pte")
    assert not (tmp_path / "m.pte").exists()
    file = fq.export_executorch(model, x, tmp_path / "m.pte", partial=True)
    assert file.left == {"aten.mean": 1}
    assert "outside of its integer kernels: aten.mean" in str(file)


@pytest.mark.usefixtures("engine")
def test_any_batch_size_up_to_the_largest(tmp_path: Path) -> None:
    net, x = seeded(lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), 4, 16)
    model = prepared(net, ASYMMETRIC, x)
    shapes = ({0: Dim("batch", max=8)},)
    path = fq.export_executorch(model, x, tmp_path / "m.pte", dynamic_shapes=shapes).path
    from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]

    method = Runtime.get().load_program(path.read_bytes()).load_method("forward")
    more = torch.randn(7, 16)
    with torch.no_grad():
        step = fq.nn.quantizers(model)["2._output_quantizer"].scale
        assert step is not None
        assert (method.execute([more])[0] - model(more)).abs().max() <= 1.001 * step


@pytest.mark.usefixtures("engine")
def test_portable_kernels_without_ranges_of_tokens(tmp_path: Path) -> None:
    model, x = calibrated("mlp", "W4A8_EXECUTORCH")
    with pytest.raises(ExportError, match=r"portable kernels lack operators.*choose_qparams_affine"):
        fq.export_executorch(model, x, tmp_path / "m.pte", backend="portable")


def test_without_executorch_an_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "require", lambda *names, **options: real("no_such_package", **options))
    from fakequant.export.capability import require as real

    model, x = calibrated("mlp", ASYMMETRIC)
    with pytest.raises(ExportError, match=r"ExecuTorch needs no_such_package.*pip install executorch==1\.5\.1"):
        fq.export_executorch(model, x, tmp_path / "m.pte")


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    model, x = calibrated("mlp", ASYMMETRIC)
    with pytest.raises(ExportError, match="unknown backend 'xnnpac'; did you mean"):
        fq.export_executorch(model, x, tmp_path / "m.pte", backend="xnnpac")
    with pytest.raises(ExportError, match="a path is a text"):
        fq.export_executorch(model, tmp_path / "m.pte", x)  # type: ignore[arg-type]


@pytest.mark.usefixtures("engine")
def test_a_path_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    model, x = calibrated("mlp", ASYMMETRIC)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        fq.export_executorch(model, x, tmp_path / "file" / "m.pte")
