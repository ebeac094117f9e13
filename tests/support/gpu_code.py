"""What Inductor writes for a GPU of compute capability 9.0, without a GPU: `python -m tests.support.gpu_code SPEC ...`.

For each specification it prints a line of JSON: how many kernels the forward and the backward pass have, what passes
between them, which approximate instructions their assembly has, and why torch would capture them in no CUDA graph. With
TRITON_INTERPRET=1 the generated code runs in Triton's interpreter instead, and each line says in how many elements the
values and the gradient differ from the reference. A process of its own, because it puts a device in torch's place.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
import triton
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo import device_interface
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
from torch._inductor.cudagraph_utils import check_lowering_disable_cudagraph
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

import fakequant as fq
from fakequant.numerics import division, reference
from fakequant.ops import graph_operators
from tests.support.exactness import differing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INEXACT = re.compile(r"\bfma\.|\.ftz|div\.full|div\.approx|rcp\.approx|\bmad\.f|ex2|lg2")
TARGET, BLOCK = GPUTarget("cuda", 90, 32), 64
SHAPE = (64, 96)

_PROPERTIES = types.SimpleNamespace(
    **{"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32},
    **{"max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "total_memory": 1 << 37},
    **{"max_threads_per_block": 1024, "shared_memory_per_block_optin": 232448, "gcnArchName": ""},
)


_Cuda: Any = device_interface.CudaInterface
_Compiler: Any = AsyncCompile
_driver: Any = driver


class _Gpu(_Cuda):
    """torch's view of a device that is not here; it inherits what code generation does not ask."""

    is_available = is_triton_capable = is_bf16_supported = staticmethod(lambda *_: True)
    raise_if_triton_unavailable = staticmethod(lambda *_: None)
    get_compute_capability = staticmethod(lambda *_: 90)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(lambda *_: _PROPERTIES)

    class Worker(_Cuda.Worker):
        get_device_properties = staticmethod(lambda *_: _PROPERTIES)
        current_device = staticmethod(lambda: 0)


def _pretend() -> None:
    device_interface.get_interface_for_device("cpu")  # which fills the table
    device_interface.device_interfaces.update({"cuda": _Gpu, "cuda:0": _Gpu})
    torch.cuda.get_device_properties = lambda *_: _PROPERTIES
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda._DeviceGuard = lambda _: contextlib.nullcontext()
    torch.cuda.set_device = lambda _: None
    torch.version.cuda = "12.8"
    there = {"get_current_target": lambda: TARGET, "get_current_device": lambda: 0}
    _driver.set_active(types.SimpleNamespace(**there))
    division.approximate_devices = frozenset({"cpu", "cuda"})
    graph_operators._found_in_backward = lambda x, dy: x  # graphs are traced with tensors of the CPU


class Compiled:
    """A graph of the CPU as Inductor writes it for a GPU, and the inputs of its first run."""

    def __init__(self, graph: Any, inputs: list[Any], *, backward: bool) -> None:
        moved, mode = copy.deepcopy(graph), FakeTensorMode(shape_env=ShapeEnv())
        for node in moved.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device("cuda:0"))
        moved.recompile()
        with mode:
            given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") for x in inputs]
        with torch.no_grad(), tracing(TracingContext(mode)):
            FakeTensorProp(moved, mode).propagate_dont_convert_inputs(*given)
            with V.set_fake_mode(mode):
                _recursive_post_grad_passes(moved, False)
            made = GraphLowering(moved, example_inputs=given, shape_env=mode.shape_env, is_backward=backward)
            with V.set_graph_handler(made), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
                made.run(*given)
                code, _ = made.codegen()
        by_device = check_lowering_disable_cudagraph(made.device_node_mapping)
        self.no_cuda_graph = made.disable_cudagraphs_reason or by_device
        if odd := get_first_incompatible_cudagraph_node(moved):
            self.no_cuda_graph = f"incompatible: {odd}"
        if made.mutated_inputs:
            self.no_cuda_graph = f"writes into its inputs {made.mutated_inputs}"
        self.code: str = code if isinstance(code, str) else code.value
        self.plain, self.inputs = graph.forward, []

    def __call__(self, *inputs: Tensor) -> Any:
        self.inputs = [x.detach().clone() for x in inputs]
        return self.plain(*inputs)


def compiled(function: Any, *inputs: Tensor) -> tuple[Compiled, Compiled]:
    """The forward and the backward graph of a function."""
    found: list[Compiled] = []

    def compiler(backward: bool) -> Any:
        def compile(graph: Any, given: list[Any]) -> Any:
            found.append(Compiled(graph, given, backward=backward))
            return make_boxed_func(found[-1])

        return compile

    def partition(joint: Any, given: Any, **options: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, given, compiler="inductor", **options)

    torch._dynamo.reset()
    both = {"fw_compiler": compiler(False), "bw_compiler": compiler(True), "partition_fn": partition}
    backend = aot_autograd(**both, decompositions=select_decomp_table())
    torch.compile(function, backend=backend, fullgraph=True)(*inputs).sum().backward()
    forward, backward = found
    return forward, backward


class Kernel:
    """A Triton kernel of generated code."""

    def __init__(self, name: str, text: str) -> None:
        fields = re.search(r"'signature': (\{.*?\})", text)
        assert fields is not None
        self.signature: dict[str, str] = eval(fields[1])
        self.fixed = {name: BLOCK for name, kind in self.signature.items() if kind == "constexpr"}
        body = text[text.index("@triton.jit") :]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.py")
            path.write_text(_HEAD + (_interpretable(body) if INTERPRETED else body))
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self.function = getattr(module, name)
            if not INTERPRETED:
                source = ASTSource(self.function, self.signature, self.fixed)
                self.inexact = INEXACT.findall(triton.compile(source, target=TARGET).asm["ptx"])

    def run(self, *values: Any, stream: Any) -> None:
        """Run in the interpreter."""
        (elements,) = (value for value in values if isinstance(value, int))
        self.function[(triton.cdiv(elements, BLOCK),)](*values, **self.fixed)


_HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
@triton.jit
def rint(x):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    near = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return (near.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
"""
_ROUNDED = {"div.rn.f32 $0, $1, $2;": "({0} / {1})", "mul.rn.f32 $0, $1, $2;": "({0} * {1})"}
_ROUNDED["rcp.rn.f32 $0, $1;"] = "(1.0 / {0})"


def _interpretable(body: str) -> str:
    """The code with what the interpreter computes for instructions, all of which it rounds correctly."""

    def plain(found: re.Match[str]) -> str:
        return _ROUNDED[found[1]].format(*found[2].split(", "))

    body = re.sub(r"tl\.inline_asm_elementwise\('([^']*)', '[^']*', \[([^]]*)\], [^)]*\)", plain, body)
    return body.replace("libdevice.nearbyint", "rint")


def kernels(code: str) -> list[Kernel]:
    """The kernels of generated code."""
    found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.DOTALL)
    return [Kernel(name, text) for name, text in found]


def run(code: str, inputs: list[Tensor]) -> list[Tensor]:
    """What generated code returns, on the CPU."""
    code = code.replace("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = id")
    code = code.replace("guards._empty_strided_cuda", "guards._empty_strided_cpu")
    module = types.ModuleType("generated")
    exec(code, module.__dict__)
    return [*module.__dict__["call"](list(inputs))]


def hostile(scale: float) -> Tensor:
    """Ties and one ulp beside, both zeros, subnormal numbers, what is no ordinary number, and random numbers."""
    at = torch.arange(-140.0, 140.0, 0.5) * scale
    beside = [torch.nextafter(at, torch.full_like(at, end)) for end in (torch.inf, -torch.inf)]
    odd = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38]
    found = torch.cat([at, *beside, torch.tensor(odd)])
    return torch.cat([found, 50 * scale * torch.randn(SHAPE[0] * SHAPE[1] - len(found))]).view(SHAPE)


def told(text: str, scale: float) -> dict[str, Any]:
    """What is printed of a specification."""
    spec, x, dy = fq.QuantSpec.parse(text), hostile(scale), torch.randn(SHAPE)
    dy.view(-1)[::7], dy.view(-1)[3::11] = torch.nan, torch.inf
    zero_point = fq.choose_qparams(torch.randn(SHAPE), spec).zero_point
    given = torch.full(spec.granularity.group_shape(SHAPE), scale if spec.arithmetic.is_linear else 1 / scale)

    def quantize(x: Tensor) -> Tensor:
        return fq.fake_quantize(x, spec, scale=given, zero_point=zero_point)

    def between(x: Tensor) -> Tensor:
        return quantize(torch.relu(x) + dy) + dy  # a sum that a product must not be contracted with

    forward, backward = compiled(quantize if INTERPRETED else between, x.clone().requires_grad_())
    if not INTERPRETED:
        found = [kernels(part.code) for part in (forward, backward)]
        inexact = [one for part in found for kernel in part for one in kernel.inexact]
        saved = [str(one.dtype) for one in backward.inputs[:-1]]
        no_graph = [part.no_cuda_graph for part in (forward, backward)]
        return {"kernels": [len(part) for part in found], "saved": saved, "inexact": inexact, "no_cuda_graph": no_graph}
    y, *rest = run(forward.code, forward.inputs)
    (dx,) = (one for one in run(backward.code, [*rest, dy]) if one is not None)
    params = fq.QParams(given, zero_point)
    wanted = reference.grad_input(dy, reference.passes(x, params, spec))
    return {"y": differing(y, reference.fake_quantize(x, params, spec)), "dx": differing(dx, wanted)}


def main() -> None:
    """Print a line for each specification, in the interpreter also for steps that make subnormal products."""
    _pretend()
    _Compiler.triton = lambda _, name, text, **__: Kernel(name, text)
    _Compiler.wait = lambda *_: None
    for text in sys.argv[1:]:
        for scale in (0.3, 2.0**-126) if INTERPRETED else (0.3,):
            torch.manual_seed(0)
            print(json.dumps({"spec": text, "scale": scale} | told(text, scale)))


if __name__ == "__main__":
    main()
