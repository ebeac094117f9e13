"""Time of small floats and of formats of blocks over that of a plain copy: `python -m benchmarks.formats`.

Cases and measurement are those of `kernels`: compared with the reference first, then timed in turns with the copy.
"""

from __future__ import annotations

import fakequant as fq

from . import kernels

_GRANULARITIES = {"per tensor": fq.PerTensor(), "blocks of 32": fq.PerBlock({-1: 32})}
GIVEN = tuple(
    kernels.Case(f"{name} {where}", fq.QuantSpec(name, granularity), shape=kernels.ROWS, limit=2.0)
    for name in ("float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn")
    for where, granularity in _GRANULARITIES.items()
)
_FROM_THE_INPUT = {
    "MXFP8": "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "MXFP4": "float4_e2m1fn per_block(-1:32) scale=float8_e8m0fnu:floor",
    "NVFP4": "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
    "INT4 in groups of 32": "int4 per_block(-1:32)",
    "INT4 in groups of 128": "int4 per_block(-1:128)",
}
DYNAMIC = tuple(
    kernels.Case(name, fq.QuantSpec.parse(spec), shape=kernels.ROWS, dynamic=True, limit=2.5)
    for name, spec in _FROM_THE_INPUT.items()
)


if __name__ == "__main__":
    raise SystemExit(kernels.report(GIVEN + DYNAMIC))
