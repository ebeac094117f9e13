"""torchao: its fake quantizers, and for MX and NVFP4 the storage classes that its training layers quantize by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import kinds

from . import call
from .call import Call, Peer, Theirs

PEER = Peer(
    "torchao",
    "torchao",
    ((kinds.FP8_TENSOR, call.TAKES_SCALES), (kinds.MXINT8, call.NO_FORMAT)),
)


def _int8(x: Tensor) -> Theirs:
    from torchao.quantization.pt2e import FakeQuantize, MinMaxObserver

    quantizer = FakeQuantize(
        observer=MinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.int8, qscheme=torch.per_tensor_symmetric
    )
    quantizer(x)
    quantizer.disable_observer()
    return Theirs(quantizer, given=quantizer.scale)


def _int8_given_per_channel(x: Tensor) -> Theirs:
    from torchao.quantization.pt2e import FakeQuantize, PerChannelMinMaxObserver

    quantizer = FakeQuantize(
        observer=PerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.int8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
    quantizer(x)
    quantizer.disable_observer()
    return Theirs(quantizer, given=quantizer.scale)


def _int8_per_token(x: Tensor) -> Theirs:
    from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

    return Theirs(IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)))


def _lsq(x: Tensor) -> Theirs:
    from torchao.quantization.pt2e import MinMaxObserver
    from torchao.quantization.pt2e.learnable_fake_quantize import LearnableFakeQuantize

    quantizer = LearnableFakeQuantize(
        MinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.int8, qscheme=torch.per_tensor_symmetric
    )
    quantizer(x)
    quantizer.enable_range_learning()
    return Theirs(quantizer, given=quantizer.scale, learned=quantizer.scale)


def _int8_per_channel(x: Tensor) -> Theirs:
    from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

    quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True))
    return Theirs(quantizer, scale=x.abs().amax(1, keepdim=True) / 127.5)


def _groups(dtype: torch.dtype, half_the_codes: float) -> Callable[[Tensor], Theirs]:
    def build(x: Tensor) -> Theirs:
        from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

        quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(dtype, group_size=32, is_symmetric=True))
        return Theirs(quantizer, scale=call.block_amax(x) / half_the_codes)

    return build


def _fp8(x: Tensor) -> Theirs:
    from torchao.quantization import PerTensor
    from torchao.quantization.qat import Float8FakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizer

    return Theirs(Float8FakeQuantizer(Float8FakeQuantizeConfig(torch.float8_e4m3fn, PerTensor())))


def _mx(element: str) -> Callable[[Tensor], Theirs]:
    def build(x: Tensor) -> Theirs:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        dtype = getattr(torch, element)
        return Theirs(lambda x: MXTensor.to_mx(x, dtype, 32).dequantize(torch.float32))

    return build


def _nvfp4_layer(x: Tensor) -> Theirs:
    from torchao.prototype.qat.nvfp4 import NVFP4FakeQuantizeConfig, NVFP4FakeQuantizedLinear

    config = NVFP4FakeQuantizeConfig()
    return Theirs(NVFP4FakeQuantizedLinear(x.shape[-1], 16, activation_config=config, weight_config=config))


def _stored_nvfp4(x: Tensor) -> Theirs:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def run(x: Tensor) -> Tensor:
        shared = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=shared).dequantize(torch.float32)

    return Theirs(run)


_MXFP4, _MXFP8 = kinds.mx("float4_e2m1fn", "floor"), kinds.mx("float8_e4m3fn", "floor")
_HALF_A_CODE = "its scale is 2 amax / (highest - lowest code)"
_SHARED_FIRST = "it multiplies by (1 / tensor scale) / block scale, ours divides by their product"

CALLS = (
    Call(kinds.INT8_TENSOR, PEER, "pt2e.FakeQuantize", "int8 reciprocal", _int8),
    Call(kinds.INT8_CHANNEL, PEER, "pt2e.FakeQuantize", "int8 per_channel(0) reciprocal", _int8_given_per_channel),
    # It has no symmetric quantization per token.
    Call(kinds.INT8_TOKEN, PEER, "IntxFakeQuantizer", "int8 per_token asymmetric reciprocal", _int8_per_token),
    Call(kinds.LSQ, PEER, "pt2e LearnableFakeQuantize", "int8 reciprocal", _lsq),
    Call(
        kinds.INT8_CHANNEL_TAKEN,
        PEER,
        "IntxFakeQuantizer",
        "int8 per_channel(0) reciprocal",
        _int8_per_channel,
        _HALF_A_CODE,
    ),
    Call(kinds.FP8_TENSOR_TAKEN, PEER, "Float8FakeQuantizer", "float8_e4m3fn", _fp8),
    Call(
        kinds.INT8_GROUPS,
        PEER,
        "IntxFakeQuantizer",
        "int8 per_block(-1:32) reciprocal",
        _groups(torch.int8, 127.5),
        _HALF_A_CODE,
    ),
    Call(
        kinds.INT4_GROUPS,
        PEER,
        "IntxFakeQuantizer",
        "int4 per_block(-1:32) reciprocal",
        _groups(torch.int4, 7.5),
        _HALF_A_CODE,
    ),
    Call(kinds.MXFP4, PEER, "MXTensor", _MXFP4, _mx("float4_e2m1fn_x2")),
    Call(kinds.MXFP8, PEER, "MXTensor", _MXFP8, _mx("float8_e4m3fn")),
    Call(kinds.NVFP4, PEER, "NVFP4FakeQuantizedLinear", kinds.NVFP4.spec, _nvfp4_layer),
    Call(kinds.NVFP4, PEER, "NVFP4Tensor", kinds.NVFP4.spec, _stored_nvfp4, _SHARED_FIRST),
)
