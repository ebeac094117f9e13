"""A made-up accelerator, "made_up:0" and "made_up:1": what a CUDA user meets, seen without a GPU.

`device.cpp` says what it does. `start()` builds it, at most once for each source and torch, and registers it for the
whole process: tests run it in `worker()`, a process of its own. fakequant's C++ kernels stand in for those of a GPU.

Its limits: sums are the CPU's, where a GPU's are ordered otherwise; work is not asynchronous, so that races between
streams are not seen; `foreach` functions count a launch for each tensor; attention has the plain kernel alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import multiprocessing
import subprocess
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fakequant.numerics.granularity import Granularity
from fakequant.numerics.qparams import Range
from fakequant.numerics.reference import Bins, Observed
from fakequant.numerics.spec import QuantSpec, Rounding
from fakequant.ops import dispatch
from fakequant.ops.backend import RELU, Backend, CallKind, ColumnGrid, KernelPlan
from fakequant.ops.cpu.backend import CpuBackend
from fakequant.ops.triton.backend import TritonBackend

NAME = "made_up"
_SOURCE = Path(__file__).with_name("device.cpp")
_BUILD = Path(__file__).parents[3] / "build" / "device"


def worker() -> ProcessPoolExecutor:
    """A process that has the device, and runs functions of modules one after the other."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=start)


def start() -> Any:
    """Build and register the device."""
    if hasattr(torch, NAME):
        return getattr(torch, NAME)
    spec: Any = importlib.util.spec_from_file_location(NAME, _built())
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module := _Module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True)
    refused, composed = _functions()
    native.refuse(refused)
    native.run_whole(composed)
    dispatch.register_backend(_Kernels(native))
    return module


def _built() -> Path:
    """The compiled device."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library, root = _BUILD / f"{NAME}-{key}.so", Path(torch.__file__).parent
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one test run
        if not library.exists():
            folders = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")
            command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]
            command += [*(f"-I{folder}" for folder in folders), str(_SOURCE), "-o", str(library.with_suffix(".part"))]
            subprocess.run([*command, f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"], check=True)
            library.with_suffix(".part").rename(library)
    return library


def _functions() -> tuple[list[str], list[str]]:
    """Operators with a kernel for CPUs and none for CUDA; those with one for CPUs, and a composed one for others."""
    import torchgen
    import yaml

    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    keys, delegates = dict[str, set[str]](), dict[str, str]()
    for function in yaml.safe_load(path.read_text()):
        name = function["func"].partition("(")[0]
        listed = function.get("dispatch", {})
        keys[name] = {key.strip() for line in listed for key in line.split(",")}
        delegates[name] = function.get("structured_delegate", name)
    on_cpu = {name: keys[delegate] for name, delegate in delegates.items() if "CPU" in keys[delegate]}
    composed = [name for name, own in on_cpu.items() if any(key.startswith("Composite") for key in own)]
    internal = [name for name in on_cpu if "mkldnn" in name or "flash_attention_for_cpu" in name]
    others = [name for name, own in on_cpu.items() if "CUDA" not in own and name not in {*composed, *internal}]
    # Of grouped products the composed form waits; CUDA's does not.
    return [f"aten::{name}" for name in others], [*composed, "_grouped_mm"]


class _Module:
    """`torch.made_up`, as `torch.cuda`."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.current_device, self.set_device = native.current_device, lambda device: native.set_device(_index(device))
        self.is_available = self.is_initialized = self.is_bf16_supported = lambda: True
        self.device_count, self._is_in_bad_fork = lambda: 2, lambda: False
        self._lazy_init = self.synchronize = lambda *_: None
        self.default_generators = tuple(native.generator(index) for index in range(2))

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self._generator(device).get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        self._generator(device).set_state(state)

    def _generator(self, device: Any) -> torch.Generator:
        index = _index(device)
        return self.default_generators[self.native.current_device() if index is None else index]

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.native.current_device()
        self.native.set_device(_index(device))
        try:
            yield
        finally:
            self.native.set_device(before)


def _index(device: Any) -> int | None:
    return device if isinstance(device, int) else torch.device(device).index


class Seen(NamedTuple):
    """What happened on the device.

    Attributes:
        counts: launches, those of operators on the default stream (by_default), waits, copies_in, bytes_in, bytes_out,
            and bytes that are held, and were at most (peak), beyond those at the start.
        waits: how often each operator waited, with the line of fakequant that called it.
    """

    counts: dict[str, int]
    waits: Counter[tuple[str, str]]


def watch(run: Callable[[], object]) -> Seen:
    """Run something and say what happened on the device."""
    native, waits = getattr(torch, NAME).native, Counter[tuple[str, str]]()

    def note(what: str) -> None:
        lines = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
        line = f"{lines[-1].filename.rpartition('/fakequant/')[2]}:{lines[-1].lineno}" if lines else ""
        # Else the model waits, or the library that it is from.
        waits[what, line if lines and "/src/fakequant/" in lines[-1].filename else "outside"] += 1

    before = native.counts()["held"]
    native.start_counting(note)
    try:
        run()
        counts = native.counts()
    finally:
        native.start_counting(None)
    return Seen(counts | {key: counts[key] - before for key in ("held", "peak")}, waits)


class _Kernels(Backend):
    """The C++ kernels over the same memory, with as many launches as a GPU's kernels take."""

    name = device_type = NAME
    compiles_as_node = True
    at_once = TritonBackend.at_once

    def __init__(self, native: Any) -> None:
        self.native, self.cpu = native, CpuBackend()

    def unavailable(self) -> str | None:
        return self.cpu.unavailable()

    def unfit(self, x: Tensor) -> str | None:
        return None if x.device.type == NAME else f"the tensor is on {x.device}"

    def unsupported(self, x: Tensor, spec: QuantSpec, *, codes: bool) -> str | None:
        return self.unfit(x) or self.cpu.unsupported(torch.empty(0, dtype=x.dtype, device="cpu"), spec, codes=codes)

    def plan(self, kind: CallKind) -> KernelPlan | None:
        cpu = torch.device("cpu")
        here = kind._replace(
            device=cpu,
            scale=kind.scale and kind.scale._replace(device=cpu),
            zero_point=kind.zero_point and kind.zero_point._replace(device=cpu),
        )
        if kind.variant == RELU or (plan := self.cpu.plan(here)) is None:
            return None
        plan, run = plan.otherwise or plan, self._run
        chosen = 1 if kind.scale is not None else 2
        return plan._replace(
            values=run(plan.values, chosen),
            values_and_mask=run(plan.values_and_mask, chosen),
            grad_input=run(plan.grad_input, 1),
            gradients=run(plan.gradients, 4),
            codes=run(plan.codes, 1),
            decode=run(plan.decode, 1),
            backend=self.name,
            descriptor=None,
            values_over=None,
            checks=kind.spec.rounding is Rounding.NEAREST_EVEN,
        )

    def measure(self, x: Tensor, granularity: Granularity) -> Range:
        return self._run(self.cpu.measure, 1)(x, granularity)

    def observe(self, values: Tensor, bins: Bins | None) -> Observed:
        return self._run(self.cpu.observe, 2)(values, bins)

    def sweep(
        self, wanted: Tensor, left: Tensor, shares: Tensor, errors: Tensor, missed: Tensor, grid: ColumnGrid
    ) -> bool:
        return self._run(self.cpu.sweep, 1)(wanted, left, shares, errors, missed, grid)

    def _run(self, function: Callable[..., Any], launches: int) -> Callable[..., Any]:
        def call(x: Tensor, *rest: Any) -> Any:
            for tensor in rest:  # a kernel of a GPU reads its parameters there
                if isinstance(tensor, Tensor) and tensor.dim() and tensor.device != x.device:
                    raise RuntimeError(f"Pointer argument cannot be accessed from Triton ({tensor.device} tensor?)")
            self.native.launched(launches)
            found = function(*tree_map_only(Tensor, self.native.on_cpu, (x, *rest)))
            return tree_map_only(Tensor, lambda y: self.native.on_device(y, x.device.index), found)

        return call
