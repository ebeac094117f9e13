"""What a report is made of: distributions, layers in float, sizes and the environment."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch import nn

from fakequant.calibration import make_calibrator
from fakequant.model import presets
from fakequant.model.engine import known_engines
from fakequant.model.prepare import prepare
from fakequant.report import Size, distributions, environment, layers_left, sizes


def observed(method: str, spec: str, *batches: torch.Tensor):
    calibrator = make_calibrator(method, spec)
    for batch in batches:
        calibrator.observe(batch)
    return calibrator


def test_distribution_keeps_every_count_and_the_range_seen() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (found,) = distributions({"percentile": {"q": observed("percentile", "int8", x, x)}}, bins=32)
    assert sum(found.counts) == 2000
    assert (found.edges[0], found.edges[-1]) == (x.min().item(), x.max().item())
    assert len(found.counts) == 32


def test_distribution_has_the_ranges_of_all_methods_in_one_plot() -> None:
    x = torch.linspace(-1, 3, 401)
    both = {method: {"q": observed(method, "int8", x)} for method in ("max", "percentile")}
    (found,) = distributions(both)
    assert list(found.ranges) == ["max", "percentile"]
    assert found.ranges["max"] == (-1.0, 3.0)


def test_distribution_of_channels_counts_all_and_takes_the_widest_range() -> None:
    x = torch.tensor([[1.0, -100.0], [0.5, 200.0]])
    (found,) = distributions({"mse": {"q": observed("mse", "int8 per_channel(1)", x)}}, bins=10)
    assert found.groups == 2
    assert sum(found.counts) == 4
    assert found.ranges["mse"][1] > 100.0


@pytest.mark.parametrize(
    ("method", "batch"),
    [("max", torch.ones(3)), ("mse", torch.zeros(3)), ("percentile", torch.empty(0))],
    ids=["no histogram", "only zeros", "nothing observed"],
)
def test_what_cannot_be_drawn_is_left_out(method: str, batch: torch.Tensor) -> None:
    assert distributions({method: {"q": observed(method, "int8", batch)}}) == []


def test_layers_left_names_products_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1) @ self.linear(x)

    model = prepare(Model(), presets.INT8)
    (left,) = layers_left({"INT8": model}, torch.ones(4, 4)).values()
    assert [line.split(":")[1].split(",")[0].strip() for line in left] == ["matmul", "softmax"]


def test_sizes_are_those_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "a").write_bytes(b"12345")
    (tmp_path / "folder" / "inner" / "b").write_bytes(b"123")
    found = sizes({"both": tmp_path / "folder", "a": tmp_path / "folder" / "a"}, {"a": 20})
    assert found == [Size("both", 8, None), Size("a", 5, 20)]


def test_environment_names_versions_and_why_a_backend_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakequant.ops.cpu.backend.CpuBackend.unavailable", lambda self: "no kernels here")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    found = environment()
    assert found["torch"] == torch.__version__ or found["torch"] in torch.__version__
    assert found["backend cpu"] == "not available: no kernels here"
    assert found["backend reference"] == "available"
    assert found["C++ compiler"] == "none found"
    assert {f"engine {engine.name}" for engine in known_engines().values()} <= {*found}
    assert found["engine tensorrt"] == "no Python package runs its files"


def test_environment_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("fakequant", "triton"):
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("fakequant.report.of_model.version", version)
    found = environment()
    assert found["fakequant"] == "from source, not installed"
    assert found["triton"] == "not installed"
    assert found["numpy"] == "1.0"
