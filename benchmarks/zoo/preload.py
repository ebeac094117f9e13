"""What every architecture needs, imported once before the forks."""

from __future__ import annotations

import importlib
import tempfile
import warnings

import torch
from torch import nn

from tests.support.vision import import_torchvision

_MODULES = "timm transformers transformers.modeling_utils onnx onnxscript onnxruntime torch._dynamo torch._inductor"


def preload() -> None:
    """Import the libraries, and fill the tables that torch's exporters and compilers make at their first use."""
    import_torchvision()
    for name in _MODULES.split():
        importlib.import_module(name)
    x = torch.zeros(1, 2)
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        torch.onnx.export(nn.Linear(2, 2), (x,), f"{folder}/model.onnx", dynamo=True, verbose=False)
        torch.compile(nn.Linear(2, 2), backend="aot_eager")(x)
    torch._dynamo.reset()
