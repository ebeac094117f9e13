"""Specifications of GGUF's types and others like them, and tensors to quantize by them."""

import numpy as np
import torch

_K = "uint6@per_block(-1:8)/float16"
LATTICES = {
    "Q8_0": "int8 per_block(-1:32) scale=float16",
    "Q4_0": "int4 per_block(-1:32) scale=float16:signed",
    "Q5_0": "int5 per_block(-1:32) scale=float16:signed",
    "Q4_1": "uint4 per_block(-1:32) scale=float16 offset=float16",
    "Q5_1": "uint5 per_block(-1:32) scale=float16 offset=float16",
    "Q2_K": "uint2 per_block(-1:16) scale=uint4@per_block(-1:16)/float16 offset=uint4@per_block(-1:16)/float16",
    "Q3_K": "int3 per_block(-1:16) scale=int6@per_block(-1:16)/float16",
    "Q4_K": f"uint4 per_block(-1:32) scale={_K} offset={_K}",
    "Q5_K": f"uint5 per_block(-1:32) scale={_K} offset={_K}",
    "Q6_K": "int6 per_block(-1:16) scale=int8@per_block(-1:16)/float16",
    "IQ4_NL": "iq4_nl per_block(-1:32) scale=float16:signed",
    "IQ4_XS": "iq4_nl per_block(-1:32) scale=int6@per_block(-1:8)/float16",
    "TQ2_0": "int2_narrow per_block(-1:256) scale=float16",
}
OTHERS = {
    "bfloat16": "int4 per_block(-1:32) scale=bfloat16",
    "float16_with_zero_point": "uint4 per_block(-1:128) scale=float16",
    "per_channel": "int8 per_channel(0) scale=float16",
    "ue4m3": "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn",
    "binary": "binary per_block(-1:32) scale=float16",
    "signed_offset": "uint2 per_block(-1:32) scale=float16 offset=float16:signed",
    "signed_offset_in_float32": "uint4 per_block(-1:32) offset=float32:signed",
    "plain_offset": "uint8 per_channel(0) offset=float32",
    "reciprocal": f"uint4 per_block(-1:32) reciprocal scale={_K} offset={_K}",
}
ALL = LATTICES | OTHERS
_OF_EIGHT = "scale=uint6@per_block(-1:8)/float16"
MORE = {
    "signed_float": "float4_e2m1fn per_block(-1:32) scale=float16:signed",
    "signed_float_without_negative_zero": "float8_e4m3fnuz per_block(-1:32) scale=int6@per_block(-1:8)/float16",
    "channels": "int4 per_channel(1) scale=float16:signed",
    "padded": "int4 per_block(-1:24,pad) scale=int6@per_block(-1:5,pad)/float16",
    "stochastic": "int4 per_block(-1:32) stochastic scale=float16:signed",
    "stochastic_offset": f"uint4 per_block(-1:32) stochastic {_OF_EIGHT} offset=float16",
    "identity": ALL["Q4_K"].replace("scale", "identity scale", 1),
    "clip": "uint4 per_block(-1:32) clip scale=float16 offset=float16",
    "input_range": "uint4 per_block(-1:32) input_range scale=float16 offset=float16",
    "input_range_signed": "int4 per_block(-1:32) input_range scale=float16:signed",
    "of_two_sizes": f"uint4 per_block(-1:32) {_OF_EIGHT} offset=uint6@per_block(-1:4)/float16",
    "of_rows": "int4 per_block(-1:32) scale=int6@per_block(0:2,-1:16)/float16",
    "of_columns": "int4 per_block(-1:32) scale=int6@per_block(0:4)/float16",
    "of_the_tensor": "int4 per_block(-1:8) scale=int6@per_tensor/float16",
    "ue4m3_under_float16": "int4 per_block(-1:32) scale=float8_e4m3fn@per_block(-1:8)/float16",
}


def weights(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def hostile():
    """Rows [16, 512]: zeros, zeros among others, equal numbers, one sign, tiny, large, subnormal, infinite and NaN."""
    x = weights(16, 512)
    x[0], x[1, :256], x[2, :32], x[3], x[4], x[5] = 0, 0, 0, 0.7, x[4].abs(), -x[5].abs()
    x[6], x[7], x[8], x[9, ::2] = x[6] * 1e-6, x[7] * 1e3, 1e-40, 0
    x[10, 0], x[11, 5], x[12, 77] = 1e4, torch.inf, -torch.inf
    x[13, 300] = torch.nan
    return x
