"""FakeQuant and FakeQuantGrad: the vectors of ONNX Runtime's own kernels, the public wheel, and files of models."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import fakequant as fq
from fakequant.compat.onnxruntime import attach_functions, export_fake_quant, fake_quant, fake_quant_grad
from fakequant.errors import DTypeError, ExportError, OutputError, QParamsError, ShapeError, SpecError
from tests.support.bits import assert_same_bits
from tests.support.compat_exactness import recorded_kernels
from tests.support.onnxruntime_models import LEVELS, run

NOTES, (*RECORDED, EDGES) = recorded_kernels()
OPSETS = range(15, 27)
KINDS = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}


def training_step(attributes, opset=17, kind=TensorProto.FLOAT, ir_version=8, of=()):
    """A model with both nodes, without the functions; `of` is the shape of scale and zero point."""
    nodes = [
        helper.make_node("FakeQuant", ["x", "scale", "point"], ["y", "mask"], domain="com.microsoft", **attributes),
        helper.make_node("FakeQuantGrad", ["dy", "mask"], ["dx"], domain="com.microsoft"),
    ]
    return model_of(nodes, opset, kind, ir_version, of)


def model_of(nodes, opset=17, kind=TensorProto.FLOAT, ir_version=8, of=()):
    value = helper.make_tensor_value_info
    inputs = [value("x", kind, None), value("scale", kind, of), value("point", kind, of), value("dy", kind, None)]
    outputs = [value("y", kind, None), value("mask", TensorProto.BOOL, None), value("dx", kind, None)]
    graph = helper.make_graph(nodes, "step", inputs, outputs)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def in_torch(x, dy, scale, point, attributes):
    """y, mask and dx by torch, dx also by autograd."""
    leaf = x.clone().requires_grad_()
    y, mask = fake_quant(leaf, scale, point, **attributes)
    dx = fake_quant_grad(dy, mask)
    assert_same_bits(torch.autograd.grad(y, leaf, dy)[0], dx)
    return y.detach(), mask, dx


def assert_runs_as_torch(attached, x, attributes, of=(), **options):
    """With the scale 0.1 and the zero point 3."""
    dy = torch.randn(x.shape).to(x.dtype)
    scale, point = torch.full(of, 0.1, dtype=x.dtype), torch.full(of, 3.0, dtype=x.dtype)
    found = run(attached, x, scale, point, dy, **options)
    for got, right in zip(found, in_torch(x, dy, scale, point, attributes), strict=True):
        assert_same_bits(got, right)


def hostile(dtype=torch.float32, elements=2000):
    """Ties of the scale 0.1 and their neighbours, and all that is special."""
    info, nan, inf = torch.finfo(dtype), float("nan"), float("inf")
    ties = ((torch.randint(-12, 270, (elements,)) + 0.5) * 0.1).to(dtype)
    special = torch.tensor([0.0, -0.0, nan, inf, -inf, info.max, info.min, info.tiny, info.tiny / 8], dtype=dtype)
    return torch.cat([ties, torch.nextafter(ties.float(), ties.float() + 1).to(dtype), special])


def assert_same_but_signs_of_zero(actual, expected):
    assert_same_bits(actual + 0.0, expected + 0.0)


@pytest.mark.parametrize("call", RECORDED, ids=lambda c: f"{c.attributes} {c.scale:g} {c.zero_point:g}")
def test_the_kernels_give_the_same(call):
    found = in_torch(call.x, call.dy, call.scale, call.zero_point, call.attributes)
    assert_same_bits(found[0], call.y)
    assert_same_bits(found[1], call.mask)
    assert_same_but_signs_of_zero(found[2], call.dx)  # the kernel multiplies by the mask
    attached = attach_functions(training_step(call.attributes))
    given = np.float32(call.scale), np.float32(call.zero_point)
    for got, right in zip(run(attached, call.x, *given, call.dy), found, strict=True):
        assert_same_bits(got, right)


def test_the_kernel_was_preferred_to_a_function_when_the_calls_were_recorded():
    assert NOTES["prefers_its_kernel"]
    assert len(RECORDED) > 10


def test_what_the_kernel_does_at_the_edges_is_known_and_not_done_here():
    assert_same_bits(EDGES.y, torch.full((5,), -0.3))
    assert EDGES.dx[:3].isnan().all()
    y, mask, dx = in_torch(EDGES.x, EDGES.dy, 0.1, 3.0, {})
    assert_same_bits(y, torch.tensor([torch.nan, 25.2, -0.3, 25.2, -0.3]))
    assert_same_bits(mask, EDGES.mask)
    assert_same_bits(dx, torch.zeros(5))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("opset", OPSETS)
def test_attached_functions_in_the_public_wheel(opset, level):
    for attributes in ({}, {"quant_min": -128, "quant_max": 127}, {"quant_max": 7500}):
        attached = attach_functions(training_step(attributes, opset))
        for x in (hostile(), torch.tensor(0.26), torch.empty(0), hostile()[:10].view(2, 5)):
            assert_runs_as_torch(attached, x, attributes, level=level)


def test_float16_and_parameters_of_one_element():
    """float16 is computed in float32."""
    attached = attach_functions(training_step({}, kind=TensorProto.FLOAT16))
    assert_runs_as_torch(attached, hostile(torch.float16), {})
    for x in (torch.tensor(0.26), hostile()):
        assert_runs_as_torch(attach_functions(training_step({}, of=(1,))), x, {}, of=(1,))


@pytest.mark.parametrize("attributes", [{}, {"quant_max": 15}], ids=str)
def test_the_reference_evaluator_gives_the_same(attributes):
    x = hostile()
    dy = torch.randn(x.shape)
    feeds = {"x": x, "scale": torch.tensor(0.1), "point": torch.tensor(3.0), "dy": dy}
    attached = attach_functions(training_step(attributes))
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(attached).run(None, {name: value.numpy() for name, value in feeds.items()})
    for got, right in zip(found, in_torch(x, dy, 0.1, 3.0, attributes), strict=True):
        assert_same_bits(torch.from_numpy(np.asarray(got)), right)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_scale_of_zero_fails_when_the_model_runs(zero, level):
    one = torch.ones(3)
    with pytest.raises(Exception, match="out of data bounds"):
        run(attach_functions(training_step({})), one, torch.tensor(zero), torch.tensor(0.0), one, level=level)


def test_parameters_of_two_elements_fail_when_the_model_runs():
    attached = attach_functions(training_step({}, of=None))
    x, one, two = np.ones(3, np.float32), np.ones(1, np.float32), np.ones(2, np.float32)
    for scale, point in ((two, one), (one, two)):
        with pytest.raises(Exception, match="Reshape"):
            run(attached, x, scale, point, x)


def test_without_the_functions_the_public_wheel_refuses_the_model():
    with pytest.raises(Exception, match="FakeQuant"):
        run(training_step({}), *[np.ones(1, np.float32)] * 4)


def assert_quantizes(attached):
    """y of the file is that of 4 bits without a sign."""
    x, one = hostile()[:100], torch.ones(1)
    y = run(attached, x, torch.tensor(0.1), torch.tensor(3.0), one)[0]
    assert_same_bits(y, fake_quant(x, 0.1, 3.0, quant_max=15)[0])


def test_a_kernel_of_the_runtime_is_preferred_to_a_function():
    """Gelu has a kernel in the public wheel; the function of that name returns its input."""
    value = helper.make_tensor_value_info
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    graph = helper.make_graph([node], "g", [value("x", 1, [2])], [value("y", 1, [2])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    identity = helper.make_node("Identity", ["x"], ["y"])
    wrong = helper.make_function("com.microsoft", "Gelu", ["x"], ["y"], [identity], opsets[:1])
    x = torch.tensor([1.0, -2.0])
    (y,) = run(helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[wrong]), x)
    torch.testing.assert_close(y, nn.functional.gelu(x))
    assert not torch.equal(y, x)


def test_attaching_changes_nothing_else():
    model = training_step({"quant_min": 0, "quant_max": 255})
    before = model.SerializeToString()
    attached = attach_functions(model)
    assert model.SerializeToString() == before
    assert [(f.domain, f.name) for f in attached.functions] == [
        ("com.microsoft", "FakeQuant"),
        ("com.microsoft", "FakeQuantGrad"),
    ]
    assert attached.ir_version == 9
    assert attached.graph == model.graph
    assert attach_functions(attached) == attached


@pytest.mark.parametrize("opset", [15, 18, 21, 26])
def test_models_with_the_functions_are_valid(opset):
    attached = attach_functions(training_step({}, opset))
    for value in (*attached.graph.input, *attached.graph.output):
        value.type.tensor_type.shape.SetInParent()
    onnx.checker.check_model(attached, full_check=True)


@pytest.mark.parametrize("outputs", [["y"], ["y", ""], ["y", "mask"]], ids=str)
def test_nodes_get_the_mask_and_the_attributes_that_they_leave_out(outputs):
    node = helper.make_node("FakeQuant", ["x", "scale", "point"], outputs, domain="com.microsoft", quant_max=15)
    (complete,) = attach_functions(model_of([node])).graph.node
    assert {a.name: a.i for a in complete.attribute} == {"quant_min": 0, "quant_max": 15}
    assert list(complete.output) == ["y", "mask" if "mask" in outputs else "y/quantization_mask"]


def test_only_what_a_model_uses_is_attached():
    forward = helper.make_node("FakeQuant", ["x", "scale", "point"], ["y", "mask"], domain="com.microsoft")
    model = model_of([forward, helper.make_node("Identity", ["dy"], ["dx"])])
    assert [f.name for f in attach_functions(model).functions] == ["FakeQuant"]
    plain = model_of([helper.make_node("Identity", ["x"], [name]) for name in ("y", "dx")])
    assert attach_functions(plain) == plain


def test_a_function_that_is_there_stays():
    model = training_step({})
    kept = helper.make_function(
        "com.microsoft",
        "FakeQuant",
        ["x", "s", "z"],
        ["y", "mask"],
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Equal", ["x", "x"], ["mask"])],
        [helper.make_opsetid("", 17)],
    )
    model.functions.append(kept)
    assert [f for f in attach_functions(model).functions if f.name == "FakeQuant"] == [kept]


def test_nodes_in_a_subgraph_and_without_a_second_output():
    inner = helper.make_node("FakeQuant", ["x", "scale", "point"], ["quantized"], domain="com.microsoft", quant_max=15)
    result = [helper.make_tensor_value_info("quantized", TensorProto.FLOAT, None)]
    other = helper.make_node("Identity", ["x"], ["quantized"])
    branches = {
        "then_branch": helper.make_graph([inner], "then", [], result),
        "else_branch": helper.make_graph([other], "else", [], result),
    }
    nodes = [
        helper.make_node("ReduceSum", ["dy"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["choice"], to=TensorProto.BOOL),
        helper.make_node("If", ["choice"], ["y"], **branches),
    ]
    assert_quantizes(attach_functions(model_of([*nodes, *REST])))


REST = [helper.make_node("Equal", ["x", "x"], ["mask"]), helper.make_node("Identity", ["dy"], ["dx"])]


def test_nodes_in_a_function_of_the_model_that_alone_knows_the_domain():
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    inner = helper.make_node("FakeQuant", ["x", "scale", "point"], ["y"], domain="com.microsoft", quant_max=15)
    block = helper.make_function("mine", "Block", ["x", "scale", "point"], ["y"], [inner], opsets)
    model = model_of([helper.make_node("Block", ["x", "scale", "point"], ["y"], domain="mine"), *REST])
    del model.opset_import[:]
    model.opset_import.extend([opsets[0], helper.make_opsetid("mine", 1)])
    model.functions.append(block)
    attached = attach_functions(model)
    assert {imported.domain for imported in attached.opset_import} == {"", "mine", "com.microsoft"}
    assert_quantizes(attached)


def test_old_operator_sets_are_refused():
    with pytest.raises(ExportError, match="operator set 14, but the functions need 15"):
        attach_functions(training_step({}, opset=14))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(3), 0.0, 0), QParamsError, "scale must be a positive"),
        ((torch.ones(3), -0.1, 0), QParamsError, "scale must be a positive"),
        ((torch.ones(3), float("nan"), 0), QParamsError, "scale must be a positive"),
        ((torch.ones(3), torch.ones(2), 0), ShapeError, r"scale has shape \[2\], expected \[\] or \[1\]"),
        ((torch.ones(3), torch.ones(1, 1), 0), ShapeError, "scale has shape"),
        ((torch.ones(3), torch.ones(0), 0), ShapeError, "scale has shape"),
        ((torch.ones(3), 0.1, torch.ones(2)), ShapeError, "zero_point has shape"),
        ((torch.ones(3), 0.1, 0.5), QParamsError, "zero_point must be a whole number, the code of 0.0, got 0.5"),
        ((torch.ones(3), 0.1, float("nan")), QParamsError, "zero_point must be a whole number"),
        ((torch.ones(3), 0.1, 0, 7, 7), SpecError, "range"),
        ((torch.ones(3), 0.1, 0, 7, -7), SpecError, "range"),
        ((torch.ones(3), 0.1, 0, 0, 2**31), SpecError, "24 bits"),
        ((torch.ones(3), 0.1, 0, 0.5, 7), TypeError, "float"),
        ((torch.ones(3, dtype=torch.int32), 0.1, 0), DTypeError, "int32"),
        (([1.0], 0.1, 0), DTypeError, "torch.Tensor"),
    ],
)
def test_what_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        fake_quant(*arguments)


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(DTypeError, match=r"expected torch\.bool"):
        fake_quant_grad(torch.ones(3), torch.ones(3))
    for shape in (3, (2, 2)):
        with pytest.raises(ShapeError, match=r"\[4\], but dy \["):
            fake_quant_grad(torch.ones(shape), torch.ones(4, dtype=torch.bool))


def test_float64_is_computed_in_float64():
    x = hostile(torch.float64)
    right = fq.fake_quantize(x, fq.QuantSpec("uint8", symmetric=False), scale=0.1, zero_point=3)
    assert_same_bits(fake_quant(x, 0.1, 3)[0], right)


def test_the_gradient_is_differentiable_and_so_are_learned_parameters():
    mask = torch.tensor([True, False, True])
    assert torch.autograd.gradcheck(lambda dy: fake_quant_grad(dy, mask), torch.randn(3).double().requires_grad_())
    scale = torch.tensor([0.1], requires_grad=True)
    y, _ = fake_quant(torch.tensor([0.26, 30.0]), scale, 3.0)
    y.sum().backward()
    torch.testing.assert_close(scale.grad, torch.tensor([3.0 - 2.6 + 252.0]))


def test_compiled():
    torch._dynamo.reset()
    x, scale = hostile().nan_to_num(), torch.tensor(0.1)
    compiled = torch.compile(lambda v: fake_quant(v, scale, 3.0, 5, 250), fullgraph=True)
    for got, right in zip(compiled(x), fake_quant(x, scale, 3.0, 5, 250), strict=True):
        assert_same_bits(got, right)


CONFIG = fq.Config("per tensor", (fq.Rule("*", input=fq.TensorConfig("uint8"), weight=fq.TensorConfig("int8_narrow")),))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, images):
        return self.linear(self.conv(images).relu().flatten(1))


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = fq.prepare(Network(), CONFIG)
    fq.calibrate(model, [torch.randn(8, 3, 8, 8) for _ in range(2)])
    return model.train()


def test_a_model_for_training(trained, tmp_path):
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    x = torch.randn(2, 3, 8, 8)
    path = export_fake_quant(trained, x, tmp_path / "folder" / "model.onnx", dynamic_shapes=({0: "batch"},))
    model = onnx.load(path)
    found = [node for node in model.graph.node if node.op_type == "FakeQuant"]
    attributes = [{a.name: a.i for a in node.attribute} for node in found]
    narrow, unsigned = {"quant_min": -127, "quant_max": 127}, {"quant_min": 0, "quant_max": 255}
    assert sorted(a["quant_min"] for a in attributes) == [-127, -127, 0, 0]
    assert all(a in (narrow, unsigned) for a in attributes)
    initial = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, parameter in Network().named_parameters():
        assert initial[name].data_type == TensorProto.FLOAT
        assert tuple(initial[name].dims) == parameter.shape
    assert not {node.domain for node in model.graph.node} - {"", "com.microsoft"}
    assert trained.training
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert_quantized_alike(model, trained, torch.randn(5, 3, 8, 8))


def assert_quantized_alike(model, trained, x):
    """Every FakeQuant of the file, on the tensor that ONNX Runtime gives it, is the quantizer of the model."""
    quantizers = {name: module for name, module in trained.named_modules() if isinstance(module, fq.nn.Quantizer)}
    nodes = [node for node in model.graph.node if node.op_type == "FakeQuant"]
    for node in nodes:
        for name in (node.input[0], node.output[0]):
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    values = dict(zip([o.name for o in model.graph.output], run(model, x, level="as it is"), strict=True))
    for node in nodes:
        quantizer = quantizers[node.name.removesuffix("/FakeQuant")]
        with torch.no_grad():
            assert_same_bits(values[node.output[0]], quantizer(values[node.input[0]]), node.name)
    assert len(nodes) == len(quantizers)


@pytest.mark.parametrize("spec", ["uint8", "int8", "int8 per_tensor scale=float8_e8m0fnu:floor"])
def test_dynamic_ranges_in_half_precision_with_and_without_zero_points(spec, tmp_path):
    model = fq.nn.Quantizer(fq.QuantSpec.parse(spec), dynamic=True)
    path = export_fake_quant(model, torch.randn(3, 4).half(), tmp_path / "model.onnx", opset=21)
    x = (torch.randn(3, 4) * 3).half()
    exported = onnx.load(path)
    assert_same_bits(run(exported, x)[0], model(x))
    made_by = {name: node.op_type for node in exported.graph.node for name in node.output}
    (node,) = (node for node in exported.graph.node if node.op_type == "FakeQuant")
    # The kernel takes no scale of two axes, the function would.
    assert {made_by[name] for name in node.input[1:] if name in made_by} == {"Reshape"}


def test_quantizers_that_fake_quant_cannot_express_are_all_named(tmp_path):
    model = fq.prepare(Network(), fq.presets.INT8)
    fq.calibrate(model, [torch.randn(8, 3, 8, 8)])
    with pytest.raises(ExportError, match="per_channel") as error:
        export_fake_quant(model, torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")
    assert "conv._weight_quantizer" in str(error.value)
    assert "linear._weight_quantizer" in str(error.value)
    assert "input_quantizer" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "spec",
    [
        fq.QuantSpec("float8_e4m3fn"),
        fq.QuantSpec("int8", arithmetic=fq.Arithmetic.RECIPROCAL),
        fq.QuantSpec("int8", gradient=fq.Gradient.INPUT_RANGE),
        fq.QuantSpec("int8", fq.PerToken()),
        fq.QuantSpec("int8", fq.PerBlock({-1: 2}), scale=fq.ScaleSpec("float8_e8m0fnu")),
    ],
    ids=str,
)
def test_specifications_that_fake_quant_cannot_express(spec, tmp_path):
    with pytest.raises(ExportError, match="FakeQuant has integers per tensor"):
        export_fake_quant(fq.nn.Quantizer(spec, dynamic=True), torch.randn(3, 4), tmp_path / "model.onnx")


def test_what_cannot_be_exported(tmp_path):
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ExportError, match=r"2 quantizers are not calibrated: conv\._input_quantizer"):
        export_fake_quant(fq.prepare(Network(), CONFIG), x, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="nothing in the model quantizes"):
        export_fake_quant(Network(), x, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="opset=15"):
        export_fake_quant(Network(), x, tmp_path / "model.onnx", opset=15)
    with pytest.raises(OutputError):
        export_fake_quant(Network(), x, tmp_path)
    assert not list(tmp_path.iterdir())
