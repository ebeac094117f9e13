"""Sequential that joins ReLUs with quantizers: bits, gradients and what is seen are those of one after the other."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bits import assert_same_bits
from test_layers import CASES
from torch import nn

import fakequant as fq
from fakequant.model.config import Config, Rule, TensorConfig
from fakequant.nn.sequential import QuantSequential, takes_relu
from fakequant.ops.cpu.backend import load_kernels

CONV = (2, 3, 8, 7)
MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), (4, 6)),
    "first and last": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 8), nn.ReLU()), (4, 6)),
    "twice": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 5)), (4, 6)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.MaxPool2d(2)
        ),
        CONV,
    ),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)), CONV),
    "one image": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 3)), CONV[1:]),
    "images of a pixel": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), (2, 3, 1, 1)),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            nn.Sequential(nn.Sequential(nn.Linear(8, 3))),
        ),
        (4, 6),
    ),
    "nested, in float first": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))),
        (4, 6),
    ),
    "between float layers": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.ReLU()), (4, 6)),
}  # fmt: skip


def hostile(shape, dtype=torch.float32):
    x = torch.randint(-300, 300, shape, generator=torch.Generator().manual_seed(1)) / 128
    special = torch.tensor([0.0, -0.0, 3e38, 1e-45, -1e-45, 2e-3, -3e38])
    x.view(-1)[: min(len(special), x.numel())] = special[: x.numel()]
    return x.to(dtype)


def apart(model):
    """A copy whose modules run one after the other."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) is QuantSequential:
            module.__class__ = nn.Sequential
    return twin


def made(name="linear", config=fq.presets.INT8, execution="simulate", dtype=torch.float32):
    """A calibrated model and an input for it."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = fq.prepare(make().to(dtype), config)
    fq.calibrate(model, [torch.randn(shape, dtype=dtype)], progress=False)
    return fq.set_execution(model, execution), hostile(shape, dtype)


def results(model, x, *, train=True):
    """The output, the gradients of the input and of all parameters, and the state afterwards."""
    model.train(train).zero_grad()
    x = x.clone().requires_grad_()
    y = model(x * 1.0)
    y.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        return [y.detach(), x.grad, *gradients, *model.state_dict().values(), model(x.detach() * 1.0)]


def assert_same(model, x, label=""):
    twin = apart(model)
    assert type(model) is QuantSequential
    assert type(twin) is nn.Sequential
    for train in (True, False):
        for got, wanted in zip(results(model, x, train=train), results(twin, x, train=train), strict=True):
            assert_same_bits(got, wanted, label)
            assert got.stride() == wanted.stride()


@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name, execution):
    assert_same(*made(name, execution=execution))


@pytest.mark.parametrize("preset", ["INT8", "INT8_WEIGHT_ONLY", "INT4_WEIGHT_ONLY", "FP8", "NVFP4"])
def test_same_bits_of_every_kind_of_quantizer(preset):
    """With given and with dynamic ranges, and without a quantizer of the input."""
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)
    model = fq.prepare(nn.Sequential(*layers), preset)
    fq.calibrate(model, [torch.randn(8, 32)], progress=False)
    assert_same(model, hostile((8, 32)))


@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_same_bits_of_every_dtype(dtype, execution):
    assert_same(*made("convolutions", execution=execution, dtype=dtype))


@pytest.mark.parametrize("gradient", fq.Gradient, ids=lambda gradient: gradient.value)
@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_same_bits_of_every_gradient(gradient, execution):
    spec = fq.QuantSpec("uint4", gradient=gradient)
    config = Config("test", (Rule("*", TensorConfig(spec), "int8 per_channel(0)"),))
    assert_same(*made("convolutions", config, execution=execution))


@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_same_bits_channels_last_and_with_nan(execution):
    model, x = made("convolutions", execution=execution)
    last = x.to(memory_format=torch.channels_last)
    assert_same(model, last)
    x[0, 0, 0, 0] = torch.nan
    assert_same(model, x)


@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_same_bits_of_a_picture_without_an_axis_for_images(execution):
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 3, 2)), fq.presets.INT8)
    picture = torch.randn(7, 6, 4).permute(2, 0, 1)
    fq.calibrate(model, [picture], progress=False)
    assert_same(fq.set_execution(model, execution), picture)


@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_same_bits_of_learned_off_observing_and_dynamic_quantizers(execution):
    model, x = made(execution=execution)
    quantizer = model[2]._input_quantizer
    for mode in (fq.nn.Mode.OFF, fq.nn.Mode.QUANTIZE):
        quantizer.mode = mode
        assert_same(model, x, mode)
    quantizer.dynamic = True
    assert_same(model, x, "dynamic")
    quantizer.spec = fq.QuantSpec("uint8")
    assert_same(model, x, "dynamic, and the range without the ReLU is another")
    quantizer.spec, quantizer.dynamic = fq.QuantSpec("int8"), False
    quantizer.learn("lsq")
    assert_same(model, x, "learned")
    seen = []
    quantizer.stop_learning()
    quantizer.observe = seen.append
    quantizer.mode = fq.nn.Mode.OBSERVE
    with torch.no_grad():
        model(x)
    assert seen[0].min() == 0


def operators_of(function):
    with torch.profiler.profile() as profile:
        function()
    return [event.name for event in profile.events()]


@pytest.mark.parametrize("execution", ["simulate", "auto"])
@pytest.mark.parametrize("inplace", [False, True])
def test_relus_are_not_run_and_save_nothing(execution, inplace):
    """What it is for; in evaluation too."""
    if reason := load_kernels():
        pytest.skip(reason)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace), nn.Conv2d(8, 8, 1), nn.ReLU(inplace)
    model = fq.prepare(nn.Sequential(*layers, nn.Conv2d(8, 2, 1)), fq.presets.INT8)
    x = torch.randn(2, 3, 8, 8)
    fq.set_execution(model, execution)
    fq.calibrate(model, [x], progress=False)
    for one, count in ((model, 0), (apart(model), 2)):
        names = operators_of(lambda one=one: one(x).sum().backward())
        relu = "aten::relu_" if inplace else "aten::relu"
        assert names.count(relu) == names.count("aten::threshold_backward") == count
        with torch.no_grad():
            assert operators_of(lambda one=one: one.eval()(x)).count(relu) == count


@pytest.mark.parametrize("layer", [cls for cls in fq.nn.layers().values() if hasattr(cls, "forward_after_relu")])
def test_every_layer_that_takes_a_relu_computes_it(layer):
    """Whatever the layer: its `forward_after_relu` is its `forward` of the ReLU, and not of x."""
    float_layer, (x,) = copy.deepcopy(next(case for case in CASES.values() if type(case[0]) is layer.float_class))
    x = x - 2.0
    fq.prepare(float_layer, Config("test", (Rule("*", "int8", "int8 per_channel(0)"),)))
    fq.calibrate(float_layer, [x], progress=False)
    assert takes_relu(float_layer)
    calls = float_layer.forward_after_relu(x), float_layer(torch.relu(x)), float_layer(x)
    found, after, without = (y[0] if isinstance(y, tuple) else y for y in calls)
    assert_same_bits(found, after)
    assert not torch.equal(found, without)


@pytest.mark.parametrize("preset", ["INT8_WEIGHT_ONLY", "NVFP4"])
def test_a_relu_runs_as_before_where_it_cannot_be_joined(preset):
    """In place, if it says so: no memory is taken for its result."""
    layers = nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32)
    model = fq.prepare(nn.Sequential(*layers), preset)
    assert not takes_relu(model[2])
    with torch.no_grad():
        assert operators_of(lambda: model(torch.randn(4, 32))).count("aten::relu_") == 1


@pytest.mark.parametrize("name", ["linear", "convolutions"])
def test_products_of_codes_may_be_changed_in_place(name):
    model, x = made(name, execution="auto")
    for one in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x[None]):
        y = model[0](one.clone().requires_grad_())
        assert y.grad_fn.name() == "_ProductBackward"
        torch.relu_(y).sum().backward()


def test_two_gradients_of_one_input_are_summed():
    model, x = made()
    leaf = x.requires_grad_()
    (first,) = torch.autograd.grad(model(leaf).sum() + leaf.sum(), leaf)
    (second,) = torch.autograd.grad(apart(model)(leaf).sum() + leaf.sum(), leaf)
    assert_same_bits(first, second)


def test_slices_copies_pickles_and_names():
    model, x = made("nested")
    assert takes_relu(model[2])
    plain = MODELS["nested"][0]()
    assert list(plain.state_dict()) == [name for name in model.state_dict() if "quantizer" not in name]
    with torch.no_grad():
        assert_same_bits(model[:2](x), torch.relu(model[0](x)))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other) is QuantSequential
            assert_same_bits(other(x), model(x))


def test_only_sequentials_with_quantized_layers_change_and_no_subclasses():
    class Own(nn.Sequential):
        pass

    model = nn.Sequential(Own(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Sequential(nn.ReLU()))
    fq.prepare(model, fq.presets.INT8)
    assert [type(module) for module in (model, model[0], model[1])] == [QuantSequential, Own, nn.Sequential]


def test_loaded_models_join_them_too(tmp_path):
    model, x = made("nested")
    fq.save(model, tmp_path)
    loaded = fq.load(MODELS["nested"][0](), tmp_path).eval()
    assert type(loaded) is QuantSequential
    with torch.no_grad():
        assert_same_bits(loaded(x), model.eval()(x))


@pytest.mark.parametrize("execution", ["simulate", "auto"])
def test_compilers_and_transforms_see_modules(execution):
    model, x = made(execution=execution)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_same_bits(compiled(x), apart(model)(x))
        assert_same_bits(torch.func.vmap(model)(x[:, None]), torch.func.vmap(apart(model))(x[:, None]))
    assert any("relu" in str(node.target) for node in torch.export.export(model, (x,)).graph.nodes)
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert_same_bits(tangent, torch.func.jvp(apart(model), (x,), (torch.ones_like(x),))[1])


def test_batches_of_gradients_of_images_of_a_pixel():
    model, x = made("images of a pixel")
    found = []
    for one in (model, apart(model)):
        leaf = x.clone().requires_grad_()
        y = one(leaf)
        found.append(torch.autograd.grad(y, leaf, torch.eye(y.numel()).view(-1, *y.shape), is_grads_batched=True)[0])
    assert_same_bits(*found)


def test_second_derivatives():
    model, x = made()
    found = []
    for one in (model, apart(model)):
        leaf = x.clone().clamp(-4, 4).requires_grad_()
        (dx,) = torch.autograd.grad(one(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), leaf)[0])
    assert_same_bits(*found)


def test_wrong_inputs_are_refused_as_before():
    model, _ = made()
    with pytest.raises(TypeError, match="relu"):
        model[1:]((torch.ones(2),))
    with pytest.raises(RuntimeError):
        model[1:](torch.ones(4, 7))


def test_several_threads_at_once():
    model, x = made("convolutions", execution="auto")
    model.eval()
    with torch.no_grad():
        expected = model(x)

    def run(_):
        with torch.no_grad():
            return model(x)

    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(run, range(40)):
            assert_same_bits(y, expected)
