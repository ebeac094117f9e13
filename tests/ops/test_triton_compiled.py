"""What the compiler makes of the kernels for a GPU of compute capability 9.0, which needs no GPU.

The interpreter accepts what the compiler does not, and divides and rounds correctly where a GPU need not. So every
kernel is compiled as the backend starts it, and its assembly is read: no approximate division, no product and sum in
one rounding, no subnormal number flushed to zero.
"""

import re
from collections import Counter
from importlib.util import find_spec

import pytest
import torch

import fakequant as fq
from fakequant.numerics.formats.floats import TableFormat
from fakequant.numerics.reference import Bins
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.ops.backend import ColumnGrid
from fakequant.ops.triton.backend import TritonBackend
from tests.support.backends import Calls
from tests.support.matrix import full, in_turn, sweep

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is for Linux")

INEXACT = re.compile(r"\bfma\.|\.ftz|div\.full|div\.approx|rcp\.approx|\bmad\.f|ex2|lg2")


class Started:
    """Stands for a kernel: keeps the key under which triton would compile it for each start, and starts nothing."""

    def __init__(self, kernel, keys):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self.kernel, self.keys, self.target = kernel, keys, GPUTarget("cuda", 90, 32)
        # What tells kinds of arguments apart: their types, ones, multiples of 16, and values known at compile time.
        self.bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(self.target))

    def __getitem__(self, grid):
        assert all(programs >= 1 for programs in grid)
        return self.start

    def start(self, *values, **given):
        from triton.runtime.jit import compute_cache_key

        assert not given["enable_fp_fusion"]
        bound, kinds, options = self.bind(*values, **given)
        self.keys.append((self.kernel.fn.__name__, compute_cache_key({}, kinds, options)))
        return bound, kinds, options


class Compiled(Started):
    def __init__(self, kernel, found):
        super().__init__(kernel, [])
        self.found = found

    def start(self, *values, **given):
        from triton import compile
        from triton.compiler import ASTSource

        bound, kinds, options = super().start(*values, **given)
        signature = {name: kind for name, (kind, _) in zip(bound, kinds, strict=True)}
        fixed = {name: value for name, value in bound.items() if signature[name] == "constexpr"}
        attributes = {(place,): [["tt.divisibility", 16]] for place, (_, kind) in enumerate(kinds) if kind == "D"}
        source = ASTSource(self.kernel, signature, fixed, attributes)
        self.found.append(compile(source, target=self.target, options=options).asm)


def replace_kernels(monkeypatch, stand_in, found):
    from fakequant.ops.triton import launch

    for name in [name for name in vars(launch) if name.endswith("_kernel")]:
        monkeypatch.setattr(launch, name, stand_in(getattr(launch, name), found))
    return found


@pytest.fixture
def compiled(monkeypatch):
    return replace_kernels(monkeypatch, Compiled, [])


@pytest.fixture
def started(monkeypatch):
    """The names of all kernels that the backend starts, each with the key under which triton keeps what it compiles."""
    return replace_kernels(monkeypatch, Started, [])


def checked(compiled, started):
    assert len(compiled) == started
    for assembly in compiled:
        assert not INEXACT.findall(assembly["ptx"])
        assert assembly["cubin"]
    return compiled


MX = ScaleSpec("float8_e8m0fnu", ScaleRounding.EVEN)
NV = ScaleSpec("float8_e4m3fn", granularity=fq.PerTensor())
LONG_TABLE = TableFormat("long", tuple(float(n) for n in range(-100, 100)))
FAMILIES = ["int8", "uint8", "int16", "int[-8000000,8000000]", "float8_e4m3fn", "float8_e4m3fnuz", "nf4", LONG_TABLE]
GRANULARITIES = {
    "single": (fq.PerTensor(), (4, 4096)),
    "whole": (fq.PerChannel(0), (4, 8192)),
    "long": (fq.PerChannel(1), (2, 4, 8200)),
    "eights": (fq.PerBlock({-1: 32}), (4, 4096)),
    "eights of any": (fq.PerChannel(1), (2, 4, 200)),
    "columns": (fq.PerChannel(-1), (512, 64)),
    "any": (fq.PerBlock({0: 4, 1: 3}), (8, 96)),
}
KINDS = ["single", "long", "eights", "columns", "any"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def params_of(spec, shape, dtype=torch.float32, device="cpu"):
    groups = spec.granularity.group_shape(shape)
    scale = torch.ones(groups, dtype=dtype, device=device)
    return fq.QParams(scale, None if spec.symmetric else torch.ones_like(scale, dtype=torch.int32))


@sweep("name, dtype", full(FAMILIES, DTYPES), in_turn(FAMILIES, DTYPES))
def test_values_and_masks(compiled, name, dtype):
    gradients = list(fq.Gradient)
    turn = FAMILIES.index(name)
    spec = fq.QuantSpec(name, arithmetic=list(fq.Arithmetic)[turn % 2], gradient=gradients[turn % 4])
    x = torch.ones(4, 4096, dtype=dtype)
    Calls(TritonBackend("cpu")).fake_quantize(x, params_of(spec, x.shape), spec, mask=True)
    checked(compiled, 1)


@pytest.mark.parametrize("kind", GRANULARITIES)
def test_places(compiled, kind):
    granularity, shape = GRANULARITIES[kind]
    spec = fq.QuantSpec("uint8", granularity, gradient=fq.Gradient.INPUT_RANGE)
    backend, x = Calls(TritonBackend("cpu")), torch.ones(shape)
    _, bits = backend.fake_quantize(x, params_of(spec, shape), spec, mask=True)
    backend.grad_input(x, bits, spec, x.stride())
    backend.dequantize(backend.quantize(x, params_of(spec, shape), spec), params_of(spec, shape), spec, x.dtype)
    backend.encode(x, params_of(spec, shape), spec)
    checked(compiled, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fnuz", "float6_e3m2fn", "nf4"])
def test_codes(compiled, name, dtype):
    spec, x = fq.QuantSpec(name), torch.ones(4, 4096, dtype=dtype)
    backend, params = Calls(TritonBackend("cpu")), params_of(spec, x.shape)
    backend.dequantize(backend.quantize(x, params, spec), params, spec, dtype)
    checked(compiled, 2)


@sweep(
    "granularity, name",
    full([fq.PerTensor(), fq.PerBlock({-1: 32})], ["int8", "float8_e4m3fn", LONG_TABLE]),
    [(fq.PerTensor(), "int8"), (fq.PerBlock({-1: 32}), LONG_TABLE)],
)
def test_stochastic_rounding(compiled, name, granularity):
    spec = fq.QuantSpec(name, granularity, arithmetic=fq.Arithmetic.MULTIPLIER, rounding=fq.Rounding.STOCHASTIC)
    dtype = torch.float64 if granularity == fq.PerTensor() else torch.float32
    x, seed = torch.ones(64, 64, dtype=dtype), torch.tensor(2**40)
    # Fewer elements in a program, because that of float64 is compiled for half a minute otherwise.
    backend = Calls(TritonBackend("cpu", 512))
    backend.fake_quantize(x, params_of(spec, x.shape)._replace(seed=seed), spec, mask=False)
    backend.fake_quantize_dynamic(x, spec.replace(granularity=fq.PerBlock({-1: 32})), mask=True, seed=seed)
    checked(compiled, 2)


@sweep("kind", full(GRANULARITIES), full(["single", "eights", "any"]))
def test_ranges_of_the_tensor_itself(compiled, kind):
    granularity, shape = GRANULARITIES[kind]
    x, backend = torch.ones(shape), Calls(TritonBackend("cpu"))
    for spec in (
        fq.QuantSpec("uint8", granularity),
        fq.QuantSpec("int8", granularity, arithmetic=fq.Arithmetic.MULTIPLIER),
        fq.QuantSpec("float4_e2m1fn", granularity, scale=MX),
        fq.QuantSpec("float4_e2m1fn", granularity, scale=NV),
    ):
        backend.fake_quantize_dynamic(x, spec, mask=True)
    backend.measure(x.double(), granularity)
    checked(compiled, 6 if kind in ("whole", "eights") else 9)


@sweep("kind", full(["single", "long", "columns", "any"]), full(["single", "any"]))
def test_gradients_of_parameters(compiled, kind):
    granularity, shape = GRANULARITIES[kind]
    every = (
        (fq.QuantSpec("uint8", granularity, symmetric=False), torch.float32),
        (fq.QuantSpec("int8", granularity, symmetric=False, gradient=fq.Gradient.CLIP), torch.bfloat16),
        (fq.QuantSpec("nf4", granularity, arithmetic=fq.Arithmetic.MULTIPLIER), torch.float64),
        (fq.QuantSpec("float8_e5m2", granularity, rounding=fq.Rounding.STOCHASTIC), torch.float32),
    )
    turn = list(GRANULARITIES).index(kind)
    chosen = [every[turn % 4], every[(turn + 1) % 4]]
    for spec, dtype in chosen:
        x, params = torch.ones(shape, dtype=dtype), params_of(spec, shape)._replace(seed=torch.tensor(2**40))
        Calls(TritonBackend("cpu")).grad_params(x, x, params, spec, (True, not spec.symmetric))
    # Two passes, and the total of each parameter.
    checked(compiled, sum(3 if spec.symmetric else 4 for spec, _ in chosen))


@sweep("dtype", full(DTYPES), full([torch.float32]))
def test_histograms(compiled, dtype):
    backend = Calls(TritonBackend("cpu"))
    for shape in ((1, 1 << 20), (64, 9)):
        values = torch.ones(shape, dtype=dtype)
        backend.observe(values, None)
        backend.observe(values, Bins(torch.ones(shape[0], dtype=torch.float64), 4096))
    for assembly in checked(compiled, 8):
        # What adds to memory: maxima and integers, whose order changes nothing.
        added = re.findall(r"\b(?:atom|red)\.\S+", assembly["ptx"])
        assert all(re.search(r"\.(add\.[us]64|max\.[us](32|64))$", one) for one in added), added


def test_reads_and_writes_16_bytes_at_a_time(compiled):
    for dtype in (torch.float32, torch.bfloat16):
        for granularity, shape in (GRANULARITIES["single"], GRANULARITIES["eights"], GRANULARITIES["long"]):
            x, spec = torch.ones(shape, dtype=dtype), fq.QuantSpec("int8", granularity)
            Calls(TritonBackend("cpu")).fake_quantize(x, params_of(spec, shape), spec, mask=True)
            Calls(TritonBackend("cpu")).grad_input(x, torch.ones(x.numel() // 8, dtype=torch.uint8), spec, x.stride())
        Calls(TritonBackend("cpu")).fake_quantize_dynamic(
            torch.ones(4, 4096), fq.QuantSpec("int8", fq.PerToken()), mask=True
        )
    for assembly in checked(compiled, 14):
        assert "ld.global.v4.b32" in assembly["ptx"]
        assert "st.global.v4.b32" in assembly["ptx"]
        # Each element is computed in one layout; where triton takes two, a division is there twice.
        divisions = re.findall(r"tt.precise_divf .*tensor<([0-9x]+)xf32", assembly["ttgir"])
        assert len(divisions) == len(set(divisions))


# Shapes of one layout, as batches and lengths of sentences vary.
SHAPES = {
    "per tensor": (fq.PerTensor(), [(b, 512, 768) for b in range(1, 65)]),
    "channels of images": (fq.PerChannel(1), [(b, 64, s, s) for b in (2, 3, 16, 33) for s in (48, 56, 96, 112)]),
    "features": (fq.PerChannel(-1), [(n, 768) for n in range(2, 4000, 61)]),
    "tokens": (fq.PerToken(), [(b, n, 768) for b in (1, 2, 5, 16) for n in range(2, 1000, 97)]),
    "blocks": (fq.PerBlock({-1: 32}), [(n, 4096) for n in range(2, 1000, 37)]),
}


def start_all(backend, x, granularity):
    spec = fq.QuantSpec("uint8", granularity)
    params = params_of(spec, x.shape, device=x.device)
    _, bits = backend.fake_quantize(x, params, spec, mask=True)
    backend.grad_input(x, bits, spec, x.stride())
    backend.dequantize(backend.quantize(x, params, spec), params, spec, x.dtype)
    backend.grad_params(x, x, params, spec, (True, True))
    backend.fake_quantize_dynamic(x, spec, mask=True)
    backend.fake_quantize_dynamic(x, fq.QuantSpec("float4_e2m1fn", granularity, scale=NV), mask=False)
    backend.measure(x, granularity)


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_of_one_layout_are_compiled_once(started, kind):
    granularity, shapes = SHAPES[kind]
    backend = Calls(TritonBackend("meta"))
    start_all(backend, torch.empty(shapes[0], device="meta"), granularity)
    of_one_shape = set(started)
    for shape in shapes[1:]:
        start_all(backend, torch.empty(shape, device="meta"), granularity)
    assert len(started) > 9 * len(shapes)
    assert Counter(name for name, _ in set(started) - of_one_shape) == {}


def test_lengths_that_16_divides_and_others_are_compiled_apart(started):
    """As memory is read 16 bytes at a time only where every row begins at one; to other numbers nothing is fitted."""
    backend, kernels = Calls(TritonBackend("meta")), []
    for rows in range(500, 600):
        start_all(backend, torch.empty(rows, 77, device="meta"), fq.PerTensor())
        kernels.append(len(set(started)))
    assert kernels[-1] <= 2 * kernels[0]


def test_ranges_of_any_number_of_groups_begin_where_16_divides(started):
    backend, spec = Calls(TritonBackend("cpu")), fq.QuantSpec("float4_e2m1fn", fq.PerBlock({-1: 16}), scale=NV)
    for rows in range(2, 10):
        backend.measure(torch.ones(rows, 16), spec.granularity)
        backend.fake_quantize_dynamic(torch.ones(rows, 16), spec, mask=False)
    # With both signs for the range, and the largest magnitudes alone.
    assert Counter(name for name, _ in set(started)) == {"measure_kernel": 2, "quantize_kernel": 1}


def test_seeds_of_any_size_are_compiled_once(started):
    spec, x = fq.QuantSpec("int8", rounding=fq.Rounding.STOCHASTIC), torch.ones(64, 64)
    for seed in (0, 16, 2**40, -1):
        params = params_of(spec, x.shape)._replace(seed=torch.tensor(seed))
        Calls(TritonBackend("cpu")).fake_quantize(x, params, spec, mask=False)
    assert len(started) == 4
    assert len(set(started)) == 1


@sweep("kind, name", full(KINDS, ["uint8", "float8_e4m3fn"]), [("single", "float8_e4m3fn"), ("any", "uint8")])
def test_more_elements_than_32_bits_count(compiled, kind, name):
    granularity, shape = GRANULARITIES[kind]
    rows = 2**31 // torch.Size(shape[1:]).numel() // 8 * 8 + 8
    x, backend = torch.empty(rows, *shape[1:], device="meta"), Calls(TritonBackend("meta"))
    spec = fq.QuantSpec(name, granularity)
    params = params_of(spec, x.shape, device="meta")
    _, bits = backend.fake_quantize(x, params, spec, mask=True)
    backend.grad_input(x, bits, spec, x.stride())
    backend.dequantize(backend.quantize(x, params, spec), params, spec, x.dtype)
    backend.grad_params(x, x, params, spec, (True, not spec.symmetric))
    backend.fake_quantize_dynamic(x, spec, mask=True)
    checked(compiled, (8 if spec.symmetric else 9) + (kind != "eights"))


def test_the_check_of_the_assembly_can_fail():
    for line in ("fma.rn.f32 %f1, %f2;", "div.full.f32 %f1;", "mul.ftz.f32 %f1;", "rcp.approx.ftz.f32 %f3;"):
        assert INEXACT.search(line)
    for line in ("div.rn.f32 %f1;", "mad.lo.s32 %r1;", "mul.rn.f32 %f1;", "cvt.rn.bf16x2.f32 %r1;"):
        assert not INEXACT.search(line)


@pytest.mark.parametrize("name", ["int4 per_block(-1:32)", "nf4 per_block(-1:32)", "float4_e2m1fn per_block(-1:32)"])
@pytest.mark.parametrize("lattice", [False, True])
def test_sweep(compiled, name, lattice):
    """Also with offsets, signs, scales of 0 and zeros that stay."""
    spec, shape = fq.QuantSpec.parse(name).replace(granularity=fq.PerChannel(0)), (128, 96)
    flags, floats = torch.ones(4, 96, dtype=torch.bool), torch.ones(4, 96)
    beside = (None, floats, floats, flags, torch.ones(shape, dtype=torch.bool)) if lattice else [None] * 5
    grid = ColumnGrid(spec, torch.zeros(128, dtype=torch.int64), floats, *beside)
    left, shares = torch.ones(shape), torch.ones(128, 160)
    assert TritonBackend("cpu").sweep(left, left, shares, left, left, grid)
    checked(compiled, 1)
