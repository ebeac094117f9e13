"""AWQ's files: codes, zero points and values by an expression of numpy and by compressed-tensors' converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fakequant as fq
from fakequant.errors import CheckpointError
from tests.support.quantized_folders import (
    COLUMNS,
    GROUPS,
    ROWS,
    SIZE,
    awq,
    net,
    random_codes,
    read,
    write,
)


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    tensors, config, values = awq()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = read(write(tmp_path, tensors, config), net(dtype))
        assert torch.equal(model[0].weight, values.to(dtype))
    assert str(model[0].weight_quantizer.spec) == "uint4 per_block(-1:32) scale=float16"
    codes, points, scales = map(torch.from_numpy, random_codes(4, GROUPS))
    held = fq.snapshot(model).weights["0.weight"]
    assert torch.equal(held.codes, codes.to(torch.uint8))
    assert held.zero_point is not None
    assert torch.equal(held.zero_point, points.to(torch.int32))
    assert torch.equal(held.scale, scales.float())


def test_codes_are_those_of_another_reader(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    converter: Any = import_module("compressed_tensors.entrypoints.convert.converters.autoawq").AutoAWQConverter
    helpers: Any = import_module("compressed_tensors.compressors.pack_quantized.helpers")
    tensors, config, _ = awq()
    theirs = converter(group_size=SIZE).process({f"0.{end}": tensor for end, tensor in tensors.items()})
    held = fq.snapshot(read(write(tmp_path, tensors, config))).weights["0.weight"]
    codes = helpers.unpack_from_int32(theirs["0.weight_packed"], 4, torch.Size((ROWS, COLUMNS)))
    points = helpers.unpack_from_int32(theirs["0.weight_zero_point"], 4, torch.Size((ROWS, GROUPS)), packed_dim=0)
    assert torch.equal(held.codes.to(torch.int8) - 8, codes)
    assert held.zero_point is not None
    assert torch.equal(held.zero_point - 8, points.to(torch.int32))
    assert torch.equal(held.scale, theirs["0.weight_scale"].float())


def test_without_zero_points_codes_are_signed(tmp_path: Path) -> None:
    tensors, config, _ = awq(zero_point=False)
    del tensors["qzeros"]
    model = read(write(tmp_path, tensors, config))
    codes, _, scales = random_codes(4, GROUPS)
    assert str(model[0].weight_quantizer.spec) == "int4 per_block(-1:32) scale=float16"
    values = np.repeat(scales, SIZE, 1).astype(np.float32) * (codes - 8).astype(np.float32)
    assert torch.equal(model[0].weight, torch.from_numpy(values))


def test_one_group(tmp_path: Path) -> None:
    tensors, config, _ = awq(group_size=-1)
    tensors |= {key: tensors[key][:1] for key in ("scales", "qzeros")}
    model = read(write(tmp_path, tensors, config))
    codes, points, scales = random_codes(4, GROUPS)
    values = scales[:, :1].astype(np.float32) * (codes - points[:, :1]).astype(np.float32)
    assert torch.equal(model[0].weight, torch.from_numpy(values))


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], Any], str]] = {
    "bits": (lambda tensors, config: config.update(bits=3), "3 bits in the layout 'gemm'"),
    "layout": (lambda tensors, config: config.update(version="gemv"), "4 bits in the layout 'gemv'"),
    "cut": (lambda tensors, config: tensors.update(qweight=tensors["qweight"][1:]), r"qweight is .*\[95, 8\], not"),
    "swapped": (lambda tensors, config: tensors.update(qweight=tensors["qzeros"]), r"qweight is .*\[3, 8\], not"),
    "no scales": (lambda tensors, config: tensors.pop("scales"), "lacks 0.scales"),
    "groups": (lambda tensors, config: config.update(group_size=48), r"not .* of \[2, 64\]"),
    "scales": (lambda tensors, config: tensors["scales"].fill_(torch.inf), "scale"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    tensors, config, _ = awq()
    damage(tensors, config)
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, tensors, config))


def test_a_folder_of_2023(tmp_path: Path) -> None:
    tensors, _, values = awq()
    path = write(tmp_path, tensors, {})
    own = {"zero_point": True, "q_group_size": SIZE, "w_bit": 4, "version": "GEMM"}
    (path / "quant_config.json").write_text(json.dumps(own))
    assert torch.equal(read(path)[0].weight, values)
