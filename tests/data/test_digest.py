"""Digests of batches: equal for equal values, in every process, and other ones for other values."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fakequant.data.digest import NoDigestError, digest

Pair = namedtuple("Pair", "x y")


@dataclass
class Example:
    x: Tensor
    ids: tuple[int, ...] = (1, 2)


KINDS: dict[str, Any] = {
    "tensor": lambda v: torch.full((2, 3), v),
    "bfloat16": lambda v: torch.full((2, 3), v).bfloat16(),
    "no contiguous tensor": lambda v: torch.full((2, 3), v).t(),
    "sparse": lambda v: torch.full((2, 3), v).to_sparse(),
    "conjugate": lambda v: torch.full((2,), v * 1j).conj(),
    "array": lambda v: np.full((2, 3), v),
    "numpy scalar": np.float32,
    "list": lambda v: ["a", b"b", None, True, v],
    "mapping": lambda v: UserDict(x=torch.tensor(v)),
    "key": lambda v: {f"{v}": 1},
    "named tuple": lambda v: Pair(1, torch.tensor(v)),
    "dataclass": lambda v: Example(torch.tensor(v)),
    "packed sequence": lambda v: nn.utils.rnn.pack_sequence([torch.full((3, 2), v)]),
    "nested": lambda v: torch.nested.nested_tensor([torch.full((2,), v), torch.full((3,), v)]),
    "path": lambda v: Path(f"{v}"),
    "dtype": lambda v: torch.float32 if v == 1.0 else torch.float64,
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_equal_digests_and_others_others(kind: str) -> None:
    make = KINDS[kind]
    assert digest(make(1.0)) == digest(make(1.0)) != digest(make(2.0))
    assert digest([make(1.0), make(1.0)]) == digest([one := make(1.0), one])


def test_structure_counts() -> None:
    values = [[], (), {}, [[]], [[], []], ["a", "b"], ["ab"], ["a", ["b"]], {"a": "b"}, "1", 1, 1.0, True, b"1", None]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    assert digest(np.zeros(2, np.int32)) != digest(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), len, Example, nn.Linear(1, 1), {1}, np.array([None]), np.ma.array([1.0], mask=[True])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(NoDigestError, match=f"a {type(value).__name__} cannot be compared between two runs; give"):
        digest([1, {"a": value}])


def test_digests_are_the_same_in_another_process() -> None:
    code = f"import {__name__} as t; print(*(t.digest(make(1.0)) for make in t.KINDS.values()))"
    own = [digest(make(1.0)) for make in KINDS.values()]
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert found.stdout.split() == own
