"""Copies of a model, and its compiled form."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.bits import assert_same_bits


def pickled(model: Any) -> Any:
    """A copy by pickle."""
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    """A copy by `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


each_copier = pytest.mark.parametrize("copier", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


def assert_compiled_alike(model: nn.Module, x: Tensor) -> None:
    """Compiled without a break, a model gives the same bits."""
    torch.compiler.reset()
    with torch.no_grad():
        assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
