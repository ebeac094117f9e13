"""Specifications of weights: every kind of format and granularity that solvers choose codes for."""

import fakequant as fq
from fakequant.numerics.spec import as_spec

WEIGHTS = {
    "int4 channel": "int4 per_channel(0)",
    "int3 group": "int3 per_block(-1:8,pad)",
    "uint4 asymmetric": fq.QuantSpec("uint4", fq.PerBlock({-1: 8}, pad=True), symmetric=False),
    "fp8": "float8_e4m3fn per_channel(0)",
    "mxfp4": "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor",
    "nvfp4": "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor",
    "nf4 tiles": "nf4 per_block(0:4,-1:8,pad)",
    "int8 tensor": "int8",
}


def spec_of_matrix(name: str) -> fq.QuantSpec:
    """One of them for a weight matrix [out, columns]."""
    spec = as_spec(WEIGHTS[name])
    return spec.replace(granularity=spec.granularity.remap_axes({0: 0, -1: 1}))
