"""torch.compile and torch.export give the eager bits; few tests, because each compiles for seconds."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fakequant as fq
from fakequant.ops import library
from fakequant.ops.graph_operators import Decomposed, tensors_of
from tests.support import cases
from tests.support.bits import assert_same_bits
from tests.support.cases import FORMATS, GRANULARITIES
from tests.support.matrix import full, sweep


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def with_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(leaves)
    torch.autograd.backward(outputs, [torch.full_like(y, 3.0) for y in outputs])
    return outputs, [x.grad for x in leaves]


@sweep("dtype", full([torch.float32, torch.bfloat16]), full([torch.float32]))
def test_compiled_gives_the_eager_bits(dtype):
    where = GRANULARITIES["channel_1"]
    numbers, specs = [], []
    for name in ("int8", "uint8_affine", "float8_e4m3fn"):
        for arithmetic in FORMATS[name].arithmetics():
            for gradient in (fq.Gradient.CODE_RANGE, fq.Gradient.INPUT_RANGE):
                numbers.append(cases.hostile(FORMATS[name], where, arithmetic, dtype))
                specs.append(FORMATS[name].spec(where.granularity, arithmetic, gradient=gradient))

    def quantize_all(inputs):
        return [library.fake_quantize(x, n.params, spec) for x, n, spec in zip(inputs, numbers, specs, strict=True)]

    inputs = [n.x for n in numbers]
    values, gradients = with_gradients(quantize_all, inputs)
    compiled_values, compiled_gradients = with_gradients(torch.compile(quantize_all, fullgraph=True), inputs)
    for spec, *pairs in zip(specs, compiled_values, values, compiled_gradients, gradients, strict=True):
        assert_same_bits(pairs[0], pairs[1], f"{spec} y")
        assert_same_bits(pairs[2], pairs[3], f"{spec} dx")


def test_compiled_with_dynamic_shapes_takes_its_range_from_the_input():
    specs = [
        fq.QuantSpec("int8"),
        fq.QuantSpec("uint8", fq.PerToken()),
        fq.QuantSpec("float8_e4m3fn", fq.PerChannel(0)),
    ]

    def quantize_all(x):
        return torch.stack([fq.fake_quantize(x * 2.0, spec) for spec in specs])

    compiled = torch.compile(quantize_all, fullgraph=True, dynamic=True)
    for shape in ((3, 5), (4, 33)):
        x = torch.randn(shape)
        x[0, 0], x[1, 2] = float("nan"), float("inf")
        assert_same_bits(compiled(x), quantize_all(x), str(shape))


@pytest.mark.parametrize("dynamic", [True, None])
def test_code_compiled_for_several_formats_has_the_eager_gradients(dynamic):
    def quantize_twice(x, spec):
        return fq.fake_quantize(fq.fake_quantize(x, spec, scale=0.5), spec, scale=0.25)

    compiled = torch.compile(quantize_twice, backend="eager", fullgraph=True, dynamic=dynamic)
    for spec in map(fq.QuantSpec, ("float8_e4m3fn", "float8_e5m2", "nf4", "int4")):
        (y, dx), (compiled_y, compiled_dx) = (
            with_gradients(lambda inputs, one=one, spec=spec: [one(inputs[0], spec)], [torch.linspace(-500, 500, 77)])
            for one in (quantize_twice, compiled)
        )
        assert_same_bits(compiled_y[0], y[0], str(spec))
        assert_same_bits(compiled_dx[0], dx[0], str(spec))


@pytest.mark.exhaustive
def test_compiled_with_a_learned_scale():
    x = torch.randn(2, 40_000)
    learned, compiled_learned = (torch.tensor([0.01, 0.3], requires_grad=True) for _ in range(2))
    spec = fq.QuantSpec("int8", fq.PerChannel(0))

    def quantize(scale):
        return fq.fake_quantize(x, spec, scale=scale)

    y, compiled_y = quantize(learned), torch.compile(quantize, fullgraph=True)(compiled_learned)
    assert_same_bits(compiled_y, y)
    y.sum().backward()
    compiled_y.sum().backward()
    assert_same_bits(compiled_learned.grad, learned.grad)


@pytest.mark.parametrize(
    ("backend", "specs"),
    [
        # Each takes the C++ compiler about 10 s.
        pytest.param("inductor", ["float4_e2m1fn per_tensor stochastic"], marks=pytest.mark.exhaustive),
        ("aot_eager", ["int4 per_channel(0) stochastic", "nf4 per_block(-1:8,pad) stochastic", "uint8 stochastic"]),
    ],
)
def test_compiled_stochastic_rounding_takes_a_seed(backend, specs):
    x, seed = torch.randn(3, 41), torch.tensor(-9)

    def quantize_all(inputs):
        return [fq.fake_quantize(inputs[0], spec, seed=seed) for spec in specs]

    values, gradients = with_gradients(quantize_all, [x])
    compiled = torch.compile(quantize_all, fullgraph=True, backend=backend)
    compiled_values, compiled_gradients = with_gradients(compiled, [x])
    for got, wanted in zip(compiled_values + compiled_gradients, values + gradients, strict=True):
        assert_same_bits(got, wanted)


def test_compiled_stochastic_rounding_draws_a_seed_that_torch_decides():
    x = torch.full((1000,), 0.5)
    spec = "int8 per_tensor stochastic"
    compiled = torch.compile(lambda t: fq.fake_quantize(t, spec, scale=1.0), fullgraph=True, backend="aot_eager")
    torch.manual_seed(2)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(2)
    assert_same_bits(compiled(x), first)
    assert not torch.equal(first, second)
    assert 400 < first.sum() < 600


def test_exported_stochastic_rounding_draws_a_seed_per_call():
    class Noisy(torch.nn.Module):
        def forward(self, x):
            return fq.fake_quantize(x, "int8 per_tensor stochastic", scale=0.25)

    module, x = Noisy(), torch.randn(3, 7)
    exported = torch.export.export(module, (x,)).module()
    torch.manual_seed(3)
    right = [module(x), module(x)]
    torch.manual_seed(3)
    for wanted in right:
        assert_same_bits(exported(x), wanted)


class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.1, 0.2]))
        self.register_buffer("zero_point", torch.tensor([3, 4]))

    def forward(self, x):
        spec = fq.QuantSpec("uint8", fq.PerChannel(0))
        y = fq.fake_quantize(x, spec, scale=self.scale, zero_point=self.zero_point)
        return fq.fake_quantize(y + 1.0, "float8_e4m3fn per_token")


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export_has_one_node_per_call_with_the_specification_as_text(strict):
    module, x = Affine(), torch.randn(2, 7)
    shapes = {"x": {1: torch.export.Dim("columns")}}
    exported = torch.export.export(module, (x,), strict=strict, dynamic_shapes=shapes)
    nodes = [n for n in exported.graph.nodes if str(n.target).startswith("fakequant")]
    assert [n.args[-1] for n in nodes] == ["uint8 per_channel(0)", *["float8_e4m3fn per_token"] * 2]
    assert [str(n.target).split(".")[1] for n in nodes] == ["fake_quantize", "choose_scale", "fake_quantize"]
    for columns in (7, 3, 64):
        x = torch.randn(2, columns)
        assert_same_bits(exported.module()(x), module(x), str(columns))


@pytest.mark.parametrize(
    "text",
    [
        "uint8 per_channel(0) asymmetric reciprocal",
        "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    ],
)
def test_a_text_is_read_within_what_is_compiled(text):
    torch._dynamo.reset()
    x = torch.randn(4, 64)
    compiled = torch.compile(lambda x: fq.fake_quantize(x, text), backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x), fq.fake_quantize(x, text))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_compiled_result_is_no_tensor_of_another_operation(dtype):
    """Torch before 2.13 loses the gradient of such a result: dx is 0."""
    seen: list[torch.Tensor] = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function(*args, **(kwargs or {})))
            return seen[-1]

    spec, x = fq.QuantSpec("int8"), torch.randn(4, 8, dtype=dtype)
    params = fq.choose_qparams(x, spec)
    with Seen():
        y = Decomposed.forward(x, *tensors_of(params), spec)
    assert sum(one is y for one in seen) == 1


@pytest.mark.parametrize(
    "text", ["int8", "uint8 per_token", "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor"]
)
def test_large_tensors_are_quantized_by_their_range_as_one_node(text):
    spec, graphs = fq.QuantSpec.parse(text), []

    def backend(graph, _):
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph

    def quantize(x):
        return library.fake_quantize_dynamic(x, spec)

    for rows in (4, 512):
        x = torch.randn(rows, 256)
        assert_same_bits(torch.compile(quantize, fullgraph=True, backend=backend, dynamic=False)(x), quantize(x))
    assert ["fakequant.fake_quantize" in graph for graph in graphs] == [False, True]
    compiled = torch.compile(lambda inputs: [quantize(inputs[0])], fullgraph=True)
    for pairs in zip(*(with_gradients(f, [x]) for f in (compiled, lambda inputs: [quantize(inputs[0])])), strict=True):
        assert_same_bits(*(one[0] for one in pairs))


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        *((torch.float32, "int8 per_token"), (torch.float16, "uint8 per_tensor")),
        *((torch.float32, "int4 per_channel(0) input_range"), (torch.float16, "int8 per_token")),
        *((torch.float32, "uint8 per_tensor"), (torch.float16, "int4 per_channel(0) input_range")),
    ],
)
def test_compiled_function_transforms_have_the_eager_gradients(dtype, text):
    spec, x, weight = fq.QuantSpec.parse(text), (3 * torch.randn(8, 32)).to(dtype), torch.randn(8, 32).to(dtype)
    params = fq.choose_qparams(x / 2, spec)
    scale = params.scale

    def fixed(x, scale):
        return fq.fake_quantize(x, spec, scale=scale, zero_point=params.zero_point)

    def of_range(x, scale):
        return library.fake_quantize_dynamic(x, spec)

    for quantize in (fixed, of_range):

        def loss(x, scale, quantize=quantize):
            return (quantize(x, scale) * weight).sum()

        def moved(x, scale, quantize=quantize):
            return torch.func.jvp(lambda x: quantize(x, scale), (x,), (weight,))

        for function in (torch.func.grad(loss), torch.func.grad(loss, (0, 1)), moved):
            expected = function(x, scale)
            found = torch.compile(function, fullgraph=True, backend="aot_eager")(x, scale)
            for one, other in zip(*(y if isinstance(y, tuple) else (y,) for y in (found, expected)), strict=True):
                assert_same_bits(one, other)
