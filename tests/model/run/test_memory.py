"""The tensors of a run: those that nothing holds any longer are forgotten."""

from __future__ import annotations

import torch

from fakequant.model.run.recorder import Tensors


def test_dead_tensors_are_dropped_and_living_ones_stay() -> None:
    found, whole = Tensors(), torch.zeros(8)
    views = [whole[:4], whole[2:6]]
    for number, tensor in enumerate(views):
        found.add(tensor, number)
    for start in range(2, 9002, 3000):
        for number, tensor in enumerate([torch.zeros(1) for _ in range(3000)], start):
            found.add(tensor, number)
        del tensor
        assert found.numbers() == {0, 1}
    assert len(found._held) + len(found._by_memory) < 9000
    assert found.number(views[1]) == 1
    assert found.number(torch.zeros(1)) is None
    assert [share for _, share in found.sharing(whole[:2])] == [0.5]
