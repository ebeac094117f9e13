"""The public names of pytorch-quantization 2.2.1 and of later releases: modules, arguments, members."""

import importlib
import inspect

import pytest
import torch
from fakequant.compat.pytorch_quantization.nn.modules import _utils, quant_rnn
from torch import nn

from fakequant.compat import install, pytorch_quantization
from fakequant.compat.pytorch_quantization import nn as quant_nn
from fakequant.compat.pytorch_quantization import quant_modules, tensor_quant
from fakequant.compat.pytorch_quantization.calib import HistogramCalibrator, MaxCalibrator, _Calibrator
from fakequant.compat.pytorch_quantization.tensor_quant import QuantDescriptor

CLASS_OF = {f"{kind}{d}d" for kind in ("Conv", "ConvTranspose") for d in (1, 2, 3)}
POOLS = {f"{kind}Pool{d}d" for kind in ("Max", "Avg", "AdaptiveAvg") for d in (1, 2, 3)}
NORMS = {f"InstanceNorm{d}d" for d in (1, 2, 3)}
WEIGHTED = {*CLASS_OF, "Linear"}
RECURRENT = {"LSTM", "LSTMCell"}
QUANTIZED = {f"Quant{name}" for name in (*WEIGHTED, *POOLS, *NORMS, *RECURRENT)}
FUNCTIONS = "inputs, amax, num_bits=8, unsigned=False, narrow_range=True"

# Module: its public names.
NAMES = {
    "": {
        *("calib", "cuda_ext", "nn", "quant_modules", "tensor_quant", "utils", "version"),
        *("initialize", "deactivate", "enable_onnx_export", "__version__"),
    },
    "version": {"__version__"},
    "tensor_quant": {
        *("ScaledQuantDescriptor", "QuantDescriptor", "tensor_quant", "fake_tensor_quant", "legacy_fake_tensor_quant"),
        *("fake_affine_tensor_quant", "scaled_e4m3", "scaled_e4m3_abstract", "TensorQuantFunction"),
        *("FakeTensorQuantFunction", "LegacyFakeTensorQuantFunction", "FakeAffineTensorQuantFunction"),
        *("ScaledE4M3Function", "QUANT_DESC_8BIT_PER_TENSOR", "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR"),
        "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
        *(f"QUANT_DESC_8BIT_{name.upper()}_WEIGHT_PER_CHANNEL" for name in CLASS_OF),
    },
    "nn": {"TensorQuantizer", "Clip", "functional", "modules", *QUANTIZED, *WEIGHTED, *POOLS, *RECURRENT},
    "nn.functional": {"ClipFunction", "clip"},
    "nn.modules._utils": {"QuantMixin", "QuantInputMixin", "pop_quant_desc_in_kwargs"},
    "nn.modules.clip": {"Clip"},
    "nn.modules.tensor_quantizer": {"TensorQuantizer"},
    "nn.modules.quant_conv": {*CLASS_OF, *(f"Quant{name}" for name in CLASS_OF)},
    "nn.modules.quant_linear": {"Linear", "QuantLinear"},
    "nn.modules.quant_pooling": {*POOLS, *(f"Quant{name}" for name in POOLS)},
    "nn.modules.quant_instancenorm": {f"Quant{name}" for name in NORMS},
    "nn.modules.quant_rnn": {
        *("LSTM", "LSTMCell", "QuantLSTM", "QuantLSTMCell", "QuantRNN", "QuantRNNCell", "GRU", "GRUCell"),
        *("QuantRNNBase", "QuantRNNCellBase"),
    },
    "calib": {"MaxCalibrator", "HistogramCalibrator", "calibrate_weights"},
    "calib.calibrator": {"_Calibrator"},
    "calib.max": {"MaxCalibrator"},
    "calib.histogram": {"HistogramCalibrator", "calibrate_weights"},
    "quant_modules": {
        *("initialize", "deactivate", "enable_onnx_export", "QuantModuleReplacementHelper"),
        *("_DEFAULT_QUANT_MAP", "_quant_entry"),
    },
    "optim.helper": {"match_parameters", "group_parameters", "freeze_parameters", "quant_weight_inplace"},
    "utils": {"reduce_amax", "quant_logging"},
    "utils.quant_logging": {"reset_logger_handler"},
    "cuda_ext": {"fake_tensor_quant_", "fake_tensor_quant", "fake_tensor_quant_with_axis", "fake_e4m3fy"},
}

# Callable: its arguments.
SIGNATURES = {
    "tensor_quant.tensor_quant": FUNCTIONS,
    "tensor_quant.fake_tensor_quant": FUNCTIONS,
    "tensor_quant.legacy_fake_tensor_quant": FUNCTIONS,
    "tensor_quant.fake_affine_tensor_quant": "inputs, min_range, max_range, num_bits=8",
    "tensor_quant.scaled_e4m3": "inputs, amax=None, E=4, M=3",
    "tensor_quant.scaled_e4m3_abstract": "input, amax=None",
    "tensor_quant.ScaledQuantDescriptor": "num_bits=8, name=None, *args, **kwargs",
    "tensor_quant.ScaledQuantDescriptor.dict": "self",
    "tensor_quant.ScaledQuantDescriptor.to_yaml": "self",
    "tensor_quant.ScaledQuantDescriptor.from_yaml": "yaml_str",
    "tensor_quant.ScaledQuantDescriptor.get_block_quant_axes_and_sizes": "block_sizes",
    "nn.TensorQuantizer": "quant_desc=QuantDescriptor(), disabled=False, if_quant=True, if_clip=False, if_calib=False",
    "nn.TensorQuantizer.load_calib_amax": "self, *args, strict=True, **kwargs",
    "nn.TensorQuantizer.forward": "self, inputs",
    "nn.Clip": "clip_value_min, clip_value_max, learn_min=False, learn_max=False",
    "nn.functional.clip": "input, clip_value_min, clip_value_max",
    "nn.functional.ClipFunction.apply": "input, clip_value_min, clip_value_max",
    "nn.modules._utils.pop_quant_desc_in_kwargs": "quant_cls, input_only=False, **kwargs",
    "calib.MaxCalibrator": "num_bits, axis, unsigned, track_amax=False",
    "calib.MaxCalibrator.compute_amax": "self",
    "calib.HistogramCalibrator": (
        "num_bits, axis, unsigned, num_bins=2048, grow_method=None, skip_zeros=False, torch_hist=True"
    ),
    "calib.HistogramCalibrator.compute_amax": "self, method, *, stride=1, start_bin=128, percentile=99.99",
    "calib.calibrate_weights": "model, method='percentile', perchannel=True, percentile=99.99, num_bins=2048",
    "calib.calibrator._Calibrator": "num_bits, axis, unsigned",
    "quant_modules.initialize": "float_module_list=None, custom_quant_modules=None",
    "quant_modules.deactivate": "",
    "quant_modules.enable_onnx_export": "",
    "quant_modules._quant_entry": "orig_mod, mod_name, replace_mod",
    "quant_modules.QuantModuleReplacementHelper": "",
    "quant_modules.QuantModuleReplacementHelper.prepare_state": "self, float_module_list=None, custom_map=None",
    "quant_modules.QuantModuleReplacementHelper.apply_quant_modules": "self",
    "quant_modules.QuantModuleReplacementHelper.restore_float_modules": "self",
    "optim.helper.match_parameters": "model, patterns",
    "optim.helper.group_parameters": "model, patterns_list, lrs=None, momentums=None, weight_decays=None",
    "optim.helper.freeze_parameters": "model, patterns",
    "optim.helper.quant_weight_inplace": "model",
    "utils.reduce_amax": "input, axis=None, keepdims=True",
    "utils.quant_logging.reset_logger_handler": "",
    "cuda_ext.fake_tensor_quant_": FUNCTIONS,
    "cuda_ext.fake_tensor_quant": FUNCTIONS,
    "cuda_ext.fake_tensor_quant_with_axis": "inputs, amax, axis, num_bits=8, unsigned=False, narrow_range=True",
    "cuda_ext.fake_e4m3fy": "inputs",
}

# What later releases and the user's guide add.
BEYOND = {
    "tensor_quant.tensor_quant": {"bias", "output_dtype"},
    "tensor_quant.fake_tensor_quant": {"bias", "output_dtype"},
    "tensor_quant.legacy_fake_tensor_quant": {"bias", "output_dtype"},
    "tensor_quant.scaled_e4m3": {"bias"},
}

DESCRIPTOR_OPTIONS = {
    "fake_quant": True,
    "axis": None,
    "block_sizes": None,
    "amax": None,
    "learn_amax": False,
    "scale_amax": None,
    "calib_method": "max",
    "unsigned": False,
    "narrow_range": False,
    "dynamic": False,
}


def module(path: str):
    return importlib.import_module(".".join(filter(None, (pytorch_quantization.__name__, path))))


def named(path: str):
    """What a dotted path in the package is."""
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        # utils.reduce_amax is a function where there is a module of that name.
        for part in parts[depth:] if inspect.ismodule(found) else ():
            found = getattr(found, part)
        if not inspect.ismodule(found):
            return found
    raise AssertionError(path)


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_scripts_import_them_from(path):
    install("pytorch_quantization")
    found = importlib.import_module(".".join(filter(None, ("pytorch_quantization", path))))
    assert found is module(path)
    assert not [name for name in NAMES[path] if not hasattr(found, name)]


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_are_those_of_scripts(path):
    expected = eval(f"lambda {SIGNATURES[path]}: None", {"QuantDescriptor": QuantDescriptor})
    wanted = inspect.signature(expected).parameters
    found = {name: each for name, each in inspect.signature(named(path)).parameters.items() if name in wanted}
    assert [(each.name, each.kind, each.default) for each in found.values()] == [
        (each.name, each.kind, each.default) for each in wanted.values()
    ]
    beyond = inspect.signature(named(path)).parameters.keys() - wanted.keys()
    assert beyond == BEYOND.get(path, set())


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_every_layer_takes_descriptors_by_keyword_and_has_defaults_per_class(name):
    layer = getattr(quant_nn, name)
    weighted = name.removeprefix("Quant") in WEIGHTED | RECURRENT
    assert issubclass(layer, getattr(nn, name.removeprefix("Quant")))
    assert issubclass(layer, _utils.QuantMixin if weighted else _utils.QuantInputMixin)
    assert layer.default_quant_desc_input == tensor_quant.QUANT_DESC_8BIT_PER_TENSOR
    if weighted:
        axis = 1 if "Transpose" in name else 0
        assert layer.default_quant_desc_weight == QuantDescriptor(num_bits=8, axis=axis)
    setters = ["set_default_quant_desc_input", *["set_default_quant_desc_weight"] * weighted]
    assert all(inspect.ismethod(getattr(layer, setter)) for setter in setters)
    named = None if name.removeprefix("Quant") in NORMS else layer
    assert getattr(quant_nn, name.removeprefix("Quant"), None) is named


def test_members_of_a_descriptor():
    made = QuantDescriptor()
    assert QuantDescriptor is tensor_quant.ScaledQuantDescriptor
    properties = {name for name, each in inspect.getmembers(QuantDescriptor) if isinstance(each, property)}
    assert properties == {"num_bits", "name", *DESCRIPTOR_OPTIONS}
    assert {name: getattr(made, name) for name in DESCRIPTOR_OPTIONS} == DESCRIPTOR_OPTIONS
    for name in properties:
        with pytest.raises(AttributeError):
            setattr(made, name, None)


def test_members_of_a_quantizer():
    members = dict(inspect.getmembers(quant_nn.TensorQuantizer))
    settable = {"num_bits", "unsigned", "narrow_range", "amax", "pre_quant_scale"}
    fixed = {"maxbound", "scale", "step_size", "axis", "fake_quant"}
    assert all(members[name].fset for name in settable)
    assert not any(members[name].fset for name in fixed)
    stages = {f"{verb}{stage}" for verb in ("enable", "disable") for stage in ("", "_clip", "_calib", "_quant")}
    assert not (stages | {"load_calib_amax", "init_learn_amax", "forward", "extra_repr"}) - members.keys()
    states = {"_disabled", "_if_quant", "_if_clip", "_if_calib", "_calibrator", "_num_bits", "_fake_quant", "_axis"}
    states |= {"_scale_amax", "_learn_amax", "_unsigned", "_narrow_range", "_scale"}
    assert not states - vars(quant_nn.TensorQuantizer()).keys()


def test_members_of_calibrators():
    for calibrator in (MaxCalibrator, HistogramCalibrator):
        assert issubclass(calibrator, _Calibrator)
        assert not {"collect", "reset", "compute_amax"} - dir_of(calibrator)
    assert isinstance(MaxCalibrator.amaxs, property)
    states = {"_num_bins", "_skip_zeros", "_torch_hist", "_calib_hist", "_calib_bin_edges"}
    assert not states - vars(HistogramCalibrator(8, None, False)).keys()
    assert not {"_calib_amax", "_track_amax"} - vars(MaxCalibrator(8, None, False)).keys()
    base = _Calibrator(8, None, False)
    for call in (lambda: base.collect(torch.ones(1)), base.reset, base.compute_amax):
        with pytest.raises(NotImplementedError):
            call()


def dir_of(cls: type) -> set[str]:
    return {name for each in cls.__mro__ for name in vars(each)}


def test_the_map_of_replaced_layers():
    replaced = {(entry.orig_mod, entry.mod_name): entry.replace_mod for entry in quant_modules._DEFAULT_QUANT_MAP}
    kinds = {*WEIGHTED, *RECURRENT, *(name for name in POOLS if not name.startswith("Max"))}
    assert replaced == {(nn, name): getattr(quant_nn, f"Quant{name}") for name in kinds}
    assert quant_modules._quant_entry(nn, "Linear", quant_nn.QuantLinear) in quant_modules._DEFAULT_QUANT_MAP


def test_recurrent_layers_hold_lists_of_quantizers():
    layer = quant_nn.QuantLSTM(2, 2, num_layers=2, bidirectional=True)
    for quantizers in (layer._input_quantizers, layer._weight_quantizers):
        assert isinstance(quantizers, nn.ModuleList)
        assert [type(each) for each in quantizers] == [quant_nn.TensorQuantizer] * 4
    for name in ("QuantRNN", "QuantRNNCell", "GRU", "GRUCell"):
        # Importable, but no star import gives them.
        assert name not in quant_rnn.__all__


def test_classes_of_functions_have_apply():
    for name in ("tensor_quant", "fake_tensor_quant", "legacy_fake_tensor_quant", "fake_affine_tensor_quant"):
        owner = "".join(word.title() for word in name.split("_")) + "Function"
        assert getattr(tensor_quant, owner).apply is getattr(tensor_quant, name)
    assert tensor_quant.ScaledE4M3Function.apply is tensor_quant.scaled_e4m3
