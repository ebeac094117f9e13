"""AutoRound's folders: the layouts of GPTQ and AWQ by its names, from the bytes of its packer where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant.errors import CheckpointError
from tests.support.quantized_folders import COLUMNS, GROUPS, ROWS, SIZE, awq, gptq, random_codes, read, write

CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": SIZE, "sym": False, "data_type": "int"}


@pytest.mark.parametrize(
    ("layout", "version"), [("auto_round:auto_gptq", 1), ("auto_round:gptqmodel", 2), ("auto_round", 2)]
)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_layout_of_gptq(layout: str, version: int, method: str, bits: int, tmp_path: Path) -> None:
    tensors, _, values = gptq(bits, version)
    del tensors["g_idx"]
    config = {**CONFIG, "quant_method": method, "packing_format": layout, "bits": bits}
    model = read(write(tmp_path, tensors, config))
    assert torch.equal(model[0].weight, values)
    assert str(model[0].weight_quantizer.spec) == f"uint{bits} per_block(-1:32) scale=float16"


def test_the_layout_of_awq(tmp_path: Path) -> None:
    tensors, _, values = awq()
    model = read(write(tmp_path, tensors, {**CONFIG, "packing_format": "auto_round:auto_awq"}))
    assert torch.equal(model[0].weight, values)


def test_layers_have_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    tensors, _, values = gptq(8, 1)
    extra = {"0": {"bits": 8, "group_size": SIZE}}
    config = {**CONFIG, "group_size": 128, "packing_format": "auto_round:auto_gptq", "extra_config": extra}
    assert torch.equal(read(write(tmp_path, tensors, config))[0].weight, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, "weights have int in the layout 'auto_round:fp8_static'"),
        ({"packing_format": "auto_round:llm_compressor", "data_type": "nv_fp"}, "weights have nv_fp in the layout"),
        ({"act_bits": 8}, "float inputs"),
        ({"rotation_config": {"kind": "hadamard"}}, "weights have rotation_config of inputs"),
        ({"packing_format": "auto_round:auto_awq", "bits": 2}, "codes have 2 bits"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_others_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors, _, _ = awq() if "awq" in str(change) else gptq(4, 1)
    with pytest.raises(CheckpointError, match=message):
        read(write(tmp_path, tensors, {**CONFIG, "packing_format": "auto_round:auto_gptq", **change}))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("layout", ["auto_round", "auto_round:auto_gptq"])
def test_bytes_of_its_packer(layout: str, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("auto_round", reason="AutoRound is not installed")
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing

    codes, points, scales = random_codes(bits, GROUPS)
    points = np.maximum(points, 1)  # its layout of GPTQ has no 0
    wide, zero = (np.repeat(one, SIZE, 1).astype(np.float32) for one in (scales, points))
    layer = nn.Linear(COLUMNS, ROWS)
    layer.weight.data = torch.from_numpy(wide * (codes - zero).astype(np.float32))
    packed = dynamic_import_quant_linear_for_packing(layout, bits, SIZE, False)(bits, SIZE, COLUMNS, ROWS, bias=True)
    packed.device = "cpu"  # as its `pack_layer` sets it
    packed.pack(layer, torch.from_numpy(scales), torch.from_numpy(points), None, device="cpu")
    tensors = {name: tensor for name, tensor in packed.state_dict().items() if name != "bias"}
    model = read(write(tmp_path, tensors, {**CONFIG, "packing_format": layout, "bits": bits}))
    assert torch.equal(fq.snapshot(model).weights["0.weight"].codes, torch.from_numpy(codes).to(torch.uint8))
    assert torch.equal(model[0].weight, layer.weight)
