import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import CalibrationError, GraphError
from fakequant.model.presets import presets
from tests.support.bits import assert_same_bits
from tests.support.graphs import assert_same_step, step
from tests.support.matrix import full, in_turn, sweep
from tests.support.models import images, small_net
from tests.support.networks import NETWORKS, PRESETS, quantized

DYNAMIC = torch.export.Dim.DYNAMIC


@sweep("network, preset", full(NETWORKS, PRESETS), in_turn(NETWORKS, PRESETS))
def test_networks_keep_every_bit_and_gradient(network, preset):
    model, x = quantized(network, preset)
    graph = ir.capture(model, x)
    assert graph.validate()
    expected = step(model, model, x)
    assert_same_bits(graph.run(x), expected[0])
    assert_same_step(step(graph.to_torch(), model, x), expected)


@sweep("preset", full(presets()), full(["INT8_AFFINE", "FP8", "MXFP4", "NVFP4", "NF4_WEIGHT_ONLY"]))
def test_every_preset_is_captured(preset):
    model, x = fq.prepare(small_net(), presets()[preset]), images()
    fq.calibrate(model, [x])
    graph = ir.capture(model, x)
    quantizers = sum(op.op_type == "FakeQuantize" for op in graph.ops)
    active = [q for q in model.modules() if isinstance(q, fq.nn.Quantizer)]
    assert quantizers >= len(active) > 0
    ours, theirs = step(graph.to_torch(), model, x), step(model, model, x)
    if any(rule.gradient is not None for rule in presets()[preset].rules):
        ours, theirs = ours[:1], theirs[:1]  # a graph quantizes no gradients
    assert_same_step(ours, theirs)


class Calls(nn.Module):
    """A model of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))

    def forward(self, *args: Tensor, **kwargs: Tensor):
        return self.function(self, *args, **kwargs)


def in_place(self, x):
    y = (x * self.weight).add_(1.0).relu_()
    return y + x


def in_place_through_a_view(self, x):
    y = x * self.weight
    y.view(-1)[2:5].mul_(3.0)
    return y.t() + self.weight.t()


def several(self, x):
    return {"b": x + 1, "a": (x.detach() * x, None)}


def an_index(self, x):
    return x[:, [0, 2]] + self.weight[torch.tensor([True, False, True])].sum()


def gathered_and_padded(self, x):
    return nn.functional.pad(x * self.weight, (1, 2)).cumsum(1).logsumexp(0) * x.std()


def stochastic(self, x):
    return fq.fake_quantize(x, "int4 per_token stochastic", seed=7) @ self.weight.t()


def given_scale(self, x):
    y = fq.fake_quantize(
        x, fq.QuantSpec("uint8", fq.PerChannel(0)), scale=torch.full((3,), 0.01), zero_point=torch.full((3,), 100.0)
    )
    return y * self.weight


def a_scale_that_is_trained(self, x):
    return fq.fake_quantize(x, "int4", scale=self.weight.abs().mean())


def range_of_another(self, x):
    scale = fq.choose_qparams(self.weight, "int8").scale
    return fq.fake_quantize(x * self.weight, "int8", scale=scale)


FUNCTIONS = [
    *(in_place, in_place_through_a_view, an_index, gathered_and_padded, stochastic, given_scale),
    *(a_scale_that_is_trained, range_of_another),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_models_of_one_function(function):
    model, x = Calls(function), torch.randn(3, 4)
    graph = ir.capture(model, x)
    assert_same_step(step(graph.to_torch(), model, x), step(model, model, x))


def test_several_outputs_come_in_the_order_of_leaves():
    x = torch.randn(3, 4)
    for got, wanted in zip(ir.capture(Calls(several), x).run(x), (x + 1, x * x), strict=True):
        assert_same_bits(got, wanted)


def test_inputs_by_name():
    model = Calls(lambda self, a, b: a - b)
    graph = ir.capture(model, {"b": torch.ones(2), "a": torch.zeros(2)})
    names = [value.name for value in graph.inputs.values()]
    given = {"a": torch.full((2,), 5.0), "b": torch.ones(2)}
    assert_same_bits(graph.run(*(given[name] for name in names)), torch.full((2,), 4.0))


@pytest.mark.parametrize("preset", ["INT8", "INT8_PER_TOKEN", "INT8_AFFINE"])
def test_dynamic_batches(preset):
    model = fq.prepare(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), preset)
    fq.calibrate(model, [torch.randn(4, 1, 8, 8)])
    graph = ir.capture(model, torch.randn(4, 1, 8, 8), dynamic_shapes=({0: DYNAMIC},))
    assert next(iter(graph.inputs.values())).type.shape == (-1, 1, 8, 8)
    assert graph.types()[graph.outputs[0]].shape == (-1, 5)
    module, compiled = graph.to_torch(), graph.compile()
    for count in (2, 7):
        x = torch.randn(count, 1, 8, 8)
        assert_same_bits(module(x), model(x))
        assert_same_bits(compiled(x), model(x))


def test_sizes_are_computed():
    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0] * 2, -1).sum(0, keepdim=True).expand(x.shape[0] + 1, -1) * x.shape[0]

    model = Sizes()
    graph = ir.capture(model, torch.randn(3, 4), dynamic_shapes=({0: DYNAMIC},))
    assert {"Size", "IndexMul"} <= {op.op_type for op in graph.ops}
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        assert_same_bits(graph.run(x), model(x))


def test_training_the_graph_trains_the_model():
    model, x = quantized("CNN", "INT8")
    graph = ir.capture(model, x)
    module = graph.to_torch()
    assert {id(p) for p in module.parameters()} == {id(p) for p in model.parameters()}
    assert module.state_dict().keys() <= model.state_dict().keys()
    before = module(x)
    with torch.no_grad():
        model.get_parameter("first.weight").mul_(3.0)
    assert not torch.equal(module(x), before)
    assert_same_bits(module(x), model(x))


def test_learned_ranges_are_constants_and_come_back():
    model, x = fq.prepare(nn.Sequential(nn.Linear(4, 3)), "INT8"), torch.randn(5, 4)
    fq.calibrate(model, [x])
    model[0]._input_quantizer.learn("lsq")
    expected = model(x)
    assert_same_bits(ir.capture(model, x).run(x), expected)
    assert model[0]._input_quantizer.learned is not None


def buffer_changed(self, x):
    self.counter.add_(1)
    return x + self.counter


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x: (x, 3), "the model returns .*3.*, but a graph returns tensors"),
        (lambda self, x: None, "returns no tensor"),
        (lambda self, x: x.to_sparse(), "sparse"),
        (lambda self, x: x[:0], "dimension 0"),
        (lambda self, x: x.to(torch.float8_e4m3fn), "float8_e4m3fn cannot be in a graph"),
        (lambda self, x: x.relu_(), "changes .* in place"),
        (buffer_changed, "changes counter in place"),
    ],
)
def test_what_cannot_be_captured_is_named(function, message):
    model = Calls(function)
    model.register_buffer("counter", torch.zeros(1))
    with pytest.raises(GraphError, match=message):
        ir.capture(model, torch.randn(3, 4))


@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda self, x: x * x.shape[0] ** 0.5, "sym_float"), (lambda self, x: x / -x.shape[0], "neg")],
)
def test_arithmetic_with_sizes_is_named_with_its_module(function, name):
    model, auto = nn.Sequential(nn.ReLU(), Calls(function)), torch.export.Dim.AUTO
    with pytest.raises(GraphError, match=rf"^1: {name}: ") as found:
        ir.capture(model, torch.randn(3, 4), dynamic_shapes=({0: auto},))
    assert "0x" not in str(found.value)


def test_batch_statistics_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train()
    with pytest.raises(GraphError, match=r"model.eval\(\)"):
        ir.capture(model, torch.randn(2, 1, 8, 8))


def test_a_quantizer_without_a_range_is_named():
    with pytest.raises(CalibrationError, match=r"0\._input_quantizer has not been calibrated"):
        ir.capture(fq.prepare(nn.Sequential(nn.Linear(4, 2)), "INT8"), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("function", "shape", "dynamic"),
    [
        (lambda self, x: F.linear(x, self.weight, self.weight[0, :1]), (2, 4), False),
        (lambda self, x: F.max_pool2d(x, 4, ceil_mode=True), (1, 1, 3, 3), False),
        (lambda self, x: F.avg_pool2d(x, 4, 3, ceil_mode=True), (1, 1, 3, 3), False),
        (lambda self, x: x.squeeze(), (3, 1, 4), True),
        (lambda self, x: x.squeeze(0), (3, 1, 4), True),
    ],
    ids=["bias of one", "maximum of less than a window", "average of less", "squeeze", "squeeze of a dynamic one"],
)
def test_what_torch_allows_at_the_edges(function, shape, dynamic):
    model, x = Calls(function), torch.randn(shape)
    shapes = (({0: torch.export.Dim("n", min=2)},),) if dynamic else None
    assert_same_bits(ir.capture(model, x, dynamic_shapes=shapes).run(x), model(x))


def test_automatic_types_are_refused():
    def function(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, self.weight)

    with pytest.raises(GraphError, match=r"under torch\.autocast.* model\.bfloat16"):
        ir.capture(Calls(function), torch.randn(2, 4))


@pytest.mark.parametrize("arguments", [{}, {"padding_idx": 2}, {"include_last_offset": True}], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode, arguments):
    """torch makes more than the bags, which nothing reads, and contradicts itself about the shapes of that."""
    model = nn.EmbeddingBag(8, 3, mode=mode, **arguments)
    ids, offsets = torch.tensor([1, 2, 3, 4, 2, 2, 0]), torch.tensor([0, 2, 2, 5])
    graph = ir.capture(model, (ids, offsets))
    assert_same_bits(graph.run(ids, offsets), model(ids, offsets))


@pytest.mark.parametrize("prepared", [False, True])
def test_transformer_encoders_are_captured_beside_the_fast_path_of_torch(prepared):
    """The graph is the model where gradients are enabled, or torch's fast path is off: in every mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 5, 16)
    if prepared:
        fq.calibrate(fq.prepare(model, "int8"), [x])
    expected = model(x)
    with torch.no_grad():
        graph = ir.capture(model, x)
        assert_same_bits(graph.run(x), expected)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert_same_bits(model(x), expected)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert_same_bits(graph.run(x), expected)
    assert_same_step(step(graph.to_torch(), model, x), step(model, model, x))


def concatenated(self, x: Tensor) -> Tensor:
    """A part without elements, and labels that are integers."""
    labels = torch.ones(len(x), 1, dtype=torch.int32)
    return torch.cat([torch.cat([x * 2, x[:, x.shape[1] :]], dim=1), labels], dim=1)


def selected(self, x: Tensor) -> Tensor:
    """A part whose length depends on data."""
    return torch.cat([x.flatten().nonzero().flatten(), torch.arange(3)])


@pytest.mark.parametrize("function", [concatenated, selected])
def test_concatenations_of_all_kinds_of_parts(function):
    model, x = Calls(function).eval(), torch.tensor([[1.0, 0.0, 2.0]])
    graph = ir.capture(model, x)
    assert torch.equal(graph.run(x), model(x))
    assert [op.op_type for op in graph.ops if op.op_type in ("Slice", "Cast")] == ["Cast"] * (function is concatenated)


def test_weights_standardized_by_batch_norm_without_statistics():
    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
            return F.conv2d(x, weight.view_as(self.weight), self.bias)

    model, x = Standardized(3, 4, 3).eval(), torch.randn(2, 3, 6, 6)
    assert torch.equal(fq.ir.capture(model, x).run(x), model(x))
