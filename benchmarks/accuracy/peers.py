"""The algorithms of other libraries on the same model, tensors, data and bits; each works on a copy of the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.cases import Case

Run = Callable[[nn.Module, list[Tensor]], nn.Module]
"""From a float model and batches to the model with quantized layers."""

_FP4, _E4M3, _E8M0 = (2, 1), (4, 3), (8, 0)
_MODELOPT: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "W8A8": ({"num_bits": 8, "axis": 0}, {"num_bits": 8, "axis": None}),
    "W4, groups of 128": ({"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}}, None),
    "W4, groups of 32": ({"num_bits": 4, "block_sizes": {-1: 32, "type": "static"}}, None),
    "W4 per channel": ({"num_bits": 4, "axis": 0}, None),
    "W3 per channel": ({"num_bits": 3, "axis": 0}, None),
    "W4A8 per channel": ({"num_bits": 4, "axis": 0}, {"num_bits": 8, "axis": None}),
    "NVFP4 W4A4": tuple({"num_bits": _FP4, "block_sizes": {-1: 16, "type": kind, "scale_bits": _E4M3}} for kind in ("static", "dynamic")),  # noqa: E501
    "MXFP4 W4A4": tuple({"num_bits": _FP4, "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": _E8M0}} for _ in range(2)),  # noqa: E501
}  # fmt: skip
_ALGORITHMS: dict[str, Any] = {
    "max": "max",
    "SmoothQuant": {"method": "smoothquant", "alpha": 0.5},
    "AWQ": {"method": "awq_lite", "alpha_step": 0.1},
    "AWQ and clipping": {"method": "awq_full"},
}


def modelopt(case: Case, algorithm: str) -> Run:
    """A case by an algorithm of NVIDIA's Model Optimizer."""
    weight, inputs = _MODELOPT[case.name]
    kinds = ["nn.Linear"] if case.only_linear else ["nn.Linear", "nn.Conv2d"]
    config: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for kind in kinds:
        config.append({"quantizer_name": "*weight_quantizer", "parent_class": kind, "cfg": weight})
        if inputs is not None:
            config.append({"quantizer_name": "*input_quantizer", "parent_class": kind, "cfg": inputs})

    def run(model: nn.Module, batches: list[Tensor]) -> nn.Module:
        import modelopt.torch.quantization as mtq

        def loop(model: nn.Module) -> None:
            for batch in batches:
                model(batch)

        return mtq.quantize(
            copy.deepcopy(model), {"quant_cfg": config, "algorithm": _ALGORITHMS[algorithm]}, forward_loop=loop
        )

    return run


def brevitas(case: Case, algorithm: str) -> Run:
    """A case by GPTQ, Qronos or rounding to nearest of Brevitas."""

    def run(model: nn.Module, batches: list[Tensor]) -> nn.Module:
        import brevitas.nn as qnn
        from brevitas.graph.calibrate import calibration_mode
        from brevitas.graph.quantize import layerwise_quantize
        from brevitas.quant import Int8ActPerTensorFloat

        given = {"weight_quant": _brevitas_weight(case), "bias_quant": None, "return_quant_tensor": False}
        given["input_quant"] = None if case.input is None else Int8ActPerTensorFloat
        kinds: dict[type[nn.Module], Any] = {nn.Linear: (qnn.QuantLinear, given)}
        if not case.only_linear:
            kinds[nn.Conv2d] = (qnn.QuantConv2d, given)
        quantized = layerwise_quantize(copy.deepcopy(model), compute_layer_map=kinds)
        if case.input is not None:
            with calibration_mode(quantized), torch.no_grad():
                for batch in batches:
                    quantized(batch)
        with torch.no_grad():
            quantized.eval()(batches[0])  # takes the scales of the weights
        if algorithm != "nearest":
            with _brevitas_mode(algorithm)(quantized) as mode, torch.no_grad():
                for _ in range(mode.num_layers):
                    for batch in batches:
                        mode.model(batch)
                    mode.update()
        return quantized.eval()

    return run


def _brevitas_mode(algorithm: str) -> Any:
    if algorithm == "GPTQ":
        from brevitas.graph.gptq import gptq_mode

        return lambda model: gptq_mode(model, act_order=True, use_quant_activations=True)
    from brevitas.graph.gpfq import gpfq_mode
    from brevitas.graph.qronos import Qronos

    return lambda model: gpfq_mode(model, act_order=True, use_quant_activations=True, algorithm_impl=Qronos)


def _brevitas_weight(case: Case) -> Any:
    from brevitas.inject.enum import ScalingImplType
    from brevitas.quant import Int8WeightPerChannelFloat
    from brevitas_examples.common.generative.quantizers import IntWeightSymmetricGroupQuant

    bits = int(case.name[1])
    if "groups" not in case.name:
        # A scale that is a parameter: GPTQ reads single columns, whose own statistics would give a scale without error.
        return Int8WeightPerChannelFloat.let(bit_width=bits, scaling_impl_type=ScalingImplType.PARAMETER_FROM_STATS)
    return IntWeightSymmetricGroupQuant.let(bit_width=bits, group_size=int(case.name.rsplit(" ", 1)[1]))


def runs(case: Case) -> dict[str, Run]:
    """The runs of a case, by what the table calls them."""
    found = {f"ModelOpt {name}": modelopt(case, name) for name in _ALGORITHMS if _has(case, name)}
    if "FP4" not in case.name:
        found |= {f"Brevitas {name}": brevitas(case, name) for name in ("nearest", "GPTQ", "Qronos")}
    return found


def _has(case: Case, algorithm: str) -> bool:
    """Whether ModelOpt offers an algorithm for a case: SmoothQuant for int8 only, AWQ for static blocks only."""
    if algorithm == "SmoothQuant":
        return case.name == "W8A8"
    return algorithm == "max" or "groups" in case.name or case.name == "NVFP4 W4A4"


def quiet(run: Run, model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """A run without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(model, batches)
