"""How a device executes: launches, synchronisations, graphs, streams, compilers, sizes beyond 32 bits, whole models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fakequant as fq
from benchmarks import kinds
from benchmarks.training import BLOCK, CNN, Step, descent
from fakequant.calibration import calibrators, make_calibrator
from fakequant.numerics import products as definition
from fakequant.numerics.products import QuantizedOperand
from fakequant.numerics.reference import Bins, observe_by_definition
from fakequant.ops import dispatch, products
from fakequant.ops.library import observe
from tests.gpu import NotHere
from tests.support.bits import assert_same_bits

_BATCH = (64, 256)
_BEYOND_32_BITS = 2**31 + 1
_PIECE = 1 << 26
# Rows, inner and columns: small ones are multiplied in float32, and few rows and odd sizes are padded.
_PRODUCTS = ((64, 128, 64), (512, 384, 1536), (33, 64, 24), (17, 40, 9), (1, 256, 8))
# Quantizers of which each call is one launch; those of a range of the whole tensor need more passes.
_ONE_LAUNCH = (
    kinds.INT8_TENSOR,
    kinds.INT8_CHANNEL,
    kinds.FP8_TENSOR,
    kinds.INT8_TOKEN,
    kinds.INT8_GROUPS,
    kinds.MXFP4,
)
_QUANTIZERS = (*_ONE_LAUNCH, kinds.NVFP4)
_CHOSEN = (
    "uint8 per_token",
    "int8 per_channel(1) multiplier",
    "float8_e4m3fn per_block(-1:4) scale=float8_e8m0fnu:ceil",
    "float4_e2m1fn per_block(-1:4) scale=float8_e4m3fn@per_tensor",
)
_LEARNED = (
    ("pact", "int8 per_channel(1)"),
    ("pact", "int8 per_channel(1) multiplier"),
    ("lsq", "int8 per_channel(1) multiplier"),
    ("lsq_plus", "uint8 per_channel(1)"),
    ("tqt", "int8 per_channel(1) multiplier"),
)
Quantize = Callable[[Tensor], Tensor]


def only_on_cuda(device: str) -> None:
    """Raise where a check is of CUDA itself."""
    if torch.device(device).type != "cuda":
        raise NotHere(f"is of CUDA, and this is {device}")


def quantizer(kind: kinds.Kind, device: str) -> fq.nn.Quantizer:
    """The module of a kind, with scales that fit normal numbers [64, 256]."""
    made = fq.nn.Quantizer(kind.spec, dynamic=kind.dynamic)
    if not kind.dynamic:
        made.set_qparams(fq.choose_qparams(numbers().nan_to_num(0.0, 0.0, 0.0).clamp(-3.0, 3.0), kind.spec))
    return made.to(device)


def numbers(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers [64, 256], the last eight of which are none or extreme."""
    x = torch.randn(_BATCH, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[-8:] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, 1e4])
    return x.to(dtype)


def both_ways(quantize: Quantize, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """A result and the gradient of its input."""
    leaf = x.detach().requires_grad_()
    y = quantize(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


def launches(events: Any) -> list[str]:
    """The names of what a profile shows on the device: kernels, copies and fills."""
    return [event.name for event in events if event.device_type == DeviceType.CUDA]


def one_launch_each(device: str) -> str:
    """A quantizer's forward is one launch, and so is its backward."""
    only_on_cuda(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as of_one:
        numbers().to(device)
        torch.cuda.synchronize()
    if not launches(of_one.events()):
        raise NotHere("torch's profiler sees nothing of this GPU")
    found = []
    for kind in _QUANTIZERS:
        quantize, x = quantizer(kind, device), numbers().to(device).requires_grad_()
        dy = torch.ones_like(x)
        for _ in range(3):
            torch.autograd.grad(quantize(x), x, dy)
        torch.cuda.synchronize()
        counts = []
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as of_forward:
            y = quantize(x)
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as of_backward:
            torch.autograd.grad(y, x, dy)
            torch.cuda.synchronize()
        for profiled in (of_forward, of_backward):
            names = launches(profiled.events())
            counts.append(str(len(names)))
            expected = 1 if kind in _ONE_LAUNCH else len(names)
            assert len(names) == expected, f"{kind.name}: {len(names)} launches, expected {expected}: {names}"
        found.append(f"{kind.name} {'/'.join(counts)}")
    return "forward/backward: " + ", ".join(found)


@contextmanager
def no_synchronisation(device: str) -> Iterator[None]:
    """Within it, what waits for the device raises."""
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_without_synchronisation(device: str) -> str:
    """A training step never waits for the device: fixed, dynamic, learned, several formats."""
    only_on_cuda(device)
    done = []
    for preset in ("INT8", "INT8_PER_TOKEN", "FP8", "MXFP8", "NVFP4"):
        for learned in (False, True) if preset == "INT8" else (False,):
            config = getattr(fq.presets, preset)
            model = fq.prepare(copy.deepcopy(BLOCK.make()), config)
            batch = torch.randn(BLOCK.shape)
            fq.calibrate(model, [batch], progress=False)
            if learned:
                for one in fq.nn.quantizer.quantizers(model).values():
                    if one.calibrated:
                        one.learn("lsq")
            step, batch = descent(model.to(device)), batch.to(device)
            for _ in range(3):  # compiles kernels, makes the optimizer's state
                step(batch)
            with no_synchronisation(device):
                step(batch)
            done.append(preset + (" learned" if learned else ""))
    return ", ".join(done)


def call_without_synchronisation(device: str) -> str:
    """Calls of `fake_quantize` never wait for the device, not even to check a scale that is there."""
    only_on_cuda(device)
    x = numbers().to(device).requires_grad_()
    for kind in _QUANTIZERS:
        spec = fq.QuantSpec.parse(kind.spec)
        scale = None if kind.dynamic else fq.choose_qparams(x.detach(), spec).scale
        torch.autograd.grad(fq.fake_quantize(x, spec, scale=scale), x, torch.ones_like(x))
        with no_synchronisation(device):
            torch.autograd.grad(fq.fake_quantize(x, spec, scale=scale), x, torch.ones_like(x))
    return f"{len(_QUANTIZERS)} kinds"


def graph_replays(device: str) -> str:
    """Forward and backward are captured as a CUDA graph, which gives the eager bits of other inputs."""
    only_on_cuda(device)
    for kind in _QUANTIZERS:
        quantize, dy = quantizer(kind, device), torch.randn(_BATCH, device=device)
        x = numbers().to(device).requires_grad_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.autograd.grad(quantize(x), x, dy)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = quantize(x)
            (dx,) = torch.autograd.grad(y, x, dy)
        for seed in (1, 2):
            with torch.no_grad():
                x.copy_(3.0 * numbers(seed).to(device))
            graph.replay()
            for name, found, right in zip(("y", "dx"), (y, dx), both_ways(quantize, x, dy), strict=True):
                assert_same_bits(found.detach(), right, f"{kind.name} {name}")
    return f"{len(_QUANTIZERS)} kinds"


def current_stream(device: str) -> str:
    """Kernels run in torch's current stream: after what was put there before them, which takes its time."""
    only_on_cuda(device)
    for kind in _QUANTIZERS:
        quantize, dy = quantizer(kind, device), torch.randn(_BATCH, device=device)
        given, x = numbers(3).to(device), torch.zeros(_BATCH, device=device)
        right = both_ways(quantize, given, dy)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            x.copy_(given)
            found = both_ways(quantize, x, dy)
            torch.cuda.current_stream().synchronize()
        for name, one, other in zip(("y", "dx"), found, right, strict=True):
            assert_same_bits(one, other, f"{kind.name} {name}")
    return f"{len(_QUANTIZERS)} kinds"


def beyond_32_bits(device: str, elements: int = _BEYOND_32_BITS, piece: int = _PIECE) -> str:
    """More float16 elements than 32 bits count, forward, backward and observed: pieces are what they are alone."""
    need = 2 * 7 * elements  # x, y, dy, dx, and their pieces
    if torch.device(device).type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < need:
        raise NotHere(f"needs {need >> 30} GiB of memory, and {free >> 30} are free")
    pattern = numbers(4, torch.float16).view(-1).to(device)
    x = pattern.repeat(-(-elements // len(pattern)))[:elements]
    quantize = quantizer(kinds.INT8_TENSOR, device)
    y, dx = both_ways(quantize, x, x)
    first = [piece * number for number in (0, 1, elements // piece // 2, elements // piece - 1)]
    for start in (*first, max(0, elements - piece)):
        part = slice(start, start + piece)
        alone = both_ways(quantize, x[part].clone(), x[part])
        for name, found, right in zip(("y", "dx"), (y, dx), alone, strict=True):
            assert_same_bits(found[part], right, f"{name} from {start:,} on")
    last = both_ways(quantize.cpu(), x[-999:].cpu(), x[-999:].cpu())
    assert_same_bits(y[-999:].cpu(), last[0], "the last of y, by the CPU")
    assert_same_bits(dx[-999:].cpu(), last[1], "the last of dx, by the CPU")
    del y, dx
    bins = Bins(torch.full((1,), 64.0, dtype=torch.float64, device=device), 512)
    x.nan_to_num_(0.0, 0.0, 0.0)[-1] = 2e4
    counts = [observe(part[None], bins).counts for part in x.split(piece)]
    whole = observe(x[None], bins)
    assert whole.counts is not None
    assert whole.range.hi.item() == 2e4, f"the highest value, the last: {whole.range.hi.item()}"
    assert_same_bits(whole.counts, sum(count for count in counts if count is not None), "counts of all and of pieces")
    return f"{elements:,} elements"


def compiled_bits(device: str, backend: str = "inductor", many: int = len(_QUANTIZERS)) -> str:
    """torch.compile gives the eager bits, alone and between operations that it may fuse with, and that keep -0.0."""
    dtypes = (torch.float32, torch.bfloat16)
    for kind in _QUANTIZERS[:many]:
        for dtype in dtypes:
            quantize = quantizer(kind, device)
            x, dy = numbers(5, dtype).to(device), numbers(6, dtype).nan_to_num().to(device)
            # Not relu and neg: compiled for a GPU, relu(-0.0) is -0.0 and -(0.0) is 0.0.
            for label, function in (("alone", quantize), ("fused", lambda x, q=quantize: q(x.abs()) * -2.0)):
                torch.compiler.reset()
                found = both_ways(torch.compile(function, backend=backend), x, dy)
                for name, one, right in zip(("y", "dx"), found, both_ways(function, x, dy), strict=True):
                    assert_same_bits(one, right, f"{kind.name} {dtype} {label} {name}")
    return f"{many} kinds in {len(dtypes)} dtypes"


def compiled_parameters(device: str, backend: str = "inductor") -> str:
    """Scales and zero points chosen or learned under torch.compile have the eager bits, and so have their gradients."""
    x, dy = numbers(7).to(device), numbers(8).nan_to_num().to(device)
    for text in _CHOSEN:
        spec = fq.QuantSpec.parse(text)
        torch.compiler.reset()
        compiled = torch.compile(lambda x, spec=spec: fq.choose_qparams(x, spec)[:2], backend=backend)
        for one, right in zip(compiled(x), fq.choose_qparams(x, spec)[:2], strict=True):
            assert right is None or one is not None
            if right is not None:
                assert_same_bits(one, right, f"chosen for {text}")
    for method, text in _LEARNED:
        quantize = fq.nn.Quantizer(fq.QuantSpec.parse(text)).to(device)
        quantize.set_range(fq.choose_qparams(x * 0.7, quantize.spec).range)
        quantize.learn(method)
        torch.compiler.reset()
        results = []
        for function in (torch.compile(quantize, backend=backend), quantize):
            y = function(x)
            results.append([y.detach(), *torch.autograd.grad(y, list(quantize.parameters()), dy)])
        for place, (one, right) in enumerate(zip(*results, strict=True)):
            assert_same_bits(one, right, f"{method} {text} {place}")
    return f"{len(_CHOSEN)} chosen, {len(_LEARNED)} learned"


def integer_products(device: str) -> str:
    """Products of codes are exact: of either dtype with either, with weights and of two tensors."""
    if reason := products.linear_unavailable(torch.device(device).type):
        raise NotHere(reason)
    random = torch.Generator().manual_seed(7)

    def factor(
        shape: tuple[int, ...], dtype: torch.dtype, scales: tuple[int, ...], zero_point: int | None
    ) -> QuantizedOperand:
        info = torch.iinfo(dtype)
        codes = torch.randint(info.min, info.max + 1, shape, generator=random, dtype=dtype)
        shift = None if zero_point is None else torch.tensor(zero_point, dtype=torch.int32)
        return QuantizedOperand(codes, torch.rand(scales, generator=random), shift)

    def there(given: QuantizedOperand) -> QuantizedOperand:
        return QuantizedOperand(*(None if t is None else t.to(device) for t in given))

    for rows, inner, columns in _PRODUCTS:
        label, bias = f"{rows} x {inner} x {columns}", torch.randn(columns, generator=random)
        weight = factor((columns, inner), torch.int8, (columns, 1), None)
        for dtype, zero_point in ((torch.int8, None), (torch.int8, 3), (torch.uint8, None), (torch.uint8, 130)):
            x = factor((rows, inner), dtype, (rows, 1), zero_point)
            found = products.linear(there(x), there(weight), bias.to(device))
            assert_same_bits(found.cpu(), definition.linear(x, weight, bias), f"{label}, {dtype} {zero_point}")
            x = factor((3, rows, inner), dtype, (rows, 1), zero_point)
            for second, shift in ((torch.int8, None), (torch.uint8, 7)):
                other = factor((3, inner, columns), second, (1,), shift)
                found, right = products.matmul(there(x), there(other)).cpu(), definition.matmul(x, other)
                assert_same_bits(found, right, f"{label}, {dtype} {zero_point} by {second} {shift}")
    return f"{len(_PRODUCTS)} shapes, linear and matmul, int8 and uint8, with and without a zero point"


def histograms(device: str) -> str:
    """Ranges and counts of magnitudes are those of the definition, and a kernel that finds them waits for nothing."""
    dtypes, shapes = (
        (torch.float32, torch.float64, torch.float16, torch.bfloat16),
        ((1, 3_000_001), (40, 7001), (900, 33)),
    )
    for dtype in dtypes:
        for groups, elements in shapes:
            values = torch.randn(groups, elements, generator=torch.Generator().manual_seed(10)).to(dtype)
            values.view(-1)[::3] = -0.0
            values[groups // 2 + 1 :, -1] = torch.nan
            inverse = 2.0 ** (torch.arange(groups, dtype=torch.float64) % 4 + 7)
            own, bins = values.to(device), Bins(inverse.to(device), 512)
            observe(own, bins)  # compiles
            with nullcontext() if dispatch.choose_for(own) is dispatch.REFERENCE else no_synchronisation(device):
                found = observe(own, bins)
            right, label = observe_by_definition(values, Bins(inverse, 512)), f"{dtype} [{groups}, {elements}]"
            for name, one, other in zip(("lo", "hi"), found.range, right.range, strict=True):
                assert_same_bits(one.cpu(), other, f"{label} {name}")
            finite = slice(groups // 2 + 1)
            assert_same_bits(found.counts.cpu()[finite], right.counts[finite], f"{label} counts")
    return f"{len(shapes)} shapes in {len(dtypes)} dtypes"


def calibrated_ranges(device: str) -> str:
    """Calibration finds the ranges that it finds on the CPU."""
    spec = fq.QuantSpec("int8", fq.PerChannel(0))
    for method in calibrators():
        here, there = make_calibrator(method, spec), make_calibrator(method, spec)
        for seed in (8, 9):
            batch = 3.0 * torch.randn(_BATCH, generator=torch.Generator().manual_seed(seed))
            here.observe(batch)
            there.observe(batch.to(device))
        for name, found, right in zip(("lo", "hi"), there.compute_range(), here.compute_range(), strict=True):
            assert_same_bits(found.cpu(), right, f"{method} {name}")
    return ", ".join(calibrators())


def training_steps(device: str, smaller: dict[Step, tuple[int, ...]] | None = None) -> str:
    """Parameters after steps of gradient descent are those of the reference on the same device."""
    steps = [CNN, BLOCK]
    for step in steps:
        shape = (smaller or {}).get(step, step.shape)
        wrong = replace(step, device=device, shape=shape).differing()
        assert not wrong, f"{step.name}, {step.direction}: {wrong:,} parameters differ"
    return ", ".join(f"{step.name}, {step.direction}" for step in steps)


def verified_files(device: str) -> str:
    """An exported file is compared with a model on the device."""
    if find_spec("onnxscript") is None or find_spec("onnxruntime") is None:
        raise NotHere("onnxscript and onnxruntime are not installed")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
    model, xs = fq.prepare(net.eval().to(device), "int8"), [torch.randn(4, 3, 8, 8, device=device) for _ in range(2)]
    fq.calibrate(model, xs)
    with TemporaryDirectory() as folder:
        path = fq.export_onnx(model, xs[0], f"{folder}/model.onnx").path
        for batches in (None, xs):
            report = fq.verify_onnx(path, model, batches)
            assert report.exact, str(report)
    return f"{len(report.spans)} parts"


CHECKS: dict[str, Callable[[str], str]] = {
    "launches": one_launch_each,
    "no synchronisation in a training step": step_without_synchronisation,
    "no synchronisation in a call": call_without_synchronisation,
    "the current stream": current_stream,
    "torch.compile": compiled_bits,
    "torch.compile, parameters": compiled_parameters,
    "integer products": integer_products,
    "histograms": histograms,
    "calibration": calibrated_ranges,
    "training steps": training_steps,
    "beyond 32 bits": beyond_32_bits,
    "verification": verified_files,
    # The last: a capture that fails can leave CUDA of no use.
    "CUDA graphs": graph_replays,
}


def tried(name: str, device: str) -> tuple[str, str]:
    """("ok", what was found), ("RED", what is wrong) or ("--", why it cannot be tried here)."""
    torch.manual_seed(0)
    try:
        return "ok", CHECKS[name](device)
    except NotHere as reason:
        return "--", str(reason)
    except AssertionError as wrong:
        return "RED", str(wrong)
    except Exception as error:  # Whatever is raised is what this is to find, and the other checks are still made.
        return "RED", f"raises {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
