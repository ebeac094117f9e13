"""What the package compressed-tensors, and transformers with it, make of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.folder import Folder, by_transformers
from fakequant.delivery.format import Engine
from fakequant.delivery.schemes import PACKED, ROLES
from fakequant.model.state.snapshots import LazyTensor

Scheme = Mapping[str, Any]


def needs_dequantize(schemes: Sequence[Scheme], tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> bool:
    """Whether transformers loads the same weights only where it dequantizes them at once."""
    weights = [one for one in schemes if ROLES["weight"] in one]
    if any("scale_dtype" in one["weights"] for one in weights):
        return True
    if any(one["format"] == PACKED and not one["weights"]["symmetric"] for one in weights):
        return True
    scales = (name for name in tensors if name.endswith(".weight_scale"))
    return dtype is not torch.float32 and any(tensors[name].dtype is torch.float32 for name in scales)


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


def engine_of(path: Path, dtype: torch.dtype, groups: Sequence[Scheme]) -> Engine:
    """The model as transformers loads it."""
    import transformers

    coded = [one for one in groups if "weights" in one]
    name, options, note = f"transformers {transformers.__version__}", dict[str, Any](), ""
    if needs_dequantize(coded, Folder(path).tensors(), dtype):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        if len(coded) > 1:
            note = "dequantizes all layers by one scheme, and the file has several"
        elif ROLES["input"] in coded[0]:
            note = "leaves activations in float where it dequantizes at once"
        elif coded[0]["weights"]["strategy"] == "tensor_group":
            note = "decompresses NVFP4 in bfloat16"
    if note:
        return Engine(name, notes=[f"Outputs are not compared in {name}: it {note}."])
    loaded = by_transformers(path, dtype, **options)
    # It decompresses experts in bfloat16; of other models a conversion would round buffers that are float32.
    return Engine(name, model=loaded.to(dtype) if dtype is torch.float32 else loaded)
