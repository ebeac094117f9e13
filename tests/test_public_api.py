"""The public names. A name that is added or removed here is a change of the interface and belongs in CHANGELOG.md."""

import inspect

import fakequant as fq

NAMES = [
    "Arithmetic",
    "Config",
    "Engine",
    "FakeQuantError",
    "FloatFormat",
    "Format",
    "Gradient",
    "GradientConfig",
    "Granularity",
    "IntegerFormat",
    "LazyTensor",
    "OffsetSpec",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PerToken",
    "QParams",
    "QuantSpec",
    "QuantizedState",
    "Range",
    "Rounding",
    "Rule",
    "ScaleRounding",
    "ScaleSpec",
    "Specials",
    "StoredScales",
    "TableFormat",
    "Target",
    "TensorConfig",
    "WeightCodes",
    "advise",
    "apply",
    "bake_weights",
    "calibrate",
    "choose_qparams",
    "compare",
    "deliver",
    "dequantize",
    "disabled",
    "encode",
    "export_coreai",
    "export_coreml",
    "export_encodings",
    "export_executorch",
    "export_litert",
    "export_onnx",
    "export_pt2e",
    "fake_quantize",
    "fake_quantize_",
    "float_state_dict",
    "fold",
    "formats",
    "fuse_batch_norm",
    "improve_folder",
    "known_engines",
    "layer_sqnr",
    "load",
    "nn",
    "parse_format",
    "prepare",
    "presets",
    "qat",
    "quantize",
    "read",
    "read_encodings",
    "recalibrate",
    "register_calibrator",
    "register_codec",
    "register_engine",
    "register_format",
    "register_granularity",
    "register_preset",
    "report",
    "save",
    "search",
    "sensitivity",
    "set_execution",
    "site_plan",
    "snapshot",
    "store_codes",
    "store_floats",
    "summary",
    "unquantized",
    "verify_delivery",
    "verify_onnx",
]


def test_names_are_pinned():
    assert sorted(fq.__all__) == sorted(NAMES)


def test_names_exist_and_are_documented():
    for name in fq.__all__:
        value = getattr(fq, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name


def test_what_is_called_has_an_example():
    called = [value for name in fq.__all__ if inspect.isfunction(value := getattr(fq, name))]
    called += [fq.QParams, fq.Range, fq.nn.quantizes]
    called += [fq.qat.Options, fq.qat.Schedule, fq.qat.finetune, fq.qat.scheduler, fq.qat.set_scales]
    assert [value.__name__ for value in called if ">>> " not in value.__doc__] == []


def test_signatures():
    given = "scale: 'Number | None' = None, zero_point: 'Number | None' = None, amax: 'Number | None' = None"
    given += ", seed: 'int | Tensor | None' = None"
    assert str(inspect.signature(fq.fake_quantize)) == f"(x: 'Tensor', spec: 'QuantSpec | str', *, {given}) -> 'Tensor'"
    assert list(inspect.signature(fq.quantize).parameters) == ["x", "spec", "scale", "zero_point", "amax", "seed"]
    assert list(inspect.signature(fq.dequantize).parameters) == ["codes", "params", "spec", "dtype"]
    assert list(inspect.signature(fq.choose_qparams).parameters) == ["x", "spec"]
    assert list(inspect.signature(fq.report).parameters)[:4] == ["model", "batches", "path", "metric"]
    assert fq.__version__
