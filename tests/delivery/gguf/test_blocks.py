"""Bytes of GGUF's blocks: the values that the package gguf reads from them, and the numbers back, in every bit."""

import numpy as np
import pytest

from fakequant.delivery.gguf.blocks import LAYOUTS, pack, unpack
from fakequant.errors import CheckpointError
from tests.support.gguf_blocks import BLOCKS, numbers_of

# MXFP4's largest scale times 6 is infinite, here as there.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, 0.0 - E2M1])  # code 8 is 0.0 there, not -0.0


def values_of(kind, numbers):
    """What the type means, in float64, where only the sum with a minimum is rounded; then once to float32."""
    wide = {name: values.astype(np.float64).reshape(BLOCKS, -1, 1) for name, values in numbers.items()}
    codes = numbers["codes"]
    codes = (
        {"IQ4_NL": IQ4, "IQ4_XS": IQ4, "MXFP4": E2M1}[kind][codes] if kind in ("IQ4_NL", "IQ4_XS", "MXFP4") else codes
    )
    scale = 2.0 ** (wide["exponent"] - 127) if "exponent" in wide else wide["d"] * wide.get("scales", 1.0)
    found = codes.astype(np.float64).reshape(BLOCKS, scale.shape[1], -1) * scale
    if "m" in wide:
        found = found - wide["m"] * wide["minima"] if "minima" in wide else found + wide["m"]
    return found.reshape(BLOCKS, -1).astype(np.float32)


@pytest.mark.parametrize("fill", ["random", "lowest", "highest", "rising"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_are_those_that_the_package_gguf_reads(kind, fill):
    gguf = pytest.importorskip("gguf")
    numbers = numbers_of(kind, fill)
    raw = pack(kind, numbers)
    type_ = gguf.GGMLQuantizationType[kind]
    assert (LAYOUTS[kind].weights, LAYOUTS[kind].size) == gguf.GGML_QUANT_SIZES[type_]
    read = gguf.quants.dequantize(raw, type_)
    assert np.array_equal(read.view(np.int32), values_of(kind, numbers).view(np.int32))
    again = unpack(kind, raw)
    assert again.keys() == numbers.keys()
    for name, values in numbers.items():
        assert (again[name].dtype, again[name].tobytes()) == (values.dtype, values.tobytes()), name
    assert np.array_equal(pack(kind, again), raw)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_all_bytes_are_read_as_the_package_gguf_reads_them(kind):
    gguf = pytest.importorskip("gguf")
    raw = np.random.default_rng(1).integers(0, 256, (BLOCKS, LAYOUTS[kind].size)).astype(np.uint8)
    if kind == "TQ2_0":
        with pytest.raises(CheckpointError, match="codes of TQ2_0 are -1 to 1, got 2"):
            unpack(kind, raw)
        raw[:, :64] = (raw[:, :64] & 0x55) << (raw[:, :64] >> 1 & 1)  # no code of two bits is 3
    place = 0
    for field in LAYOUTS[kind].fields:
        size = field.size(LAYOUTS[kind])
        if getattr(field, "name", "") in ("d", "m"):
            raw[:, place : place + size] &= np.uint8(0x3F)  # finite
        place += size
    read = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    numbers = unpack(kind, raw)
    assert np.array_equal(read.view(np.int32), values_of(kind, numbers).view(np.int32))
    if kind != "TQ1_0":  # 256 bytes, of which 243 are written
        assert np.array_equal(pack(kind, numbers), raw)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_integer_is_cut(kind):
    for name, one in LAYOUTS[kind].integers.items():
        for wrong in (one.lowest - 1, one.highest + 1):
            numbers = numbers_of(kind, "random")
            if not np.iinfo(one.dtype).min <= wrong <= np.iinfo(one.dtype).max:
                continue
            numbers[name][-1, -1] = wrong
            with pytest.raises(CheckpointError, match=f"{name} of {kind} are {one.lowest} to {one.highest}, got"):
                pack(kind, numbers)


def test_unknown_types_and_other_bytes_are_refused():
    with pytest.raises(CheckpointError, match="no lattice is known for the GGUF type 'IQ2_XXS'; did you mean IQ4_XS"):
        pack("IQ2_XXS", {})
    with pytest.raises(CheckpointError, match=r"blocks of Q4_K are \[blocks, 144\] of uint8, got \[3, 143\]"):
        unpack("Q4_K", np.zeros((3, 143), np.uint8))
    assert unpack("Q4_K", pack("Q4_K", {k: v[:0] for k, v in numbers_of("Q4_K", "random").items()}))["d"].shape == (0,)
