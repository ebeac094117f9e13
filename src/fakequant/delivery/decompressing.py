"""What the package compressed-tensors, and transformers with it, make of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant.delivery.folder import Folder, by_transformers
from fakequant.delivery.format import Engine
from fakequant.delivery.schemes import PACKED, ROLES
from fakequant.model.state.snapshots import LazyTensor
from fakequant.nn.quantizer import Quantizer, quantizers
from fakequant.numerics.scales import ScaleRounding, ScaleSpec
from fakequant.numerics.spec import Arithmetic
from fakequant.restore import attributes_of, restore_after

Scheme = Mapping[str, Any]
OTHER_RULE = (
    "the scale of dynamic INT8 is amax / 127.5 there, as in the preset W8A8_TRANSFORMERS, and amax / 127 in vLLM and "
    "W8A8_DYNAMIC"
)


def needs_dequantize(schemes: Sequence[Scheme], tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> bool:
    """Whether transformers loads the same weights only where it dequantizes them at once."""
    weights = [one for one in schemes if ROLES["weight"] in one]
    if dtype is not torch.bfloat16 and any(map(_is_decompressed_in_bfloat16, weights)):
        return True
    if any(one["format"] == PACKED and not one["weights"]["symmetric"] for one in weights):
        return True
    scales = (name for name in tensors if name.endswith(".weight_scale"))
    return dtype is not torch.float32 and any(tensors[name].dtype is torch.float32 for name in scales)


def _is_decompressed_in_bfloat16(scheme: Scheme) -> bool:
    """Whether the package has a weight in bfloat16 for models of any dtype; under powers of two it is exact."""
    return "scale_dtype" in scheme["weights"]


def _has_scales_of_inputs(scheme: Scheme) -> bool:
    """Whether a program chooses scales of inputs that are no powers of two."""
    args = scheme.get(ROLES["input"], {})
    return bool(args.get("dynamic")) and "scale_dtype" not in args


def runs_in_bfloat16(schemes: Sequence[Scheme]) -> bool:
    """Whether transformers quantizes inputs, and multiplies them by weights in bfloat16."""
    weights = [one for one in schemes if ROLES["weight"] in one]
    return any(ROLES["input"] in one for one in weights) and all(map(_is_decompressed_in_bfloat16, weights))


def how_to_load(schemes: Sequence[Scheme], tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> str:
    """The conditions under which transformers has the same weights, for a message; "" if always."""
    if not needs_dequantize(schemes, tensors, dtype):
        return ""
    if runs_in_bfloat16(schemes):
        return "in bfloat16, which the model is not; with dequantize=True it leaves inputs in float"
    if len(schemes) > 1:
        return "in part: it needs dequantize=True, and takes the scheme of one layer for all of them then"
    return "with dequantize=True in its CompressedTensorsConfig: else it fails on zero points, or rounds scales"


def decompressed(scheme: Scheme, tensors: Mapping[str, Tensor], bases: Sequence[str]) -> dict[str, Tensor]:
    """The values of a weight by the package compressed-tensors, by their names in files."""
    # Packages of the extra `delivery`, which type checkers need not have.
    compressor: Any = import_module("compressed_tensors.compressors").BaseCompressor
    scheme_class: Any = import_module("compressed_tensors.quantization").QuantizationScheme
    found = {}
    for base in bases:
        own = {name.rpartition(".")[2]: tensors[name] for name in tensors if name.rpartition(".")[0] == base}
        decompress = compressor.get_value_from_registry(scheme["format"]).decompress
        found[f"{base}.weight"] = decompress(own, scheme_class.model_validate(scheme))["weight"]
    return found


@contextmanager
def computed_by_transformers(model: nn.Module) -> Iterator[None]:
    """The model with dynamic INT8 by the rule of transformers in place of the rule of servers."""
    held = _computed_by_servers(model)
    rule = ScaleSpec(None, ScaleRounding.HALF_RANGE)
    with restore_after(attributes_of(held, "spec")):
        for one in held:
            one.spec = one.spec.replace(arithmetic=Arithmetic.DIVIDE, scale=rule)
        yield


def engine_of(path: Path, model: nn.Module, groups: Sequence[Scheme], missed: str = "") -> Engine:
    """The model as transformers loads it.

    Args:
        path: of the folder.
        model: that was delivered.
        groups: the schemes of the folder.
        missed: why it leaves keys and values in float; "" if it does not.
    """
    import transformers

    dtype = next(model.parameters()).dtype
    coded = [one for one in groups if "weights" in one]
    name, options, note = f"transformers {transformers.__version__}", dict[str, Any](), ""
    if any(one["weights"]["strategy"] == "tensor_group" for one in coded):
        note = "decompresses NVFP4 in bfloat16"
    elif needs_dequantize(coded, Folder(path).tensors(), dtype) and not runs_in_bfloat16(coded):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        if len(coded) > 1:
            note = "dequantizes all layers by one scheme, and the file has several"
        elif ROLES["input"] in coded[0]:
            note = "leaves activations in float where it dequantizes at once"
    elif dtype is not torch.float32 and any(map(_has_scales_of_inputs, coded)):
        note = f"rounds scales of dynamic inputs to {dtype}"
    if note or missed:
        return Engine(name, notes=[f"Outputs are not compared in {name}: it {note}." if note else missed])
    loaded: Any = by_transformers(path, dtype, **options)
    if runs_in_bfloat16(coded):  # which the first call would do, and which other dtypes need before
        loaded.hf_quantizer.compressor.decompress_model(loaded)
    # It decompresses experts in bfloat16; of other models a conversion would round buffers that are float32.
    loaded = loaded.to(dtype) if dtype is torch.float32 else loaded
    is_of_servers = bool(_computed_by_servers(model))
    notes = [f"Outputs of {name} are compared by its rule: {OTHER_RULE}."] if is_of_servers else []
    return Engine(name, model=loaded, as_it=computed_by_transformers, notes=notes)


def _computed_by_servers(model: nn.Module) -> list[Quantizer]:
    """The quantizers with the rule of servers for dynamic INT8."""
    return [one for one in quantizers(model).values() if one.dynamic and one.spec.arithmetic is Arithmetic.RECIPROCAL]
