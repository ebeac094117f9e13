import logging

import pytest
import torch

import fakequant as fq
from fakequant.ops import dispatch
from fakequant.ops.cpu.backend import CpuBackend
from fakequant.ops.dispatch import backends, choose, pack_bits, unpack_bits
from tests.support.bits import assert_same_bits


class Refusing(CpuBackend):
    """A backend that is there and serves nothing."""

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
        assert not backend.compiles_as_node or backend.device_type in dispatch.node_devices


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
