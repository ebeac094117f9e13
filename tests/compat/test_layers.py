"""Layers of the pytorch_quantization interface: torch's own when disabled, on quantized tensors when not; replacing
layers of torch.nn, and the helpers for optimizers.
"""

import copy
import pickle
import types

import pytest
import torch
from fakequant.compat.pytorch_quantization.nn.modules import _utils
from torch import Tensor, nn

from fakequant.compat import pytorch_quantization as pq
from fakequant.compat.pytorch_quantization import calib, quant_modules, tensor_quant
from fakequant.compat.pytorch_quantization import nn as quant_nn
from fakequant.compat.pytorch_quantization.optim import helper
from fakequant.compat.pytorch_quantization.tensor_quant import QuantDescriptor, fake_tensor_quant
from tests.support.bits import assert_same_bits

X1, X2, X3 = (1, 4, 9), (2, 4, 9, 9), (2, 4, 7, 7, 7)
# Name, arguments, input shape.
WEIGHTED = [
    ("Linear", (4, 3), (2, 5, 4)),
    ("Linear", (4, 3, False), (5, 4)),
    *(("Conv1d", (4, 6, 3, *rest), X1) for rest in ((2, 1, 2), (1, "same"))),
    *(("Conv2d", (4, 6, 3, *rest), X2) for rest in ((), (1, 1, 1, 2), (2, 2, 1, 1, False, "reflect"))),
    *(("Conv2d", (4, 6, 3, 1, 1, 1, 1, True, mode), X2) for mode in ("replicate", "circular")),
    ("Conv3d", (4, 3, 2), X3),
    ("ConvTranspose1d", (4, 6, 3, 2, 1, 1), X1),
    ("ConvTranspose2d", (4, 6, 3, 2, 1, 1, 2), X2),
    ("ConvTranspose3d", (4, 3, 2), X3),
]
INPUT_ONLY = [
    *((f"{kind}Pool{d}d", (2,), (X1, X2, X3)[d - 1]) for kind in ("Max", "Avg", "AdaptiveAvg") for d in (1, 2, 3)),
    ("MaxPool2d", (3, 2, 1, 1, False, True), X2),
    *((f"InstanceNorm{d}d", (4,), (X1, X2, X3)[d - 1]) for d in (1, 2, 3)),
]


def pair(name: str, args: tuple, **kwargs) -> tuple[nn.Module, nn.Module]:
    """The quantized layer and torch's, with the same parameters."""
    quantized = getattr(quant_nn, f"Quant{name}")(*args, **kwargs)
    own = getattr(nn, name)(*args)
    own.load_state_dict(quantized.state_dict())
    return quantized, own


def quantizers(module: nn.Module) -> list[quant_nn.TensorQuantizer]:
    return [m for m in module.modules() if isinstance(m, quant_nn.TensorQuantizer)]


def outputs(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for part in result for x in outputs(part)]  # type: ignore


def assert_same(actual: object, expected: object) -> None:
    for a, b in zip(outputs(actual), outputs(expected), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("name", "args", "shape"), WEIGHTED + INPUT_ONLY, ids=str)
def test_disabled_it_is_torchs_layer(name, args, shape):
    quantized, own = pair(name, args)
    for quantizer in quantizers(quantized):
        quantizer.disable()
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    actual, expected = quantized(x), own(y)
    assert_same(actual, expected)
    outputs(actual)[0].sin().sum().backward()
    outputs(expected)[0].sin().sum().backward()
    assert_same_bits(x.grad, y.grad)


@pytest.mark.parametrize(("name", "args", "shape"), WEIGHTED, ids=str)
def test_enabled_it_is_torchs_layer_on_quantized_tensors(name, args, shape):
    quantized, own = pair(name, args)
    x = torch.randn(shape)
    axis = 1 if "Transpose" in name else 0
    others = [i for i in range(own.weight.dim()) if i != axis]
    with torch.no_grad():
        amax = own.weight.abs().amax(others, keepdim=True)
        own.weight.copy_(tensor_quant.fake_tensor_quant(own.weight, amax, 8, False, False))
    assert_same(quantized(x), own(tensor_quant.fake_tensor_quant(x, x.abs().max(), 8, False, False)))


@pytest.mark.parametrize(("name", "args", "shape"), INPUT_ONLY, ids=str)
def test_enabled_it_is_torchs_layer_on_a_quantized_input(name, args, shape):
    quantized, own = pair(name, args, quant_desc_input=QuantDescriptor(num_bits=4))
    quantized.input_quantizer.amax = 1.5
    x = torch.randn(shape)
    assert_same(quantized(x), own(tensor_quant.fake_tensor_quant(x, 1.5, 4, False, False)))


# Class and the layer of torch, arguments, input shape.
RECURRENT = [
    ("QuantLSTM", (4, 6, 2), (5, 3, 4)),
    ("QuantLSTMCell", (4, 6), (3, 4)),
    ("QuantRNN", (4, 6), (5, 3, 4)),
    ("QuantRNNCell", (4, 6, True, "relu"), (3, 4)),
    ("GRU", (4, 6), (5, 4)),
    ("GRUCell", (4, 6), (5, 4)),
]


@pytest.mark.parametrize(("name", "args", "shape"), RECURRENT, ids=str)
def test_disabled_a_recurrent_layer_is_torchs(name, args, shape):
    quantized = getattr(quant_nn.modules.quant_rnn, name)(*args)
    own = getattr(nn, name.removeprefix("Quant"))(*args)
    own.load_state_dict(quantized.state_dict())
    x = torch.randn(shape)
    assert not torch.equal(outputs(quantized(x))[0], outputs(own(x))[0])
    for quantizer in quantizers(quantized):
        quantizer.disable()
    assert_same(quantized(x), own(x))


def test_a_disabled_lstm_takes_packed_sequences_in_torchs_order():
    quantized = quant_nn.QuantLSTM(4, 6, bidirectional=True)
    own = nn.LSTM(4, 6, bidirectional=True)
    own.load_state_dict(quantized.state_dict())
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in (2, 5, 3)], enforce_sorted=False)
    enabled = nn.utils.rnn.pad_packed_sequence(quantized(packed)[0])
    for quantizer in quantizers(quantized):
        quantizer.disable()
    disabled, (h, _) = quantized(packed)
    expected, (h_expected, _) = own(packed)
    assert_same_bits(disabled.data, expected.data)
    assert_same_bits(disabled.unsorted_indices, expected.unsorted_indices)
    assert_same_bits(h, h_expected)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(expected)
    assert enabled[1].tolist() == lengths.tolist() == [2, 5, 3]
    assert torch.equal(enabled[0] == 0, padded == 0)


def test_lstm_quantizes_input_with_state_and_both_weights():
    """Against steps by hand, in the order of operations of one cell."""
    layer = quant_nn.QuantLSTM(4, 6, 2, batch_first=True, quant_desc_input=QuantDescriptor(num_bits=6))
    assert len(layer._input_quantizers) == len(layer._weight_quantizers) == 2
    x = torch.randn(3, 5, 4)
    actual, (h_n, c_n) = layer(x)
    steps = x.unbind(1)
    for i, (w_ih, w_hh, b_ih, b_hh) in enumerate(layer.all_weights):
        joined = torch.cat([w_ih, w_hh], 1)
        weight = tensor_quant.fake_tensor_quant(joined, joined.abs().amax(1, keepdim=True), 8, False, False)
        w_ih, w_hh = weight.split([w_ih.shape[1], w_hh.shape[1]], 1)
        state = torch.zeros(3, 6), torch.zeros(3, 6)
        found = []
        for step in steps:
            both = torch.cat([step, state[0]], 1)
            both = tensor_quant.fake_tensor_quant(both, both.abs().max(), 6, False, False)
            step, h = both.split([step.shape[1], 6], 1)
            state = torch.lstm_cell(step, (h, state[1]), w_ih, w_hh, b_ih, b_hh)
            found.append(state[0])
        steps = found
        assert_same_bits(h_n[i], state[0])
        assert_same_bits(c_n[i], state[1])
    assert_same_bits(actual, torch.stack(steps, 1))


def test_lstm_cell_quantizes_input_with_state_and_both_weights():
    cell = quant_nn.QuantLSTMCell(4, 6)
    x, state = torch.randn(3, 4), (torch.randn(3, 6), torch.randn(3, 6))
    both = torch.cat([x, state[0]], 1)
    both = tensor_quant.fake_tensor_quant(both, both.abs().max(), 8, False, False)
    joined = torch.cat([cell.weight_ih, cell.weight_hh], 1)
    weight = tensor_quant.fake_tensor_quant(joined, joined.abs().amax(1, keepdim=True), 8, False, False)
    expected = torch.lstm_cell(
        both[:, :4], (both[:, 4:], state[1]), weight[:, :4], weight[:, 4:], cell.bias_ih, cell.bias_hh
    )
    assert_same(cell(x, state), expected)
    assert_same(
        cell(x[0], (state[0][0], state[1][0])), [s.squeeze(0) for s in cell(x[:1], tuple(s[:1] for s in state))]
    )
    assert_same(cell(x), cell(x, (torch.zeros(3, 6), torch.zeros(3, 6))))


def test_default_descriptors_are_copied_and_belong_to_their_class(monkeypatch):
    monkeypatch.setattr(quant_nn.QuantLinear, "default_quant_desc_input", quant_nn.QuantLinear.default_quant_desc_input)
    descriptor = QuantDescriptor(num_bits=4, calib_method="histogram")
    quant_nn.QuantLinear.set_default_quant_desc_input(descriptor)
    assert quant_nn.QuantLinear.default_quant_desc_input is not descriptor
    layer = quant_nn.QuantLinear(2, 2)
    assert layer.input_quantizer.num_bits == 4
    assert isinstance(layer.input_quantizer._calibrator, calib.HistogramCalibrator)
    assert quant_nn.QuantConv1d(1, 1, 1).input_quantizer.num_bits == 8
    assert layer.weight_quantizer.axis == 0
    for wrong in (None, 8):
        with pytest.raises(ValueError, match="QuantDescriptor"):
            quant_nn.QuantLinear.set_default_quant_desc_input(wrong)
        with pytest.raises(ValueError, match="QuantDescriptor"):
            quant_nn.QuantLinear.set_default_quant_desc_weight(wrong)
        with pytest.raises(ValueError, match="QuantDescriptor"):
            quant_nn.QuantAvgPool1d.set_default_quant_desc_input(wrong)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *(
            (lambda make=make, name=name: make(**{name: QuantDescriptor(fake_quant=False)}), ValueError, "fake")
            for make, name in (
                (lambda **given: quant_nn.QuantLinear(2, 2, **given), "quant_desc_input"),
                (lambda **given: quant_nn.QuantLinear(2, 2, **given), "quant_desc_weight"),
                (lambda **given: quant_nn.QuantMaxPool1d(2, **given), "quant_desc_input"),
            )
        ),
        (lambda: quant_nn.QuantMaxPool1d(2, quant_desc_weight=QuantDescriptor()), TypeError, "quant_desc_weight"),
        (lambda: quant_nn.QuantLSTM(2, 2, proj_size=1), ValueError, "proj_size"),
        (lambda: quant_nn.QuantConvTranspose1d(1, 1, 1, padding_mode="reflect"), ValueError, "zeros"),
        (lambda: quant_nn.QuantLinear(2, 2).init_quantizer(*[QuantDescriptor()] * 2), TypeError, "__init__"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_device_and_dtype_are_accepted():
    layer = quant_nn.QuantLinear(4, 2, device="meta", quant_desc_input=QuantDescriptor(amax=1.0))
    assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
    half = quant_nn.QuantConv2d(1, 1, 1, dtype=torch.bfloat16)
    assert half(torch.randn(1, 1, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "args", "shape"),
    [("Linear", (4, 3), (2, 4)), ("Conv2d", (4, 6, 3), X2), ("ConvTranspose1d", (4, 6, 3), X1), ("LSTM", (4, 6), X1)],
    ids=str,
)
def test_exported_and_compiled_in_one_graph(name, args, shape):
    layer = getattr(quant_nn, f"Quant{name}")(*args)
    x = torch.randn(shape).transpose(1, 2) if name == "LSTM" else torch.randn(shape)
    assert_same(torch.export.export(layer, (x,)).module()(x), layer(x))
    # torch refuses subclasses of nn.LSTM unless this is set.
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_same(compiled(x), layer(x))


class QuantScaledLinear(nn.Linear, _utils.QuantMixin):
    """A layer as the tutorials write it."""

    def __init__(self, features: int, factor: float, **kwargs):
        super().__init__(features, features)
        self.factor = factor
        self.init_quantizer(*_utils.pop_quant_desc_in_kwargs(self.__class__, **kwargs))

    def forward(self, input):
        weight = self._weight_quantizer(self.weight)
        return nn.functional.linear(self._input_quantizer(input), weight, self.bias) * self.factor


def test_layers_of_ones_own():
    layer = QuantScaledLinear(3, 2.0, quant_desc_input=QuantDescriptor(num_bits=4))
    assert (layer.input_quantizer.num_bits, layer.weight_quantizer.num_bits) == (4, 8)
    assert layer(torch.randn(2, 3)).shape == (2, 3)
    with pytest.raises(TypeError, match="Unused keys"):
        QuantScaledLinear(3, 2.0, quant_desc_bias=QuantDescriptor())


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: quant_nn.QuantLinear(3, 2, **given),
        lambda **given: quant_nn.QuantConv2d(3, 2, 1, bias=False, device="cpu", **given),
        lambda **given: quant_nn.QuantConvTranspose1d(3, 2, 1, **given),
        lambda **given: quant_nn.QuantMaxPool2d(2, **given),
        lambda **given: quant_nn.QuantLSTM(3, 2, batch_first=True, **given),
        lambda **given: quant_nn.QuantAdaptiveAvgPool2d(2, **given),
    ],
)
def test_an_unknown_keyword_of_a_layer_is_named(make):
    make(quant_desc_input=QuantDescriptor(num_bits=4))
    for name in ("granularity", "quant_desc_bias"):
        with pytest.raises(TypeError, match=f"Unused keys: {name}; Quant.* takes quant_desc_input"):
            make(**{name: 1})


def test_a_float_layer_is_turned_into_a_quantized_one_without_its_constructor():
    """A widespread recipe: copy the attributes, then call init_quantizer from a function called __init__."""
    own = nn.Conv2d(2, 3, 3)
    quantized = quant_nn.QuantConv2d.__new__(quant_nn.QuantConv2d)
    for key, value in vars(own).items():
        setattr(quantized, key, value)

    def __init__(self):
        self.init_quantizer(*_utils.pop_quant_desc_in_kwargs(self.__class__))

    __init__(quantized)
    assert isinstance(quantized, _utils.QuantMixin)
    assert not isinstance(quantized, _utils.QuantInputMixin)
    x = torch.randn(1, 2, 5, 5)
    for quantizer in quantizers(quantized):
        quantizer.disable()
    assert_same_bits(quantized(x), own(x))


def test_copies_and_pickles():
    for layer, shape in ((quant_nn.QuantLinear(4, 2), (3, 4)), (quant_nn.QuantLSTM(4, 2), (3, 1, 4))):
        x = torch.randn(shape)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert_same(other(x), layer(x))


def test_weight_gradient_is_clipped_as_that_of_inputs():
    layer = quant_nn.QuantLinear(3, 1, bias=False, quant_desc_weight=QuantDescriptor(amax=0.5))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.4, 0.6, -0.5]]))
    layer.input_quantizer.disable()
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 0.0, 1.0]]


REPLACED = {
    *(f"{kind}{d}d" for kind in ("Conv", "ConvTranspose", "AvgPool", "AdaptiveAvgPool") for d in (1, 2, 3)),
    *("Linear", "LSTM", "LSTMCell"),
}
FLOAT = {name: getattr(nn, name) for name in (*REPLACED, "MaxPool2d", "InstanceNorm2d", "GRU")}


@pytest.fixture(autouse=True)
def _float_afterwards():
    yield
    quant_modules.deactivate()
    assert {name: getattr(nn, name) for name in FLOAT} == FLOAT


def replaced() -> set[str]:
    return {name for name, own in FLOAT.items() if getattr(nn, name) is not own}


class TestInitialize:
    def test_replaces_and_restores(self):
        assert (pq.initialize, pq.deactivate) == (quant_modules.initialize, quant_modules.deactivate)
        pq.initialize()
        assert replaced() == REPLACED
        model = nn.Sequential(nn.Linear(3, 2), nn.MaxPool2d(2))
        assert (type(model[0]), type(model[1])) == (quant_nn.QuantLinear, FLOAT["MaxPool2d"])
        pq.deactivate()
        assert not replaced()
        assert type(nn.Linear(3, 2)) is FLOAT["Linear"]

    def test_some_stay_in_float(self):
        quant_modules.initialize(float_module_list=["Linear", "LSTM", "NoSuchLayer"])
        assert replaced() == REPLACED - {"Linear", "LSTM"}

    def test_twice_and_with_another_choice(self):
        quant_modules.initialize()
        quant_modules.initialize(float_module_list=["Linear"])
        assert replaced() == REPLACED - {"Linear"}
        quant_modules.deactivate()
        quant_modules.deactivate()
        assert not replaced()

    def test_modules_of_ones_own(self):
        class Mine(FLOAT["Linear"]):
            pass

        other = types.SimpleNamespace(Block=FLOAT["Linear"])
        quant_modules.initialize(custom_quant_modules=[(other, "Block", quant_nn.QuantLinear), (nn, "Linear", Mine)])
        assert (other.Block, nn.Linear) == (quant_nn.QuantLinear, Mine)
        quant_modules.deactivate()
        assert other.Block is FLOAT["Linear"]
        with pytest.raises(AttributeError, match="nothing was replaced"):
            quant_modules.initialize(custom_quant_modules=[(nn, "NoSuchLayer", Mine)])
        assert not replaced()

    def test_the_helper_alone(self):
        replacer = quant_modules.QuantModuleReplacementHelper()
        replacer.prepare_state(float_module_list=["Conv2d"])
        assert not replaced()
        replacer.apply_quant_modules()
        assert replaced() == REPLACED - {"Conv2d"}
        replacer.restore_float_modules()


def test_onnx_export_is_enabled_in_its_context_only():
    def state():
        return quant_nn.TensorQuantizer._enable_onnx_export

    class Stop(Exception):
        pass

    assert state() is False

    def exporting():
        with pq.enable_onnx_export():
            with pq.enable_onnx_export():
                assert state() is True
            assert state() is True
            raise Stop

    with pytest.raises(Stop):
        exporting()
    assert state() is False


class TestOptimizerHelpers:
    def model(self):
        return nn.Sequential(nn.Conv1d(1, 2, 3), nn.Linear(4, 2))

    def test_parameters_by_name(self):
        model = self.model()
        assert list(helper.match_parameters(model, ["weight"])) == [model[0].weight, model[1].weight]
        assert [p is model[1].bias for p in helper.match_parameters(model, ["bias$", "^1"])] == [
            *(False, False),
            *(True, True),
        ]

    def test_groups(self):
        model = self.model()
        groups = helper.group_parameters(model, [["^0"], ["^1"]], lrs=[0.1, 0.2], weight_decays=[0.0, 1e-4])
        assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == [
            {"lr": 0.1, "weight_decay": 0.0},
            {"lr": 0.2, "weight_decay": 1e-4},
        ]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
        assert helper.group_parameters(model, [["^0"]], momentums=[0.9])[0]["momentum"] == 0.9

    @pytest.mark.parametrize(
        ("patterns", "options", "text"),
        [
            ("weight", {}, "must be list of list of patterns, got 'weight'; give"),
            (["weight"], {}, "must be list of list of patterns"),
            ([["weight"]], {"lrs": [0.1, 0.2]}, r"lrs must match .* got \[0.1, 0.2\]; give a list with one number"),
            ([["weight"]], {"momentums": 0.9}, "momentums must match"),
            ([["weight"], ["bias"]], {"weight_decays": [0.1]}, "weight_decays must match"),
        ],
    )
    def test_wrong_groups(self, patterns, options, text):
        with pytest.raises(TypeError, match=text):
            helper.group_parameters(self.model(), patterns, **options)
        with pytest.raises(TypeError, match=text):  # before it looks at the model
            helper.group_parameters(None, patterns, **options)

    def test_freezing(self):
        model = self.model()
        helper.freeze_parameters(model, ["weight"])
        assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.bias", "1.bias"]

    def test_weights_are_quantized_in_place(self, caplog):
        model = nn.Sequential(quant_nn.QuantLinear(4, 2), nn.Linear(2, 2))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        kept = model[0].weight
        helper.quant_weight_inplace(model)
        assert model[0].weight is kept
        assert kept.requires_grad
        amax = before["0.weight"].abs().amax(1, keepdim=True)
        assert_same_bits(kept, fake_tensor_quant(before["0.weight"], amax, 8, False, False))
        for name, parameter in model.named_parameters():
            if name != "0.weight":
                assert_same_bits(parameter, before[name])
        model[0]._weight_quantizer = quant_nn.TensorQuantizer(QuantDescriptor(fake_quant=False))
        helper.quant_weight_inplace(model)
        assert "the weight of 0 is not replaced" in caplog.text

    @pytest.mark.parametrize(
        ("layer", "shape"),
        [
            (quant_nn.QuantLSTM(4, 3, num_layers=2, bidirectional=True), (5, 2, 4)),
            (quant_nn.QuantLSTMCell(4, 3, bias=False), (2, 4)),
            (quant_nn.modules.quant_rnn.GRU(4, 3), (5, 2, 4)),
            (quant_nn.modules.quant_rnn.QuantRNNCell(4, 3), (2, 4)),
        ],
        ids=lambda case: type(case).__name__,
    )
    def test_weights_of_recurrent_layers_are_quantized_in_place_as_the_products_see_them(self, layer, shape):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        biases = {name: p.detach().clone() for name, p in layer.named_parameters() if "bias" in name}
        weights = {name: p.detach().clone() for name, p in layer.named_parameters() if "weight" in name}
        expected = layer(x)[0]
        helper.quant_weight_inplace(nn.Sequential(layer))
        for name, module in layer.named_modules():
            if "weight_quantizer" in name and isinstance(module, quant_nn.TensorQuantizer):
                module.disable()
        assert_same_bits(layer(x)[0], expected)
        parameters = dict(layer.named_parameters())
        assert not any(torch.equal(parameters[name], before) for name, before in weights.items())
        for name, before in biases.items():
            assert_same_bits(parameters[name], before)
