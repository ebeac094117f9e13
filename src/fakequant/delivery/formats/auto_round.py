"""AutoRound: the layouts of GPTQ and AWQ, which `packing_format` names. Source: AutoRound 0.16."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakequant.delivery.folder import CONFIG, Folder
from fakequant.delivery.formats.awq import Awq
from fakequant.delivery.formats.gptq import Gptq
from fakequant.delivery.layered import CodedWeight, LayeredFormat, LayerTensors

_METHODS = {"auto-round", "intel/auto-round"}
_GPTQ = {"auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_gptq": "gptq"}
"""What GPTQ calls a layout: AutoRound's first one has zero points as they are."""
_AWQ = "auto_round:auto_awq"


class AutoRound(LayeredFormat):
    """2 to 8 bits in groups of inputs, in the layouts of GPTQ and AWQ."""

    name = "auto-round"

    def recognizes(self, path: Path) -> bool:
        found = Folder(path).quantization if (path / CONFIG).is_file() else None
        return isinstance(found, dict) and found.get("quant_method") in _METHODS

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        given: dict[str, Any] = module.folder.quantization
        layout, kind = str(given.get("packing_format", "auto_round")), str(given.get("data_type", "int"))
        turned = next((key for key in given if "rotation" in key or "hadamard" in key if given[key]), None)
        if turned or kind != "int" or (given.get("act_bits") or 16) < 16 or not (layout in _GPTQ or layout == _AWQ):
            what = f"{turned} of inputs" if turned else f"{kind} in the layout {layout!r:.60}"
            module.refuse(f"weights have {what}; this reader knows int in {', '.join(_GPTQ)}, {_AWQ}, and float inputs")
        folder = copy(module.folder)
        folder.quantization = {
            **{key: given[key] for key in ("bits", "group_size", "sym") if key in given},
            "checkpoint_format": _GPTQ.get(layout),
            "dynamic": given.get("extra_config"),  # layers may have groups of their own
        }
        return (Awq() if layout == _AWQ else Gptq()).coded(replace(module, folder=folder))
