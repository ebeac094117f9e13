"""Decoders that return a cache which torch.export does not know are traced without it, and that is said."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import ExportError
from tests.support.vision import import_torchvision

IDS = torch.arange(18).view(2, 9) % 16
SAID = r"traced with use_cache=False: torch.export does not know the \S*Cache that the model returns"


class Cache:
    """Unknown to torch.export."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, mask: Tensor | None = None, use_cache: bool = True) -> Any:
        keys = self.embed(ids) if mask is None else self.embed(ids) * mask.unsqueeze(-1)
        return (self.head(keys), Cache(keys)) if use_cache else (self.head(keys),)


class Without(nn.Module):
    """A decoder whose cache cannot be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, ids: Tensor) -> Any:
        return self.decoder(ids)


def calibrated(make: Any = Decoder) -> nn.Module:
    model = fq.prepare(make().eval(), "INT8")
    fq.calibrate(model, [IDS], progress=False)
    return model


EXAMPLES = [IDS, (IDS, torch.ones(2, 9)), {"ids": IDS, "mask": torch.ones(2, 9)}]


@pytest.mark.parametrize(
    "example",
    [*(pytest.param(example, marks=pytest.mark.exhaustive) for example in EXAMPLES[:-1]), EXAMPLES[-1]],
    ids=["tensor", "tuple", "dict"],
)
def test_a_cache_is_left_out_everywhere(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = calibrated()
    assert fq.unquantized(model, example) == fq.unquantized(model, as_dict(example))
    with pytest.warns(UserWarning, match=SAID):
        graph = fq.ir.capture(model, example)
    assert len(graph.outputs) == 1
    with pytest.warns(UserWarning, match=SAID):
        fq.export_onnx(model, example, tmp_path / "m.onnx")
    report = fq.verify_onnx(tmp_path / "m.onnx", model)
    assert report.exact
    assert len(report.outputs) == 1


def as_dict(example: Any) -> dict[str, Any]:
    if isinstance(example, dict):
        return {**example, "use_cache": False}
    items = example if isinstance(example, tuple) else (example,)
    return {**dict(zip(("ids", "mask"), items, strict=False)), "use_cache": False}


@pytest.mark.parametrize("shapes", [({0: "batch"},), {"ids": {0: "batch"}}, None], ids=["tuple", "dict", "none"])
def test_dynamic_shapes_stay(shapes: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = calibrated()
    with pytest.warns(UserWarning, match=SAID):
        fq.export_onnx(model, IDS, tmp_path / "m.onnx", dynamic_shapes=shapes)
    batch = IDS if shapes is None else IDS.repeat(2, 1)
    assert fq.verify_onnx(tmp_path / "m.onnx", model, [batch]).exact


def test_what_cannot_be_left_out_is_one_error_that_says_what_to_do() -> None:
    with pytest.raises(ExportError, match=r"returns a \S*Cache, which torch.export does not know; let it return tens"):
        fq.ir.capture(calibrated(Without), IDS)
    with pytest.raises(ExportError, match=r"if the example is a dict with use_cache=False"):
        fq.ir.capture(calibrated(), {"ids": IDS, "use_cache": True})


class Passing(torch.nn.Module):
    """A model that passes its arguments on to a function."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.linear, self.result = torch.nn.Linear(4, 4), result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.result(self._computed(*args, **kwargs))

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_result_that_is_no_cache_is_named() -> None:
    with pytest.raises(
        ExportError, match=r"returns a types\.SimpleNamespace, which torch.export does not know; let it"
    ):
        fq.ir.capture(fq.prepare(Passing(lambda y: SimpleNamespace(y=y)), "int8_weight_only"), torch.ones(2, 4))


@pytest.mark.parametrize("shapes", [({0: "batch"},), ("batch",), {"args": {0: "batch"}}])
def test_axes_for_arguments_of_any_number(shapes: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = fq.prepare(Passing(torch.relu), "int8_weight_only")
    with pytest.raises(
        ExportError, match=r"dynamic_shapes has .* for an argument that is a tuple; give .* for \*inputs"
    ):
        fq.export_onnx(model, torch.ones(2, 4), tmp_path / "m.onnx", dynamic_shapes=shapes)


def test_decoders_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    import_torchvision()
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=1, **sizes, pad_token_id=0)
    model = calibrated(lambda: transformers.LlamaForCausalLM(config))
    with pytest.warns(UserWarning, match=SAID):
        fq.export_onnx(model, {"input_ids": IDS}, tmp_path / "m.onnx", dynamic_shapes={"input_ids": {0: "batch"}})
    assert fq.verify_onnx(tmp_path / "m.onnx", model, [{"input_ids": IDS.repeat(2, 1)}]).exact


class Counts(nn.Module):
    """Multiplies by a value of Python that it may change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.calls, self.factor, self.unset, self.kind = nn.Linear(4, 4), 0, 1.0, float("nan"), kind
        self.seen, self.named, self.turn = [1], {"n": 0}, False
        self.nested: dict[str, list[int]] = {"a": []}
        self.plain = SimpleNamespace(n=1)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "int":
            self.calls += 1
        if self.kind == "float":
            self.factor *= 0.5
        if self.kind == "list":
            self.seen.append(2)
        if self.kind == "dict":
            self.named["n"] += 1
        if self.kind == "list in a dict":
            self.nested["a"].append(1)
        if self.kind == "object":
            self.plain.n += 1
        if self.kind == "bool":
            self.turn = not self.turn
        if self.kind == "buffer made late":
            self.table = torch.arange(4.0)
        self.unset = float("nan")
        return self.layer(x) * (self.calls + self.factor + len(self.seen) + self.named["n"] + self.turn + self.plain.n)


WRITTEN = {
    "int": r"1\.calls \(1\)",
    "float": r"1\.factor \(0\.5\)",
    "list": r"1\.seen \(2 items\)",
    "dict": r"1\.named\.n \(1\)",
    "list in a dict": r"1\.nested\.a \(1 items\)",
    "object": r"1\.plain\.n \(2\)",
    "bool": r"1\.turn \(True\)",
    "none": "",
    "buffer made late": "",
}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("capture", [False, True])
def test_values_that_forward_writes_are_said_to_be_constants(kind: str, capture: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), Counts(kind)).eval()
    if not capture:
        fq.prepare(model, "int8_weight_only")
        fq.calibrate(model, progress=False)
    with warnings.catch_warnings(record=True, action="always") as found:
        if capture:
            fq.ir.capture(model, torch.ones(2, 4))
        else:
            fq.export_onnx(model, torch.ones(2, 4), tmp_path / "model.onnx")
    told = [str(one.message) for one in found if "values of Python" in str(one.message)]
    assert bool(told) == bool(WRITTEN[kind])
    assert all(re.search(WRITTEN[kind], one) for one in told)
    last: Any = model[1]
    assert (last.calls, last.factor, last.seen, last.named, last.turn) == (0, 1.0, [1], {"n": 0}, False)
    assert last.table is None
    assert "forward" not in vars(model)


class Lengths(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y, length = self.layer(x), x.shape[1]
        if self.kind == "int":
            return y[:, : int(length * 0.5)]
        if self.kind == "if":
            return y * 2 if length > 5 else y * 3
        if self.kind == "float":
            return y / float(length)
        if self.kind == "another tensor":
            return y + torch.ones(6, 1)
        if self.kind == "whole":
            return y[:, : length // 2]
        return y.flatten(1)


ASKED = {
    "int": r"math\.trunc\(0\.5\*torch\.sym_float\(x\.shape\[1\]\)\) == 3",
    "if": r"x\.shape\[1\] > 5",
    "float": r"x\.shape\[1\] == 6",
    "another tensor": r"x\.shape\[1\] == 6",
    "whole": "",
    "no": "",
}


@pytest.mark.parametrize("kind", ASKED)
def test_lengths_for_which_a_graph_is_another_function_are_said(kind: str) -> None:
    auto = torch.export.Dim.AUTO
    with warnings.catch_warnings(record=True, action="always") as found:
        fq.ir.capture(Lengths(kind).eval(), (torch.ones(2, 6, 4),), dynamic_shapes=({0: auto, 1: auto},))
    told = [str(one.message) for one in found if "the graph is right only if" in str(one.message)]
    assert bool(told) == bool(ASKED[kind])
    assert all(re.search(ASKED[kind], one) for one in told)
