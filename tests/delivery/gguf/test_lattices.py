"""Specifications, types and bytes of GGUF's blocks: the values that the package gguf reads, in every bit, and back."""

import numpy as np
import pytest
import torch

import fakequant as fq
from fakequant.delivery.gguf.blocks import LAYOUTS, from_blocks, kind_of, pack, spec_of, to_blocks, unpack
from fakequant.errors import CheckpointError, QParamsError, ShapeError
from fakequant.model.state.weight_codes import WeightCodes
from tests.support.gguf_blocks import BLOCKS, numbers_of

SHAPE = 8, 512


def hard_weight():
    """Rows of normal, of zero, of tiny and of huge numbers, and one with an outlier."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    weight[1], weight[2, :300], weight[3], weight[4] = 0, 0, weight[3] * 1e-5, weight[4] * 1e4
    weight[5, 17] = 1e3
    return weight


def weight_codes(weight, spec):
    params = fq.choose_qparams(weight, spec)
    codes = fq.quantize(weight, spec, scale=params.scale, zero_point=params.zero_point)[0]
    return WeightCodes(codes, params.scale, params.zero_point, spec, tuple(weight.shape), torch.float32)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_values_are_those_that_the_package_gguf_reads(kind):
    gguf = pytest.importorskip("gguf")
    weight = hard_weight()
    coded = weight_codes(weight, spec_of(kind))
    raw = to_blocks(kind, coded)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(theirs, coded.values())
    assert torch.equal(theirs, fq.fake_quantize(weight, spec_of(kind)))
    again = from_blocks(kind, raw, torch.float32)
    again.check()
    assert torch.equal(again.values(), theirs)
    assert np.array_equal(to_blocks(kind, again), raw)


def test_bytes_of_trits_are_those_of_the_package_gguf():
    gguf = pytest.importorskip("gguf")
    weight = torch.randint(-1, 2, SHAPE, generator=torch.Generator().manual_seed(0)).float()
    weight[0] = -1  # bytes of five lowest trits are 0, a product of 243 that is not rounded up
    raw = to_blocks("TQ1_0", weight_codes(weight, spec_of("TQ1_0")))
    assert np.array_equal(raw, gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.TQ1_0))


@pytest.mark.parametrize("fill", ["random", "lowest", "highest", "rising"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_of_any_file_are_read_with_their_values(kind, fill):
    gguf = pytest.importorskip("gguf")
    numbers = numbers_of(kind, fill)
    if "exponent" in numbers:
        numbers["exponent"] = numbers["exponent"].clip(0, 252)  # 6 * 2**126 is infinite
    raw = pack(kind, numbers)
    theirs = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    found = from_blocks(kind, raw, torch.float32)
    assert torch.equal(found.values(), theirs)
    once = to_blocks(kind, found)  # which may give products of scales by other factors
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(once, gguf.GGMLQuantizationType[kind])), theirs)
    assert np.array_equal(to_blocks(kind, from_blocks(kind, once, torch.float32)), once)


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "MXFP4"])
def test_scales_that_are_not_finite_are_refused(kind):
    numbers = numbers_of(kind, "random")
    numbers["d"][3] = np.inf
    with pytest.raises(CheckpointError, match="inf or NaN"):
        from_blocks(kind, pack(kind, numbers), torch.float32)


def test_scales_off_the_lattice_are_refused():
    coded = weight_codes(hard_weight(), spec_of("Q4_0"))
    with pytest.raises(QParamsError, match="scales of shape"):
        to_blocks("Q4_0", fq.WeightCodes(coded.codes, coded.scale * 1.001, None, coded.spec, SHAPE, torch.float32))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((str(spec_of(kind)), kind) for kind in LAYOUTS if kind != "TQ2_0"),
        (str(spec_of("TQ2_0")), "TQ1_0"),  # the same lattice in fewer bytes
        ("int8_narrow per_block(1:32,pad) reciprocal scale=float16", "Q8_0"),
        ("int6 per_block(-1:32) scale=float16", "Q8_0"),
        ("int3 per_block(-1:32) stochastic scale=float16", "Q4_0"),
        ("uint3 per_block(-1:32) scale=float16 offset=float16", "Q4_1"),
        ("float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:ceil", "MXFP4"),
        ("int5 per_block(-1:16) scale=int8@per_block(-1:16)/float16", "Q6_K"),
    ],
)
def test_the_type_of_a_specification(text, kind):
    assert kind_of(fq.QuantSpec.parse(text), SHAPE) == kind


@pytest.mark.parametrize(
    "text",
    [
        "int8",
        "int8 per_channel(0)",
        "int2_narrow per_channel(0) scale=float16",
        "int4 per_block(-1:32)",
        "int4 per_block(-1:32) scale=bfloat16",
        "int4 per_block(0:2,-1:32) scale=float16",
        "int4 per_block(-1:64) scale=float16",
        "int9 per_block(-1:32) scale=float16",
        "uint4 per_block(-1:32) scale=float16",
        "uint4 per_block(-1:32) asymmetric scale=float32",
        "int4 per_block(-1:32) multiplier",
        "nf4 per_block(-1:32) scale=float16",
        "float8_e4m3fn per_block(-1:32) scale=float8_e8m0fnu:floor",
        "float4_e2m1fn per_block(-1:16) scale=float8_e4m3fn@per_tensor",
        "int6 per_block(-1:16) scale=int8@per_block(-1:8)/float16",
        "int6 per_block(-1:16) scale=int8@per_block(-1:16)/bfloat16",
        "uint4 per_block(-1:32) scale=uint6@per_block(-1:8)/float16 offset=float16",
    ],
)
def test_other_lattices_are_refused(text):
    with pytest.raises(ShapeError, match="GGUF has no type for "):
        kind_of(fq.QuantSpec.parse(text), SHAPE)


@pytest.mark.parametrize(
    ("kind", "columns", "instead"),
    [
        ("Q4_K", 160, "Q5_0, the preset GGUF_Q5_0"),
        ("Q6_K", 32, "Q8_0, the preset GGUF_Q8_0"),
        ("Q2_K", 224, "Q4_0, the preset GGUF_Q4_0"),
        ("TQ2_0", 320, "Q4_0, the preset GGUF_Q4_0"),
        ("Q8_0", 40, "F16, in float"),
    ],
)
def test_rows_that_are_no_whole_blocks_are_refused_by_what_llama_cpp_stores_then(kind, columns, instead):
    message = f"its rows of {columns} do not divide into blocks of .* llama.cpp stores them as {instead}$"
    with pytest.raises(ShapeError, match=message):
        kind_of(spec_of(kind), (8, columns))


@pytest.mark.parametrize("fill", ["random", "lowest", "highest", "rising"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_are_those_that_the_package_gguf_reads(kind, fill):
    gguf = pytest.importorskip("gguf")
    numbers = numbers_of(kind, fill)
    raw = pack(kind, numbers)
    type_ = gguf.GGMLQuantizationType[kind]
    assert (LAYOUTS[kind].weights, LAYOUTS[kind].size) == gguf.GGML_QUANT_SIZES[type_]
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
    if kind != "TQ1_0":  # 256 bytes, of which 243 are written
        assert np.array_equal(pack(kind, unpack(kind, raw)), raw)
    if kind == "MXFP4":  # a part of the exponents has infinite values
        raw[:, 0] = raw[:, 0].clip(1, 252)
        read = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(from_blocks(kind, raw, torch.float32).values().numpy().reshape(read.shape), read)


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
    with pytest.raises(CheckpointError, match="no layout is known for the GGUF type 'IQ2_XXS'; did you mean IQ4_XS"):
        pack("IQ2_XXS", {})
    with pytest.raises(CheckpointError, match=r"blocks of Q4_K are uint8 \[blocks, 144\], got uint8 \[3, 143\]"):
        unpack("Q4_K", np.zeros((3, 143), np.uint8))
    assert unpack("Q4_K", pack("Q4_K", {k: v[:0] for k, v in numbers_of("Q4_K", "random").items()}))["d"].shape == (0,)
