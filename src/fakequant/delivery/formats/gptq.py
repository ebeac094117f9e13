"""GPTQ, AWQ and AutoRound: integers in groups of inputs; a layer may permute its inputs first (`desc_act` of GPTQ).

Version 1 of GPTQ stores zero points minus one, modulo the number of codes; version 2 stores zero points unchanged. AWQ
has 4 bits, in the layout "gemm" of AutoAWQ. AutoRound uses the layouts of GPTQ and AWQ; `packing_format` names which.
Sources: AutoGPTQ, GPTQModel, compressed-tensors 0.20, AutoRound 0.16.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fakequant.delivery.folder import CONFIG, Folder
from fakequant.delivery.layered import FLOATS, CodedWeight, LayeredFormat, LayerTensors, Read, permutation
from fakequant.errors import warn_user
from fakequant.numerics.formats.packing import unpack
from fakequant.numerics.spec import QuantSpec

_VERSIONS = {"": 1, "gptq": 1, "gptq_v2": 0}
"""By layout, the number that is added to the stored zero points."""


class Gptq(LayeredFormat):
    """Integers of 2 to 8 bits in groups of inputs."""

    name = "gptq"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        if not module.has("qweight"):
            return None
        given, (rows, columns) = module.folder.quantization, module.shape
        layout = str(given.get("checkpoint_format") or "")
        if layout not in _VERSIONS:
            known = ", ".join(filter(None, _VERSIONS))
            module.refuse(f"codes are in the layout {layout!r:.40}; this reader knows {known}")
        words = module.tensors[f"{module.base}.qweight"].shape[0]
        bits = words * 32 // max(columns, 1)
        if bits not in range(2, 9):
            module.refuse(f"qweight has {words} words for {columns} inputs, which is not 2 to 8 bits for each")
        size = given.get("group_size", 128)
        if given.get("dynamic"):  # layers may have groups of their own, which the number of scales says
            scales = module.tensors.get(f"{module.base}.scales")
            count = 0 if scales is None or scales.dim() != 2 else scales.shape[0]
            size = -(-columns // count) if 0 < count <= columns else size
        groups, half = module.groups(size), 1 << bits - 1
        packed = module.get("qweight", torch.int32, (-(-columns * bits // 32), rows))
        scale = module.get("scales", FLOATS, (groups.count, rows))
        words_of_points = module.get("qzeros", torch.int32, (groups.count, -(-rows * bits // 32)))()
        points, add = unpack(words_of_points.contiguous().view(torch.uint8), bits, rows).T, _VERSIONS[layout]
        if given.get("sym") and bool((points + (1 - add) == half).all()):
            warn_user(
                f"{module.folder.path} says that its zero points have version {2 - add}, but sym implies version "
                f"{1 + add}, which is used to read them; correct checkpoint_format in its configuration"
            )
            add = 1 - add
        points = points + add & (1 << bits) - 1  # [out, groups]
        is_symmetric = bool(given.get("sym")) and bool((points == half).all())
        index = module.get("g_idx", torch.int32, (columns,))().long() if module.has("g_idx") else None
        order, granularity, of_groups = module.in_order(groups, index)
        format = f"{'' if is_symmetric else 'u'}int{bits}"
        spec = QuantSpec(format, granularity, symmetric=is_symmetric, scale=FLOATS[scale().dtype])

        def codes() -> Tensor:
            found = unpack(packed().T.contiguous().view(torch.uint8), bits, columns)[:, order]
            return (found - half).to(torch.int8) if is_symmetric else found.to(torch.uint8)

        return CodedWeight(
            spec,
            codes,
            lambda: scale().float().T[:, of_groups],
            None if is_symmetric else (lambda: points[:, of_groups].contiguous()),
            transform=permutation(order),
        )


_WORD, _BITS = 8, 4
"""The number of codes in an int32, and the bits of a code."""
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place in a word of each of its eight outputs."""


class Awq(LayeredFormat):
    """Integers of 4 bits in groups of inputs, with zero points."""

    name = "awq"

    def coded(self, module: LayerTensors) -> CodedWeight | None:
        if not module.has("qweight"):
            return None
        given = module.folder.quantization
        version, bits = str(given.get("version", "gemm")).lower(), given.get("bits", given.get("w_bit", _BITS))
        if version != "gemm" or bits != _BITS:
            module.refuse(f"codes have {bits!r:.20} bits in the layout {version!r:.20}; this reader knows 4 in 'gemm'")
        rows, columns = module.shape
        groups = module.groups(given.get("group_size", given.get("q_group_size", 128)))
        if rows % _WORD:
            module.refuse(f"a word holds the codes of {_WORD} outputs, but the weight has {rows} outputs")
        codes, scales = _outputs(module, "qweight", columns), module.get("scales", FLOATS, (groups.count, rows))
        points = _outputs(module, "qzeros", groups.count) if module.has("qzeros") else None
        signed = (lambda: codes().view(torch.int8) - 8) if points is None else codes
        spec = QuantSpec("uint4" if points else "int4", groups.granularity, scale=FLOATS[scales().dtype])
        return CodedWeight(spec, signed, lambda: scales().T, points)


def _outputs(module: LayerTensors, end: str, count: int) -> Read:
    """A function that reads words [count, out / 8] as integers [out, count]."""
    rows = module.shape[0]
    words = module.get(end, torch.int32, (count, rows // _WORD))

    def read() -> torch.Tensor:
        packed = unpack(words().contiguous().view(torch.uint8), _BITS, rows).to(torch.uint8)
        return packed.unflatten(-1, (-1, _WORD))[..., _PLACES].flatten(-2).T.contiguous()

    return read


_METHODS = {"auto-round", "intel/auto-round"}
_GPTQ = {"auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_gptq": "gptq"}
"""By AutoRound's name of a layout, GPTQ's name; the layout "auto_round" stores zero points unchanged."""
_AWQ = "auto_round:auto_awq"


class AutoRound(LayeredFormat):
    """Integers of 2 to 8 bits in groups of inputs, in the layouts of GPTQ and AWQ."""

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
