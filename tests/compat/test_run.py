"""Scripts and imports under the name of the original package."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from fakequant.compat import install
from fakequant.compat.__main__ import main
from fakequant.errors import ConfigError

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_quantized.py"


def python(*arguments, cwd=None):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=cwd)


def test_the_script_needs_the_original_or_our_run():
    found = python(SCRIPT, "unused")
    assert found.returncode != 0
    assert "No module named 'pytorch_quantization'" in found.stderr


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="max"),
        pytest.param(
            ["--calibrator", "histogram", "--method", "percentile"], id="percentile", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_an_unmodified_script_calibrates_trains_saves_and_exports(tmp_path, options):
    found = python("-m", "fakequant.compat", "run", SCRIPT, tmp_path, *options, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("done with 2.2.1\n")
    kind = "HistogramCalibrator" if options else "MaxCalibrator"
    assert "conv1._input_quantizer                  : TensorQuantizer(8bit fake per-tensor amax=" in found.stdout
    assert f"calibrator={kind} scale=1.0 quant)" in found.stdout
    model = onnx.load(tmp_path / "model.onnx")
    kinds = [node.op_type for node in model.graph.node]
    # Two convolutions and a linear layer with input and weight, and the input of the pooling.
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 7
    options_of_session = onnxruntime.SessionOptions()
    options_of_session.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options_of_session)
    torch.manual_seed(12345)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from shapes import dataset
    finally:
        sys.path.pop(0)
    (scores,) = session.run(None, {"images": dataset(48)[0][:2].numpy()})
    # Products are summed in another order.
    np.testing.assert_allclose(scores, torch.load(tmp_path / "scores.pt").detach().numpy(), rtol=0, atol=1e-5)


def test_arguments_and_the_status_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, json, pytorch_quantization\n"
        "print(json.dumps([__name__, sys.argv, sys.path[0], pytorch_quantization.__name__]))\n"
        "sys.exit(3)\n"
    )
    found = python("-m", "fakequant.compat", "run", script, "--name", "x y")
    assert found.returncode == 3
    name = "fakequant.compat.pytorch_quantization"
    assert json.loads(found.stdout) == ["__main__", [str(script), "--name", "x y"], str(tmp_path), name]


@pytest.mark.parametrize("arguments", [[], ["run"], ["walk", str(SCRIPT)], ["run", "missing.py"]], ids=str)
def test_wrong_arguments(arguments):
    with pytest.raises(SystemExit, match=r"usage: python -m fakequant\.compat run SCRIPT"):
        main(arguments)


def test_help(capsys):
    main(["--help"])
    assert capsys.readouterr().out.startswith("usage:")


def test_modules_are_the_same_under_both_names():
    package = install("pytorch_quantization")
    assert install("pytorch_quantization") is package
    import pytorch_quantization.calib.max  # type: ignore
    import pytorch_quantization.nn.modules.quant_conv as other  # type: ignore
    from fakequant.compat.pytorch_quantization.nn.modules import quant_conv
    from pytorch_quantization import cuda_ext, tensor_quant, utils  # type: ignore  # noqa: F401
    from pytorch_quantization.optim.helper import match_parameters  # type: ignore  # noqa: F401

    assert other is quant_conv
    assert pytorch_quantization.nn.QuantConv2d is quant_conv.QuantConv2d
    assert sys.modules["pytorch_quantization"] is package
    assert package.__spec__.name == "fakequant.compat.pytorch_quantization"
    with pytest.raises(ModuleNotFoundError):
        import pytorch_quantization.nothing  # type: ignore


def test_models_pickled_under_the_original_name_load():
    install("pytorch_quantization")
    from fakequant.compat.pytorch_quantization.nn import QuantLinear

    layer = QuantLinear(2, 2)
    data = pickle.dumps(layer, protocol=0)
    renamed = data.replace(b"fakequant.compat.pytorch_quantization", b"pytorch_quantization")
    assert renamed != data
    other = pickle.loads(renamed)
    assert type(other) is QuantLinear
    x = torch.randn(3, 2)
    assert torch.equal(other(x), layer(x))


def test_what_cannot_be_installed():
    with pytest.raises(ConfigError, match="did you mean pytorch_quantization"):
        install("pytorch-quantisation")
    code = (
        "import sys, types; sys.modules['pytorch_quantization'] = types.ModuleType('pytorch_quantization')\n"
        "import fakequant.errors, fakequant.compat as c\n"
        "try: c.install('pytorch_quantization')\n"
        "except fakequant.errors.ConfigError as e: print(e)"
    )
    assert "imported already" in python("-c", code).stdout
