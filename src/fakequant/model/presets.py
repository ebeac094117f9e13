"""Configurations to start from.

Unless the name says otherwise, weights are quantized per output channel, activations per tensor. Blocks lie along the
axis that the layer's product sums over; a last block may be smaller. Max pooling stays in float: it picks values, and
the next quantizer rounds them anyway.

Presets of 4-bit weights with activations in float use 8 bits, one scale per row, for tables of embeddings and for
layers that share a table: a lookup has no sum in which errors cancel. With only the table of a sentence encoder
quantized, the cosine to the float embeddings was 0.99702 at 4 bits, and 0.99999 at 8 bits. Presets of MLX give tables
the layout of other weights, as mlx-lm does.

Sources: OCP Microscaling Formats 1.0, table 1 and section 6.3 (MX); NVIDIA TensorRT Model Optimizer (NVFP4);
DeepSeek-V3, arXiv 2412.19437, section 3.3.2 (FP8 tiles); QLoRA, arXiv 2305.14314, section 3 (NF4); llama.cpp (GGUF);
mlx-lm 0.32 (MLX); vLLM 0.32 (W8A8_DYNAMIC); compressed-tensors 0.20 (W8A8_TRANSFORMERS); ExecuTorch 1.5
(W4A8_EXECUTORCH); BitNet b1.58, arXiv 2402.17764.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fakequant.model.config import ALIASES as ALIASES
from fakequant.model.config import NAMED, TABLES, Config, Rule, TensorConfig, register_preset
from fakequant.model.config import find_preset as find_preset
from fakequant.nn.backward import GradientConfig
from fakequant.numerics.granularity import PerBlock

_MAX_POOLING_IN_FLOAT = Rule(layers=("MaxPool1d", "MaxPool2d", "MaxPool3d"), optional=True)
_TABLES_AT_8_BITS = replace(TABLES, weight=TensorConfig("int8 per_channel(0)"))


def _preset(
    name: str, *, weight: str, input: str | None = None, dynamic: bool = False, gradient: GradientConfig | None = None
) -> Config:
    activations = None if input is None else TensorConfig(input, dynamic)
    rule = Rule(input=activations, weight=TensorConfig(weight), gradient=gradient)
    return Config(name, (rule, _MAX_POOLING_IN_FLOAT))


def _four_bits(name: str, weight: str) -> Config:
    """A configuration with weights of 4 bits and activations in float; tables of embeddings have 8 bits."""
    return Config(name, (Rule("*", weight=TensorConfig(weight)), _TABLES_AT_8_BITS, _MAX_POOLING_IN_FLOAT))


def _mx(name: str, format: str) -> Config:
    """A configuration with blocks of 32 and power-of-two scales; the scales of activations are dynamic."""
    spec = f"{format} per_block(-1:32,pad) scale=float8_e8m0fnu:floor"
    return _preset(name, weight=spec, input=spec, dynamic=True)


_NVFP4 = "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn@per_tensor"

INT8 = _preset("INT8", weight="int8 per_channel(0)", input="int8")
"""W8A8, symmetric, which TensorRT and most engines run."""

INT8_AFFINE = _preset("INT8_AFFINE", weight="int8 per_channel(0)", input="uint8")
"""W8A8 with asymmetric activations, which the kernels of ONNX Runtime and of mobile CPUs run."""

INT8_PER_TOKEN = _preset("INT8_PER_TOKEN", weight="int8 per_channel(0)", input="int8 per_token", dynamic=True)
"""W8A8 with a dynamic range for every token: needs no calibration."""

INT8_WEIGHT_ONLY = _preset("INT8_WEIGHT_ONLY", weight="int8 per_channel(0)")
"""W8: activations stay in float."""

INT4 = _preset("INT4", weight="int4 per_channel(0)", input="uint4")
"""W4A4 with asymmetric activations: needs fine-tuning."""

INT4_WEIGHT_ONLY = _four_bits("INT4_WEIGHT_ONLY", "int4 per_channel(0)")
"""W4: activations stay in float, embeddings have 8 bits."""

FP8 = _preset("FP8", weight="float8_e4m3fn per_channel(0)", input="float8_e4m3fn")
"""W8A8 in FP8 E4M3."""

FP8_E5M2 = _preset("FP8_E5M2", weight="float8_e5m2 per_channel(0)", input="float8_e5m2")
"""W8A8 in FP8 E5M2: more range, less precision."""

FP8_BLOCK = _preset(
    "FP8_BLOCK",
    weight="float8_e4m3fn per_block(0:128,-1:128,pad)",
    input="float8_e4m3fn per_block(-1:128,pad)",
    dynamic=True,
)
"""W8A8 in FP8 E4M3: weights in tiles of 128 x 128, activations per token in blocks of 128, as DeepSeek-V3 trains."""

MXFP8 = _mx("MXFP8", "float8_e4m3fn")
"""W8A8 in OCP MXFP8 with E4M3 elements."""

MXFP8_E5M2 = _mx("MXFP8_E5M2", "float8_e5m2")
"""W8A8 in OCP MXFP8 with E5M2 elements: more range, less precision."""

MXFP6_E2M3 = _mx("MXFP6_E2M3", "float6_e2m3fn")
"""W6A6 in OCP MXFP6 with E2M3 elements."""

MXFP6_E3M2 = _mx("MXFP6_E3M2", "float6_e3m2fn")
"""W6A6 in OCP MXFP6 with E3M2 elements: more range, less precision."""

MXFP6 = MXFP6_E2M3
"""MXFP6 with more precision, the same as MXFP6_E2M3."""

MXFP4 = _mx("MXFP4", "float4_e2m1fn")
"""W4A4 in OCP MXFP4: needs fine-tuning."""

# The element's implicit 2**-6 is part of the scale here: floor(log2(127)) = 6, so that floor gives
# 2**(floor(log2(amax)) - 6). -128, which the standard lets go unused for symmetry, is unused as in its reference.
MXINT8 = _mx("MXINT8", "int8_narrow")
"""W8A8 in OCP MXINT8."""

NVFP4 = _preset("NVFP4", weight=_NVFP4, input=_NVFP4, dynamic=True)
"""W4A4 in NVFP4: FP4 in blocks of 16 with E4M3 scales, times a float32 scale of the tensor; needs fine-tuning."""

NVFP4_WEIGHT_ONLY = _four_bits("NVFP4_WEIGHT_ONLY", _NVFP4)
"""W4 in NVFP4: activations stay in float, embeddings have 8 bits."""

FP8_TRAINING = _preset(
    "FP8_TRAINING", weight="float8_e4m3fn", input="float8_e4m3fn", dynamic=True, gradient=GradientConfig("float8_e5m2")
)
"""Training in FP8, a dynamic range per tensor: gradients in E5M2, other tensors in E4M3, as in Transformer Engine."""

_MXFP8_CEIL = "float8_e4m3fn per_block(-1:32,pad) scale=float8_e8m0fnu:ceil"
MXFP8_TRAINING = _preset(
    "MXFP8_TRAINING",
    weight=_MXFP8_CEIL,
    input=_MXFP8_CEIL,
    dynamic=True,
    gradient=GradientConfig(_MXFP8_CEIL, input=_MXFP8_CEIL, weight=_MXFP8_CEIL),
)
"""Training in MXFP8: the forward product and both backward products multiply E4M3; NVIDIA, arXiv 2506.08027."""

_MXFP4_CEIL = "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:ceil"
MXFP4_TRAINING = _preset(
    "MXFP4_TRAINING",
    weight=_MXFP4_CEIL,
    input=_MXFP4_CEIL,
    dynamic=True,
    gradient=GradientConfig(*[f"{_MXFP4_CEIL} stochastic"] * 3, hadamard=32),
)
"""Training in MXFP4: both factors of backward products are rotated and rounded stochastically; arXiv 2502.20586."""

NVFP4_TRAINING = _preset(
    "NVFP4_TRAINING",
    weight=_NVFP4.replace("-1:16", "0:16,-1:16"),
    input=_NVFP4,
    dynamic=True,
    gradient=GradientConfig(f"{_NVFP4} stochastic", input=_NVFP4, hadamard=16),
)
"""Training in NVFP4 (arXiv 2509.25149). Weights are quantized in squares of 16, for forward and backward products;
gradients are rounded stochastically; both factors of the weight's gradient are rotated. In the paper the last layers
stay in bfloat16: use `skip`."""

INT4_GROUP32 = _four_bits("INT4_GROUP32", "int4 per_block(-1:32,pad)")
"""W4 in groups of 32 inputs: activations stay in float, embeddings have 8 bits."""

INT4_GROUP64 = _four_bits("INT4_GROUP64", "int4 per_block(-1:64,pad)")
"""W4 in groups of 64 inputs: activations stay in float, embeddings have 8 bits."""

INT4_GROUP128 = _four_bits("INT4_GROUP128", "int4 per_block(-1:128,pad)")
"""W4 in groups of 128 inputs, as AWQ and GPTQ store it: activations stay in float, embeddings have 8 bits."""

NF4_WEIGHT_ONLY = _four_bits("NF4_WEIGHT_ONLY", "nf4 per_block(-1:64,pad)")
"""W4 in NF4, blocks of 64: activations stay in float, embeddings have 8 bits."""

W8A8_DYNAMIC = _preset("W8A8_DYNAMIC", weight="int8 per_channel(0)", input="int8 per_token reciprocal", dynamic=True)
"""W8A8 with the codes of vLLM on CPUs: scale amax / 127 of every token, code rint(x * (1 / scale))."""

FP8_DYNAMIC = _preset(
    "FP8_DYNAMIC", weight="float8_e4m3fn per_channel(0)", input="float8_e4m3fn per_token", dynamic=True
)
"""W8A8 in FP8 E4M3 with a dynamic range for every token, as servers load it, also for experts: needs no calibration."""

W8A8_TRANSFORMERS = _preset(
    "W8A8_TRANSFORMERS", weight="int8 per_channel(0)", input="int8 per_token scale=float32:half_range", dynamic=True
)
"""W8A8 with the codes of transformers for the same files of compressed-tensors: scale amax / 127.5 of every token."""

W4A8_EXECUTORCH = _preset(
    "W4A8_EXECUTORCH",
    weight="int4 per_block(-1:32,pad) scale=bfloat16",
    input="int8 per_token asymmetric reciprocal",
    dynamic=True,
)
"""W4A8 of linear layers as in XNNPACK (8da4w): groups of 32 with bfloat16 scales, a dynamic range per token."""

NVFP4_FOUR_OVER_SIX = _four_bits("NVFP4_FOUR_OVER_SIX", _NVFP4.replace("@", ":four_over_six@"))
"""W4 in NVFP4 with 4 or 6 for the largest value of a block: activations stay in float, embeddings have 8 bits."""

BITNET = _preset("BITNET", weight="int2_narrow per_tensor scale=float32:mean", input="int8 per_token", dynamic=True)
"""BitNet b1.58: weights -1, 0 and 1 times their mean magnitude, activations of 8 bits per token; train with it."""

# GGUF's types for weights, activations in float, embeddings in Q8_0. A file holds rows of whole blocks only.
_GGUF_Q8_0 = "int8 per_block(-1:32,pad) scale=float16"


def _gguf(name: str, weight: str) -> Config:
    """The configuration of a GGUF type: `weight` for weights, Q8_0 for embeddings, floats for activations."""
    tables = replace(TABLES, weight=TensorConfig(_GGUF_Q8_0))
    return Config(f"GGUF_{name}", (Rule("*", weight=TensorConfig(weight)), tables, _MAX_POOLING_IN_FLOAT))


def _k_quant(name: str, codes: str, block: int, scales: str, *, offset: bool = False) -> Config:
    stored = f"{scales}@per_block(-1:{256 // block},pad)/float16"
    return _gguf(name, f"{codes} per_block(-1:{block},pad) scale={stored}" + f" offset={stored}" * offset)


GGUF_Q8_0 = _gguf("Q8_0", _GGUF_Q8_0)
"""8.5 bits per weight: 8-bit codes in blocks of 32."""
GGUF_Q4_0 = _gguf("Q4_0", "int4 per_block(-1:32,pad) scale=float16:signed")
"""4.5 bits per weight: 4-bit codes in blocks of 32; the value that is farthest from 0 has the code -8."""
GGUF_Q4_1 = _gguf("Q4_1", "uint4 per_block(-1:32,pad) scale=float16 offset=float16")
"""5 bits per weight: 4-bit codes in blocks of 32 with an offset."""
GGUF_Q5_0 = _gguf("Q5_0", "int5 per_block(-1:32,pad) scale=float16:signed")
"""5.5 bits per weight: 5-bit codes in blocks of 32; the value that is farthest from 0 has the code -16."""
GGUF_Q5_1 = _gguf("Q5_1", "uint5 per_block(-1:32,pad) scale=float16 offset=float16")
"""6 bits per weight: 5-bit codes in blocks of 32 with an offset."""
GGUF_Q2_K = _k_quant("Q2_K", "uint2", 16, "uint4", offset=True)
"""2.625 bits per weight: 2-bit codes in blocks of 16 with an offset."""
GGUF_Q3_K = _k_quant("Q3_K", "int3", 16, "int6")
"""3.4375 bits per weight: 3-bit codes in blocks of 16."""
GGUF_Q4_K = _k_quant("Q4_K", "uint4", 32, "uint6", offset=True)
"""4.5 bits per weight: 4-bit codes in blocks of 32 with an offset."""
GGUF_Q5_K = _k_quant("Q5_K", "uint5", 32, "uint6", offset=True)
"""5.5 bits per weight: 5-bit codes in blocks of 32 with an offset."""
GGUF_Q6_K = _k_quant("Q6_K", "int6", 16, "int8")
"""6.5625 bits per weight: 6-bit codes in blocks of 16."""
GGUF_IQ4_NL = _gguf("IQ4_NL", "iq4_nl per_block(-1:32,pad) scale=float16:signed")
"""4.5 bits per weight: codes for a table of 16 values, in blocks of 32."""
GGUF_IQ4_XS = _k_quant("IQ4_XS", "iq4_nl", 32, "int6")
"""4.25 bits per weight: codes for the table of IQ4_NL, in blocks of 32."""
GGUF_TQ1_0 = _gguf("TQ1_0", "int2_narrow per_block(-1:256,pad) scale=float16")
"""1.6875 bits per weight in a file: -1, 0 and 1 in blocks of 256; train with it."""
GGUF_TQ2_0 = _gguf("TQ2_0", "int2_narrow per_block(-1:256,pad) scale=float16")
"""2.0625 bits per weight: the same values as TQ1_0."""
GGUF_MXFP4 = _gguf("MXFP4", "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor")
"""4.25 bits per weight: FP4 in blocks of 32 with power-of-two scales."""

# Layouts of MLX for weights and embeddings alike, as mlx_lm.convert has them; activations in float. Scales and offsets
# are numbers of bfloat16, which files of any dtype hold.


def _mlx(name: str, weight: str) -> Config:
    tables = replace(TABLES, layers=("Embedding",), weight=TensorConfig(weight))
    return Config(f"MLX_{name}", (Rule("*", weight=TensorConfig(weight)), tables, _MAX_POOLING_IN_FLOAT))


MLX_4BIT = _mlx("4BIT", "uint4 per_block(-1:64,pad) scale=bfloat16 offset=bfloat16")
"""4.5 bits per weight: 4-bit codes in groups of 64 with an offset, mlx-lm's default."""
MLX_6BIT = _mlx("6BIT", "uint6 per_block(-1:64,pad) scale=bfloat16 offset=bfloat16")
"""6.5 bits per weight: 6-bit codes in groups of 64 with an offset."""
MLX_8BIT = _mlx("8BIT", "uint8 per_block(-1:64,pad) scale=bfloat16 offset=bfloat16")
"""8.5 bits per weight: 8-bit codes in groups of 64 with an offset."""
MLX_MXFP4 = _mlx("MXFP4", "float4_e2m1fn per_block(-1:32,pad) scale=float8_e8m0fnu:floor")
"""4.25 bits per weight: FP4 in groups of 32 with power-of-two scales."""
MLX_NVFP4 = _mlx("NVFP4", "float4_e2m1fn per_block(-1:16,pad) scale=float8_e4m3fn")
"""4.5 bits per weight: FP4 in groups of 16 with E4M3 scales, without a scale of the tensor."""


LLAMA_CPP_INPUTS = {
    32: TensorConfig("int8_narrow per_block(-1:32,pad) q8_0", dynamic=True),
    256: TensorConfig("int8_narrow per_block(-1:256,pad) q8_k", dynamic=True),
}
"""By the size of the blocks of a weight's type, how llama.cpp quantizes the inputs of products."""
LLAMA_CPP_CACHE = Rule(
    "*attn*", input=TensorConfig("float16 per_tensor scale=float8_e8m0fnu", dynamic=True), ops=("attention", "matmul")
)
"""A rule for llama.cpp's default cache: both factors of products with cached keys and values are rounded to float16.

Add the rule by `with_rule`, and give `prepare` an example. With `attn_implementation="eager"`, models of transformers
compute these products as functions; otherwise only queries, keys and values are rounded.
"""


def presets() -> dict[str, Config]:
    """For each name, the preset; mixtures such as `GGUF_Q4_K_M` (see `fakequant.delivery.mixture`) are not included.

    Nor are the GGUF presets whose names end in `_A8`: these also quantize the inputs of products as llama.cpp does.

    >>> sorted(presets())[:3]
    ['BITNET', 'FP8', 'FP8_BLOCK']
    """
    return {name: value for name, value in globals().items() if isinstance(value, Config)}


def with_llama_cpp_inputs(config: Config) -> Config:
    """A GGUF configuration that also quantizes inputs as llama.cpp does; `_A8` is added to its name."""
    rules = list[Rule]()
    for rule in config.rules:
        if rule.weight is None:
            rules.append(rule)
            continue
        # Inputs lie in blocks as those of the weight under one stored scale.
        spec = rule.weight.spec
        sizes = [dict(one.sizes)[-1] for one in (spec.granularity, spec.scale.granularity) if isinstance(one, PerBlock)]
        rules.append(replace(rule, input=LLAMA_CPP_INPUTS[prod(sizes)]))
    return Config(f"{config.name}_A8", tuple(rules))


def _register() -> None:
    NAMED.update(presets())  # by their names here: MXFP6 is another name of MXFP6_E2M3
    for config in presets().values():
        if config.name.startswith("GGUF_"):
            register_preset(with_llama_cpp_inputs(config))


_register()
