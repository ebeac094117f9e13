"""Small models, quantizers and files for the tests of the ONNX export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import fakequant as fq
from fakequant.export.verdict import Session
from fakequant.export.verify import Evaluator
from fakequant.model.calibrate import calibrate
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.model.prepare import prepare
from fakequant.nn import Quantizer
from tests.support.bits import assert_same_bits


class Quantizers(nn.Module):
    def __init__(self, quantizers: Sequence[Quantizer]) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(quantizers)

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [quantizer(x) for quantizer, x in zip(self.quantizers, xs, strict=True)]


class Weights(nn.Module):
    def __init__(self, quantizers: Sequence[Quantizer], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(quantizers)
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [*(quantizer(w) for quantizer, w in zip(self.quantizers, self.weights, strict=True)), x + 1]


def quantizer(spec: fq.QuantSpec, params: fq.QParams) -> Quantizer:
    made = Quantizer(spec)
    made.set_qparams(params)
    return made


def run(path: Path, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a file in ONNX Runtime, in order."""
    model = onnx.load(path)
    session = Session(model)
    names = [value.name for value in model.graph.input]
    values = session.run(dict(zip(names, inputs, strict=True)))
    return [values[name] for name in session.outputs]


class Casting(Quantizers):
    """As Quantizers, for tensors of 16 bits that come and go as float32: numpy has no bfloat16."""

    dtypes: Sequence[torch.dtype]

    def forward(self, *xs: Tensor) -> list[Tensor]:
        cast = [x.to(dtype) for x, dtype in zip(xs, self.dtypes, strict=True)]
        return [y.float() for y in super().forward(*cast)]


def model_of(operator: str = "Neg", opset: int = 21) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT),
        helper.make_node(operator, ["c"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    inner = [helper.make_tensor_value_info("b", TensorProto.BFLOAT16, [2])]
    constants = [numpy_helper.from_array(np.zeros(1, np.float32), "unused")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants, value_info=inner)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def assert_tensors_are_seen(runner: type[Session] | type[Evaluator]) -> None:
    """Inputs, inner tensors and outputs of `model_of()`, which stays as it is."""
    model = model_of()
    before = model.SerializeToString()
    x = torch.tensor([1.001, -0.0])
    values = runner(model, ["x", "b", "c", "y", "b"]).run({"x": x})
    assert_same_bits(values["x"], x)
    assert_same_bits(values["b"], x.bfloat16())
    assert_same_bits(values["c"], x.bfloat16().float())
    assert_same_bits(values["y"], -x.bfloat16().float())
    assert model.SerializeToString() == before


def linear(config: Config | str, features: int = 8) -> nn.Module:
    """A calibrated linear layer; text is the specification of its input."""
    if isinstance(config, str):
        config = Config("test", (Rule(input=TensorConfig(config), weight=TensorConfig("int8 per_channel(0)")),))
    torch.manual_seed(0)
    model = nn.Sequential(prepare(nn.Sequential(nn.Linear(features, 4)), config))
    calibrate(model, [torch.randn(4, features)])
    return model


def config(name: str, spec: str, **options: Any) -> Config:
    """Inputs and weights alike; inputs dynamic unless said otherwise, or None."""
    given = options.get("input", TensorConfig(spec, dynamic=True))
    return Config(name, (Rule(input=given, weight=TensorConfig(spec)),))
