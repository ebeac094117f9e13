"""NVIDIA TensorRT Model Optimizer: its quantizer module, and where that needs a GPU its storage classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import kinds

from . import call
from .call import Call, Peer, Theirs

PEER = Peer("ModelOpt", "nvidia-modelopt", ((kinds.LSQ, "learns scales of blocks only"),))


def _quantizer(amax: Tensor | None = None, **attributes: Any) -> Any:
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    quantizer = TensorQuantizer(QuantizerAttributeConfig(**attributes))
    if amax is not None:
        quantizer.amax = amax
    return quantizer


def _int8(x: Tensor) -> Theirs:
    amax = x.abs().amax()
    return Theirs(_quantizer(amax, num_bits=8), given=torch.full_like(amax, 127.0) / amax)


def _int8_per_channel(x: Tensor) -> Theirs:
    amax = x.abs().amax(1, keepdim=True)
    return Theirs(_quantizer(amax, num_bits=8, axis=0), given=torch.full_like(amax, 127.0) / amax)


def _fp8(x: Tensor) -> Theirs:
    # x * m, then times 1 / m, with m = 448 / amax as torch computes it of a Python number.
    amax = x.abs().amax()
    return Theirs(_quantizer(amax, num_bits=(4, 3)), given=1.0 / (448.0 / amax))


def _int8_per_token(x: Tensor) -> Theirs:
    return Theirs(_quantizer(num_bits=8, block_sizes={-1: None, "type": "dynamic"}))


def _groups(bits: int) -> Callable[[Tensor], Theirs]:
    return lambda x: Theirs(_quantizer(num_bits=bits, block_sizes={-1: 32}))


def _dynamic_blocks(
    bits: int | tuple[int, int], block_size: int, scale_bits: tuple[int, int]
) -> Callable[[Tensor], Theirs]:
    blocks = {-1: block_size, "type": "dynamic", "scale_bits": scale_bits}
    return lambda x: Theirs(_quantizer(num_bits=bits, block_sizes=blocks))


def _stored_mxfp4(x: Tensor) -> Theirs:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    def run(x: Tensor) -> Tensor:
        stored, scale = MXFP4QTensor.quantize(x, 32)
        return stored.dequantize(scale=scale, block_sizes={-1: 32})

    return Theirs(run)


def _stored_mxfp8(x: Tensor) -> Theirs:
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    def run(x: Tensor) -> Tensor:
        stored, scale = MXFP8QTensor.quantize(x)
        return stored.dequantize(scale=scale)

    return Theirs(run)


def _stored_nvfp4(x: Tensor) -> Theirs:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def run(x: Tensor) -> Tensor:
        stored, scale, double_scale = NVFP4QTensor.quantize(x, 16)
        return stored.dequantize(scale=scale, double_scale=double_scale, block_sizes={-1: 16})

    return Theirs(run)


_E8M0, _E4M3 = (8, 0), (4, 3)
_MXFP4, _MXFP8 = kinds.mx("float4_e2m1fn", "ceil"), kinds.mx("float8_e4m3fn", "ceil")
_MXINT8 = kinds.mx("int8_narrow", "ceil")
_FAKE = "TensorQuantizer"

CALLS = (
    Call(kinds.INT8_TENSOR, PEER, _FAKE, "int8 multiplier", _int8),
    Call(kinds.INT8_CHANNEL, PEER, _FAKE, "int8 per_channel(0) multiplier", _int8_per_channel),
    Call(kinds.FP8_TENSOR, PEER, _FAKE, "float8_e4m3fn reciprocal", _fp8),
    Call(kinds.INT8_TOKEN, PEER, _FAKE, "int8 per_token multiplier", _int8_per_token),
    Call(kinds.INT8_GROUPS, PEER, _FAKE, "int8 per_block(-1:32) multiplier", _groups(8)),
    Call(kinds.INT4_GROUPS, PEER, _FAKE, "int4 per_block(-1:32) multiplier", _groups(4)),
    Call(kinds.MXFP4, PEER, _FAKE, _MXFP4, _dynamic_blocks((2, 1), 32, _E8M0)),
    Call(kinds.MXFP4, PEER, "MXFP4QTensor", _MXFP4, _stored_mxfp4, "it rounds ties down, unlike its GPU kernel"),
    Call(kinds.MXFP8, PEER, _FAKE, _MXFP8, _dynamic_blocks((4, 3), 32, _E8M0)),
    Call(kinds.MXFP8, PEER, "MXFP8QTensor", _MXFP8, _stored_mxfp8),
    Call(kinds.MXINT8, PEER, _FAKE, _MXINT8, _dynamic_blocks(8, 32, _E8M0)),
    Call(kinds.NVFP4, PEER, _FAKE, kinds.NVFP4.spec, _dynamic_blocks((2, 1), 16, _E4M3)),
    Call(kinds.NVFP4, PEER, "NVFP4QTensor", kinds.NVFP4.spec, _stored_nvfp4, call.UNSIGNED),
)
