"""Two processes share the weights that they choose, and get the bits of one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fakequant as fq
from fakequant.errors import CalibrationError
from fakequant.ptq import collector
from fakequant.ptq.solvers import layer as solver
from tests.support import ranks
from tests.support.bits import assert_same_state, unchanged
from tests.support.vision import import_torchvision

pytestmark = ranks.needs_gloo


class Net(nn.Module):
    """Three layers that get one tensor, then two, then one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.softmax(self.q(x) * self.k(x), -1) * self.v(x)
        return self.down(torch.relu(self.gate(x)) * self.up(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def given(count: int = 8) -> list[Tensor]:
    return [torch.randn(24, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def improved(preset: str, steps: Any, batches: list[Tensor], group: Any) -> tuple[nn.Module, Any]:
    model = fq.prepare(net(), preset)
    if preset == "int8":
        fq.calibrate(model, batches, group=group, progress=False)
    return model, fq.ptq.improve(model, batches, steps, judge=[], group=group, progress=False)


def chooses(rank: int, folder: Path) -> None:
    world, plain, solved = dist.group.WORLD, solver._chosen, list[str]()

    def counted(name: str, *rest: Any) -> Any:
        solved.append(name)
        return plain(name, *rest)

    for preset, steps in (
        ("int4_weight_only", "fast"),
        ("int4_weight_only", "best"),
        ("w8a8_dynamic", ["ranges", "gptq", "descend", "drift", "bias"]),
        ("int4_group32", ["ranges", "adaround"]),
        ("int8", ["ranges", "gptq", "drift", "bias"]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solver, "_chosen", counted)
            model, found = improved(preset, steps, given()[4 * rank :][:4], world)
        # The third of three, and a single one, are chosen by both.
        own = ["q", "gate"] if rank == 0 else ["k", "up"]
        assert sorted(solved) == sorted([*own, "v", "down"]), (preset, solved)
        alone, expected = improved(preset, steps, given(), False)
        assert_same_state(model, alone)
        assert [row.after for row in found.layers] == pytest.approx([row.after for row in expected.layers])
        solved.clear()


def judges(rank: int, folder: Path) -> None:
    """The bits are those of one process where the same batches judge: in runs of eight, or where they are given."""
    batches, found = given(16), list[nn.Module]()
    runs, strided = batches[8 * rank :][:8], batches[rank::2]
    for own, judge, group in (
        (batches, None, False),
        (runs, None, dist.group.WORLD),
        ([x for n, x in enumerate(batches) if n % 8 != 1], batches[1::8], False),
        ([x for n, x in enumerate(batches) if n % 8 != 1 and n % 2 == rank], [batches[1 + 8 * rank]], dist.group.WORLD),
        (strided, None, dist.group.WORLD),
    ):
        found.append(fq.prepare(net(), fq.Config("test", (fq.Rule(weight="int3 per_channel(0)"),))))
        result = fq.ptq.improve(found[-1], own, "best", judge=judge, group=group, progress=False)
        print(rank, result)
    for other in found[1:4]:
        assert_same_state(found[0], other)
    with pytest.raises(AssertionError):  # the second of each one's own batches judges
        assert_same_state(found[0], found[4])


def sees_other_inputs(rank: int, folder: Path) -> None:
    """What was chosen ahead counts only if all processes see the inputs by which it was."""
    plain = collector._are_same
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collector, "_are_same", lambda *calls: rank == 0 and plain(*calls))
        model, _ = improved("int4_weight_only", "best", given()[4 * rank :][:4], dist.group.WORLD)
    assert_same_state(model, improved("int4_weight_only", "best", given(), False)[0])


def fails(rank: int, folder: Path) -> None:
    """An error in what one process chooses is one of both, and nothing changes."""
    plain, begun = solver._chosen, time.monotonic()

    def failing(name: str, *rest: Any) -> Any:
        if name == "k":
            raise CalibrationError("no solution")
        return plain(name, *rest)

    model = fq.prepare(net(), "int4_weight_only")
    said = "^k: no solution" if rank else "the process of rank 1 failed, .* k: no"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "_chosen", failing)
        with unchanged(model), pytest.raises(CalibrationError, match=said):
            fq.ptq.improve(model, given()[4 * rank :][:4], "fast", group=dist.group.WORLD, progress=False)
    assert time.monotonic() - begun < 30


def experts(rank: int, folder: Path) -> None:
    """Each process chooses the matrices of half of the experts, which one weight holds."""
    import_torchvision()  # before transformers, which imports it
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    plain, solved, found = solver._chosen, list[str](), list[nn.Module]()
    tokens = [torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def counted(name: str, *rest: Any) -> Any:
        solved.append(name.rpartition(".")[2])
        return plain(name, *rest)

    for own, group in ((tokens, False), (tokens[4 * rank :][:4], dist.group.WORLD)):
        solved.clear()
        torch.manual_seed(0)
        net = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_experts_per_tok=2, **sizes)).eval()
        found.append(fq.prepare(net, "int4_weight_only"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solver, "_chosen", counted)
            fq.ptq.improve(found[-1], own, "best", judge=[], group=group, progress=False)
    assert (solved.count("gate_up_proj"), solved.count("down_proj")) == (2, 2)
    assert_same_state(*found)


def test_two_processes_share_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks.run((experts,), tmp_path)


def test_two_processes(tmp_path: Path) -> None:
    ranks.run((chooses, judges, sees_other_inputs, fails), tmp_path)
