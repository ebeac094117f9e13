"""Digests of batches: equal for equal values, in every process, and other ones for other values."""

from __future__ import annotations

import functools
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

from fakequant.errors import ConfigError
from fakequant.ptq.digest import digest

Pair = namedtuple("Pair", "x y")


@dataclass
class Example:
    x: Tensor
    ids: tuple[int, ...] = (1, 2)


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def method(self) -> Any:
        return self.x


KINDS: dict[str, Any] = {
    "tensor": lambda v: torch.full((2, 3), v),
    "bfloat16": lambda v: torch.full((2, 3), v).bfloat16(),
    "no contiguous tensor": lambda v: torch.full((2, 3), v).t(),
    "sparse": lambda v: torch.full((2, 3), v).to_sparse(),
    "conjugate": lambda v: torch.full((2,), v * 1j).conj(),
    "array": lambda v: np.full((2, 3), v),
    "array of objects": lambda v: np.array([None, v], dtype=object),
    "masked array": lambda v: np.ma.array([1.0, 2.0], mask=[False, v == 1.0]),
    "numpy scalar": np.float32,
    "list": lambda v: ["a", b"b", None, True, v],
    "mapping": lambda v: UserDict(x=torch.tensor(v)),
    "key": lambda v: {f"{v}": 1},
    "named tuple": lambda v: Pair(1, torch.tensor(v)),
    "set": lambda v: {"a", "b", f"{v}"},
    "dataclass": lambda v: Example(torch.tensor(v)),
    "slots": Slots,
    "packed sequence": lambda v: nn.utils.rnn.pack_sequence([torch.full((3, 2), v)]),
    "path": lambda v: Path(f"{v}"),
    "slice": lambda v: slice(int(v)),
    "dtype": lambda v: torch.float32 if v == 1.0 else torch.float64,
    "module": lambda v: nn.Sequential(nn.Flatten(), nn.Dropout(v / 4)),
    "builtin": lambda v: torch.from_numpy if v == 1.0 else torch.as_tensor,
    "method of a builtin": lambda v: {v: 1}.get,
    "method": lambda v: Slots(v).method,
    "partial": lambda v: functools.partial(Slots, v),
    "class": lambda v: Example if v == 1.0 else Slots,
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


def test_values_that_hold_themselves_end() -> None:
    def loop(value: Any) -> Any:
        values = [value]
        values.append(values)
        return values

    assert digest(loop(1)) == digest(loop(1)) != digest(loop(2))
    shared: list[Any] = [1]
    for _ in range(200):
        shared = [shared, shared]  # 2**200 paths
    assert digest(shared)


def test_what_cannot_be_taken_apart() -> None:
    for value in (threading.Lock(), (x for x in "a"), memoryview(b"a")):
        with pytest.raises(ConfigError, match=f"a {type(value).__name__} cannot be taken apart: cannot pickle"):
            digest([1, {"a": value}])
        assert digest([1, value], or_class=True) != digest([2, value], or_class=True)


def test_digests_are_the_same_in_another_process() -> None:
    code = "from tests import test_digest as t; print(*(t.digest(make(1.0)) for make in t.KINDS.values()))"
    own = [digest(make(1.0)) for make in KINDS.values()]
    root = Path(__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert found.stdout.split() == own
