"""docs/coming-from.md: calls of other libraries beside ours, where they are installed (`fakequant[bench]`, AIMET).

A row that says "equal" has a specification, and a case here that finds no other element.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fakequant as fq

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
AO, CHANNELS = "int8 per_channel(0) reciprocal scale=float32:half_range", "int8_narrow per_channel(0)"
INT4: Any = vars(torch)["int4"]
GROUPS = "int4 per_block(-1:32) reciprocal scale=float32:half_range"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) for _ in range(4)]


def ours(weight: str, inputs: str | None = None, *, dynamic: bool = False) -> Any:
    """The network in the numbers of the page."""
    assert f"`{weight}`" in PAGE or f'"{weight}"' in PAGE
    assert inputs is None or f"`{inputs}`" in PAGE
    tensor = None if inputs is None else fq.TensorConfig(inputs, dynamic)
    model = fq.prepare(net(), fq.Config("theirs", (fq.Rule("*", weight=fq.TensorConfig(weight), input=tensor),)))
    fq.calibrate(model, batches(), method="max", weight_method="max")
    return model


def weights(model: Any) -> Tensor:
    return model[0].weight_quantizer(model[0].weight)


def observed(model: Any) -> Any:
    for batch in batches():
        model(batch)
    return model


def qconfig() -> Any:
    ao = import_module("torch.ao.quantization")
    activation = ao.MinMaxObserver.with_args(dtype=torch.quint8)
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    return ao.QConfig(activation=activation, weight=ao.PerChannelMinMaxObserver.with_args(**symmetric))


def eager() -> tuple[Tensor, Tensor]:
    ao = import_module("torch.ao.quantization")
    model = nn.Sequential(ao.QuantStub(), *net(), ao.DeQuantStub()).eval()
    model.qconfig = qconfig()
    theirs: Any = ao.convert(observed(ao.prepare(model)))
    return theirs[1].weight().dequantize(), weights(ours(AO))


def fx_weights() -> tuple[Tensor, Tensor]:
    return _reference().get_submodule("0")[0].get_weight(), weights(ours(AO))


def fx_inputs() -> tuple[Tensor, Tensor]:
    theirs, x = _reference(), batches()[0]
    scale, zero_point = (getattr(theirs, f"0_input_{name}_0") for name in ("scale", "zero_point"))
    codes: Any = torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    return codes.dequantize(), ours(AO, "uint8 reciprocal")[0].input_quantizer(x)


def _reference() -> Any:
    fx, ao = import_module("torch.ao.quantization.quantize_fx"), import_module("torch.ao.quantization")
    prepared = fx.prepare_fx(net(), ao.QConfigMapping().set_global(qconfig()), (batches()[0],))
    return fx.convert_to_reference_fx(observed(prepared))


def pt2e() -> tuple[Tensor, Tensor]:
    steps = import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    graph = torch.export.export(net(), (batches()[0],)).module()
    theirs = steps.convert_pt2e(observed(steps.prepare_pt2e(graph, quantizer)))
    read = torch.ops.quantized_decomposed.dequantize_per_channel.default
    codes = theirs._frozen_param0, theirs._scale_0, theirs._zero_point_0
    return read(*codes, 0, -128, 127, torch.int8), weights(ours(AO))


def torchao(config: Callable[[Any], Any]) -> Any:
    library = import_module("torchao.quantization")
    model = net()
    library.quantize_(model, config(library))
    return model


def torchao_groups() -> tuple[Tensor, Tensor]:
    x = batches()[0]
    return torchao(lambda ao: ao.IntxWeightOnlyConfig(INT4, ao.PerGroup(32)))(x), ours(GROUPS)(x)


def torchao_int8() -> tuple[Tensor, Tensor]:
    return torchao(lambda ao: ao.Int8WeightOnlyConfig())[0].weight.dequantize(), weights(ours(AO))


def torchao_dynamic() -> tuple[Tensor, Tensor]:
    x = batches()[0]
    theirs = torchao(lambda ao: ao.Int8DynamicActivationIntxWeightConfig(INT4, ao.PerGroup(32)))
    return theirs(x), ours(GROUPS, "int8 per_token asymmetric reciprocal", dynamic=True)(x)


def torchao_float8() -> tuple[Tensor, Tensor]:
    theirs = torchao(lambda ao: ao.Float8WeightOnlyConfig())
    return theirs[0].weight.dequantize(), weights(ours("float8_e4m3fn per_channel(0)"))


def modelopt(name: str) -> Any:
    library = import_module("modelopt.torch.quantization")
    return library.quantize(net(), copy.deepcopy(getattr(library, name)), observed)


def modelopt_int8() -> tuple[Tensor, Tensor]:
    x = batches()[0]
    return modelopt("INT8_DEFAULT_CFG")(x), ours("int8 per_channel(0) multiplier", "int8 multiplier")(x)


def modelopt_int4() -> tuple[Tensor, Tensor]:
    x = batches()[0]
    return modelopt("INT4_BLOCKWISE_WEIGHT_ONLY_CFG")(x), ours("int4 per_block(-1:128,pad) multiplier")(x)


def modelopt_fp8() -> tuple[Tensor, Tensor]:
    return weights(modelopt("FP8_DEFAULT_CFG")), weights(ours("float8_e4m3fn reciprocal"))


def brevitas() -> tuple[Tensor, Tensor]:
    quantizer = import_module("brevitas.quant").Int8WeightPerChannelFloat
    layer = import_module("brevitas.nn").QuantLinear(64, 64, bias=True, weight_quant=quantizer)
    layer.load_state_dict(net()[0].state_dict(), strict=False)
    return layer.eval().quant_weight().value, weights(ours(CHANNELS))


def aimet() -> tuple[Tensor, Tensor]:
    simulation = import_module("aimet_torch").QuantizationSimModel(net(), batches()[0], quant_scheme="tf")
    simulation.compute_encodings(observed)
    x = batches()[0]
    theirs = simulation.model.get_submodule("0").input_quantizers[0](x)
    return theirs.dequantize(), ours(CHANNELS, "uint8")[0].input_quantizer(x)


CASES: dict[str, tuple[str, Callable[[], tuple[Tensor, Tensor]]]] = {
    "eager": ("torch", eager),
    "fx weights": ("torch", fx_weights),
    "fx inputs": ("torch", fx_inputs),
    "pt2e": ("torchao", pt2e),
    "torchao groups": ("torchao", torchao_groups),
    "torchao int8": ("torchao", torchao_int8),
    "torchao dynamic": ("torchao", torchao_dynamic),
    "torchao float8": ("torchao", torchao_float8),
    "modelopt int8": ("modelopt", modelopt_int8),
    "modelopt int4": ("modelopt", modelopt_int4),
    "modelopt fp8": ("modelopt", modelopt_fp8),
    "aimet": ("aimet_torch", aimet),
    "brevitas": ("brevitas", brevitas),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_both_sides_give_the_same_numbers(case: str) -> None:
    library, run = CASES[case]
    pytest.importorskip(library)
    theirs, mine = run()
    assert theirs.shape == mine.shape
    assert int((theirs != mine).sum()) == 0
