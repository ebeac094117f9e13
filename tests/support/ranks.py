"""Two processes of torch.distributed on this machine, for the time of a test."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[int, Path], None]
PRELOADED = [
    "tests.support.ranks",
    "tests.support.vision",
    "torch.distributed.fsdp",
    "fakequant.model",
    "fakequant.ptq",
]

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")


def run(works: Iterable[Work], folder: Path) -> None:
    """Run functions of (rank, folder) of a test module in two processes.

    They are copies of a server, which imports what takes longest once for all tests of this process.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(_start, (tuple(works), folder), nprocs=2, start_method="forkserver")


def _start(rank: int, works: tuple[Work, ...], folder: Path) -> None:
    torch.set_num_threads(1)
    # As torchrun sets them, for trainers.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500"
    )
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    try:
        for work in works:
            work(rank, folder)
        dist.barrier()
    finally:
        # Sharded models are in cycles. One that has the group at exit ends the process by std::terminate: 2 of 20 runs.
        gc.collect()
        dist.destroy_process_group()
