"""What the compiler makes of the kernels for a GPU of compute capability 9.0, which needs no GPU.

The interpreter accepts what the compiler does not, and divides and rounds correctly where a GPU need not. So every
kernel is compiled as the backend starts it, and its assembly is read: no approximate division, no product and sum in
one rounding, no subnormal number flushed to zero.
"""

import re
from importlib.util import find_spec

import pytest
import torch

import fakequant as fq
from fakequant.numerics.histogram import Bins
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.tables import TableFormat
from fakequant.ops.triton.backend import TritonBackend

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; it is for Linux")

INEXACT = re.compile(r"\bfma\.|\.ftz|div\.full|div\.approx|rcp\.approx|\bmad\.f|ex2|lg2")
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiled:
    """Stands for a kernel: compiles it for the arguments with which it is started, and starts nothing."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        assert all(programs >= 1 for programs in grid)
        return self.compile

    def compile(self, *values, enable_fp_fusion, num_warps, **constants):
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        given = dict(zip(self.kernel.arg_names, values, strict=False)) | constants
        assert set(given) == set(self.kernel.arg_names)
        signature, fixed, attributes = {}, {}, {}
        for place, (name, value) in enumerate(given.items()):
            kind, aligned = self.type_of(name, value)
            signature[name] = kind
            if kind == "constexpr":
                fixed[name] = value
            elif aligned:
                attributes[(place,)] = [["tt.divisibility", 16]]
        assert not enable_fp_fusion
        options = {"enable_fp_fusion": False, "num_warps": num_warps}
        source = ASTSource(self.kernel, signature, fixed, attributes)
        self.found.append(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm)

    def type_of(self, name, value):
        """As triton tells kinds of arguments apart, and whether 16 divides one."""
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype], True
        if isinstance(value, bool) or not isinstance(value, int) or name.isupper():
            return "constexpr", False
        if name == "seed_value":
            return "i64", False
        return ("constexpr", False) if value == 1 else ("i32", value % 16 == 0)


@pytest.fixture
def compiled(monkeypatch):
    """The assemblies of all kernels that the backend starts."""
    from fakequant.ops.triton import launch

    found = []
    kernels = [name for name, value in vars(launch).items() if name.endswith("_kernel")]
    for name in kernels:
        monkeypatch.setattr(launch, name, Compiled(getattr(launch, name), found))
    return found


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


def params_of(spec, shape, dtype=torch.float32):
    groups = spec.granularity.group_shape(shape)
    return fq.QParams(torch.ones(groups, dtype=dtype), None if spec.symmetric else torch.ones(groups).int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FAMILIES, ids=str)
def test_values_and_masks(compiled, name, dtype):
    gradients = list(fq.Gradient)
    turn = FAMILIES.index(name)
    spec = fq.QuantSpec(name, arithmetic=list(fq.Arithmetic)[turn % 2], gradient=gradients[turn % 4])
    x = torch.ones(4, 4096, dtype=dtype)
    TritonBackend("cpu").fake_quantize(x, params_of(spec, x.shape), spec, mask=True)
    checked(compiled, 1)


@pytest.mark.parametrize("kind", GRANULARITIES)
def test_places(compiled, kind):
    granularity, shape = GRANULARITIES[kind]
    spec = fq.QuantSpec("uint8", granularity, gradient=fq.Gradient.INPUT_RANGE)
    backend, x = TritonBackend("cpu"), torch.ones(shape)
    _, bits = backend.fake_quantize(x, params_of(spec, shape), spec, mask=True)
    backend.grad_input(x, bits, spec, x.stride())
    backend.dequantize(backend.quantize(x, params_of(spec, shape), spec), params_of(spec, shape), spec, x.dtype)
    backend.encode(x, params_of(spec, shape), spec, mask=True)
    checked(compiled, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fnuz", "float6_e3m2fn", "nf4"])
def test_codes(compiled, name, dtype):
    spec, x = fq.QuantSpec(name), torch.ones(4, 4096, dtype=dtype)
    backend, params = TritonBackend("cpu"), params_of(spec, x.shape)
    backend.dequantize(backend.quantize(x, params, spec), params, spec, dtype)
    checked(compiled, 2)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", LONG_TABLE], ids=str)
@pytest.mark.parametrize("granularity", [fq.PerTensor(), fq.PerBlock({-1: 32})], ids=str)
def test_stochastic_rounding(compiled, name, granularity):
    spec = fq.QuantSpec(name, granularity, arithmetic=fq.Arithmetic.MULTIPLIER, rounding=fq.Rounding.STOCHASTIC)
    dtype = torch.float64 if granularity == fq.PerTensor() else torch.float32
    x, seed = torch.ones(64, 64, dtype=dtype), torch.tensor(2**40)
    # Fewer elements in a program, because that of float64 is compiled for half a minute otherwise.
    backend = TritonBackend("cpu", 512)
    backend.fake_quantize(x, params_of(spec, x.shape)._replace(seed=seed), spec, mask=False)
    backend.fake_quantize_dynamic(x, spec.replace(granularity=fq.PerBlock({-1: 32})), mask=True, seed=seed)
    checked(compiled, 2)


@pytest.mark.parametrize("kind", GRANULARITIES)
def test_ranges_of_the_tensor_itself(compiled, kind):
    granularity, shape = GRANULARITIES[kind]
    x, backend = torch.ones(shape), TritonBackend("cpu")
    for spec in (
        fq.QuantSpec("uint8", granularity),
        fq.QuantSpec("int8", granularity, arithmetic=fq.Arithmetic.MULTIPLIER),
        fq.QuantSpec("float4_e2m1fn", granularity, scale=MX),
        fq.QuantSpec("float4_e2m1fn", granularity, scale=NV),
    ):
        backend.fake_quantize_dynamic(x, spec, mask=True)
    backend.measure(x.double(), granularity)
    checked(compiled, 6 if kind in ("whole", "eights") else 9)


@pytest.mark.parametrize("kind", ["single", "long", "columns", "any"])
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
        TritonBackend("cpu").grad_params(x, x, params, spec, (True, not spec.symmetric))
    # Two passes, and the total of each parameter.
    checked(compiled, sum(3 if spec.symmetric else 4 for spec, _ in chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_histograms(compiled, dtype):
    backend = TritonBackend("cpu")
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
            TritonBackend("cpu").fake_quantize(x, params_of(spec, shape), spec, mask=True)
            TritonBackend("cpu").grad_input(x, torch.ones(x.numel() // 8, dtype=torch.uint8), spec, x.stride())
        TritonBackend("cpu").fake_quantize_dynamic(torch.ones(4, 4096), fq.QuantSpec("int8", fq.PerToken()), mask=True)
    for assembly in checked(compiled, 14):
        assert "ld.global.v4.b32" in assembly["ptx"]
        assert "st.global.v4.b32" in assembly["ptx"]
        # Each element is computed in one layout; where triton takes two, a division is there twice.
        divisions = re.findall(r"tt.precise_divf .*tensor<([0-9x]+)xf32", assembly["ttgir"])
        assert len(divisions) == len(set(divisions))


def test_the_check_of_the_assembly_can_fail():
    for line in ("fma.rn.f32 %f1, %f2;", "div.full.f32 %f1;", "mul.ftz.f32 %f1;", "rcp.approx.ftz.f32 %f3;"):
        assert INEXACT.search(line)
    for line in ("div.rn.f32 %f1;", "mad.lo.s32 %r1;", "mul.rn.f32 %f1;", "cvt.rn.bf16x2.f32 %r1;"):
        assert not INEXACT.search(line)
