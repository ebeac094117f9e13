"""Time of small floats with given scales over that of a plain copy: `python -m benchmarks.formats`.

Cases and measurement are those of `kernels`: compared with the reference first, then timed in turns with the copy.
"""

from __future__ import annotations

import torch

import fakequant as fq

from . import kernels

LIMIT = 2.0

_GRANULARITIES = {"per tensor": fq.PerTensor(), "blocks of 32": fq.PerBlock({-1: 32})}
CASES = tuple(
    kernels.Case(f"{name} {where}", fq.QuantSpec(name, granularity), shape=kernels.ROWS)
    for name in ("float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn")
    for where, granularity in _GRANULARITIES.items()
)


def main() -> int:
    """Print a table; 1 if a case differs from the reference or is slower than the limit."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kernels.ELEMENTS:,} float32, over x.clone()")
    failed = 0
    for case in CASES:
        if differing := case.differing():
            print(f"{case.name:30} differs from the reference in {differing:,} elements")
            failed = 1
            continue
        found = kernels.ratio(case.run(), case.copy(), case.inputs())
        missed = found.median > LIMIT
        failed |= missed
        quartiles = f"{found.low:.2f} - {found.high:.2f}"
        print(f"{case.name:30} {1e3 * found.seconds:7.2f} ms {found.median:6.2f} {quartiles:>13}{' MISSED' * missed}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
