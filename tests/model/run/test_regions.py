"""Parts of a model without gradients or autocast: their bits are computed, and no gradient is that the model lacks."""

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import ir
from fakequant.errors import ExportError, GraphError
from tests.support.bits import assert_same_bits
from tests.support.vision import import_torchvision


class Parts(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.register_buffer("steps", torch.arange(4.0))

    def forward(self, x):
        return self.function(self, x)


def a_range(self, x):
    with torch.no_grad():
        scale = self.weight.amax()
    return x * scale


def a_rotation(self, x):
    with torch.no_grad():
        angles = self.steps * self.weight
        cos, sin = angles.cos(), angles.sin()
    return x * cos + self.weight * sin


def returned_as_it_came(self, x):
    with torch.no_grad():
        same, other = x, x * 2
    return same * self.weight, other


def changed_in_place(self, x):
    with torch.no_grad():
        y = x + self.weight
        y.mul_(3)
    return x * y


def changed_through_a_view(self, x):
    with torch.no_grad():
        y = x + self.weight
        y.view(-1)[1:3].mul_(3)
    z = x * self.weight
    z.view(-1)[2:5].mul_(2.0)
    return z * y


def one_in_the_other(self, x):
    with torch.no_grad():
        low = self.weight.amin()
        with torch.enable_grad():
            high = self.weight.amax()
        middle = low + high
    return x * middle + high


def two_parts(self, x):
    with torch.no_grad():
        a = self.weight * 2
    y = x * a
    with torch.no_grad():
        b = y.amax() + self.weight.amin()
    return y * b


def all_of_it(self, x):
    with torch.no_grad():
        return x * self.weight


FUNCTIONS = [a_range, a_rotation, returned_as_it_came, changed_in_place, changed_through_a_view, one_in_the_other]
FUNCTIONS += [two_parts, all_of_it]


def step(function, model, x):
    """Outputs, whether each has a gradient, and the gradients of the input and of all parameters."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    found = function(leaf)
    outputs = found if isinstance(found, tuple) else (found,)
    moved = [y for y in outputs if y.requires_grad]
    if moved:
        torch.autograd.backward(moved, [torch.linspace(-1, 1, y.numel()).view_as(y) for y in moved])
    gradients = [leaf.grad, *(p.grad for p in model.parameters())]
    return [y.detach() for y in outputs], [y.requires_grad for y in outputs], gradients


def assert_same_step(actual, expected):
    assert actual[1] == expected[1]
    for got, wanted in zip([*actual[0], *actual[2]], [*expected[0], *expected[2]], strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(got, wanted)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_model(function, mode):
    model, x = Parts(function), torch.randn(2, 4)
    with mode():
        graph = ir.capture(model, x)
    expected = step(model, model, x)
    assert_same_step(step(graph.to_torch(), model, x), expected)
    assert_same_step(step(graph.compile(), model, x), expected)
    with torch.no_grad():
        found, wanted = graph.run(x), model(x)
    for got, want in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        assert_same_bits(got, want)


def test_the_graph_of_the_gradients_leaves_them_out():
    model, x = Parts(a_rotation), torch.randn(2, 4)
    dx, dw = ir.capture(model, x).backward().run(x, torch.ones(2, 4))
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(model(leaf), [leaf, model.weight], torch.ones(2, 4))
    assert_same_bits(dx, expected[0])
    assert_same_bits(dw, expected[1])


def test_other_control_flow_is_named():
    def function(self, x):
        with torch.no_grad():
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with pytest.raises(GraphError, match="cond"):
        ir.capture(Parts(function), torch.randn(2, 4))


TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {
    "LlamaForCausalLM": ("LlamaConfig", {"num_key_value_heads": 2}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {"num_key_value_heads": 2, "head_dim": 8}),
}


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_models_are_captured(name):
    import_torchvision()  # which transformers imports
    import transformers

    config, further = ROTARY[name]
    torch.manual_seed(0)
    # "eager": its other attention has a mask in a traced model and none otherwise, with other last bits.
    given = getattr(transformers, config)(**TINY, **further, use_cache=False, attn_implementation="eager")
    model = getattr(transformers, name)(given).eval()
    ids = torch.arange(14).reshape(2, 7)
    fq.calibrate(fq.prepare(model, "int8"), [ids])
    graph = ir.capture(model, ids)
    expected = model(ids).logits
    assert_same_bits(graph.run(ids), expected)
    dy = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected, parameters, dy)
    for got, want in zip(torch.autograd.grad(graph.to_torch()(ids), parameters, dy), wanted, strict=True):
        assert_same_bits(got, want)
    # For the gradient of a weight, torch.matmul uses another matrix product, with other last bits: both without.
    model.requires_grad_(False)
    with torch.no_grad():
        assert_same_bits(ir.capture(model, ids).run(ids), model(ids).logits)


class Regions(nn.Module):
    def __init__(self, region):
        super().__init__()
        torch.manual_seed(0)
        self.region, self.q, self.k = region, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.region(self, x)


def a_function(self, x):
    q, k = self.q(x), self.k(x)
    with torch.autocast("cpu", enabled=False):
        return q.float() @ k.float().mT


def a_layer(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.k(self.q(x))


def nested(self, x):
    with torch.no_grad():
        y = self.q(x)
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            y = self.k(y) + x
    return y * 2


def two_results(self, x):
    with torch.autocast("cpu", enabled=False):
        q, k = self.q(x), self.k(x)
    return q, q + k


@pytest.mark.parametrize(
    ("region", "target"),
    [
        *((a_function, "onnxruntime"), (a_layer, None), (nested, "onnxruntime"), (two_results, None)),
        *((a_function, None), (a_layer, "onnxruntime"), (nested, None), (two_results, "onnxruntime")),
    ],
)
def test_regions_without_autocast_are_exported(region, target, tmp_path):
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(Regions(region).eval(), "int8", x, **({"target": target} if target else {}))
    fq.calibrate(model, [x])
    assert fq.verify_onnx(fq.export_onnx(model, x, tmp_path / "m.onnx").path, model, [x]).exact


@pytest.mark.parametrize("region", [a_function, a_layer, two_results])
def test_regions_without_autocast_are_captured(region):
    model, x = Regions(region), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    found, expected = ir.capture(model, x).run(x), model(x)
    for one, other in zip(*((y if isinstance(y, (tuple, list)) else [y]) for y in (found, expected)), strict=True):
        assert_same_bits(one, other)


def test_a_region_under_autocast_is_named(tmp_path):
    pytest.importorskip("onnxruntime")

    def cast(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.q(x)

    model, x = fq.prepare(Regions(cast).eval(), "int8"), torch.randn(2, 8)
    fq.calibrate(model, [x], unseen="float")
    with pytest.raises(ExportError, match=r"q._input_quantizer: lies inside control flow .* or torch.autocast"):
        fq.export_onnx(model, x, tmp_path / "m.onnx")
