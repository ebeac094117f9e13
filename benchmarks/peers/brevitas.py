"""Brevitas: its quantizers of activations (scales collected beforehand) and of weights (taken anew at every call).

Three are subclasses of its own, made as its documentation says: activations per token, weights in groups, and MX with
E2M1 elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import kinds

from . import call
from .call import Call, Peer, Theirs

PEER = Peer("Brevitas", "brevitas", ((kinds.NVFP4, call.NO_FORMAT),))


def _activation(quantizer: type, x: Tensor, **options: Any) -> Any:
    """A layer that has collected its scale from x, in evaluation."""
    from brevitas.nn import QuantIdentity

    layer = QuantIdentity(act_quant=quantizer, **options).train()
    layer(x)
    return layer.eval()


def _weight(quantizer: type, x: Tensor) -> Theirs:
    from brevitas.nn import QuantLinear

    layer = QuantLinear(x.shape[1], x.shape[0], bias=False, weight_quant=quantizer).eval()
    return Theirs(lambda x: layer.weight_quant(x).value)


def _int8(x: Tensor) -> Theirs:
    from brevitas.quant import Int8ActPerTensorFloat

    layer = _activation(Int8ActPerTensorFloat, x)
    return Theirs(layer, given=layer.act_quant.scale())


def _int8_given_per_channel(x: Tensor) -> Theirs:
    from brevitas.quant import Int8ActPerTensorFloat

    layer = _activation(
        Int8ActPerTensorFloat,
        x,
        scaling_per_output_channel=True,
        per_channel_broadcastable_shape=(x.shape[0], 1),
        scaling_stats_permute_dims=(0, 1),
    )
    return Theirs(layer, given=layer.act_quant.scale())


def _int8_per_token(x: Tensor) -> Theirs:
    from brevitas.core.scaling.runtime import RuntimeDynamicGroupStatsScaling
    from brevitas.inject.enum import ScalingPerOutputType
    from brevitas.quant import Int8ActPerTensorFloat
    from brevitas.quant.mx_quant_ocp import GroupwiseActProxyMixin

    class Int8ActPerRowFloat(GroupwiseActProxyMixin, Int8ActPerTensorFloat):
        scaling_impl = RuntimeDynamicGroupStatsScaling
        scaling_per_output_type = ScalingPerOutputType.GROUP
        scaling_stats_op = "max"
        stats_reduce_dim = -1
        group_size = x.shape[1]
        narrow_range = True

    return Theirs(_activation(Int8ActPerRowFloat, x, group_dim=-1))


def _lsq(x: Tensor) -> Theirs:
    from brevitas.inject.enum import ScalingImplType
    from brevitas.nn import QuantIdentity
    from brevitas.quant import Int8ActPerTensorFloat

    amax = x.abs().amax().item()
    layer = QuantIdentity(
        act_quant=Int8ActPerTensorFloat, scaling_impl_type=ScalingImplType.PARAMETER, scaling_init=amax
    ).train()
    (learned,) = layer.parameters()
    return Theirs(layer, given=layer.act_quant.scale(), learned=learned)


def _int8_per_channel(x: Tensor) -> Theirs:
    from brevitas.quant import Int8WeightPerChannelFloat

    return _weight(Int8WeightPerChannelFloat, x)


def _fp8(x: Tensor) -> Theirs:
    from brevitas.quant import Fp8e4m3OCPActPerTensorFloat

    layer = _activation(Fp8e4m3OCPActPerTensorFloat, x)
    return Theirs(layer, given=layer.act_quant.scale())


def _groups(bits: int) -> Callable[[Tensor], Theirs]:
    def build(x: Tensor) -> Theirs:
        from brevitas.inject.enum import ScalingPerOutputType
        from brevitas.quant import Int8WeightPerTensorFloat
        from brevitas.quant.mx_quant_ocp import GroupwiseWeightProxyMixin

        class IntWeightPerGroupFloat(GroupwiseWeightProxyMixin, Int8WeightPerTensorFloat):
            bit_width = bits
            group_size = 32
            scaling_per_output_type = ScalingPerOutputType.GROUP

        return _weight(IntWeightPerGroupFloat, x)

    return build


def _mxfp4(x: Tensor) -> Theirs:
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act

    class MXFloat4e2m1Act(MXFloat8e4m3Act):
        bit_width = 4
        exponent_bit_width = 2
        mantissa_bit_width = 1

    return Theirs(_activation(MXFloat4e2m1Act, x, group_dim=-1))


def _mxfp8(x: Tensor) -> Theirs:
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act

    return Theirs(_activation(MXFloat8e4m3Act, x, group_dim=-1))


def _mxint8(x: Tensor) -> Theirs:
    from brevitas.quant.mx_quant_ocp import MXInt8Act

    exponent = torch.frexp(call.block_amax(x)).exponent - 1
    return Theirs(_activation(MXInt8Act, x, group_dim=-1), scale=torch.exp2(exponent - 7.0))


_GROUP = "IntWeightPerGroupFloat"
_MXINT8 = kinds.mx("int8", "floor")
_TWICE_AS_FINE = "its scale is 2^(floor(log2 amax) - 7), half of the standard's: the largest of a block saturate"

CALLS = (
    Call(kinds.INT8_TENSOR, PEER, "Int8ActPerTensorFloat", "int8", _int8, call.SIGNED),
    Call(
        kinds.INT8_CHANNEL, PEER, "Int8ActPerTensorFloat", "int8 per_channel(0)", _int8_given_per_channel, call.SIGNED
    ),
    Call(kinds.INT8_TOKEN, PEER, "Int8ActPerRowFloat", "int8_narrow per_token", _int8_per_token, call.SIGNED),
    Call(kinds.LSQ, PEER, "Int8ActPerTensorFloat, PARAMETER", "int8", _lsq, call.SIGNED),
    Call(
        kinds.INT8_CHANNEL_TAKEN,
        PEER,
        "Int8WeightPerChannelFloat",
        "int8_narrow per_channel(0)",
        _int8_per_channel,
        call.SIGNED,
    ),
    Call(kinds.FP8_TENSOR, PEER, "Fp8e4m3OCPActPerTensorFloat", "float8_e4m3fn", _fp8),
    Call(kinds.INT8_GROUPS, PEER, _GROUP, "int8_narrow per_block(-1:32)", _groups(8), call.SIGNED),
    Call(kinds.INT4_GROUPS, PEER, _GROUP, "int4_narrow per_block(-1:32)", _groups(4), call.SIGNED),
    Call(kinds.MXFP4, PEER, "MXFloat4e2m1Act", kinds.mx("float4_e2m1fn", "floor"), _mxfp4),
    Call(kinds.MXFP8, PEER, "MXFloat8e4m3Act", kinds.mx("float8_e4m3fn", "floor"), _mxfp8),
    Call(kinds.MXINT8, PEER, "MXInt8Act", _MXINT8, _mxint8, _TWICE_AS_FINE),
)
