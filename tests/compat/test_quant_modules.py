"""Replacing layers of torch.nn, and the helpers for optimizers."""

import types

import pytest
import torch
from torch import nn

from fakequant.compat import pytorch_quantization as pq
from fakequant.compat.pytorch_quantization import nn as quant_nn
from fakequant.compat.pytorch_quantization import quant_modules
from fakequant.compat.pytorch_quantization.optim import helper
from fakequant.compat.pytorch_quantization.tensor_quant import QuantDescriptor, fake_tensor_quant
from tests.support.bits import assert_same_bits

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
