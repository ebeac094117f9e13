"""Copies of a model, and its compiled form."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.support.bits import assert_same_bits

each_copier = pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)


def assert_compiled_alike(model: nn.Module, x: Tensor) -> None:
    """Compiled without a break, a model gives the same bits."""
    torch.compiler.reset()
    with torch.no_grad():
        assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
