"""torch.distributed.checkpoint: written by two processes and read by one, and the other way round."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fakequant as fq
from tests.support import ranks
from tests.support.bits import assert_same_bits
from tests.support.models import shared_out

pytestmark = ranks.needs_gloo

FIXED, LEARNED = fq.qat.Scales.FIXED, fq.qat.Scales.LEARNED
PLANS = [("int8", None), ("int8_per_token", None), ("int4_weight_only", None), ("nvfp4", None)]
PLANS += [("int8", method) for method in ("lsq", "lsq_plus", "pact", "tqt")]
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def model_of(plan: tuple[str, str | None], *, like: float = 1.0) -> nn.Sequential:
    """A calibrated model; `like` other than 1 gives it other weights and ranges than those of the file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(like)
    preset, method = plan
    fq.prepare(model, preset)
    fq.calibrate(model, [X * like], group=False, progress=False)
    fq.qat.set_scales(model, FIXED if method is None else LEARNED, method or "lsq")
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.001)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The losses of all examples in every process, so that a single process has the same."""
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.train()(X).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def written(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=str(folder))


def resumed(model: nn.Module, folder: Path) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    state, optim = get_state_dict(model, optimizer)
    held = {"model": state, "optim": optim}
    dcp.load(held, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
    return optimizer


def two(rank: int, folder: Path) -> None:
    for number, plan in enumerate(PLANS):
        model = shared_out(model_of(plan))
        optimizer = optimizer_of(model)
        losses(model, optimizer)
        written(model, optimizer, folder / f"two-{number}")
        if rank == 0:
            torch.save(losses(model, optimizer), folder / f"wanted-{number}")
        else:
            losses(model, optimizer)
        dist.barrier()
        again = shared_out(model_of(plan, like=1.5))
        found = losses(again, resumed(again, folder / f"one-{number}"))
        for own, expected in zip(found, torch.load(folder / f"next-{number}"), strict=True):
            assert_same_bits(own, expected)


def test_two_and_one_process_go_on_with_the_same_losses(tmp_path: Path) -> None:
    for number, plan in enumerate(PLANS):
        model = model_of(plan)
        optimizer = optimizer_of(model)
        losses(model, optimizer)
        written(model, optimizer, tmp_path / f"one-{number}")
        torch.save(losses(model, optimizer), tmp_path / f"next-{number}")
    ranks.run((two,), tmp_path)
    for number, plan in enumerate(PLANS):
        model = model_of(plan, like=1.5)
        found = losses(model, resumed(model, tmp_path / f"two-{number}"))
        for own, expected in zip(found, torch.load(tmp_path / f"wanted-{number}"), strict=True):
            assert_same_bits(own, expected)
