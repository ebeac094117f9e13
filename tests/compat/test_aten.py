"""torch's fake-quantization functions by this package. The comparison over all dtypes, ranges and axes is in
tests/support/compat_exactness.py and run by test_exactness.py; here are errors, edges, layouts, tracing and routing."""

import contextlib
import dataclasses
import threading

import pytest
import torch

import fakequant as fq
from benchmarks import torch_ao
from fakequant.compat import aten
from fakequant.errors import FakeQuantError, QParamsError
from tests.support.bits import assert_same_bits

SCALES = torch.tensor([0.1, 0.2, 0.3])
POINTS = torch.tensor([1, 2, 3], dtype=torch.int32)
ROUTED = (
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_channel_affine",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "_fake_quantize_learnable_per_tensor_affine",
    "_fake_quantize_learnable_per_channel_affine",
)
x = torch.linspace(-3.0, 3.0, 12).view(4, 3)
whole = torch.ones(4, 3, dtype=torch.int32)

REFUSED = {
    "empty range": ("fake_quantize_per_tensor_affine", (x, 0.1, 0, 5, -5)),
    "zero point out of range": ("fake_quantize_per_tensor_affine", (x, 0.1, 300, 0, 255)),
    "integer input": ("fake_quantize_per_tensor_affine", (whole, 0.1, 0, 0, 255)),
    "bool input": ("fake_quantize_per_tensor_affine", (whole.bool(), 0.1, 0, 0, 255)),
    "list": ("fake_quantize_per_tensor_affine", ([1.0], 0.1, 0, 0, 255)),
    "text as scale": ("fake_quantize_per_tensor_affine", (x, "0.1", 0, 0, 255)),
    "fractional number": ("fake_quantize_per_tensor_affine", (x, 0.1, 1.5, 0, 255)),
    "fractional range": ("fake_quantize_per_tensor_affine", (x, 0.1, 1, 0.5, 255)),
    "too few arguments": ("fake_quantize_per_tensor_affine", (x, 0.1, 0, 0)),
    "number and tensor": ("fake_quantize_per_tensor_affine", (x, 0.1, POINTS[:1], 0, 255)),
    "two scales": ("fake_quantize_per_tensor_affine", (x, SCALES[:2], POINTS[:1], 0, 255)),
    "two zero points": ("fake_quantize_per_tensor_affine", (x, SCALES[:1], POINTS[:2], 0, 255)),
    "tensors, empty range": ("fake_quantize_per_tensor_affine", (x, SCALES[:1], POINTS[:1], 255, 0)),
    "tensors, integer input": ("fake_quantize_per_tensor_affine", (whole, SCALES[:1], POINTS[:1], 0, 255)),
    "double scale": ("fake_quantize_per_channel_affine", (x, SCALES.double(), POINTS, 1, 0, 255)),
    "half scale": ("fake_quantize_per_channel_affine", (x, SCALES.half(), POINTS, 1, 0, 255)),
    "long zero point": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS.long(), 1, 0, 255)),
    "bfloat16 zero point": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS.bfloat16(), 1, 0, 255)),
    "scale of two axes": ("fake_quantize_per_channel_affine", (x, SCALES[None], POINTS, 1, 0, 255)),
    "zero point of two axes": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS[None], 1, 0, 255)),
    "lengths disagree": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS[:2], 1, 0, 255)),
    "length of another axis": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS, 0, 0, 255)),
    "negative axis": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS, -1, 0, 255)),
    "axis too large": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS, 2, 0, 255)),
    "no axes": ("fake_quantize_per_channel_affine", (x[0, 0], SCALES[:1], POINTS[:1], 0, 0, 255)),
    "channels, empty range": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS, 1, 255, 0)),
    "one zero point out of range": ("fake_quantize_per_channel_affine", (x, SCALES, POINTS * 100, 1, 0, 255)),
    "channels, integer input": ("fake_quantize_per_channel_affine", (whole, SCALES, POINTS, 1, 0, 255)),
    "learnable, empty range": ("_fake_quantize_learnable_per_tensor_affine", (x, SCALES[:1], SCALES[:1], 5, 0)),
    "learnable, integer input": ("_fake_quantize_learnable_per_tensor_affine", (whole, SCALES[:1], SCALES[:1], 0, 5)),
    "learnable, lengths": ("_fake_quantize_learnable_per_channel_affine", (x, SCALES, SCALES[:2], 1, 0, 255)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_torch_refuses_it_with_the_same_type(name):
    function, arguments = REFUSED[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is found here
        getattr(torch, function)(*arguments)
    with pytest.raises(theirs.type) as ours:
        getattr(aten, function)(*arguments)
    assert isinstance(ours.value, FakeQuantError | TypeError)


def test_learned_parameters_of_float64_are_refused_as_by_torch():
    def backward(library):
        scale = torch.tensor([0.1], requires_grad=True)
        y = library._fake_quantize_learnable_per_tensor_affine(x.double(), scale, torch.zeros(1), -8, 7)
        y.sum().backward()

    for library in (torch, aten):
        with pytest.raises(RuntimeError):
            backward(library)
    with torch.no_grad():
        y = aten._fake_quantize_learnable_per_tensor_affine(x.double(), SCALES[:1], torch.zeros(1), -8, 7)
    assert_same_bits(y, torch.fake_quantize_per_tensor_affine(x.double(), 0.1, 0, -8, 7))


@pytest.mark.parametrize("bad", [torch.ones(12), torch.ones(11, dtype=torch.bool)], ids=["dtype", "size"])
def test_masks_that_do_not_fit_are_refused_as_by_torch(bad):
    for library in (torch.ops.aten, aten):
        with pytest.raises(RuntimeError):
            library.fake_quantize_per_tensor_affine_cachemask_backward(x.view(-1), bad)


def test_the_gradient_of_a_mask_is_exactly_zero_where_it_is_not_set():
    dy, mask = torch.tensor([float("nan"), float("inf"), -2.0, -2.0]), torch.tensor([False, False, False, True])
    for backward in (
        aten.fake_quantize_per_tensor_affine_cachemask_backward,
        aten.fake_quantize_per_channel_affine_cachemask_backward,
    ):
        assert_same_bits(backward(dy, mask), torch.tensor([0.0, 0.0, 0.0, -2.0]))


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan"), float("inf")])
def test_scales_that_torch_accepts_and_that_mean_nothing(scale):
    with pytest.raises(QParamsError, match="scale must be a positive"):
        aten.fake_quantize_per_tensor_affine(x, scale, 0, -8, 7)
    scales = torch.tensor([0.1, scale, 0.1])
    with pytest.raises(QParamsError, match="scale must be a positive"):
        aten.fake_quantize_per_channel_affine(x, scales, POINTS, 1, -8, 7)
    with pytest.raises(QParamsError, match="scale must be a positive"):
        aten.fake_quantize_per_channel_affine(x, scales, SCALES, 1, -8, 7)


def test_a_zero_point_out_of_range_is_refused_as_a_tensor_too():
    with pytest.raises(RuntimeError, match="must be between 0 and 255, got 300"):
        aten.fake_quantize_per_tensor_affine(x, SCALES[:1], torch.tensor([300]), 0, 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("value", [1.75, -1.75, 2.5, 0.0])
def test_fractions_of_a_zero_point_per_tensor_are_cut_off_as_in_torch(dtype, value):
    given = x, SCALES[:1], torch.tensor([value]).to(dtype), -8, 7
    assert_same_bits(aten.fake_quantize_per_tensor_affine(*given), torch.fake_quantize_per_tensor_affine(*given), value)


@pytest.mark.parametrize("given", [[1.0], torch.ones(2, 2).to_sparse()], ids=["list", "sparse"])
def test_what_is_no_dense_tensor_is_refused_by_name(given):
    one = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dense torch\.Tensor, got (list|a tensor of layout torch\.sparse_coo)"):
        aten.fake_quantize_per_channel_affine(given, *one, 0, 0, 255)
    with pytest.raises(TypeError, match=r"must be a dense torch\.Tensor"):
        aten.fake_quantize_per_tensor_affine(given, 0.1, 0, 0, 255)


def test_a_range_of_one_code_or_beyond_float32_is_refused():
    for low, high in ((5, 5), (-(2**31), 2**31 - 1), (2**24, 2**24 + 50)):
        with pytest.raises(fq.errors.SpecError):
            aten.fake_quantize_per_tensor_affine(x, 0.1, 5, low, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("point", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("low", [-128, 3])
def test_nan_stays_and_infinities_saturate(dtype, point, low):
    nan, inf = float("nan"), float("inf")
    special = torch.tensor([[nan, inf, -inf]], dtype=dtype, requires_grad=True)
    offset = max(low, 3)
    expected = torch.tensor([[nan, (127 - offset) * 0.5, (low - offset) * 0.5]], dtype=dtype)
    zero_point = torch.tensor([offset], dtype=point)
    for call in (
        lambda: aten.fake_quantize_per_tensor_affine_cachemask(special, 0.5, offset, low, 127),
        lambda: aten.fake_quantize_per_channel_affine_cachemask(special, SCALES[:1] * 5, zero_point, 0, low, 127),
    ):
        y, mask = call()
        assert_same_bits(y, expected)
        assert not mask.any()
        (dx,) = torch.autograd.grad(y, special, torch.full_like(y, nan))
        assert_same_bits(dx, torch.zeros_like(special))


LAYOUTS = {
    "contiguous": lambda v: v,
    "transposed": lambda v: v.transpose(0, 2),
    "channels_last": lambda v: v[None].to(memory_format=torch.channels_last),
    "strided": lambda v: v[:, ::2],
    "expanded": lambda v: v[:1].expand(3, 6, 5),
    "empty": lambda v: v[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layouts(layout, dtype):
    v = LAYOUTS[layout](torch.randn(4, 6, 5, dtype=dtype))
    y, mask = aten.fake_quantize_per_tensor_affine_cachemask(v, 0.1, 1, -8, 7)
    right, right_mask = torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(v, 0.1, 1, -8, 7)
    assert_same_bits(y, right)
    assert_same_bits(mask, right_mask)
    for axis in range(v.dim()):
        n = v.shape[axis]
        if not n:
            continue
        for zero_point in (torch.ones(n, dtype=torch.int32), torch.full((n,), 0.5)):
            given = v, torch.linspace(0.1, 0.3, n), zero_point, axis, -8, 7
            assert_same_bits(
                aten.fake_quantize_per_channel_affine(*given), torch.fake_quantize_per_channel_affine(*given), axis
            )


def test_without_axes_and_without_channels():
    number = torch.tensor(0.33)
    assert_same_bits(
        aten.fake_quantize_per_tensor_affine(number, 0.1, 0, -8, 7),
        torch.fake_quantize_per_tensor_affine(number, 0.1, 0, -8, 7),
    )
    none = torch.ones(3, 0)
    assert aten.fake_quantize_per_channel_affine(none, SCALES[:0], POINTS[:0], 1, 0, 255).shape == (3, 0)


def test_the_switch_of_the_cachemask_function():
    for on in (0, 1):
        given = x, SCALES[:1], POINTS[:1], torch.tensor([on]), -8, 7
        ours = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*given)
        right = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*given)
        for got, wanted in zip(ours, right, strict=True):
            assert_same_bits(got, wanted)


def test_scales_get_no_gradient_but_in_the_learnable_functions():
    scale = SCALES.clone().requires_grad_()
    for zero_point in (POINTS, SCALES):
        assert not aten.fake_quantize_per_channel_affine(x, scale, zero_point, 1, 0, 255).requires_grad


def test_the_sum_of_a_learned_scales_gradient_is_nearer_to_the_exact_one_than_torchs():
    v, dy = torch.randn(1 << 20), torch.randn(1 << 20)
    exact = (dy.double() * torch.fake_quantize_per_tensor_affine(v, 1 / 64, 0, -128, 127).double().sub(v) * 64).where(
        (v * 64).round().clamp(-128, 127) == (v * 64).round(), dy.double() * torch.where(v < 0, -128, 127)
    )
    errors = {}
    for library in (aten, torch):
        scale = torch.tensor([1 / 64], requires_grad=True)
        y = library._fake_quantize_learnable_per_tensor_affine(v, scale, torch.zeros(1), -128, 127)
        y.backward(dy)
        errors[library] = (scale.grad.double() - exact.sum()).abs().item() / exact.abs().sum().item()
    assert errors[aten] <= 2**-24
    assert errors[aten] <= errors[torch]


def test_compiled_and_exported():
    torch._dynamo.reset()
    scale, zero_point = torch.tensor([0.1]), torch.tensor([1], dtype=torch.int32)

    def both(v):
        y = aten.fake_quantize_per_tensor_affine(v, scale, zero_point, -8, 7)
        return aten.fake_quantize_per_channel_affine(y, SCALES, POINTS.float() + 0.5, 1, -8, 7)

    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, right = torch.compile(both, fullgraph=True, backend="aot_eager")(leaf), both(other)
    assert_same_bits(y, right)
    assert_same_bits(torch.autograd.grad(y.sum(), leaf)[0], torch.autograd.grad(right.sum(), other)[0])

    class Module(torch.nn.Module):
        def forward(self, v):
            return aten.fake_quantize_per_tensor_affine(v, 0.1, 1, -8, 7)

    graph = torch.export.export(Module(), (x,)).graph
    nodes = [node for node in graph.nodes if str(node.target).startswith("fakequant")]
    assert [node.args[3] for node in nodes] == ["int4 per_tensor asymmetric reciprocal"]


def originals():
    return [getattr(torch, name) for name in ROUTED]


def test_routing_replaces_and_puts_back():
    before = originals()
    with aten.routed():
        assert [f.__module__ for f in originals()] == ["fakequant.compat.aten"] * len(ROUTED)
        with contextlib.suppress(ZeroDivisionError), aten.routed():
            raise ZeroDivisionError
        assert originals() != before
    assert originals() == before


def test_routing_in_threads_that_leave_in_the_order_they_came():
    before = originals()
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with aten.routed():
            first_is_in.set()
            second_is_in.wait(10)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with aten.routed():
        second_is_in.set()
        first_is_out.wait(10)
        seen = originals()
    thread.join()
    assert seen != before
    assert originals() == before


@pytest.mark.parametrize("row", torch_ao.ROUTED, ids=lambda row: row.name)
def test_models_of_torch_ao_train_to_the_same_bits(row, monkeypatch):
    row = dataclasses.replace(row, shape=(2, *row.shape[1:3], 8)[: len(row.shape)])
    batches = [torch.randn(row.shape) for _ in range(3)]
    theirs, ours = (torch_ao.trained(row, by_us=by_us, batches=batches) for by_us in (False, True))
    for mine, right in zip(ours, theirs, strict=True):
        assert_same_bits(mine, right)
    assert len(ours) > len(batches)
    monkeypatch.setattr(aten, "_values", lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch_ao.trained(row, by_us=True, batches=batches)
