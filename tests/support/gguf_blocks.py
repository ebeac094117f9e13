"""Numbers of GGUF's blocks, random and extreme."""

from __future__ import annotations

import numpy as np

from fakequant.delivery.gguf.blocks import LAYOUTS, Halfs

BLOCKS = 37


def numbers_of(kind: str, fill: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers of some blocks: random ones, or all the lowest or highest, or codes one after the other."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, one in LAYOUTS[kind].integers.items():
        values = rng.integers(one.lowest, one.highest + 1, (BLOCKS, one.count))
        if fill in ("lowest", "highest"):
            values[:] = getattr(one, fill)
        if fill == "rising":
            values[:] = one.lowest + np.arange(values.size).reshape(values.shape) % (one.highest - one.lowest + 1)
        found[name] = values.astype(one.dtype)
    for field in LAYOUTS[kind].fields:
        if isinstance(field, Halfs):
            d = rng.normal(size=BLOCKS).astype(np.float16)
            d[:6] = 0, -0.0, 65504, -65504, 2**-24, -(2**-14)
            found[field.name] = d
    return found
