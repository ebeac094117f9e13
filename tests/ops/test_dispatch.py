import logging

import pytest
import torch

import fakequant as fq
from fakequant.errors import ConfigError
from fakequant.numerics import division, reference
from fakequant.ops import Backend, Kernels, dispatch, register_backend
from fakequant.ops.cpu.backend import CpuBackend
from fakequant.ops.dispatch import backends, choose, pack_bits, unpack_bits
from fakequant.ops.graph_operators import quantize_as_node
from tests.support.bits import assert_same_bits


class Refusing(CpuBackend):
    name = "refusing"

    def unsupported(self, x, spec, *, codes):
        return "it never serves"


class Missing(CpuBackend):
    name = "missing"

    def unavailable(self):
        return "it was not built"


def test_the_reference_comes_last_and_serves_everything():
    last = backends()[-1]
    assert last.name == "reference"
    assert last.unavailable() is None
    assert last.unsupported(torch.ones(1, device="meta"), fq.QuantSpec("int8"), codes=True) is None
    assert len({backend.name for backend in backends()}) == len(backends())


def test_backends_refuse_other_devices_than_their_own():
    for backend in backends():
        x = torch.ones(1, device="meta")
        found = backend.unsupported(x, fq.QuantSpec("int8"), codes=False)
        assert found == (None if backend.device_type is None else "the tensor is on meta")
        assert not backend.compiles_as_node or backend.device_type in division.approximate_devices


def test_the_list_is_a_copy():
    backends().clear()
    assert backends()


def test_cpu_kernels_serve_values_and_leave_float_codes_to_the_reference():
    cpu = next(backend for backend in backends() if backend.name == "cpu")
    if reason := cpu.unavailable():
        pytest.skip(reason)
    x = torch.ones(3)
    assert choose(x, fq.QuantSpec("float8_e5m2")).name == "cpu"
    assert choose(x, fq.QuantSpec("float8_e5m2"), codes=True).name == "reference"
    assert choose(x, fq.QuantSpec("int8"), codes=True).name == "cpu"
    assert choose(torch.ones(3, device="meta"), fq.QuantSpec("int8")).name == "reference"
    assert cpu.unsupported(torch.ones(3, device="meta"), fq.QuantSpec("int8"), codes=False) == "the tensor is on meta"


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(Refusing(), "it never serves"), (Missing(), "it was not built")],
    ids=["refuses", "missing"],
)
def test_reasons_are_logged_and_the_next_backend_serves(monkeypatch, caplog, backend, reason):
    monkeypatch.setattr(dispatch, "_backends", (backend, dispatch.REFERENCE))
    with caplog.at_level(logging.DEBUG, "fakequant.backend"):
        y = fq.fake_quantize(torch.tensor([0.26]), "int8", scale=0.5)
    assert_same_bits(y, torch.tensor([0.5]))
    assert f"{backend.name} cannot serve int8 per_tensor of torch.float32 on cpu: {reason}" in caplog.text
    assert "reference serves int8 per_tensor of torch.float32 on cpu" in caplog.text


def test_without_kernels_the_gradient_is_the_same(monkeypatch):
    x = torch.tensor([-1.0, 0.3, 64.0, float("nan")], requires_grad=True)
    (with_kernels,) = torch.autograd.grad(fq.fake_quantize(x, "int8", scale=0.5).sum(), x)
    monkeypatch.setattr(dispatch, "_backends", (dispatch.REFERENCE,))
    (without,) = torch.autograd.grad(fq.fake_quantize(x, "int8", scale=0.5).sum(), x)
    assert_same_bits(without, with_kernels)
    assert_same_bits(without, torch.tensor([1.0, 1.0, 0.0, 0.0]))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9,), (3, 5), (0,), (2, 0)], ids=str)
def test_bits_unpack_to_what_was_packed(shape):
    mask = torch.rand(shape) > 0.5
    bits = pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == -(-mask.numel() // 8)
    assert_same_bits(unpack_bits(bits, mask.shape), mask)


def test_bit_i_modulo_8_of_byte_i_over_8():
    for i in range(19):
        mask = torch.zeros(19, dtype=torch.bool)
        mask[i] = True
        assert pack_bits(mask).tolist() == [1 << i % 8 if byte == i // 8 else 0 for byte in range(3)]


# A backend of another package


class OwnKernels(Kernels):
    """The definition, with a mask of where gradients stop."""

    def quantize(self, x, params, *, mask):
        y = reference.fake_quantize(x, params, self.spec)
        return y, pack_bits(~reference.passes(x, params, self.spec)) if mask else None

    def mask_gradient(self, dy, mask):
        return reference.grad_input(dy, ~unpack_bits(mask, dy.shape))

    def encode(self, x, params):
        return reference.quantize(x, params, self.spec), x.isnan().any()

    def decode(self, codes, params):
        return reference.dequantize(codes, params, self.spec, self.kind.dtype)


class OwnBackend(Backend):
    name = "own"
    device_type = "cpu"

    def __init__(self):
        self.planned = []

    def unavailable(self):
        return None

    def unsupported(self, x, spec, *, codes):
        return None if spec.format == fq.QuantSpec("int4").format else "it serves int4 alone"

    def plan(self, kind):
        self.planned.append(kind.variant)
        return None if kind.variant == "relu" else OwnKernels(kind, self.name).plan()


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", dispatch._backends)
    monkeypatch.setattr(division, "approximate_devices", division.approximate_devices)
    backend = OwnBackend()
    register_backend(backend, before="cpu")
    return backend


@pytest.mark.parametrize("spec", ["int4", "int4 per_channel(0) asymmetric", "int4 per_token clip", "int4 identity"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_backend_of_another_package_serves_its_calls(own, spec, learned):
    x, spec = torch.randn(4, 6), fq.QuantSpec.parse(spec)
    params = fq.choose_qparams(x * 0.5, spec)
    results = []
    for served in (True, False):
        if not served:
            dispatch._backends = (dispatch.REFERENCE,)
        leaf, scale = x.clone().requires_grad_(), params.scale.clone().requires_grad_(learned)
        y = fq.fake_quantize(leaf, spec, scale=scale, zero_point=params.zero_point)
        leaves = (leaf, scale) if learned else (leaf,)
        codes, found = fq.quantize(x, spec, scale=params.scale, zero_point=params.zero_point)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves), codes, fq.dequantize(codes, found, spec)))
        results[-1] += (fq.fake_quantize(x, spec),)
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)
    assert set(own.planned) == {"values", "codes"}
    own.planned.clear()
    fq.fake_quantize(x, "int8", scale=0.1)
    assert not own.planned


def test_a_compiled_graph_finds_the_backend_of_its_masks_by_name(own, monkeypatch):
    x = torch.randn(5, 7, requires_grad=True)
    torch._dynamo.reset()
    int4, scale = fq.QuantSpec("int4"), torch.full((1, 1), 0.1)
    y = torch.compile(lambda x: quantize_as_node(x, int4, scale), backend="aot_eager", fullgraph=True)(x)
    register_backend(type("Another", (OwnBackend,), {"name": "another"})(), before="own")
    (got,) = torch.autograd.grad(y, x, torch.ones_like(x))
    assert_same_bits(got, reference.passes(x, fq.QParams(scale), int4).float())


def test_backends_have_names_of_their_own(own):
    with pytest.raises(ConfigError, match="a backend named 'own' is already registered; choose another name"):
        register_backend(OwnBackend())
    with pytest.raises(ConfigError, match="there is no backend 'cup' to come before; the backends are own, cpu, trit"):
        register_backend(type("Another", (OwnBackend,), {"name": "another"})(), before="cup")
    register_backend(type("Another", (OwnBackend,), {"name": "another"})())
    assert [backend.name for backend in backends()][-2:] == ["another", "reference"]
